"""Generators come back exactly, and what is read from memory is what they say themselves."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.training import randomness


def draw() -> tuple[object, ...]:
    """Something from each generator; normal numbers come in pairs, of which one is kept."""
    return (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.standard_normal()),
    )


def test_randomness_comes_back_exactly() -> None:
    for _ in range(3):
        state = randomness.read_randomness()
        first = draw()
        randomness.restore_randomness(state)
        assert draw() == first


@given(st.integers(0, 2**32 - 1), st.integers(0, 1400), st.integers(0, 3))
def test_memory_says_what_the_generators_say(seed: int, draws: int, normals: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    for _ in range(draws):
        random.random()
        numpy.random.rand()
    for _ in range(normals):
        random.gauss(0, 1)
        numpy.random.standard_normal()
    state = randomness.read_randomness()
    assert state.python == randomness._ask_python()
    assert state.numpy == randomness._ask_numpy(numpy.random.mtrand._rand)


def test_the_words_are_read_from_memory_here() -> None:
    """Else every step would pay for it, and nobody would notice."""
    randomness.read_randomness()
    assert randomness._python.reader is not None
    assert randomness._numpy.reader is not None


def test_a_generator_that_keeps_its_words_elsewhere_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Elsewhere(random.Random):
        def getstate(self) -> tuple[int, tuple[int, ...], float | None]:
            version, words, gauss = super().getstate()
            return version, (*words[:-1], words[-1] ^ 1), gauss

    other = Elsewhere(5)
    monkeypatch.setattr(random, "_inst", other)
    monkeypatch.setattr(random, "getstate", other.getstate)
    assert randomness.read_randomness().python == randomness._ask_python()
    assert randomness._python.reader is None


def test_a_bit_generator_that_was_exchanged_is_met_anew() -> None:
    before = numpy.random.get_bit_generator()
    randomness.read_randomness()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(77))
        state = randomness.read_randomness()
        assert state.numpy == randomness._ask_numpy(numpy.random.mtrand._rand)
    finally:
        numpy.random.set_bit_generator(before)
