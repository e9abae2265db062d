"""How much an agent may say in one message. Pure.

What it says is journaled as it came, logged, and kept for whoever follows: a text without end would
be there many times. So texts for people are cut where messages come in, with a mark. What means
something as a whole is refused instead: half a path is another path. What no agent of ours says
ends its stream.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep import wire
from keepstep.model import PATH_CHARS_MAX, REASON_CHARS_MAX, NodeId
from keepstep.orchestrator.admission import FACTS_MAX
from keepstep.orchestrator.state import DETAIL_CHARS_MAX
from keepstep.orchestrator.stepped import items_of
from keepstep.orchestrator.streams import NEWS

PROBLEM_CHARS_MAX = 2000
WORD_CHARS_MAX = 256
"""Of what is no text for people: a request's name, a digest."""
RANKS_CHARS_MAX = 1024 * 1024
"""Of a set of ranks: a hundred thousand of them, one by one."""
ITEMS_MAX = 1_000_000
"""Seats of a report and all that they list: some for each rank of the largest job."""


def why_not(message: wire.Message, node: NodeId) -> str:
    """Why no agent of this node's says so; empty if it may."""
    kind = type(message).__name__
    if getattr(message, "node", None) != node:
        return f"a {kind} of another node, or of none"
    if not isinstance(message, NEWS):
        return f"{kind} is not for an orchestrator"
    match message:
        case wire.Observed():
            fits = len(message.cover) <= RANKS_CHARS_MAX
        case wire.Stalled():
            fits = len(message.ranks) <= FACTS_MAX
        case wire.PhaseReport():
            fits = items_of(message) <= ITEMS_MAX and all(map(_seat_fits, message.seats))
        case wire.Publish():
            fits = len(message.request) <= WORD_CHARS_MAX
        case _:
            fits = True
    return "" if fits else f"a {kind} that says more than any"


def _seat_fits(seat: wire.SeatReport) -> bool:
    return len(seat.groups) <= WORD_CHARS_MAX and len(seat.alike) <= RANKS_CHARS_MAX


def refused(message: wire.Message) -> wire.Published | None:
    """The answer to what cannot even be asked for; None: it can. Without one it would be asked for
    again at each connect."""
    if not isinstance(message, wire.Publish) or len(message.path) <= PATH_CHARS_MAX:
        return None
    why = f"a path of {len(message.path)} characters; at most {PATH_CHARS_MAX}"
    return wire.Published(message.job, message.request, False, why)


def cut(message: wire.Message) -> wire.Message:
    """The same, with texts for people no longer than they are read."""
    match message:
        case wire.Observed() if len(message.detail) > DETAIL_CHARS_MAX:
            return replace(message, detail=last_of(message.detail, DETAIL_CHARS_MAX))
        case wire.StandbyReport() if len(message.detail) > PROBLEM_CHARS_MAX:
            return replace(message, detail=first_of(message.detail, PROBLEM_CHARS_MAX))
        case wire.Health() if len(message.reason) > REASON_CHARS_MAX:
            return replace(message, reason=first_of(message.reason, REASON_CHARS_MAX))
        case wire.PhaseReport() if any(len(s.problem) > PROBLEM_CHARS_MAX for s in message.seats):
            seats = tuple(
                replace(seat, problem=first_of(seat.problem, PROBLEM_CHARS_MAX))
                for seat in message.seats
            )
            return replace(message, seats=seats)
        case _:
            return message


def cut_beat(beat: wire.Heartbeat) -> wire.Heartbeat:
    """By far the most frequent message, and hardly ever too long: a copy only if it is."""
    if len(beat.jobs) <= FACTS_MAX and all(len(p.busy) <= REASON_CHARS_MAX for p in beat.jobs):
        return beat
    jobs = (replace(p, busy=first_of(p.busy, REASON_CHARS_MAX)) for p in beat.jobs[:FACTS_MAX])
    return replace(beat, jobs=tuple(jobs))


def first_of(text: str, chars_max: int) -> str:
    """The beginning of a text, and a mark if that is not all."""
    if len(text) <= chars_max:
        return text
    mark = _mark(text, chars_max)
    return text[: chars_max - len(mark) - 1] + f" {mark}"


def last_of(text: str, chars_max: int) -> str:
    """The end of a text, where a traceback says what it was, and a mark if that is not all."""
    if len(text) <= chars_max:
        return text
    mark = _mark(text, chars_max)
    return f"{mark} " + text[len(mark) + 1 - chars_max :]


def _mark(text: str, chars_max: int) -> str:
    return f"[cut: {len(text)} characters, at most {chars_max}]"
