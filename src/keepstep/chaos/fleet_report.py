"""What a simulated month comes to: figures for programs, lines for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.chaos.fleet_checks import Referee
from keepstep.chaos.fleet_compare import PUBLISHED, checkpoint_restart, paused
from keepstep.chaos.fleet_faults import Tally
from keepstep.chaos.fleet_jobs import Trainee
from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.chaos.fleet_leader import Leader
from keepstep.chaos.fleet_setting import GPUS_PER_NODE, Plan
from keepstep.model import JobId


class Told(Protocol):
    """What a report needs of a month."""

    plan: Plan
    referee: Referee
    tally: Tally
    leader: Leader | None
    jobs: dict[JobId, Trainee]
    journal: MemoryJournal
    useful: dict[JobId, float]
    """Seconds of useful training, by job, in the month."""
    spent: dict[JobId, dict[str, float]]
    now: float
    messages: int
    refused: int


@dataclass(slots=True)
class Month:
    """How one seed ended."""

    plan: Plan
    jobs: int = 0
    largest: int = 0
    spares: int = 0
    failures: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    control: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    pause_p50: float = 0.0
    pause_p95: float = 0.0
    ettr: float = 0.0
    goodput: float = 0.0
    ettr_restart: float = 0.0
    goodput_restart: float = 0.0
    ettr_published: dict[str, float] = field(default_factory=dict)
    """By system, if every pause were as its makers publish."""
    time_shares: dict[str, float] = field(default_factory=dict)
    fallbacks: int = 0
    lost_steps: int = 0
    steps: int = 0
    decisions: int = 0
    journaled: int = 0
    replayed: int = 0
    refused: int = 0
    deposed: int = 0
    turns_waited: int = 0
    self_doubts: int = 0
    cpu_seconds: float = 0.0
    broken: str = ""
    """The invariant that did not hold; empty: all did."""


def summary(fleet: Told, interval_seconds: float) -> Month:
    plan, referee, tally = fleet.plan, fleet.referee, fleet.tally
    ranks = {name: job.size for name, job in fleet.jobs.items()}
    paid = sum(ranks.values()) * plan.seconds
    restarted = {
        name: checkpoint_restart(plan, job.spec, tally.strikes, interval_seconds)
        for name, job in fleet.jobs.items()
    }
    useful = sum(fleet.useful[name] * ranks[name] for name in ranks)
    useful_restart = sum(restarted[name].useful_seconds * ranks[name] for name in ranks)
    whole = plan.nodes * plan.seconds
    spent: dict[str, float] = {}
    for name, parts in fleet.spent.items():
        for kind, seconds in parts.items():
            spent[kind] = spent.get(kind, 0.0) + seconds * ranks[name]
    total = sum(spent.values()) or 1.0
    largest = sorted(spent.items(), key=lambda part: -part[1])
    pauses = sorted(referee.pauses) or [0.0]
    return Month(
        plan,
        jobs=len(ranks),
        largest=max(ranks.values()) * GPUS_PER_NODE,
        spares=plan.nodes - sum(ranks.values()),
        failures=len(tally.strikes),
        by_kind=dict(Counter(strike.kind for strike in tally.strikes).most_common()),
        control=dict(tally.control),
        outcomes=dict(referee.outcomes.most_common()),
        pause_p50=pauses[len(pauses) // 2],
        pause_p95=pauses[int(len(pauses) * 0.95)],
        ettr=useful / paid,
        goodput=useful / whole,
        ettr_restart=useful_restart / paid,
        goodput_restart=useful_restart / whole,
        ettr_published={
            system.name: sum(
                paused(plan, job.spec, tally.strikes, system) * ranks[name]
                for name, job in fleet.jobs.items()
            )
            / paid
            for system in PUBLISHED
        },
        time_shares={kind: seconds / total for kind, seconds in largest},
        fallbacks=referee.outcomes["fallback"],
        lost_steps=sum(job.lost_steps for job in fleet.jobs.values()),
        steps=sum(job.step_at(fleet.now) for job in fleet.jobs.values()),
        decisions=fleet.messages,
        journaled=fleet.journal.appended,
        replayed=tally.replayed,
        refused=fleet.refused,
        deposed=tally.deposed,
        turns_waited=referee.waited,
        self_doubts=referee.doubts,
    )


def lines(month: Month) -> list[str]:
    """A month for people."""
    plan = month.plan
    mttf = f"{plan.mttf_hours:g} h at {plan.mttf_gpus:,} GPUs"
    size = f"{plan.gpus:,} GPUs in {plan.nodes:,} machines"
    largest = f"the largest of {month.largest:,} GPUs"
    spent = ", ".join(f"{kind} {_percent(part, 3)}" for kind, part in month.time_shares.items())
    verdict = f"BROKEN, seed {plan.seed}: {month.broken}" if month.broken else "all held"
    lost = f"{month.lost_steps:,} lost in {month.fallbacks} declared fallbacks"
    told = {
        "fleet": f"{size}, {month.jobs} jobs, {largest}, {month.spares} spare machines",
        "time": f"{plan.days:g} days, MTTF {mttf}, seed {plan.seed}",
        "failures": f"{month.failures:,}: {_listed(month.by_kind)}",
        "control": _listed(month.control),
        "incidents": _listed(month.outcomes),
        "pauses": f"p50 {month.pause_p50:.1f} s, p95 {month.pause_p95:.1f} s",
        "steps": f"{month.steps:,} committed, {lost}",
        "spent": spent,
        "ETTR": _beside(month.ettr, month.ettr_restart),
        "goodput": _beside(month.goodput, month.goodput_restart) + "   (spares are paid for)",
        "journal": f"{month.decisions:,} events, {month.journaled:,} journaled, "
        f"{month.replayed:,} replayed to the same state",
        "terms": f"refused of deposed leaders: {month.deposed} writes, {month.refused:,} orders",
        "brakes": f"{month.turns_waited} waited for their turn, "
        f"{month.self_doubts} times we suspected ourselves",
        "invariants": f"{verdict}; {month.cpu_seconds:.1f} s of CPU",
    }
    return [f"{name:11} {text}" for name, text in told.items()]


def _percent(part: float, digits: int = 2) -> str:
    return f"{100 * part:.{digits}f} %"


def _beside(ours: float, restart: float) -> str:
    return f"{_percent(ours)}   checkpoint-restart {_percent(restart)}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "none"
