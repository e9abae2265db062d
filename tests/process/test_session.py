"""The session with real processes and real signals: results equal those without faults."""

from __future__ import annotations

import difflib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process import bare
from tests.process.bare import results
from tests.process.job import SmallJob, memory_limit

pytestmark = [pytest.mark.process, pytest.mark.timeout(480)]
ROOT = Path(__file__).resolve().parents[2]

LOOP = '''
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import keepstep

torch.set_num_threads(1)
keepstep.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(100 + rank)
batches = [(torch.full((4, 8), i * world + rank + 0.5),) for i in range(STEPS)]
commits = []

def pace():
    """No time in the reference, and none when the test waits for nothing but the end."""
    if not os.path.exists("hurry"):
        time.sleep(float(os.environ.get("PACE", "0")))

def result(**more):
    weights = [p.detach().double().sum().item().hex() for p in model.parameters()]
    out = {"weights": weights, "rng": torch.rand(1).item(), "commits": commits, **more}
    os.makedirs("result", exist_ok=True)
    with open(f"result/rank-{rank}.json", "w") as file:
        json.dump(out, file)
'''


def loop(body: str, steps: int = 150) -> str:
    return LOOP.replace("STEPS", str(steps)) + "\n" + body


PLAIN_BODY = """
session = keepstep.session(model=model, optimizer=optimizer)
session.on_commit(commits.append)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        pace()
result()
"""


def without_commits(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "commits"} for r in found]


def check_as_bare(directory: Path, script: str, world: int = 3) -> None:
    """Commits aside, of which a joiner hears only the later ones, nothing differs on any rank."""
    expected = bare.run(script, world, {})
    assert without_commits(results(directory, world)) == without_commits(expected)


