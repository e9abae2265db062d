"""Small campaigns against the real thing: real processes, real faults, compared bit for bit.

The large ones are `keepstep lab chaos` itself; these keep the campaign honest: it passes when all
is well, and it fails when one protection is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


def lab(*arguments, seconds):
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done


def namespaces():
    return {path.name for path in Path("/run/netns").glob("keepstep-*")}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root and network namespaces")
@pytest.mark.timeout(900)
def test_a_job_under_faults_ends_bit_exact_and_leaves_nothing_behind(tmp_path):
    before = namespaces()
    out = tmp_path / "result.json"
    kinds = "sigkill,silent_node,two_ranks"
    done = lab(
        *("lab", "chaos", "--faults", "3", "--seed", "11", "--kinds", kinds),
        *("--out", str(out), "--run-dir", str(tmp_path / "run")),
        seconds=850,
    )
    assert done.returncode == 0
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("3 faults, 3 as expected, ")
    assert "bit-exact yes, 0 committed steps lost" in last
    result = json.loads(out.read_text())
    assert {fault["kind"] for fault in result["faults"]} == set(kinds.split(","))
    assert result["plan"]["seed"] == 11
    assert result["verdict"]["account"]["problem"] == ""
    assert namespaces() <= before
    _is_accounted_for(tmp_path / "run")


def _is_accounted_for(run):
    """What the customer does with it: the signed export against the job's own step log."""
    export, steps = run / "export.jsonl", run / "state" / "steps.jsonl"
    key = lab("admin", "keys", "--run-dir", str(run), seconds=60).stdout.strip()
    lab("admin", "export", "--run-dir", str(run), "--out", str(export), seconds=60)
    alone = [sys.executable, "-I", str(ROOT / "src/keepstep/ledger/verify.py")]
    checked = subprocess.run(
        [*alone, str(export), str(steps), "--key", key, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = json.loads(checked.stdout)
    assert found["good"], found
    assert found["heads"] >= 3
    incidents = [each for each in found["incidents"] if each["incident"].startswith("i")]
    assert "resolved" in {each["standing"] for each in incidents} <= {"resolved", "joined"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("protection", "kinds", "faults"), [("rng", "sigkill", 2), ("buffers", "rank0", 3)]
)
def test_a_campaign_notices_a_protection_that_is_off(tmp_path, protection, kinds, faults):
    done = lab(
        *("lab", "chaos", "--faults", str(faults), "--seed", "5", "--kinds", kinds),
        *("--sabotage", protection, "--run-dir", str(tmp_path / "run")),
        seconds=550,
    )
    assert done.returncode == 1
    # A campaign that broke down for another reason proves nothing: it must have compared.
    assert "compared with it after" in done.stdout
    assert "differs" in done.stdout
    assert "bit-exact no" in done.stdout.strip().splitlines()[-1]


def test_a_plan_without_sense_is_refused_before_anything_starts():
    done = lab("lab", "chaos", "--world", "5", "--nodes", "4", seconds=60)
    assert done.returncode == 2
    assert "--world" in done.stderr
