"""A rank's private state: found and taken in by a thread while the groups are re-formed.

Before that a joiner looks ahead: from the newest entry of its seat, long before the boundary is
known, it learns which pass over the data is under way, and puts that pass in order.

Private and shared state do not overlap, so the two need not wait for each other. The loader's next
batch, which takes longest, is fetched last and awaited only when training goes on.

Must never: swallow what the user's code raises here. It is kept for the training thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING

from keepstep import sabotage, wire
from keepstep.errors import NoHome, Permanent
from keepstep.model import Rank
from keepstep.page import NEWEST
from keepstep.training.generators import put_back, read_generators
from keepstep.training.loader import Cursor
from keepstep.training.mirror import fetch_from
from keepstep.training.private import decode_entry
from keepstep.training.randomness import read_randomness, restore_randomness
from keepstep.training.seat import Place

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

SWITCH_SECONDS = 0.0002
"""Python's own 5 ms, times every chunk of a transfer, were half of a small state's pause."""


class Finding:
    """Finds this rank's private entry; a receiver takes it, and fetches its first batch.

    Who has the entry already hands it over as `known`.
    """

    def __init__(
        self, keeper: Keeper, reform: wire.Reform, receiving: bool, known: bytes | None = None
    ) -> None:
        self._known = known
        self._found = threading.Event()
        self._outcome: bytes | Exception = NoHome("not found yet")
        self._trouble: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(keeper, reform, receiving), name="keepstep-find", daemon=True
        )
        self._thread.start()

    def _run(self, keeper: Keeper, reform: wire.Reform, receiving: bool) -> None:
        with _short_turns:
            self._find(keeper, reform, receiving)

    def _find(self, keeper: Keeper, reform: wire.Reform, receiving: bool) -> None:
        try:
            payload = self._known or _find_private(keeper, reform)
            if receiving:
                if keeper.foresight is not None:
                    keeper.foresight.end()
                take_private(keeper, payload, reform.boundary)
            self._outcome = payload
        except Exception as error:
            self._outcome = error
            receiving = False
        self._found.set()
        try:
            if receiving and keeper.cursor is not None:
                # After the generators: a loader that begins a pass draws from them.
                keeper.cursor.peek()
        except Exception as error:
            # Whatever the user's dataset raises is the training thread's to see.
            self._trouble = error

    def payload(self) -> bytes:
        self._found.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def finish(self) -> None:
        """The data is at its place; what the loader raised is the user's to see.

        Never as it came: a RuntimeError might pass for a fault of the machine and be retried, and
        a loader that failed once may have skipped a batch.
        """
        self._thread.join()
        if self._trouble is not None:
            raise Permanent("the loader failed as this rank took its seat") from self._trouble


class Foresight:
    """Puts the data in order for a joiner that has its seat but knows no boundary yet.

    It is a guess and nothing else: what was foreseen is used only where it fits the boundary that
    is ordered later, and whatever goes wrong here will show again, in earnest, there.
    """

    def __init__(self, place: Place, cursor: Cursor) -> None:
        self._lock = threading.Lock()
        self._ended = False
        if place.home is None:
            return
        threading.Thread(
            target=self._run, args=(place, place.home, cursor), name="keepstep-foresee", daemon=True
        ).start()

    def end(self) -> None:
        """From here on the cursor and the generators are the caller's. Never waits for a peer."""
        with self._lock:
            self._ended = True

    def _run(self, place: Place, home: wire.Home, cursor: Cursor) -> None:
        try:
            payload, _ = fetch_from(place, home, NEWEST, place.secret)
            if payload is None:
                return
            position = decode_entry(payload).loader
            with self._lock, _short_turns:
                if not self._ended:
                    _foresee(cursor, position)
        except Exception as error:
            # The user's sampler, for one. It is asked again when it counts.
            sys.stderr.write(f"keepstep: the data could not be put in order ahead: {error!r}\n")
            sys.stderr.flush()


def _foresee(cursor: Cursor, position: dict[str, int]) -> None:
    before = read_randomness()
    try:
        cursor.foresee(position)
    finally:
        restore_randomness(before)


class _ShortTurns(contextlib.AbstractContextManager[None]):
    """A sampler that shuffles holds the interpreter, and each chunk that lands would wait for its
    turn: let turns be short meanwhile. Looking ahead and finding may overlap: the last one out
    puts back what the first one found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_SECONDS))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


_short_turns = _ShortTurns()


def _find_private(keeper: Keeper, reform: wire.Reform) -> bytes:
    """This rank's entry for the boundary: its own ring's, else from one of its homes."""
    place = keeper.place
    payload = keeper.homes.find(reform.boundary)
    if payload is not None:
        return payload
    nowhere = wire.Home(Rank(place.rank), ())
    home = next((h for h in reform.homes if h.rank == place.rank), nowhere)
    secret = reform.membership.secret
    payload, why = fetch_from(place, home, reform.boundary, secret)
    if payload is None:
        raise NoHome(f"no private state of rank {place.rank} at {reform.boundary}: {why}")
    return payload


def take_private(keeper: Keeper, payload: bytes, boundary: int) -> None:
    """Become what this seat was at the boundary: data, private tensors, generators last."""
    entry = decode_entry(payload)
    if entry.boundary != boundary:
        raise Permanent(f"an entry of boundary {entry.boundary} came for {boundary}")
    assert keeper.cursor is not None, "a joiner has a cursor"
    now = read_generators(keeper.registry)
    for name, raw in zip(entry.names, entry.tensors, strict=True):
        if not keeper.registry.restore_private(name, raw):
            raise Permanent(f"private state {name!r} has no place in this rank's registry")
    if not sabotage.off("loader"):
        keeper.cursor.seek(entry.loader)
    if not sabotage.off("rng"):
        restore_randomness(entry.randomness)
    if keeper.cursor.has_batches:
        # Those of this boundary, which stay: the entry is from before they were fetched, and
        # nobody fetches them again.
        put_back(keeper.registry, now)
    else:
        keeper.recorder.before_fetch(boundary)
