"""What Keepstep costs while nothing breaks: its step time against the bare engine's.

    python -m bench.overhead [--ranks 2,4] [--steps 3000] [--minutes 120] [--quick]
    python -m bench.overhead --parallel hsdp|fsdp|zero1                   sharded, the same way
    python -m bench.overhead --read bench/results/overhead-….json.gz      the same report again
    python -m bench.overhead --onto bench/results/overhead-….json.gz …    the steps that it lacks

Three jobs live side by side and take turns, one short block of steps at a time: A bare, B under
Keepstep, C bare again as the control. Each round goes there and back, so that a drift of the
machine meets all of them alike:

    A B C | C B A,  then  C B A | A B C        without C this is A B B A, without B it is A C C A

Whoever is not at turn is stopped (SIGSTOP), with everything that belongs to it: agents,
orchestrator, preload servers and standby run in Keepstep's blocks only. A round's two blocks per
arm are summed; the figure is the ratio of the sums over all quiet rounds. A round in which others
(the machine's host, another process) took more than a little of it is made again; what they took is
all that decides it. Beside it stands the ratio of processor time: what each arm's processes used
for the same steps, and the ratio of the fastest steps (the 10th percentile of rank 0's, over all
rounds): steps that nobody disturbed, whatever the host did in between. The run is invalid (exit 2)
when the control is off by more than 0.5%, when Keepstep saw an incident, or when the time was over
before there were enough quiet rounds. A run that was too short can be gone on with (--onto): its
rounds count with those of the new segments, which are fresh starts in any case, and the new raw
result holds both, with the commits and machines of either.

All arms keep the memory that they free (--malloc keep). glibc as it comes gives it back to the
kernel or not by limits that move with whatever was freed before: two processes with the same steps
then differ by their histories. Full shard is faster under Keepstep for that reason alone, which is
no merit of it (--malloc default shows it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import figures, quiet, record, rig
from bench.launch import KEPT
from keepstep.cli.cluster import ORCHESTRATOR, LocalCluster, NodePlan
from keepstep.errors import Permanent
from keepstep.model import CHECK_STEPS

UPPER_MAX = {"ddp": 1.01, "hsdp": 1.01, "fsdp": 1.05, "zero1": 1.05}
"""By how the model is spread. What one rank holds alone goes to a mirror in each step, on the cores
that the ranks compute on: that may cost more."""
RANKS = {"ddp": "2,4", "hsdp": "4", "fsdp": "2", "zero1": "2"}
CONTROL_OFF_MAX = 0.005
STEPS_MIN = 3000
OTHERS_MAX = 0.03
"""Of the machine, in any block of a round. The driver and the kernel's own threads take 1 to 2%."""
BLOCK_SECONDS = 1.1
"""Keepstep stands still for two blocks in a row. Its agents leave an orchestrator that is silent
for 4 s, and a reconnect after each round would be the method's cost, not Keepstep's."""
STILL_SECONDS_MAX = 3.0
"""So two of the others' blocks, with the steps that do not count, stay well below that."""
LEAD_STEPS, LONG_STEP_SECONDS = 2, 0.2
"""After the other arm ran, caches are cold: steps that do not count. Of long ones a single one."""
WARM_STEPS = 20
REPLY_SECONDS_MAX = 600.0
WORKER = Path(__file__).parent / "overhead_worker.py"


