"""Strict JSON for frozen dataclasses: the one way in which records cross a process or reach a disk.

Decoding refuses what the type does not say: an unknown key, a missing one without a default, a
wrong type, a list that is too long. Nothing here executes what it reads (never pickle).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union

from keepstep.errors import WireError

T = TypeVar("T")

ITEMS_MAX = 1_000_000
"""No list or mapping in a record is longer: a hostile peer must not make us allocate for ever."""
INTEGER_BOUND = 2**63


def to_plain(value: object) -> Any:
    """A JSON-able picture of `value`; dataclasses become objects, tuples become lists."""
    kind: Any = type(value)
    if kind in _AS_IS:
        return value
    # Orders of large jobs hold thousands of small records: those go without a call per scalar.
    if kind is tuple or kind is list:
        items: Any = value
        return [item if type(item) in _AS_IS else to_plain(item) for item in items]
    if kind is dict:
        return {str(key): to_plain(item) for key, item in typing.cast(Any, value).items()}
    shape = _SHAPES.get(kind)
    if shape is None:
        if isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, frozenset):
            return sorted(to_plain(item) for item in value)
        if isinstance(value, Mapping):
            return {str(key): to_plain(item) for key, item in value.items()}
        assert dataclasses.is_dataclass(kind), f"{kind.__name__} has no wire form"
        shape = _shape(kind)
    names, values = shape
    plain = dict(zip(names, values(value), strict=True))
    for name, item in plain.items():
        if type(item) not in _AS_IS:
            plain[name] = to_plain(item)
    return plain


@dataclasses.dataclass(frozen=True, slots=True)
class Older:
    """What a reader of an older version knows."""

    fields: Mapping[str, str]
    """Of its records, by name, between spaces."""
    members: Mapping[str, str]
    """Of its enumerations."""
    needed: frozenset[str] = frozenset()
    """Fields that it does not know, as "Record.field", and that must not be left out once they say
    anything: it would take the rest for something else."""


def to_older(value: object, reader: Older) -> Any:
    """`to_plain` for a reader of an older version: what it does not know is left out.

    A record or a member that it has no word for, or a field that it needs, is a WireError: this
    cannot be said to it.
    """
    name = type(value).__name__
    if isinstance(value, Enum):
        if str(value.value) not in reader.members.get(name, "").split():
            raise WireError(f"an older version has no word for {name} {value.value!r}")
        return value.value
    if dataclasses.is_dataclass(value):
        if name not in reader.fields:
            raise WireError(f"an older version has no word for {name}")
        for field in dataclasses.fields(value):
            if f"{name}.{field.name}" in reader.needed and getattr(value, field.name):
                raise WireError(f"an older version has no word for {name}.{field.name}")
        known = reader.fields[name].split()
        return {each: to_older(getattr(value, each), reader) for each in known}
    if isinstance(value, tuple | list):
        return [to_older(item, reader) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_older(item, reader) for key, item in value.items()}
    return to_plain(value)


_AS_IS = frozenset({type(None), bool, int, float, str})
_SHAPES: dict[Any, tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {}
"""Of the dataclasses seen so far: the names of their fields, and how to read them all at once."""


def from_plain(kind: type[T], plain: object) -> T:
    """Build a `kind` from decoded JSON, or raise WireError with the path to what is wrong."""
    reader: _Reader = _reader(typing.cast(Any, kind))
    return typing.cast(T, reader(plain, kind.__name__))


def dumps(plain: object) -> bytes:
    """Canonical bytes: sorted keys and no spaces, so that equal records hash equally."""
    return _ENCODER.encode(plain).encode()


def loads(data: bytes | str) -> Any:
    """Decode JSON; anything malformed is a WireError, never a crash.

    Stricter than Python's own reader: UTF-8 only, no NaN and no Infinity (nobody could write them
    down again), no half of a surrogate pair (nobody could send it on).
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        plain = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(plain, ensure_ascii=False).encode()
        return plain
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {_shortened(error)}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _shortened(error: Exception) -> str:
    # What an encoding error quotes may be as long as the whole message.
    return str(error)[:200]


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
)
"""Made once: the journal encodes with every decision. Nothing plain holds itself."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


_Path = Any
"""Where a value is: a name, or (where its owner is, the name of its field). Put together only for
who has to be told: messages are many, and nearly all of them are right."""
_Reader = Callable[[object, _Path], Any]


def _shape(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(field.name for field in dataclasses.fields(kind))
    # attrgetter reads many fields in one call, but gives a bare value for one and refuses none.
    read: Callable[[Any], tuple[Any, ...]] = (
        operator.attrgetter(*names)
        if len(names) > 1
        else lambda value: tuple(getattr(value, name) for name in names)
    )
    return _SHAPES.setdefault(kind, (names, read))


@functools.cache
def _reader(kind: Any) -> _Reader:
    """The function that reads one type. Cached: types are few and messages are many."""
    if isinstance(kind, typing.NewType):
        return _reader(kind.__supertype__)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return _one_of(frozenset(typing.get_args(kind)))
    if origin in (Union, types.UnionType):
        return _union(typing.get_args(kind))
    if origin in (tuple, frozenset):
        return _sequence(origin, typing.get_args(kind))
    if origin in (dict, Mapping):
        return _mapping(*typing.get_args(kind))
    if kind in _SCALARS:
        return _SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    assert dataclasses.is_dataclass(kind), f"{kind} cannot be read from the wire"
    return _dataclass(kind)


def _dataclass(kind: Any) -> _Reader:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    readers: dict[str, _Reader] = {}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(plain: object, path: _Path) -> Any:
        if not isinstance(plain, dict):
            raise WireError(f"{_at(path)}: expected an object, got {type(plain).__name__}")
        if not readers:
            readers.update({name: _reader(hints[name]) for name in fields})
        keys = plain.keys()
        if not keys <= readers.keys():
            raise WireError(f"{_at(path)}: unknown key {_quoted(min(keys - readers.keys()))}")
        if not required <= keys:
            raise WireError(f"{_at(path)}: missing key {min(required - keys)!r}")
        return kind(**{k: readers[k](v, (path, k)) for k, v in plain.items()})

    return read


def _union(options: tuple[Any, ...]) -> _Reader:
    plain_options = [o for o in options if o is not type(None)]
    optional = len(plain_options) < len(options)

    def read(plain: object, path: _Path) -> Any:
        if plain is None and optional:
            return None
        problem: WireError | None = None
        for option in plain_options:
            try:
                return _reader(option)(plain, path)
            except WireError as error:
                problem = error
        raise problem or WireError(f"{_at(path)}: null is not allowed")

    return read


def _sequence(origin: Any, args: tuple[Any, ...]) -> _Reader:
    def read(plain: object, path: _Path) -> Any:
        if not isinstance(plain, list):
            raise WireError(f"{_at(path)}: expected a list, got {type(plain).__name__}")
        if len(plain) > ITEMS_MAX:
            raise WireError(f"{_at(path)}: {len(plain)} items, at most {ITEMS_MAX}")
        if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
            if len(plain) != len(args):
                raise WireError(f"{_at(path)}: expected {len(args)} items, got {len(plain)}")
            return tuple(_reader(a)(p, path) for a, p in zip(args, plain, strict=True))
        item = _reader(args[0])
        return origin(item(p, path) for p in plain)

    return read


def _mapping(key: Any, value: Any) -> _Reader:
    def read(plain: object, path: _Path) -> Any:
        if not isinstance(plain, dict):
            raise WireError(f"{_at(path)}: expected an object, got {type(plain).__name__}")
        if len(plain) > ITEMS_MAX:
            raise WireError(f"{_at(path)}: {len(plain)} items, at most {ITEMS_MAX}")
        item = _reader(value)
        key_reader = _key_reader(key)
        return {key_reader(k, path): item(v, (path, k)) for k, v in plain.items()}

    return read


def _key_reader(key: Any) -> _Reader:
    """JSON keys are strings; mappings keyed by a rank read them back as numbers."""
    while isinstance(key, typing.NewType):
        key = key.__supertype__
    if key is not int:
        return _reader(key)

    def read(plain: object, path: _Path) -> Any:
        try:
            return int(str(plain))
        except ValueError:
            raise WireError(f"{_at(path)}: key {_quoted(plain)} is not a number") from None

    return read


def _enum(kind: Any) -> _Reader:
    def read(plain: object, path: _Path) -> Any:
        try:
            # Only a scalar: the enum's own error would quote all of a list.
            return kind(plain if isinstance(plain, str | int) else None)
        except ValueError:
            raise WireError(f"{_at(path)}: {_quoted(plain)} is not a {kind.__name__}") from None

    return read


def _one_of(allowed: frozenset[object]) -> _Reader:
    def read(plain: object, path: _Path) -> Any:
        if not isinstance(plain, str | int) or plain not in allowed:
            known = sorted(map(str, allowed))
            raise WireError(f"{_at(path)}: {_quoted(plain)} is not one of {known}")
        return plain

    return read


def _exactly(kind: type) -> _Reader:
    def read(plain: object, path: _Path) -> Any:
        if not isinstance(plain, kind):
            raise WireError(f"{_at(path)}: expected {kind.__name__}, got {type(plain).__name__}")
        return kind(plain)

    return read


def _at(path: _Path) -> str:
    return path if isinstance(path, str) else f"{_at(path[0])}.{path[1][:40]}"


def _quoted(plain: object) -> str:
    """What was sent, as an error may repeat it: hostile text is long, and lists are deep."""
    text = repr(plain) if isinstance(plain, str | int | float | None) else type(plain).__name__
    return text if len(text) <= 80 else f"{text[:80]}…"


def _integer(plain: object, path: _Path) -> int:
    """Within 64 bits: JSON has no bound, and a number of 4,000 digits is nobody's step."""
    # Not isinstance: bool is an int in Python, but a flag is no number on the wire.
    if type(plain) is not int:
        raise WireError(f"{_at(path)}: expected int, got {type(plain).__name__}")
    if not -INTEGER_BOUND <= plain < INTEGER_BOUND:
        raise WireError(f"{_at(path)}: a number beyond 64 bits")
    return plain


def _float(plain: object, path: _Path) -> float:
    """A number that can be written down again: 1e999 reads as infinity."""
    if type(plain) is int:
        return float(_integer(plain, path))
    if type(plain) is not float:
        raise WireError(f"{_at(path)}: expected float, got {type(plain).__name__}")
    if not math.isfinite(plain):
        raise WireError(f"{_at(path)}: a number beyond all floats")
    return plain


_SCALARS: dict[Any, _Reader] = {
    str: _exactly(str),
    int: _integer,
    float: _float,
    bool: _exactly(bool),
}
