"""The gate of the HTTP interface: who asks, may they, not too often, and what do they get to see.

A token without a project sees everything. One with a project sees its own project's jobs, and of
what all share only what its jobs use: nodes without their other users, loans without the other
side, decisions about its own jobs. A sentence that names another project's job is withheld whole.
Nothing here decides anything about jobs; deciders never learn who may see what.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from keepstep import codec, tls
from keepstep.errors import Permanent, Transient
from keepstep.model import JobId, NodeId
from keepstep.orchestrator import remedies, words
from keepstep.orchestrator.brain import Decision
from keepstep.orchestrator.http import BadRequest, Request, error_response
from keepstep.orchestrator.journal import Link
from keepstep.orchestrator.routes import Route
from keepstep.orchestrator.state import Cluster, Job, NodeState, natural
from keepstep.orchestrator.tokens import CLUSTER, MAY, Caller, Role, Tokens

ANOTHER = "another project's"
WITHHELD = "(withheld: it names another project's job)"
_WITHHELD_BODY = codec.dumps({"withheld": WITHHELD}).decode()
_WORD = re.compile(r"[A-Za-z0-9._-]+")
"""What a job's name may be, among other text."""
_VOCABULARY = frozenset(
    {"kind", "sign", "phase", "state", "severity", "outcome", "node", "source", "by"}
)
"""Fields whose single words are ours, the operators' or, in `by`, a token's name: a job that is
called like one of them hides nothing of others' journals."""
EVENTS, EXPORT = "text/event-stream", "application/jsonl"
"""Answers that last: what their routes say of them."""
EXPORTS_MAX = 64
"""At once: each reads pages of the journal on the loop that decides."""
STREAMS_PART = 4
"""One caller has this part of all streams of a kind at most: others want to listen too."""
WAITING_MAX = 1024
"""Requests that may wait for a decision at once. While the journal is away, whatever is asked for
waits; it must not take all connections from those who ask whether we are well."""
WAITING_KEPT = 256
"""Of these for the cluster's own token, and as many more for those without a project: projects'
launchers keep nobody from stopping a job who runs the cluster."""
COST_SHARE_MAX = 0.25
"""Of the loop's time, what one caller's questions may take."""
COST_SECONDS_FULL = 4.0
"""So much of it at once: in the largest clusters a picture takes nearly a second, and somebody who
looks around asks for several."""
COST_SECONDS_LEFT = 2.0
"""What lasts waits while there is less: who exports or listens can still ask."""
PART_SECONDS = 0.0001
"""What it takes to send one part of a stream of events, besides making it: a task that wakes, and
a write to a socket, which mostly is a secured one."""
PAUSE_SECONDS_MAX = 5.0
"""A stream that waits for longer would be taken for a dead one."""
AGAIN_SECONDS = 1.0
"""Between two looks at whether a listener's token is still good."""
UNKNOWN = error_response(
    401, "no token, or a wrong one", "send Authorization: Bearer <the cluster's token>"
)
CALLERS_MAX = 4096
"""Callers whose rates are remembered; the ones that have been quiet longest are forgotten."""


