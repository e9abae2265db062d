"""Questions to other nodes' peer ports, and their answers: in the clear, or sealed.

Homes are asked in the order in which they are given, the better ones first. One that cannot be
reached must not hold up a whole generation, whose budget is a few seconds: the next one is asked
beside it after a while, and whoever has the entry first is believed.

In the clear the question carries the generation's secret. Sealed (keepstep/sealed.py), the secret
is proved and not said, and nobody on the way reads the answer.
"""

from __future__ import annotations

import base64
import queue
import socket
import threading
from collections.abc import Sequence

from keepstep import wire
from keepstep.errors import WireError
from keepstep.model import Endpoint
from keepstep.sealed import NotSealed, Seal, secret_id

FETCH_SECONDS_MAX = 5.0
NEXT_SECONDS = 1.0
"""So long a home has for itself. Healthy ones answer within milliseconds."""

Heard = tuple[bytes | None, str]
"""The entry, and where it is from; or None, and why not."""


def ask_in_turn(
    homes: Sequence[Endpoint], questions: Sequence[wire.FetchEntry], *, sealed: bool
) -> Heard:
    """The entry from the first home that has it. Waits for all of them before it says that there
    is none."""
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    left, open_ones, reasons = list(homes), 0, []
    while left or open_ones:
        if left:
            asked = (left.pop(0), questions, sealed, heard)
            threading.Thread(target=_tell, args=asked, name="keepstep-ask", daemon=True).start()
            open_ones += 1
        try:
            payload, why = heard.get(timeout=NEXT_SECONDS if left else None)
        except queue.Empty:
            continue
        if payload is not None:
            return payload, why
        reasons.append(why)
        open_ones -= 1
    return None, "; ".join(reasons) or "no home is left to ask"


def _tell(
    home: Endpoint,
    questions: Sequence[wire.FetchEntry],
    sealed: bool,
    heard: queue.SimpleQueue[Heard],
) -> None:
    """On a thread of its own, which may be left behind."""
    payload, why = None, "no answer"
    try:
        for question in questions:
            payload, why = ask(home, question, sealed=sealed)
            if payload is not None or why == _SILENT:
                # It would be as silent to the other questions.
                break
    finally:
        heard.put((payload, f"{home.host}:{home.port}" + (f": {why}" if payload is None else "")))


_SILENT = f"no answer within {FETCH_SECONDS_MAX:g} s"


def ask(endpoint: Endpoint, question: wire.FetchEntry, *, sealed: bool) -> tuple[bytes | None, str]:
    """The entry; or None, and why not."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), FETCH_SECONDS_MAX) as peer:
            line = _Line(peer)
            answer = _sealed(line, question) if sealed else line.ask(question)
            if not isinstance(answer, wire.Entry):
                return None, f"an answer of the kind {type(answer).__name__}"
            if not answer.found:
                return None, answer.why
            return base64.b64decode(answer.payload), ""
    except TimeoutError:
        return None, _SILENT
    except (OSError, WireError, NotSealed, ValueError) as error:
        return None, str(error)


class _Line:
    """Messages one after another, each with an answer."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._decoder = peer, wire.Decoder()

    def ask(self, message: wire.Message) -> wire.Message:
        # In the oldest version if it was spoken then: the other node may not be upgraded yet.
        old = isinstance(message, wire.FetchEntry)
        self._peer.sendall(wire.encode(message, wire.OLDEST if old else wire.VERSION))
        while True:
            data = self._peer.recv(1 << 20)
            if not data:
                raise WireError("the peer closed without an answer")
            for answer in self._decoder.feed(data):
                return answer

    def word(self, message: wire.Greet | wire.Word) -> bytes:
        answer = self.ask(message)
        if not isinstance(answer, wire.Word):
            raise WireError(f"a {type(answer).__name__} in place of a word")
        return base64.b64decode(answer.word)


def _sealed(line: _Line, question: wire.FetchEntry) -> wire.Message:
    seal = Seal(question.secret, "entry", opens=True)
    greet = wire.Greet(question.job, secret_id(question.secret), _text(seal.shake(b"")))
    heard = line.word(greet)
    while not seal.ready:
        heard = line.word(wire.Word(_text(seal.shake(heard))))
    # Inside, the secret is proved already.
    asked = seal.seal(wire.encode(question)[4:])
    return wire.decode(seal.opened(line.word(wire.Word(_text(asked)))))


def _text(word: bytes) -> str:
    return base64.b64encode(word).decode()
