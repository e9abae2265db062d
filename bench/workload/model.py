"""A character-level GPT on text that ships with Python, spread over ranks in four ways.

The text is `pydoc_data.topics`: half a million characters, the same wherever the same Python is.
There is no dropout, so that a system which does not restore random states is not at a disadvantage.

The witness makes the gradients tell whose samples are in them. It is a parameter of zeros, a row of
`world` numbers for each rank, with a learning rate of 0. Each rank adds `witness[:, rank] * mark`
to its loss: nothing is changed by it, and the gradient of the witness, reduced by the same
collectives as every other, holds each contributor's mark (see order.py) divided by how many there
were. What a system says about its participants is not needed.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from bench.plan import SIZES, Plan
from bench.workload.order import Order, mark_of, whole_windows

LEARNING_RATE = 1e-3
REPLICAS = 2
"""Of each shard, with hsdp."""


# ---------------------------------------------------------------- data


def text() -> str:
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Sample `id` is the window `id % windows` of the text; the id comes along with it."""

    def __init__(self, plan: Plan) -> None:
        whole = text()
        letters = sorted(set(whole))
        number = {letter: at for at, letter in enumerate(letters)}
        self.letters = len(letters)
        self.codes = torch.tensor([number[letter] for letter in whole], dtype=torch.int64)
        self.context = plan.context
        self.windows = whole_windows(len(whole), plan.context, plan.world, plan.batch)

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        first = index % self.windows * self.context
        piece = self.codes[first : first + self.context + 1]
        return piece[:-1], piece[1:], index


class InOrder(Sampler[int]):
    """A rank's ids in one pass; `first` skips that many steps."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order = order
        self.rank = rank
        self.num_replicas = order.world
        self.epoch = 0
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.order.steps_per_pass * self.order.batch

    def __iter__(self) -> Iterator[int]:
        base = self.epoch * self.order.steps_per_pass
        for within in range(self.first, self.order.steps_per_pass):
            yield from self.order.ids(base + within, self.rank)


def order_of(plan: Plan, data: Windows) -> Order:
    return Order(data.windows, plan.world, plan.batch, plan.seed)


def loader_of(plan: Plan, data: Windows, rank: int) -> DataLoader[Any]:
    sampler = InOrder(order_of(plan, data), rank)
    return DataLoader(data, plan.batch, sampler=sampler, drop_last=True)


def batches_from(loader: DataLoader[Any], step: int) -> Iterator[Any]:
    """The batches from this step on, over as many passes as somebody wants."""
    sampler: Any = loader.sampler
    number, first = divmod(step, sampler.order.steps_per_pass)
    while True:
        sampler.set_epoch(number)
        sampler.first = first
        yield from loader
        number, first = number + 1, 0


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        many, length, width = h.shape
        split = self.attend(self.before(h)).view(many, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(many, length, width))
        further: torch.Tensor = self.down(functional.gelu(self.up(self.between(h))))
        return h + further


class Gpt(nn.Module):
    def __init__(self, plan: Plan, letters: int) -> None:
        super().__init__()
        width, layers, heads = SIZES[plan.size]
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(plan.context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        # A whole row for each rank: however the rows are cut, each rank holds at least one.
        self.witness = nn.Parameter(torch.zeros(plan.world, plan.world))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, 0.0, 0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        h = self.letter(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        scores = self.head(self.last(h))
        loss = functional.cross_entropy(scores.view(-1, scores.shape[-1]), y.reshape(-1))
        return loss + (self.witness * marks).sum()


def bare_model(plan: Plan, data: Windows) -> Gpt:
    """The same numbers on every rank, from the seed alone."""
    torch.manual_seed(plan.seed)
    return Gpt(plan, data.letters)


def spread(net: Gpt, plan: Plan) -> nn.Module:
    """The model over all ranks of the default group."""
    if plan.parallel in ("ddp", "zero1"):
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh

    if plan.parallel == "hsdp":
        shape, names = (REPLICAS, plan.world // REPLICAS), ("replicate", "shard")
        return shard(net, init_device_mesh("cpu", shape, mesh_dim_names=names))
    return shard(net, init_device_mesh("cpu", (plan.world,), mesh_dim_names=("shard",)))


def shard(net: Gpt, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def optimizer_of(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if not name.endswith("witness")]},
        {
            "params": [p for name, p in named if name.endswith("witness")],
            "lr": 0.0,
            "weight_decay": 0.0,
        },
    ]
    if plan.parallel != "zero1":
        return torch.optim.AdamW(groups, lr=LEARNING_RATE)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LEARNING_RATE)


# ---------------------------------------------------------------- a step


def forward_backward(model: nn.Module, batch: Any, rank: int, plan: Plan) -> torch.Tensor:
    x, y, ids = batch
    marks = torch.zeros(plan.world)
    marks[rank] = float(mark_of(ids.tolist()))
    loss: torch.Tensor = model(x, y, marks)
    loss.backward()
    return loss.detach()


def marks_in(model: nn.Module) -> list[int]:
    """Whose samples are in the gradients, by rank: the mark of each batch, 0 if it is not in."""
    gradient: Any = next(p for n, p in model.named_parameters() if n.endswith("witness")).grad
    if gradient is None:
        return []
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    row = local[0].tolist()
    contributors = sum(1 for value in row if value)
    return [round(value * contributors) for value in row]


def digest_of(model: nn.Module) -> str:
    """Of all weights that this rank holds."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        local: Any = parameter.detach()
        flat = (local.to_local() if hasattr(local, "to_local") else local).contiguous()
        total.update(name.removeprefix("module.").encode())
        total.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return total.hexdigest()
