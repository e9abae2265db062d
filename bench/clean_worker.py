"""The script of bench.clean: a DDP loop that is slow now and then, as honest training is.

The driver writes ahead of time which action comes before which step; every rank reads it, so all
of them act at the same step. An evaluation takes long on all ranks; a save takes long on rank 0
while the others already wait in the next step's collective; a new batch shape makes the compiled
part compile again, which nobody declares: the session sees it by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

WIDTH = 128
BATCH = 8
SMALLER_BATCH = 6
PASSES = 1_000_000
STEP_SECONDS = 0.03


class Net(nn.Module):
    def __init__(self, compile_seconds: float, backend: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.body = torch.compile(inner, backend=_slowly(backend, compile_seconds), dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.drop(self.norm(x)))
        return out


def _slowly(backend: str, seconds: float) -> Any:
    """A compiler that takes at least so long: a large model's takes minutes."""
    from torch._dynamo import lookup_backend

    real = lookup_backend(backend)

    def compile_graph(graph: Any, inputs: Any) -> Any:
        began = time.monotonic()
        compiled = real(graph, inputs)
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        return compiled

    return compile_graph


class Actions:
    """What the driver asks for, and what became of it."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._asked = directory / "actions.json"
        self._done = directory / f"done-{rank}.jsonl"

    def at(self, step: int) -> list[str]:
        """The actions that come before this step."""
        return [name for name, number in self._read().items() if number == step]

    def passed(self, name: str, step: int) -> bool:
        number = self._read().get(name)
        return number is not None and step >= number

    def last_step(self) -> int | None:
        return self._read().get("finish")

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        with self._done.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"action": name, "seconds": time.monotonic() - began}) + "\n")

    def _read(self) -> dict[str, int]:
        try:
            plain: dict[str, int] = json.loads(self._asked.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return plain


def build_with(args: argparse.Namespace) -> Any:
    def build(seat: keepstep.Seat) -> dict[str, Any]:
        torch.manual_seed(1234)
        model = DistributedDataParallel(Net(args.compile_seconds, args.backend))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(4096, WIDTH))
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, seat.world_size, seat.rank, seed=7, drop_last=True
        )
        loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
        parts = {"model": model, "optimizer": optimizer}
        return {**parts, "loader": loader, "rehearse": lambda b: train_step(parts, b[0][0])}

    return build


def train_step(parts: dict[str, Any], x: torch.Tensor) -> None:
    parts["optimizer"].zero_grad(set_to_none=True)
    nn.functional.mse_loss(parts["model"](x), x).backward()
    parts["optimizer"].step()


def evaluate(session: keepstep.Session, seconds: float) -> None:
    """Real work on the processor, without any collective, and nothing that outlasts it."""
    matrix = torch.full((256, 256), 1e-3)
    with session.busy("evaluation", seconds_max=3 * seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            matrix = (matrix @ matrix).clamp(-1, 1)


def save_slowly(session: keepstep.Session, seconds: float) -> None:
    """Rank 0 alone is slow; the others are not busy, they wait for it in their next step."""
    began = time.monotonic()
    with session.busy("save", seconds_max=3 * seconds):
        session.save()
        if dist.get_rank() == 0:
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--evaluate-seconds", type=float, default=60.0)
    parser.add_argument("--save-seconds", type=float, default=30.0)
    parser.add_argument("--compile-seconds", type=float, default=10.0)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = keepstep.session(build_with(args))
    torch.manual_seed(1000 + dist.get_rank())
    actions = Actions(args.directory, int(os.environ["RANK"]))
    for (x,) in session.steps(passes=PASSES, max_steps=actions.last_step):
        asked = actions.at(session.step)
        if "evaluate" in asked:
            with actions.doing("evaluate"):
                evaluate(session, args.evaluate_seconds)
        if "save" in asked:
            with actions.doing("save"):
                save_slowly(session, args.save_seconds)
        smaller = actions.passed("recompile", session.step)
        with actions.doing("recompile") if "recompile" in asked else contextlib.nullcontext():
            with session.attempt():
                train_step(session.parts, x[:SMALLER_BATCH] if smaller else x)
                time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
