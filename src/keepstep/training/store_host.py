"""The store process of a node: hosts a TCPStore that outlives workers and the agent.

    python -m keepstep.training.store_host --port-file FILE [--address HOST]

The port is written to the file once the store listens. The process does nothing else, and leaves
when the file is gone: then its room is gone, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path

LOOK_SECONDS = 2.0
"""How often it looks whether its room is still there."""
STORE_SECONDS_MAX = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="keepstep.training.store_host")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="for the log; all are listened on")
    told = parser.parse_args()
    port = host_store(told.address)
    fresh = told.port_file.with_name(told.port_file.name + ".new")
    fresh.write_text(f"{port}\n", encoding="utf-8")
    fresh.replace(told.port_file)
    sys.stdout.write(f"store at {told.address}:{port}\n")
    mine = told.port_file.stat().st_ino
    while _is_mine(told.port_file, mine):
        time.sleep(LOOK_SECONDS)
    return 0


_hosted: list[object] = []
"""The store lives as long as the process."""


def host_store(address: str) -> int:
    """Start the server in this process; returns its port."""
    from torch.distributed import TCPStore

    store = TCPStore(
        address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS_MAX),
    )
    _hosted.append(store)
    return int(store.port)


def _is_mine(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
