"""The comparison of systems on its smallest scale: real ranks, a real kill, the truth evaluated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import failover, rig, scenario, steady, turns
from bench.arms.arm import load
from bench.harness import Limits, Run
from bench.launch import Host, Local, Ssh, marked, python_path
from bench.plan import Plan
from bench.record import ROOT
from bench.slowing import NOBODY
from keepstep.cli.cluster import rooms_directory

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 100
DRAINS = "".join(
    f'[[strike]]\nseconds = {seconds}\nkind = "drain"\nrank = {rank}\n'
    for seconds, rank in ((1.0, 1), (6.0, 0))
)
KILL = '[[strike]]\nseconds = 1.0\nkind = "kill"\nrank = 1\n'
SSH = """#!/bin/sh
# What ssh does for the bench: options, a host, and a line for its shell.
while [ "${1#-}" != "$1" ]; do
    if [ "$1" = -o ]; then shift; fi
    shift
done
shift
exec sh -c "$*"
"""
HOSTS = tuple(Host(f"127.0.0.{number}") for number in (2, 3, 4))


def run(arm, directory, hosts=(), strikes=KILL, steps=STEPS):
    plan = Plan(size="1m", world=2, steps=steps, directory=str(directory))
    made = load(arm)
    made.hosts = hosts
    launch = Ssh(str(ROOT), hosts) if hosts else Local()
    one = Run(made, scenario.parse("s", strikes), plan, launch)
    result = one.go(Limits(60.0, still_seconds_max=60.0), lambda *_: None)
    assert list(marked(plan.directory)) == []
    assert result["outcome"] == "completed", result["said"]
    return result


def struck_once(result):
    strikes = [strike["kind"] for strike in result["strikes"] if strike["pid"]]
    return strikes == ["kill"] and len(result["truth"]["pauses"]) == 1


def test_keepstep_loses_no_step_and_no_sample_and_ends_like_the_bare_engine(tmp_path):
    bare = run("bare", tmp_path / "bare")
    assert bare["strikes"] == []
    live = run("keepstep", tmp_path / "keepstep")
    assert struck_once(live)
    found = live["truth"]
    assert (found["recomputed"], found["lost"], found["doubled"]) == (0, 0, 0)
    assert found["digests"] == bare["truth"]["digests"]


def test_each_drain_of_several_moves_the_rank_that_it_is_for(tmp_path):
    bare = run("bare", tmp_path / "bare", steps=600)
    live = run("keepstep", tmp_path / "keepstep", strikes=DRAINS, steps=600)
    assert not live.get("striker_failed")
    drained = [(strike["rank"], bool(strike["pid"])) for strike in live["strikes"]]
    assert drained == [(1, True), (0, True)]
    assert sorted(rank for rank, _ in live["starts"]) == [0, 0, 1, 1]
    assert (live["truth"]["recomputed"], live["truth"]["lost"]) == (0, 0)
    assert live["truth"]["digests"] == bare["truth"]["digests"]


def test_hosts_of_a_hostfile_are_nodes_with_a_spare_among_them(tmp_path, monkeypatch):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH, encoding="utf-8")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    bare = run("bare", tmp_path / "bare", HOSTS)
    live = run("keepstep", tmp_path / "keepstep", HOSTS)
    assert struck_once(live)
    assert live["settings"]["spares"] == 1
    assert live["truth"]["digests"] == bare["truth"]["digests"]
    assert (live["truth"]["recomputed"], live["truth"]["lost"]) == (0, 0)
    assert min(live["memory_bytes_max"], live["moved_bytes"]) > 0, "the hosts' watchers saw it"
    assert not rooms_directory(tmp_path / "keepstep" / "run").exists()


def finished_before_the_strike(result):
    struck = result["strikes"][0]["at"] - result["truth"]["began"]
    return sum(at <= struck for at in result["truth"]["finished"])


def test_checkpoint_restart_computes_steps_again_and_loses_no_sample(tmp_path):
    anew, loaded = (
        run(f"checkpoint_restart:sync@{every}", tmp_path / str(every)) for every in (1000, 2)
    )
    for rolled in (anew, loaded):
        assert struck_once(rolled)
        assert (rolled["truth"]["lost"], rolled["truth"]["doubled"]) == (0, 0)
    assert anew["truth"]["recomputed"] >= finished_before_the_strike(anew) > 2, "it began again"
    assert loaded["truth"]["recomputed"] <= 2, "it began where it had saved"


def test_a_rank_is_killed_at_its_jobs_turn_and_all_train_to_the_same_weights(tmp_path):
    file = tmp_path / "soon.toml"
    file.write_text('[[strike]]\nseconds = 0.5\nkind = "kill"\nrank = 1\n')
    line = ["--steps", "60", "--size", "1m", "--ranks", "2", "--scenario", str(file)]
    found = turns.measure("keepstep", turns.options(line))
    [strike] = found["strikes"]
    assert strike["rank"] == 1
    truth = found["truths"]["arm"]
    assert (truth["recomputed"], truth["lost"], truth["doubled"]) == (0, 0, 0)
    assert truth["unmeant_starts"] == 0
    assert found["weights_equal"]
    assert 0.5 < found["control"][0] < 2.0


def test_the_cost_while_nothing_breaks_is_measured_against_two_bare_jobs():
    args, progress = steady.options(["--quick", "--steps", "8", "--size", "1m"]), steady.Progress()
    steady.measure("bare", args, progress, threading.Event())
    found = steady.summed_up("bare", args, progress)
    assert (found["failed"], found["alarms"]) == ("", [])
    assert found["steps_per_arm"] >= 8
    assert 0.5 < found["ratio"][0] < 2.0
    assert {"bare", "arm", "control", "arm_processor", "others"} <= found["rounds"][0].keys()


HANGING = """
import os
import time
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from bench.arms.checkpoint_restart import end_hangs

