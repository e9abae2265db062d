"""Two versions of the wire and of the journal, side by side.

tests/wire/v1 holds what version 1 said, made by its own code: every message, every event, a whole
state, a whole journal. It is read for ever. What is said to a peer of version 1 is held against the
fields that version 1 knew.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import types
import typing
from enum import Enum
from pathlib import Path

import pytest

from keepstep import codec, wire, wire_v1
from keepstep.agent import preload
from keepstep.agent.links import Link
from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.chaos.fleet_leader import Leader
from keepstep.errors import ConfigError, WireError
from keepstep.model import (
    Endpoint,
    Generation,
    JobId,
    JobSpec,
    NodeId,
    OrderId,
    Phase,
    Rank,
    Seat,
    Severity,
    Sign,
    Term,
)
from keepstep.orchestrator import events, replica, state
from keepstep.orchestrator.journal import CLUSTER, Loaded, verify, write_snapshot
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.snapshots import body_of

V1 = Path(__file__).resolve().parents[1] / "wire" / "v1"
TABLE = json.loads((V1 / "table.json").read_text(encoding="utf-8"))
FRAMES = (V1 / "frames.jsonl").read_text(encoding="utf-8").splitlines()
FRAMES_OF = {json.loads(frame)["kind"]: frame.encode() for frame in FRAMES}
EVENTS = (V1 / "events.jsonl").read_text(encoding="utf-8").splitlines()


def records(kinds: typing.Iterable[object]) -> dict[str, type]:
    """Every record that can be part of these, by name."""
    found: dict[str, type] = {}

    def visit(kind: object) -> None:
        if isinstance(kind, typing.NewType):
            visit(kind.__supertype__)
        for argument in typing.get_args(kind):
            visit(argument)
        if dataclasses.is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = kind
            for hint in typing.get_type_hints(kind).values():
                visit(hint)

    for kind in kinds:
        visit(kind)
    return found


NOW = records([*wire._KINDS.values(), *wire._ACTIONS.values()])


# ---------------------------------------------------------------- the wire


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_what_version_1_said_is_still_understood(number: int):
    plain = json.loads(FRAMES[number])
    message = wire.decode(FRAMES[number].encode())
    assert type(message).__name__ == plain["kind"]
    # And said again to it, it is the same, byte for byte.
    assert wire.encode(message, 1)[4:].decode() == FRAMES[number]


def test_the_samples_have_every_message_and_every_action_of_version_1():
    said = [json.loads(frame) for frame in FRAMES]
    actions = {plain["body"]["action"]["kind"] for plain in said if plain["kind"] == "Order"}
    assert {plain["kind"] for plain in said} == TABLE["fields"].keys() & wire._KINDS.keys()
    assert actions == TABLE["fields"].keys() & wire._ACTIONS.keys()


def test_the_table_in_the_program_is_that_of_version_1():
    assert {name: text.split() for name, text in wire_v1.FIELDS.items()} == TABLE["fields"]
    assert {name: text.split() for name, text in wire_v1.MEMBERS.items()} == TABLE["members"]


def test_nothing_that_version_1_says_was_taken_away():
    names = {name: {f.name for f in dataclasses.fields(kind)} for name, kind in NOW.items()}
    gone = {
        f"{record}.{field}"
        for record, fields in TABLE["fields"].items()
        for field in fields
        if field not in names.get(record, ())
    }
    assert gone == set(), "an agent or orchestrator of version 1 still says this"


def test_what_came_after_version_1_has_a_default():
    without = {
        f"{name}.{field.name}"
        for name, kind in NOW.items()
        for field in dataclasses.fields(kind)
        if name in TABLE["fields"] and field.name not in TABLE["fields"][name]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert without == set(), "version 1 leaves this out: what does that mean?"


def sample(kind: object, number: int = 1) -> object:
    """A value of a type in which everything is filled in."""
    if isinstance(kind, typing.NewType):
        return sample(kind.__supertype__, number)
    if kind in (str, int, float, bool):
        return {str: f"text {number}", int: number, float: number + 0.5, bool: True}[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is tuple:
        return (sample(arguments[0], number), sample(arguments[0], number + 1))
    if origin is dict:
        return {"1": sample(arguments[1], number)}
    if origin in (typing.Union, types.UnionType):
        return sample(arguments[0], number)
    hints = typing.get_type_hints(kind)
    return kind(**{name: sample(hint, number + i) for i, (name, hint) in enumerate(hints.items())})


def check_known(value: object, plain: object) -> None:
    """Version 1, which refuses every key and every word that it does not know, accepts this."""
    if isinstance(value, Enum):
        assert plain in TABLE["members"][type(value).__name__]
    elif dataclasses.is_dataclass(value):
        assert plain.keys() == set(TABLE["fields"][type(value).__name__])
        for name, inner in plain.items():
            check_known(getattr(value, name), inner)
    elif isinstance(value, tuple):
        for item, inner in zip(value, plain, strict=True):
            check_known(item, inner)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_known(item, plain[key])


def messages() -> list[wire.Message]:
    orders = [
        dataclasses.replace(sample(wire.Order), action=sample(kind))
        for kind in wire._ACTIONS.values()
    ]
    others = [sample(kind) for kind in wire._KINDS.values() if kind is not wire.Order]
    return [*orders, *others]


def named(message: wire.Message) -> str:
    return type(getattr(message, "action", message)).__name__


def quiet(value: object) -> object:
    """The same, but what an older version must not be told without it says nothing."""
    if isinstance(value, tuple):
        return tuple(map(quiet, value))
    if not dataclasses.is_dataclass(value):
        return value
    kept = {
        field.name: quiet(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if f"{type(value).__name__}.{field.name}" not in wire.NEEDED
    }
    return type(value)(**kept)


@pytest.mark.parametrize("message", messages(), ids=named)
def test_version_1_is_told_what_it_knows_and_nothing_else(message: wire.Message):
    if named(message) not in TABLE["fields"]:
        with pytest.raises(WireError, match="no word"):
            wire.encode(message, 1)
        return
    message = quiet(message)
    plain = wire.to_plain(message, 1)
    assert plain["v"] == 1
    body = dict(plain["body"])
    if isinstance(message, wire.Order):
        assert body["action"].keys() == {"kind", "body"}
        body["action"] = body["action"]["body"]
    check_known(message, body)
    # Read with defaults it is the message again, but for what version 1 has no word for.
    assert wire.to_plain(wire.from_plain(plain), 1) == plain


def test_an_order_for_an_older_node_leaves_out_what_it_does_not_know():
    spec = JobSpec(JobId("j"), "train.py", terms="9c1f")
    membership = wire.Membership(1, "s", Endpoint("h", 1), 1)
    seat = Seat(Rank(0), NodeId("n"), 0, 0)
    action = wire.StartWorkers(spec, (seat,), membership)
    order = wire.Order(Term(1), Generation(1), OrderId("o"), JobId("j"), (NodeId("n"),), action)
    ((_, old),), ((_, new),) = list(wire.frames(order, 1)), list(wire.frames(order))
    assert b"9c1f" not in old
    assert wire.decode(new[4:]) == order
    assert wire.decode(old[4:]).action.spec == dataclasses.replace(spec, terms="")


def test_a_word_that_the_older_version_lacks_is_an_error_and_not_half_a_message():
    older = codec.Older(wire_v1.FIELDS, {"Severity": "avoid imminent"})
    with pytest.raises(WireError, match="no word for Severity 'leave'"):
        codec.to_older(wire.Health(NodeId("n"), Severity.LEAVE), older)
    with pytest.raises(WireError, match="no word for Cover"):
        codec.to_older(wire.Cover("p", 1, 2), codec.Older({}, {}))


def test_a_rank_that_is_half_updated_is_not_told_of_as_whole():
    whole = wire.PhaseReport(
        NodeId("n"), JobId("j"), Generation(1), Phase.QUIESCE, (wire.SeatReport(Rank(0), 7),)
    )
    assert b"unsynced" not in wire.encode(whole, 1)
    half = dataclasses.replace(whole, seats=(wire.SeatReport(Rank(0), 7, unsynced=("p",)),))
    with pytest.raises(WireError, match=r"no word for SeatReport.unsynced"):
        wire.encode(half, 1)


@pytest.mark.parametrize(
    ("header", "version"), [("", 1), ("1-2", 2), ("2-3", 2), ("1-1", 1), (" 1-9 ", 2)]
)
def test_an_agent_takes_the_highest_version_that_both_speak(header: str, version: int):
    assert wire.offered(header) == version


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("3-4", "upgrade this side first"),
        ("0-0", "upgrade the side that speaks it first"),
        ("two", "names no versions"),
        ("1-" + "9" * 5000, "names no versions"),
    ],
)
def test_with_nothing_in_common_the_refusal_says_which_side_to_upgrade(header: str, word: str):
    with pytest.raises(WireError, match=word) as refused:
        wire.offered(header)
    assert len(str(refused.value)) < 300


def test_a_frame_of_an_unknown_version_says_which_side_to_upgrade():
    with pytest.raises(WireError, match=r"version 3 .*only 1 to 2: upgrade this side"):
        wire.from_plain({"v": 3, "kind": "Refused", "body": {"why": ""}})
    with pytest.raises(WireError, match=r"version 0 .*upgrade the side that speaks it"):
        wire.from_plain({"v": 0, "kind": "Refused", "body": {"why": ""}})


class Written:
    """A worker's end of a link, as far as the agent writes to it."""

    def __init__(self) -> None:
        self.told: list[dict] = []
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None:
        self.told.append(json.loads(frame[4:]))

    def get_write_buffer_size(self) -> int:
        return 0


