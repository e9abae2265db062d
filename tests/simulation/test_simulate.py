from __future__ import annotations

import pytest

from keepstep.chaos import simulate


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_seeds_hold_every_invariant():
    summary = simulate.run_seeds(0, 500)
    ends = {result.outcome for result in summary.results}
    assert ends <= {"finished", "saved", "failed", "held", "waiting", "parked"}
    # The campaign is worth its name only if faults hit, and most of them were survived live.
    outcomes = [outcome for result in summary.results for outcome in result.incidents]
    alone = [out for r in summary.results if not r.others for out in r.incidents]
    assert alone.count("resumed") > 5 * alone.count("fallback")
    assert outcomes.count("resumed") > 2 * outcomes.count("fallback"), "racks take both homes"
    assert sum(result.restarts for result in summary.results) > 100
    assert sum(result.vouched for result in summary.results) > 100
    assert sum(result.moves for result in summary.results) > 100
    assert sum(result.loans for result in summary.results) > 20
    assert sum(result.reclaimed for result in summary.results) > 5
    assert sum(result.homecomings for result in summary.results) > 50


@pytest.mark.parametrize(
    "seed",
    [
        277,  # All ranks stopped before their first step: nobody to blame, and nothing to save.
        1363,  # A leader dies over a restart: strays of the old run are no sign of the new one.
        4572,  # A collective breaks for one rank after the others have finished.
    ],
)
def test_seeds_that_once_failed(seed: int):
    assert simulate.run_seed(seed, planned_moves=False).outcome == "finished"


def test_a_worker_that_an_agent_did_not_find_is_not_its_successor():
    assert simulate.run_seed(5285).outcome == "finished"


def test_a_seed_is_the_same_run_every_time():
    assert simulate.run_seed(7) == simulate.run_seed(7)


def test_a_violation_names_its_seed(monkeypatch: pytest.MonkeyPatch):
    def broken(self: simulate.Simulation, notes: object) -> None:
        raise simulate.Violation("two owners")

    monkeypatch.setattr(simulate.Simulation, "_check", broken)
    with pytest.raises(simulate.Violation, match="seed 3: two owners"):
        simulate.run_seed(3)
