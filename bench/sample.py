"""The sample report: a campaign, its account, the customer's check, and forgeries of it.

    python -m bench.sample --faults 60 --seed 5

Runs `keepstep lab chaos`, exports the job's chain, checks it with the verifier alone, writes
docs/sample-report.html, and tries 1,000 forgeries of the export (bench/tamper.py). Sixty faults
take about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import record

VERIFIER = record.ROOT / "src" / "keepstep" / "ledger" / "verify.py"
REPORT = record.ROOT / "docs" / "sample-report.html"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, help="of a campaign that was run already")
    parser.add_argument("--forgeries", type=int, default=1000)
    asked = parser.parse_args()
    run = asked.run_dir
    if run is None:
        run = Path(tempfile.mkdtemp(prefix="keepstep-sample-"))
        name = f"chaos-sample-{asked.faults}-seed-{asked.seed}.json.gz"
        options = ["--faults", str(asked.faults), "--seed", str(asked.seed)]
        options += ["--run-dir", str(run), "--out", str(record.RESULTS / name)]
        _must("lab", "chaos", *options)
    export, steps = run / "export.jsonl", run / "state" / "steps.jsonl"
    _must("admin", "export", "--run-dir", str(run), "--out", str(export))
    key = _must("admin", "keys", "--run-dir", str(run)).strip()
    print(_run([sys.executable, "-I", str(VERIFIER), str(export), str(steps), "--key", key]))
    _must("report", "--run-dir", str(run), "-o", "html", "--out", str(REPORT))
    print(f"written: {REPORT.relative_to(record.ROOT)}")
    forge = [sys.executable, "-m", "bench.tamper", "--count", str(asked.forgeries)]
    forge += [
        "--export",
        str(export),
        "--steps",
        str(steps),
        "--key-file",
        str(run / "account.key"),
    ]
    print(_run(forge))
    return 0


def _must(*arguments: str) -> str:
    return _run([sys.executable, "-m", "keepstep.cli", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command[:6])} … ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
