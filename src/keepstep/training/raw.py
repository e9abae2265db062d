"""Tensors as bytes and back. By address, because torch's own way needs numpy installed."""

from __future__ import annotations

import ctypes

import torch

from keepstep.errors import Permanent

_C_INT_MAX = 2**31 - 1


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes."""
    # Asked first, because a step comes here for each private tensor.
    plain = tensor.is_cpu and tensor.is_contiguous()
    flat = tensor if plain else tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    # The faster way counts in C's int: of more it would raise, or cut off without a word.
    return (
        ctypes.string_at(flat.data_ptr(), size) if size <= _C_INT_MAX else bytes(tensor_view(flat))
    )


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, in place. The view keeps it alive."""
    assert tensor.is_cpu and tensor.is_contiguous(), "others have no such bytes"
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    held = (ctypes.c_char * size).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(held).cast("B")


def size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def dtype_of(name: str) -> torch.dtype:
    """By what torch calls it, or the same without `torch.`."""
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def bytes_tensor(raw: bytes | memoryview) -> torch.Tensor:
    """A tensor of its own with these bytes."""
    # Uneven shards leave a rank with nothing, which frombuffer refuses.
    return torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]


def bytes_in_place(raw: memoryview) -> torch.Tensor:
    """The same bytes as a tensor, wherever they lie; a copy of those that nobody may write to."""
    if raw.readonly or not len(raw):
        return bytes_tensor(raw)
    return torch.frombuffer(raw, dtype=torch.uint8)


def fill_from_bytes(tensor: torch.Tensor, raw: bytes) -> None:
    """Write raw bytes back into a tensor in place."""
    if len(raw) != tensor.numel() * tensor.element_size():
        raise Permanent(f"{len(raw)} bytes do not fit a tensor of shape {tuple(tensor.shape)}")
    if raw:
        with torch.no_grad():
            tensor.copy_(bytes_tensor(raw).view(tensor.dtype).reshape(tensor.shape))
