"""What the processes of test_transport.py run. Kept apart: children import it by name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from keepstep.model import Move, Rank
from keepstep.training.capsule import digest
from keepstep.training.inner import GroupsBroken
from keepstep.training.raw import tensor_bytes
from keepstep.training.sealed_side import SealedSide
from keepstep.training.transport import receive, send
from tests.process.world import TIMEOUT


def side_of(store, rank, size):
    return dist.ProcessGroupGloo(dist.PrefixStore("side", store), rank, size, timeout=TIMEOUT)


def state(seed):
    """Every awkward kind: 0-dim, empty, strided, odd sizes, several dtypes, one of many chunks."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        floats(3_000_017),
        torch.tensor(float(seed)),
        torch.zeros(0),
        floats(300, 200).t(),
        floats(1000, 900).t(),
        floats(5) > 0,
        floats(70_001).bfloat16(),
        torch.full((3,), seed, dtype=torch.int64),
        floats(20, 2).view(torch.complex64),
        *[floats(50) for _ in range(200)],
    ]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class CountingSide:
    """Counts messages on their way to the real backend."""

    def __init__(self, inner):
        self.inner = inner
        self.received = 0

    def recv(self, tensors, source, tag):
        self.received += 1
        return self.inner.recv(tensors, source, tag)


def moved(store, rank, size, sources):
    side = side_of(store, rank, size)
    move = Move(Rank(0), tuple(Rank(s) for s in sources))
    if rank:
        if rank in sources:
            send(side, state(1), move, rank)
        side.barrier().wait()
        return True
    mine, counting = state(2), CountingSide(side)
    homes = [t.data_ptr() for t in mine]
    digests = receive(counting, mine, move)
    side.barrier().wait()
    wanted = state(1)
    assert same(mine, wanted)
    assert [t.data_ptr() for t in mine] == homes
    assert digests == [digest(t) for t in wanted]
    assert counting.received < 12, f"{counting.received} messages for 200 small tensors"
    return True


def staged(store, rank, size, agree):
    side = side_of(store, rank, size)
    move = Move(Rank(0), (Rank(1),))
    if rank:
        send(side, state(1), move, rank)
        side.barrier().wait()
        return True
    mine, wanted, asked = state(2), state(1), []

    def verify(digests):
        asked.append(digests)
        assert same(mine, state(2)), "nothing may land before the check"
        return agree

    digests = receive(side, mine, move, staged=True, verify=verify)
    side.barrier().wait()
    assert asked == [digests]
    assert digests == [digest(t) for t in wanted]
    return same(mine, wanted if agree else state(2))


def corrupt_source(store, rank, size):
    """One of two sources holds a flipped bit: what the target computes does not fit the claim."""
    side = side_of(store, rank, size)
    move = Move(Rank(0), (Rank(1), Rank(2)))
    given = state(1)
    claim = [digest(t) for t in given]
    if rank:
        if rank == 2:
            # The second chunk comes from the second source.
            given[0].view(torch.int32)[2_000_000] ^= 1
        send(side, given, move, rank)
        side.barrier().wait()
        return []
    found = receive(side, state(2), move)
    side.barrier().wait()
    return [i for i, (a, b) in enumerate(zip(found, claim, strict=True)) if a != b]


class OverhearingSide:
    """Keeps a copy of all bytes that leave."""

    def __init__(self, inner):
        self.inner = inner
        self.heard = []

    def send(self, tensors, target, tag):
        self.heard += [tensor.clone() for tensor in tensors]
        return self.inner.send(tensors, target, tag)

    def recv(self, tensors, source, tag):
        return self.inner.recv(tensors, source, tag)


def sealed(store, rank, size, sources):
    side = side_of(store, rank, size)
    move = Move(Rank(0), tuple(Rank(s) for s in sources))
    wire = OverhearingSide(side)
    around = SealedSide(wire, rank, "the secret of this generation")
    if rank:
        if rank in sources:
            send(around, state(1), move, rank)
            wanted = tensor_bytes(state(1)[0][:16])
            heard = b"".join(map(tensor_bytes, wire.heard))
            assert wire.heard
            assert wanted not in heard
        side.barrier().wait()
        return True
    mine = state(2)
    digests = receive(around, mine, move)
    side.barrier().wait()
    assert same(mine, state(1))
    assert digests == [digest(t) for t in state(1)]
    return True


def strangers(store, rank, size):
    """Two generations of one job meet: each has its own secret."""
    side = side_of(store, rank, size)
    move = Move(Rank(0), (Rank(1),))
    around = SealedSide(side, rank, f"secret {rank}")
    mine = state(2)
    try:
        send(around, state(1), move, rank) if rank else receive(around, mine, move)
    except GroupsBroken as error:
        assert same(mine, state(2)), "nothing may land"
        return str(error)
    except RuntimeError as error:
        # The other side left first.
        return f"sealed: {error}"
    return "moved"
