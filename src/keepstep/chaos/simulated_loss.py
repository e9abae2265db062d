"""The simulator with a journal that loses its end: a replica was promoted, or a backup restored.

    python -m keepstep.chaos.simulated_loss --seeds 300

As simulate.py, with one job. At some crashes of the orchestrator the next leader finds only a part
of what was written: agents have obeyed orders that it knows nothing of. They are believed (see
orchestrator/reconcile.py), and the same invariants hold: no committed step is lost without a word,
nobody is killed who holds the last whole state, no job is started a second time, and it ends as it
should, or says which rank was found nowhere.
"""

from __future__ import annotations

import argparse
from collections import Counter

from keepstep.chaos.simulate import Result, Simulation, told
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import Term
from keepstep.orchestrator import events, reconcile
from keepstep.wire import Hello

LOSS_CHANCE = 0.7
"""That a new leader finds less than there was."""
LOST_ENTRIES_MAX = 60
CRASHES_MAX = 3


class Loss(Simulation):
    """One seed."""

    def __init__(self, seed: int) -> None:
        # Every third one has jobs that compete: not those.
        super().__init__(seed // 2 * 3 + seed % 2, planned_moves=False)
        self.seed = seed
        self.lost: list[int] = []
        """Entries that were lost, at each loss."""
        self.gaps = 0
        """Times that an agent proved it."""
        self._placed_seq = -1
        """A job that nobody has heard of would have to be submitted again: not before this."""

    def run(self) -> Result:
        for _ in range(self.random.randint(1, CRASHES_MAX)):
            self.later(self.random.uniform(2.0, 20.0), self._crash)
        return super().run()

    def _crash(self) -> None:
        if self.serving and not self._over():
            self.faults.append("orchestrator crash")
            self.crash_orchestrator()

    def _rewind(self) -> bool:
        """Nobody wants that: an operator's word that is forgotten has to be said again."""
        return False

    def _step(self, event: events.Event) -> None:
        super()._step(event)
        if self._placed_seq < 0 and any(job.roster for job in self.cluster.jobs.values()):
            self._placed_seq = self.seq

    def restart_orchestrator(self) -> None:
        written = len(self.journal)
        first = max(self._placed_seq - self.snapshot_seq, written - LOST_ENTRIES_MAX, 0)
        if self._placed_seq < 0 or first >= written or self.random.random() > LOSS_CHANCE:
            super().restart_orchestrator()
            return
        kept = self.random.randint(first, written - 1)
        self.lost.append(written - kept)
        self.story.append(f"{self._now:9.3f} FAULT     the journal loses {written - kept} entries")
        found = self.replayed(kept)
        self.journal = self.journal[:kept]
        self._referee.forget(found)
        self.lead(found)

    def _gap(self, hello: Hello) -> events.JournalBehind | None:
        gap = reconcile.gap(self.cluster, Term(self.term), self.seq, hello)
        if gap is not None and not self.lost:
            raise Violation(f"the journal is whole, and yet: {gap}")
        self.gaps += gap is not None
        return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    lost: list[int] = []
    gaps = 0
    for seed in range(options.first, options.first + options.seeds):
        simulation = Loss(seed)
        ends[told(simulation).outcome] += 1
        lost += simulation.lost
        gaps += simulation.gaps
    print("jobs:      " + ", ".join(f"{n} {end}" for end, n in sorted(ends.items())))
    print(f"losses:    {len(lost)}, of {sum(lost)} entries, proved by agents {gaps} times")
    print(f"{options.seeds} seeds, all invariants held")


if __name__ == "__main__":
    main()
