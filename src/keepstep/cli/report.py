"""`keepstep report` and `keepstep verify`: a job's account, and its proof."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from keepstep.cli.fit import columns, fit, table
from keepstep.cli.moves import seconds_of
from keepstep.cli.sources import Source, add_source, find
from keepstep.errors import ConfigError, Permanent
from keepstep.ledger import cost, guarantee, report, verify, webpage
from keepstep.ledger.account import Account, Saved, account, against_restart

FORMATS = ("text", "json", "markdown", "html")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = commands.add_parser(
        "report",
        help="a job's account: goodput, every pause, the guarantee",
        description="Reckons a job's account from its chain and its step log: where the time "
        "went, every incident, the guarantee, and what checkpoint and restart would have cost.",
    )
    add_source(told)
    option = told.add_argument
    option("--terms", type=Path, metavar="TOML", help="of the guarantee (default: the defaults)")
    option("--price", type=float, default=3.0, metavar="X", help="device-hour (default 3)")
    option("--checkpoint-interval", default="1h", metavar="TIME", help="default 1h")
    option("--replacement", default="10m", metavar="TIME", help="of a node (default 10m)")
    option("--restore", default="5m", metavar="TIME", help="of a checkpoint (default 5m)")
    option("--startup", default="5m", metavar="TIME", help="of the job (default 5m)")
    option("--peak-flops", type=float, default=0.0, metavar="X", help="of a device, for MFU")
    option("-o", "--output", choices=FORMATS, default="text", help="default: text")
    option("--out", type=Path, metavar="FILE", help="default: standard output")
    told.set_defaults(run=run_report)
    check = commands.add_parser(
        "verify",
        help="check a job's exported chain against its step log",
        description="Checks an exported chain (`keepstep admin export`) against the job's own step "
        "log: links, signature, quoted heads, counts; then reckons the guarantee's rate anew. "
        "The same file runs without Keepstep: python verify.py EXPORT STEPS.",
    )
    check.add_argument("export", help="from `keepstep admin export`")
    check.add_argument("steps", help="the job's steps.jsonl")
    check.add_argument("--key", default="", metavar="HEX", help="who must have signed")
    check.add_argument("--unsigned", action="store_true", help="good without a key or a head too")
    check.add_argument("--terms", default="", metavar="TOML", help="with its .sig beside it")
    check.add_argument("-o", "--output", choices=("text", "json"), default="text")
    check.set_defaults(run=run_verify)


def run_verify(asked: argparse.Namespace) -> int:
    arguments = [asked.export, asked.steps]
    arguments += ["--key", asked.key] if asked.key else []
    arguments += ["--unsigned"] if asked.unsigned else []
    arguments += ["--terms", asked.terms] if asked.terms else []
    arguments += ["--json"] if asked.output == "json" else []
    return verify.main(arguments)


def run_report(asked: argparse.Namespace) -> int:
    source = find(asked)
    terms, digest = guarantee.load(asked.terms) if asked.terms else (verify.Terms(), "")
    found = reckon(source, terms, asked.peak_flops)
    if digest and guarantee.named(source.chain) != digest:
        print("keepstep: the job was not submitted under these terms", file=sys.stderr)
    saved = against_restart(found, _setting(asked, found))
    text = _rendered(asked, found, saved)
    if asked.out is None:
        print(text)
    else:
        try:
            asked.out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {asked.out}: {error.strerror}") from error
    return 0


def reckon(source: Source, terms: verify.Terms, peak_flops: float = 0.0) -> Account:
    try:
        return account(source.chain, source.steps, terms, peak_flops=peak_flops)
    except (verify.Broken, *verify.WRONG) as error:
        raise Permanent(f"the chain or the step log is not as it was written: {error!r}") from error


def _setting(asked: argparse.Namespace, found: Account) -> cost.Setting:
    if asked.price < 0:
        raise ConfigError("--price must not be below 0")
    return cost.Setting(
        gpus=found.world,
        price=asked.price,
        mttf=found.mttf_seconds or 1.0,
        interval=seconds_of(asked.checkpoint_interval),
        replacement=seconds_of(asked.replacement),
        restore=seconds_of(asked.restore),
        startup=seconds_of(asked.startup),
        save=0.0,
        pause=found.rto.mean,
        live=found.guarantee.rate,
        node_gpus=1,
        repair=0.0,
        enough=0.0,
    )


def _rendered(asked: argparse.Namespace, found: Account, saved: Saved) -> str:
    match asked.output:
        case "json":
            return json.dumps({**found.to_plain(), "against_restart": asdict(saved)}, indent=1)
        case "markdown":
            return report.markdown(found, saved)
        case "html":
            return webpage.page(found, saved)
        case _:
            return "\n".join(fit(lines(found, saved), columns()))


def lines(found: Account, saved: Saved) -> Iterator[str]:
    """The account on a terminal."""
    yield report.title(found)
    yield ""
    yield from report.sentences(found, saved)
    yield from (f"note: {note}" for note in found.notes)
    yield ""
    rows = [
        [name, f"{seconds:,.1f}", f"{share:.1%}"]
        for name, seconds, share in report.class_rows(found)
    ]
    rows.append(["sum", f"{found.total / 1e9:,.1f}", ""])
    yield from table(["WHERE THE TIME WENT", "RANK-SECONDS", "SHARE"], rows)
    yield ""
    spreads = [
        report.spread_row("RTO", found.rto, "s"),
        report.spread_row("RPO, steps", found.rpo, ""),
    ]
    yield from table(["PER FAILURE", "P50", "P95", "MEAN", "MAX"], spreads)
    if found.incidents:
        yield ""
        yield from table(report.INCIDENT_HEADS, [*map(report.incident_row, found.incidents)])
    yield ""
    declared = found.guarantee.declared
    listed = ", ".join(
        f"{report.plain(name)} {seconds:.1f} s" for name, seconds in declared.items()
    )
    yield f"declared pauses: {listed or 'none'}"
