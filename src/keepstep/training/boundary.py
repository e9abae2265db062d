"""Steps and their boundaries on one rank: snapshot, unwind, pace.

        begin(s) -- forward, backward -- grads_ready(s) -- update -- applied(s) => boundary s+1
           ^                 |
           +---- unwind -----+     a broken step is left for the boundary where it began

Only what a forward pass changes is copied at the boundary: generators, buffers, plain values.
Parameters and optimizer state change at the one update point, so they need no copy.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepstep import sabotage
from keepstep.errors import ConfigError
from keepstep.training.buffers import BufferPlace, put_in_order, same_bytes
from keepstep.training.generators import Generators, put_back, read_generators
from keepstep.training.holders import local_of
from keepstep.training.optimizers import load_groups, settings_of
from keepstep.training.plain import encode, plain_digest
from keepstep.training.registry import Registry

_PACE_STEPS = 15
_LEARNING_STEPS = 2
_Laid = tuple[BufferPlace, torch.Tensor | None]


@dataclass(slots=True)
class _Snapshot:
    generators: Generators
    others: dict[str, Any]
    groups: dict[str, list[dict[str, Any]]]
    syncs: list[bool]


class Boundary:
    """Where this rank is, and the way back to where its step began."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.step = 0
        """The boundary: steps 0 … step-1 are applied here."""
        self.in_attempt = False
        self.updating = False
        """The optimizer has begun: from here on the step is not unwound."""
        self.updated = False
        """The optimizer is through."""
        self.in_hooks = False
        """The program's hooks behind it are not: nobody knows what they have changed."""
        self.torn = False
        """State is half received; this rank is no source."""
        self.unsynced = False
        """The update is in, and what other ranks updated has yet to come (halfway.py)."""
        self.doubtful = ""
        """A buffer that could not be put back for sure when an attempt was last left."""
        self.shrunk = ""
        """One that had grown in it, and has its old size again."""
        self._snapshot: _Snapshot | None = None
        self.tell: Callable[[str], None] = lambda name: None
        """Hears of a buffer that comes, goes or changes its shape in mid-run."""
        self._laid: list[_Laid] = []
        """In each buffer's place, when the attempt began."""
        self._shadows: dict[str, torch.Tensor] = {}
        self._moving: set[str] | None = None
        """Buffers that change in a forward pass; None while still learning."""
        self._seen_moving: set[str] = set()
        self._resting: list[nn.Module] | None = None
        """Modules with buffers that were never in training mode so far."""
        self._marks: dict[str, _Mark] = {}
        self._watched = 0
        self._began_ns = 0
        self._pace: deque[int] = deque(maxlen=_PACE_STEPS)

    def begin(self) -> None:
        """Snapshot what the forward pass may change."""
        self._snapshot = self._now()
        self._shadow_buffers()
        self.in_attempt = True
        self.updating = self.updated = self.in_hooks = False
        self._began_ns = time.monotonic_ns()

    def _now(self) -> _Snapshot:
        return _Snapshot(
            read_generators(self.registry),
            self._others(),
            self._groups(),
            self.registry.syncs(),
        )

    def _others(self) -> dict[str, Any]:
        return {n: copy.deepcopy(o.state_dict()) for n, o in self.registry.others.items()}

    def _groups(self) -> dict[str, list[dict[str, Any]]]:
        return {name: settings_of(o) for name, o in self.registry.optimizers.items()}

    def _shadow_buffers(self) -> None:
        """Copy the buffers that move.

        BatchNorm changes its statistics without bumping a version counter, so the first steps
        compare bytes to learn which buffers move; later a bumped counter adds to them, or another
        tensor in the place. A module that is trained only later is a reason to learn anew.
        """
        buffers = self.registry.buffers()
        self._laid = self._lie()
        self._forget_gone({name for name, _ in buffers})
        if self._resting is None:
            self._resting = self.registry.buffer_room.untrained()
        elif any(module.training for module in self._resting):
            self._resting = [module for module in self._resting if not module.training]
            self._learn_anew()
        if self._moving is None and self._watched >= _LEARNING_STEPS:
            self._moving = {n for n, b in buffers if not same_bytes(self._shadows.get(n), b)}
            # Statistics may lie still for long, where a layer is skipped, and then move unseen.
            self._moving |= self._seen_moving | self.registry.buffer_room.statistics()
        for name, buffer in buffers:
            shadow = self._shadows.get(name)
            if shadow is None or shadow.shape != buffer.shape or shadow.dtype != buffer.dtype:
                if self._watched:
                    self.tell(name)
                self._shadows[name] = buffer.detach().clone()
                self._marks[name] = _Mark.of(buffer)
            elif self._moving is None:
                if not same_bytes(shadow, buffer):
                    self._seen_moving.add(name)
                shadow.copy_(buffer)
                self._marks[name] = _Mark.of(buffer)
            elif name in self._moving:
                shadow.copy_(buffer)
            elif not self._marks[name].fits(buffer):
                shadow.copy_(buffer)
                self._marks[name] = _Mark.of(buffer)
        self._watched += 1

    def _lie(self) -> list[_Laid]:
        return [(place, place.held()) for place in self.registry.buffer_room.places()]

    def _forget_gone(self, here: set[str]) -> None:
        for name in self._shadows.keys() - here:
            self.tell(name)
            del self._shadows[name], self._marks[name]

    def _learn_anew(self) -> None:
        self._moving, self._watched = None, 0

    def _find_grown(self) -> str:
        """A buffer that this attempt has made larger, or filled: the program may have noted that
        somewhere else, and nobody puts that back."""
        for place, held in self._laid:
            now = place.held()
            before = self._shadows[place.name].numel() if held is not None else 0
            if now is not None and local_of(now).numel() > before:
                return place.name
        return ""

    def _find_doubtful(self) -> str:
        """A buffer that nobody knows a former value of."""
        # Anew: one may have come for one that went.
        self.registry.buffer_room.look_anew()
        known = {place.name for place, _ in self._laid}
        for name, _ in self.registry.buffers():
            if name not in known:
                return (
                    name  # Made in this attempt: a second try might find it changed by the first.
                )
        # One that was taken for still and is another now: nothing says since which step.
        if self._moving is None:
            return ""
        for name, buffer in self.registry.buffers():
            if name in self._moving or name not in self._shadows:
                continue
            if self._marks[name].fits(buffer) and not same_bytes(self._shadows[name], buffer):
                return name
        return ""

    def grads_ready(self) -> None:
        self.updating = True

    def update_done(self) -> None:
        self.updated = True

    def applied(self) -> int:
        """The attempt is through: the boundary moves on. Returns the median step so far in ns."""
        self._pace.append(time.monotonic_ns() - self._began_ns)
        self.step += 1
        self.in_attempt = self.updating = self.updated = False
        return int(statistics.median(self._pace))

    @property
    def whole(self) -> bool:
        """True where state is at a boundary, or can be brought back to one."""
        if self.torn:
            return False
        if self.in_attempt and self.updating:
            return self.updated and not self.in_hooks and self._tail_done()
        return True

    def _tail_done(self) -> bool:
        """After the update only plain state may be left to change: did it?

        What has not changed may have been about to: a scheduler that looks at the loss now and
        then, for one. In doubt the rank is torn, and receives. What has no state (a loss scaler
        that is switched off) cannot change.
        """
        assert self._snapshot is not None, "an attempt begins with a snapshot"
        before = self._snapshot.others
        now = {name: other.state_dict() for name, other in self.registry.others.items()}
        try:
            return all(
                plain_digest(encode(state)) != plain_digest(encode(before[name]))
                for name, state in now.items()
                if state or before[name]
            )
        except ConfigError:
            return False  # What cannot be carried cannot be compared.

    def unwind(self) -> bool:
        """Leave a broken attempt. True if the step had been applied after all."""
        self.shrunk = ""
        if not self.in_attempt:
            return False
        if self.updating:
            was_applied = self.whole
            if was_applied:
                self.step += 1
            else:
                self.torn = True
                # The batches of this step stay: who receives this boundary again goes on with
                # the generators that its attempt began with.
                self._put_generators(self._snapshot)
            self.in_attempt = self.updating = self.updated = False
            self._forget_scaling()
            return was_applied
        self.shrunk = self._find_grown()
        self.restore()
        self.in_attempt = False
        self._forget_scaling()
        return False

    def _forget_scaling(self) -> None:
        """A loss scaler remembers which optimizers this step has unscaled, outside its state: in
        the retry it would refuse to unscale them again."""
        for other in self.registry.others.values():
            if isinstance(other, torch.amp.GradScaler) and other.is_enabled():
                other._per_optimizer_states.clear()

    def restore(self) -> None:
        """Put back what the forward pass changed."""
        snapshot = self._snapshot
        assert snapshot is not None, "an attempt begins with a snapshot"
        self.doubtful = self._find_doubtful()
        if self.doubtful or self._regrouped(snapshot):
            # The copy may be of a much older step, and nothing takes a group out of an optimizer
            # again: in doubt the rank is torn, and receives.
            self.torn = True
        self._put(snapshot, [] if sabotage.off("buffers") else self._laid, self._shadows)

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """The state of the boundary for as long as one looks at it; then what it was before.

        For a rank that stands before its update and may yet make it.
        """
        now, laid = self._now(), self._lie()
        buffers = {name: buffer.detach().clone() for name, buffer in self.registry.buffers()}
        self.restore()
        try:
            yield
        finally:
            self._put(now, laid, buffers)

    def _put(
        self, snapshot: _Snapshot, laid: Sequence[_Laid], values: Mapping[str, torch.Tensor]
    ) -> None:
        for place, held in laid:
            # The very tensor: what a forward pass put there may be a batch's own memory.
            place.put(held, values.get(place.name))
        put_in_order(place for place, _ in laid)
        for name, state in snapshot.others.items():
            self.registry.others[name].load_state_dict(copy.deepcopy(state))
        if not self._regrouped(snapshot):
            for name, groups in snapshot.groups.items():
                load_groups(self.registry.optimizers[name], groups)
        self.registry.set_syncs(snapshot.syncs)
        self._put_generators(snapshot)

    def _regrouped(self, snapshot: _Snapshot) -> bool:
        """Did an attempt add groups of parameters to an optimizer?"""
        optimizers = self.registry.optimizers
        return any(len(optimizers[n].param_groups) != len(g) for n, g in snapshot.groups.items())

    def _put_generators(self, snapshot: _Snapshot | None) -> None:
        assert snapshot is not None, "an attempt begins with a snapshot"
        if not sabotage.off("rng"):
            put_back(self.registry, snapshot.generators)

    def arrive(self, step: int) -> None:
        """State of another boundary was received and verified."""
        self.step = step
        self.torn = self.unsynced = self.in_attempt = self.updating = self.updated = False
        # What landed raises no version.
        self._learn_anew()


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a buffer was when it was copied. Whoever writes to it changes this, as a rule."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Mark:
        return cls(weakref.ref(buffer), buffer._version, buffer.data_ptr())

    def fits(self, buffer: torch.Tensor) -> bool:
        same = self.version == buffer._version and self.address == buffer.data_ptr()
        return same and self.tensor() is buffer
