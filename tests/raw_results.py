"""Raw results that are part of the project: what a document may be made from."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.record import RESULTS


def committed(paths: Sequence[Path]) -> list[Path]:
    """Those that git knows: somebody's own ones, not yet committed, are no part of any document."""
    known = subprocess.run(
        ["git", "-C", str(RESULTS), "ls-files"], capture_output=True, text=True, check=False
    ).stdout.split()
    return [path for path in paths if path.name in known or not known]
