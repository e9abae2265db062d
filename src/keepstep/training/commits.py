"""What is committed, as one rank knows it: the step log's lines and the callbacks of `on_commit`.

Steps can be committed here by a collective of this rank's own, or elsewhere: state that comes from
a neighbour brings the neighbour's commits with it. A survivor that lagged behind by a step did not
hear of that one, and must; a joiner has no business with steps from before its time.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.page import Page
from keepstep.training.steplog import StepLog


class Commits:
    """One per protected process."""

    def __init__(self, page: Page, log: StepLog, *, joining: bool) -> None:
        self.newest = -1
        self.callbacks: list[Callable[[int], None]] = []
        self._page, self._log = page, log
        self._told: int | None = None if joining else -1
        """The last step that the callbacks were told of."""

    def here(self, step: int) -> None:
        """All steps up to this one are committed. Safe to repeat."""
        if step > self.newest:
            self.newest = step
            self._page.set_committed(step)
        # Also if it is not new: a neighbour may have told of a step whose line nobody wrote.
        self._log.commit(step, self._page.head())
        first = 0 if self._told is None else self._told + 1
        self._told = max(step, first - 1)
        for number in range(first, step + 1):
            for callback in self.callbacks:
                callback(number)

    def elsewhere(self, step: int) -> None:
        """So far they were where the state came from; who was there before is told later on."""
        self.newest = step
        if self._told is None:
            self._told = step

    def start_after(self, step: int) -> None:
        """A checkpoint was loaded: its steps were told of by those who made them."""
        self.newest = self._told = step
