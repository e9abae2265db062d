"""The digest and the plans that state is moved by."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from keepstep import wire
from keepstep.training import digest as lanes
from keepstep.training.capsule import (
    CHUNK_BYTES,
    DigestCache,
    Digester,
    Manifest,
    combine,
    digest,
    plan_chunks,
)

ROW = lanes.ROW_BYTES
# Around every place where the function changes its way: one row, two rows, a partial last row.
SIZES = st.sampled_from([1, 7, 8, 9, 8191, 8192, 8193, 20_000, 2 * ROW - 1, 2 * ROW, 3 * ROW + 5])


def some_bytes(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def test_the_function_has_the_name_that_goes_over_the_wire():
    assert lanes.NAME == wire.DIGEST


@given(size=SIZES, data=st.data())
@settings(max_examples=60)
def test_any_single_flipped_bit_changes_the_digest(size, data):
    raw = some_bytes(size)
    before = digest(raw)
    where = data.draw(st.integers(0, size - 1))
    raw[where] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(raw) != before


@given(sizes=st.lists(SIZES | st.just(0), max_size=6), data=st.data())
@settings(max_examples=60)
def test_any_single_flipped_bit_in_any_of_many_changes_their_digest(sizes, data):
    whole = some_bytes(sum(sizes))
    before = lanes.digest_joined(whole.split(sizes))
    # Wherever they lie: a copy has no neighbours, and begins on a whole word.
    assert lanes.digest_joined([view.clone() for view in whole.split(sizes)]) == before
    if sum(sizes):
        where = data.draw(st.integers(0, sum(sizes) - 1))
        whole[where] ^= 1 << data.draw(st.integers(0, 7))
        assert lanes.digest_joined(whole.split(sizes)) != before


def test_a_digest_of_many_knows_which_is_which_and_stays_what_it_is():
    one, other = some_bytes(2 * ROW + 40, 1), some_bytes(2 * ROW + 40, 2)
    swapped_tails = [torch.cat([a[:-40], b[-40:]]) for a, b in ((one, other), (other, one))]
    swapped_rows = [torch.cat([a[:ROW], b[ROW:]]) for a, b in ((one, other), (other, one))]
    several = ([one, other], [other, one], swapped_tails, swapped_rows)
    assert len({lanes.digest_joined(each) for each in several}) == 4
    # What was saved is read by later releases: another function is another form (cover.py).
    assert lanes.digest_joined([one, other]) == "89cce04704e48e17d87447256a2d7bae"


@given(size=SIZES, extra=st.integers(1, 17))
@settings(max_examples=30)
def test_zeros_at_the_end_change_the_digest(size, extra):
    raw = some_bytes(size)
    assert digest(torch.cat([raw, torch.zeros(extra, dtype=torch.uint8)])) != digest(raw)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 64, 128])
@pytest.mark.parametrize(
    ("one", "other"), [(0.0, 1.0), (1.5, -1.5), (1.0, 2.0), (0.0, -0.0), (0.0, 1e-45)]
)
def test_two_values_exchanged_between_rows_of_a_lane_change_the_digest(rows, one, other):
    """What a polynomial modulo 2**64 misses: words that differ in their top bits only."""
    plain = torch.zeros((rows + 2) * lanes.LANES, dtype=torch.float64)
    for lane in (0, 5, lanes.LANES - 1):
        a, b = plain.clone(), plain.clone()
        a[lane], a[lane + rows * lanes.LANES] = one, other
        b[lane], b[lane + rows * lanes.LANES] = other, one
        assert digest(a) != digest(b)


@given(data=st.data())
@settings(max_examples=30)
def test_two_exchanged_words_change_the_digest(data):
    words = torch.zeros(3 * lanes.LANES + 100, dtype=torch.float32)
    i, j = data.draw(
        st.lists(st.integers(0, words.numel() - 1), min_size=2, max_size=2, unique=True)
    )
    a, b = words.clone(), words.clone()
    a[i], b[j] = 1.0, 1.0
    assert digest(a) != digest(b)


def test_two_exchanged_blocks_change_the_digest():
    raw = some_bytes(8 * ROW).view(8, ROW)
    for i in range(8):
        for j in range(i):
            order = list(range(8))
            order[i], order[j] = order[j], order[i]
            assert digest(raw[order]) != digest(raw)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64, torch.float16, torch.int8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (300, 500)])
def test_the_same_bytes_give_the_same_digest_whatever_they_are_called(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    assert digest(tensor) == digest(raw)
    assert digest(tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor) == digest(tensor)


@pytest.mark.parametrize("size", [100, 40_000, 4 * ROW])
def test_strides_offsets_and_gradients_do_not_matter(size):
    base = torch.randn(2 * size + 1)
    plain = base[1::2].clone()
    assert digest(base[1::2]) == digest(plain)
    assert digest(base[1 : size + 1]) == digest(base[1 : size + 1].clone())
    assert digest(plain.clone().requires_grad_()) == digest(plain)


def test_an_odd_byte_offset_does_not_matter():
    raw = some_bytes(3 * ROW)
    assert digest(raw[1:]) == digest(raw[1:].clone())


@given(pieces=st.integers(1, 4), rest=st.integers(0, ROW - 1))
@settings(max_examples=15)
def test_a_running_digest_equals_the_digest_of_the_whole(pieces, rest):
    raw = some_bytes(pieces * 2 * ROW + rest)
    running = Digester(raw.numel())
    for piece in raw.split(2 * ROW):
        running.update(piece)
    assert running.finish() == digest(raw)


def test_the_function_is_fixed():
    """Holders in different processes and versions compare these: a change needs a new name."""
    assert digest(torch.arange(5, dtype=torch.uint8)) == "ccbfa5571cf69d0a31fc4021bde23963"
    assert digest(torch.arange(5_000, dtype=torch.int64)) == "09ca137817e36226a895be61d5d4dc16"
    assert digest(torch.arange(100_000, dtype=torch.int64)) == "c91fcc2bc88fba1196b4689a723ce86f"


def test_combining_depends_on_names_order_and_borders():
    a, b = ("w", "11"), ("v", "22")
    assert combine([a, b]) != combine([b, a])
    assert combine([("w1", "1")]) != combine([("w", "11")])
    assert combine([a]) != combine([a, b])
    assert len(combine([])) == 32


@given(
    sizes=st.lists(st.integers(0, 50), max_size=20),
    chunk_bytes=st.integers(1, 20),
)
def test_chunks_cover_every_byte_once_and_in_order(sizes, chunk_bytes):
    covered = [
        (chunk.tensor, at)
        for chunk in plan_chunks(sizes, chunk_bytes)
        for at in range(chunk.offset_bytes, chunk.offset_bytes + chunk.bytes)
    ]
    assert covered == [(i, at) for i, size in enumerate(sizes) for at in range(size)]
    assert all(0 < chunk.bytes <= chunk_bytes for chunk in plan_chunks(sizes, chunk_bytes))


def test_a_chunk_is_whole_rows_of_the_digest():
    assert CHUNK_BYTES % ROW == 0


def test_a_manifest_sees_any_change():
    tensors = [("w", torch.ones(3, 2)), ("n", torch.tensor(4))]
    manifest = Manifest.of(tensors)
    assert manifest.bytes == 32
    tensors[1][1].add_(1)
    assert Manifest.of(tensors).digest != manifest.digest


def test_only_frozen_parameters_are_remembered():
    cache = DigestCache()
    frozen = torch.nn.Parameter(torch.ones(10), requires_grad=False)
    first = cache.digest(frozen)
    assert cache.digest(frozen) == first
    with torch.no_grad():
        frozen.mul_(2)
    assert cache.digest(frozen) == digest(frozen) != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_teacher_that_moves_through_data_is_not_taken_for_frozen(dtype: torch.dtype):
    cache = DigestCache()
    teacher = torch.nn.Parameter(torch.rand(300_000).to(dtype), requires_grad=False)
    first = cache.digest(teacher)
    teacher.data.mul_(0.9).add_(0.1)  # raises no version
    assert cache.digest(teacher) == digest(teacher) != first


def test_what_a_sample_misses_is_found_after_forgetting():
    cache = DigestCache()
    frozen = torch.nn.Parameter(torch.ones(1_000_000), requires_grad=False)
    first = cache.digest(frozen)
    frozen.data[1] = 5.0
    assert cache.digest(frozen) == first, "a sample, not a digest"
    cache.forget()
    assert cache.digest(frozen) == digest(frozen) != first


def test_running_statistics_are_never_remembered():
    cache = DigestCache()
    norm = torch.nn.BatchNorm1d(4)
    before = cache.digest(norm.running_mean)
    norm(torch.randn(8, 4))
    assert cache.digest(norm.running_mean) != before
