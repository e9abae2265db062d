"""Whole-protocol transcripts: commands in, reasons and orders out, compared with a file.

A transcript is a text file of blocks: a command, a line of dashes, what the brain said. Run the
tests with KEEPSTEP_REWRITE=1 to write what it says now, and review the diff.

    exit 2 signal=9 step=41
    ----
    rank 2 on n2 exited with signal 9 at step 41
    -> n0 n1 Quiesce g2
"""

from __future__ import annotations

from typing import get_type_hints

from keepstep import portion, wire
from keepstep.model import (
    CHECK_STEPS,
    Generation,
    JobId,
    JobSpec,
    NodeId,
    Phase,
    Policy,
    Rank,
    Severity,
    Sign,
    Term,
)
from keepstep.orchestrator import brain, events, placing, portions, rules, state

JOB = JobId("train")


def _new_cluster():
    cluster = state.new_cluster("transcript")
    cluster.rules = rules.NEWEST
    return cluster


class Player:
    """Plays the commands of one transcript against a brain."""

    def __init__(self) -> None:
        self.cluster = _new_cluster()
        self.now = 0.0
        self.focus = JOB
        """The job that commands speak of, unless they say `job=NAME`."""
        self.journal: list[tuple[events.Event, float]] = []
        self.shards = 1
        self.stride = 0

    def play(self, command: str) -> list[str]:
        verb, *words = command.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        self.focus = JobId(options.pop("job", JOB))
        return getattr(self, f"do_{verb}")(plain, options)

    # ------------------------------------------------------------ commands

    def do_submit(self, plain, options):
        """submit nodes=2 ranks=2 spares=1 priority=5 hold=60 unit=node check=20"""
        known = get_type_hints(Policy)
        told = {name: known[name](text) for name, text in options.items() if name in known}
        policy = Policy(**{"hold_seconds_max": float(options.get("hold", 60)), **told})
        spec = JobSpec(
            self.focus,
            "train.py",
            nodes=int(options["nodes"]),
            ranks_per_node=int(options.get("ranks", 1)),
            spares=int(options.get("spares", 0)),
            priority=int(options.get("priority", 0)),
            policy=policy,
            environment={CHECK_STEPS: options["check"]} if "check" in options else {},
        )
        return self.feed(events.Submitted(spec))

    def do_hello(self, plain, options):
        """hello n0 slots=2 boot=b1 workers=RANK.INCARNATION@GENERATION:SLOT,… standbys=SLOT,…"""
        workers = []
        for item in filter(None, options.get("workers", "").split(",")):
            who, _, rest = item.partition("@")
            rank, _, incarnation = who.partition(".")
            generation, _, slot = rest.partition(":")
            workers.append(
                wire.WorkerFact(
                    self.focus,
                    Rank(int(rank)),
                    int(slot),
                    int(incarnation),
                    Generation(int(generation)),
                )
            )
        standbys = [
            wire.StandbyFact(self.focus, int(slot), 1, True)
            for slot in filter(None, options.get("standbys", "").split(","))
        ]
        node = NodeId(plain[0])
        return self.feed(
            wire.Hello(
                node,
                f"{node}.local",
                int(options.get("slots", 2)),
                peer_port=7000,
                store_port=int(options.get("store", 7001)),
                boot=options.get("boot", "b1"),
                workers=tuple(workers),
                standbys=tuple(standbys),
                labels={k: v for k, v in options.items() if k in placing.LABELS},
                obeyed={self.focus: Generation(int(options["obeyed"]))}
                if "obeyed" in options
                else {},
            )
        )

    def do_behind(self, plain, options):
        """behind n0 obeyed=4: this node has obeyed what the journal does not have."""
        obeyed = {self.focus: Generation(int(options["obeyed"]))}
        return self.feed(events.JournalBehind(NodeId(plain[0]), Term(1), 150, 101, obeyed))

    def do_standby(self, plain, options):
        node, slot, what = plain
        return self.feed(
            wire.StandbyReport(NodeId(node), self.focus, int(slot), 1, what == "ready")
        )

    def do_exit(self, plain, options):
        return self._observed(plain[0], Sign.EXIT, options)

    def do_raise(self, plain, options):
        return self._observed(plain[0], Sign.EXCEPTION, {"code": "1", **options})

    def do_finish(self, plain, options):
        said = []
        for rank in plain:
            said += self._observed(rank, Sign.FINISHED, options)
        return said

    def do_rots(self, plain, options):
        """rots 1: this rank finds its own state changed; cover=0: what it keeps of that portion."""
        return self._observed(plain[0], Sign.CORRUPT, {"detail": "weight-changed", **options})

    def do_broken(self, plain, options):
        return self._observed(plain[0], Sign.BROKEN, {"detail": "connection-reset", **options})

    def do_behind_of(self, plain, options):
        """behind_of 2 cover=1: rank 2 got no record of rank 1's step."""
        return self._observed(plain[0], Sign.UNCOVERED, {"detail": "a-hole", **options})

    def do_hang(self, plain, options):
        """hang 1: a health program says so."""
        return self._observed(plain[0], Sign.HANG, {"detail": "device-lost", **options})

    def do_store_lost(self, plain, options):
        return self.feed(wire.Observed(NodeId(plain[0]), self.focus, Sign.STORE_LOST))

    def do_stalled(self, plain, options):
        """stalled 0:10 1:9 2:9! : collectives launched per rank; ! means stopped."""
        said = []
        for word in plain:
            rank, _, launched = word.partition(":")
            seat = self._seat(rank)
            fact = wire.StallFact(
                seat.rank, seat.incarnation, 7, int(launched.rstrip("!")), launched.endswith("!")
            )
            said += self.feed(
                wire.Stalled(seat.node, self.focus, self.job.generation, (fact,), 4.0)
            )
        return said

    def do_report(self, plain, options):
        """report quiesce at=41 1=40 2=torn 3=corrupt except=2 only=0,1 g=3 problem2=words
        seconds=0.5 (a step) busy0=40 also1=1-2 (a portion) 2=ready41 3=shard-corrupt"""
        phase = Phase(plain[0])
        at = int(options.get("at", -1))
        migration = self.job.migration
        skipped = {int(r) for r in options.get("except", "").split(",") if r}
        chosen = {int(r) for r in options.get("only", "").split(",") if r}
        generation = Generation(int(options.get("g", self.job.generation)))
        said = []
        for seat in self.job.roster.seats:
            gone = migration is not None and seat.rank in migration.gone
            if gone or seat.rank in skipped or (chosen and seat.rank not in chosen):
                continue
            report = self._seat_report(phase, seat.rank, at, options)
            said += self.feed(wire.PhaseReport(seat.node, self.focus, generation, phase, (report,)))
        return said

    def _seat_report(self, phase, rank, at, options):
        what = options.get(str(rank), str(at))
        problem = options.get(f"problem{rank}", "").replace("_", " ")
        migration = self.job.migration
        fresh = migration is not None and rank in migration.fresh
        if phase is Phase.QUIESCE and (fresh or what == "empty"):
            return wire.SeatReport(rank, problem=problem)
        if f"busy{rank}" in options:
            return wire.SeatReport(rank, busy_seconds=float(options[f"busy{rank}"]))
        ready, half = what.startswith("ready"), what.startswith("half")
        what = what.removeprefix("ready").removeprefix("half")
        boundary = int(what) if what.lstrip("-").isdigit() else at
        held = self._portions(rank)
        digests = {
            name: f"bad-{rank}" if _corrupt(what, name, held) else f"good-{boundary}"
            for name in held
        }
        unsynced = (held[-1],) if half else ()
        if half:
            # Its own update is in; of what all hold it lacks the others'.
            del digests[held[-1]]
        if f"also{rank}" in options:
            digests[options[f"also{rank}"]] = "new"
        entries = () if what == "lonely" else (boundary, boundary + 1)
        intact = what != "torn" and boundary >= 0
        received = phase is Phase.VERIFY and migration is not None and rank in migration.joined
        return wire.SeatReport(
            rank,
            boundary,
            intact,
            digests,
            ready,
            tuple(held) if phase is Phase.RESUME and self.shards > 1 else (),
            entries,
            int(options.get("bytes", 100)),
            step=boundary,
            step_seconds=0.0 if phase is Phase.VERIFY else float(options.get("seconds", 1.0)),
            moved_bytes=100 if received else 0,
            moved_seconds=0.5 if received else 0.0,
            problem=problem,
            covers=self._covers(phase, rank, int(options.get("kept", boundary))),
            unsynced=unsynced,
        )

    def do_shards(self, plain, options):
        """shards 2: from now on rank r holds, beside what all hold, the shard r mod 2."""
        self.shards = int(plain[0])
        return []

    def do_mirrors(self, plain, options):
        """mirrors 1: from now on rank r+1 keeps a cover of rank r's shard, of the last 8 steps."""
        self.stride = int(plain[0])
        return []

    def do_uncovered(self, plain, options):
        """uncovered: what `status` says of state without a second home."""
        ranks = map(Rank, range(len(self.job.roster.seats)))
        return [f"no second home: {sorted(portions.alone(self.job, ranks)) or 'nobody'}"]

    def _covers(self, phase, rank, at):
        if not self.stride or phase not in (Phase.QUIESCE, Phase.RESUME):
            return ()
        ward = portion.name_of([(rank - self.stride) % len(self.job.roster.seats)])
        return (wire.Cover(ward, max(0, at - 8), at),)

    def _portions(self, rank):
        """What a rank holds, the shard first."""
        size = len(self.job.roster.seats)
        names = [portion.name_of(range(rank % self.shards, size, self.shards))]
        return [*names, portion.name_of(range(size))] if self.shards > 1 else names

    def do_migrate(self, plain, options):
        """migrate 1 2 to=n3 request=r1; migrate home; migrate 1 cancel"""
        ranks = tuple(Rank(int(word)) for word in plain if word.isdigit())
        to, request = NodeId(options.get("to", "")), options.get("request", "")
        home, cancel = "home" in plain, "cancel" in plain
        return self.feed(events.MigrateAsked(self.focus, ranks, "asked", to, home, request, cancel))

    def do_drain(self, plain, options):
        return self.feed(events.DrainAsked(NodeId(plain[0]), "patches"))

    def do_undrain(self, plain, options):
        return self.feed(events.UndrainAsked(NodeId(plain[0])))

    def do_taint(self, plain, options):
        """taint n1 slot=0 severity=leave seconds=60 source=alertmanager/Hot reason=hot"""
        return self.feed(
            events.TaintAsked(
                NodeId(plain[0]),
                options.get("reason", "bad-memory"),
                Severity(options.get("severity", "avoid")),
                int(options.get("slot", -1)),
                options.get("source", "operator"),
                float(options.get("seconds", 3600)),
            )
        )

    def do_untaint(self, plain, options):
        slot, source = int(options.get("slot", -1)), options.get("source", "")
        return self.feed(events.UntaintAsked(NodeId(plain[0]), slot, source=source))

    def do_health(self, plain, options):
        """health n1 imminent slot=0 reason=hot: what the node's health program says."""
        node, word = plain
        severity = None if word == "well" else Severity(word)
        slot, reason = int(options.get("slot", -1)), options.get("reason", "ecc")
        return self.feed(wire.Health(NodeId(node), severity, reason, slot, 300.0))

    def do_freeze(self, plain, options):
        return self.feed(events.FreezeAsked("a switch is replaced", options.get("request", "")))

    def do_unfreeze(self, plain, options):
        return self.feed(events.UnfreezeAsked(options.get("request", "")))

    def do_warm(self, plain, options):
        """warm 1 2: these ranks' targets are ready."""
        said = []
        for word in plain:
            seat = self.job.migration.coming[int(word)]
            ready = wire.SeatReport(seat.rank, problem=options.get("problem", "").replace("_", " "))
            said += self.feed(
                wire.PhaseReport(seat.node, self.focus, self.job.promised, Phase.QUIESCE, (ready,))
            )
        return said

    def do_agree(self, plain, options):
        """agree at=41 1=42 seconds=0.05: where all ranks are."""
        said = []
        for seat in self.job.roster.seats:
            at = int(options.get(str(seat.rank), options["at"]))
            where = wire.SeatReport(
                seat.rank, at, step_seconds=float(options.get("seconds", 1.0)), unsettled=at < 2
            )
            said += self.feed(
                wire.PhaseReport(seat.node, self.focus, self.job.promised, Phase.AGREE, (where,))
            )
        return said

    def do_silent(self, plain, options):
        return self.feed(events.NodeSilent(NodeId(plain[0])))

    def do_vouched(self, plain, options):
        """vouched n1 after=50: at that moment its ranks are known to make steps."""
        self.now += float(options.get("after", 0.0))
        return self.feed(events.NodeVouched(NodeId(plain[0])))

    def do_link(self, plain, options):
        return self.feed(events.LinkLost(NodeId(plain[0])))

    def do_wait(self, plain, options):
        """wait 0.5 late=0.4: time passes, then a tick, which our own loop may be late for."""
        self.now += float(plain[0])
        return self.feed(events.Tick(float(options.get("late", 0.0))))

    def do_stop(self, plain, options):
        return self.feed(events.StopAsked(self.focus, "SIGTERM", save="save" in plain))

    def do_rewind(self, plain, options):
        return self.feed(events.StopAsked(self.focus, "steps are contaminated", rewind=True))

    def do_contaminated(self, plain, options):
        """contaminated: what `status` says of steps in which corrupt state took part."""
        return [f"contaminated: {list(self.job.contaminated)}"]

    def do_publish(self, plain, options):
        generation = Generation(int(options.get("g", self.job.generation)))
        rank, step = Rank(int(plain[0])), int(options["step"])
        node = NodeId(options.get("node", self._seat(plain[0]).node))
        return self.feed(
            wire.Publish(node, self.focus, generation, rank, step, f"ckpt-{step}", f"r{step}")
        )

    def do_away(self, plain, options):
        """away 300: for so long the journal cannot be written, and nothing is decided."""
        self.now += float(plain[0])
        return self.feed(events.ControlPlaneBack(float(plain[0]), "the database was away"))

    def do_restart(self, plain, options):
        """restart limit=1 down=300: the orchestrator dies; later another reads the journal."""
        down = float(options.get("down", 0.0))
        self.now += down
        replayed = _new_cluster()
        for event, now in self.journal:
            again = events.from_plain(events.to_plain(event))
            replayed = brain.step(replayed, again, now).cluster
        assert state.fingerprint(replayed) == state.fingerprint(self.cluster)
        self.cluster = state.from_plain(state.to_plain(replayed))
        limit = int(options.get("limit", 0))
        term = Term(self.cluster.term + 1)
        return self.feed(events.TermBegan(term, limit, down, rules=rules.NEWEST))

    # ------------------------------------------------------------ feeding and telling

    @property
    def job(self):
        return self.cluster.jobs[self.focus]

    def _seat(self, rank):
        return self.job.roster.seats[int(rank)]

    def _observed(self, rank, sign, options):
        seat = self._seat(rank)
        code = -int(options["signal"]) if "signal" in options else int(options.get("code", 0))
        return self.feed(
            wire.Observed(
                NodeId(options.get("node", seat.node)),
                self.focus,
                sign,
                seat.rank,
                int(options.get("incarnation", seat.incarnation)),
                Generation(int(options.get("g", self.job.generation))),
                int(options.get("step", -1)),
                code,
                options.get("detail", f"Traceback-of-rank-{rank}" if code == 1 else ""),
                options.get("cover", ""),
                float(options.get("age", 0.0)),
            )
        )

    def feed(self, event):
        self.now += 0.001
        decision = brain.step(self.cluster, event, self.now)
        self.cluster = decision.cluster
        if decision.changed:
            self.journal.append((event, self.now))
        said = [note.why for note in decision.notes]
        if not said and decision.why:
            said = [f"({decision.why})"]
        said += [tell(order) for order in decision.orders]
        said += [
            f"-> {node} Published {'accepted' if a.accepted else 'refused'}: {a.why}"
            for node, a in decision.answers
        ]
        return said

    def standing(self) -> str:
        job = self.cluster.jobs.get(self.focus)
        if job is None:
            return "no job"
        phase = f" {job.migration.phase}" if job.migration else ""
        over = f" exit {job.exit_code}" if job.state.over else ""
        return f"= {job.state} g{job.generation}{phase}{over}"


