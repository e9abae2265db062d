"""The store process of a node: hosts a TCPStore that outlives workers and the agent.

    python -m keepstep.training.store_host --port-file FILE [--address HOST]

The port is written to the file once the store listens. The process removes keys that have served
(store_sweep.py), does nothing else, and leaves when the file is gone: then its room is gone, too.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from keepstep.training.store_sweep import Sweep

LOOK_SECONDS = 2.0
"""How often it looks whether its room is still there, and at its keys."""
STORE_SECONDS_MAX = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="keepstep.training.store_host")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="where it listens")
    told = parser.parse_args()
    # Names are only for torch's log; do not let a slow name server hold up a rendezvous.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    port = host_store(told.address)
    fresh = told.port_file.with_name(told.port_file.name + ".new")
    fresh.write_text(f"{port}\n", encoding="utf-8")
    fresh.replace(told.port_file)
    sys.stdout.write(f"store at {told.address}:{port}\n")
    mine = told.port_file.stat().st_ino
    sweep = Sweep(_hosted[-1], told.port_file.parent)
    while _is_mine(told.port_file, mine):
        time.sleep(LOOK_SECONDS)
        try:
            sweep.look(time.monotonic())
        except (OSError, RuntimeError) as error:
            # A store with too many keys serves; one that is gone serves nobody.
            sys.stdout.write(f"the keys could not be looked at: {error}\n")
    return 0


_hosted: list[Any] = []
"""The store lives as long as the process."""


def host_store(address: str) -> int:
    """Start the server in this process; returns its port.

    torch's own listener takes IPv6 and IPv4, and looks up each client's name: one that came by
    IPv4 has a mapped address that no hosts file knows, so the server waited 5 s for a name server
    now and then, and every rank with it. Our listener is IPv4 where the address is, and it listens
    there only: whoever gave the node an address of a closed network relies on that.
    """
    from torch.distributed import TCPStore

    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS_MAX),
        master_listen_fd=listener.detach(),
    )
    _hosted.append(store)
    return port


def _is_mine(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
