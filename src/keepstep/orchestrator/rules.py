"""By which rules the brain decides: those of the leader whose term it is. Pure.

A journal keeps what happened, and the decisions are made again by whoever reads it: by a follower
of the next release while the old one still leads, and by a new leader over entries of a term before
its own. They must come to the same state. So a rule that is changed has a number, a term begins
with the number of its leader's newest rules, and what came before is decided as it was then.

    0   of before there were numbers
    1   a job in doubt keeps room, a turn or its lender from nobody, and what it has is not given
        away either: it may be a living rank; of a job whose other ranks have finished, one that is
        stopped counts as standing still, and those who had finished count as through; nobody is
        parked for a lender that has to wait for agents which may know of it, nor killed for the
        sake of its unit before those who stay have said that they hold all state; and who comes
        back in the middle of a phase gets its time

A release that raises NEWEST raises events.VERSION, too: no earlier one follows what it does not
know.
"""

from __future__ import annotations

from keepstep.orchestrator.state import Cluster, Job

NEWEST = 1


def doubts_stand_aside(cluster: Cluster) -> bool:
    return cluster.rules >= 1


def last_ones_count(cluster: Cluster) -> bool:
    return cluster.rules >= 1


def lenders_are_sure(cluster: Cluster) -> bool:
    return cluster.rules >= 1


def asks_before_killing(cluster: Cluster) -> bool:
    return cluster.rules >= 1


def waits_for_returned(cluster: Cluster) -> bool:
    return cluster.rules >= 1


def aside(cluster: Cluster, job: Job) -> bool:
    """A job in doubt. It stands where it stands, which may be for ever: it neither takes nor keeps
    anything from others, and nothing is taken from it."""
    return job.unsure is not None and doubts_stand_aside(cluster)
