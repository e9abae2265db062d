"""The first function of a forked worker: run the user's script as `python script.py` would.

    worker, joiner     run the script
    standby, level 1   wait here for a seat, then run the script as a joiner
    standby, level 2   run the script; it parks itself inside keepstep.session(build)

Whatever way the script ends, its last words are left in the room and told to the agent: the exit
code alone cannot tell a user's exception from a machine's fault. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from keepstep import codec, wire
from keepstep.errors import ConfigError, KeepstepError, Permanent
from keepstep.model import Generation, JobId, Rank, Sign
from keepstep.page import Page, page_path
from keepstep.training.link import Link
from keepstep.training.trouble import is_communication

DETAIL_CHARACTERS_MAX = 64 * 1024
SOCKET_SECONDS_MAX = 0.2
INTERRUPTED_EXIT_CODE = 130


def main() -> NoReturn:
    """Called by the preload server's child; `sys.argv` holds [-m] script and its arguments."""
    words = LastWords()
    with words:
        _refresh()
        if os.environ["KEEPSTEP_ROLE"] == "standby" and os.environ["KEEPSTEP_LEVEL"] == "1":
            take_seat(wait_for_seat())
        _run_script(sys.argv[1:])
    _leave(words.exit_code)


def _leave(exit_code: int) -> NoReturn:
    """End as the interpreter would, but without tearing down torch.

    The destructors of process groups join threads that may wait for peers, who wait for us: a
    worker whose script raised would hang at its exit and be taken for hung, not for wrong.
    """
    if exit_code == 0:
        # As the interpreter does: the script's own threads may have work to finish.
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def wait_for_seat() -> wire.Order:
    """Park until the agent, this one or its successor, hands over a seat."""
    environment = os.environ
    job, slot = JobId(environment["KEEPSTEP_JOB"]), int(environment["KEEPSTEP_SLOT"])
    level = int(environment["KEEPSTEP_LEVEL"])
    assigned = threading.Event()
    orders: list[wire.Order] = []

    def on_message(message: wire.Message) -> None:
        if isinstance(message, wire.Order) and isinstance(message.action, wire.Assign):
            orders.append(message)
            assigned.set()

    link = Link(
        environment["KEEPSTEP_SOCKET"],
        lambda: wire.WorkerHello(job=job, slot=slot, pid=os.getpid(), level=level),
        on_message,
    )
    link.start()
    link.send(wire.StandbyReady(job=job, slot=slot, level=level))
    assigned.wait()
    link.close()
    return orders[-1]


def take_seat(order: wire.Order) -> None:
    """Become the seat's worker: its environment, and its log."""
    assign = order.action
    assert isinstance(assign, wire.Assign), "a seat comes with an Assign"
    seat, membership, spec = assign.seat, assign.membership, assign.spec
    group = seat.rank // spec.ranks_per_node
    os.environ.update(
        {
            "RANK": str(seat.rank),
            "LOCAL_RANK": str(seat.slot),
            "WORLD_SIZE": str(membership.world_size),
            "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
            "GROUP_RANK": str(group),
            "NODE_RANK": str(group),
            "MASTER_ADDR": membership.store.host,
            "MASTER_PORT": str(membership.store.port),
            "TORCHELASTIC_RESTART_COUNT": str(order.generation),
            "KEEPSTEP_ROLE": "joiner",
            "KEEPSTEP_SLOT": str(seat.slot),
            "KEEPSTEP_INCARNATION": str(seat.incarnation),
            "KEEPSTEP_GENERATION": str(order.generation),
            "KEEPSTEP_SECRET": membership.secret,
            "KEEPSTEP_STORE": f"{membership.store.host}:{membership.store.port}",
            "KEEPSTEP_MIRROR_STRIDE": str(membership.mirror_stride),
            "KEEPSTEP_RESUME_FROM": "",
            **wire.joiner_environment(assign),
        }
    )
    directory = os.environ.get("KEEPSTEP_LOG_DIR", "")
    if directory:
        _log_to(Path(directory) / f"rank_{seat.rank}.log")