def tell(order: wire.Order) -> str:
    """One order in one line."""
    action = order.action
    head = f"-> {' '.join(order.nodes)} {type(action).__name__} g{order.generation}"
    match action:
        case wire.StartWorkers(seats=seats, resume_from=origin):
            return f"{head} {_seats(seats)}" + (f" from {origin}" if origin else "")
        case wire.StartStandby(slot=slot) | wire.DropStandby(slot=slot):
            return f"{head} slot {slot}"
        case wire.Assign(seat=seat):
            return f"{head} {_seats((seat,))}"
        case wire.Fence(seats=seats):
            return f"{head} {_seats(seats)}"
        case wire.Reform():
            return f"{head} {_reform(action)}"
        case wire.Quiesce(at=at, leaving=leaving):
            ahead = f" at {at}" if at >= 0 else ""
            return head + ahead + (f" leaving {_seats(leaving)}" if leaving else "")
        case wire.Resume(boundary=boundary):
            return f"{head} at {boundary}"
        case wire.Apply(boundary=boundary, ranks=ranks):
            return f"{head} to {boundary} rank {' '.join(map(str, ranks))}"
        case wire.Save(boundary=boundary, writers=writers, path=path, homes=homes):
            listed = sorted(set(writers.values()))
            who = f"rank {listed[0]}"
            if len(writers) > 1:
                who = " ".join(f"{rank}:{name}" for name, rank in writers.items())
            return f"{head} at {boundary} by {who} to {path}{_homes(homes)}"
        case wire.Stop(exit_code=code):
            return f"{head} exit {code}"
        case _:
            return head


