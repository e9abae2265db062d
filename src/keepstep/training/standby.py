"""A standby's wait for a seat, and where a process finds its store.

A parked process holds no rank and no peers. It leaves the park only with an Assign in hand, which
it writes into the environment, so that from then on it looks like any other worker of its seat.
"""

from __future__ import annotations

import mmap
import socket

import torch.distributed as dist

from keepstep.errors import ConfigError
from keepstep.sealed import store_prefix
from keepstep.training import entry
from keepstep.training.digest import byte_view
from keepstep.training.pointed_store import connect
from keepstep.training.randomness import read_randomness
from keepstep.training.registry import Registry
from keepstep.training.seat import Place, read_place

_STORE_SECONDS_MAX = 60.0


def park() -> Place:
    """Block until this standby is given a seat; returns the seat's place."""
    _import_late_modules()
    entry.take_seat(entry.wait_for_seat())
    seated = read_place()
    if seated is None:
        raise ConfigError("the environment lost KEEPSTEP_SOCKET while this standby was parked")
    return seated


def _import_late_modules() -> None:
    """What Python and numpy import only at first use would be imported in the pause: 10 ms."""
    socket.getaddrinfo("127.0.0.1", 0)
    read_randomness()


def own_pages(registry: Registry) -> None:
    """Make the memory of every tensor this process's own, page by page.

    After a fork, parent and child share their pages until one of them writes. A standby whose
    loader workers were forked would pay for that when state arrives: 1 GB took 1.1 s longer.
    """
    for _, tensor in registry.tensors():
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            byte_view(tensor)[:: mmap.PAGESIZE].add_(0)


def empty_store() -> dist.Store:
    """For a process without peers."""
    return dist.HashStore()


def job_store(place: Place) -> dist.Store:
    """The store of this generation, hosted outside the workers."""
    store = connect(place.store, _STORE_SECONDS_MAX)
    return dist.PrefixStore(f"{store_prefix(place.secret)}/{place.generation}", store)
