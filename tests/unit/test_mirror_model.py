"""What the documents reckon for mirrors is what the model says, and that is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mirror_model
from keepstep.training.covering import LOG_SLOTS
from keepstep.training.kept import Sizes

SCALE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def test_the_tables_in_the_document_are_those_of_the_model() -> None:
    text = SCALE.read_text(encoding="utf-8")
    assert mirror_model.per_step() in text
    assert mirror_model.at_hand() in text


def test_the_model_counts_the_memory_that_a_mirror_takes() -> None:
    cost = mirror_model.cost(mirror_model.MODELS[0], 64)
    capsule, gradients = int(cost.state), int(cost.gradients)
    taken = Sizes(capsule, gradients, LOG_SLOTS).total + capsule
    assert taken * cost.machine.gpus == pytest.approx(cost.kept, rel=1e-3)
    assert mirror_model.LOG_SLOTS == LOG_SLOTS