dist.init_process_group("gloo")
mine = dist.new_group([0, 1])
dist.barrier()
end_hangs(1.0, list(_world.pg_map))
if dist.get_rank() == 1:
    time.sleep(60)
for group in (None, mine):
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "imed out" in str(error) or "imeout" in str(error), error
    else:
        os._exit(3)
# Without torch's own end: now and then it aborts over threads of groups that ran out of time.
os._exit(0)
"""


def test_a_rank_that_hangs_is_noticed_by_the_others_of_every_group(tmp_path):
    """torchrun restarts when one has ended badly; with torch's own limit that is in 30 minutes."""
    script, log = tmp_path / "hanging.py", tmp_path / "log"
    script.write_text(HANGING, encoding="utf-8")
    around = {"PYTHONPATH": python_path(ROOT)}
    processes = rig.bare_world([str(script)], 2, log, around)
    try:
        assert processes[0].wait(45.0) == 0, log.read_text()
        assert processes[1].poll() is None, "it hung all the while"
    finally:
        rig.end_all(processes)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


@contextmanager
def slowed(pid: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Almost all the time stopped."""
    command = [sys.executable, "-m", "bench.slowing", str(pid), str(seconds), "0.98"]
    slowing = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path(ROOT)})
    try:
        yield slowing
    finally:
        slowing.kill()
        slowing.wait()


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
def test_orchestrators_take_over_on_the_journal_that_failover_fills():
    result = failover.run(30_000, kills=1, seed=1)
    assert 0.0 < result["p95"] < 20.0
    assert result["after_snapshot"] > 0, "the last entries are read one by one"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_is_slowed_down_is_woken_whatever_ends_the_slowing(number):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        with slowed(victim.pid, 60.0) as slowing:
            deadline, seen = time.monotonic() + 20.0, ""
            while seen != "T" and time.monotonic() < deadline:
                seen = state_of(victim.pid)
            assert seen == "T", "it was never stopped"
            slowing.send_signal(number)
            assert slowing.wait(20.0) == 0
            assert state_of(victim.pid) != "T"
        with slowed(victim.pid, 0.2) as slowing:
            assert slowing.wait(20.0) == 0, "its time was over"
        assert state_of(victim.pid) != "T"
    finally:
        victim.kill()
        victim.wait()
    with slowed(victim.pid, 60.0) as slowing:
        assert slowing.wait(20.0) == NOBODY
