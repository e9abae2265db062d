"""Just-in-time checkpoints: a boundary on disk, complete or not there at all.

    <state>/boundary-<step>-g<generation>/
        shared-<portion>.pt    tensors by name (loaded with weights_only)
        shared-<portion>.json  written after them: digest, layout, plain values, step records
        entry-<rank>.bin       each rank's private entry, behind its checksum
        manifest.json          what holds for all: world size, portions, what is private

A directory counts only when every file in it is whole, so a death in the middle of saving leaves
the older one the newest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keepstep import portion as portions
from keepstep import wire
from keepstep.errors import NoHome, Permanent
from keepstep.training import halfway
from keepstep.training.covering import make_again
from keepstep.training.digest import digest
from keepstep.training.mirror import fetch_from
from keepstep.training.raw import bytes_tensor, tensor_view
from keepstep.training.seat import Place
from keepstep.training.side import exchange_rows

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_CHECKSUM = struct.Struct("<I")
NAME_CHARACTERS_MAX = 100
LOOKS_MAX = 13
LOOK_AGAIN_SECONDS = 5.0
"""A minute in all: by then a network file system shows all nodes the same."""
_TROUBLE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Whoever gets one of these does not know what is there."""


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    path: Path
    boundary: int
    manifest: dict[str, Any]


def rescue(keeper: Keeper, save: wire.Save) -> None:
    """This rank's part of a just-in-time checkpoint: its entry, and the portions it is to write."""
    path = Path(save.path)
    path.mkdir(parents=True, exist_ok=True)
    place = keeper.place
    if all(home.rank != place.rank for home in save.homes):
        _write_entry(path, place.rank, keeper.homes.get(save.boundary))
    for portion, writer in save.writers.items():
        if writer == place.rank:
            _write_portion(path, save.boundary, keeper, portion)
    # By name, because an order's keys arrive sorted.
    if save.writers and save.writers[min(save.writers)] == place.rank:
        for home in save.homes:
            payload_of, why = fetch_from(place, home, save.boundary, keeper.secret)
            if payload_of is None:
                raise NoHome(f"no private state of rank {home.rank} at {save.boundary}: {why}")
            _write_entry(path, int(home.rank), payload_of)
        _write_manifest(path, save.boundary, keeper)
    _keep_names(path)


def save(keeper: Keeper) -> Path:
    """A checkpoint that the user asked for, at a boundary, on every rank."""
    place, boundary = keeper.place, keeper.boundary.step
    assert place.state_directory is not None, "checked by the session"
    path = directory(place.state_directory, boundary, keeper.generation)
    path.mkdir(parents=True, exist_ok=True)
    _write_entry(path, place.rank, keeper.homes.get(boundary))
    for portion in keeper.registry.portions():
        if min(portions.holders_of(portion)) == place.rank:
            _write_portion(path, boundary, keeper, portion)
    if place.rank == 0:
        _write_manifest(path, boundary, keeper)
    _keep_names(path)
    return path


def has_all_files(path: Path) -> bool:
    """Is every rank's part there? A file has its name only once it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files = map(_file_name, manifest["portions"])
        wanted = {f"{name}{end}" for name in files for end in (".pt", ".json")}
        wanted |= {f"entry-{rank}.bin" for rank in range(manifest["world_size"])}
        # One listing: of a large job these are more files than a step has time to open.
        return wanted <= set(os.listdir(path))
    except (OSError, ValueError, KeyError):
        return False


def _write_portion(path: Path, boundary: int, keeper: Keeper, portion: str) -> None:
    """One portion as this rank holds it, or its mirror keeps it; its description last."""
    registry = keeper.registry
    mirrored = portion not in registry.portions()
    # A boundary that was reached half-way: what an owner updated is right with itself alone.
    half = keeper.boundary.unsynced
    unsynced = half and portion in registry.synced()
    beside = registry.companions(portion) if half and not mirrored else []
    if mirrored:
        assert keeper.covering is not None, "who is to write another rank's portion covers it"
        pieces = keeper.covering.pieces(portion, boundary)
        tensors = {f"{at:06}": bytes_tensor(piece) for at, piece in enumerate(pieces)}
    else:
        # Nobody compares these bytes with another holder's before they are needed.
        registry.forget_digests()
        held = [*registry.shared(portion), *beside]
        tensors = {name: tensor.detach().cpu() for name, tensor in held}
    file = path / f"{_file_name(portion)}.pt"
    partial = file.with_name(file.name + ".partial")
    keeper.reach("portion")
    torch.save(tensors, partial)
    _sync(partial)
    os.replace(partial, file)
    description = {
        "portion": portion,
        "boundary": boundary,
        "mirrored": mirrored,
        "unsynced": unsynced,
        "beside": {name: digest(tensor) for name, tensor in beside},
        "digest": "" if mirrored or unsynced else registry.shared_digests()[portion],
        "layout": [] if mirrored else registry.layout(portion),
        "plain": registry.plain(),
        "records": keeper.log.records(),
    }
    _write_whole(file.with_suffix(".json"), json.dumps(description).encode())


def _write_manifest(path: Path, boundary: int, keeper: Keeper) -> None:
    registry = keeper.registry
    manifest = {
        "boundary": boundary,
        "world_size": keeper.place.world_size,
        "portions": registry.holders.all(),
        "private": sorted(registry.private),
        "late": keeper.recorder.late,
    }
    _write_whole(path / "manifest.json", json.dumps(manifest).encode())


def agree(keeper: Keeper) -> None:
    """Find the checkpoint to go on from, the same one on all ranks. A world collective.

    Each rank looks for itself, and file systems may show them different things for a while. Whoever
    went on from another boundary would train on, with weights of its own.
    """
    if not keeper.has_state:
        return
    rows: list[Any] = []
    for look in range(LOOKS_MAX):
        if look:
            time.sleep(LOOK_AGAIN_SECONDS)
        found, trouble = None, ""
        try:
            found = newest(keeper.place)
        except OSError as error:
            trouble = str(error)[:300]
        row = [found.path.name, found.boundary] if found is not None else []
        rows = exchange_rows(keeper.groups, [row, trouble])
        if rows[0][1] == "" and all(other == rows[0] for other in rows):
            keeper.saved = found
            return
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), len(rows) - 1)
    seen = [trouble or (row[0] if row else "none") for row, trouble in rows]
    raise Permanent(
        f"ranks have not found the same checkpoint to go on from: rank 0 finds {seen[0]}, rank "
        f"{other} finds {seen[other]}; give all nodes the same state directory, and run it again"
    )


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
    return max(candidates, key=_order, default=None)


def _order(found: Found) -> tuple[int, int, str]:
    """Of two at one boundary the later generation's; a longer name has the larger number."""
    return found.boundary, len(found.path.name), found.path.name


