"""A leader's snapshots, written beside its loop.

    loop     … decide … text … decide … decide … decide … vouch … decide …
    store                 \\------- the text is brought -------/

The text of a large cluster is tens of megabytes, and a slow way to the store takes seconds for it:
nobody would decide meanwhile, and agents leave whoever gives them no pulse for 4 s. So the text is
brought by somebody else, and only the link that vouches for it is a write of the leader's. Until
then nobody believes the text: a leader that dies in between has written no snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from keepstep.errors import Transient
from keepstep.orchestrator.journal import Brought, Journal, Standing, write_snapshot
from keepstep.orchestrator.snapshots import Snapshots
from keepstep.orchestrator.state import Cluster

Log = Callable[..., None]


class SnapshotWriter:
    """One leader's: at most one snapshot is on its way."""

    def __init__(self, journal: Journal, entries: int, log: Log) -> None:
        self._journal, self._log = journal, log
        self.due = Snapshots(entries)
        self._on_its_way: Future[Brought] | None = None

    def write(self, cluster: Cluster, standing: Standing, now: float) -> Standing:
        """One, and wait for it: before anybody is led."""
        body = self.due.texts.body(cluster, now)
        grown = write_snapshot(self._journal, standing, body, standing.seq)
        self.due.wrote(standing.seq)
        self._log("journal.snapshot", seq=standing.seq)
        return grown

    def go_on(
        self, cluster: Cluster, standing: Standing, now: float, moment: float
    ) -> Standing | None:
        """Bring one if it is due; vouch for one that was brought: then the journal has grown.

        `cluster` is what all entries up to `standing` lead to.
        """
        try:
            if self._on_its_way is None:
                if not self.due.prepared(cluster, moment):
                    return None
                body = self.due.texts.body(cluster, now)
                self._on_its_way = self._journal.bring(standing.term, body, standing.seq)
                self.due.began()
            if not self._on_its_way.done():
                return None
            brought, self._on_its_way = self._on_its_way, None
            at_seq = brought.result().at_seq
            grown = self._journal.vouch(standing.term, standing.head, brought.result())
        except Transient as error:
            self.due.failed(moment)
            self._log("journal.snapshot_failed", why=str(error))
            return None
        self.due.wrote(at_seq, self.due.grown_since_it_began)
        self._log("journal.snapshot", seq=at_seq)
        return grown
