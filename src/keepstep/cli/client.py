"""The operator's side of the orchestrator's HTTP: find it, ask it, follow its decisions.

An orchestrator is found by --orchestrator, by $KEEPSTEP_ORCHESTRATOR, or in the newest local run
directory; its token by --token-file, $KEEPSTEP_TOKEN_FILE, or beside the port in that directory.
One at https:// is verified with the files in $KEEPSTEP_TLS_DIRECTORY, and shown the certificate
there; without that variable, with the system's authorities and no certificate.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from keepstep import codec, tls
from keepstep.errors import ConfigError, Permanent, Unreachable
from keepstep.model import JobSpec

ANSWER_SECONDS_MAX = 10.0
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
class Client:
    """One orchestrator, by URL."""

    url: str
    token: str

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

    def stop(self, job: str, *, save: bool, why: str) -> dict[str, Any]:
        body = {"save": save, "why": why}
        return self._object("POST", f"/v1/jobs/{quote(job, safe='')}/stop", body)

    def migrate(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Move ranks: {"ranks": [2], "to": …, "why": …, "dry_run": …}."""
        return self._object("POST", f"/v1/jobs/{quote(job, safe='')}/migrate", body)

    def drain(self, node: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/drain", body)

    def undrain(self, node: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._object("POST", f"/v1/nodes/{quote(node, safe='')}/undrain", body)

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

    def journal(self, job: str) -> Iterator[str]:
        """The job's chain, line by line."""
        with _Connection(self, ANSWER_SECONDS_MAX) as connection:
            answer = connection.ask("GET", f"/v1/jobs/{quote(job, safe='')}/journal")
            for line in answer:
                yield line.decode()

    def events(self, after: int | None = None) -> Iterator[dict[str, Any] | None]:
        """Decisions as they happen; None for a sign of life. Ends when the orchestrator does."""
        path = "/v1/events" if after is None else f"/v1/events?after={after}"
        with _Connection(self, EVENTS_SECONDS_MAX) as connection:
            answer = connection.ask("GET", path)
            try:
                for line in answer:
                    if line.startswith(b"data: "):
                        yield codec.loads(line[6:])
                    elif line.startswith(b":"):
                        yield None
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"the orchestrator's events ended: {error}") from error

    def _object(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        with _Connection(self, ANSWER_SECONDS_MAX) as connection:
            answer = connection.ask(method, path, body)
            try:
                plain = codec.loads(answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"{self.url} broke off its answer: {error}") from error
        assert isinstance(plain, dict), f"{path} answered {type(plain).__name__}"
        return plain


class _Connection:
    """One request's connection, closed on the way out."""

    def __init__(self, client: Client, seconds_max: float) -> None:
        parts = urlsplit(client.url if "//" in client.url else f"//{client.url}")
        if parts.scheme not in ("", "http", "https") or not parts.hostname or not parts.port:
            raise ConfigError(f"{client.url!r} is no orchestrator; give https://HOST:PORT")
        self._client = client
        where = (parts.hostname, parts.port)
        self._connection = (
            http.client.HTTPSConnection(*where, timeout=seconds_max, context=_secured(os.environ))
            if parts.scheme == "https"
            else http.client.HTTPConnection(*where, timeout=seconds_max)
        )

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._client.token}"}
        data = None if body is None else codec.dumps(body)
        try:
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"no orchestrator answers at {self._client.url} ({error}); "
                "check --orchestrator, or whether the run has ended"
            ) from error
        if answer.status == 429:
            raise Unreachable(f"{self._client.url} has too many requests of this token; wait")
        if answer.status >= 400:
            raise _refusal(answer)
        return answer


def _secured(environ: Mapping[str, str]) -> ssl.SSLContext:
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
