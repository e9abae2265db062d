"""Makes the samples beside it, with the code of version 1 of the wire: commit b93dfae.

    git archive b93dfae | tar -x -C OLD
    PYTHONPATH=OLD/src python tests/wire/v1/make.py tests/wire/v1

Nobody has to run it again: the samples are what that version said, and they stay as they are. It is
kept to show where they come from, and as a pattern for the samples of the next version.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import tempfile
import types
import typing
from enum import Enum
from pathlib import Path

from keepstep import codec, wire
from keepstep.chaos.simulate import Simulation
from keepstep.orchestrator import brain, events, run, state
from keepstep.orchestrator.journal import SqliteJournal

SEED = 11
"""Two jobs, planned moves, lost racks, and a restart of the orchestrator."""
SNAPSHOT_EVERY = 40


def sample(kind: object, number: int = 1) -> object:
    """A value of a type in which everything is filled in."""
    if isinstance(kind, typing.NewType):
        return sample(kind.__supertype__, number)
    if kind in (str, int, float, bool):
        return {str: f"text {number}", int: number, float: number + 0.5, bool: True}[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[number % len(kind)]
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return (sample(arguments[0], number), sample(arguments[0], number + 1))
    if origin is dict:
        return {"1": sample(arguments[1], number), "2": sample(arguments[1], number + 1)}
    if origin in (typing.Union, types.UnionType):
        return sample(arguments[0], number)
    hints = typing.get_type_hints(kind)
    return kind(**{name: sample(hint, number + i) for i, (name, hint) in enumerate(hints.items())})


def least(kind: type) -> object:
    """A record with no more than it must have."""
    hints = typing.get_type_hints(kind)
    needed = {
        field.name: sample(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return kind(**needed)


def messages() -> list[object]:
    made: list[object] = []
    for kind in wire._KINDS.values():
        if kind is not wire.Order:
            made += [least(kind), sample(kind)]
    for kind in wire._ACTIONS.values():
        for action in (least(kind), sample(kind)):
            made.append(dataclasses.replace(sample(wire.Order), action=action))
    return made


def reachable(kinds: list[type]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The fields of every record in these, and the members of every enumeration."""
    fields: dict[str, list[str]] = {}
    members: dict[str, list[str]] = {}

    def visit(kind: object) -> None:
        if isinstance(kind, typing.NewType):
            visit(kind.__supertype__)
        for argument in typing.get_args(kind):
            visit(argument)
        if isinstance(kind, type) and issubclass(kind, Enum):
            members[kind.__name__] = [member.value for member in kind]
        if dataclasses.is_dataclass(kind) and kind.__name__ not in fields:
            fields[kind.__name__] = [field.name for field in dataclasses.fields(kind)]
            for hint in typing.get_type_hints(kind).values():
                visit(hint)

    for kind in kinds:
        visit(kind)
    return dict(sorted(fields.items())), dict(sorted(members.items()))


class Written(Simulation):
    """A simulated cluster whose steps are written to a real journal."""

    def __init__(self, seed: int, path: Path) -> None:
        self.file = SqliteJournal(path)
        self.standing = self.file.begin_term()
        super().__init__(seed)
        self._keep(0)

    def _keep(self, seq: int) -> None:
        plain = {"cluster": state.to_plain(self.cluster), "now": self._now}
        self.standing = self.file.snapshot(self.standing.term, self.standing.head, plain, seq)

    def feed(self, event: events.Event) -> None:
        if not self.serving:
            return
        if isinstance(event, events.TermBegan):
            self.standing = self.file.begin_term()
        taken: list[brain.Decision] = []
        step, before = brain.step, self._now

        def noted(*given: object) -> brain.Decision:
            taken.append(step(*given))
            return taken[-1]

        brain.step = noted
        try:
            super().feed(event)
        finally:
            brain.step = step
        if taken and run._to_be_kept(taken[0]):
            jobs = run._jobs_touched(event, taken[0])
            entry = run._entry(run._Stepped(run._Waiting(event), taken[0], jobs, {}, before))
            self.standing = self.file.append(self.standing.term, self.standing.head, [entry])
            if self.standing.seq % SNAPSHOT_EVERY == 0:
                self._keep(self.standing.seq)


def main(where: Path) -> None:
    frames = [codec.dumps(wire.to_plain(message)).decode() for message in messages()]
    (where / "frames.jsonl").write_text("".join(f"{frame}\n" for frame in frames))
    fields, members = reachable([*wire._KINDS.values(), *wire._ACTIONS.values()])
    table = {"fields": fields, "members": members}
    (where / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    told = [event for kind in events._KINDS.values() for event in (least(kind), sample(kind))]
    plain = [codec.dumps(events.to_plain(event)).decode() for event in told]
    (where / "events.jsonl").write_text("".join(f"{event}\n" for event in plain))
    (where / "cluster.json").write_bytes(codec.dumps(state.to_plain(sample(state.Cluster))) + b"\n")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal.db")
        written = Written(SEED, path)
        written.run()
        written.file.close()
        raw = path.read_bytes()
    (where / "journal.db.gz").write_bytes(gzip.compress(raw, mtime=0))
    ends = {name: str(job.state) for name, job in written.cluster.jobs.items()}
    print(f"{len(frames)} frames; journal: seq {written.standing.seq}, {ends}, {written.faults}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