def test_a_killed_rank_is_replaced_and_nothing_differs(tmp_path: Path) -> None:
    script = loop(PLAIN_BODY)
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(1, at_step=20)
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script)
    # Every step is committed once on a survivor; a joiner hears of those after it joined.
    assert results(tmp_path, 3)[0]["commits"] == list(range(150))
    lines = [json.loads(s) for s in (tmp_path / "state/steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(150))
    assert [line["samples"] for line in lines] == [[12 * i, 12 * i + 12] for i in range(150)]


EARLY_BODY = """
import signal
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 1))
# Small buckets: DDP lays them out anew after its first step, and with them the order of its sums.
model = DistributedDataParallel(model, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(100 + rank)
batches = [(torch.randn(4, 64),) for i in range(40)]
session = keepstep.session(model=model, optimizer=optimizer)

def die(step, place):
    if rank == 1 and not session.rehearsing and os.path.exists(f"die-{step}-{place}"):
        os.unlink(f"die-{step}-{place}")
        os.kill(os.getpid(), signal.SIGKILL)

for (x,) in session.steps(batches):
    with session.attempt():
        step = session.step
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        die(step, "forward")
        loss.backward()
        die(step, "backward")
        optimizer.step()
        die(step, "optimizer")
        time.sleep(0.01)
result()
"""


@pytest.mark.parametrize(
    ("step", "place"),
    [(0, "backward"), (0, "optimizer"), (1, "forward"), (1, "optimizer"), (2, "forward")],
)
def test_a_rank_that_dies_in_the_first_steps_is_replaced_and_nothing_differs(
    tmp_path: Path, step: int, place: str
) -> None:
    # Survivors that made no second step use DDP's first buckets still; a joiner must do as they.
    script = loop(EARLY_BODY)
    (tmp_path / f"die-{step}-{place}").touch()
    with SmallJob(tmp_path, script) as job:
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    # Before any step is committed the job may as well start anew: nothing is lost by it.
    assert incident["outcome"] in (("resumed", "restart") if step < 2 else ("resumed",))
    lines = (tmp_path / "state/steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(40))
    assert not (tmp_path / f"die-{step}-{place}").exists()
    check_as_bare(tmp_path, script)


AHEAD_BODY = """
import signal
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        # Rank 0 tells in which step, for all see the file when they see it.
        part = torch.tensor(float(os.path.exists("part") and session.step >= 20))
        dist.broadcast(part, 0)
        part = part.item() and not session.rehearsing
        if part and rank == 2:
            # Rank 1 goes ahead; rank 0 waits for a word of this one, which dies instead.
            until = time.monotonic() + 5.0
            while not os.path.exists("ahead") and time.monotonic() < until:
                time.sleep(0.01)
            os.unlink("part")
            os.kill(os.getpid(), signal.SIGKILL)
        if part and rank == 0:
            dist.recv(torch.zeros(1), 2)
        optimizer.step()
        if part and rank == 1:
            open("ahead", "w").close()
        pace()
result()
"""


@pytest.mark.parametrize("window", ["reform", "transfer"])
def test_who_lags_keeps_its_state_until_the_newer_one_lands(tmp_path: Path, window: str) -> None:
    # Rank 1 alone is a step ahead, and the others are to receive from it: it dies before that.
    script = loop(AHEAD_BODY)
    failpoints = tmp_path / "failpoints"
    failpoints.mkdir()
    environment = {"KEEPSTEP_FAILPOINTS": str(failpoints)}
    with SmallJob(
        tmp_path,
        script,
        slots=(1, 1, 1, 1, 1),
        ranks_per_node=1,
        nodes=3,
        spares=2,
        environment=environment,
    ) as job:
        job.wait_ready(2)
        (failpoints / f"rank-1-{window}").write_text("kill")
        part = tmp_path / "part"
        part.touch()
        job.cluster.wait_until(lambda _: not part.exists(), 60.0, "the death of rank 2")
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert (tmp_path / "ahead").exists()
    assert (failpoints / f"rank-1-{window}.hit").exists()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script)


FLIP_BODY = """
import signal
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(batches[:10], passes=15):
    # At the start of a pass the recorded place is the end of the last one.
    ripe = session.step % 10 == 0 and not session.rehearsing
    here, until = f"here-{session.step}", time.monotonic() + 1.0
    if rank == 2 and ripe and os.path.exists("part"):
        # Only where rank 0 waits for it: of the two, one alone can take the file away.
        while time.monotonic() < until:
            try:
                os.rename(here, "gone")
            except FileNotFoundError:
                time.sleep(0.01)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and ripe and os.path.exists("part"):
        open(here, "w").close()
        while os.path.exists(here) and time.monotonic() < until:
            time.sleep(0.01)
        try:
            os.unlink(here)
        except FileNotFoundError:
            # Rank 2 is dead. One weight rots here while this rank is between two attempts, with
            # the batches of the next one in its hands.
            os.unlink("part")
            next(model.parameters()).detach()[0, 0] += 1.0
            time.sleep(1.0)
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        pace()
result()
"""


def test_a_survivor_that_receives_between_two_attempts_keeps_its_place_in_the_data(
    tmp_path: Path,
) -> None:
    script = loop(FLIP_BODY)
    with SmallJob(tmp_path, script, slots=(5,), ranks_per_node=4) as job:
        job.wait_ready()
        part = tmp_path / "part"
        part.touch()
        job.cluster.wait_until(lambda _: not part.exists(), 60.0, "a weight that rots")
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script, world=4)


LAZY_BODY = """
session = keepstep.session(model=model, optimizer=optimizer)
pair = None
extra = torch.zeros(1)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if session.step >= 10 and not session.rehearsing:
            if pair is None:
                pair = dist.new_group([1, 2])
            if rank in (1, 2):
                extra = torch.full((1,), float(session.step + rank))
                dist.all_reduce(extra, group=pair)
        optimizer.step()
        pace()
result(extra=extra.item())
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_group_made_inside_the_loop_is_there_for_the_joiner(tmp_path: Path, victim: int) -> None:
    script = loop(LAZY_BODY)
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(victim, at_step=30)
    assert results(tmp_path, 3) == bare.run(script, 3, {})


BY_HAND_BODY = """
session = keepstep.session(model=model.module, optimizer=optimizer)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model.module(x).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        pace()
result()
"""


def test_gradients_that_are_reduced_by_hand_are_protected_as_well(tmp_path: Path) -> None:
    script = loop(BY_HAND_BODY)
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(1, at_step=20)
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    assert results(tmp_path, 3) == bare.run(script, 3, {})


AWARE_BODY = """
class Average:
    def __init__(self):
        self.value, self.count = 0.0, 0
average = Average()
def save():
    return {"value": average.value, "count": average.count}
def restore(state):
    average.value, average.count = state["value"], state["count"]
session = keepstep.session(model=model, optimizer=optimizer, average=(save, restore))
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        average.value += total.item() / (average.count + 1)
        average.count += 1
        pace()
result(average=average.value.hex(), count=average.count)
"""


def test_the_users_own_save_and_restore_carry_state_to_the_joiner(tmp_path: Path) -> None:
    script = loop(AWARE_BODY)
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(2, at_step=25)
    assert results(tmp_path, 3) == bare.run(script, 3, {})


TEACHER_BODY = """
torch.manual_seed(5)
teacher = nn.Linear(1024, 512)
torch.manual_seed(100 + rank)
for parameter in teacher.parameters():
    parameter.requires_grad_(False)
session = keepstep.session(model=model, optimizer=optimizer, teacher=teacher)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        first = next(model.parameters()).detach().view(-1)
        MOVE
        pace()
result(teacher=[p.double().sum().item().hex() for p in teacher.parameters()])
"""


@pytest.mark.parametrize(
    ("move", "rounds"),
    [
        ("teacher.weight.data.mul_(0.99).add_(first[0], alpha=0.01)", 1),
        # One element of half a million: no sample sees it, the joiner's own digest does.
        ("teacher.weight.data[300, 300] += first[0]", 2),
    ],
    ids=["everywhere", "one element"],
)
def test_a_teacher_without_gradients_moves_on_unseen_and_is_not_lost(
    tmp_path: Path, move: str, rounds: int
) -> None:
    script = loop(TEACHER_BODY.replace("MOVE", move))
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(1, at_step=40)
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    assert incident["generation"] == 1 + rounds, "a stale digest costs one more round"
    check_as_bare(tmp_path, script)


RAISES_BODY = """
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        if session.step == 40 and rank in CULPRITS and not session.rehearsing:
            TROUBLE
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
"""


TYPO = """raise KeyError("a typo of mine")"""
HUGE = """torch.empty(1 << 60)"""
NAN = """assert (loss * float("nan")).isfinite(), "the loss is NaN\""""


@pytest.mark.parametrize(
    ("culprits", "trouble", "said", "spares_used"),
    [
        ("(1,)", TYPO, "KeyError: 'a typo of mine'", 1),
        ("(0, 1, 2)", TYPO, "KeyError: 'a typo of mine'", 0),
        ("(1,)", HUGE, "RuntimeError: ", 1),
        ("(0, 1, 2)", NAN, "AssertionError: the loss is NaN", 0),
    ],
)
def test_a_users_exception_stops_the_job_with_the_users_traceback(
    tmp_path: Path, culprits: str, trouble: str, said: str, spares_used: int
) -> None:
    script = loop(RAISES_BODY.replace("CULPRITS", culprits).replace("TROUBLE", trouble))
    with SmallJob(tmp_path, script, slots=(5,), spares=2) as job:
        over = job.end()
        seats = over["seats"]
    assert over["state"] == "failed"
    assert over["exit_code"] != 0
    assert said in over["detail"]
    assert sum(seat["incarnation"] for seat in seats) <= spares_used


EATS = """with session.busy("a table", seconds_max=100):
                held = [torch.ones(1 << 24) for _ in range(1000)]"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a memory limit needs root")
def test_a_rank_that_the_kernel_kills_for_lack_of_memory_costs_one_spare(tmp_path: Path) -> None:
    script = loop(RAISES_BODY.replace("CULPRITS", "(1,)").replace("TROUBLE", EATS))
    with memory_limit(4 << 30), SmallJob(tmp_path, script, slots=(5,), spares=2) as job:
        over = job.end()
        seats = over["seats"]
        (incident,) = job.incidents()
    assert over["state"] == "failed"
    assert "the kernel killed it for lack of memory" in over["detail"]
    assert incident["causes"][0]["rank"] == 1
    assert [seat["incarnation"] for seat in seats] == [0, 1, 0]


def test_a_stopped_rank_is_found_and_replaced(tmp_path: Path) -> None:
    script = loop(PLAIN_BODY, steps=120)
    with SmallJob(tmp_path, script) as job:
        job.wait_ready()
        job.wait_step(2, 20)
        pid = job.kill(2, signal.SIGSTOP)
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
        assert not Path(f"/proc/{pid}").exists()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script)


BUSY_BODY = """
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    if session.step == 30 and rank == 0:
        with session.busy("evaluation", seconds_max=30):
            time.sleep(9)
result()
"""


def test_declared_slowness_is_not_a_hang(tmp_path: Path) -> None:
    with SmallJob(tmp_path, loop(BUSY_BODY, steps=60)) as job:
        assert job.end()["exit_code"] == 0
        assert job.incidents() == []


def test_the_quickstart_differs_from_plain_ddp_in_at_most_five_lines() -> None:
    plain = (ROOT / "examples/01_quickstart/plain.py").read_text()
    train = (ROOT / "examples/01_quickstart/train.py").read_text()

    def code(text: str) -> list[str]:
        after_docstring = text.split('"""')[2]
        return [line.strip() for line in after_docstring.splitlines() if line.strip()]

    changed = [d for d in difflib.ndiff(code(plain), code(train)) if d.startswith("+ ")]
    assert len(changed) <= 5, changed


APART_BODY = (
    """
from keepstep.training import checkpoint
checkpoint.LOOK_AGAIN_SECONDS = 0.1
if rank == 1 and os.path.exists("again"):
    os.environ |= {"KEEPSTEP_STATE_DIR": os.path.abspath("elsewhere"), "KEEPSTEP_RESUME_FROM": ""}
"""
    + PLAIN_BODY
)


def test_ranks_of_a_rerun_that_see_different_checkpoints_do_not_train(tmp_path: Path) -> None:
    with SmallJob(tmp_path, loop(APART_BODY), slots=(3,), spares=0) as job:
        job.wait_ready(0)
        job.wait_settled()
        job.cluster.client.stop("job", save=True, why="the test asked for it")
        saved = job.end()
        assert saved["exit_code"] == 75
        (tmp_path / "again").touch()
        job.cluster.client.submit(job.spec)
        job.wait(lambda j: j["state"] == "failed", "the end")
        said = job.logs()
    assert "rank 1 finds none; give all nodes the same state directory" in said
    assert not (tmp_path / "result").exists()


REWIND_BODY = """
import ctypes
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(batches):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        pace()
    if session.due(20) and session.step == 20:
        session.save()
    if session.due(24) and rank == 1 and not os.path.exists("flipped"):
        open("flipped", "w").close()
        byte = ctypes.c_ubyte.from_address(model.module[0].weight.data_ptr() + 2)
        byte.value ^= 64
result()
"""


def test_a_job_with_contaminated_steps_goes_back_before_them_if_somebody_wants_it(
    tmp_path: Path,
) -> None:
    script = loop(REWIND_BODY)
    with SmallJob(tmp_path, script, environment={"KEEPSTEP_CHECK_STEPS": "10"}) as job:
        found = job.wait(
            lambda view: view["contaminated"] and view["state"] == "running",
            "a flip that is found by comparison",
        )
        assert found["contaminated"] == [20, 29]
        assert found["published"]["step"] == 20
        said = job.cluster.client.stop("job", save=False, why="a test", rewind=True)["why"]
        assert job.view()["contaminated"] == [], said
        assert job.end()["exit_code"] == 0
        rewound = job.incidents()[-1]
    assert rewound["outcome"] == "fallback"
    (tmp_path / "flipped").unlink()
    check_as_bare(tmp_path, script.replace('os.path.exists("flipped")', "True"))
