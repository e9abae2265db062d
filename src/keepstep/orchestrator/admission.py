"""What is let in at the edge: jobs that make sense, and agents that are who they say. Pure.

The brain takes what reaches it for true. So a job of minus one ranks and a node with a billion
slots are refused here, with the field and the fix, and never journaled.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep import tls, wire
from keepstep.model import JobSpec, NodeId, Policy, Rank
from keepstep.orchestrator import nodes, planned, words
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.state import Job, NodeState
from keepstep.orchestrator.tokens import CLUSTER, NAME, Caller

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A job's name becomes part of paths and of URLs."""
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""As long as a host's."""
FILES = re.compile(r"(agent|agent-state|preload|store)\..*|(boot|logs)(\..*)?")
"""What an agent keeps in its room, where each job has a directory of its name (agent/room.py), and
whatever it may call the new one beside it: an agent that finds a directory there cannot start."""
BOUNDS: Mapping[str, tuple[int, int]] = {
    "nodes": (1, 100_000),
    "ranks_per_node": (1, 1024),
    "spares": (0, 100_000),
    "priority": (-1_000_000, 1_000_000),
    "standby_level": (1, 2),
}
PROJECT_PRIORITY_MAX = 0
"""What a project's own token may ask for. A job of higher priority takes devices from others', and
that is for whoever runs the cluster to grant: with a token without a project."""
SECONDS_MAX = 10 * 365 * 86_400.0
TEXT_CHARS_MAX = 4096
"""Of a path, an argument or a variable."""
TEXTS_MAX = 4096
SLOTS_MAX = 1024
LABELS_MAX = 64
FACTS_MAX = 4 * SLOTS_MAX
"""Workers and standbys that a node lists: those of before may live beside those of now."""
JOBS_TOLD_MAX = 10_000
"""Of whose generations a node tells; it remembers all that it ever had."""
NUMBER_MAX = 2**53
"""Of a rank, an incarnation or a generation: whoever says more wants to use up the numbers."""


def check(spec: JobSpec) -> None:
    """Raises BadRequest if no job can be meant by this."""
    if not JOB_NAME.fullmatch(spec.job):
        raise BadRequest(
            400,
            f"{spec.job[:80]!r} cannot be a job's name",
            "use up to 64 letters, digits, dots, dashes and underscores",
        )
    for field, (low, high) in BOUNDS.items():
        if not low <= getattr(spec, field) <= high:
            raise BadRequest(400, f"{field} is out of range", f"give {low} to {high}")
    if not spec.script:
        raise BadRequest(400, "script is empty", "name the training script")
    if spec.project and not NAME.fullmatch(spec.project):
        raise BadRequest(400, "project is no name", "use up to 64 letters, digits, . _ @ and -")
    _check_texts(spec)
    _check_policy(spec.policy)


def check_name(
    spec: JobSpec, caller: Caller, nodes: Collection[NodeId], whose: str | None = None
) -> None:
    """Raises BadRequest if a name would be taken for something else, wherever it is read. `nodes`:
    theirs are taken; but a project is not told which nodes there are, and such a name, or one that
    a node takes later, hides nothing of others' (see access.py). `whose` it is: it may stay so,
    also if a node, or a later release for a file, has taken it since."""
    name, project = spec.job, spec.project or caller.project
    if whose == project:
        return
    if FILES.fullmatch(name):
        raise _other_meaning(name, "a file of the agents'")
    if project and words.ours(name):
        raise _other_meaning(name, "a letter, a number, or a word of our sentences")
    if not caller.project and NodeId(name) in nodes:
        raise _other_meaning(name, "a node")


def _other_meaning(name: str, what: str) -> BadRequest:
    why = f"{name} has another meaning here: {what}"
    return BadRequest(400, why, "give the job another name (--job)")


