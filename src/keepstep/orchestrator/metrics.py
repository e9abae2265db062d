"""The cluster in numbers for Prometheus: the brain's state in, families of series out. Pure.

Bounded whatever the cluster's size: nodes, devices and ranks are counted, never named. Jobs are
named, and at most JOBS_MAX of them (those that run, the largest first); how many were left out is
a number too. A test holds this against 12,500 nodes and more jobs than are shown. The label is
`job_name`: `job` is Prometheus' own word for what it scrapes.

What only grows is kept beside the brain, in a Tally: the brain forgets old incidents. It begins
anew with each term, with nothing of what was over before: that was counted by whoever led then, and
to Prometheus it would be news. `docs/operating.md` says which alert goes with which number; the
names are part of what users rely on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepstep import __version__
from keepstep.exposition import (
    Family,
    Sample,
    Spread,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    info,
)
from keepstep.model import JobId, JobState, Mode, Phase, Severity
from keepstep.orchestrator import portions, shown, slots
from keepstep.orchestrator.board import Account
from keepstep.orchestrator.state import Cluster, Incident, Job, NodeState
from keepstep.orchestrator.view import pause_seconds
from keepstep.wire import Heartbeat

SERIES_MAX = 5000
JOBS_MAX = 200
"""Jobs with series of their own: 18 each at most, so that all of it stays below SERIES_MAX."""
PAUSE_BOUNDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
NODE_STATES = ("ready", "agent away", "draining", "empty", "tainted", "lost", "left")
EVENTS = (
    *("loop.late", "journal.away", "journal.snapshot_failed", "step.failed", "node.silent"),
    *("agent.connected", "agent.disconnected", "agent.refused", "alert.ignored"),
)
"""Lines of the log that are worth a number."""
OUTCOMES = ("resumed", "moved", "abandoned", "parked", "fallback", "restart", "saved", "failed")


@dataclass(slots=True)
class Tally:
    """What has happened in this term so far: each incident is counted once."""

    outcomes: Counter[str] = field(default_factory=Counter)
    pauses: Spread = field(default_factory=lambda: Spread(PAUSE_BOUNDS))
    """Seconds without training of incidents that ended with training."""
    phases: dict[str, float] = field(default_factory=dict)
    _counted: frozenset[str] = frozenset()
    """Incidents that are in all of these, of those that are still known. All of them: the newest
    alone may be gone with its job's name, and numbers tell when one began, not when it ended."""

    @classmethod
    def after(cls, closed: Sequence[Incident]) -> Tally:
        """Of what is closed after these."""
        return cls(_counted=frozenset(one.incident for one in closed))

    def hear(self, closed: Sequence[Incident]) -> None:
        """Take in what was closed since the last time."""
        before, self._counted = self._counted, frozenset(one.incident for one in closed)
        for incident in closed:
            if incident.incident in before:
                continue
            self.outcomes[incident.outcome] += 1
            if incident.outcome in ("resumed", "moved"):
                self.pauses.add(pause_seconds(incident))
            for phase, seconds in incident.seconds.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Facts:
    """What is no business of the brain's, at one moment."""

    now: float
    leading: bool
    connected: int
    heartbeats: Iterable[Heartbeat]
    decisions: int
    """Entries of the journal."""
    lines_told: Mapping[str, int] = field(default_factory=dict)
    events_told: Mapping[str, int] = field(default_factory=dict)
    accounts: Mapping[JobId, Account] = field(default_factory=dict)
    """Of the jobs for which the ledger keeps one."""


def families(cluster: Cluster, tally: Tally, facts: Facts) -> list[Family]:
    """Everything that the orchestrator answers to GET /metrics, but for its own process."""
    jobs = named_jobs(cluster)
    return [
        *_leadership(cluster, facts),
        *_fleet(cluster, facts),
        *_jobs_together(cluster),
        *_incidents(cluster, tally),
        *_jobs(jobs, facts),
        *_accounts(jobs, facts),
    ]


def named_jobs(cluster: Cluster) -> list[Job]:
    """Those with series of their own: of all that are open, the ones that cost most."""
    jobs = [cluster.jobs[name] for name in cluster.open_jobs]
    jobs.sort(key=lambda job: (-job.spec.world_size, job.spec.job))
    return jobs[:JOBS_MAX]


@dataclass(frozen=True, slots=True)
class Following:
    """What one who does not lead knows of itself, at one moment."""

    behind: int
    """Entries of the journal that it has not read yet."""
    look_age_seconds: float
    readable: bool
    lines_told: Mapping[str, int]
    events_told: Mapping[str, int]


def of_follower(facts: Following) -> list[Family]:
    """What one that follows answers. Nothing of the cluster: its leader tells that, and what two
    tell is summed up twice."""
    return [
        *_itself(leading=False),
        gauge(
            "keepstep_follower_entries_behind",
            "Entries of the journal that it has not read yet; absent on one that leads.",
            float(facts.behind),
        ),
        gauge(
            "keepstep_follower_look_age_seconds",
            "Since it last saw the journal; absent on one that leads.",
            round(facts.look_age_seconds, 3),
        ),
        gauge(
            "keepstep_follower_readable",
            "1 while it can read the journal, and so could lead; absent on one that leads.",
            float(facts.readable),
        ),
        *_log(facts.lines_told, facts.events_told),
    ]