@dataclass
class Arm:
    """One job: how to reach its ranks, and which processes belong to it."""

    name: str
    connections: list[socket.socket]
    processes: Callable[[], list[int]]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def freeze(self) -> None:
        # Looked up once per turn of the whole cluster only: a look through /proc costs time.
        self.pids = self.pids or self.processes()
        signal_all(self.pids, signal.SIGSTOP)

    def thaw(self) -> None:
        wake(self.pids)

    def run(self, steps: int, lead: int = LEAD_STEPS) -> float:
        """One block, from thaw to freeze; its seconds, without the hand-over."""
        before = quiet.look(self.pids)
        self.thaw()
        for connection in self.connections:
            connection.sendall(json.dumps({"lead": lead, "steps": steps}).encode() + b"\n")
        stamps = [_read_line(connection)["stamps"] for connection in self.connections]
        self.freeze()
        # From the moment the last rank began to the moment the last one was through.
        seconds = float(max(s[-1] for s in stamps) - max(s[0] for s in stamps)) / 1e9
        first = stamps[0]
        micros = [(b - a) // 1000 for a, b in itertools.pairwise(first)]
        after = quiet.look(self.pids)
        self.blocks.append(
            {
                "seconds": seconds,
                "processor": round(after.own - before.own, 4),
                "others": round(quiet.others(before, after), 4),
                "rank0_step_us": micros,
            }
        )
        return seconds


def main() -> int:
    args = options()
    if args.read is not None:
        kept = record.read(args.read)
        parallel = kept["options"].get("parallel", "ddp")
        return conclude(kept["runs"], bool(kept["quick"]), parallel)
    if args.malloc == "keep":
        os.environ.update(KEPT)
    worlds = [int(text) for text in (args.ranks or RANKS[args.parallel]).split(",")]
    print(f"seed {args.seed}; machine {record.machine()}; SIGTERM ends it, and keeps what it has")
    earlier = Earlier.read(args) if args.onto is not None else Earlier()
    told_to_end = threading.Event()
    results = {}
    for world in worlds:
        segments = segments_of(world, args, earlier.segments(world), told_to_end)
        if any(quiet_rounds(segment, args) for segment in segments):
            results[str(world)] = summed_up(segments, args)
        else:
            print(f"{world} ranks: not one quiet round: others use this machine")
    if not results:
        raise Permanent("nothing was measured")
    name = "overhead" if args.parallel == "ddp" else f"overhead-{args.parallel}"
    name += f"-k{args.check_steps}" if args.check_steps else ""
    path = record.keep(
        f"{name}-quick" if args.quick else name,
        {
            "seed": args.seed,
            "quick": args.quick,
            "options": {key: value for key, value in vars(args).items() if key != "onto"},
            "onto": earlier.history,
            "runs": results,
        },
    )
    print(f"raw results: {path}")
    return conclude(results, args.quick, args.parallel)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parallel", choices=tuple(UPPER_MAX), default="ddp")
    parser.add_argument("--ranks", default="", help="default: 2,4; 4 with hsdp; 2 with the others")
    parser.add_argument("--steps", type=int, default=STEPS_MIN, help="per arm, at least")
    parser.add_argument("--segments", type=int, default=10, help="fresh starts of all three jobs")
    parser.add_argument("--minutes", type=float, default=120.0, help="for one number of ranks")
    parser.add_argument("--batch", type=int, default=64, help="per rank")
    parser.add_argument("--check-steps", type=int, default=0, help="look for corrupt state")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    parser.add_argument("--read", type=Path, metavar="FILE", help="tell of a raw result again")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="go on with one that is short")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.segments = min(args.steps, 40), 1
    return args


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is gone on with."""

    runs: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """When, on which machine and at which commit its parts were measured."""

    @classmethod
    def read(cls, args: argparse.Namespace) -> Earlier:
        kept = record.read(args.onto)
        for name in ("parallel", "batch", "malloc", "check_steps"):
            then, now = kept["options"].get(name, 0), getattr(args, name)
            if then != now:
                raise Permanent(
                    f"{args.onto} was measured with --{name.replace('_', '-')} {then}, not {now}"
                )
        return cls(kept["runs"], [*kept.get("onto", []), record.origin(kept)])

    def segments(self, world: int) -> list[dict[str, Any]]:
        return list(self.runs.get(str(world), {}).get("segments", []))


def quiet_rounds(segment: dict[str, Any], args: argparse.Namespace) -> list[dict[str, float]]:
    return [r for r in segment["rounds"] if r["others"] <= OTHERS_MAX or args.quick]


def segments_of(
    world: int,
    args: argparse.Namespace,
    earlier: Sequence[dict[str, Any]],
    told_to_end: threading.Event,
) -> list[dict[str, Any]]:
    """All segments of one world size, those that were made before among them."""
    segments = list(earlier)
    rounds = [r for segment in segments for r in quiet_rounds(segment, args)]
    steps = max(0.0, args.steps - sum(r["steps"] for r in rounds)) / args.segments
    deadline = time.monotonic() + 60.0 * args.minutes
    for number in range(args.segments):
        if told_to_end.is_set():
            break
        left = (deadline - time.monotonic()) / (args.segments - number)
        limit = Limit(steps, time.monotonic() + left, told_to_end)
        segment = run_segment(world, args, limit, len(rounds))
        segments.append(segment)
        rounds += quiet_rounds(segment, args)
        if not rounds:
            print(f"{world} ranks, segment {number + 1}/{args.segments}: no quiet round yet")
            continue
        so_far, control_so_far = (
            sum(r[arm] for r in rounds) / sum(r["bare"] for r in rounds)
            for arm in ("keepstep", "control")
        )
        step_ms = 1000 * rounds[-1]["bare"] / (2 * segment["block_steps"])
        print(
            f"{world} ranks, segment {number + 1}/{args.segments}: {len(rounds)} quiet rounds of "
            f"{sum(len(s['rounds']) for s in segments)}, "
            f"bare step {step_ms:.1f} ms, ratio so far {so_far:.4f}, control {control_so_far:.4f}",
            flush=True,
        )
    return segments


def summed_up(segments: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    rounds = [r for segment in segments for r in quiet_rounds(segment, args)]
    bare = [r["bare"] for r in rounds]
    overhead = figures.ratio_of_sums([r["keepstep"] for r in rounds], bare, args.seed)
    control = figures.ratio_of_sums([r["control"] for r in rounds], bare, args.seed)
    # Every round counts here, disturbed or not: nothing is chosen.
    all_rounds = [r for s in segments for r in s["rounds"]]
    used_bare = [r["bare_processor"] for r in all_rounds]
    used, used_control = (
        figures.ratio_of_sums([r[f"{arm}_processor"] for r in all_rounds], used_bare, args.seed)
        for arm in ("keepstep", "control")
    )
    return {
        "steps_per_arm": int(sum(r["steps"] for r in rounds)),
        "rounds_disturbed": sum(len(s["rounds"]) for s in segments) - len(rounds),
        "ratio": overhead.listed(),
        "control": control.listed(),
        "processor": used.listed(),
        "processor_control": [used_control.value, used_control.low, used_control.high],
        "alarms": [alarm for s in segments for alarm in s["alarms"]],
        "segments": segments,
    }


@dataclass(frozen=True, slots=True)
class Limit:
    """When a segment is over."""

    steps: float
    """Per arm, in quiet rounds."""
    deadline: float
    told_to_end: threading.Event
    """By SIGTERM: hours of rounds are not thrown away because somebody needs the machine."""

    def reached(self) -> bool:
        return self.told_to_end.is_set() or time.monotonic() >= self.deadline


def run_segment(
    world: int, args: argparse.Namespace, limit: Limit, first_round: int
) -> dict[str, Any]:
    """Three fresh jobs, then rounds until this segment's share of steps is done in quiet."""
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("overhead"))
        signal.signal(signal.SIGTERM, lambda *_: limit.told_to_end.set())
        bare = stack.enter_context(bare_arm("bare", world, directory, args))
        control = stack.enter_context(bare_arm("control", world, directory, args))
        protected, keeper = stack.enter_context(keepstep_arm(world, directory, args))
        arms = (bare, protected, control)
        for arm in arms:
            arm.run(WARM_STEPS)
        step_seconds = bare.run(WARM_STEPS) / WARM_STEPS
        block, lead = block_of(step_seconds)
        wanted = math.ceil(limit.steps / (2 * block))
        for arm in arms:
            arm.blocks.clear()
        rounds: list[dict[str, float]] = []
        done = 0
        while done < wanted and not limit.reached():
            rounds.append(one_round(arms, block, lead, first_round + len(rounds)))
            done += rounds[-1]["others"] <= OTHERS_MAX or args.quick
            if sys.stderr.isatty():
                taken = f"others took {rounds[-1]['others']:.1%}"
                text = f"\r{world} ranks: round {done}/{wanted}, {taken}  "
                print(text, end="", file=sys.stderr)
        # Before the end, while everything of it still runs: did it take our stops for faults?
        protected.thaw()
        alarms = false_alarms(keeper, protected)
        return {
            "block_steps": block,
            "rounds": rounds,
            "alarms": alarms,
            "blocks": {arm.name: arm.blocks for arm in arms},
        }