def test_a_worker_that_was_started_by_an_older_release_is_told_what_it_knows():
    writer = Written()
    link = Link(1, writer, version=wire.agreed(wire.decode(FRAMES_OF["WorkerHello"]).speaks))
    order = dataclasses.replace(sample(wire.Order), action=wire.Agree())
    link.send(order)
    link.send(order)
    (told,) = writer.told
    assert told["v"] == 1


def test_what_an_agent_says_to_an_older_preload_server_is_what_it_always_said():
    # That server outlives its agent, and there is no version in what they say.
    fields = {
        kind: " ".join(field.name for field in dataclasses.fields(record))
        for kind, record in preload._KINDS.items()
    }
    assert fields == {
        "fork": "key entry arguments environment directory log preload kind",
        "seen": "pid start kind",
        "forked": "key pid start kind",
        "exited": "key pid start code kind",
        "ready": "pid children kind",
    }


# ---------------------------------------------------------------- the journal


@pytest.mark.parametrize("text", EVENTS, ids=lambda text: json.loads(text)["kind"])
def test_an_event_that_version_1_journaled_is_still_read(text: str):
    plain = json.loads(text)
    event = events.from_plain(plain)
    again = events.to_plain(event)
    assert again["kind"] == plain["kind"]
    assert again["v"] == events.VERSION
    assert nested(plain["body"], json.loads(codec.dumps(again["body"])))


