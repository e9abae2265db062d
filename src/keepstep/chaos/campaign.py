"""A campaign: one real job, fault after fault, and the proof that none of them changed anything.

    wait until the job runs steadily and enough spares are ready
    -> strike -> wait for what becomes of it -> record -> next
    at the end: a fault-free run without Keepstep, compared bit for bit, and the step log checked

A fault counts as expected only if its outcome is the one in the catalogue and its after-effects
are right: a fenced worker is dead and published nothing, the user's traceback is in the job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from keepstep import sabotage
from keepstep.chaos import flips, proof, reckoning, report
from keepstep.chaos import network as networks
from keepstep.chaos.aftermath import UNTOUCHED_SECONDS, Aftermath, is_tainted, user_error
from keepstep.chaos.faults import (
    AT_WORK,
    LOAN,
    PARALLEL,
    TELLING,
    Cell,
    Fault,
    Mix,
    Outcome,
    choose_cells,
    schedule,
)
from keepstep.chaos.inject import Injector
from keepstep.chaos.leaders import ControlPlane, local_plan, replaced_once
from keepstep.chaos.lender import NODES as LENDER_NODES
from keepstep.chaos.lender import Lender
from keepstep.chaos.network import Network
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Missed, Strike
from keepstep.cli.cluster import LocalCluster, NodePlan
from keepstep.errors import ConfigError, KeepstepError, Permanent
from keepstep.model import CHECK_STEPS, JobId, JobSpec, Policy

JOB = JobId("chaos")
STEADY_SECONDS_MAX = 120.0
OUTCOME_SECONDS_MAX = 90.0
UNTOUCHED_STEPS = 15
STEADY_STEPS = 3
STACKS_SECONDS = 10.0
"""A recovery that takes this long is worth a look at where its ranks stand."""
HOLD_SECONDS_MAX = 40.0
"""Longer than a node takes to come back on a loaded machine, short enough to wait for its end."""
FINISH_STEPS_AHEAD = 60
FINISH_SECONDS_MAX = 180.0
STEP_SECONDS = 0.03
SAVE_EVERY = {Mix.FALLBACK: 40, Mix.USER: 40}


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for on the command line."""

    world: int = 4
    nodes: int = 4
    spares: int = 2
    faults: int = 20
    seed: int = 1
    mix: Mix = Mix.UNPLANNED
    kinds: tuple[str, ...] = ()
    sabotage: str = ""
    parallel: str = "ddp"
    check_steps: int = 0
    out: Path | None = None
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.world < 2 or self.nodes < 1 or self.world % self.nodes:
            raise ConfigError("--world must be at least 2 and a multiple of --nodes")
        if self.spares < 2:
            raise ConfigError("--spares must be at least 2: some faults take two ranks")
        if self.faults < 1:
            raise ConfigError("--faults must be at least 1")
        if self.sabotage and self.sabotage not in sabotage.NAMES:
            raise ConfigError(f"--sabotage knows: {', '.join(sabotage.NAMES)}")
        if self.parallel not in PARALLEL:
            raise ConfigError(f"--parallel knows: {', '.join(PARALLEL)}")
        if self.parallel not in (fits := AT_WORK.get(self.sabotage, PARALLEL)):
            raise ConfigError(f"--sabotage {self.sabotage} takes --parallel {' or '.join(fits)}")
        if self.sharded and (self.world < 4 or self.world % 2):
            raise ConfigError("a sharded job takes a world of 4, 6, 8 … ranks: --world")
        flips.check(self.mix, self.check_steps, 1 if self.sharded else self.world)

    @property
    def sharded(self) -> bool:
        return self.parallel != "ddp"

    @property
    def exact(self) -> bool:
        """Must the end be bit-exact? Flips that only a comparison finds have been used by then."""
        return not (self.mix is Mix.FLIPS and self.check_steps > 1)

    @property
    def slots(self) -> int:
        return self.world // self.nodes

    @property
    def nodes_in_all(self) -> int:
        return self.nodes + -(-self.spares // self.slots)


@dataclass(slots=True)
class Record:
    """One fault and what became of it."""

    number: int
    kind: str
    window: str
    rank: int
    step: int
    expected: str
    outcome: str = ""
    as_expected: bool = False
    phase: str = ""
    """Where the brain was when it first took notice: the story's first phase."""
    detect_seconds: float | None = None
    pause_seconds: float | None = None
    """From the strike to the first finished step of the new generation."""
    gap_seconds: float | None = None
    """The longest silence in the step stream."""
    parts: dict[str, float] = field(default_factory=dict)
    incidents: int = 0
    takeover_seconds: float | None = None
    found_steps: int | None = None
    """Of a flip: from the boundary where it lay to the one where it was named."""
    what: str = ""
    """Of a flip: what was flipped."""
    why: str = ""


def run(plan: Plan) -> int:
    """The whole campaign. Returns the exit code."""
    use_network = not networks.available()
    kinds = plan.kinds or TELLING.get(plan.sabotage, ())
    cells = choose_cells(
        plan.mix, kinds, network=use_network, parallel=plan.parallel, check_steps=plan.check_steps
    )
    faults = schedule(cells, plan.faults, plan.seed, plan.world, parallel=plan.parallel)
    report.say(f"seed {plan.seed}: {plan.faults} faults from {len(cells)} cells, mix {plan.mix}")
    if not use_network:
        report.say(f"silent kinds are left out: {networks.available()}")
    run_dir = plan.run_dir or Path(tempfile.mkdtemp(prefix="keepstep-chaos-"))
    with until_told_to_leave(), contextlib.ExitStack() as stack:
        network = stack.enter_context(Network()) if use_network else None
        lends = any(fault.cell.kind == LOAN for fault in faults)
        campaign = Campaign(plan, run_dir, network, lends=lends)
        stack.callback(campaign.close)
        verdict = campaign.run(faults)
    verdict = replace(verdict, account=reckoning.reckon(run_dir, JOB))
    if verdict.account.problem:
        report.say(f"the account does not hold: {verdict.account.problem}")
    result = report.whole(plan, cells, campaign.records, verdict)
    if plan.out is not None:
        report.write(plan.out, result)
        report.say(f"raw result: {plan.out}")
    report.say(report.matrix_text(cells, [faults[r.number].cell for r in campaign.records]))
    bad = [record for record in campaign.records if not record.as_expected]
    good = verdict.good and not bad
    for record in bad:
        # Once more, where a reader of a long log looks first.
        report.one_line(record, plan.faults)
    if good and plan.run_dir is None:
        shutil.rmtree(run_dir, ignore_errors=True)
    elif not good:
        report.say(f"logs and journal are kept in {run_dir}")
    print(report.last_line(campaign.records, verdict), flush=True)
    return 0 if good and len(campaign.records) == plan.faults else 1


@contextlib.contextmanager
def until_told_to_leave() -> Iterator[None]:
    """SIGTERM ends the campaign through its finally clauses: nothing is left behind."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Campaign:
    """One cluster, one job, many faults."""

    def __init__(
        self, plan: Plan, run_dir: Path, network: Network | None, *, lends: bool = False
    ) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self.records: list[Record] = []
        self._network = network
        self._failpoints = run_dir / "failpoints"
        self._failpoints.mkdir(parents=True, exist_ok=True)
        self._made = 0
        number = plan.nodes_in_all + (LENDER_NODES if lends else 0)
        nodes = [self._new_node() for _ in range(number)]
        self._control = ControlPlane(network) if plan.mix is Mix.FAILOVER else None
        cluster_plan = local_plan(self._control, network, self._environment())
        self._cluster = LocalCluster(run_dir, nodes, cluster_plan)
        self._sight = Sight(self._cluster, JOB)
        self._lender = Lender(self._cluster, run_dir, plan.slots) if lends else None
        watched = (self._failpoints, self._sight, self._lender, self._control)
        self._injector = Injector(self._cluster, network, *watched)
        self._aftermath = Aftermath(
            self._cluster, self._sight, self._injector, self._lender, self._tend
        )
        self._tainted: set[str] = set()

    def close(self) -> None:
        """End every process. Safe to repeat; a second SIGTERM must not leave half of them."""
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._sight.close()
            if self._lender is not None:
                self._lender.close()
            self._cluster.stop()
            if self._control is not None:
                self._control.close()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _new_node(self) -> NodePlan:
        name = f"n{self._made}"
        self._made += 1
        if self._network is None:
            return NodePlan(name, self.plan.slots)
        address = self._network.join(name)
        # As on any machine whose own name does not lead to the network between the nodes.
        own = {"GLOO_SOCKET_IFNAME": networks.INTERFACE}
        return NodePlan(name, self.plan.slots, address, self._network.prefix(name), own)

    def _environment(self) -> dict[str, str]:
        found = {"KEEPSTEP_FAILPOINTS": str(self._failpoints)}
        if self.plan.sabotage:
            found["KEEPSTEP_SABOTAGE"] = self.plan.sabotage
        if self.plan.check_steps:
            found[CHECK_STEPS] = str(self.plan.check_steps)
        return found

    # ------------------------------------------------------------ the job

    def _arguments(self) -> list[str]:
        save_every = SAVE_EVERY.get(self.plan.mix, 0)
        shape = ["--parallel", self.plan.parallel]
        return ["--steps", "10000000", "--save-every", str(save_every), *shape]

    def _spec(self) -> JobSpec:
        hold = HOLD_SECONDS_MAX if self.plan.mix is Mix.HOLD else 600.0
        return JobSpec(
            job=JOB,
            script=str(proof.WORKLOAD),
            arguments=(
                *self._arguments(),
                *("--step-seconds", str(STEP_SECONDS)),
                *("--finish-file", str(self.run_dir / "finish")),
                *("--result", str(self.run_dir / "result")),
            ),
            nodes=self.plan.nodes,
            ranks_per_node=self.plan.slots,
            spares=self.plan.spares,
            standby_level=2,
            environment=self._environment(),
            directory=str(self.run_dir),
            log_directory=str(self.run_dir / "logs"),
            state_directory=str(self.run_dir / "state"),
            tee=False,
            policy=Policy(hold_seconds_max=hold),
        )

    def run(self, faults: tuple[Fault, ...]) -> report.Verdict:
        """Strike them all, end the job, prove it."""
        self._cluster.start()
        self._cluster.wait_nodes()
        self._cluster.client.submit(self._spec())
        trouble, lent = "", 0
        try:
            if self._lender is not None:
                self._steady(self.plan.spares, whole=False)
                self._lender.start()
            for fault in faults:
                # Harsh faults need everybody back, the others only as many spares as they use up.
                whole = fault.cell.mix not in (Mix.UNPLANNED, Mix.PLANNED, Mix.FLIPS)
                self._steady(self.plan.spares if whole else fault.cell.spares, whole=whole)
                self._one(fault, len(faults))
            self._steady(0, whole=False)
            if self._lender is not None:
                self._lender.wait_running("goes on", self._tend)
                lent = self._lender.finish(FINISH_SECONDS_MAX)
            steps = self._finish()
            trouble = "; ".join(self._control.check()) if self._control is not None else ""
        except KeepstepError as error:
            trouble, steps = str(error), self._sight.steps.newest.finished
            report.say(f"the campaign ends here: {error}")
        self.close()
        return self._prove(steps, trouble, lent)

    def _steady(self, spares: int, *, whole: bool) -> None:
        """Until the job trains and so many spares are ready; with `whole`, until all are back."""
        deadline = time.monotonic() + STEADY_SECONDS_MAX
        since = (-1, 0)
        job: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            self._tend()
            job = self._sight.job()
            newest = self._sight.steps.newest
            if job is not None and job["over"]:
                raise Permanent(
                    f"the job is {job['state']} before its time: {job['detail'][-300:]}"
                )
            if job is None or job["state"] != "running" or job["incident"]:
                since = (-1, 0)
            elif job["generation"] != since[0]:
                since = (job["generation"], newest.finished)
            ready = job is not None and job["spares"]["ready"] >= spares
            moving = since[0] >= 0 and newest.finished >= since[1] + STEADY_STEPS
            if ready and moving and not (whole and self._injector.away):
                return
            time.sleep(0.02)
        state = job and {k: job[k] for k in ("state", "generation", "migration", "spares")}
        raise Permanent(f"not steady after {len(self.records)} faults: {state}")

    def _tend(self) -> None:
        """Bring nodes back; take a tainted one out once nobody sits there."""
        self._cluster.supervisor.check()
        self._injector.tend()
        if not self._tainted:
            return
        job = self._sight.job()
        if job is None or job["state"] != "running":
            return
        seated = {str(seat["node"]) for seat in job["seats"]}
        for node in sorted(self._tainted - seated):
            self._tainted.discard(node)
            # It may be away just now: an agent that came back later would be nobody's to end.
            self._injector.forget(node)
            self._cluster.remove_node(node)

    # ------------------------------------------------------------ one fault

    def _one(self, fault: Fault, count: int) -> None:
        cell = fault.cell
        report.progress(fault.number, count, cell.name)
        before = self._sight.job_now()
        record = Record(
            fault.number,
            cell.kind,
            cell.window,
            fault.rank,
            self._sight.steps.newest.finished,
            cell.expected.value,
        )
        self.records.append(record)
        try:
            strike = self._injector.strike(fault)
        except Missed as error:
            record.outcome, record.why = Outcome.STUCK.value, str(error)
            self._ask_for_stacks(self._sight.job_now())
            self._injector.release()
            report.one_line(record, count)
            return
        outcome, after = self._await_outcome(fault, strike, before)
        record.outcome = outcome.value
        self._measure(record, strike, before, after)
        problem = ""
        if strike.flip is not None:
            seen, every = self._sight.picture() or {}, self.plan.check_steps
            found = flips.judge(strike.flip, self._incidents(before), seen, every)
            problem, record.what, record.found_steps = found.problem, strike.flip.name, found.steps
        problem = self._after_effects(strike, outcome, before, after) or problem
        record.as_expected = outcome is cell.expected and not problem
        record.why = problem or record.why
        report.one_line(record, count)

    def _await_outcome(
        self, fault: Fault, strike: Strike, before: dict[str, Any]
    ) -> tuple[Outcome, dict[str, Any]]:
        deadline = time.monotonic() + OUTCOME_SECONDS_MAX
        start = self._sight.steps.newest.finished
        job, asked = before, False
        while time.monotonic() < deadline:
            self._tend()
            job = self._sight.job() or job
            if not asked and time.monotonic() - strike.at > STACKS_SECONDS:
                asked = self._ask_for_stacks(job)
            seen = self._judge(fault.cell, job, before, strike, start)
            if seen is not None:
                return seen, job
            time.sleep(0.02)
        return Outcome.STUCK, job

    def _ask_for_stacks(self, job: dict[str, Any]) -> bool:
        """Ranks that hold up a recovery write into their logs where they stand."""
        migration = job["migration"]
        if not migration or time.time() - migration["phase_at"] < STACKS_SECONDS / 2:
            return False
        for seat in job["seats"]:
            waits = "reported" not in seat["phase"] and seat["phase"] not in ("empty", "joining")
            for user in self._sight.processes(str(seat["node"])) if waits else ():
                if user.rank == seat["rank"]:
                    _signal_quietly(user.pid, signal.SIGUSR1)
        return True

    def _judge(
        self, cell: Cell, job: dict[str, Any], before: dict[str, Any], strike: Strike, start: int
    ) -> Outcome | None:
        """What became of the job; None while it is not clear yet."""
        if job["over"]:
            saved = job["state"] == "saved" and job["exit_code"] == 75
            return Outcome.SAVED if saved else Outcome.FAILED
        newest = self._sight.steps.newest
        if job["generation"] == before["generation"]:
            quiet = time.monotonic() - strike.at >= UNTOUCHED_SECONDS
            moved = newest.finished >= start + UNTOUCHED_STEPS
            waits = cell.expected is not Outcome.UNTOUCHED
            return Outcome.UNTOUCHED if quiet and moved and not waits else None
        if job["state"] != "running" or job["migration"] or job["incident"]:
            return None
        if newest.generation < job["generation"]:
            return None
        if job["fallbacks"] > before["fallbacks"]:
            return Outcome.FALLBACK
        if strike.moved and job["fallbacks"] == before["fallbacks"]:
            return Outcome.MOVED if _all_moved(strike.moved, before, job) else None
        held = any("hold" in incident["seconds"] for incident in self._incidents(before))
        return Outcome.HELD if held else Outcome.LIVE

    def _incidents(self, before: dict[str, Any]) -> list[dict[str, Any]]:
        """The job's incidents since then, oldest first."""
        picture = self._sight.picture() or {"incidents": []}
        found: list[dict[str, Any]] = [i for i in picture["incidents"] if i["job"] == JOB]
        return [i for i in found if i["generation"] > before["generation"] or not i["closed_at"]]

    def _measure(
        self, record: Record, strike: Strike, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        incidents = self._incidents(before)
        record.incidents = len(incidents)
        now = time.monotonic()
        record.gap_seconds = round(self._sight.steps.gap(strike.at, now), 3)
        record.takeover_seconds = strike.takeover_seconds
        if not incidents:
            return
        first, last = incidents[0], incidents[-1]
        struck_at = time.time() - (now - strike.at)
        record.detect_seconds = round(max(0.0, first["opened_at"] - struck_at), 3)
        story = last["story"]
        record.phase = str(story[0][1]) if story else ""
        record.why = str(story[0][2]) if story else ""
        for incident in incidents:
            for phase, seconds in incident["seconds"].items():
                record.parts[phase] = round(record.parts.get(phase, 0.0) + seconds, 3)
        finish = self._sight.steps.first_finish(after["generation"] - 1, last["boundary"])
        if strike.moved:
            # While targets warm up nobody pauses: only the step stream knows the pause.
            record.pause_seconds = record.gap_seconds
        elif finish is not None and finish >= strike.at:
            record.pause_seconds = round(finish - strike.at, 3)

    # ------------------------------------------------------------ after-effects

    def _after_effects(
        self, strike: Strike, outcome: Outcome, before: dict[str, Any], after: dict[str, Any]
    ) -> str:
        """What must be true beside the outcome. Returns what is not, or nothing."""
        problem = self._aftermath.look(strike, len(self._incidents(before)))
        if problem := problem or replaced_once(strike, before, after):
            return problem
        if strike.tainted:
            self._tainted.add(strike.tainted)
            self._cluster.add_node(self._new_node())
            if not is_tainted(self._sight.picture() or {}, strike.tainted):
                return f"{strike.tainted} held corrupt state and is not tainted"
        if outcome in (Outcome.SAVED, Outcome.FAILED):
            problem = user_error(before, after) if outcome is Outcome.FAILED else ""
            self._injector.quiet()
            self._rerun()
            return problem
        return ""

    def _rerun(self) -> None:
        """As a scheduler would requeue it: the same job again, on the same state directory."""
        self._cluster.client.submit(self._spec())

    # ------------------------------------------------------------ the end

    def _finish(self) -> int:
        self._injector.release()
        # Far enough ahead for every rank to read it before it gets there.
        last = self._sight.steps.newest.finished + FINISH_STEPS_AHEAD
        fresh = self.run_dir / "finish.new"
        fresh.write_text(str(last))
        fresh.replace(self.run_dir / "finish")
        job = self._cluster.wait(JOB, FINISH_SECONDS_MAX)
        if job["state"] != "finished":
            raise Permanent(f"the job ended as {job['state']}: {str(job['detail'])[-500:]}")
        return last

    def _prove(self, steps: int, trouble: str, lent: int) -> report.Verdict:
        log = proof.check_step_log(self.run_dir / "state" / "steps.jsonl", steps)
        if trouble:
            return report.Verdict(False, log, (trouble,), steps)
        report.say(f"fault-free run of {steps} steps, without Keepstep …")
        arguments = ["--steps", str(steps), "--parallel", self.plan.parallel]
        seconds = proof.reference_run(
            self.plan.world, arguments, self.run_dir / "reference", self.run_dir / "logs"
        )
        result, reference = self.run_dir / "result", self.run_dir / "reference"
        found = proof.compare(self.plan.world, result, reference)
        report.say(f"compared with it after {seconds:.0f} s")
        differences = found.differences
        if not self.plan.exact:
            stated = proof.contaminated_only(self.plan.world, result, differences)
            return report.Verdict(not differences, log, differences, steps, stated)
        if self._lender is not None:
            report.say(f"the same for the {lent} steps of the lender …")
            differences += self._lender.prove(lent)
        for difference in differences[:10]:
            report.say(difference)
        return report.Verdict(not differences, log, differences, steps)


def _all_moved(ranks: tuple[int, ...], before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Each of them has another worker, and nobody is still to move."""
    was = {seat["rank"]: seat["incarnation"] for seat in before["seats"]}
    now = {seat["rank"]: seat["incarnation"] for seat in after["seats"]}
    return not after["leaving"] and all(now[rank] != was[rank] for rank in ranks)


def _signal_quietly(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