class Gate:
    """Lets requests in, or says why not."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        requests_per_second_max: float = 2000.0,
        event_streams_max: int = 4096,
        exports_max: int = EXPORTS_MAX,
        problem: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._tokens = tokens
        self._rates = Rates(requests_per_second_max, 2 * requests_per_second_max)
        self._costs = Rates(COST_SHARE_MAX, COST_SECONDS_FULL)
        self._problem = problem
        self.streams = {EVENTS: Places(event_streams_max), EXPORT: Places(exports_max)}
        self.waiting = Places(WAITING_MAX, WAITING_KEPT)
        self._exporting = asyncio.Lock()

    async def counted(
        self, told: AsyncIterator[bytes], kind: str, request: Request, caller: Caller
    ) -> AsyncIterator[bytes]:
        """A stream of events or an export, which counts for as long as somebody listens, and ends
        with the token that it was asked with."""
        looked_at = time.monotonic()
        with self.streams[kind].taken(caller):
            async for part in self._in_turn(told, caller) if kind == EXPORT else told:
                if time.monotonic() >= looked_at + AGAIN_SECONDS:
                    looked_at = time.monotonic()
                    if self.caller(request) != caller:
                        if kind == EXPORT:  # Half of one must not look whole.
                            raise Permanent("the token of an export was taken back")
                        return
                yield part
                self.charge(caller, PART_SECONDS)
                # What comes meanwhile is sent together.
                if pause := self._costs.seconds_until(
                    caller.token, COST_SECONDS_LEFT, time.monotonic()
                ):
                    await asyncio.sleep(min(pause, PAUSE_SECONDS_MAX))

    async def _in_turn(self, told: AsyncIterator[bytes], caller: Caller) -> AsyncIterator[bytes]:
        """An export's parts. One of one export is made at a time, however many are under way:
        between two of them the loop does everything else. Making one must not wait."""
        while True:
            async with self._exporting:
                began = time.thread_time()
                part = await anext(told, b"")
                self.charge(caller, time.thread_time() - began)
                await asyncio.sleep(0)  # The others' come in later turns of the loop.
            if not part:
                return
            yield part

    def caller(self, request: Request) -> Caller | None:
        """Whose token the request carries; None: nobody's."""
        if why := self._tokens.refresh(time.monotonic()):
            self._problem(why)
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        found = self._tokens.caller(text.strip(), time.time())
        operator = tls.operator_of(request.certificate)
        if found is None or not operator or operator == found.name:
            return found
        # Both are in the record: whose token it was, and who used it.
        return replace(found, name=f"{found.name}/{operator}")

    def check(self, route: Route, caller: Caller) -> None:
        """Raises BadRequest if this caller may not have this route, or not now."""
        lasting = self.streams.get(route.answer)
        if lasting is not None and lasting.full(caller):
            what = "clients follow the events" if route.answer == EVENTS else "exports at once"
            raise BadRequest(429, f"too many {what}", "close some, or wait")
        if why := refusal(route, caller):
            raise BadRequest(403, why, "ask with a token of another role; see docs/security.md")
        if not self._rates.allow(caller.name, time.monotonic()):
            raise BadRequest(429, f"too many requests of {caller.name}", "wait", passes=True)

    def afford(self, caller: Caller) -> None:
        """Raises BadRequest if this caller's questions have cost too much lately. What changes
        something is not asked about: to stop a job is never refused for having looked at it."""
        if self._costs.used_up(caller.token, time.monotonic()):
            why = f"the answers to {caller.name} cost too much"
            raise BadRequest(429, why, "ask less often", passes=True)

    def waits(self, caller: Caller) -> AbstractContextManager[None]:
        """For as long as a request waits for its decision. Raises BadRequest if too many do."""
        if self.waiting.full(caller):
            fix = "wait, and ask /readyz whether the journal is there"
            raise BadRequest(429, "too many requests wait for a decision", fix, passes=True)
        return self.waiting.taken(caller)

    @contextmanager
    def charged(self, caller: Caller) -> Iterator[None]:
        """For what does not wait."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.charge(caller, time.thread_time() - began)

    def charge(self, caller: Caller, seconds: float) -> None:
        """An answer took so much of the loop's time."""
        # Whoever has the cluster's own token runs it, and all the launchers may have that one.
        if caller.token not in (CLUSTER, ""):
            self._costs.charge(caller.token, seconds, time.monotonic())


