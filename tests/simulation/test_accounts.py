"""Journals of simulated clusters: every rank-second is in one class, every incident is counted."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.chaos import simulate
from keepstep.ledger import verify
from keepstep.ledger.account import account
from keepstep.model import Term
from keepstep.orchestrator import brain, facts
from keepstep.orchestrator.journal import CLUSTER, Entry, grow, json_lines
from keepstep.orchestrator.journal import Link as ChainLink
from keepstep.orchestrator.stepped import Stepped, Waiting, entry_of, jobs_touched, to_be_kept

SEEDS = 12


def entries_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Entry]]:
    """What the loop would have written, with the terms, while a seed is simulated."""
    written: list[tuple[int, Entry]] = []
    real = brain.step

    def step(cluster: Any, event: Any, now: float) -> brain.Decision:
        decision = real(cluster, event, now)
        # Who does not serve is replaying what is written already.
        if to_be_kept(decision) and simulation.serving:
            jobs = jobs_touched(event, decision)
            told = facts.of(decision.cluster, jobs, now)
            done = Stepped(Waiting(event), decision, jobs, told, now)
            written.append((decision.cluster.term, entry_of(done)))
        return decision

    with monkeypatch.context() as patched:
        simulation = simulate.Simulation(seed)
        patched.setattr(simulate.brain, "step", step)
        simulation.run()
    return written


def chains(written: list[tuple[int, Entry]]) -> dict[str, list[str]]:
    heads: dict[str, tuple[int, str]] = {}
    seq, lines = 0, dict[str, list[str]]()
    for term, entry in written:
        grown = grow(Term(term), seq, heads, [entry])
        seq, heads = grown.seq, {**heads, **grown.heads}
        for chain, (number, hash_) in grown.heads.items():
            if chain != CLUSTER:
                link = ChainLink(number, hash_, grown.entries[0][1])
                lines.setdefault(chain, []).extend(json_lines([link]))
    return lines


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_account_of_every_simulated_job_sums_up(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chains(entries_of(seed, monkeypatch))
    assert found
    for lines in found.values():
        chain = verify.read_chain(lines)
        verify.Told(chain)
        made = account(chain)
        assert sum(made.classes.values()) == made.total
        closed = [body for body in chain.bodies if "closed" in chain.facts(body)]
        assert len(made.incidents) >= len(closed)
