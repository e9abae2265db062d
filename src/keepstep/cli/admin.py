"""`keepstep admin`: what is asked before anything happens, who may ask, and what is handed over."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep import codec, policy_file
from keepstep.cli import backup, certs, common_options, doctor, handover, policy_view, tokens
from keepstep.cli.client import from_environment
from keepstep.cli.show import only_job, painter, show


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    admin = commands.add_parser(
        "admin", help="doctor, backups, policies, certificates, tokens, signed exports"
    )
    groups = admin.add_subparsers(title="groups", metavar="GROUP", required=True)
    certs.add(groups)
    tokens.add(groups)
    policy = groups.add_parser("policy", help="what is to be done about faults")
    verbs = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    told = verbs.add_parser("show", help="every setting with its value and its reason, as TOML")
    told.add_argument("--policy", type=Path, metavar="TOML", help="default: the defaults")
    told.add_argument("--job", default="", metavar="NAME", help="as this job would have it")
    told.add_argument("-o", "--output", choices=("text", "json"), default="text")
    told.set_defaults(run=run_show)
    check = verbs.add_parser(
        "check", help="a job's policy, its budgets now, and what a fault would lead to"
    )
    check.add_argument("--job", default="", help="default: the only one that runs")
    check.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="rank:2, node:n3, domain:NAME or drain:n3; may be given several times "
        "(default: rank 0 dies, and its node is lost)",
    )
    common_options(check)
    check.set_defaults(run=run_check)
    handover.add(groups)
    doctor.add(groups)
    backup.add(groups)


def run_show(asked: argparse.Namespace) -> int:
    policy = policy_file.read(asked.policy, asked.job)
    if asked.output == "json":
        print(codec.dumps(codec.to_plain(policy)).decode())
    else:
        print(policy_file.explain(policy))
    return 0


def run_check(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    job = asked.job or only_job(client.cluster())
    answer = client.policy(job, asked.fault)
    show(asked, answer, policy_view.lines(answer, painter()))
    return 0
