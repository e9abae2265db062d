"""The layers, kept by a test.

    cli, chaos
      -> agent | orchestrator | training
        -> detect | ledger | schedulers
          -> the ground: wire, config, errors, clock and any other module of the package's top level
            -> model

Imports go down only. Rooms joined by `|` never import each other. Only training/ imports torch.
Importing anything does nothing: no threads, no logger configured, nothing patched. The checkers are
pure functions over source text, so they are themselves tested on small bad samples.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = "keepstep"

GROUND = "ground"
FACE = "face"
"""`keepstep/__init__.py`: the public names, resolved lazily. Nothing inside imports it."""

HEIGHT: Mapping[str, int] = {
    "model": 0,
    GROUND: 1,
    "detect": 2,
    "ledger": 2,
    "schedulers": 2,
    "agent": 3,
    "orchestrator": 3,
    "training": 3,
    "cli": 4,
    "chaos": 4,
    FACE: 5,
}

NEIGHBOURS_MEET: frozenset[int] = frozenset({HEIGHT[GROUND], HEIGHT["cli"]})
"""At these heights rooms may import each other; at the others they meet one floor down."""

THIRD_PARTY: Mapping[str, frozenset[str]] = {"training": frozenset({"torch"})}
"""What a room may import besides the standard library. A room that is not listed: nothing."""

IF_THE_USER_HAS_IT: Mapping[str, frozenset[str]] = {
    # The joiner restores NumPy's generator only where the replaced worker had loaded NumPy.
    "keepstep.training.randomness": frozenset({"numpy"}),
}
"""Modules that may import more, inside a function, once it is known that the user's own script
uses it."""

IF_THE_EXTRA_IS_THERE: Mapping[str, frozenset[str]] = {
    # keepstep[postgres]: for an orchestrator whose journal is in a database, and nobody else.
    "keepstep.orchestrator.journal_postgres": frozenset({"psycopg"}),
    "keepstep.orchestrator.journal_schema": frozenset({"psycopg"}),
}
"""Modules that may import what an extra brings, inside a function or for the type checker alone:
they too can be imported where the extra is not installed."""

NUMPY_BRIDGES: frozenset[str] = frozenset({"numpy", "from_numpy"})
"""Tensor.numpy() and torch.from_numpy() raise where NumPy is missing, and torch does not bring it:
calling them is importing NumPy by another name."""

USER_PROGRAMS: frozenset[str] = frozenset({"keepstep.chaos.workload"})
"""Training scripts that ship with the package. They are started as a user's script would be, so
they may import torch and the public face, and no other module may import them."""

FACE_CONSTANTS: frozenset[str] = frozenset({"__version__"})


# --- the checkers: source text in, complaints out ---------------------------------------------


def room_of(module: str) -> str:
    """The room a module of the package lives in; unlisted top-level modules are ground."""
    parts = module.split(".")
    assert parts[0] == PACKAGE, module
    if len(parts) == 1:
        return FACE
    return parts[1] if parts[1] in HEIGHT else GROUND


def imports_of(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, module) for each import anywhere in the file: deferred and typing-only ones too.

    `from keepstep import wire` counts as keepstep.wire, and `from keepstep.wire import Order` as
    keepstep.wire.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                if deeper in known:
                    yield node.lineno, deeper
                elif node.module != PACKAGE or alias.name not in FACE_CONSTANTS:
                    yield node.lineno, node.module


def complaints_about(module: str, source: str, known: frozenset[str]) -> list[str]:
    """Every import of one module that breaks the layers, each with its reason."""
    room = room_of(module)
    tree = ast.parse(source)
    deferred = {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    typing_only = {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    found: list[str] = []
    for line, target in imports_of(tree, known):
        excused: frozenset[str] = frozenset()
        if line in deferred:
            excused |= IF_THE_USER_HAS_IT.get(module, frozenset())
        if line in deferred | typing_only:
            excused |= IF_THE_EXTRA_IS_THERE.get(module, frozenset())
        why = None if target.split(".")[0] in excused else _why_not(module, room, target)
        if why:
            found.append(f"{module}:{line} imports {target}: {why}")
    return found


def numpy_bridges(source: str) -> Iterator[str]:
    """Calls that need NumPy without importing it."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in NUMPY_BRIDGES
        ):
            yield f"line {node.lineno}: .{node.func.attr}() needs NumPy, which torch does not bring"


