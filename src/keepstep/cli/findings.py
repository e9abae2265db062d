"""What facts about a cluster mean for whoever runs it: ok, warn or fail, and the fix. Pure.

`keepstep admin doctor` gathers the facts (cli/doctor.py) and shows what is found here. A warning is
something that will hurt soon, or at the next fault; a failure hurts now. Clocks are compared for
people: Keepstep itself never subtracts two machines' clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from keepstep import wire

Plain = Mapping[str, Any]

DAY = 24 * 3600.0
GIB = 1024**3
CERTIFICATE_SECONDS_MIN = 14 * DAY
"""Renewals run weeks ahead: with less left than this, one has failed."""
CLOCK_SECONDS_MAX = 5.0
"""Further apart, log lines of two machines are hard to read beside each other."""
FILES_SPARE = 256
"""Beside one per node: operators, the journal, logs."""
FREE_BYTES_MIN = GIB
FREE_BYTES_LEAST = GIB // 10
SNAPSHOT_ENTRIES_MAX = 20_000
"""A restart replays what came after the newest snapshot: at this many it takes seconds."""
NAMES_MAX = 5


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    level: Level
    about: str
    says: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Reached:
    """One orchestrator's endpoint, and what it answered."""

    url: str
    problem: str = ""
    """Why there was no answer; empty: there was one."""
    status: str = ""
    ready: bool = False
    leader: str = ""
    """Who leads, by its word: of one that leads the address that it advertises. Empty on a file."""
    term: int = 0
    """In which it leads, or that it follows."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """One that was looked at: a file, or what is shown by who serves."""

    path: str
    expires_at: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was looked at. What could not be asked is None."""

    now: float
    """Of this machine's clock."""
    release: str
    """Of this command."""
    endpoints: tuple[Reached, ...] = ()
    refused: str = ""
    """What the orchestrator said to our token, if it did not like it."""
    silent: str = ""
    """Why the one that leads did not say how things are, if it did not."""
    token_mode: int | None = None
    """The permissions of the token's file."""
    certificates: tuple[Certificate, ...] = ()
    picture: Plain | None = None
    own: Plain | None = None
    asked_seconds: float = 0.0
    """How long the orchestrator took to say its clock: the difference is known no better."""
    ports: Mapping[str, str] = field(default_factory=dict)
    """By "n1 peer 10.0.0.1:4001": why it could not be reached; empty: it could."""
    ports_left_out: int = 0


def judge(facts: Facts) -> tuple[Finding, ...]:
    """Everything that is to be said, in the order in which an operator would look."""
    return tuple(
        finding
        for about in (
            _endpoints(facts),
            _token(facts),
            _certificates(facts),
            _clocks(facts),
            _versions(facts),
            _floods(facts),
            _journal(facts),
            _files(facts),
            _nodes(facts),
            _ports(facts),
            _jobs(facts),
        )
        for finding in about
    )


