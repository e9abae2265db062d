"""The test of the tests: with any one protection switched off, a campaign must fail.

    python -m bench.sabotage [--only rng,vote] [--faults 4] [--seed 5]

Each protection is taken away from a job that has it, under the faults that it is there for, and the
campaign has to notice by what it is about: the end is not bit-exact, or a fault ended otherwise
than it should. A campaign that could not strike at all (nobody reached the place) proves nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import record
from keepstep import sabotage

PARALLEL = {"fsdp-reset": "fsdp", "vote": "fsdp", "mirror": "fsdp", "phase": "zero1"}
FAULTS = {"vote": 8, "phase": 8}
"""More where only some windows of a kind can tell."""
CAMPAIGN_SECONDS_MAX = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.sabotage", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default=",".join(sabotage.NAMES), help="protections, by name")
    parser.add_argument("--faults", type=int, default=4, help="per campaign, at least")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    runs = []
    for name in args.only.split(","):
        found = campaign(name, max(args.faults, FAULTS.get(name, 0)), args.seed)
        runs.append(found)
        verdict = "noticed" if found["noticed"] else "NOT NOTICED"
        print(f"{name:10} {found['parallel']:5} {verdict}: {found['how']}", flush=True)
    path = record.keep("sabotage", {"seed": args.seed, "campaigns": runs})
    print(f"raw results: {path}")
    noticed = sum(run["noticed"] for run in runs)
    print(f"{noticed} of {len(runs)} protections are missed when they are off")
    return 0 if noticed == len(runs) else 1


def campaign(name: str, faults: int, seed: int) -> dict[str, Any]:
    """One protection off. What the campaign made of it."""
    parallel = PARALLEL.get(name, "ddp")
    with tempfile.TemporaryDirectory(prefix="ks-sabotage-") as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, "-m", "keepstep.cli", "lab", "chaos", "--faults", str(faults)]
        command += ["--seed", str(seed), "--sabotage", name, "--parallel", parallel]
        command += ["--out", str(out), "--run-dir", str(Path(directory) / "run")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CAMPAIGN_SECONDS_MAX, check=False
        )
        told = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    how = noticed_by(told)
    kept = {key: told.get(key) for key in ("faults", "verdict", "last_line")}
    return {
        "protection": name,
        "parallel": parallel,
        "exit_code": done.returncode,
        "noticed": done.returncode == 1 and bool(how),
        "how": how or (done.stderr or done.stdout)[-500:],
        **kept,
    }


def noticed_by(told: dict[str, Any]) -> str:
    """What differed, in words; empty if nothing did, or nothing that says something."""
    differences = told.get("verdict", {}).get("differences", [])
    wrong = [
        f"{fault['kind']}/{fault['window']}: expected {fault['expected']}, {fault['why']}"
        for fault in told.get("faults", [])
        if not fault["as_expected"] and "reached" not in fault["why"]
    ]
    said = [f"not bit-exact: {differences[0]}"] if differences else []
    said += [f"{count} x {text}" for text, count in collections.Counter(wrong).items()]
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
