"""The operator's side of the orchestrator's HTTP: find it, ask it, follow its decisions.

An orchestrator is found by --orchestrator, by $KEEPSTEP_ORCHESTRATOR, or in the newest local run
directory; its token by --token-file, $KEEPSTEP_TOKEN_FILE, or beside the port in that directory.
One at https:// is verified with the files in $KEEPSTEP_TLS_DIRECTORY, and shown the certificate
there; without that variable, with the system's authorities and no certificate.
Several URLs, separated by commas, are the orchestrators of one cluster: those that follow say who
leads, and the question goes there. What may have been heard is never asked twice unless it only
reads: whether a leader that died did it is for whoever asked to find out.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from keepstep import codec, tls
from keepstep.errors import ConfigError, KeepstepError, Permanent, Unreachable
from keepstep.model import JobSpec

ANSWER_SECONDS_MAX = 10.0
CONNECT_SECONDS_MAX = 2.0
BEGIN_SECONDS_MAX = 4.0
"""To connect, and until the first byte of an answer that only reads, where others may give it."""
EVENTS_SECONDS_MAX = 15.0
"""The orchestrator sends a sign of life every 5 s; three missing ones end the stream."""
RUNS = "keepstep-runs"
TLS_DIRECTORY = "KEEPSTEP_TLS_DIRECTORY"


class Refusal(Permanent):
    """The orchestrator answered with an error; the message carries its fix."""

    def __init__(self, status: int, error: str, fix: str) -> None:
        super().__init__(f"{error}; {fix}" if fix else error)
        self.status = status


@dataclass(frozen=True, slots=True)
class Gap:
    """Decisions that nobody tells any more: a new leader keeps none of those before its term."""

    asked: int
    begins: int
    """The stream goes on with this one."""

    @property
    def after(self) -> int:
        return self.begins - 1


@dataclass(frozen=True, slots=True)
class Client:
    """One cluster, by the URL of its orchestrator, or of several."""

    url: str
    token: str
    answer_seconds_max: float = ANSWER_SECONDS_MAX
    _led: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Who led when we last asked."""

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.url.split(",") if part.strip())

    def cluster(self) -> dict[str, Any]:
        return self._object("GET", "/v1/cluster")

    def job(self, job: str) -> dict[str, Any]:
        return self._object("GET", f"/v1/jobs/{quote(job, safe='')}")

    def policy(self, job: str, faults: Sequence[str] = ()) -> dict[str, Any]:
        """A job's policy and budgets, and what would happen if …"""
        query = f"?fault={quote(','.join(faults), safe=':,')}" if faults else ""
        return self._object("GET", f"/v1/jobs/{quote(job, safe='')}/policy{query}")

    def incident(self, incident: str) -> dict[str, Any]:
        return self._object("GET", f"/v1/incidents/{quote(incident, safe='')}")

    def submit(self, spec: JobSpec) -> dict[str, Any]:
        return self._object("POST", "/v1/jobs", codec.to_plain(spec))

    def stop(self, job: str, *, save: bool, why: str, rewind: bool = False) -> dict[str, Any]:
        body = {"save": save, "why": why, **({"rewind": True} if rewind else {})}
        return self._object("POST", f"/v1/jobs/{quote(job, safe='')}/stop", body)

    def migrate(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Move ranks: {"ranks": [2], "to": …, "why": …, "dry_run": …}."""
        return self._object("POST", f"/v1/jobs/{quote(job, safe='')}/migrate", body)

    def drain(self, node: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/drain", body)

    def undrain(self, node: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/undrain", body)

    def forget(self, node: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/forget", body)

    def taints(self) -> dict[str, Any]:
        return self._object("GET", "/v1/taints")

    def taint(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"node": "n3", "slot": 1, "reason": …, "severity": …, "seconds": …}."""
        return self._object("POST", "/v1/taints", body)

    def untaint(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", "/v1/taints/remove", body)

    def freeze(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", "/v1/freeze", body)

    def unfreeze(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", "/v1/unfreeze", body)

    def node(self, node: str) -> dict[str, Any]:
        return self._object("GET", f"/v1/nodes/{quote(node, safe='')}")

    def health(self) -> dict[str, Any]:
        return self._object("GET", "/healthz")

    def ready(self) -> dict[str, Any]:
        """Raises Refusal with status 503 while the journal is away."""
        return self._object("GET", "/readyz")

    def orchestrator(self) -> dict[str, Any]:
        """What it says of itself."""
        return self._object("GET", "/v1/orchestrator")

    def journal(self, job: str) -> Iterator[str]:
        """The job's chain, line by line."""
        path = f"/v1/jobs/{quote(job, safe='')}/journal"
        with self._ask("GET", path) as answer:
            for line in answer:
                yield line.decode()

    def events(self, after: int | None = None) -> Iterator[dict[str, Any] | Gap | None]:
        """Decisions as they happen; None for a sign of life. Ends when the orchestrator does.
        After a Gap the cluster may be another one: what is known of it has to be read again."""
        path = "/v1/events" if after is None else f"/v1/events?after={after}"
        with self._ask("GET", path, seconds_max=EVENTS_SECONDS_MAX) as answer:
            try:
                kind = b""
                for line in answer:
                    if line.startswith(b"event:"):
                        kind = line[6:].strip()
                    elif line.startswith(b"data:"):
                        if (told := _event(kind, codec.loads(line[5:]))) is not None:
                            yield told
                        kind = b""
                    elif line.startswith(b":"):
                        yield None
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"the orchestrator's events ended: {error}") from error

    def _object(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        with self._ask(method, path, body) as answer:
            try:
                plain = codec.loads(answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"{self.url} broke off its answer: {error}") from error
        assert isinstance(plain, dict), f"{path} answered {type(plain).__name__}"
        return plain

    @contextlib.contextmanager
    def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        seconds_max: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer of whoever leads."""
        limit = self.answer_seconds_max if seconds_max is None else seconds_max
        waiting = list(dict.fromkeys((*self._led, *self.urls)))
        if not waiting:
            raise ConfigError("no orchestrator is named; give http://HOST:PORT")
        asked: list[str] = []
        trouble: KeepstepError | None = None
        while waiting:
            asked.append(waiting.pop(0))
            alone = not waiting and len(asked) == 1
            with _Connection(asked[-1], self.token, limit, alone=alone) as connection:
                try:
                    answer = connection.ask(method, path, body)
                except _Unheard as error:
                    trouble = trouble or error
                    continue
                except _Elsewhere as error:
                    trouble = error
                    if error.leader and error.leader not in asked:
                        waiting = [error.leader, *(u for u in waiting if u != error.leader)]
                    continue
                except Unreachable as error:
                    if method != "GET":
                        raise
                    trouble = error
                    continue
                self._led[:] = asked[-1:]
                yield answer
                return
        self._led.clear()
        assert trouble is not None
        raise trouble


class Busy(Unreachable):
    """It has too much to do just now, and did nothing of this: the same may be asked again."""


class _Unheard(Unreachable):
    """Nobody has heard the question: it may go to another."""


class _Elsewhere(Unreachable):
    """An orchestrator that does not lead; it says who does, if it knows."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class _Connection:
    """One request's connection, closed on the way out."""

    def __init__(self, url: str, token: str, seconds_max: float, *, alone: bool = True) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.scheme not in ("", "http", "https") or not parts.hostname or not parts.port:
            raise ConfigError(f"{url!r} is no orchestrator; give https://HOST:PORT")
        self._url, self._token, self._seconds_max = url, token, seconds_max
        # Where others may answer, one that is gone is not waited for.
        self._connect_max = seconds_max if alone else min(seconds_max, CONNECT_SECONDS_MAX)
        self._begin_max = seconds_max if alone else min(seconds_max, BEGIN_SECONDS_MAX)
        where, most = (parts.hostname, parts.port), self._connect_max
        self._connection = (
            http.client.HTTPSConnection(*where, timeout=most, context=secured(os.environ))
            if parts.scheme == "https"
            else http.client.HTTPConnection(*where, timeout=most)
        )

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._token}"}
        data = None if body is None else codec.dumps(body)
        try:
            self._connection.connect()
        except OSError as error:
            raise _Unheard(self._no_answer(error)) from error
        try:
            line = self._connection.sock
            line.settimeout(self._begin_max if method == "GET" else self._seconds_max)
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
            line.settimeout(self._seconds_max)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self._no_answer(error)) from error
        if answer.status == 307 or (answer.status == 503 and answer.getheader("Retry-After")):
            refusal, location = _refusal(answer), urlsplit(answer.getheader("Location") or "")
            leader = f"{location.scheme}://{location.netloc}" if location.netloc else ""
            if self._url.startswith("https:") and location.scheme != "https":
                # The token does not follow anybody into plain text.
                leader = ""
            raise _Elsewhere(str(refusal), leader)
        if answer.status == 429:
            # It says what there is too much of: requests, listeners, open jobs.
            kind = Busy if answer.getheader("Retry-After") else Unreachable
            raise kind(f"{self._url} is too busy for this: {_refusal(answer)}")
        if answer.status >= 400:
            raise _refusal(answer)
        return answer

    def _no_answer(self, error: Exception) -> str:
        return (
            f"no orchestrator answers at {self._url} ({error}); "
            "check --orchestrator, or whether the run has ended"
        )


def _event(kind: bytes, plain: dict[str, Any]) -> dict[str, Any] | Gap | None:
    """None: of a kind that a later orchestrator has, and this client does not know."""
    if kind == b"gap":
        return Gap(int(plain["asked"]), int(plain["from"]))
    return None if kind else plain


def secured(environ: Mapping[str, str]) -> ssl.SSLContext:
    if directory := environ.get(TLS_DIRECTORY):
        return tls.client(Path(directory))
    return ssl.create_default_context()


def _refusal(answer: http.client.HTTPResponse) -> Refusal:
    raw = answer.read()
    try:
        plain = codec.loads(raw)
        return Refusal(answer.status, str(plain["error"]), str(plain.get("fix", "")))
    except (Permanent, KeyError, TypeError):
        return Refusal(answer.status, f"HTTP {answer.status}: {raw[:200]!r}", "")


# ---------------------------------------------------------------- finding it


def find(url: str, token_file: str, environ: Mapping[str, str], here: Path) -> Client:
    """The orchestrator that a command means."""
    run = None
    url = url or environ.get("KEEPSTEP_ORCHESTRATOR", "")
    token_file = token_file or environ.get("KEEPSTEP_TOKEN_FILE", "")
    if not url:
        run = newest_run(environ, here)
        if run is None:
            raise ConfigError(
                "no run found here; give --orchestrator http://HOST:PORT, set "
                "$KEEPSTEP_ORCHESTRATOR, or start one with `keepstep run`"
            )
        url = url_of(run)
    if not token_file:
        run = run or newest_run(environ, here)
        if run is None:
            raise ConfigError("give --token-file FILE, or set $KEEPSTEP_TOKEN_FILE")
        token_file = str(run / "token")
    return Client(url, read_token(Path(token_file)))


def url_of(run: Path) -> str:
    """Where the orchestrator of a run directory listens, or listened last."""
    written = run / "orchestrator.url"
    if written.exists():
        return written.read_text(encoding="utf-8").strip()
    return f"http://127.0.0.1:{(run / 'orchestrator.port').read_text(encoding='utf-8').strip()}"


def read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error


def runs_directories(environ: Mapping[str, str], here: Path) -> tuple[Path, ...]:
    """Where run directories may be: beside us, and under the user's state directory."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return (here / RUNS, Path(state) / "keepstep" / "runs")


def newest_run(environ: Mapping[str, str], here: Path) -> Path | None:
    found = [
        port
        for directory in runs_directories(environ, here)
        for port in directory.glob("*/orchestrator.port")
    ]
    return max(found, key=lambda port: port.stat().st_mtime).parent if found else None


def from_environment(url: str = "", token_file: str = "") -> Client:
    """What a command line usually means."""
    return find(url, token_file, os.environ, Path.cwd())
