"""Plain values as JSON and back, without loss: learning rates, counters, a scheduler's dictionary.

A value that cannot be carried exactly is refused; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from keepstep.errors import ConfigError
from keepstep.training.raw import tensor_bytes


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
    if isinstance(value, tuple):
        return {"~": "tuple", "v": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"~": "dict", "v": [[encode(k), encode(v)] for k, v in value.items()]}
    # A number of NumPy's. An array of one element is none, and some numbers are nothing plainer.
    if getattr(value, "ndim", None) == 0 and type(number := value.item()) is not type(value):
        return encode(number)
    raise ConfigError(
        f"state of type {type(value).__name__} cannot be moved exactly; make it of numbers, "
        "strings, lists, tuples, dicts and plain tensors, or register (save, restore) functions "
        "that return plain values and tensors"
    )


def check_carried(name: str, value: Any) -> None:
    """Refuse what would not come back, and say whose it is."""
    try:
        decode(json.loads(json.dumps(encode(value))))
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from error


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
        case "dict":
            return {decode(k): decode(v) for k, v in plain["v"]}
        case "tensor":
            dtype = getattr(torch, plain["dtype"].removeprefix("torch."))
            raw = bytearray(bytes.fromhex(plain["v"]))
            if not raw:
                return torch.zeros(plain["shape"], dtype=dtype)
            return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(plain["shape"])
        case other:
            raise ConfigError(f"unknown tag {other!r} in moved state")


def shaped_like(own: Any, value: Any) -> Any:
    """The value in the container types that this rank's own object uses (Counter, OrderedDict)."""
    if isinstance(own, dict) and isinstance(value, dict):
        shaped = {k: shaped_like(own.get(k), v) for k, v in value.items()}
        return shaped if type(own) is dict else type(own)(shaped)
    return value