class Places:
    """How many of one kind there are, such as open streams: in all, and of each caller."""

    def __init__(self, most: int, kept: int = 0) -> None:
        self._most, self._kept = most, kept
        self.open: Counter[str] = Counter()
        self._by_kind: Counter[int] = Counter()

    def full(self, caller: Caller) -> bool:
        if self.open.total() >= self._most:
            return True
        # Some are kept from this kind of callers, together with those who run less.
        they = sum(self._by_kind[kind] for kind in range(_kind(caller), 3))
        if they >= self._most - _kind(caller) * self._kept:
            return True
        # As above: one name, and many launchers.
        part = -(-self._most // STREAMS_PART)
        return caller.token != CLUSTER and self.open[caller.token] >= part

    @contextmanager
    def taken(self, caller: Caller) -> Iterator[None]:
        """One more, for as long as this lasts."""
        if self.full(caller):
            # Many were let in at the same instant, before the first of them was counted.
            raise Transient("too many streams at once", AGAIN_SECONDS)
        self.open[caller.token] += 1
        self._by_kind[_kind(caller)] += 1
        try:
            yield
        finally:
            self._by_kind[_kind(caller)] -= 1
            self.open[caller.token] -= 1
            self.open += Counter()  # Without those that have none left.


def _kind(caller: Caller) -> int:
    """0: the cluster's own token, 1: another that runs the cluster, 2: a project's."""
    return 0 if caller.token == CLUSTER else 1 if not caller.project else 2


def refusal(route: Route, caller: Caller) -> str:
    """Why a caller may not have a route; empty if it may."""
    if Role(route.role) not in MAY[caller.role]:
        return f"{caller.name} is {caller.role}; this needs {route.role}"
    if route.shared and caller.project:
        return f"{caller.name} is of project {caller.project}, and this touches what all share"
    return ""


class Rates:
    """A bucket per caller, that fills at the rate up to the full one."""

    def __init__(self, per_second: float, full: float) -> None:
        self._per_second, self._full = per_second, full
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, caller: str, now: float) -> bool:
        left = self._filled(caller, now)
        allowed = left >= 1
        self._keep(caller, left - 1 if allowed else left, now)
        return allowed

    def charge(self, caller: str, much: float, now: float) -> None:
        """Take so much. There may be less: what something costs is known only afterwards."""
        self._keep(caller, self._filled(caller, now) - much, now)

    def used_up(self, caller: str, now: float) -> bool:
        left = self._filled(caller, now)
        self._keep(caller, left, now)
        return left <= 0

    def seconds_until(self, caller: str, left: float, now: float) -> float:
        """How long it takes until there is so much."""
        if caller not in self._left:
            return 0.0
        filled = self._filled(caller, now)
        self._keep(caller, filled, now)
        return max(0.0, left - filled) / self._per_second

    def _filled(self, caller: str, now: float) -> float:
        left, at = self._left.pop(caller, (self._full, now))
        return min(self._full, left + (now - at) * self._per_second)

    def _keep(self, caller: str, left: float, now: float) -> None:
        self._left[caller] = (left, now)
        if len(self._left) > CALLERS_MAX:
            self._left.popitem(last=False)


# ---------------------------------------------------------------- what a caller sees


def told_to(caller: Caller, error: Exception) -> str:
    """What a driver says of a database (its host, a user) is for those who run the cluster."""
    return "this cannot be answered now" if caller.project else str(error)


class Projects(Protocol):
    """Whose the names of jobs are."""

    def get(self, name: str, /) -> str | None: ...