def _why_not(module: str, room: str, target: str) -> str | None:
    top = target.split(".")[0]
    if top != PACKAGE:
        allowed = THIRD_PARTY.get(room, frozenset())
        if module in USER_PROGRAMS:
            allowed = allowed | {"torch"}
        if top in sys.stdlib_module_names or top in allowed:
            return None
        return f"{room} may use only the standard library{' and torch' if allowed else ''}"
    if target in USER_PROGRAMS:
        return "it is a user's program, started and never imported"
    there = room_of(target)
    if there == FACE:
        return None if module in USER_PROGRAMS else "the public face is for users"
    if there == room:
        return None
    if HEIGHT[there] < HEIGHT[room]:
        return None
    if HEIGHT[there] > HEIGHT[room]:
        return f"imports go down only, and {there} is above {room}"
    if HEIGHT[room] in NEIGHBOURS_MEET:
        return None
    return f"{room} and {there} never import each other; they meet in wire.py"


def modules_under(src: Path) -> dict[str, Path]:
    found = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


MODULES = modules_under(SRC)
KNOWN = frozenset(MODULES)


# --- the claims ---------------------------------------------------------------------------------


def test_imports_go_down_only():
    found = [
        complaint
        for module, path in MODULES.items()
        for complaint in complaints_about(module, path.read_text(encoding="utf-8"), KNOWN)
    ]
    assert not found, "\n".join(found)