def _check_texts(spec: JobSpec) -> None:
    named = [spec.script, spec.directory, spec.log_directory, spec.state_directory]
    texts = [*named, *spec.arguments, *spec.preload, *spec.environment, *spec.environment.values()]
    if len(texts) > TEXTS_MAX:
        raise BadRequest(400, f"{len(texts)} arguments and variables", f"at most {TEXTS_MAX}")
    if any(len(text) > TEXT_CHARS_MAX or "\0" in text for text in texts):
        fix = f"at most {TEXT_CHARS_MAX} characters each, and no zero byte"
        raise BadRequest(400, "a path, argument or variable is too long", fix)
    if any(not name or "=" in name for name in spec.environment):
        raise BadRequest(400, "a variable without a name", "give NAME: value, without =")


def _check_policy(policy: Policy) -> None:
    for field in dataclasses.fields(Policy):
        value = getattr(policy, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value <= SECONDS_MAX:
            fix = f"give 0 to {SECONDS_MAX:g}; see `keepstep admin policy show`"
            raise BadRequest(400, f"policy.{field.name} is out of range", fix)


def owned(spec: JobSpec, caller: Caller, known: Job | None, whose: str | None = None) -> JobSpec:
    """The job as this caller may submit it: within its project, and under a name of its own.
    `whose`: the project that has the name, or had it; None: nobody did."""
    if caller.project and not spec.project:
        spec = dataclasses.replace(spec, project=caller.project)
    if caller.project and spec.project != caller.project:
        raise BadRequest(
            403, f"{caller.name} is of project {caller.project}", "submit in this project"
        )
    granted = known is not None and not known.state.over and known.spec == spec
    if caller.project and spec.priority > PROJECT_PRIORITY_MAX and not granted:
        raise BadRequest(
            403,
            f"priority {spec.priority} is above {PROJECT_PRIORITY_MAX}, a project's highest",
            "give a lower --priority, or have it submitted with a token without a project",
        )
    if whose is not None and whose != spec.project:
        # Also when it is over, and forgotten: its chain and its incidents stay its owner's.
        raise BadRequest(409, f"the name {spec.job} is taken", "give the job another name (--job)")
    if known is not None and not known.state.over and known.spec != spec:
        fields = [field.name for field in dataclasses.fields(JobSpec)]
        other = [name for name in fields if getattr(spec, name) != getattr(known.spec, name)]
        raise BadRequest(
            409,
            f"job {spec.job} is already there with another {', '.join(other)}",
            "give the same on each node, or another name (--job) to a new job",
        )
    return spec


def check_migrate(job: Job, ranks: Sequence[int], *, to: str, home: bool, cancel: bool) -> None:
    """Raises BadRequest if these ranks cannot be asked to move, or not to, as the job stands."""
    name = job.spec.job
    if home and (ranks or to):
        raise BadRequest(400, "home is for all ranks", 'send {"home": true} and no more')
    if cancel and (home or to):
        raise BadRequest(
            400, "cancel names ranks only", 'send {"ranks": [2], "cancel": true} and no more'
        )
    if not home and not ranks:
        raise BadRequest(400, "ranks is missing", 'send {"ranks": [2]} or {"home": true}')
    if job.roster is None or job.state.over:
        raise BadRequest(409, f"{name} does not run", "see GET /v1/jobs")
    if bad := [rank for rank in ranks if not 0 <= rank < len(job.roster.seats)]:
        last = len(job.roster.seats) - 1
        raise BadRequest(404, f"{name} has no rank {bad[0]}", f"its ranks are 0 to {last}")
    why = "" if cancel else planned.refusal(job, [Rank(rank) for rank in ranks])
    if why:
        raise BadRequest(409, why, "nothing was changed")


def why_not_agent(
    hello: wire.Message, token: str, certificate: Mapping[str, Any] | None, *, secure: bool
) -> str:
    """Why this is no agent of ours; empty if it is one. With TLS the certificate is the proof, and
    the token is not asked for: a node should not hold what may do everything."""
    if not isinstance(hello, wire.Hello):
        return f"the first message is a Hello, not a {type(hello).__name__}"
    if secure:
        if why := tls.why_not_node(certificate, hello.node):
            return why
    elif not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "the token is not this cluster's; give the agent the orchestrator's token file"
    if hello.speaks < wire.OLDEST:
        return wire.why_not(hello.speaks)
    if not hello.node:
        return "a node needs a name"
    if not NODE_NAME.fullmatch(hello.node):
        return "a node's name is up to 253 letters, digits, dots, dashes and underscores"
    if not 0 < hello.slots <= SLOTS_MAX:
        return f"a node has 1 to {SLOTS_MAX} slots"
    texts = [hello.address, hello.boot, *hello.labels, *hello.labels.values()]
    if len(hello.labels) > LABELS_MAX or any(len(text) > 256 for text in texts):
        return f"a node has at most {LABELS_MAX} labels, of 256 characters each"
    return _why_not_facts(hello)


def _why_not_facts(hello: wire.Hello) -> str:
    """Why what a node says it has cannot be; empty if it can."""
    places = [(fact.job, fact.slot) for fact in hello.workers]
    places += [(fact.job, fact.slot) for fact in hello.standbys]
    jobs_told = max(len(hello.obeyed), len(hello.belongs), len(hello.keeps))
    if len(places) > FACTS_MAX or jobs_told > JOBS_TOLD_MAX:
        return f"a node has at most {FACTS_MAX} workers, and tells of {JOBS_TOLD_MAX} jobs"
    texts = (hello.release, hello.torch, *hello.belongs.values())
    jobs = {*(str(job) for job, _ in places), *hello.obeyed, *hello.belongs, *hello.keeps}
    if not all(map(JOB_NAME.fullmatch, jobs)) or any(len(text) > 256 for text in texts):
        return "a job's name, a release or a word that is none"
    numbers = [n for fact in hello.workers for n in (fact.rank, fact.incarnation, fact.generation)]
    numbers += [hello.seq_seen, hello.term_seen, *hello.obeyed.values()]
    if not all(0 <= number <= NUMBER_MAX for number in numbers):
        return f"a rank, an incarnation, a generation or an entry outside 0 to {NUMBER_MAX}"
    if not all(0 <= slot < SLOTS_MAX for _, slot in places):
        return f"a slot outside 0 to {SLOTS_MAX - 1}"
    return ""


def shows_an_agent(certificate: Mapping[str, Any] | None, caller: Caller | None) -> bool:
    """Whether who opens an agent's stream has shown anything that an agent would have: of anybody
    else little is read."""
    return bool(tls.node_of(certificate)) or (caller is not None and caller.token == CLUSTER)


@dataclass(frozen=True, slots=True)
class Away:
    """Why an agent is not let in."""

    why: str
    for_good: bool = True
    """It is told, and ends if it goes on like this. False: it is sent away without a word, and
    tries again."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a node's name, as a leader knows it."""

    known: NodeState | None
    boot: str = ""
    """Of the one whose stream is open here; empty: none is."""
    quiet_seconds: float = 0.0
    """Since that one was heard: a machine without power closes no stream."""


def why_not_name(
    hello: wire.Hello, holder: Holder, now: float, silent_seconds_max: float
) -> Away | None:
    """Why a node cannot have its name: somebody else has it, or may be about to come back, or has
    ranks there that train. Agents restart, leaders change.

    It is free once that one has been silent, or without a stream, for as long as it may be, and no
    job's steps speak for it. That does not wait until it counts as lost: where we suspect
    ourselves, the new boot may be the only evidence that ever comes. A run that is over and is run
    again has it at once.
    """
    known = holder.known
    if holder.boot and holder.boot != hello.boot:
        if 2 * holder.quiet_seconds > silent_seconds_max:
            return Away(f"the stream of {hello.node} is quiet, and not yet silent", for_good=False)
        taken = f"a node called {hello.node} is here already"
        return Away(f"{taken}; give this one another name with --node")
    same = holder.boot or (known is not None and known.boot == hello.boot)
    if same or known is None or not known.alive or nodes.closed(known):
        return None
    if known.vouched_at >= 0 and now < known.vouched_at + silent_seconds_max:
        return Away(f"ranks of an earlier {hello.node} make steps", for_good=False)
    silent = 0 <= known.silent_at <= now
    if silent or (not known.linked and now >= known.unlinked_at + silent_seconds_max):
        return None
    return Away(f"an earlier {hello.node} may come back", for_good=False)
