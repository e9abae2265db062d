"""Where this process sits: read once from the environment that the agent gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep import codec, wire
from keepstep.model import CHECK_STEPS, Endpoint, Generation, JobId, Mode


@dataclass(slots=True)
class Seat:
    """What `build(seat)` may look at. A standby's seat is tentative: its rank is not final yet."""

    rank: int
    world_size: int
    local_rank: int
    tentative: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Everything the agent told this process."""

    job: JobId
    role: str
    """worker (from the start), joiner (took over a seat) or standby (parked, level 2)."""
    rank: int
    world_size: int
    local_rank: int
    slot: int
    incarnation: int
    generation: Generation
    level: int
    socket: str
    room: Path
    address: str
    """Of this node, where other nodes' workers reach this one."""
    secret: str
    store: Endpoint
    mirror_stride: int
    state_directory: Path | None
    resume_from: str
    check_steps: int = 0
    """Compare state for corruption every so many steps; 0: never."""
    observed: bool = False
    """Mode observe: nobody will come to help, so a broken collective is an error like any other."""
    encrypt: bool = False
    """State that leaves this worker for another one is sealed."""
    home: wire.Home | None = None
    """Of a joiner: where the private state of its seat may be found."""
    forms: bool = False
    """Of a joiner: the others connect their groups already."""


def read_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """None outside Keepstep: under plain torchrun the same script just trains."""
    env = os.environ if environment is None else environment
    if not env.get("KEEPSTEP_SOCKET"):
        return None
    host, _, port = env.get("KEEPSTEP_STORE", ":0").rpartition(":")
    state = env.get("KEEPSTEP_STATE_DIR", "")
    home = env.get("KEEPSTEP_HOME", "")
    return Place(
        job=JobId(env["KEEPSTEP_JOB"]),
        role=env.get("KEEPSTEP_ROLE", "worker"),
        rank=int(env.get("RANK", "-1")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        slot=int(env.get("KEEPSTEP_SLOT", "0")),
        incarnation=int(env.get("KEEPSTEP_INCARNATION", "0")),
        generation=Generation(int(env.get("KEEPSTEP_GENERATION", "1"))),
        level=int(env.get("KEEPSTEP_LEVEL", "1")),
        socket=env["KEEPSTEP_SOCKET"],
        room=Path(env["KEEPSTEP_ROOM"]),
        address=env.get("KEEPSTEP_ADDRESS", "127.0.0.1"),
        secret=env.get("KEEPSTEP_SECRET", ""),
        store=Endpoint(host, int(port)),
        mirror_stride=int(env.get("KEEPSTEP_MIRROR_STRIDE", "0")),
        state_directory=Path(state) if state else None,
        resume_from=env.get("KEEPSTEP_RESUME_FROM", ""),
        check_steps=int(env.get(CHECK_STEPS) or 0),
        observed=env.get("KEEPSTEP_MODE", "") == Mode.OBSERVE,
        encrypt=env.get("KEEPSTEP_ENCRYPT", "") == "1",
        home=codec.from_plain(wire.Home, codec.loads(home)) if home else None,
        forms=env.get("KEEPSTEP_FORMS", "") == "1",
    )
