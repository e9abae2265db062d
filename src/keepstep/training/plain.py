"""Plain values as JSON and back, without loss: learning rates, counters, a scheduler's dictionary.

A value that cannot be carried exactly is refused; nothing is guessed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from keepstep.errors import ConfigError
from keepstep.training.raw import dtype_of, tensor_bytes

_PLAIN = "numbers, strings, lists, tuples, dicts, plain tensors, torch.dtype and torch.device"
FIX_PART = (
    f"make it of {_PLAIN}, or register (save, restore) functions that return plain values and "
    "tensors"
)
FIX_GROUPS = f"keep it out of param_groups, in the optimizer itself, or make it of {_PLAIN}"
FIX_STATE = f"an optimizer whose state is made of {_PLAIN} can be moved, this one cannot"


def plain_digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def encode(value: Any) -> Any:
    """Plain values as JSON without loss. Tags mark what JSON cannot say."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"~": "float", "v": repr(value)}
    if isinstance(value, torch.Tensor) and _has_bytes(value):
        raw = tensor_bytes(value).hex()
        return {"~": "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "v": raw}
    if isinstance(value, torch.dtype):
        return {"~": "dtype", "v": str(value)}
    if isinstance(value, torch.device):
        # Which one of its kind is each rank's own: a joiner keeps its own (shaped_like).
        return {"~": "device", "v": value.type}
    if type(value) in _TUPLES:
        return {"~": _TUPLES[type(value)], "v": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping) and not _unshaped(value):
        return {"~": "dict", "v": [[encode(k), encode(v)] for k, v in value.items()]}
    if (number := _number(value)) is not None:
        return encode(number)
    raise ConfigError(f"state of {_type_of(value)} cannot be moved exactly")


_TUPLES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
"""Others, as named ones, would come back as something else."""


def uncarried(value: Any) -> str:
    """What of it would not come back, by its type; empty: nothing. Never looks at a tensor's bytes:
    a job asks while it trains."""
    if value is None or isinstance(value, bool | int | str | float | torch.dtype | torch.device):
        return ""
    if isinstance(value, torch.Tensor):
        return "" if _has_bytes(value) else _type_of(value)
    if isinstance(value, Mapping):
        inside: Iterator[Any] = (each for pair in value.items() for each in pair)
        return next(filter(None, map(uncarried, inside)), "") or _unshaped(value)
    if type(value) in _TUPLES or isinstance(value, list):
        return next(filter(None, map(uncarried, value)), "")
    return "" if _number(value) is not None else _type_of(value)


def _unshaped(own: Any) -> str:
    """Is it of a type that a receiver could not make again?"""
    try:
        made = shaped_like(own, {})
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return _type_of(own)
    return "" if type(made) is type(own) else _type_of(own)


def _type_of(value: Any) -> str:
    return f"type {type(value).__name__}"


def _number(value: Any) -> Any:
    """A number of NumPy's as Python's, else None. An array of one element is none, and some numbers
    are nothing plainer."""
    if getattr(value, "ndim", None) != 0 or isinstance(value, torch.Tensor):
        return None
    number = value.item()
    return number if isinstance(number, bool | int | float | str) else None


def encode_named(named: Iterable[tuple[str, Any, str]], *, whole: bool) -> dict[str, Any]:
    """Each value with the fix if it cannot be carried. Not `whole`: by what it is, instead."""
    found: dict[str, Any] = {}
    for name, value, fix in named:
        try:
            found[name] = encode(value)
        except ConfigError as error:
            if whole:
                raise ConfigError(f"{name!r}: {error}; {fix}") from error
            found[name] = str(error)
    return found


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Of its own: a DTensor has them in another tensor, a sparse one in several."""
    return tensor.layout is torch.strided and bool(tensor.data_ptr() or not tensor.numel())


def decode(plain: Any) -> Any:
    if isinstance(plain, list):
        return [decode(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    match plain["~"]:
        case "float":
            return float(plain["v"])
        case "tuple":
            return tuple(decode(item) for item in plain["v"])
        case "size":
            return torch.Size(plain["v"])
        case "dtype":
            return dtype_of(plain["v"])
        case "device":
            return torch.device(plain["v"])
        case "dict":
            return {decode(k): decode(v) for k, v in plain["v"]}
        case "tensor":
            dtype = dtype_of(plain["dtype"])
            raw = bytearray(bytes.fromhex(plain["v"]))
            if not raw:
                return torch.zeros(plain["shape"], dtype=dtype)
            return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(plain["shape"])
        case other:
            raise ConfigError(f"unknown tag {other!r} in moved state")


def shaped_like(own: Any, value: Any) -> Any:
    """The value in the container types that this rank's own object uses (Counter, defaultdict), and
    with the device that it uses."""
    if isinstance(own, dict) and isinstance(value, dict):
        shaped = {k: shaped_like(own.get(k), v) for k, v in value.items()}
        if type(own) is dict:
            return shaped
        # Not made by its type: only a copy knows a defaultdict's factory.
        made = copy.copy(own)
        made.clear()
        made.update(shaped)
        return made
    if isinstance(own, list) and isinstance(value, list):
        known = [*own[: len(value)], *[None] * (len(value) - len(own))]
        return [shaped_like(o, v) for o, v in zip(known, value, strict=True)]
    if isinstance(own, torch.device) and isinstance(value, torch.device):
        return own if own.type == value.type else value
    return value
