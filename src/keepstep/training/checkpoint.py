"""Just-in-time checkpoints: a boundary on disk, complete or not there at all.

    <state>/boundary-<step>-g<generation>/
        shared.pt            tensors by name (loaded with weights_only)
        entry-<rank>.bin     each rank's private entry, behind its checksum
        manifest.json        written last by the writer: world size, digest, plain values

A directory counts only when every file in it is whole, so a death in the middle of saving leaves
the older one the newest.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keepstep import wire
from keepstep.errors import NoHome, Permanent
from keepstep.training.mirror import fetch_from
from keepstep.training.registry import Registry
from keepstep.training.seat import Place

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    path: Path
    boundary: int
    manifest: dict[str, Any]


def rescue(keeper: Keeper, save: wire.Save) -> None:
    """This rank's part of a just-in-time checkpoint: its entry, and as writer all the rest."""
    path = Path(save.path)
    path.mkdir(parents=True, exist_ok=True)
    place = keeper.place
    if all(home.rank != place.rank for home in save.homes):
        _write_entry(path, place.rank, keeper.entry_at(save.boundary))
    if place.rank != save.writer:
        return
    for home in save.homes:
        payload_of, why = fetch_from(place.room, home, place.job, save.boundary, keeper.secret)
        if payload_of is None:
            raise NoHome(f"no private state of rank {home.rank} at {save.boundary}: {why}")
        _write_entry(path, int(home.rank), payload_of)
    _write_shared(path, save.boundary, keeper)


def save(keeper: Keeper) -> Path:
    """A checkpoint that the user asked for, at a boundary, on every rank."""
    place, boundary = keeper.place, keeper.boundary.step
    assert place.state_directory is not None, "checked by the session"
    path = directory(place.state_directory, boundary, keeper.generation)
    path.mkdir(parents=True, exist_ok=True)
    _write_entry(path, place.rank, keeper.entry_at(boundary))
    if place.rank == 0:
        _write_shared(path, boundary, keeper)
    return path


def _write_shared(path: Path, boundary: int, keeper: Keeper) -> None:
    """The writer's part, the manifest last."""
    registry = keeper.registry
    # Nobody compares these bytes with another holder's before they are needed.
    registry.forget_digests()
    tensors = {name: tensor.detach().cpu() for name, tensor in registry.shared()}
    partial = path / "shared.pt.partial"
    torch.save(tensors, partial)
    os.replace(partial, path / "shared.pt")
    manifest = {
        "boundary": boundary,
        "world_size": keeper.place.world_size,
        "records": keeper.log.records(),
        "digest": registry.shared_digest(),
        "layout": registry.layout(),
        "plain": registry.plain(),
        "private": sorted(registry.private),
    }
    _write_whole(path / "manifest.json", json.dumps(manifest).encode())


def newest(place: Place) -> Found | None:
    """The newest complete checkpoint: the one that the orchestrator names, else by number."""
    if place.resume_from:
        found = _complete(Path(place.resume_from), place.world_size)
        if found is not None:
            return found
    if place.state_directory is None or not place.state_directory.exists():
        return None
    candidates = [
        found
        for path in place.state_directory.glob("boundary-*")
        if (found := _complete(path, place.world_size)) is not None
    ]
    return max(candidates, key=lambda found: found.boundary, default=None)


def load(found: Found, registry: Registry, rank: int) -> bytes:
    """Shared state in, verified; returns this rank's private entry."""
    manifest = found.manifest
    registry.private = set(manifest["private"])
    registry.conform([(n, d, s) for n, d, s in manifest["layout"]])
    tensors = torch.load(found.path / "shared.pt", weights_only=True)
    with torch.no_grad():
        for name, tensor in registry.shared():
            tensor.copy_(tensors[name])
    registry.load_plain(manifest["plain"])
    if registry.shared_digest() != manifest["digest"]:
        raise Permanent(
            f"{found.path} does not hold the state that its manifest names; "
            "move it away to start from an older one"
        )
    payload = _read_entry(found.path, rank)
    assert payload is not None, "a complete checkpoint has every entry"
    return payload


def directory(state: Path, boundary: int, generation: int) -> Path:
    return state / f"boundary-{boundary}-g{generation}"


def remove_rescues(place: Place) -> None:
    """The job is through; what was saved on its way is of no more use."""
    if place.state_directory is not None:
        for path in place.state_directory.glob("boundary-*"):
            shutil.rmtree(path, ignore_errors=True)


def _complete(path: Path, world_size: int) -> Found | None:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        whole = (path / "shared.pt").exists() and manifest["world_size"] == world_size
        if whole and all(_read_entry(path, rank) is not None for rank in range(world_size)):
            return Found(path, int(manifest["boundary"]), manifest)
    except (OSError, ValueError, KeyError):
        return None
    return None


def _write_entry(path: Path, rank: int, payload: bytes) -> None:
    _write_whole(path / f"entry-{rank}.bin", _CHECKSUM.pack(zlib.crc32(payload)) + payload)


def _read_entry(path: Path, rank: int) -> bytes | None:
    try:
        raw = (path / f"entry-{rank}.bin").read_bytes()
    except OSError:
        return None
    payload = raw[_CHECKSUM.size :]
    if len(raw) < _CHECKSUM.size or _CHECKSUM.unpack_from(raw)[0] != zlib.crc32(payload):
        return None
    return payload


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
