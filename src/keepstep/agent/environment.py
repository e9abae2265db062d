"""What a worker finds in its environment: torchrun's variables, and Keepstep's own.

A script that runs under torchrun runs here unchanged. The store at MASTER_ADDR:MASTER_PORT is
hosted by the node's store process and never by a rank, hence TORCHELASTIC_USE_AGENT_STORE.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.model import Generation, JobSpec, Seat
from keepstep.wire import Membership

SECRETS = ("KEEPSTEP_TOKEN", "KEEPSTEP_ORCHESTRATOR_JOURNAL", "PGPASSWORD")
"""The cluster's, and the ways to its journal: not for the programs that an agent starts."""
_SIOCGIFADDR = 0x8915


@functools.cache
def installed(package: str) -> str:
    """Its version on this node; empty: it is not there. Nothing is imported for that."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name not in SECRETS}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for all workers of a job on one node."""

    spec: JobSpec
    agent_socket: Path
    address: str
    job_room: Path
    log_directory: Path
    inherited: Mapping[str, str]
    """The agent's own environment."""

    def rank_log(self, rank: int) -> Path:
        return self.log_directory / f"rank_{rank}.log"


def of_worker(
    around: Surroundings,
    seat: Seat,
    membership: Membership,
    generation: Generation,
    *,
    role: str,
    resume_from: str = "",
) -> dict[str, str]:
    """For a process that has its seat from the start: role worker or joiner."""
    spec = around.spec
    group = seat.rank // spec.ranks_per_node
    store = membership.store
    return {
        **_of_any(around, seat.slot),
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.slot),
        "WORLD_SIZE": str(membership.world_size),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "GROUP_RANK": str(group),
        "NODE_RANK": str(group),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # The same on all ranks of a generation: torch puts it into the rendezvous keys.
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "KEEPSTEP_ROLE": role,
        "KEEPSTEP_INCARNATION": str(seat.incarnation),
        "KEEPSTEP_GENERATION": str(generation),
        "KEEPSTEP_SECRET": membership.secret,
        "KEEPSTEP_STORE": f"{store.host}:{store.port}",
        "KEEPSTEP_MIRROR_STRIDE": str(membership.mirror_stride),
        "KEEPSTEP_RESUME_FROM": resume_from,
    }


def of_standby(around: Surroundings, slot: int) -> dict[str, str]:
    """For a parked process; the rest of its environment comes with its Assign."""
    return {
        **_of_any(around, slot),
        "WORLD_SIZE": str(around.spec.world_size),
        "LOCAL_RANK": str(slot),
        "KEEPSTEP_ROLE": "standby",
        "KEEPSTEP_INCARNATION": "0",
        "KEEPSTEP_GENERATION": "0",
        "KEEPSTEP_RESUME_FROM": "",
    }


def _of_any(around: Surroundings, slot: int) -> dict[str, str]:
    spec = around.spec
    # The agent's own settings are not the worker's.
    known = without_secrets(around.inherited)
    inherited = {k: v for k, v in known.items() if not k.startswith("KEEPSTEP_")}
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        **spec.environment,
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "KEEPSTEP_SOCKET": str(around.agent_socket),
        "KEEPSTEP_ROOM": str(around.job_room),
        "KEEPSTEP_ADDRESS": around.address,
        "KEEPSTEP_LOG_DIR": str(around.log_directory),
        "KEEPSTEP_JOB": spec.job,
        "KEEPSTEP_SLOT": str(slot),
        "KEEPSTEP_STATE_DIR": spec.state_directory,
        "KEEPSTEP_LEVEL": str(spec.standby_level),
        "KEEPSTEP_MODE": spec.policy.mode.value,
        "KEEPSTEP_ENCRYPT": "1" if spec.policy.encrypt_state else "",
    }


def interface_of(address: str) -> str:
    """The network interface that holds an IPv4 address; empty where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                held = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # An interface without an IPv4 address.
            if socket.inet_ntoa(held) == address:
                return name
    return ""
