"""What a route of the HTTP interface is, which one a request means, and what its body may hold.

The table of all routes is at the end of api.py. A request is served, its fields are checked and
docs/openapi.json is written from that one table, so that none of them can say something else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.orchestrator.http import BadRequest, Reply, Request
from keepstep.orchestrator.tokens import Caller, Role

KEY_CHARS_MAX = 200
"""Of an Idempotency-Key: it is kept in the journal."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request's object."""

    kinds: tuple[type, ...]
    about: str
    items: type | None = None
    """Of a list's items."""
    one_of: tuple[str, ...] = ()
    required: bool = False
    """It must be there, and not be empty."""
    above: float | None = None
    most: float | None = None


Fields = Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has found its route."""

    request: Request
    names: Mapping[str, str]
    """What stands in the path where the route has {names}."""
    body: Mapping[str, Any]
    """The request's object, if the route has one; checked, if it has fields."""
    caller: Caller
    """Who asks; of an open route, nobody in particular."""

    @property
    def key(self) -> str:
        key = self.request.headers.get("idempotency-key", "")
        if len(key) > KEY_CHARS_MAX:
            raise BadRequest(400, "a long Idempotency-Key", f"at most {KEY_CHARS_MAX} characters")
        # One project's keys are none of another's.
        return f"{self.caller.project}:{key}" if key and self.caller.project else key


@dataclass(frozen=True, slots=True)
class Route:
    """One method at one path."""

    method: str
    path: str
    """`/v1/jobs/{job}`: a name in braces stands for one part."""
    handler: Callable[[Any, Call], Awaitable[Reply]]
    about: str
    answer: str
    """The name of its answer's schema in openapi.py, or the content type of a stream."""
    fields: Fields = field(default_factory=dict)
    body: str = ""
    """The name of the schema of a body that the handler itself checks."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    keyed: bool = False
    """Takes an Idempotency-Key."""
    conflicts: bool = False
    """May answer 409: it makes no sense as things stand."""
    open: bool = False
    """Needs no token."""
    role: Role = Role.ADMIN
    """What a caller must be; closed unless it says otherwise."""
    shared: bool = False
    """It acts on what all projects share: not for a project's token."""


def of_node(
    verb: str, handler: Callable[[Any, Call], Awaitable[Reply]], about: str, fields: Fields
) -> Route:
    """What an operator asks for about one node, which all projects share."""
    path = f"/v1/nodes/{{node}}/{verb}"
    role = Role.OPERATOR
    return Route(
        "POST", path, handler, about, "Followed", fields, keyed=True, role=role, shared=True
    )


def served_at(routes: Iterable[Route], path: str) -> dict[str, tuple[Route, dict[str, str]]]:
    """By method, the routes that serve a path and what their {names} stand for."""
    given = _parts(path)
    found = {}
    for route in routes:
        wanted = _parts(route.path)
        if len(wanted) != len(given):
            continue
        names = {w[1:-1]: g for w, g in zip(wanted, given, strict=True) if w.startswith("{")}
        if all(w == g or w.startswith("{") for w, g in zip(wanted, given, strict=True)):
            found[route.method] = (route, names)
    return found


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def read_body(request: Request, route: Route) -> Any:
    """What the route's handler gets to see of it."""
    if route.fields:
        return read_fields(request, route.fields)
    return request.json() if route.body else {}


def read_fields(request: Request, fields: Fields) -> dict[str, Any]:
    """The request's object: with these fields at most, each of its kind and within its bounds."""
    body = request.json()
    if not isinstance(body, dict):
        raise BadRequest(400, "the body is no object", f"send {{…}} with {', '.join(fields)}")
    for name, value in body.items():
        if name not in fields:
            raise BadRequest(400, f"unknown field {name!r}", f"known are: {', '.join(fields)}")
        _check(name, value, fields[name])
    for name, wanted in fields.items():
        if wanted.required and body.get(name) in (None, "", []):
            raise BadRequest(400, f"{name} is missing", f'send "{name}": {wanted.about}')
    return body


def _check(name: str, value: Any, wanted: Field) -> None:
    if type(value) not in wanted.kinds:
        kinds = " or ".join(kind.__name__ for kind in wanted.kinds)
        raise BadRequest(400, f"{name} is {type(value).__name__}", f"give {kinds}")
    if wanted.items is not None and any(type(item) is not wanted.items for item in value):
        what = {int: "numbers", str: "texts"}[wanted.items]
        raise BadRequest(400, f"{name} is a list of {what}", f'send "{name}": {wanted.about}')
    if wanted.one_of and value not in wanted.one_of:
        known = ", ".join(wanted.one_of)
        raise BadRequest(400, f"no {name} is called {value!r}", f"known are: {known}")
    low, high = wanted.above, wanted.most
    if (low is not None and value <= low) or (high is not None and value > high):
        raise BadRequest(400, f"{name} is out of range", f"give more than {low:g}, up to {high:g}")
