"""Groups re-formed in place, with real processes, real sockets and a store that outlives them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from keepstep.errors import ConfigError
from keepstep.training import lost
from keepstep.training.group_log import GroupRecord, decode_log, encode_log, merge_logs
from keepstep.training.groups import Groups
from keepstep.training.swap import build as swap_build
from tests.process import group_jobs as jobs
from tests.process.world import World

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
SURVIVORS = [rank for rank in range(jobs.WORLD) if rank != jobs.VICTIM]


needs_cpp = pytest.mark.skipif(
    not swap_build.library_path().exists(), reason="the C++ swap is not built"
)


@pytest.fixture(params=[pytest.param("cpp", marks=needs_cpp), "python"])
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def fault_free():
    """The weights of a run without faults; the same for both implementations, by claim."""
    known = {}

    def weights(option):
        if option not in known:
            with World("python") as world:
                for rank in range(jobs.WORLD):
                    world.start(rank, jobs.member, rank, option, "never")
                known[option] = world.results(*range(jobs.WORLD))
            assert len(set(known[option])) == 1
        return known[option][0]

    return weights


def run_with_fault(implementation, option, end, tentative=jobs.VICTIM):
    with World(implementation) as world:
        for rank in range(jobs.WORLD):
            world.start(rank, jobs.member, rank, option, end)
        world.start("spare", jobs.joiner, option, tentative)
        world.wait_key("rehearsed")
        if end == "kill":
            world.wait_death(jobs.VICTIM)
        else:
            world.wait_stopped(jobs.VICTIM)
        world.store.set("generation/1", "1")
        for rank in SURVIVORS:
            world.wait_key(f"out/{rank}")
        if end == "stop":
            os.kill(world.processes[jobs.VICTIM].pid, signal.SIGKILL)
        return world.results(*SURVIVORS, "spare")


@pytest.mark.parametrize("option", list(jobs.OPTIONS))
def test_a_killed_rank_is_replaced_and_the_weights_are_those_of_a_run_without_fault(
    implementation, option, fault_free
):
    found = run_with_fault(implementation, option, "kill")
    assert found == [fault_free(option)] * jobs.WORLD


def test_survivors_of_a_stopped_rank_are_freed_and_finish_with_the_same_weights(
    implementation, fault_free
):
    assert run_with_fault(implementation, "default", "stop") == [fault_free("default")] * jobs.WORLD


def test_a_standby_that_rehearsed_another_seat_takes_the_real_one(implementation, fault_free):
    found = run_with_fault(implementation, "default", "kill", tentative=3)
    assert found == [fault_free("default")] * jobs.WORLD


@pytest.mark.parametrize("full", [False, True], ids=["", "without a file to be had"])
def test_a_blocked_collective_is_freed_by_abort_from_another_thread(implementation, full):
    with World(implementation) as world:
        seconds, _ = world.run(2, jobs.blocked_collective, full)
    # Nobody else would free it: its peer waits for this.
    assert 0 <= seconds < 5.0


def test_a_construction_without_its_peer_is_cancelled_at_once(implementation):
    with World(implementation) as world:
        seconds, _ = world.run(2, jobs.blocked_construction)
    assert 0 <= seconds < 1.0, "by itself it would end after 20 seconds"


def test_nothing_is_launched_between_an_abort_and_the_next_reform(implementation):
    with World(implementation) as world:
        assert world.run(2, jobs.broken_until_reform) == [[5, 2.0, 1]] * 2


def test_a_late_abort_spares_the_generation_it_asked_for_and_refuses_older_ones(implementation):
    with World(implementation) as world:
        assert world.run(2, jobs.late_abort) == [[True, False, 2.0]] * 2


def test_a_generation_is_connected_while_the_one_before_is_in_use(implementation):
    with World(implementation) as world:
        zero, *others = world.run(3, jobs.prepared_ahead)
    assert zero == [[3.0], True, True, True, ["first", "late", "met", "other groups"]]
    told = ["early", "first", "in vain", "met", "other groups"]
    assert others == [[[3.0], True, True, True, told]] * 2


def test_a_lazily_made_group_is_replayed_and_later_names_line_up(implementation):
    with World(implementation) as world:
        zero, one, joiner = world.run(3, jobs.lazy_group)
    assert zero == [1.0, 3.0, "4", ["0", "1", "2", "3", "4"]]
    assert one == joiner == [2.0, 3.0, "4", ["0", "1", "2", "3", "4"]]


def test_a_group_interrupted_while_being_made_is_found_again_by_the_retry(implementation):
    with World(implementation) as world:
        assert world.run(2, jobs.interrupted_new_group) == [["1", 2.0, 2]] * 2


def test_fifty_reforms_leak_neither_threads_nor_descriptors(implementation):
    with World(implementation) as world:
        for early, late, _ in world.run(2, jobs.fifty_reforms):
            assert late[0] <= early[0] + 2
            assert late[1] <= early[1] + 2


def test_an_abort_in_the_very_moment_of_a_launch_frees_it_as_well(implementation):
    """Gloo loses an operation whose first write fails, and waits for it until its timeout."""
    with World(implementation) as world:
        assert max(world.run(3, jobs.aborts_amid_launches, 40)) < 2.0


@needs_cpp
@pytest.mark.parametrize("kind", ["collective", "backward"])
def test_who_waits_for_what_gloo_has_lost_is_freed_after_an_abort(kind):
    with World("cpp") as world:
        (freed, why, together, took), (*_, other, _) = world.run(2, jobs.lost_operation, kind)
    # Not before its threads were looked at twice.
    assert lost.GRACE_SECONDS + lost.LOOK_SECONDS < freed < 20.0
    assert why == lost.LOST
    assert together == other == [3.0] * 4
    assert took < 20.0, "whatever it was launched on is let go beside us"


@needs_cpp
@pytest.mark.parametrize("seed", range(8))
def test_a_peer_that_dies_amid_launches_holds_nobody_up(seed):
    """Of some hundred such deaths Gloo loses an operation in one: this is not how it is proved."""
    with World("cpp") as world:
        for rank in range(jobs.WORLD):
            world.start(rank, jobs.death_amid_launches, rank, jobs.WORLD, seed)
        assert max(world.results(*SURVIVORS)) < 20.0


def test_works_give_back_what_gloos_do_and_keep_nothing(implementation):
    with World(implementation) as world:
        one, two = world.run(2, jobs.works)
    sums = [[0.0, 2.0, 4.0, 6.0], [2.0, 2.0], True, True, [2.0, 0.0], [[2.0, 2.0]]]
    assert one == two == [*sums, True]


def test_hooks_fire_before_the_first_and_the_nth_collective_of_each_attempt(implementation):
    with World(implementation) as world:
        for seen, per_step, counted, shared, raised in world.run(2, jobs.hooks):
            assert per_step[0] == per_step[1] > 1
            assert seen == ["first", *["step", "first", "second"] * 2]
            assert counted == 1, "the side group is not counted"
            assert shared, "the counter is kept in the caller's memory"
            assert raised == "the mirror is late"


def test_a_joiner_alone_can_rehearse_ddp_and_every_kind_of_collective(implementation):
    with World(implementation) as world:
        world.start("spare", jobs.rehearsal)
        ((found, gathered, flat, mine, objects, theirs),) = world.results("spare")
    assert all(found.values())
    assert (gathered, flat, mine) == (8.0, 8.0, [4.0, 5.0])
    assert objects == ["me"] * 4
    assert theirs == ["mine"]


def test_the_short_limit_on_connecting_does_not_limit_later_operations(implementation):
    with World(implementation) as world:
        assert world.run(2, jobs.reach_of_timeouts) == [2.0] * 2


def test_logs_of_several_ranks_merge_into_one_order_and_survive_json():
    make = GroupRecord
    first = [make(0, "0", (0, 1, 2), "gloo", 30.0), make(1, "1", (0, 1), "gloo", 30.0)]
    second = [first[0], make(1, "1", (0, 1), "gloo", 30.0, True), make(2, "2", (1, 2), "gloo", 9.0)]
    merged = merge_logs([first, second])
    assert [(r.order, r.name, r.destroyed) for r in merged] == [
        (0, "0", False),
        (1, "1", True),
        (2, "2", False),
    ]
    assert decode_log(encode_log(merged)) == merged


def test_an_engine_that_could_go_on_with_wrong_state_is_refused():
    with pytest.raises(ConfigError, match="'nccl' cannot be re-formed yet: use gloo"):
        Groups().init("nccl", 0, 1, HashStore(), timedelta(seconds=30))


def test_logs_that_disagree_about_a_name_are_refused():
    ours = [GroupRecord(0, "1", (0, 1), "gloo", 30.0)]
    theirs = [GroupRecord(0, "1", (0, 2), "gloo", 30.0)]
    with pytest.raises(ConfigError, match="same order on every rank"):
        merge_logs([ours, theirs])
