"""Simulated collectives: the steps of a job, their end, and the moving of state in waves.

    plain     launch -> all are there -> update
    sharded   launch -> all are there -> gradients complete -> all have voted -> update

A rank that dies or hears of a death between its vote and its update leaves others behind that have
made it: these windows are as long as the steps themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepstep.chaos.simulated import RING_ENTRIES, Agent, Worker, World, state_at
from keepstep.model import Generation, JobId, Move, NodeId, Phase, Rank, Sign
from keepstep.portion import name_of
from keepstep.wire import Apply, Home, Reform, Save

ORDER_SECONDS_MAX = 0.01
"""So long an order is on its way to an agent whose stream stands."""


@dataclass(slots=True)
class Moving:
    """One round of REFORM: who is there, and what was ordered."""

    action: Reform
    here: dict[Rank, Worker] = field(default_factory=dict)


class Group:
    """The collectives of one job: what all ranks of a generation do together."""

    def __init__(
        self, world: World, job: JobId, size: int, steps: int, shards: Sequence[range] = ()
    ) -> None:
        self.world = world
        self.job = job
        self.size = size
        self.steps = steps
        whole = name_of(range(size))
        self.sharded = bool(shards)
        self._held = [
            (*(name_of(shard) for shard in shards if rank in shard), whole) for rank in range(size)
        ]
        self.votes: dict[Generation, dict[Rank, Worker]] = {}
        """Who has voted for the update of a generation's step."""
        self.updated = 0
        """The highest boundary that anybody came to by an update."""
        self.waiting: dict[Generation, dict[Rank, Worker]] = {}
        self.rounds: dict[Generation, Moving] = {}
        self.committed = 0
        """Steps that can no longer be lost."""
        self.newest = Generation(0)
        """The newest generation that made a step."""
        self.raise_at: dict[tuple[Rank, int], int] = {}
        """Where user code raises, and how often."""
        self.base = 0
        """Where the workers last started: private state there comes with the checkpoint."""
        self.outdated = Generation(0)
        """Workers of older generations than this were given up, and others started anew."""
        self.unheard: set[Worker] = set()
        """Which of those nobody could tell so."""
        self.told: dict[Worker, int] = {}
        """The others, with the stream on which their agent is told."""
        self.outdated_at = 0.0
        self.bad_saves = 0
        """How many of the next parts of a checkpoint cannot be written."""

    def held(self, rank: Rank) -> tuple[str, ...]:
        """The portions that a rank holds."""
        return self._held[rank]

    def portions(self) -> list[str]:
        return sorted({name for held in self._held for name in held})

    def right(self, worker: Worker) -> bool:
        """It holds what it should at its boundary."""
        return worker.state == state_at(self._held[worker.rank], worker.boundary)

    def outdate(self, generation: Generation) -> None:
        """Everybody starts anew: older workers are given up, told so or not."""
        self.outdated, self.outdated_at = generation, self.world.now()
        self.told = {
            worker: agent.session
            for worker in self.everybody()
            if worker.alive and (agent := self.agent(worker)).linked and not agent.cut
        }
        self.unheard = {w for w in self.everybody() if w.alive and w not in self.told}

    def reinstate(self, generation: Generation) -> None:
        """The journal has forgotten that anybody after these was started."""
        self.outdated = min(self.outdated, generation)

    # ------------------------------------------------------------ a step

    def launch(self, worker: Worker) -> None:
        """Enter the step's collective; its private entry has two homes before that."""
        if worker.stop_at is not None:
            at, generation = worker.stop_at
            if worker.boundary >= min(at, self.steps):
                self.agent(worker).quiesce(worker, generation)
                return
        if worker.boundary >= self.steps:
            worker.mode = "finished"
            self.agent(worker).observe(worker, Sign.FINISHED)
            worker.alive = False
            return
        if self._raises(worker):
            return
        self._keep_entry(worker, worker.boundary + 1)
        worker.launched += 1
        worker.moved_at = self.world.now()
        here = self.waiting.setdefault(worker.generation, {})
        other = here.get(worker.rank)
        assert other is None or other is worker or not other.alive, (
            f"rank {worker.rank} has two owners in generation {worker.generation}"
        )
        here[worker.rank] = worker
        self.meet(worker.generation)

    def meet(self, generation: Generation) -> None:
        """If all are there and can be reached, the collective runs."""
        here = self.waiting.get(generation, {})
        members = list(here.values())
        if len(members) < self.size or not all(self._able(w, generation) for w in members):
            return
        if generation < self.outdated and self.unheard.issuperset(members):
            # Nobody can tell them that they were given up: what they do counts for nothing.
            return
        boundaries = {worker.boundary for worker in members}
        assert len(boundaries) == 1, f"ranks of one generation train at boundaries {boundaries}"
        assert generation >= self.newest, "an older generation makes progress"
        self.newest = generation
        (boundary,) = boundaries
        assert all(map(self.right, members)), "wrong state trains"
        self._commit(generation, boundary, members)
        del self.waiting[generation]
        for worker in members:
            if worker.first_step >= 0 and boundary > worker.first_step:
                worker.first_step = -1
                self.agent(worker).report(worker, Phase.RESUME)
            delay = self.world.random.uniform(0.03, 0.09)
            then = self._vote if self.sharded else self._apply
            self.world.later(delay, lambda w=worker, t=then: t(w, generation, boundary))  # type: ignore[misc]

    def _commit(self, generation: Generation, boundary: int, members: Sequence[Worker]) -> None:
        """All steps before this one are made. Of those who were given up it counts for nothing: it
        is lost with the rest of what they made, and they make it only while their end is still on
        its way to them."""
        if generation >= self.outdated:
            assert boundary >= self.committed, f"step {boundary} is computed again"
            self.committed = boundary
        elif self.world.now() > self.outdated_at + ORDER_SECONDS_MAX:
            told = [w.seat for w in members if self.told.get(w) == self.agent(w).session]
            assert not told, f"{told[0]} was given up, and trains"

    def _able(self, worker: Worker, generation: Generation) -> bool:
        agent = self.agent(worker)
        fit = worker.alive and not worker.stopped and agent.up and not agent.cut
        return fit and worker.mode == "training" and worker.generation == generation

    def _vote(self, worker: Worker, generation: Generation, boundary: int) -> None:
        """All gradients are in: who has them says so, and waits until everybody has."""
        if not self._trains(worker, generation):
            return
        worker.ready = True
        worker.launched += 1
        worker.moved_at = self.world.now()
        here = self.votes.setdefault(generation, {})
        here[worker.rank] = worker
        if len(here) < self.size or not all(self._able(w, generation) for w in here.values()):
            return
        del self.votes[generation]
        for other in here.values():
            delay = self.world.random.uniform(0.001, 0.06)
            self.world.later(delay, lambda w=other: self._apply(w, generation, boundary))  # type: ignore[misc]

    def _apply(self, worker: Worker, generation: Generation, boundary: int) -> None:
        if self._trains(worker, generation):
            self._update(worker, boundary)
            self.launch(worker)

    def _trains(self, worker: Worker, generation: Generation) -> bool:
        alive = worker.alive and not worker.stopped and self.agent(worker).up
        return alive and worker.mode == "training" and worker.generation == generation

    def _update(self, worker: Worker, boundary: int) -> None:
        before, after = (state_at(self.held(worker.rank), at) for at in (boundary, boundary + 1))
        # What was wrong before the update is wrong after it.
        worker.state = {
            name: after[name] if worker.state[name] == before[name] else -1 for name in after
        }
        worker.boundary, worker.ready = boundary + 1, False
        self.updated = max(self.updated, worker.boundary)

    def catch_up(self, worker: Worker, action: Apply) -> None:
        """Others have made the update: so does this one, once, however often it is told."""
        assert action.boundary <= self.updated, f"nobody has made the update to {action.boundary}"
        generation = worker.generation

        def update() -> None:
            fit = worker.alive and not worker.stopped and self.agent(worker).up
            if not fit or worker.generation != generation or worker.mode != "quiesced":
                return
            if worker.ready and worker.boundary == action.boundary - 1:
                self._update(worker, worker.boundary)
            self.agent(worker).report(worker, Phase.QUIESCE)

        self.world.later(self.world.random.uniform(0.001, 0.1), update)

    def _raises(self, worker: Worker) -> bool:
        key = (worker.rank, worker.boundary)
        if self.raise_at.get(key, 0) <= 0:
            return False
        self.raise_at[key] -= 1
        trace = f"Traceback: rank {worker.rank} at {worker.boundary}"
        self.die(worker, Sign.EXCEPTION, 1, trace)
        return True

    def _keep_entry(self, worker: Worker, boundary: int) -> None:
        value = hash((int(worker.rank), boundary))
        self._put(self.agent(worker), worker.rank, boundary, value)
        for other in self.waiting.get(worker.generation, {}).values():
            if other.rank == (worker.rank + worker.stride) % self.size:
                self._put(self.agent(other), worker.rank, boundary, value)
        # Whoever launches later stores the entries that should have reached it before.
        for other in self.waiting.get(worker.generation, {}).values():
            if (other.rank + worker.stride) % self.size == worker.rank:
                entry = hash((int(other.rank), other.boundary + 1))
                self._put(self.agent(worker), other.rank, other.boundary + 1, entry)

    def _put(self, agent: Agent, rank: Rank, boundary: int, value: int) -> None:
        ring = agent.rings.setdefault(self.job, {}).setdefault(rank, {})
        ring[boundary] = value
        for old in sorted(ring)[:-RING_ENTRIES]:
            del ring[old]

    # ------------------------------------------------------------ an end

    def die(self, worker: Worker, sign: Sign, exit_code: int, detail: str = "") -> None:
        """A process ends; those who were in a collective with it notice soon."""
        if not worker.alive:
            return
        worker.alive = False
        agent = self.agent(worker)
        if agent.up:
            agent.observe(worker, sign, exit_code, detail)
        if worker.leaves_in != worker.generation:
            self.notice(worker.generation)

    def notice(self, generation: Generation) -> None:
        for other in self.everybody():
            if other.generation == generation and other.mode in ("training", "reforming"):
                delay = self.world.random.uniform(0.01, 0.3)
                self.world.later(delay, lambda w=other: self._broken(w, generation))  # type: ignore[misc]

    def _broken(self, worker: Worker, generation: Generation) -> None:
        fit = worker.alive and not worker.stopped and worker.generation == generation
        if fit and worker.mode in ("training", "reforming"):
            if worker.stop_at is not None:
                self.agent(worker).quiesce(worker, worker.stop_at[1])
                return
            worker.mode, worker.broken = "broken", True
            self.agent(worker).observe(worker, Sign.BROKEN, detail="connection reset")

    def everybody(self) -> list[Worker]:
        workers = (worker for agent in self.world.agents() for worker in agent.workers)
        return [worker for worker in workers if worker.job == self.job]

    def agent(self, worker: Worker) -> Agent:
        found = self.world.agent(worker.seat.node)
        assert found is not None
        return found

    # ------------------------------------------------------------ REFORM

    def reform(self, worker: Worker, action: Reform) -> None:
        # From here on the step is retried: its gradients are thrown away.
        worker.mode, worker.ready = "reforming", False
        moving = self.rounds.setdefault(worker.generation, Moving(action))
        moving.here[worker.rank] = worker
        if len(moving.here) == self.size:
            generation = worker.generation
            self.world.later(0.05, lambda: self._wave(generation, 0))

    def _wave(self, generation: Generation, wave: int) -> None:
        """One wave: targets are torn while it runs, whole after it."""
        moving = self.rounds[generation]
        if not all(self._reforms(worker, generation) for worker in moving.here.values()):
            return
        moves = [move for move in moving.action.moves if move.wave == wave]
        if wave > max((move.wave for move in moving.action.moves), default=0):
            self._verify(generation)
            return
        for move in moves:
            self._forbid_last_home(moving, move)
        for move in moves:
            target = moving.here[move.target]
            if target.alive and target.generation == generation and not move.staged:
                target.intact = False

        def land() -> None:
            for move in moves:
                target = moving.here[move.target]
                sources = [moving.here[rank] for rank in move.sources]
                if not self._reforms(target, generation):
                    continue
                if not all(self._reachable(s, generation) for s in sources):
                    return
                lie = any(source.lies for source in sources)
                value = -99 if lie else sources[0].state[move.portion]
                target.state = {**target.state, move.portion: value}
                target.boundary = moving.action.boundary
                more = (m.wave > wave for m in moving.action.moves if m.target == move.target)
                target.intact = not lie and not any(more)
                if lie:
                    # Each wave is verified before the next: the others are not touched.
                    self.agent(target).report(target, Phase.VERIFY)
                    return
            self._wave(generation, wave + 1)

        self.world.later(self.world.random.uniform(0.02, 0.2), land)

    def _reforms(self, worker: Worker, generation: Generation) -> bool:
        return worker.mode == "reforming" and self._reachable(worker, generation)

    def _reachable(self, worker: Worker, generation: Generation) -> bool:
        agent = self.agent(worker)
        fit = worker.alive and not worker.stopped and agent.up and not agent.cut
        return fit and worker.generation == generation

    def _forbid_last_home(self, moving: Moving, move: Move) -> None:
        """No receiving in place into an older whole state while one node alone holds the newer."""
        worker, boundary = moving.here[move.target], moving.action.boundary
        if move.staged or not worker.intact or worker.boundary < 0:
            return
        assert worker.boundary != boundary or not self._right_parts(worker), (
            f"rank {move.target} is torn, and it is a home of boundary {boundary}"
        )
        holders = [w for w in moving.here.values() if move.portion in self.held(w.rank)]
        homes = {w.seat.node for w in holders if w.alive and w.intact and w.boundary == boundary}
        elsewhere = {w.seat.node for w in holders} - homes
        assert len(homes) > 1 or not elsewhere, (
            f"rank {move.target} is received into while only {homes} holds boundary {boundary}"
        )

    def _right_parts(self, worker: Worker) -> list[str]:
        wanted = state_at(self.held(worker.rank), worker.boundary)
        return [name for name, value in worker.state.items() if wanted[name] == value]

    def _verify(self, generation: Generation) -> None:
        moving = self.rounds[generation]
        for worker in moving.here.values():
            agent = self.agent(worker)
            if not worker.alive or worker.generation != generation or worker.stopped:
                continue
            if worker.mode != "reforming" or not agent.up:
                continue
            problem = self._fetch_private(worker, moving.action)
            worker.mode = "ready"
            agent.report(worker, Phase.VERIFY, problem)

    def _fetch_private(self, worker: Worker, action: Reform) -> str:
        boundary = action.boundary
        wanted = next((home for home in action.homes if home.rank == worker.rank), None)
        if wanted is None or boundary == self.base:
            return ""
        value = self._private(wanted, boundary)
        if value is None:
            return f"no private state of rank {worker.rank} at boundary {boundary}"
        self._put(self.agent(worker), worker.rank, boundary, value)
        return ""

    def _private(self, home: Home, boundary: int) -> int | None:
        """A rank's entry, from the first of its homes that answers and has it."""
        for endpoint in home.endpoints:
            agent = self.world.agent(NodeId(endpoint.host.removeprefix("addr-")))
            if agent is None or not agent.up or agent.cut:
                continue
            value = agent.ring(self.job, home.rank).get(boundary)
            if value is not None:
                assert value == hash((int(home.rank), boundary)), "somebody else's private state"
                return value
        return None

    # ------------------------------------------------------------ SAVE

    def save(self, worker: Worker, action: Save) -> str:
        """A rank's part of a checkpoint; says why it could not be written."""
        if self.bad_saves > 0:
            self.bad_saves -= 1
            return "cannot save: no space left on device"
        assert sorted(action.writers) == self.portions(), "some portion is not saved"
        mine = [name for name, writer in action.writers.items() if writer == worker.rank]
        wanted = state_at(tuple(mine), action.boundary)
        assert all(worker.state[name] == wanted[name] for name in mine), "wrong state is saved"
        fetched = action.homes if action.writers[min(action.writers)] == worker.rank else ()
        for home in fetched:
            known = action.boundary == self.base
            if not known and self._private(home, action.boundary) is None:
                return f"cannot save: no private state of rank {home.rank} at {action.boundary}"
        return ""
