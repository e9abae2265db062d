"""What counts as state, and who holds the same state.

Everything registered is flattened into named tensors in one canonical order, the same on every
rank, and a remainder of plain values (learning rates, a scheduler's counters). Of a DTensor the
rank's own part counts. Tensors that replicas hold alike are *shared*, in portions by who holds
them, and can be rebuilt from any holder; those whose digests differ between ranks that should
hold them alike are *private*, found by comparison, and travel with the rank's private entry.

Nothing here sends anything; nothing here guesses: a value it cannot carry exactly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from keepstep import portion as portions
from keepstep.errors import ConfigError, NoHome, Permanent
from keepstep.training import private, zero
from keepstep.training.buffers import Buffers
from keepstep.training.capsule import DigestCache, combine, digest
from keepstep.training.holders import Holders, View, Views, find_private, is_cut, local_of
from keepstep.training.listing import Listing, Place
from keepstep.training.optimizers import (
    conform_state,
    groups_of,
    hidden_of,
    holds_tensors,
    load_groups,
    load_hidden,
    parameters_of,
    plain_of,
    state_of,
)
from keepstep.training.plain import (
    FIX_PART,
    FIX_STATE,
    decode,
    encode,
    encode_named,
    plain_digest,
    shaped_like,
)
from keepstep.training.raw import bytes_tensor, fill_from_bytes, size_bytes
from keepstep.training.reset import ddp_modules
from keepstep.training.stateful import SaveRestore, Stateful

T = TypeVar("T")
Layout = list[tuple[str, str, list[int], bool]]


class Registry:
    """The registered parts of one job on this rank."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.holders = Holders.alike(world)
        """Who holds what. All ranks agree on it before the first step; a joiner is told."""
        self._views = Views(rank, world)
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Stateful] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.private: set[str] = set()
        """Names of tensors that differ between ranks. Grows by comparison, never shrinks."""
        self._replicated: list[DistributedDataParallel] = []
        self._cache = DigestCache()
        self._looks = 0
        self._listing: tuple[tuple[int, ...], Listing] = ((), Listing())
        """And the layout that it is of. Replaced as one: two threads may look while state comes."""
        self._looked_key: Any = None
        self._looked_by: Holders | None = None
        self._looked: dict[tuple[str, str], list[Any]] = {}
        self.buffer_room = Buffers(self.modules)
        self._known_buffers: dict[str, str] = {}
        """Those that were there when their module was registered, as on every rank, and the portion
        that this rank saw for them. Others come and go with steps, rehearsed ones too."""
        self._agreed: list[list[int]] = []
        self._kept: dict[str, list[tuple[str, nn.Parameter]]] = {}
        """Parameters of modules that are cut, as they were registered. FSDP2 puts others in their
        place while it runs, and DDP over a mesh hides them for good in its first forward pass."""

    def add(self, name: str, part: object) -> None:
        taken = (self.modules, self.optimizers, self.others, self.generators)
        if any(name in room for room in taken):
            raise ConfigError(f"state {name!r} is registered twice; give each part its own name")
        if isinstance(part, DataLoader):
            raise ConfigError(
                f"{name!r} is a loader, and its place in the data is each rank's own: give it to "
                "session.steps, or return it from build as `loader`"
            )
        if isinstance(part, nn.Module):
            self.modules[name] = part
            self.buffer_room.look_anew()
            self._replicated += ddp_modules(part)
            self._views.note(part)
            found = ((place.name, place.held()) for place in self.buffer_room.find())
            self._known_buffers |= {n: self._views.of(b) for n, b in found if b is not None}
            if is_cut(part):
                self._kept[name] = list(part.named_parameters())
        elif isinstance(part, torch.optim.Optimizer):
            zero.check(name, part)
            self.optimizers[name] = part
        elif isinstance(part, torch.Generator):
            self.generators[name] = part
        elif isinstance(part, tuple) and len(part) == 2 and all(callable(f) for f in part):
            self.others[name] = SaveRestore(*part)
        elif isinstance(part, Stateful):
            self.others[name] = part
        else:
            raise ConfigError(
                f"{name!r} ({type(part).__name__}) has no state_dict/load_state_dict; "
                "pass a pair (save, restore) of functions instead"
            )

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every registered tensor that lives in place, in canonical order."""
        return [*self.fixed(), *self.buffers()]

    def fixed(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and optimizer state: as a rule the same at every step, so listed once."""
        return self._listed().tensors

    def places(self) -> list[Place]:
        """Where the tensors of `fixed` are found, in the same order."""
        return self._listed().places

    def _listed(self) -> Listing:
        key, (known, listing) = self.layout_key(), self._listing
        if key != known:
            listing = Listing(self._named_parameters(), self.optimizers)
            self._listing = (key, listing)
        return listing

    def look_anew(self) -> None:
        """The program may have put other tensors in the places of those that were looked up."""
        self._looks += 1
        self.buffer_room.look_anew()

    def look_again(self) -> None:
        """The same if there is a reason to: for a step that goes over all tensors anyway."""
        if not self._listing[1].still_true():
            self.look_anew()

    def placed(self) -> list[tuple[str, Any, torch.Tensor]]:
        """All of `tensors`, each with what the program has in its place."""
        listed = zip(self.places(), self.fixed(), strict=True)
        return [*((n, p.held(), t) for p, (n, t) in listed), *self.buffer_room.held()]

    def layout_key(self) -> tuple[int, ...]:
        """Changes when optimizers have made or dropped state; cheap enough for every step."""
        made = (len(state_of(o)) + zero.layout(o) for o in self.optimizers.values())
        return (self._looks, len(self.modules), *made)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, module in self.modules.items():
            for key, parameter in self._kept.get(name) or module.named_parameters():
                yield f"{name}.{key}", parameter

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that a forward pass may change, or replace: looked up each time."""
        return [(name, part) for name, _, part in self.buffer_room.held()]

    # ------------------------------------------------------------ who holds what

    def view(self) -> View:
        """How this rank sees the holders of everything registered, before they are agreed on."""
        self._agreed = self._grouped()
        views = self._views
        named = [(name, views.of(parameter)) for name, parameter in self._named_parameters()]
        here = {place.name: place.held() for place in self.buffer_room.find()}
        for name, seen in self._known_buffers.items():
            buffer = here.get(name)
            # A rehearsed step may have dropped it, or put another there that nothing speaks of.
            told = views.of(buffer) if buffer is not None and views.knows(buffer) else seen
            named.append((name, told))
        for name, optimizer in self.optimizers.items():
            if zero.is_zero(optimizer):
                # Also of who owns no parameter at all: plain values go with the narrowest portion,
                # and that must not be, for some, one that others hold as well.
                named.append((f"{name}.own", portions.name_of([self.rank])))
            for index, parameter in enumerate(parameters_of(optimizer)):
                owner = zero.owner(optimizer, parameter)
                seen = views.of(parameter) if owner is None else portions.name_of([owner])
                named.append((f"{name}.{index}", seen))
        return View.make(named)

    def strays(self) -> list[str]:
        """Parameters that an optimizer updates and no registered module shows: nobody moves them.

        A model that ran before it was registered may hide some (DDP over a mesh does).
        """
        known = {id(parameter) for _, parameter in self._named_parameters()}
        return [
            f"{name}.{index}"
            for name, optimizer in self.optimizers.items()
            for index, parameter in enumerate(parameters_of(optimizer))
            if id(parameter) not in known
        ]

    def regrouped(self) -> bool:
        """Has an optimizer other parameters than when all agreed on who holds what?"""
        now = self._grouped()
        self._agreed = self._agreed or now  # A joiner was told what others had agreed on.
        return self._agreed != now

    def _grouped(self) -> list[list[int]]:
        return [[len(g["params"]) for g in o.param_groups] for o in self.optimizers.values()]

    def under(self, name: str) -> list[torch.Tensor]:
        """Parameters and buffers of this name, or of the part that is called so."""
        named: list[tuple[str, torch.Tensor | None]] = list(self._named_parameters())
        named += [(place.name, place.held()) for place in self.buffer_room.find()]
        return [
            tensor
            for known, tensor in named
            if tensor is not None and (known == name or known.startswith(f"{name}."))
        ]

    def portion_of(self, name: str) -> str:
        """The portion that a tensor of this rank belongs to. Optimizer state follows its owner."""
        return self.holders.portion(self._key(name), self.rank)

    def _key(self, name: str) -> str:
        return name if name in self.holders.of else name.rpartition(".")[0]

    def _is_late(self, name: str) -> bool:
        return bool(self.holders.of) and self._key(name) not in self.holders.of

    def _is_private(self, name: str) -> bool:
        if name in self.private or not self._is_late(name):
            return name in self.private
        # Where all is cut, nothing is everybody's, and nobody else could give it back.
        return self.holders.everybody not in self.portions()

    def is_lonely(self, name: str) -> bool:
        """Does any rank hold its part of this tensor alone?"""
        return self.holders.is_lonely(self._key(name))

    def portions(self) -> tuple[str, ...]:
        return self.holders.portions(self.rank)

    def shared(self, portion: str | None = None) -> list[tuple[str, torch.Tensor]]:
        """What a replica can give back: all of it, or one portion."""
        if portion is None:
            return [(name, t) for name, t in self.tensors() if not self._is_private(name)]
        buffers = [
            (name, buffer)
            for name, buffer in self.buffers()
            if not self._is_private(name) and self.portion_of(name) == portion
        ]
        return [*self._looked_up("fixed", portion, self._find_fixed), *buffers]

    def _find_fixed(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor)
            for name, tensor in self.fixed()
            if name not in self.private and self.portion_of(name) == portion
        ]

    def optimized(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        """The parameters of one portion that optimizers update, in their order."""
        return self._looked_up("optimized", portion, self._find_optimized)

    def _find_optimized(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        return [
            (key, parameter)
            for name, optimizer in self.optimizers.items()
            for index, parameter in enumerate(parameters_of(optimizer))
            if self.holders.portion(key := f"{name}.{index}", self.rank) == portion
        ]

    def _looked_up(self, what: str, portion: str, find: Callable[[str], list[T]]) -> list[T]:
        """Once, and again when the layout is another one: every step asks."""
        key = (self.layout_key(), frozenset(self.private))
        if key != self._looked_key or self._looked_by is not self.holders:
            self._looked_key, self._looked_by, self._looked = key, self.holders, {}
        found = self._looked.get((what, portion))
        if found is None:
            found = self._looked[what, portion] = find(portion)
        return found

    def companions(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        """Parameters that this portion's optimizer state updates, and that more ranks hold."""
        return self._looked_up("companions", portion, self._find_companions)

    def _find_companions(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        updated = {id(parameter) for _, parameter in self.optimized(portion)}
        return [
            (name, local_of(parameter.detach()))
            for name, parameter in self._named_parameters()
            if id(parameter) in updated and self.portion_of(name) != portion
        ]

    def kept(self, portion: str) -> list[tuple[str, torch.Tensor]]:
        """What a portion is rebuilt from: it, and what its updates go by."""
        return [*self.shared(portion), *self.companions(portion)]

    def synced(self) -> tuple[str, ...]:
        """Portions with parameters that each rank gets from their owners, inside an update."""
        found = {
            id(parameter)
            for optimizer in self.optimizers.values()
            if zero.is_zero(optimizer)
            for parameter in parameters_of(optimizer)
        }
        names = (name for name, parameter in self._named_parameters() if id(parameter) in found)
        return tuple(sorted({self.portion_of(name) for name in names}))

    def versions(self) -> int:
        """Of all that nothing may change after an update; 0 where no update can end half-way."""
        if not any(map(zero.is_zero, self.optimizers.values())):
            return 0
        return sum(tensor._version for _, tensor in self.tensors())

    def others_hold_tensors(self) -> bool:
        """Do registered parts that are no modules have tensors among their state?"""
        return any(holds_tensors(other.state_dict()) for other in self.others.values())

    def lasting(self, portion: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a portion is rebuilt from, but buffers: each tensor as the program has it, and the
        part of it that this rank has."""
        return self._looked_up("lasting", portion, self._find_lasting)

    def _find_lasting(self, portion: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine = dict([*self._find_fixed(portion), *self._find_companions(portion)])
        return [(p.held(), mine[p.name]) for p in self.places() if p.name in mine]

    def private_tensors(self, *, coming: bool = False) -> list[tuple[str, torch.Tensor]]:
        """What the private entry carries beside the implicit generators.

        `coming`: before an update, for the boundary after it. Of what it changes only the name.
        """
        fixed = self._private_fixed() if self._private_is_fixed() else []
        if coming:
            fixed = [(name, private.LATER if self._is_updated(name) else t) for name, t in fixed]
        named = [*fixed, *((n, t) for n, t in self.buffers() if self._is_private(n))]
        return named + [(f"{n}.generator", g.get_state()) for n, g in self.generators.items()]

    def _private_fixed(self) -> list[tuple[str, torch.Tensor]]:
        self.look_again()
        return [(name, tensor) for name, tensor in self.fixed() if name in self.private]

    def _is_updated(self, name: str) -> bool:
        """Does an optimizer change this parameter, or this part of its own state?"""
        return name in self._listed().updated

    def _private_is_fixed(self) -> bool:
        """Is any parameter private? Hardly ever, and then a step need not look through them."""
        buffers = self.buffer_room.places()
        return len(self.private) > sum(place.name in self.private for place in buffers)

    def compared(self, rows: Sequence[Any], *, first: bool, settled: bool) -> bool:
        """Learn from all ranks' digests what is private. True if that is more than was known.

        `first`: until now every buffer counted as private. `settled`: only buffers can become so.
        """
        found = find_private([[(str(n), str(d)) for n, d in row] for row in rows], self.holders)
        if settled:
            found -= {name for name, _ in self.fixed()}
        if first:
            # Of a buffer with one holder no comparison says whether it is private: it stays so.
            buffers = {name for name, _ in self.buffers() if not self.is_lonely(name)}
            self.private -= buffers - found
        fresh = found - self.private
        self.private |= found
        return bool(fresh)

    def restore_private(self, name: str, raw: bytes | None) -> bool:
        """Take one private tensor back; False if this rank knows no such name."""
        if raw is None:
            raise NoHome(private.not_carried([name]))
        key = name.removesuffix(".generator")
        if name.endswith(".generator") and key in self.generators:
            self.generators[key].set_state(bytes_tensor(raw))
            return True
        for known, tensor in self.tensors():
            if known == name:
                if not raw and tensor.numel():
                    # So an earlier release says that it was left out.
                    raise NoHome(private.not_carried([name]))
                fill_from_bytes(tensor, raw)
                return True
        return False

    # ------------------------------------------------------------ plain values

    def plain(self, *, whole: bool = True) -> dict[str, Any]:
        """Everything that is no tensor in place: JSON-able, exact.

        Not `whole`: to compare ranks by, where something cannot be carried.
        """
        named = [(name, plain_of(o), FIX_STATE) for name, o in self.optimizers.items()]
        named += [(name, other.state_dict(), FIX_PART) for name, other in self.others.items()]
        return encode_named(named, whole=whole)

    def syncs(self) -> list[bool]:
        """Whether DDP broadcasts buffers in its next forward pass: it remembers what the last one
        was for. A rank that left a step half-way would remember something else than its peers."""
        return [ddp.require_forward_param_sync for ddp in self._replicated]

    def set_syncs(self, syncs: Sequence[bool]) -> None:
        for ddp, sync in zip(self._replicated, syncs, strict=True):
            ddp.require_forward_param_sync = sync

    def drop_gradients(self) -> None:
        """As at a boundary: what a broken or rehearsed pass left in them is nobody's."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def hidden(self) -> dict[str, Any]:
        """What optimizers remember of each parameter beside tensors: counters, as a rule."""
        return {n: encode(hidden_of(o)) for n, o in self.optimizers.items()}

    def load_hidden(self, hidden: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            load_hidden(optimizer, decode(hidden[name]))

    def settings(self) -> dict[str, Any]:
        """What the optimizers go by in their next step: learning rates and the like."""
        return {n: encode(groups_of(o)) for n, o in self.optimizers.items()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            load_groups(optimizer, decode(settings[name]))

    def load_plain(self, plain: Mapping[str, Any], *, hidden: bool = True) -> None:
        """Not `hidden`: what optimizers remember of each parameter is this rank's own."""
        for name, optimizer in self.optimizers.items():
            if name in plain:
                found = decode(plain[name])
                load_groups(optimizer, found["groups"])
                if hidden:
                    load_hidden(optimizer, found["state"])
        for name, other in self.others.items():
            if name in plain:
                own = other.state_dict()
                other.load_state_dict(shaped_like(own, decode(plain[name])))

    def conform(self, layout: Layout, portion: str | None = None) -> None:
        """Give the optimizers just the state tensors that the sources have, uninitialised, and
        buffers their shapes.

        A joiner has stepped a different number of times than its sources, so it may lack state
        that they hold, or hold state that they have not made yet. Sources of one portion speak of
        that portion alone.
        """
        wanted: dict[str, dict[str, tuple[str, list[int], bool]]] = {}
        for name, dtype, shape, cut in layout:
            owner, _, key = name.rpartition(".")
            wanted.setdefault(owner, {})[key] = (dtype, shape, cut)
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                owner = f"{name}.{index}"
                if portion is None or self.holders.portion(owner, self.rank) == portion:
                    conform_state(optimizer, parameter, wanted.get(owner, {}))
        self.buffer_room.conform({name: (dtype, shape) for name, dtype, shape, _ in layout})
        self.look_anew()
        own = self.layout(portion)
        if own != [(n, d, list(s), c) for n, d, s, c in layout]:
            differing = next(
                (f"{a} against {b}" for a, b in zip(own, layout, strict=False) if a != tuple(b)),
                f"{len(own)} tensors against {len(layout)}",
            )
            raise Permanent(
                f"this rank built other state than its peers: {differing}; "
                "the script must build the same model on every rank"
            )

    def layout(self, portion: str | None = None) -> Layout:
        """Name, type and shape of each shared tensor, and whether it is a part of a DTensor."""
        cut = self._listed().cut
        return [(n, str(t.dtype), list(t.shape), n in cut) for n, t in self.shared(portion)]

    # ------------------------------------------------------------ digests

    def digests(self, received: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """Per tensor; `received` holds those that the transport computed from landed bytes."""
        self.look_anew()
        frozen = self._frozen()
        known = received or {}
        found = []
        for name, tensor in self.tensors():
            if name in known:
                found.append((name, known[name]))
            elif name in frozen:
                found.append((name, self._cache.digest(frozen[name])))
            else:
                found.append((name, digest(tensor)))
        return found

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Parameters that nothing updates: their digest holds while their version does."""
        return {
            name: local_of(parameter)
            for name, parameter in self._named_parameters()
            if not parameter.requires_grad
        }

    def digests_received(self, received: Mapping[str, str]) -> None:
        """State landed in place, which raises no version: the old digests go, these are known."""
        self._cache.forget()
        for name, parameter in self._frozen().items():
            if name in received:
                self._cache.remember(parameter, received[name])

    def forget_digests(self) -> None:
        """Look at every byte again: something that was remembered may have been wrong."""
        self.look_anew()
        self._cache.forget()

    def shared_digests(
        self, received: Mapping[str, str] | None = None, *, late: bool = True
    ) -> dict[str, str]:
        """One digest per portion that this rank holds, plain values included.

        Not `late`: without buffers that were registered after all had agreed on who holds what,
        and without plain values that cannot be carried.
        """
        named: dict[str, list[tuple[str, str]]] = {portion: [] for portion in self.portions()}
        for name, value in self.digests(received):
            if not self._is_private(name) and (late or not self._is_late(name)):
                named[self.portion_of(name)].append((name, value))
        plain = self.plain(whole=late)
        return {portion: self.digest_of(portion, each, plain) for portion, each in named.items()}

    def digest_of(
        self, portion: str, named: Iterable[tuple[str, str]], plain: dict[str, Any]
    ) -> str:
        """The digest of a portion whose tensors have these digests.

        Plain values go with the narrowest portion: only its holders are sure to have the same.
        """
        if portion != self.holders.narrowest(self.rank):
            return combine(named)
        return combine([*named, ("plain", plain_digest(plain))])

    def state_bytes(self) -> int:
        return sum(size_bytes(tensor) for _, tensor in self.shared())
