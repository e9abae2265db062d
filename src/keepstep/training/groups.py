"""Process groups re-formed in place.

For: replacing a rank while every other process keeps its ProcessGroup objects. Groups are made by
torch itself (`init_process_group`, `new_group`, `init_device_mesh`) on a backend called
"keepstep", under which the real backend can be exchanged.

    init(rehearse) ── replay ── reform ─┐
    init ───────────────────────────────┴─> live ── abort ──> broken ── (replay) reform ──> live

Must never: launch anything between an abort and the next reform; let a loopback survive a
reform; make a group under a name that the other ranks would not choose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d as c10d

from keepstep.errors import ConfigError
from keepstep.training.ahead import Ahead
from keepstep.training.group_log import (
    GroupRecord,
    decode_log,
    digest_log,
    encode_log,
    merge_logs,
    order_of,
)
from keepstep.training.inner import Formation, GroupsBroken, InnerSpec
from keepstep.training.lost import Flight, watch
from keepstep.training.pointed_store import PointedStore
from keepstep.training.rehearsal import OBJECT_STAND_INS
from keepstep.training.reset import ddp_modules
from keepstep.training.swap_choice import choose

__all__ = [
    "GroupRecord",
    "Groups",
    "GroupsBroken",
    "decode_log",
    "encode_log",
    "merge_logs",
]

BACKEND = "keepstep"
SIDE = "keepstep-side"
KINDS = ("gloo",)
"""NCCL wants a gate before the optimizer after an abort: without it wrong state could go on."""
# A backstop only: an abort frees a blocked reform at once. Connecting to a TCPStore was measured to
# stall for 5.0 s now and then, so a limit of 5 s would turn that stall into a failed generation.
CONNECT_SECONDS_MAX = 15.0


@dataclass
class _Entry:
    """A logged group on this rank; `swap` and `group` are None where it is no member."""

    record: GroupRecord
    swap: Any = None
    group: Any = None
    claimed: bool = True


class Groups:
    """All process groups of this process, from `init` to `close`. One per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts = choose()
        self._gate: Any = self._parts.gate(GroupsBroken)
        self._entries: dict[str, _Entry] = {}
        self._formation: Formation | None = None
        self._ahead: Ahead | None = None
        self._retired: list[Any] = []
        self._generation_min = 0
        self._side: Any = None
        self._rehearsing = False
        self._replaying = False
        self._made: Any = None
        self._made_kind = ""
        self._made_trouble: GroupsBroken | None = None
        self._patches: list[tuple[Any, str, Any]] = []

    # ------------------------------------------------------------ life

    def init(
        self,
        backend: str,
        rank: int,
        world_size: int,
        store: Store,
        timeout: timedelta,
        rehearse: bool = False,
    ) -> None:
        """Make the default group, with real backends, or with loopbacks for a joiner alone."""
        if backend not in KINDS:
            raise ConfigError(f"backend {backend!r} cannot be re-formed yet: use gloo")
        self._kind, self._rank, self._world_size = backend, rank, world_size
        self._timeout = timeout
        self._rehearsing = rehearse
        self.store = PointedStore(HashStore())
        if not rehearse:
            self._formation = Formation(store, "keepstep", 0)
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=devices)
        self._patch(c10d, "_new_group_with_tag", self._new_group)
        if rehearse:
            self._patch_object_collectives()
        self._init_default()
        if self._formation is not None:
            self.store.point(self._formation.store)
            (self._side,) = self._formation.build([self._side_spec()])

    def close(self) -> None:
        """Destroy the groups and take every patch back. The process may init again."""
        self._unpatch()
        if self._ahead is not None:
            self._ahead.give_up()
            self._ahead = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._gate.on_backward(None)
        self._gate.before_nth(0, None)
        self._gate.unbind_counter()
        self._entries.clear()
        self._retired.clear()
        self._side = None
        if self._formation is not None:
            self._formation.forget()
            self._formation = None

    def reseat(self, rank: int, *, anew: bool = False) -> None:
        """Let a rehearsing process built for a tentative rank take its real one.

        A group's rank cannot change under torch, so the groups are made anew with the same names.
        Call `adopt` on the model next; sub-groups held elsewhere must be asked for again. With
        `anew`, even for the same rank, since the model itself will be built again.
        """
        if not self._rehearsing:
            raise ConfigError("only a rehearsing process may change its rank: reseat before reform")
        if rank == self._rank and not anew:
            return
        records = self.log()
        dist.destroy_process_group()
        self._entries.clear()
        self._rank = rank
        self._init_default()
        self.replay(records)

    def adopt(self, module: nn.Module) -> None:
        """Give the DDP modules inside the groups that `reseat` made. Rebuilt buckets are kept."""
        for ddp in ddp_modules(module):
            entry = self._entries[ddp.process_group.group_name]
            if entry.group is None:
                raise ConfigError(
                    f"rank {self._rank} is no member of group {entry.record.name} that the model "
                    "was built with: build it for the seat it will take"
                )
            ddp._update_process_group(entry.group)
            ddp.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ the group log

    def log(self) -> tuple[GroupRecord, ...]:
        """Every group ever made in this job, as far as this rank knows."""
        return tuple(self._refreshed(entry) for entry in list(self._entries.values()))

    def log_digest(self) -> str:
        """The same on ranks that have made the same groups."""
        return digest_log(self.log())

    def replay(self, records: Sequence[GroupRecord]) -> None:
        """Make the groups that others have and this rank lacks, under the same names.

        They carry loopbacks until the next reform. When the user's code asks for one later, it
        gets the one made here. Safe to repeat, on a joiner as on a survivor.
        """
        for record in sorted(records, key=order_of):
            entry = self._entries.get(record.name)
            if entry is None:
                self._replay_one(record)
            elif entry.record.ranks != record.ranks:
                raise ConfigError(
                    f"group {record.name} has ranks {record.ranks} elsewhere and "
                    f"{entry.record.ranks} here: make groups in the same order on every rank"
                )
            elif record.destroyed:
                entry.record = replace(entry.record, destroyed=True)

    # ------------------------------------------------------------ break and re-form

    @property
    def broken(self) -> bool:
        return bool(self._gate.broken)

    def abort(self, generation: int | None = None) -> None:
        """Free everyone blocked in a collective or in a construction. Any thread; never blocks.

        `generation` names the one to be formed next: what is already formed for it stays, and
        reforms of older ones are refused, so that a late or repeated abort is harmless.
        """
        with self._lock:
            if generation is not None:
                self._generation_min = max(self._generation_min, generation)
            formed, ahead = self._formation, self._ahead
            if formed is None or _is_older(formed, generation):
                self._gate.broken = True
            swaps = [entry.swap for entry in list(self._entries.values())]
            flights = Flight.of(swaps) if formed is not None and self._gate.broken else ()
        if formed is not None and _is_older(formed, generation):
            formed.cancel()
        if ahead is not None and _is_older(ahead, generation):
            ahead.give_up()
        watch(flights)

    def prepare(self, open_store: Callable[[], Store], prefix: str, generation: int) -> None:
        """Begin to connect a generation while the one before is in use. Any thread, repeatedly."""
        # The log before the members: a group made in this very moment must show as a difference.
        ahead = Ahead(prefix, generation, self.log_digest(), self._members())
        with self._lock:
            known = self._ahead
            newest = max(self._generation_min, known.generation if known is not None else 0)
            if generation < newest or (known is not None and known.serves(prefix, generation)):
                return
            self._ahead = ahead
        if known is not None:
            known.give_up()
        specs = [*(self._spec(entry.record) for entry in ahead.members), self._side_spec()]
        ahead.start(open_store, specs)

    def prepared(self, generation: int) -> str | None:
        """The digest of the group log that a generation was prepared with; None if it was not."""
        ahead = self._ahead
        return ahead.log if ahead is not None and ahead.generation == generation else None

    def reform(
        self,
        open_store: Callable[[], Store],
        prefix: str,
        generation: int,
        connect_seconds_max: float = CONNECT_SECONDS_MAX,
    ) -> None:
        """Connect every group anew under `prefix/generation` and swap the backends in place.

        What was prepared for it is used; the store is not even opened then.

        Raises GroupsBroken when aborted meanwhile or when a peer does not come in time; the
        groups stay broken then, and the caller tries a newer generation.
        """
        self.prepare(open_store, prefix, generation)
        ahead = self._ahead
        if ahead is None or not ahead.serves(prefix, generation):
            raise GroupsBroken(f"generation {generation} is older than {self._generation_min}")
        try:
            if ahead.log != self.log_digest():
                raise GroupsBroken("a group was made or destroyed since these were prepared")
            formation, backends = ahead.finish(connect_seconds_max)
            self._install(formation, ahead.members, backends)
        except GroupsBroken:
            self._gate.broken = True
            ahead.give_up()
            raise
        finally:
            with self._lock:
                self._ahead = None if self._ahead is ahead else self._ahead

    @property
    def side(self) -> Any:
        """The raw backend for Keepstep's own traffic: not counted, no tags of the user's."""
        self._check_live()
        return self._side

    # ------------------------------------------------------------ what the session listens to

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def rehearsing(self) -> bool:
        return self._rehearsing

    @property
    def launched(self) -> int:
        """Collectives launched by this process since `init`."""
        return int(self._gate.launched)

    @property
    def launched_in_backward(self) -> int:
        """Collectives launched inside backward passes since `reset_backward`."""
        return int(self._gate.in_backward)

    def bind_counter(self, buffer: Any, offset: int) -> None:
        """Keep `launched` in 8 bytes of the caller's shared memory, for other processes to read."""
        self._gate.bind_counter(buffer, offset)

    def on_backward(self, fn: Callable[[], object] | None) -> None:
        """Call `fn` right before the first collective of each backward pass."""
        self._gate.on_backward(fn)

    def before_nth(self, n: int, fn: Callable[[], object] | None) -> None:
        """Call `fn` right before the n-th collective in backward since the reset; 0 disables."""
        self._gate.before_nth(n, fn)

    def reset_backward(self) -> None:
        """Start counting anew: the session calls this at the start of each attempt."""
        self._gate.reset_backward()

    # ------------------------------------------------------------ making groups

    def _init_default(self) -> None:
        self._made_kind = self._kind
        dist.init_process_group(
            BACKEND,
            store=self.store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        group = dist.group.WORLD
        assert group is not None
        self._note(group.group_name, tuple(range(self._world_size)), self._timeout, group)
        self._raise_trouble()

    def _create(self, options: Any, _backend_options: Any) -> Any:
        """What torch calls for each group this rank is a member of."""
        rank, size = options.group_rank, options.group_size
        inner: Any = None
        if not self._rehearsing and not self._replaying:
            assert self._formation is not None
            spec = InnerSpec(options.group_id, self._made_kind, rank, size, options.timeout)
            try:
                (inner,) = self._formation.build([spec])
            except GroupsBroken as trouble:
                # The name is spent, here as on the ranks that got through. So the group is made
                # and logged, unusable until the next reform, and the caller's retry will find it.
                self._gate.broken = True
                self._made_trouble = trouble
        if inner is None:
            inner = self._parts.loopback(rank, size)
        self._made = self._parts.swap(rank, size, self._gate, inner)
        return self._made

    def _new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        backend_options: Any = None,
        pg_tag: str | None = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> Any:
        """Stands in for torch's inner entry to group making; same parameters."""
        members = tuple(range(self._world_size)) if ranks is None else tuple(ranks)
        members = tuple(sorted(members)) if sort_ranks else members
        if use_local_synchronization and self._rank not in members:
            return None
        found = self._claim(members, use_local_synchronization)
        if found is not None:
            return dist.GroupMember.NON_GROUP_MEMBER if found.group is None else found.group
        if not self._rehearsing:
            self._gate.check()
        self._made_kind = self._kind_of(backend)
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.Backend(self._made_kind))
        group = self._make(members, timeout, use_local_synchronization, group_desc, pg_tag)
        self._raise_trouble()
        return group

    def _make(
        self,
        members: tuple[int, ...],
        timeout: timedelta,
        hashed: bool,
        description: str | None = None,
        tag: str | None = None,
    ) -> Any:
        self._made = None
        name = "" if hashed else str(c10d._world.group_count)
        group = self._original("_new_group_with_tag")(
            list(members),
            timeout,
            BACKEND,
            None,
            tag,
            use_local_synchronization=hashed,
            group_desc=description,
            sort_ranks=False,
        )
        held = None if group is dist.GroupMember.NON_GROUP_MEMBER else group
        self._note(held.group_name if hashed and held else name, members, timeout, held)
        return group

    def _note(self, name: str, ranks: tuple[int, ...], timeout: timedelta, group: Any) -> None:
        seconds = timeout.total_seconds()
        record = GroupRecord(len(self._entries), name, ranks, self._made_kind, seconds)
        claimed = self._made_trouble is None and not self._replaying
        self._entries[name] = _Entry(
            record, self._made if group is not None else None, group, claimed
        )
        self._made = None
        if group is not None:
            # `dist.get_backend` tells what is underneath: libraries, and torch, branch on it.
            c10d._world.pg_map[group] = (record.backend, c10d._world.pg_map[group][1])

    def _claim(self, ranks: tuple[int, ...], hashed: bool) -> _Entry | None:
        for entry in self._entries.values():
            same = entry.record.ranks == ranks and entry.record.hashed == hashed
            if same and not entry.claimed:
                entry.claimed = True
                return entry
        return None

    def _replay_one(self, record: GroupRecord) -> None:
        if record.hashed and self._rank not in record.ranks:
            return
        self._made_kind = record.backend
        self._replaying = True
        try:
            if not record.hashed:
                c10d._world.group_count = int(record.name)
            timeout = timedelta(seconds=record.timeout_seconds)
            self._make(record.ranks, timeout, record.hashed)
        finally:
            self._replaying = False
        entry = self._entries.get(record.name)
        if entry is None:
            raise ConfigError(
                f"group {record.name} of ranks {record.ranks} cannot be replayed under its name: "
                "make groups with use_local_synchronization in the same order on every rank"
            )
        entry.record = replace(entry.record, destroyed=record.destroyed)

    def _kind_of(self, backend: str | None) -> str:
        if backend is None or backend == BACKEND:
            return self._kind
        kinds = {part.rpartition(":")[2] for part in backend.lower().split(",")}
        if len(kinds) == 1 and kinds <= set(KINDS):
            return kinds.pop()
        raise ConfigError(f"a group on {backend!r} cannot be re-formed yet: use gloo")

    def _raise_trouble(self) -> None:
        trouble, self._made_trouble = self._made_trouble, None
        if trouble is not None:
            raise trouble

    # ------------------------------------------------------------ re-forming

    def _members(self) -> list[_Entry]:
        """Groups to connect, in an order that is the same on every rank, else ranks deadlock."""
        alive = [
            entry
            # A copy: this may run on the link's thread while the script makes a group.
            for entry in list(self._entries.values())
            if entry.swap is not None and not self._refreshed(entry).destroyed
        ]
        return sorted(alive, key=lambda entry: order_of(entry.record))

    def _install(
        self, formation: Formation, members: Sequence[_Entry], backends: Sequence[Any]
    ) -> None:
        with self._lock:
            if formation.cancelled or formation.generation < self._generation_min:
                raise GroupsBroken("the groups were aborted while they were being re-formed")
            old: list[Any] = [
                entry.swap.swap(backend) for entry, backend in zip(members, backends, strict=False)
            ]
            old.append(self._side)
            self._side = backends[-1]
            if self._formation is not None:
                self._formation.forget()
            self._formation = formation
            self.store.point(formation.store)
            self._rehearsing = False
            self._gate.broken = False
        self._unpatch_object_collectives()
        self.drop_retired()
        self._retired = old

    def drop_retired(self) -> None:
        """Free the backends that the last reform replaced. Not in a pause, and on a thread."""
        # A Gloo backend that is freed joins its threads, which look around every 10 ms, and holds
        # the interpreter meanwhile; one that missed the abort would hold us until its timeout.
        old, self._retired = self._retired, []
        if old:
            threading.Thread(target=old.clear, name="keepstep-drop", daemon=True).start()

    def _refreshed(self, entry: _Entry) -> GroupRecord:
        gone = entry.group is not None and entry.group not in c10d._world.pg_names
        return replace(entry.record, destroyed=True) if gone else entry.record

    def _spec(self, record: GroupRecord) -> InnerSpec:
        timeout = timedelta(seconds=record.timeout_seconds)
        rank = record.ranks.index(self._rank)
        return InnerSpec(record.name, record.backend, rank, len(record.ranks), timeout)

    def _side_spec(self) -> InnerSpec:
        return InnerSpec(SIDE, self._kind, self._rank, self._world_size, self._timeout, shares=True)

    def _check_live(self) -> None:
        self._gate.check()
        if self._rehearsing:
            raise GroupsBroken("a rehearsing process has no peers yet: reform first")

    # ------------------------------------------------------------ patches, from init to close

    def _patch(self, owner: Any, name: str, stand_in: Any) -> None:
        self._patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, stand_in)

    def _original(self, wanted: str) -> Any:
        return next(original for _, name, original in self._patches if name == wanted)

    def _unpatch(self, only: Sequence[str] | None = None) -> None:
        for patch in reversed(self._patches[:]):
            owner, name, original = patch
            if only is None or name in only:
                setattr(owner, name, original)
                self._patches.remove(patch)

    def _patch_object_collectives(self) -> None:
        """Objects from a peer that is not there cannot be unpickled: leave what the caller has."""
        for name, stand_in in OBJECT_STAND_INS.items():
            self._patch(c10d, name, stand_in)
            self._patch(dist, name, stand_in)

    def _unpatch_object_collectives(self) -> None:
        self._unpatch(tuple(OBJECT_STAND_INS))


# ---------------------------------------------------------------- small pure parts


def _is_older(made: Formation | Ahead, generation: int | None) -> bool:
    return generation is None or made.generation < generation