def block_of(step_seconds: float, still_max: float = STILL_SECONDS_MAX) -> tuple[int, int]:
    """How many steps a block has, and how many come before it and do not count."""
    lead = 1 if step_seconds > LONG_STEP_SECONDS else LEAD_STEPS
    block = max(1, round(BLOCK_SECONDS / step_seconds))
    while block > 1 and still_seconds(block, lead, step_seconds) >= still_max:
        block -= 1
    if still_seconds(block, lead, step_seconds) >= still_max:
        raise Permanent(
            f"a step takes {step_seconds:.2f} s: who waits for two turns of the others would stand "
            f"still for {still_max:.1f} s or more, and take it for a fault; make steps shorter"
        )
    return block, lead


def still_seconds(block: int, lead: int, step_seconds: float) -> float:
    """How long who is not at turn stands still: both bare jobs have theirs."""
    return 2 * (block + lead) * step_seconds


def one_round(arms: Sequence[Arm], block: int, lead: int, number: int) -> dict[str, float]:
    """There and back. The two bare jobs change places from round to round."""
    bare, protected, control = arms
    outer, inner = (bare, control) if number % 2 == 0 else (control, bare)
    sums = {name: 0.0 for arm in arms for name in (arm.name, f"{arm.name}_processor")}
    taken = 0.0
    for arm in (outer, protected, inner, inner, protected, outer):
        sums[arm.name] += arm.run(block, lead)
        sums[f"{arm.name}_processor"] += arm.blocks[-1]["processor"]
        taken = max(taken, arm.blocks[-1]["others"])
    return {**sums, "steps": 2.0 * block, "others": taken}