def _corrupt(what, name, held) -> bool:
    """corrupt: all that it holds; shard-corrupt: its shard only; whole-corrupt: what all hold."""
    parts = {"corrupt": held, "shard-corrupt": held[:1], "whole-corrupt": held[1:]}
    return name in parts.get(what, ())


def _seats(seats) -> str:
    return " ".join(f"{s.rank}.{s.incarnation}@{s.node}:{s.slot}" for s in seats)


def _reform(action: wire.Reform) -> str:
    moves = [
        f"{m.target}<-{'+'.join(map(str, m.sources))}"
        + (f" of {m.portion}" if len(action.digests) > 1 else "")
        + (f" wave {m.wave}" if m.wave else "")
        + (" staged" if m.staged else "")
        + (" made again" if m.rebuilt else "")
        for m in action.moves
    ]
    known = action.membership
    where = f"store {known.store.host}:{known.store.port} stride {known.mirror_stride}"
    return f"at {action.boundary} [{', '.join(moves)}] {where}{_homes(action.homes)}"


def _homes(homes) -> str:
    if not homes:
        return ""
    listed = [f"{h.rank}:{'+'.join(e.host.split('.')[0] for e in h.endpoints)}" for h in homes]
    return f" homes {' '.join(listed)}"


def render(text: str) -> str:
    """Play a transcript's commands and write it anew."""
    player = Player()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        commands = [line for line in lines if not line.startswith("#")]
        if not commands:
            blocks.append("\n".join(comments))
            continue
        command = commands[0]
        said = player.play(command)
        blocks.append("\n".join([*comments, command, "----", *said, player.standing()]))
    return "\n\n".join(blocks) + "\n"
