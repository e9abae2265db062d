"""Work on a thread of its own: what comes of it reaches who asks, whatever it is."""

from __future__ import annotations

import threading

import pytest

from keepstep.training.errand import Errand

SECONDS_MAX = 10.0


def started(work):
    errand = Errand("test-errand", work)
    errand.start()
    return errand


def test_what_it_returns_is_handed_over():
    errand = started(lambda: 7)
    assert errand.wait(SECONDS_MAX)
    assert errand.result() == 7


@pytest.mark.parametrize("trouble", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_it_raises_is_raised_to_who_asks(trouble):
    """An exit, too: it would come out as a result that is not there."""

    def work():
        raise trouble

    errand = started(work)
    assert errand.wait(SECONDS_MAX)
    with pytest.raises(type(trouble)) as raised:
        errand.result()
    assert raised.value is trouble


def test_who_leaves_waits_no_longer_and_the_thread_ends_by_itself():
    free, ended = threading.Event(), threading.Event()

    def work():
        free.wait(SECONDS_MAX)
        ended.set()

    errand = started(work)
    assert not errand.wait(0.0)
    errand.leave()
    assert errand.wait(0.0)
    assert not ended.is_set()
    free.set()
    assert ended.wait(SECONDS_MAX)