def worst(findings: tuple[Finding, ...]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


# ---------------------------------------------------------------- the control plane


def _endpoints(facts: Facts) -> Iterator[Finding]:
    for reached in facts.endpoints:
        if reached.problem:
            yield Finding(
                Level.FAIL,
                "orchestrator",
                f"{reached.url} does not answer: {reached.problem}",
                "start it (workers train on without it), or check the address and the firewall",
            )
        elif reached.status == "leading" and not reached.ready:
            yield Finding(
                Level.FAIL,
                "orchestrator",
                f"{reached.url} leads, but its journal is away: nothing is decided",
                "see to the database or the disk; what waits is written when it is back",
            )
        else:
            yield Finding(Level.OK, "orchestrator", f"{reached.url}: {reached.status}")
    if facts.silent:
        yield Finding(
            Level.FAIL,
            "orchestrator",
            f"it leads, but did not say how things are: {facts.silent}",
            "ask again; if it stays so, look for loop.late in its log: its machine is too busy",
        )
    yield from _two_leaders([each for each in facts.endpoints if each.status == "leading"])
    answered = [reached for reached in facts.endpoints if not reached.problem]
    # One that is named and does not answer here has had its line.
    mute = {reached.url for reached in facts.endpoints if reached.problem}
    led = any(reached.status == "leading" or reached.leader in mute for reached in answered)
    if answered and not led:
        yield Finding(
            Level.FAIL,
            "orchestrator",
            "nobody leads: jobs train on, but a fault waits until somebody does",
            "wait for one lease; then see the orchestrators' logs",
        )


def _two_leaders(leading: Sequence[Reached]) -> Iterator[Finding]:
    if len(leading) < 2:
        return
    told = ", ".join(f"{each.url} in term {each.term}" for each in leading)
    if len({(each.leader, each.term) for each in leading}) == 1:
        # Two ways to one, as through a load balancer, say the same of themselves.
        if not leading[0].leader:
            yield Finding(
                Level.WARN,
                "orchestrator",
                f"{len(leading)} say that they lead, perhaps all one process: {told}",
                "give one address of each process; if these are two, they have journals of their "
                "own: end all but the one that your jobs are on",
            )
        return
    newest = max(leading, key=lambda each: each.term)
    yield Finding(
        Level.FAIL,
        "orchestrator",
        f"{len(leading)} say that they lead: {told}",
        "ask again in a few seconds: who was deposed finds out; if it stays so, they have journals "
        f"of their own: end all but the one that your jobs are on ({newest.url}?)",
    )


def _token(facts: Facts) -> Iterator[Finding]:
    if facts.refused:
        fix = "give a viewer's without a project with --token-file, or $KEEPSTEP_TOKEN_FILE"
        yield Finding(Level.FAIL, "token", f"refused: {facts.refused}", fix)
    if facts.token_mode is None:
        return
    if facts.token_mode & 0o077:
        yield Finding(
            Level.WARN,
            "token",
            f"others on this machine may read its file (mode {facts.token_mode & 0o777:o})",
            "chmod 600 the token file",
        )
    else:
        yield Finding(Level.OK, "token", "its file is its owner's alone")


def _certificates(facts: Facts) -> Iterator[Finding]:
    if not facts.certificates:
        says = "none was looked at: no https:// endpoint, no $KEEPSTEP_TLS_DIRECTORY"
        yield Finding(Level.OK, "certificate", says, "give --certificates DIR to look at files")
    for certificate in facts.certificates:
        left = certificate.expires_at - facts.now
        renew = "renew it; Keepstep takes the new file without a restart"
        if certificate.problem:
            yield Finding(
                Level.FAIL, "certificate", f"{certificate.path}: {certificate.problem}", renew
            )
        elif left <= 0:
            says = f"{certificate.path} has expired {-left / DAY:.1f} days ago"
            yield Finding(Level.FAIL, "certificate", says, renew)
        else:
            level = Level.WARN if left < CERTIFICATE_SECONDS_MIN else Level.OK
            says = f"{certificate.path} expires in {left / DAY:.0f} days"
            yield Finding(level, "certificate", says, renew if level is Level.WARN else "")
    yield from _agents_certificates(facts)


def _agents_certificates(facts: Facts) -> Iterator[Finding]:
    """As they were shown when the agents connected: a running stream does not see a new one."""
    agents: Plain = (facts.picture or {}).get("agents", {})
    until = {
        node: float(about["certificate_until"])
        for node, about in agents.items()
        if "certificate_until" in about
    }
    if not until:
        return
    soon = sorted(
        (node for node in until if until[node] - facts.now < CERTIFICATE_SECONDS_MIN),
        key=lambda node: until[node],
    )
    left = (min(until.values()) - facts.now) / DAY
    if soon:
        verb = f"has ended {-left:.1f} days ago" if left <= 0 else f"ends in {left:.0f} days"
        says = f"{_some(soon)}: as shown when they connected; the first {verb}"
        fix = "see that their files are renewed; a new one is seen when its agent connects again"
        yield Finding(Level.WARN, "certificate", says, fix)
    else:
        says = f"of {len(until)} agents, as shown when they connected: {left:.0f} days or more"
        yield Finding(Level.OK, "certificate", says)


def _clocks(facts: Facts) -> Iterator[Finding]:
    if facts.own is None:
        return
    apart = abs(float(facts.own["clock"]) - facts.now)
    says = f"the orchestrator's differs by {apart:.1f} s (known to {facts.asked_seconds:.1f} s)"
    if apart - facts.asked_seconds > CLOCK_SECONDS_MAX:
        fix = "let NTP see to it; Keepstep does not use it, but people read times in logs"
        yield Finding(Level.WARN, "clock", says, fix)
    else:
        yield Finding(Level.OK, "clock", says)


def _versions(facts: Facts) -> Iterator[Finding]:
    if facts.own is not None:
        release = str(facts.own["release"])
        if release != facts.release:
            says = f"this command is {facts.release}, the orchestrator {release}"
            yield Finding(Level.WARN, "version", says, "install the same release here")
        else:
            yield Finding(Level.OK, "version", f"Keepstep {release} here and at the orchestrator")
    agents: Plain = (facts.picture or {}).get("agents", {})
    older = [node for node, about in agents.items() if about["wire"] < wire.VERSION]
    if older:
        yield Finding(
            Level.WARN,
            "version",
            f"{_some(older)}: their agents speak version {wire.VERSION - 1} of the wire",
            "upgrade them before the release after this one, which will not speak it",
        )
    for what in ("release", "torch"):
        found: dict[str, list[str]] = {}
        for node, about in agents.items():
            if about.get(what):
                found.setdefault(str(about[what]), []).append(node)
        if len(found) > 1:
            told = "; ".join(f"{name}: {_some(nodes)}" for name, nodes in sorted(found.items()))
            yield Finding(Level.WARN, "version", f"{what} differs: {told}", _SAME[what])
        elif found:
            says = f"{what} {next(iter(found))} on all {len(agents)} nodes"
            yield Finding(Level.OK, "version", says)


def _floods(facts: Facts) -> Iterator[Finding]:
    agents: Plain = (facts.picture or {}).get("agents", {})
    loud = [node for node, about in agents.items() if about.get("slowed")]
    if loud:
        says = f"{_some(loud)}: said so much that the orchestrator read them more slowly"
        fix = "see the agents' logs there: a worker that restarts in a loop, or not our agent"
        yield Finding(Level.WARN, "nodes", says, fix)


_SAME = {
    "release": "finish the upgrade, node by node",
    "torch": "install one torch on all nodes: a rank that moves must compute the same bits",
}


def _journal(facts: Facts) -> Iterator[Finding]:
    if facts.own is None:
        return
    journal: Plain = facts.own["journal"]
    silent, lease = float(journal["written_seconds_ago"]), float(journal["lease_seconds"])
    if journal["away"]:
        fix = "see to the database or the disk; docs/operating.md: the database is down"
        says = f"{journal['kind']}: cannot be written for {silent:.0f} s"
        yield Finding(Level.FAIL, "journal", says, fix)
    elif lease and silent > lease:
        says = f"the lease of {lease:g} s was not renewed for {silent:.0f} s: another may lead"
        yield Finding(Level.FAIL, "journal", says, "see the orchestrator's log: its loop is late")
    else:
        size = f", {journal['bytes'] / GIB:.2f} GiB" if journal["bytes"] is not None else ""
        leased = f", lease of {lease:g} s" if lease else ""
        says = f"{journal['kind']}, term {journal['term']}, {journal['seq']} entries{size}{leased}"
        yield Finding(Level.OK, "journal", says)
    behind = int(journal["seq"]) - int(journal["snapshot_seq"])
    if behind > SNAPSHOT_ENTRIES_MAX:
        says = f"{behind} entries since the last snapshot: a restart would replay them all"
        fix = "look for journal.snapshot_failed in the log; the disk or database may be slow"
        yield Finding(Level.WARN, "journal", says, fix)
    free = journal["free_bytes"]
    if free is not None:
        level = Level.WARN if free < FREE_BYTES_MIN else Level.OK
        level = Level.FAIL if free < FREE_BYTES_LEAST else level
        fix = "make room: a journal that cannot be written decides nothing"
        says = f"{free / GIB:.1f} GiB left beside the journal"
        yield Finding(level, "disk", says, fix if level is not Level.OK else "")


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.own is None or facts.picture is None:
        return
    limit, used = int(facts.own["files"]["limit"]), int(facts.own["files"]["open"])
    needed = max(used, len(facts.picture["nodes"])) + FILES_SPARE
    says = f"the orchestrator has {used} of {limit} open"
    if limit < needed:
        fix = f"raise its limit (ulimit -n, LimitNOFILE) to {2 * needed}: one stream per agent"
        yield Finding(Level.WARN, "files", says, fix)
    else:
        yield Finding(Level.OK, "files", says)


# ---------------------------------------------------------------- nodes and jobs


def _nodes(facts: Facts) -> Iterator[Finding]:
    if facts.picture is None:
        return
    nodes: Plain = facts.picture["nodes"]
    if frozen := facts.picture["frozen"]:
        says = f"frozen, nothing is decided: {frozen['why']}"
        yield Finding(Level.WARN, "cluster", says, "keepstep unfreeze, once the reason is gone")
    lost = [name for name, node in nodes.items() if not node["alive"] and not node["left"]]
    mute = [name for name, node in nodes.items() if node["alive"] and not node["linked"]]
    if lost:
        fix = "repair them; if they will not come back: keepstep forget NODE (or in a week, alone)"
        yield Finding(Level.WARN, "nodes", f"lost: {_some(lost)}", fix)
    if mute:
        fix = "start their agents again; their workers train on meanwhile"
        yield Finding(Level.WARN, "nodes", f"alive, but without an agent: {_some(mute)}", fix)
    if not lost and not mute:
        yield Finding(Level.OK, "nodes", f"all {len(nodes)} are there")


def _ports(facts: Facts) -> Iterator[Finding]:
    closed = {what: why for what, why in facts.ports.items() if why}
    if closed:
        told = "; ".join(f"{what}: {why}" for what, why in list(closed.items())[:NAMES_MAX])
        more = f"; and {len(closed) - NAMES_MAX} more" if len(closed) > NAMES_MAX else ""
        fix = "open these ports between all nodes: a joiner fetches private state there"
        yield Finding(Level.FAIL, "ports", f"not reached from here: {told}{more}", fix)
    elif facts.ports:
        left = f", {facts.ports_left_out} nodes not tried" if facts.ports_left_out else ""
        yield Finding(Level.OK, "ports", f"{len(facts.ports)} reached from here{left}")


def _jobs(facts: Facts) -> Iterator[Finding]:
    for name, job in (facts.picture or {"jobs": {}})["jobs"].items():
        if not job["over"]:
            yield from _job(str(name), job)


def _job(name: str, job: Plain) -> Iterator[Finding]:
    about, spares = f"job {name}", job["spares"]
    if job["state"] in ("held", "waiting", "parked"):
        fix = f"keepstep status; {job['remedies'][0]}" if job["remedies"] else "keepstep status"
        yield Finding(Level.WARN, about, f"{job['state']}: {job['detail'] or 'no room'}", fix)
    if job["mode"] == "observe":
        yield Finding(Level.OK, about, "only observed: faults are not acted upon")
    elif not spares["wanted"]:
        says = "keeps no spare warm: after a fault it waits for a free slot, if there is one"
        yield Finding(Level.WARN, about, says, "run it with --spares 1 or more")
    elif spares["ready"] < spares["wanted"]:
        says = f"{spares['ready']} of {spares['wanted']} spares are ready"
        fix = "add a node (keepstep join), or undrain or untaint one; a new one warms up by itself"
        yield Finding(Level.WARN, about, says, fix)
    else:
        yield Finding(Level.OK, about, f"{spares['ready']} spares are ready")
    if job["uncovered"]:
        says = f"{len(job['uncovered'])} portions of its state have one home: {job['uncovered'][0]}"
        yield Finding(Level.WARN, about, says, "give it another node; see docs/concepts.md, covers")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
