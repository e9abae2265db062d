"""The side group with every message between two ranks sealed by the generation's secret.

For jobs whose policy asks for `encrypt_state`. It has the two verbs that moving state needs, `send`
and `recv`, so that nothing above it knows. The first message between two ranks in one direction is
preceded by a handshake; who does not know the secret gets no byte of state.

Must never: open messages of one rank in another order than they were sealed. Senders seal when they
send, receivers open when they wait, and both go by the one plan of their move.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from keepstep.sealed import NotSealed, Seal, sealed_bytes, shake_hands
from keepstep.training.inner import GroupsBroken
from keepstep.training.raw import bytes_tensor, size_bytes, tensor_bytes, tensor_view

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_TAG_LENGTH, _TAG_WORD, _TAG_SEALED = 81, 82, 100
_WORD_BYTES_MAX = 1 << 16


class SealedSide:
    """Of one rank in one generation."""

    def __init__(self, side: Any, rank: int, secret: str) -> None:
        self._side, self._rank, self._secret = side, rank, secret
        self._seals: dict[tuple[int, int], Seal] = {}

    def send(self, tensors: Sequence[torch.Tensor], target: int, tag: int) -> _Sent:
        (tensor,) = tensors
        seal = self._seal(self._rank, target)
        sealed = bytes_tensor(seal.seal(tensor_bytes(tensor)))
        return _Sent(self._side.send([sealed], target, tag + _TAG_SEALED), sealed)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Received:
        (tensor,) = tensors
        seal = self._seal(source, self._rank)
        sealed = torch.empty(sealed_bytes(size_bytes(tensor)), dtype=torch.uint8)
        work = self._side.recv([sealed], source, tag + _TAG_SEALED)
        return _Received(work, seal, sealed, tensor)

    def _seal(self, source: int, target: int) -> Seal:
        """The conversation in this direction; a handshake if there is none yet."""
        known = self._seals.get((source, target))
        if known is not None:
            return known
        opens = source == self._rank
        peer = target if opens else source
        seal = Seal(self._secret, f"state/{source}>{target}", opens=opens)
        say, hear = functools.partial(self._say, peer), functools.partial(self._hear, peer)
        try:
            shake_hands(seal, say, hear, opens=opens)
        except NotSealed as error:
            raise GroupsBroken(f"rank {peer}: {error}") from error
        self._seals[source, target] = seal
        return seal

    def _say(self, peer: int, word: bytes) -> None:
        self._side.send([torch.tensor([len(word)])], peer, _TAG_LENGTH).wait()
        self._side.send([bytes_tensor(word)], peer, _TAG_WORD).wait()

    def _hear(self, peer: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._side.recv([length], peer, _TAG_LENGTH).wait()
        if not 0 < int(length) <= _WORD_BYTES_MAX:
            raise NotSealed(f"a word of {int(length)} bytes")
        word = torch.empty(int(length), dtype=torch.uint8)
        self._side.recv([word], peer, _TAG_WORD).wait()
        return tensor_bytes(word)


class _Sent:
    """Keeps the sealed bytes until they have left."""

    def __init__(self, work: Any, sealed: torch.Tensor) -> None:
        self._work, self._sealed = work, sealed

    def wait(self) -> None:
        self._work.wait()


class _Received:
    """Opens what arrived, when it is waited for."""

    def __init__(self, work: Any, seal: Seal, sealed: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work, self._seal, self._sealed, self._tensor = work, seal, sealed, tensor

    def wait(self) -> None:
        self._work.wait()
        tensor = self._tensor
        plain = tensor.is_cpu and tensor.is_contiguous()
        landing = tensor if plain else torch.empty_like(tensor, device="cpu").contiguous()
        try:
            self._seal.open(tensor_view(self._sealed), tensor_view(landing))
        except NotSealed as error:
            raise GroupsBroken(str(error)) from error
        if not plain:
            tensor.copy_(landing)


_KNOWN: WeakKeyDictionary[Any, SealedSide] = WeakKeyDictionary()


def begin(keeper: Keeper, secret: str) -> None:
    """The moves of a generation begin; whoever has its secret takes part. A rank takes the secret
    for its own only once it is verified, so it is given here."""
    if keeper.place.encrypt:
        _KNOWN[keeper] = SealedSide(keeper.groups.side, keeper.place.rank, secret)


def side_of(keeper: Keeper) -> Any:
    """What state of this job moves over in this generation."""
    return _KNOWN[keeper] if keeper.place.encrypt else keeper.groups.side
