from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.transcript import render

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_brain_says_what_the_transcript_says(path: Path):
    before = path.read_text(encoding="utf-8")
    now = render(before)
    if os.environ.get("KEEPSTEP_REWRITE"):
        path.write_text(now, encoding="utf-8")
    else:
        assert now == before, "say KEEPSTEP_REWRITE=1 to accept, and review the diff"


def test_there_are_transcripts_for_the_whole_protocol():
    assert len(TRANSCRIPTS) >= 12