class LastWords:
    """Sees how the script ends, whatever it raises, and says so before the process is gone."""

    def __init__(self) -> None:
        self.exit_code = 0

    def __enter__(self) -> LastWords:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        sign, detail = self._judge(error)
        sys.stdout.flush()
        sys.stderr.flush()
        _tell(sign, detail[-DETAIL_CHARACTERS_MAX:])
        return True

    def _judge(self, error: BaseException | None) -> tuple[Sign, str]:
        if error is None:
            return Sign.FINISHED, ""
        if isinstance(error, SystemExit):
            self.exit_code = _exit_code(error)
            if self.exit_code == 0:
                return Sign.FINISHED, ""
            return Sign.EXIT, f"sys.exit({error.code!r})"
        text = "".join(traceback.format_exception(type(error), error, _users_part(error)))
        sys.stderr.write(text)
        if isinstance(error, KeyboardInterrupt):
            self.exit_code = INTERRUPTED_EXIT_CODE
            return Sign.EXIT, "interrupted"
        self.exit_code = 1
        # Keepstep's own trouble, or a peer's death, is not the user's exception.
        ours = isinstance(error, KeepstepError) and not isinstance(error, ConfigError)
        ours = ours or is_communication(error)
        return (Sign.EXIT if ours else Sign.EXCEPTION), text


def _run_script(target: list[str]) -> None:
    as_module = target[0] == "-m"
    script, *arguments = target[1:] if as_module else target
    if as_module:
        _lead_path(str(Path.cwd()))
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        _lead_path(str(Path(script).resolve().parent))
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def _lead_path(directory: str) -> None:
    """sys.path as a fresh interpreter would have it: the script's place first, then PYTHONPATH."""
    named = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[0:0] = [directory, *(path for path in named if path not in sys.path)]


def _refresh() -> None:
    """Undo what a fork shares and a fresh process would not."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # Else all ranks would draw the same "random" numbers.
        numpy.random.seed()
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if torch is not None and threads.isdigit() and threads != "1":
        # The runtime read the variable when the preload server started.
        torch.set_num_threads(int(threads))


def _log_to(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def _exit_code(error: SystemExit) -> int:
    """What the interpreter would make of it."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on: what is before is ours and runpy's."""
    trace = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__


def _tell(sign: Sign, detail: str) -> None:
    environment = os.environ
    rank = int(environment.get("RANK", "-1"))
    incarnation = int(environment.get("KEEPSTEP_INCARNATION", "0"))
    room = Path(environment["KEEPSTEP_ROOM"])
    step, generation = _progress(room, rank, incarnation)
    ending = wire.WorkerEnding(
        job=JobId(environment["KEEPSTEP_JOB"]),
        rank=Rank(rank),
        incarnation=incarnation,
        generation=Generation(max(generation, int(environment.get("KEEPSTEP_GENERATION", "0")))),
        sign=sign,
        step=step,
        detail=detail,
    )
    seat = f"{rank}-{incarnation}" if rank >= 0 else f"standby-{environment['KEEPSTEP_SLOT']}"
    try:
        # The file first: it is there even if no agent is.
        room.mkdir(parents=True, exist_ok=True)
        fresh = room / f"ending-{seat}.new"
        fresh.write_bytes(codec.dumps(wire.to_plain(ending)))
        fresh.replace(room / f"ending-{seat}.json")
        if rank >= 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
                agent.settimeout(SOCKET_SECONDS_MAX)
                agent.connect(environment["KEEPSTEP_SOCKET"])
                agent.sendall(wire.encode(ending))
    except OSError as error:
        sys.stderr.write(f"keepstep: the last words did not reach the agent: {error}\n")


def _progress(room: Path, rank: int, incarnation: int) -> tuple[int, int]:
    try:
        page = Page(page_path(room, rank, incarnation))
        progress = page.read()
    except (OSError, ValueError, Permanent):
        return -1, 0
    page.close()
    return progress.step, progress.generation