def _itself(*, leading: bool) -> list[Family]:
    return [
        info("keepstep_build_info", "Which Keepstep this is.", version=__version__),
        gauge(
            "keepstep_leading",
            "1 while this orchestrator leads; 0 while it follows, or is cut off from its journal.",
            float(leading),
        ),
    ]


def _log(lines_told: Mapping[str, int], events_told: Mapping[str, int]) -> list[Family]:
    levels = {level: float(count) for level, count in lines_told.items()}
    return [
        counters("keepstep_log_lines_total", "Lines of the log, by level.", "level", levels),
        counters(
            "keepstep_log_events_total",
            "Lines of the log that tell of trouble, or of agents that come and go.",
            "event",
            {event: float(events_told.get(event, 0)) for event in EVENTS},
        ),
    ]


def _leadership(cluster: Cluster, facts: Facts) -> list[Family]:
    return [
        *_itself(leading=facts.leading),
        gauge("keepstep_term", "The term that it leads.", float(cluster.term)),
        gauge("keepstep_frozen", "1 while an operator keeps everything as it is.", _flag(cluster)),
        counter(
            "keepstep_decisions_total",
            "Decisions in the journal, over all terms.",
            float(facts.decisions),
        ),
        *_log(facts.lines_told, facts.events_told),
    ]


def _flag(cluster: Cluster) -> float:
    return float(bool(cluster.frozen))


# ---------------------------------------------------------------- nodes and devices


def _fleet(cluster: Cluster, facts: Facts) -> list[Family]:
    nodes = Counter(dict.fromkeys(NODE_STATES, 0))
    uses = Counter(dict.fromkeys(("training", "standby", "free", "fenced", "unusable"), 0))
    ready = _ready_standbys(cluster)
    for node in cluster.nodes.values():
        mark = shown.node_mark(
            alive=node.alive,
            left=node.left,
            connected=node.linked,
            drained=bool(node.drained),
            empty=not node.uses,
            tainted=node.node in cluster.taints,
        )
        nodes[mark or "ready"] += 1
        if node.alive:
            _count_slots(cluster, node, facts.now, uses)
    taints = Counter(dict.fromkeys(map(str, Severity), 0))
    taints.update(str(held[0].severity) for held in cluster.taints.values())
    return [
        gauges("keepstep_nodes", "Nodes, by how they are.", "state", nodes),
        gauges(
            "keepstep_slots",
            "Devices of living nodes, by use. Free ones may be used; unusable ones are drained, "
            "tainted or without their agent.",
            "use",
            uses,
        ),
        gauge("keepstep_standbys_ready", "Warm standbys that can take a rank now.", ready),
        gauge("keepstep_agents_connected", "Agents with a stream to us.", float(facts.connected)),
        gauges("keepstep_tainted_places", "Tainted places, by the worst.", "severity", taints),
    ]


def _ready_standbys(cluster: Cluster) -> float:
    jobs = (cluster.jobs[name] for name in cluster.open_jobs)
    return float(sum(standby.ready for job in jobs for standby in job.standbys.values()))


def _count_slots(cluster: Cluster, node: NodeState, now: float, uses: Counter[str]) -> None:
    for user in node.uses.values():
        use = "fenced" if user.fenced else "standby" if user.rank < 0 else "training"
        uses[use] += 1
    free = len(slots.free_slots(cluster, node, now)) if slots.usable(node) else 0
    uses["free"] += free
    uses["unusable"] += node.slots - len(node.uses) - free


# ---------------------------------------------------------------- jobs and incidents together


def _jobs_together(cluster: Cluster) -> list[Family]:
    states = Counter(dict.fromkeys(map(str, JobState), 0))
    states.update(str(job.state) for job in cluster.jobs.values())
    unseen = max(0, len(cluster.open_jobs) - JOBS_MAX)
    return [
        gauges("keepstep_jobs", "Jobs that are known, by state.", "state", states),
        gauge("keepstep_jobs_not_shown", "Open jobs without series of their own.", float(unseen)),
    ]


def _incidents(cluster: Cluster, tally: Tally) -> list[Family]:
    jobs = (cluster.jobs[name] for name in cluster.open_jobs)
    waiting = sum(1 for job in jobs if job.incident is not None)
    outcomes = {**dict.fromkeys(OUTCOMES, 0.0), **tally.outcomes}
    return [
        gauge("keepstep_incidents_open", "Incidents that are not over.", float(waiting)),
        counters(
            "keepstep_incidents_total",
            "Incidents that are over, by how they ended. A fallback counts against the guarantee.",
            "outcome",
            outcomes,
        ),
        histogram(
            "keepstep_incident_pause_seconds",
            "How long training paused in incidents that ended with training.",
            tally.pauses,
        ),
        counters(
            "keepstep_phase_seconds_total",
            "Seconds in each phase of migrations, over all incidents that are over.",
            "phase",
            tally.phases,
        ),
    ]


