"""torchrun's command lines mean the same here, or are refused with the fix."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli import parser
from keepstep.cli.follow import Away
from keepstep.cli.run import Launch, node_count, ranks_per_node, settle
from keepstep.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    (tmp_path / "token").write_text("x" * 32, encoding="utf-8")
    return tmp_path


def launch(here: Path, line: str, **environ: str) -> Launch:
    return settle(parser().parse_args(["run", *line.split()]), environ, here)


def test_a_plain_torchrun_line_needs_no_change(here: Path):
    done = launch(here, "--nproc-per-node 4 train.py --lr 0.1 --nnodes 9")
    assert done.spec.ranks_per_node == 4
    assert done.spec.nodes == 1
    assert done.spec.script == str(here / "train.py")
    assert done.spec.arguments == ("--lr", "0.1", "--nnodes", "9"), "after the script: the script's"
    assert done.spec.directory == str(here)
    assert done.notes == ()
    assert done.spec.tee


@pytest.mark.parametrize(
    "line",
    [
        "--nproc_per_node=2 train.py",
        "--nproc-per-node=2 --standalone train.py",
        "--nproc_per_node 2 --rdzv-backend c10d --rdzv_endpoint localhost:0 train.py",
        "--nnodes=1 --nproc-per-node 2 --node-rank 0 --master-addr a --master_port 1 train.py",
        "--nnodes 1:1 --nproc-per-node 2 --max-restarts 3 --monitor_interval 1 train.py",
        "--nproc-per-node 2 -r 3 -t 3 --role trainer --start-method spawn train.py",
        "--nproc-per-node 2 --redirects 3 --tee 3 --log-dir logs train.py",
    ],
)
def test_torchruns_options_are_taken_in_both_spellings(here: Path, line: str):
    done = launch(here, line)
    assert done.spec.ranks_per_node == 2
    assert done.spec.nodes == 1
    assert len(done.notes) <= 1, "one note for all that is ignored"


def test_what_is_ignored_is_named_in_one_note(here: Path):
    (note,) = launch(here, "--standalone --rdzv-backend c10d --max-restarts 2 train.py").notes
    assert all(word in note for word in ("--standalone", "--rdzv-backend", "--max-restarts"))


def test_a_module_is_run_as_one(here: Path):
    done = launch(here, "-m package.train -- --flag")
    assert (done.spec.module, done.spec.script) == (True, "package.train")
    assert done.spec.arguments == ("--flag",)


def test_the_rendezvous_id_names_the_job_and_job_wins_over_it(here: Path):
    assert launch(here, "--rdzv-id run7 train.py").spec.job == "run7"
    assert launch(here, "--rdzv-id run7 --job mine train.py").spec.job == "mine"
    assert launch(here, "train.py").spec.job.startswith("train-")


def test_places_default_to_the_run_directory(here: Path):
    done = launch(here, "--job j train.py")
    run = here / "keepstep-runs" / "j"
    assert done.run_dir == run
    assert done.spec.log_directory == str(run / "logs")
    assert done.spec.state_directory == str(run / "state")
    elsewhere = launch(here, "--job j --run-dir r --log-dir l --state-dir s train.py").spec
    assert elsewhere.log_directory == str(here / "l")
    assert elsewhere.state_directory == str(here / "s")


def test_alone_a_node_has_room_for_its_ranks_and_the_spares(here: Path):
    done = launch(here, "--nproc-per-node 4 --spares 2 --hold-seconds 7 --priority 3 train.py")
    assert done.node.slots == 6
    assert done.node.address == "127.0.0.1"
    assert (done.spec.spares, done.spec.priority) == (2, 3)
    assert done.spec.policy.hold_seconds_max == 7.0


def test_joining_takes_a_url_a_token_and_the_jobs_name(here: Path):
    line = "--orchestrator http://o:1 --token-file token --job j --nnodes 2 --nproc-per-node 4"
    token = f"{here}/token"
    line = line.replace("--token-file token", f"--token-file {token}")
    done = launch(here, f"{line} --address 10.0.0.2 --node n7 train.py")
    assert (done.node.name, done.node.address, done.node.slots) == ("n7", "10.0.0.2", 4)
    assert (done.orchestrator, done.token_file) == ("http://o:1", Path(token))
    assert done.spec.nodes == 2


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--no-python train.py", "give the Python script itself"),
        ("--virtual-local-rank train.py", "LOCAL_RANK"),
        ("gone.py", "check the path"),
        ("--nproc-per-node 0 train.py", "above 0"),
        ("--nproc-per-node many train.py", "cpu, gpu or auto"),
        ("--nnodes 0 train.py", "MIN:MAX"),
        ("--nnodes 3:2 train.py", "MIN:MAX"),
        ("--nnodes 2 train.py", "--orchestrator"),
        ("--spares -1 train.py", "0 or more"),
        ("--job a/b train.py", "letters, digits"),
        ("--orchestrator http://o:1 train.py", "--job"),
        ("--orchestrator http://o:1 --job j train.py", "--token-file"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_fix(here: Path, line: str, fix: str):
    with pytest.raises(ConfigError, match=fix):
        launch(here, line)


def test_variables_travel_with_the_job(here: Path):
    done = launch(here, "--env SEED=7 --env HOME_OF_DATA --env EMPTY= train.py", HOME_OF_DATA="/d")
    assert done.spec.environment == {"SEED": "7", "HOME_OF_DATA": "/d", "EMPTY": ""}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        launch(here, "--env UNSET train.py")


def test_a_range_of_nodes_means_its_upper_end():
    assert node_count("4") == (4, [])
    nodes, (note,) = node_count("2:4")
    assert nodes == 4
    assert "4 nodes are used" in note


def test_gpu_counts_what_is_visible():
    assert ranks_per_node("gpu", {"CUDA_VISIBLE_DEVICES": "0,1,5"}) == 3
    assert ranks_per_node("auto", {"CUDA_VISIBLE_DEVICES": "2"}) == 1
    assert ranks_per_node("auto", {"CUDA_VISIBLE_DEVICES": ""}) >= 1
    with pytest.raises(ConfigError):
        ranks_per_node("gpu", {"CUDA_VISIBLE_DEVICES": ""})


def helps(top: argparse.ArgumentParser) -> Iterator[str]:
    """The help of a parser and of everything below it."""
    yield top.format_help()
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from helps(below)


def test_the_help_of_every_command_fits_a_screen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    texts = list(helps(parser()))
    assert len(texts) > 20
    wide = [line for text in texts for line in text.splitlines() if len(line) > 80]
    assert wide == []


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]):
    for command in ("run", "join", "status", "nodes", "watch", "logs", "stop", "explain"):
        with pytest.raises(SystemExit) as left:
            parser().parse_args([command, "--help"])
        assert left.value.code == 0
    assert "--spares" in capsys.readouterr().out


def test_a_joining_node_is_reached_where_it_reaches_the_orchestrator(here: Path):
    line = f"--orchestrator http://127.0.0.1:1 --token-file {here}/token --job j train.py"
    done = launch(here, line)
    assert done.node.address == "127.0.0.1"
    assert any("give --address IP" in note for note in done.notes)


def test_a_lost_orchestrator_is_waited_for_as_long_as_anybody_works():
    away = Away(60.0)
    assert away.missed(100.0, "nobody answers", working=True) == ("", False)
    told, _ = away.missed(106.0, "nobody answers", working=True)
    assert told == "nobody answers, for 6 s already; training goes on; trying again"
    assert away.missed(110.0, "nobody answers", working=True) == ("", False)
    assert away.missed(100_000.0, "nobody answers", working=True)[1] is False
    assert away.answered() == "the orchestrator answers again"
    assert away.answered() == ""
    # With nobody to lose, it is given up; and a worker that appears starts the time anew.
    assert away.missed(200.0, "nobody answers", working=False)[1] is False
    assert away.missed(250.0, "nobody answers", working=True)[1] is False
    assert away.missed(259.0, "nobody answers", working=False)[1] is False
    assert away.missed(320.0, "nobody answers", working=False)[1] is True