def nested(old: object, new: object) -> bool:
    """All that was said is still there; more may be."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and nested(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(nested, old, new))
    return old == new


def test_a_state_that_version_1_kept_is_still_read():
    plain = json.loads((V1 / "cluster.json").read_text(encoding="utf-8"))
    again = json.loads(codec.dumps(state.to_plain(state.from_plain(plain))))
    assert nested(plain, again)


@pytest.fixture
def journal(tmp_path: Path) -> typing.Iterator[SqliteJournal]:
    """A copy of the journal that version 1 wrote."""
    path = tmp_path / "journal.db"
    path.write_bytes(gzip.decompress((V1 / "journal.db.gz").read_bytes()))
    opened = SqliteJournal(path)
    yield opened
    opened.close()


def test_a_journal_that_version_1_wrote_is_whole_and_replays(journal: SqliteJournal):
    heads = verify(journal)
    loaded = journal.load()
    assert heads.keys() == {CLUSTER, "small", "train"}
    assert loaded.at_seq == 120
    assert len(loaded.entries) == 13
    found = replica.of(loaded)
    assert set(found.cluster.jobs) == {"small", "train"}
    assert found.moment >= loaded.snapshot["now"]


def test_all_of_it_replays_from_its_first_snapshot(journal: SqliteJournal):
    rows = journal._connection.execute("SELECT body FROM entries ORDER BY seq").fetchall()
    entries = tuple(json.loads(body)["entry"] for (body,) in rows)
    (first,) = journal._connection.execute(
        "SELECT body FROM snapshots ORDER BY seq LIMIT 1"
    ).fetchone()
    assert len(entries) == 133
    found = replica.of(Loaded(json.loads(first), 0, entries))
    assert set(found.cluster.jobs) == {"small", "train"}


def test_it_goes_on_in_this_version_and_is_read_again(journal: SqliteJournal):
    found = replica.of(journal.load())
    standing = journal.begin_term()
    body = body_of(found.cluster, found.moment)
    write_snapshot(journal, standing, body, standing.seq)
    again = replica.of(journal.load())
    assert state.fingerprint(again.cluster) == state.fingerprint(found.cluster)


def test_a_journal_of_a_later_version_is_refused_with_a_sentence():
    later = {**json.loads(body_of(state.new_cluster("s"), 1.0)), "v": events.VERSION + 1}
    with pytest.raises(ConfigError, match=r"newer Keepstep.*install that release here"):
        replica.of(Loaded(later, 0, ()))
    told = {**events.to_plain(events.Tick()), "v": events.VERSION + 1}
    with pytest.raises(ConfigError, match="newer Keepstep"):
        events.from_plain(told)


def test_a_simulated_leader_writes_its_version_and_refuses_a_later_one():
    journal = MemoryJournal()
    Leader(journal, 0.0, 0.0, lambda _: None)
    snapshot = journal.load().snapshot
    assert snapshot["v"] == events.VERSION
    standing = journal.begin_term()
    later = codec.dumps({**snapshot, "v": events.VERSION + 1}).decode()
    write_snapshot(journal, standing, later, standing.seq)
    with pytest.raises(ConfigError, match="newer Keepstep"):
        Leader(journal, 0.0, 0.0, lambda _: None)


def test_signs_of_version_1_are_what_they_were():
    assert [str(sign) for sign in Sign][:7] == TABLE["members"]["Sign"]