# ---------------------------------------------------------------- one job


def _jobs(jobs: list[Job], facts: Facts) -> list[Family]:
    pulses = shown.pulses_by_job(facts.heartbeats)
    paces = {job.spec.job: shown.pace(job, pulses.get(job.spec.job, ())) for job in jobs}

    def each(name: str, about: str, values: Mapping[JobId, float], kind: str = "gauge") -> Family:
        samples = (Sample((("job_name", str(job)),), value) for job, value in values.items())
        return Family(f"keepstep_job_{name}", kind, about, tuple(samples))

    own = {job.spec.job: job for job in jobs}
    alone = {name: uncovered(job) for name, job in own.items()}
    return [
        Family(
            "keepstep_job_state",
            "gauge",
            "1 for the state that the job is in.",
            tuple(_labelled(job, "state", str(job.state), 1.0) for job in jobs),
        ),
        each("ranks", "Its world size.", {n: float(j.spec.world_size) for n, j in own.items()}),
        each("generation", "Of its roster.", {n: float(j.generation) for n, j in own.items()}),
        each(
            "committed_step",
            "The newest committed step; -1 before the first.",
            {name: float(pace.step) for name, pace in paces.items()},
        ),
        each(
            "step_seconds",
            "Median time of a step on its slowest node; absent until it is known.",
            {name: pace.step_seconds for name, pace in paces.items() if pace.step_seconds},
        ),
        each(
            "spares_wanted",
            "Standbys that it asked for.",
            {name: float(job.spec.spares) for name, job in own.items()},
        ),
        each(
            "spares_ready",
            "Standbys of its own that are warm.",
            {n: float(sum(s.ready for s in j.standbys.values())) for n, j in own.items()},
        ),
        each(
            "uncovered_ranks",
            "Ranks whose state is nowhere else: the loss of one would be a fallback.",
            {name: float(count) for name, count in alone.items()},
        ),
        each(
            "contaminated_steps",
            "Steps in which a rank with corrupt state took part; 0 once it has gone back.",
            {name: float(_contaminated(job)) for name, job in own.items()},
        ),
        each(
            "protected",
            "1 if a fault now would be answered without a rollback; 0 if the job is only observed, "
            "or some state has no second home.",
            {name: float(protected(job, alone[name])) for name, job in own.items()},
        ),
        each(
            "incidents_total",
            "Incidents of this job.",
            {name: float(job.incidents) for name, job in own.items()},
            "counter",
        ),
        each(
            "fallbacks_total",
            "Restarts of this job from an older checkpoint.",
            {name: float(job.fallbacks) for name, job in own.items()},
            "counter",
        ),
        *_migrations(jobs, facts.now),
    ]


def _migrations(jobs: list[Job], now: float) -> list[Family]:
    moving = [(job, job.migration) for job in jobs if job.migration is not None]
    return [
        Family(
            "keepstep_job_phase_seconds",
            "gauge",
            "How long its migration is in this phase already; absent without one.",
            tuple(
                _labelled(job, "phase", str(migration.phase), max(0.0, now - migration.phase_at))
                for job, migration in moving
            ),
        ),
        Family(
            "keepstep_job_migration_seconds",
            "gauge",
            "How long its migration lasts already; absent without one.",
            tuple(
                _labelled(job, "kind", migration.kind, max(0.0, now - migration.began_at))
                for job, migration in moving
            ),
        ),
        Family(
            "keepstep_job_empty_seats",
            "gauge",
            "Ranks without a worker.",
            tuple(
                Sample((("job_name", str(job.spec.job)),), float(len(migration.gone)))
                for job, migration in moving
            ),
        ),
    ]


def _labelled(job: Job, label: str, value: str, number: float) -> Sample:
    return Sample((("job_name", str(job.spec.job)), (label, value)), number)


def _contaminated(job: Job) -> int:
    return job.contaminated[1] - job.contaminated[0] + 1 if job.contaminated else 0


def uncovered(job: Job) -> int:
    """How many of its ranks hold state that is nowhere else."""
    return len(portions.alone(job))


def protected(job: Job, alone: int) -> bool:
    """Whether a fault now would be answered, and without a rollback."""
    moving = job.migration is not None and job.migration.phase is Phase.FALLBACK
    return job.spec.policy.mode is Mode.ACT and not alone and not moving


def _accounts(jobs: list[Job], facts: Facts) -> list[Family]:
    """What the ledger says to date; nothing, where it keeps no account."""
    own = {job.spec.job: facts.accounts.get(job.spec.job) for job in jobs}

    def each(name: str, about: str, read: str) -> Family:
        found = {str(job): getattr(account, read) for job, account in own.items() if account}
        values = {job: value for job, value in found.items() if value is not None}
        return gauges(name, about, "job_name", values)

    return [
        each("keepstep_job_goodput_ratio", "Useful over paid rank-seconds, to date.", "goodput"),
        each(
            "keepstep_guarantee_live_ratio",
            "Failures resolved live with no lost progress, over all that count, to date.",
            "live_ratio",
        ),
        each("keepstep_guarantee_target_ratio", "What was promised.", "target_ratio"),
    ]
