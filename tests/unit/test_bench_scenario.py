"""Scenarios: read strictly, drawn from their seed, the same for every arm."""

from __future__ import annotations

from collections import Counter

import pytest

from bench import scenario
from bench.arms.arm import load
from bench.launch import LOCAL, Host, Ssh, read_hostfile, seats
from bench.plan import SECONDS, Plan
from bench.scenario import Strike
from keepstep.errors import ConfigError


def scheduled(text, world=4, nominal=100.0, horizon=300.0):
    return scenario.schedule(scenario.parse("s", text), world, nominal, horizon)


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_that_ships_gives_the_same_strikes_twice(name):
    first, second = (scenario.schedule(scenario.read(name), 4, 180.0, 600.0) for _ in range(2))
    assert first == second
    assert bool(first) == (name != "clean")
    assert [s.at for s in first] == sorted(s.at for s in first)


def test_a_strike_is_placed_by_its_share_of_the_fault_free_run():
    text = '[[strike]]\nshare = 0.4\nkind = "kill"\nrank = 1\n'
    assert scheduled(text) == [Strike(40.0, "kill", 1)]


def test_regular_kills_go_on_to_the_horizon_and_start_alike_for_slow_and_fast_arms():
    text = '[every]\nseconds = 30\nfirst_seconds = 15\nkind = "kill"\n'
    short, long = scheduled(text, horizon=100.0), scheduled(text, horizon=1000.0)
    assert [s.at for s in short] == [15.0, 45.0, 75.0]
    assert long[:3] == short
    assert {s.rank for s in long} == {0, 1, 2, 3}


def test_a_mix_follows_its_weights_and_its_mean():
    text = "seed = 2\n[mix]\nmean_seconds = 10\nkill = 9\nhang = 1\n"
    strikes = scheduled(text, horizon=10_000.0)
    assert 900 < len(strikes) < 1100
    assert 0.86 < sum(s.kind == "kill" for s in strikes) / len(strikes) < 0.94


def test_a_short_run_meets_the_mix_and_not_a_draw_of_its_own():
    """As many strikes as its mean says, with shares as close to the weights as can be."""
    for seed in range(20):
        text = f"seed = {seed}\n[mix]\nmean_seconds = 12\nkill = 326\nhang = 49\n"
        text += "drain = 32\nslow = 6\n"
        strikes = scheduled(text, horizon=390.0)
        first = Counter(s.kind for s in strikes if s.at <= 96.0)
        assert first == {"kill": 6, "hang": 1, "drain": 1}
        assert [int(s.at / 12) for s in strikes] == list(range(len(strikes))), "one in every 12 s"
        whole = Counter(s.kind for s in strikes[:32])
        assert whole == {"kill": 25, "hang": 4, "drain": 2, "slow": 1}, "the next ones make it up"
        assert strikes[:8] == scheduled(text, horizon=96.0), "who is slower meets the same first"


def test_the_title_of_llama3_says_what_a_full_run_draws():
    told = scenario.read("llama3")
    drawn = Counter(s.kind for s in scenario.schedule(told, 4, SECONDS, SECONDS))
    assert drawn == {"kill": 6, "hang": 1, "drain": 1}
    assert "a fault every 12 s: 6 kills, a hang and a drain in a full run" in told.title


def test_the_llama3_mix_has_all_419_but_silent_corruption():
    mix = scenario.read("llama3").mix
    assert sum(value for kind, value in mix.items() if kind != "mean_seconds") == 419 - 6


def test_a_trace_is_scaled_in_time():
    text = '[trace]\ntime_scale = 0.5\n[[trace.event]]\nseconds = 40\nkind = "drain"\nrank = 0\n'
    assert scheduled(text) == [Strike(20.0, "drain", 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("killl = 1", "unknown: killl"),
        ('[[strike]]\nshare = 0.1\nkind = "burn"\nrank = 1', "no kind 'burn'"),
        ('[[strike]]\nshare = 0.1\nkind = "kill"\nrank = 4', "no rank 4"),
        ('[[strike]]\nkind = "kill"\nrank = 1', "share or seconds"),
        ('[every]\nseconds = 0\nkind = "kill"', "more than 0"),
        ("[mix]\nmean_seconds = 5\nkill = 0", "so is a kind's weight"),
        ("[slow]\nstopped_share = 1.0", "between 0 and 1"),
        ("title =", "scenario s"),
    ],
)
def test_a_wrong_scenario_is_refused_with_what_is_wrong(text, said):
    with pytest.raises(ConfigError, match=said):
        scheduled(text)


def test_an_unknown_scenario_names_those_that_exist():
    with pytest.raises(ConfigError, match="single_kill"):
        scenario.read("nothing")


# --- where things run -----------------------------------------------------------------------------


def test_a_hostfile_fills_one_host_after_another():
    hosts = read_hostfile("a slots=2  # first rack\n\nb\n")
    assert hosts == (Host("a", 2), Host("b", 1))
    assert seats(hosts, 3) == ("a", "a", "b")
    assert seats((), 2) == (LOCAL, LOCAL)


@pytest.mark.parametrize("text", ["a slots=0", "a cores=2", "a\na"])
def test_a_wrong_hostfile_is_refused(text):
    with pytest.raises(ConfigError, match="hostfile"):
        read_hostfile(text)


def test_keepstep_takes_hosts_that_are_alike_and_leave_one_to_spare():
    arm, plan = load("keepstep"), Plan(world=4)
    for hosts, why in (
        ((Host("a", 2), Host("b", 2), Host("c", 2)), ""),
        ((Host("a", 2), Host("b", 2)), "none is left as a spare"),
        ((Host("a", 2), Host("b", 2), Host("c", 1)), "same number of slots"),
        ((Host("a", 3), Host("b", 3)), "have to fill them"),
    ):
        arm.hosts = hosts
        assert why in arm.refuses(plan)
        assert bool(why) == bool(arm.refuses(plan))


def test_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match="has 1"):
        seats((Host("a"),), 2)


def test_a_command_over_ssh_carries_directory_and_environment_quoted():
    line = Ssh("/srv/a dir").line("h1", ["python", "-c", "print('x y')"], {"B": "2 3", "A": "1"})
    assert line[-2] == "h1"
    assert line[-1] == (
        "cd '/srv/a dir' && exec env A=1 'B=2 3' python -c 'print('\"'\"'x y'\"'\"')'"
    )


@pytest.mark.parametrize(
    "wrong", [{"parallel": "pp"}, {"size": "7b"}, {"world": 1}, {"parallel": "hsdp", "world": 3}]
)
def test_a_plan_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Plan(**wrong)