def test_the_users_process_needs_no_numpy():
    found = [
        f"{module} {complaint}"
        for module, path in MODULES.items()
        for complaint in numpy_bridges(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


QUIET = """
import importlib, json, logging, sys, threading

def picture():
    configured = [""] if logging.getLogger().handlers else []
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (
            name.split(".")[0] == "keepstep" and (logger.handlers or logger.level)
        ):
            configured.append(name)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "loggers": configured,
        "excepthook": sys.excepthook is sys.__excepthook__,
    }

def told(before, faces):
    after = picture()
    changed = [key for key in before if before[key] != after[key]]
    changed += [f"patched {name}" for name, thing, was in faces() if thing is not was]
    return changed
"""


def run_python(code: str, *flags: str, seconds_max: float = 60) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees the package's sources, and with -S no site-packages at all."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    env["PYTHONPATH"] = str(SRC)
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds_max,
        check=False,
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


needs_face = pytest.mark.skipif(PACKAGE not in KNOWN, reason="keepstep/__init__.py is not there")


@needs_face
def test_importing_keepstep_does_nothing_and_needs_no_torch():
    done = run_python(
        QUIET
        + """
before = picture()
import keepstep
print(json.dumps({
    "changed": told(before, list),
    "torch": "torch" in sys.modules,
    "training": sorted(m for m in sys.modules if m.startswith("keepstep.training")),
}))
""",
        "-S",
    )
    assert report_of(done) == {"changed": [], "torch": False, "training": []}


def test_every_module_outside_training_imports_without_torch_and_does_nothing():
    names = [
        name
        for name in MODULES
        if room_of(name) != "training"
        and name not in USER_PROGRAMS
        and not name.endswith("__main__")
    ]
    done = run_python(
        QUIET
        + f"""
bad = {{}}
for name in {names!r}:
    before = picture()
    try:
        importlib.import_module(name)
    except ImportError as error:
        bad[name] = repr(error)
        continue
    changed = told(before, list)
    if changed or "torch" in sys.modules:
        bad[name] = changed + ["torch"] * ("torch" in sys.modules)
print(json.dumps(bad))
""",
        "-S",
    )
    assert report_of(done) == {}


def test_importing_the_training_side_starts_nothing_and_patches_nothing():
    names = [n for n in MODULES if room_of(n) == "training" and not n.endswith("__main__")]
    if not names:
        pytest.skip("training/ is not there")
    pytest.importorskip("torch")
    done = run_python(
        QUIET
        + f"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
owners = [dist, dist.distributed_c10d, DDP, torch.optim.Optimizer, torch.utils.data.DataLoader]
was = {{
    (i, k): v for i, owner in enumerate(owners) for k, v in vars(owner).items() if callable(v)
}}
def faces():
    return [(k, vars(owners[i]).get(k), v) for (i, k), v in was.items()]
before = picture()
bad = {{}}
for name in {names!r}:
    importlib.import_module(name)
    changed = told(before, faces)
    if changed:
        bad[name] = changed
print(json.dumps(bad))
""",
        seconds_max=100,
    )
    assert report_of(done) == {}


@needs_face
def test_a_missing_torch_is_answered_with_the_command_that_installs_it():
    if "keepstep.training.session" not in KNOWN:
        pytest.skip("training/session.py is not there")
    done = run_python("import keepstep; keepstep.session", "-S")
    assert done.returncode != 0
    assert "pip install torch" in done.stderr


# --- the checkers find what they must -----------------------------------------------------------

SAMPLE = frozenset(
    {"keepstep", "keepstep.wire", "keepstep.model", "keepstep.errors", "keepstep.agent.run"}
    | {"keepstep.orchestrator.run", "keepstep.training.session", "keepstep.chaos.faults"}
    | {"keepstep.detect.hang", "keepstep.ledger.goodput", "keepstep.cli"}
    | USER_PROGRAMS
)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("keepstep.model", "import keepstep.errors"),
        ("keepstep.wire", "from keepstep.agent import run"),
        ("keepstep.wire", "from keepstep import agent"),
        ("keepstep.agent.run", "from keepstep.orchestrator.run import loop"),
        ("keepstep.orchestrator.run", "import keepstep.training.session"),
        ("keepstep.training.session", "from keepstep.agent import run"),
        ("keepstep.training.session", "import numpy"),
        ("keepstep.detect.hang", "import keepstep.ledger.goodput"),
        ("keepstep.detect.hang", "import torch"),
        ("keepstep.orchestrator.run", "import torch.distributed"),
        ("keepstep.orchestrator.run", "def f():\n    import torch"),
        ("keepstep.agent.run", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("keepstep.agent.run", "import requests"),
        ("keepstep.agent.run", "import keepstep"),
        ("keepstep.agent.run", "from keepstep import session"),
        ("keepstep.agent.run", "from keepstep.chaos import faults"),
        ("keepstep.cli", "import keepstep.chaos.workload"),
        ("keepstep.anything_new", "import keepstep.agent.run"),
    ],
)
def test_the_checker_refuses(module: str, source: str):
    assert complaints_about(module, source, SAMPLE)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("keepstep.errors", "from __future__ import annotations\nimport json"),
        ("keepstep.wire", "from keepstep.model import Rank\nfrom keepstep import errors"),
        ("keepstep.anything_new", "from keepstep.errors import ConfigError"),
        ("keepstep.training.session", "import torch\nfrom keepstep.wire import Order"),
        (
            "keepstep.agent.run",
            "from keepstep.detect import hang\nfrom keepstep import __version__",
        ),
        ("keepstep.cli", "from keepstep.chaos import faults\nimport keepstep.agent.run"),
        ("keepstep.chaos.workload", "import torch\nimport keepstep"),
        ("keepstep.chaos.faults", "import keepstep.training.session"),
    ],
)
def test_the_checker_accepts(module: str, source: str):
    assert complaints_about(module, source, SAMPLE) == []


def test_numpy_is_excused_only_where_listed_and_only_when_deferred():
    listed, late = "keepstep.training.randomness", "def f():\n    import numpy"
    assert complaints_about(listed, late, SAMPLE) == []
    assert complaints_about(listed, "import numpy", SAMPLE)
    assert complaints_about("keepstep.training.session", late, SAMPLE)


def test_what_an_extra_brings_is_excused_only_where_listed_and_never_at_import():
    listed = "keepstep.orchestrator.journal_postgres"
    late, typed = "def f():\n    import psycopg", "if TYPE_CHECKING:\n    import psycopg"
    assert complaints_about(listed, late, SAMPLE) == []
    assert complaints_about(listed, typed, SAMPLE) == []
    assert complaints_about(listed, "import psycopg", SAMPLE)
    assert complaints_about(listed, f"{typed}\nelse:\n    import psycopg", SAMPLE)
    for source in (late, typed):
        assert complaints_about("keepstep.orchestrator.run", source, SAMPLE)
        assert complaints_about("keepstep.agent.run", source, SAMPLE)


def test_a_missing_driver_is_answered_with_the_command_that_installs_it():
    source = "from keepstep.orchestrator.journal_postgres import PostgresJournal as J; J('')"
    done = run_python(source, "-S")
    assert "ConfigError" in done.stderr
    assert "pip install 'keepstep[postgres]'" in done.stderr


def test_a_bridge_to_numpy_is_found():
    assert list(numpy_bridges("raw = tensor.view(torch.uint8).numpy().tobytes()"))
    assert list(numpy_bridges("torch.from_numpy(x)"))
    assert not list(numpy_bridges("state.numpy"))


def test_a_relative_import_is_refused():
    with pytest.raises(AssertionError, match="relative"):
        complaints_about("keepstep.agent.run", "from . import orders", SAMPLE)


@pytest.mark.parametrize(
    "act",
    [
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "logging.basicConfig()",
        "logging.getLogger('keepstep').setLevel('INFO')",
        "sys.excepthook = print",
        "faces = lambda: [('dist.init', 1, 2)]",
    ],
)
def test_the_picture_shows_a_noisy_import(act: str):
    done = run_python(
        f"{QUIET}\nfaces = list\nbefore = picture()\n{act}\n"
        "print(json.dumps({'changed': told(before, faces)}))",
        "-S",
    )
    assert report_of(done)["changed"]
