"""Keepstep, TorchFT and checkpoint-restart side by side, under the same faults.

    python -m bench run single_kill kills --arms bare,keepstep,torchft
    python -m bench run kills --arms checkpoint_restart:sync@5,keepstep --workload fsdp
    python -m bench compare A.json.gz B.json.gz
    python -m bench matrix [--list]
    python -m bench table [FILE…] [--write README.md --write docs/side-by-side.md]
    python -m bench page FILE

See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import agreement, campaign, documents, page, readme, record, scenario, tables
from bench.plan import BATCH, SECONDS, SEED
from keepstep.errors import KeepstepError


def main() -> int:
    args = options()
    try:
        return int(args.act(args))
    except (KeepstepError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run scenarios on arms")
    run.add_argument("scenarios", nargs="+", metavar="SCENARIO", help=", ".join(scenario.names()))
    run.add_argument("--arms", default=campaign.ARMS, help="commas; NAME or NAME:VARIANT")
    run.add_argument("--workload", default="ddp", help="commas; ddp, fsdp, hsdp, zero1")
    run.add_argument("--size", default="3m", help="3m, 10m or 100m parameters")
    _common(run)
    run.set_defaults(act=campaign.run)

    matrix = commands.add_parser("matrix", help="everything: a few hours")
    matrix.add_argument("--list", action="store_true", help="what it would run, and how long")
    _common(matrix)
    matrix.set_defaults(act=campaign.matrix)

    compare = commands.add_parser("compare", help="do two machines say the same?")
    several = "a raw result, or several with commas between them"
    compare.add_argument("first", type=_files, help=several)
    compare.add_argument("second", type=_files, help=several)
    compare.set_defaults(act=_compare)

    table = commands.add_parser("table", help="tables out of raw results")
    table.add_argument(
        "files", nargs="*", type=Path, help="default: every raw result that is fit for it"
    )
    documents.add_option(
        table, "put those that its mark asks for between its marks; may be repeated"
    )
    table.set_defaults(act=_table)

    again = commands.add_parser("page", help="the HTML page of a raw result")
    again.add_argument("file", type=Path)
    again.set_defaults(act=_page)
    return parser.parse_args()


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=0, help="default: 3; 1 if short")
    parser.add_argument("--again", type=int, default=campaign.AGAIN, help="for disturbed runs")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help=f"fault-free; default: {SECONDS:g}"
    )
    parser.add_argument("--short", action="store_true", help="about 25 s a run: a try-out")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"default: {BATCH} per rank")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and data")
    parser.add_argument("--hostfile", type=Path, help="NAME [slots=N] per line; over ssh")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs' logs here")


def _compare(args: argparse.Namespace) -> int:
    first, second = ([record.read(path) for path in paths] for paths in (args.first, args.second))
    agreement.need_same_ground([*first, *second])
    disturbed = [sum(g.runs - g.quiet for g in tables.groups(side)) for side in (first, second)]
    if any(disturbed):
        print(f"disturbed runs, whose times are left out: {disturbed[0]} and {disturbed[1]}")
    sides = agreement.side_of(first), agreement.side_of(second)
    found = agreement.verdict(*sides, one_machine=agreement.one_machine(first, second))
    print("\n".join(found.lines))
    return found.code


def _files(text: str) -> list[Path]:
    return [Path(name) for name in text.split(",")]


def _table(args: argparse.Namespace) -> int:
    kept = {path: record.read(path) for path in args.files} or fit_results()
    results = list(kept.values())
    if not args.write:
        print(tables.terminal(tables.apart(results)))
    names = [f"bench/results/{path.name}" for path in kept]
    documents.write(
        args.write,
        readme.MARKS,
        lambda text: readme.markdown(results, names, readme.scenarios_of(text)),
    )
    return 0


def fit_results() -> dict[Path, dict[str, Any]]:
    shipped = scenario.shipped()
    return record.fit(("run-", "matrix-"), lambda result: readme.why_unfit(result, shipped))


def _page(args: argparse.Namespace) -> int:
    out = campaign.page_of(args.file)
    out.write_text(page.page(record.read(args.file), args.file.name), encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
