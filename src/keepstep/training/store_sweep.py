"""What generations leave in a node's store, and when it goes.

Each rank of a Gloo group leaves a key with an address for every other one: of n ranks about 8 n²
bytes per group and generation (measured: 154 + 8 n bytes for each rank), and a store meets many
generations of many jobs. Who forms groups cannot say when their keys have served. So rank 0 says
that its generation trains, once a step of it is committed: then nobody is in an older one.

    <prefix>/…            all keys of one generation, by its secret (sealed.store_prefix)
    <prefix>/…/keepstep/trains = "<generation> <job>"

Kept are the newest two that train. Those of a job that has no page in the room are not: the store's
node has a seat in every generation that meets there, and a Stop removes its page (agent/room.py).
What never trained goes when it is old and no job at all is here.

Must never: remove a key that somebody may still wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TRAINS = "keepstep/trains"
GENERATIONS_KEPT = 2
UNTRAINED_SECONDS = 3600.0
"""Longer than any start. Groups that were begun and given up leave such keys."""


class Trained(NamedTuple):
    """Whose keys these are."""

    job: str
    generation: int


def mark(job: str, generation: int) -> str:
    return f"{generation} {job}"


def read_mark(value: bytes) -> Trained | None:
    generation, _, job = value.decode(errors="replace").partition(" ")
    return Trained(job, int(generation)) if job and generation.isdigit() else None


def served(trained: Mapping[str, Trained], here: Collection[str]) -> set[str]:
    """The prefixes of generations whose keys nobody needs. `here`: jobs with a page in the room."""
    by_job: dict[str, list[tuple[int, str]]] = {}
    for prefix, whose in trained.items():
        by_job.setdefault(whose.job, []).append((whose.generation, prefix))
    found: set[str] = set()
    for job, generations in by_job.items():
        kept = GENERATIONS_KEPT if job in here else 0
        older = sorted(generations)[: max(0, len(generations) - kept)]
        found |= {prefix for _, prefix in older}
    return found


class Sweep:
    """The store process's own look at its keys, now and then."""

    def __init__(self, store: Any, room: Path) -> None:
        self._store, self._room = store, room
        self._count = 0
        self._jobs: set[str] = set()
        self._first_seen: dict[str, float] = {}

    def look(self, now: float) -> int:
        """Remove what has served; returns how many keys that were. A torch without a list of keys
        removes nothing."""
        here = self._here()
        quiet = self._store.num_keys() == self._count and self._jobs <= here
        if (quiet and (here or not self._count)) or not hasattr(self._store, "list_keys"):
            return 0
        keys: list[str] = self._store.list_keys()
        trained = self._trained(keys)
        prefixes = {_prefix(key) for key in keys}
        self._first_seen = {prefix: self._first_seen.get(prefix, now) for prefix in prefixes}
        gone = served(trained, here)
        if not here:
            old = now - UNTRAINED_SECONDS
            gone |= {prefix for prefix, seen in self._first_seen.items() if seen <= old}
        removed = [key for key in keys if _prefix(key) in gone]
        for key in removed:
            self._store.delete_key(key)
        self._jobs = {whose.job for prefix, whose in trained.items() if prefix not in gone}
        self._count = self._store.num_keys()
        return len(removed)

    def _trained(self, keys: Iterable[str]) -> dict[str, Trained]:
        found = {}
        for key in keys:
            if key.endswith(TRAINS):
                whose = read_mark(self._store.get(key))
                if whose is not None:
                    found[_prefix(key)] = whose
        return found

    def _here(self) -> set[str]:
        return {path.parent.name for path in self._room.glob("*/seat-*.page")}


def _prefix(key: str) -> str:
    return key.lstrip("/").partition("/")[0]
