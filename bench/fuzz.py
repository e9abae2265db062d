"""A million hostile inputs for the decoders, and generated requests for the whole HTTP interface.

    python -m bench.fuzz [--inputs 1000000] [--examples 60] [--seed 1]

The first part feeds bent messages, frames, journal events and HTTP heads to what reads them
(bench/fuzz_wire.py). The second asks a real orchestrator by every caller, through schemathesis
(bench/fuzz_http.py). Exit 1 if anything crashed, answered 5xx, had an effect without the right, or
showed one project to another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import fuzz_http, fuzz_wire, record


def main() -> int:
    args = options()
    print(f"seed {args.seed}; machine {record.machine()}")
    began = time.monotonic()
    decoders = fuzz_wire.attack(args.seed, 0, args.inputs)
    decoders["seconds"] = round(time.monotonic() - began, 1)
    show_decoders(decoders)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-fuzz") as directory:
        web = fuzz_http.attack(Path(directory), examples=args.examples, seed=args.seed)
    web["seconds"] = round(time.monotonic() - began, 1)
    print(f"HTTP: {web['requests']} requests in {web['seconds']} s: {json.dumps(web['statuses'])}")
    wrong = [*decoders["crashes"], *web["failures"]]
    for one in wrong[:20]:
        print(f"WRONG: {json.dumps(one)}")
    path = record.keep("fuzz", {"options": vars(args), "decoders": decoders, "http": web})
    print(f"raw results: {path}")
    return 1 if wrong else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for the decoders")
    parser.add_argument("--examples", type=int, default=60, help="per operation, kind and caller")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def show_decoders(decoders: dict[str, Any]) -> None:
    for name, outcomes in decoders["outcomes"].items():
        refused, crashed = outcomes.get("refused", 0), outcomes.get("crash", 0)
        total = sum(outcomes.values())
        print(f"{name}: {total} inputs, {refused} refused, {crashed} crashes")
    print(f"slowest {decoders['slowest_seconds']:.3f} s; {decoders['seconds']} s in all")


if __name__ == "__main__":
    sys.exit(main())