class Sight:
    """The cluster through the eyes of one project; without a project, as it is."""

    def __init__(self, project: str, projects: Projects, nodes: Container[str] = ()) -> None:
        """`projects`: of the jobs that there are, and of those that there were."""
        self.project, self.all = project, not project
        self._projects, self._nodes = projects, nodes

    def job(self, name: str) -> bool:
        return self.all or self._projects.get(name) == self.project

    def places(self, cluster: Cluster) -> Collection[NodeId]:
        """The nodes that have something of ours; without a project, all."""
        if self.all:
            return cluster.nodes
        return frozenset(node.node for node in cluster.nodes.values() if self.at(node))

    def at(self, node: NodeState) -> bool:
        """Whether there is something of ours."""
        return self.all or any(self.job(user.job) for user in node.uses.values())

    def known_node(self, cluster: Cluster, name: str) -> NodeState:
        """What is not ours is not there: BadRequest, with some that are."""
        node = cluster.nodes.get(NodeId(name))
        if node is None or not self.at(node):
            some = ", ".join(sorted(self.places(cluster), key=natural)[:8])
            raise BadRequest(404, f"no node is called {name[:80]}", f"there are: {some or 'none'}")
        return node

    def known_job(self, cluster: Cluster, name: str) -> Job:
        job = cluster.jobs.get(JobId(name))
        if job is None or not self.job(name):
            some = ", ".join(sorted(known for known in cluster.jobs if self.job(known))[:8])
            raise BadRequest(404, f"no job is called {name[:80]}", f"there are: {some or 'none'}")
        return job

    def told(self, decision: Decision) -> list[str]:
        """What a decision says of our jobs, and of none in particular."""
        notes = [n.why for n in decision.notes if not n.job or self.job(n.job)]
        said = notes if decision.notes else [decision.why]
        return [str(self.cleaned(why)) for why in said]

    def picture(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """A whole cluster's."""
        if self.all:
            return dict(plain)
        jobs = {name: self.cleaned(job) for name, job in plain["jobs"].items() if self.job(name)}
        nodes = {name: self.node(node) for name, node in plain["nodes"].items()}
        seen = {name: node for name, node in nodes.items() if node is not None}
        places = {f"{name}/{use['slot']}" for name, node in seen.items() for use in node["uses"]}
        shown: dict[str, Any] = {
            **plain,
            "jobs": jobs,
            "nodes": seen,
            "incidents": [self.cleaned(i) for i in plain["incidents"] if self.job(i["job"])],
            "taints": [
                self.cleaned(taint)
                for taint in plain["taints"]
                if taint["place"] in seen or taint["place"] in places
            ],
            "loans": [loan for loan in map(self._loan, plain["loans"]) if loan is not None],
            "frozen": self.cleaned(plain["frozen"]),
            "paces": {name: pace for name, pace in plain["paces"].items() if self.job(name)},
            "self_doubt": self.cleaned(plain["self_doubt"]),
            "control_plane": {
                **plain["control_plane"],
                "gaps": [gap for gap in plain["control_plane"]["gaps"] if gap["node"] in seen],
            },
            "connected": [name for name in plain["connected"] if name in seen],
            "agents": {name: agent for name, agent in plain["agents"].items() if name in seen},
            "pulses": [
                {**pulse, "jobs": [p for p in pulse["jobs"] if self.job(p["job"])]}
                for pulse in plain["pulses"]
                if pulse["node"] in seen
            ],
        }
        return shown

    def node(self, plain: Mapping[str, Any]) -> dict[str, Any] | None:
        """One node with what is ours on it; None if nothing is."""
        if self.all:
            return dict(plain)
        uses = [use for use in plain["uses"] if use["job"] is not None and self.job(use["job"])]
        if not uses:
            return None
        # How full it is besides, and how often it failed under others, is theirs to know.
        hidden = {"free": 0, "empty": False, "faults": 0, "fault_at": None}
        return {**self.cleaned(plain), "uses": self.cleaned(uses), **hidden}

    def record(self, plain: Mapping[str, Any]) -> dict[str, Any] | None:
        """One decision, as /v1/events tells it; None if it is not about our jobs."""
        if self.all:
            return dict(plain)
        jobs = [job for job in plain["jobs"] if self.job(job)]
        if not jobs:
            return None
        shown: dict[str, Any] = self.cleaned(
            {**plain, "notes": [note for note in plain["notes"] if self.job(note["job"])]}
        )
        shown["phases"] = {job: at for job, at in plain["phases"].items() if self.job(job)}
        if len(jobs) < len(plain["jobs"]):
            shown |= {"jobs": jobs, "orders": [], "by": "", "node": None, "why": WITHHELD}
        return shown

    def cleaned(self, plain: Any) -> Any:
        """Without what names another project's job: a sentence that does is withheld."""
        if self.all:
            return plain
        if isinstance(plain, str):
            # Words by themselves are kinds, states and places; names of jobs are left out by key.
            shown = remedies.told_to_owners(plain)
            return WITHHELD if " " in plain and self._names(shown) else shown
        if isinstance(plain, Mapping):
            inner = {key: self.cleaned(value) for key, value in plain.items()}
            if inner.get("loan"):
                inner["loan"] = self._loan(inner["loan"])
            if inner.get("remedies"):
                # The others tell which nodes there are, and how full: not theirs to know.
                inner["remedies"] = remedies.of_owners(inner["remedies"])
            return inner
        if isinstance(plain, list | tuple):
            return [self.cleaned(item) for item in plain]
        return plain

    def links(self, job: str, links: Iterable[Link], project: str) -> Iterator[Link]:
        """A job's chain for its owner. A link that tells of others keeps its place and its hash."""
        owned = self.all
        for link in links:
            if not self.all:
                entry = codec.loads(link.body)["entry"]
                event = entry["event"]
                if event["kind"] == "Submitted" and event["body"]["spec"]["job"] == job:
                    # A name may have been somebody else's job before.
                    owned = event["body"]["spec"].get("project", "") == project
                if not owned or self._tells_by_kind(job, entry):
                    link = Link(link.number, link.hash, _WITHHELD_BODY)
            yield link

    def _tells_by_kind(self, job: str, entry: Mapping[str, Any]) -> bool:
        named = entry["event"]["body"]
        facts = (*named.get("workers", ()), *named.get("standbys", ()))
        about = [named.get("job"), named.get("spec", {}).get("job"), *(f["job"] for f in facts)]
        told = (*named.get("obeyed", ()), *named.get("belongs", ()), *named.get("keeps", ()))
        keys = (*told, *entry.get("jobs", ()))
        if any(name not in (None, job) for name in about) or not all(map(self.job, keys)):
            return True
        if entry["event"]["kind"] == "Submitted":
            # What an owner wrote into its own job's paths and variables is its own.
            entry = {**entry, "event": {}}
        return self._anywhere(entry)

    def _anywhere(self, plain: Any, field: str = "") -> bool:
        """Keys are words of ours: where they are names of jobs, they were looked at above."""
        if isinstance(plain, Mapping):
            return any(self._anywhere(value, key) for key, value in plain.items())
        if isinstance(plain, list | tuple):
            return any(self._anywhere(item, field) for item in plain)
        if not isinstance(plain, str) or (field in _VOCABULARY and " " not in plain):
            return False
        return self._names(plain)

    def _names(self, text: str) -> bool:
        """Whether another project's job is among the words. What ends a sentence, or a part of
        one, may be the end of a name as well."""
        for found in _WORD.findall(text):
            word = found.lstrip(".-")
            while word:
                if self._projects.get(word) not in (None, self.project) and self._tells(word):
                    return True
                if word[-1] not in ".-":
                    break
                word = word[:-1]
        return False

    def _tells(self, name: str) -> bool:
        """Whether it is this name that is meant where a sentence has the word: else whoever calls a
        job like a node, or like a word of ours, would have others' sentences withheld."""
        return name not in self._nodes and not words.ours(name)

    def _loan(self, loan: Mapping[str, Any]) -> dict[str, Any] | None:
        sides = [self.job(loan["lender"]), self.job(loan["borrower"])]
        if not any(sides):
            return None
        lender = loan["lender"] if sides[0] else ANOTHER
        return {**loan, "lender": lender, "borrower": loan["borrower"] if sides[1] else ANOTHER}