def load(found: Found, keeper: Keeper) -> bytes:
    """Shared state in, verified, portion by portion; returns this rank's private entry."""
    registry, rank = keeper.registry, keeper.place.rank
    registry.private = set(found.manifest["private"])
    keeper.recorder.late = bool(found.manifest.get("late", False))
    wanted: dict[str, str] = {}
    # What a rank updated itself comes last: it is newer than what all hold, if a step was half-way.
    for portion in sorted(registry.portions(), key=lambda p: -len(portions.holders_of(p))):
        if portion not in found.manifest["portions"]:
            raise Permanent(
                f"{found.path} was written by a job cut in another way: it has no portion "
                f"{portion}, only {', '.join(found.manifest['portions'][:8])}"
            )
        wanted[portion] = _load_portion(found, keeper, portion)
    if unsynced := [portion for portion, known in wanted.items() if not known]:
        halfway.finish_loaded(keeper, unsynced)
    now = registry.shared_digests()
    if any(known and now[portion] != known for portion, known in wanted.items()):
        raise Permanent(
            f"{found.path} does not hold the state that its manifest names; "
            "move it away to start from an older one"
        )
    payload = _read_entry(found.path, rank)
    assert payload is not None, "a complete checkpoint has every entry"
    return payload


def _load_portion(found: Found, keeper: Keeper, portion: str) -> str:
    """One portion in; returns the digest that it must have, nothing if it is not synced yet."""
    registry = keeper.registry
    description = json.loads((found.path / f"{_file_name(portion)}.json").read_bytes())
    tensors = torch.load(found.path / f"{_file_name(portion)}.pt", weights_only=True)
    if description["mirrored"]:
        pieces = (tensor_view(tensors[name]) for name in sorted(tensors))
        make_again(keeper, portion, pieces, found.boundary)
    else:
        registry.conform([(n, d, s, c) for n, d, s, c in description["layout"]], portion)
        with torch.no_grad():
            for name, tensor in registry.shared(portion):
                tensor.copy_(tensors[name])
            for name, tensor in registry.companions(portion):
                if name in description["beside"]:
                    tensor.copy_(tensors[name])
                    if digest(tensor) != description["beside"][name]:
                        raise Permanent(f"{name} in {found.path} is not what was written")
    if portion == registry.holders.narrowest(keeper.place.rank):
        registry.load_plain(description["plain"], hidden=not description["mirrored"])
        keeper.log.adopt(description["records"])
    if description["unsynced"]:
        return ""
    # What a mirror kept was checked piece by piece.
    return str(description["digest"] or registry.shared_digests()[portion])


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
        whole = manifest["world_size"] == world_size and all(
            _is_whole(path, portion, manifest["boundary"]) for portion in manifest["portions"]
        )
        if whole and all(_read_entry(path, rank) is not None for rank in range(world_size)):
            return Found(path, int(manifest["boundary"]), manifest)
    except OSError as error:
        if error.errno in _TROUBLE:
            raise
    except (ValueError, KeyError):
        pass
    return None


def _is_whole(path: Path, portion: str, boundary: int) -> bool:
    description = json.loads((path / f"{_file_name(portion)}.json").read_bytes())
    fits = description["portion"] == portion and description["boundary"] == boundary
    return fits and (path / f"{_file_name(portion)}.pt").exists()


def _file_name(portion: str) -> str:
    """A portion's name as a file name; a long one by its digest."""
    if len(portion) > NAME_CHARACTERS_MAX:
        portion = hashlib.sha256(portion.encode()).hexdigest()[:32]
    return f"shared-{portion.replace('/', '_')}"


def _write_entry(path: Path, rank: int, payload: bytes) -> None:
    _write_whole(path / f"entry-{rank}.bin", _CHECKSUM.pack(zlib.crc32(payload)) + payload)


def _read_entry(path: Path, rank: int) -> bytes | None:
    try:
        raw = (path / f"entry-{rank}.bin").read_bytes()
    except FileNotFoundError:
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


def _keep_names(path: Path) -> None:
    """Of this rank's files, and of their directory: those are written by themselves."""
    for directory in (path, path.parent):
        # Some file systems have no such thing; none loses whole files for it.
        with contextlib.suppress(OSError):
            _sync(directory)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
