"""A million hostile inputs for the wire's decoder, and generated requests for the whole HTTP API.

    python -m bench.fuzz [--inputs 1250000] [--stories 5000] [--examples 20] [--seed 1]
                         [--part decoders|brain|http]

The first part feeds bent messages, frames, journal events and HTTP heads to what reads them
(bench/fuzz_wire.py); of its inputs four in five go to the wire's decoder. The second is a node that
was broken into and says well-formed lies about others (bench/fuzz_brain.py). The third asks a real
orchestrator by every caller, through schemathesis (bench/fuzz_http.py). Exit 1 if anything crashed,
answered 5xx, had an effect without the right, or showed one project to another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import fuzz_brain, fuzz_http, fuzz_wire, record


def main() -> int:
    args = options()
    print(f"seed {args.seed}; machine {record.machine()}")
    parts = {"decoders": decoders, "brain": lies, "http": requests}
    return max(parts[name](args) for name in parts if args.part in (name, "all"))


def decoders(args: argparse.Namespace) -> int:
    began = time.monotonic()
    found = fuzz_wire.attack(args.seed, 0, args.inputs)
    found["seconds"] = round(time.monotonic() - began, 1)
    for name, outcomes in found["outcomes"].items():
        refused, crashed = outcomes.get("refused", 0), outcomes.get("crash", 0)
        total = sum(outcomes.values())
        print(f"{name}: {total} inputs, {refused} refused, {crashed} crashes")
    print(f"slowest {found['slowest_seconds']:.3f} s of CPU; {found['seconds']} s in all")
    return conclude("fuzz-decoders", args, found, found["crashes"])


def lies(args: argparse.Namespace) -> int:
    began = time.monotonic()
    found = fuzz_brain.attack(args.seed, 0, args.stories)
    found["seconds"] = round(time.monotonic() - began, 1)
    told = ", ".join(f"{count} {what}" for what, count in found["outcomes"].items())
    print(f"{args.stories} stories of a hostile node: {told}; {found['seconds']} s")
    return conclude("fuzz-brain", args, found, found["crashes"])


def requests(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-fuzz") as directory:
        found = fuzz_http.attack(Path(directory), examples=args.examples, seed=args.seed)
    found["seconds"] = round(time.monotonic() - began, 1)
    print(f"{found['requests']} requests in {found['seconds']} s: {json.dumps(found['statuses'])}")
    return conclude("fuzz-http", args, found, found["failures"])


def conclude(
    name: str, args: argparse.Namespace, found: dict[str, Any], wrong: list[dict[str, Any]]
) -> int:
    for one in wrong[:20]:
        print(f"WRONG: {json.dumps(one)}")
    print(f"raw results: {record.keep(name, {'options': vars(args), **found})}")
    return 1 if wrong else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--inputs", type=int, default=1_250_000, help="for all decoders")
    parser.add_argument("--stories", type=int, default=5_000, help="of a hostile node")
    parser.add_argument("--examples", type=int, default=20, help="per operation, kind and caller")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=("decoders", "brain", "http", "all"), default="all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