def false_alarms(keeper: rig.Rig, arm: Arm) -> list[str]:
    """What Keepstep made of being stopped and continued hundreds of times: it must be nothing."""
    job = keeper.job()
    found = [f"incident {i['id']}: {i['causes']}" for i in keeper.incidents()]
    if job["generation"] != 1 or job["state"] != "running":
        found.append(f"the job is {job['state']} in generation {job['generation']}")
    started = sorted(set(arm.processes()) - set(arm.pids))
    if started:
        found.append(f"processes {started} were started on the way")
    return found


# ---------------------------------------------------------------- the arms


@contextmanager
def bare_arm(name: str, world: int, directory: Path, args: argparse.Namespace) -> Iterator[Arm]:
    """Plain torch.distributed: the same script, and no Keepstep anywhere."""
    gate = directory / f"{name}.gate"
    log = directory / f"{name}.log"
    with listening(gate) as listener:
        command = (str(WORKER), *_arguments(gate, args))
        processes = rig.bare_world(command, world, log)
        try:
            connections = accept_all(listener, world, lambda: _check(processes, log))
            arm = Arm(name, connections, lambda: [p.pid for p in processes])
            arm.freeze()
            yield arm
        finally:
            rig.end_all(processes)


@contextmanager
def keepstep_arm(
    world: int, directory: Path, args: argparse.Namespace
) -> Iterator[tuple[Arm, rig.Rig]]:
    """Two nodes, so that private state is mirrored; a warm standby beside the second's ranks."""
    gate = directory / "keepstep.gate"
    nodes = [NodePlan("n0", world // 2), NodePlan("n1", world // 2 + 1)]
    spec = rig.spec_of(directory, WORKER, _arguments(gate, args), world=world, spares=1)
    looks = {CHECK_STEPS: str(args.check_steps)} if args.check_steps else {}
    around = {**spec.environment, **looks}
    spec = replace(spec, nodes=2, ranks_per_node=world // 2, environment=around)
    with listening(gate) as listener, rig.running(spec, nodes, directory) as keeper:
        connections = accept_all(listener, world, keeper.cluster.supervisor.check)
        arm = Arm("keepstep", connections, lambda: _everything(keeper.cluster))
        # RESUME is over only when every rank has finished a step: the gate lets one through.
        keeper.wait_ready(1, REPLY_SECONDS_MAX)
        arm.freeze()
        try:
            yield arm, keeper
        finally:
            arm.thaw()


def _everything(cluster: LocalCluster) -> list[int]:
    """Workers first, so that they wake before those who watch them; the orchestrator last."""
    pids = [pid for node in cluster.nodes for pid in cluster.processes(node)]
    agents = {cluster.pid_of(node) for node in cluster.nodes}
    ordered = sorted(pids, key=lambda pid: (pid in agents, pid))
    return [*ordered, cluster.pid_of(ORCHESTRATOR)]


def _arguments(gate: Path, args: argparse.Namespace) -> tuple[str, ...]:
    return ("--gate", str(gate), "--batch", str(args.batch), "--parallel", args.parallel)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield listener


def accept_all(
    listener: socket.socket, world: int, check: Callable[[], None]
) -> list[socket.socket]:
    """The ranks' connections, in the order of ranks."""
    by_rank: dict[int, socket.socket] = {}
    listener.settimeout(1.0)
    waited = 0
    while len(by_rank) < world:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            waited += 1
            if waited > REPLY_SECONDS_MAX:
                raise Permanent(f"only {len(by_rank)} of {world} ranks came") from None
            continue
        connection.settimeout(REPLY_SECONDS_MAX)
        by_rank[int(_read_line(connection)["rank"])] = connection
    return [by_rank[rank] for rank in range(world)]


def _check(processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    if any(process.poll() is not None for process in processes):
        raise Permanent(f"a bare rank ended early: {log.read_text(errors='replace')[-2000:]}")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """One JSON line; a rank says no more than one at a time."""
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise Permanent("a rank left before its block was over; see its log")
        data += piece
    plain: dict[str, Any] = json.loads(data)
    return plain


def wake(pids: Sequence[int]) -> None:
    signal_all(pids, signal.SIGCONT)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


# ---------------------------------------------------------------- the verdict


def fastest_us(run: dict[str, Any], arm: str) -> float:
    """The 10th percentile of rank 0's step times, over all blocks of an arm."""
    blocks = (block for segment in run["segments"] for block in segment["blocks"][arm])
    return figures.percentile([us for block in blocks for us in block["rank0_step_us"]], 10.0)


def of_all_rounds(run: dict[str, Any]) -> tuple[int, float, float]:
    """Steps per arm, ratio and control where nothing is left out."""
    rounds = [one for segment in run["segments"] for one in segment["rounds"]]
    sums = {arm: sum(one[arm] for one in rounds) for arm in ("bare", "keepstep", "control")}
    steps = int(sum(one["steps"] for one in rounds))
    return steps, sums["keepstep"] / sums["bare"], sums["control"] / sums["bare"]


def conclude(results: dict[str, Any], quick: bool, parallel: str) -> int:
    """Print the figure; 0 it holds, 1 it does not, 2 the run says nothing."""
    code, limit = 0, UPPER_MAX[parallel]
    parts = []
    for world, run in results.items():
        value, upper, low, high = run["ratio"]
        control = run["control"][0]
        print(
            f"{world} ranks: {run['steps_per_arm']} steps per arm, ratio {value:.4f} "
            f"[{low:.4f}, {high:.4f}], control {control:.4f}; "
            f"{run['rounds_disturbed']} rounds were disturbed by others and do not count"
        )
        steps, every, every_control = of_all_rounds(run)
        print(
            f"{world} ranks: all rounds, disturbed or not: {steps} steps per arm, "
            f"ratio {every:.4f}, control {every_control:.4f}"
        )
        used, used_upper, used_low, used_high = run["processor"]
        print(
            f"{world} ranks: processor time of the same steps, all rounds: ratio {used:.4f} "
            f"[{used_low:.4f}, {used_high:.4f}], upper 95% {used_upper:.4f}, "
            f"control {run['processor_control'][0]:.4f}"
        )
        fast = {arm: fastest_us(run, arm) for arm in ("bare", "keepstep", "control")}
        print(
            f"{world} ranks: fastest steps, all rounds: bare {fast['bare'] / 1000:.1f} ms, "
            f"Keepstep {(fast['keepstep'] - fast['bare']) / 1000:+.2f} ms, ratio "
            f"{fast['keepstep'] / fast['bare']:.4f}, control {fast['control'] / fast['bare']:.4f}"
        )
        for alarm in run["alarms"]:
            print(f"{world} ranks: FALSE ALARM: {alarm}")
        invalid = abs(control - 1) > CONTROL_OFF_MAX or bool(run["alarms"])
        invalid = invalid or (not quick and run["steps_per_arm"] < STEPS_MIN)
        verdict = "invalid" if invalid else "holds" if upper <= limit else "too slow"
        code = max(code, {"holds": 0, "too slow": 1, "invalid": 2}[verdict])
        parts.append(
            f"{world} ranks {value:.4f}, upper 95% {upper:.4f}, control {control:.4f}: {verdict}"
        )
    how = f"overhead of {parallel} (limit {limit})"
    print(f"{how}: {'; '.join(parts)}{' (quick)' if quick else ''}")
    return code


if __name__ == "__main__":
    sys.exit(main())
