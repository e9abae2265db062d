"""No project blinds others by the name of a job: words of our own sentences are nobody's names.

A sentence that names another project's job is withheld, and names are found as words. The words of
our sentences are collected here from the code that makes them and from the transcripts that show
them, so that none can be missing. With KEEPSTEP_REWRITE=1 those that are go into the list.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from keepstep import codec, wire
from keepstep.model import JobId, JobSpec, NodeId, Rank, Sign
from keepstep.orchestrator import admission, words
from keepstep.orchestrator.access import WITHHELD, Sight
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.names import Owners
from keepstep.orchestrator.tokens import Caller, Role
from tests.unit.test_access import Served, in_two_projects, link, submitted

SRC = Path(words.__file__).parents[1]
TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
ROOTS = ("brain", "forecast", "view")
"""Whose sentences projects get to read, with all that they use."""
ROOMS = ("agent", "detect", "training")
"""What these see is told in our sentences."""
NAMES = {"other", "small", "third", "train"}
"""Of jobs in the transcripts."""
USUAL = "train"
"""What most people would call theirs: it is in one sentence only, and may be a name."""
OPENS, CLOSES = '_LIST = """\n', '\n"""\n'
ALL, B = Caller("all", Role.OPERATOR), Caller("b", Role.OPERATOR, "b")


def brains() -> Iterator[Path]:
    """The modules of the orchestrator that make sentences."""
    rooms = SRC / "orchestrator"
    left, seen = list(ROOTS), set()
    while left:
        if (name := left.pop()) in seen or not (path := rooms / f"{name}.py").exists():
            continue
        seen.add(name)
        yield path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepstep.orch"):
                left += [alias.name for alias in node.names]
                left.append((node.module or "").rpartition(".")[2])


def said(path: Path) -> Iterator[str]:
    """Texts of a module that may be in a sentence: not what documents it."""
    tree = ast.parse(path.read_text())
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    forms = {id(n.format_spec) for n in ast.walk(tree) if isinstance(n, ast.FormattedValue)}
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) and id(n) not in forms]
    parts = {id(part) for text in texts for part in text.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = re.fullmatch("[a-z]+", node.value) and path.parent.name == "orchestrator"
            if id(node) not in documents and (id(node) in parts or " " in node.value or word):
                yield node.value


def shown() -> Iterator[str]:
    """What the transcripts have the brain say."""
    for path in TRANSCRIPTS.glob("*.txt"):
        says = False
        for line in path.read_text().splitlines():
            says = line == "----" or (says and bool(line))
            if says and not line.startswith(("->", "=", "----")):
                yield line


def words_of(texts: Iterable[str]) -> set[str]:
    found = {word.strip(".-_") for text in texts for word in re.findall(r"[\w.-]+", text)}
    return {word.lower() for word in found if re.fullmatch("[A-Za-z]+(-[A-Za-z]+)*", word)}


def all_words() -> set[str]:
    texts = [text for path in brains() for text in said(path)]
    texts += [text for room in ROOMS for p in (SRC / room).rglob("*.py") for text in said(p)]
    found = words_of([*texts, *_kinds(SRC / "model.py")]) | (words_of(shown()) - NAMES)
    return {word for word in found if len(word) > 1} - {USUAL}


def _kinds(path: Path) -> Iterator[str]:
    """Signs, states and phases, which sentences are made with."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_every_word_of_our_sentences_is_in_the_list():
    missing = sorted(all_words() - words.WORDS)
    if missing and os.environ.get("KEEPSTEP_REWRITE"):
        path = Path(words.__file__)
        every = " ".join(sorted(words.WORDS | set(missing)))
        text = textwrap.fill(every, 98, break_on_hyphens=False)
        first, _, rest = path.read_text().partition(OPENS)
        path.write_text(f"{first}{OPENS}{text}{CLOSES}{rest.partition(CLOSES)[2]}")
    assert not missing, "run this once with KEEPSTEP_REWRITE=1"


def refused(name: str, caller: Caller = B, project: str = "") -> bool:
    try:
        spec = JobSpec(JobId(name), "t.py", project=project)
        admission.check_name(spec, caller, [NodeId("gpu-node-7")])
    except BadRequest as error:
        return error.status == 400
    return False


def test_no_project_calls_a_job_like_a_word_of_our_sentences_or_a_number():
    ours = [
        *all_words(),
        "0",
        "12",
        "1.5",
        "a",
        "s",
        "g3",
        "i12",
        "n4",
        "5s",
        "0-1",
        "Rank",
        "rank.",
    ]
    for name in (*ours, "RuntimeError", "KeyError", "list"):
        assert refused(name), name
        assert refused(name, ALL, "b"), name
        assert refused(name, ALL) == bool(admission.FILES.fullmatch(name)), name
    for name in (USUAL, "bert", "llama-70b", "exp_12", "vision.pretrain", "gpt2-small", "zebra"):
        assert not refused(name), name
    spec = JobSpec(JobId("rank"), "t.py")
    admission.check_name(spec, B, (), whose="b")  # As whoever runs the cluster had it.


def test_no_project_finds_out_the_names_of_nodes_by_submitting_jobs():
    assert refused("gpu-node-7", ALL)
    assert not refused("gpu-node-7")
    assert refused("n0") == refused("n99") is True


@pytest.mark.parametrize("name", ["0", "rank", "gpu-node-7", "StopAsked", "r1"])
def test_a_name_that_is_a_word_of_ours_or_a_nodes_hides_nothing(name: str):
    sight = Sight("a", {"mine": "a", name: "b"}, {"gpu-node-7"})
    text = "rank 0 on gpu-node-7 hangs at r1"
    assert sight.cleaned({"why": text}) == {"why": text}
    assert Sight("a", {"mine": "a", "hangs-2": "b"}).cleaned("it is hangs-2 again") == WITHHELD


def test_what_an_owner_wrote_into_its_own_job_is_not_searched_for_others():
    body = submitted("mine", "a")
    body["body"]["spec"]["script"] = "data/pretrain.py"
    (seen,) = Sight("a", {"mine": "a", "pretrain.py": "b"}).links("mine", [link(1, body)], "a")
    assert WITHHELD not in seen.body


@in_two_projects
async def test_a_project_that_tries_to_blind_another_is_refused_and_hides_nothing(made: Served):
    async def submit(who: str, name: str) -> int:
        plain = codec.to_plain(JobSpec(JobId(name), "t.py"))
        return (await made.ask(who, "POST", "/v1/jobs", plain))[0]

    job = made.orchestrator.cluster.jobs[JobId("mine")]
    assert job.roster is not None
    node = job.roster.seats[0].node
    made.feed(wire.Observed(node, JobId("mine"), Sign.EXIT, Rank(0), 0, job.generation))
    _, before = await made.ask("viewera", "GET", "/v1/incidents")
    assert "rank 0" in before
    for name in ("0", "migrating"):
        assert await submit("operatorb", name) == 400
    for name in ("0", "rank", "broken"):
        assert await submit("operator", name) == 200, "whoever runs the cluster may"
    # A node that comes later, under the name of a job.
    assert await submit("operatorb", "gpu-node-7") == 200
    made.feed(wire.Hello(NodeId("gpu-node-7"), "127.0.0.1", 2, 1, 2, "boot"))
    _, after = await made.ask("viewera", "GET", "/v1/incidents")
    assert after == before
    cluster = made.orchestrator.cluster
    text = "the stream of gpu-node-7 closed: rank 0 is broken"
    assert Sight("a", Owners(cluster), cluster.nodes).cleaned(text) == text
