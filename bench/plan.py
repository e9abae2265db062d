"""What one run does: the model, how it is spread, how many steps, from which seed. No torch here.

The plan lies as a file in the run's directory, and every worker of every arm reads that same file:
no arm has a say in what is trained.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from keepstep.errors import ConfigError

PARALLEL = ("ddp", "fsdp", "hsdp", "zero1")
SIZES = {
    # width, layers, heads
    "1m": (128, 3, 4),
    "3m": (256, 4, 4),
    "10m": (384, 6, 6),
    "100m": (768, 14, 12),
}
"""By parameters. 1m is for tests alone; 100m is for what moves much state."""
BATCH = 2
"""So few that a step is short, and most of it is traffic between the ranks."""
SECONDS = 100.0
"""Of a whole run, fault-free."""
SEED = 1
"""Of weights and data."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of one arm."""

    parallel: str = "ddp"
    size: str = "3m"
    world: int = 4
    steps: int = 100
    batch: int = BATCH
    """Samples per rank and step."""
    context: int = 64
    """Characters per sample."""
    seed: int = SEED
    directory: str = "."
    """Of this run: the plan itself, the truth, logs and checkpoints."""

    def __post_init__(self) -> None:
        if self.parallel not in PARALLEL:
            raise ConfigError(f"parallel is one of {', '.join(PARALLEL)}, not {self.parallel!r}")
        if self.size not in SIZES:
            raise ConfigError(f"size is one of {', '.join(SIZES)}, not {self.size!r}")
        if self.world < 2 or self.steps < 2 or self.batch < 1:
            raise ConfigError("a run has at least 2 ranks, 2 steps and 1 sample per step")
        if self.parallel == "hsdp" and self.world % 2:
            raise ConfigError("hsdp has two replicas: the number of ranks must be even")

    @property
    def room(self) -> Path:
        return Path(self.directory)

    @property
    def truth(self) -> Path:
        """Where the ranks write what they did."""
        return self.room / "truth"

    @property
    def file(self) -> Path:
        return self.room / "plan.json"

    def write(self) -> None:
        # A truth that is there already is another run's.
        self.truth.mkdir(parents=True)
        self.file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read(path: str | Path) -> Plan:
    return Plan(**json.loads(Path(path).read_text(encoding="utf-8")))
