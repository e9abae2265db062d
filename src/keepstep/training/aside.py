"""Work between two attempts that leaves no trace in training: an evaluation.

A fault may end it on some ranks and spare it others, and a newcomer never does it. So whatever it
changes is put back, also where nothing fails, also without Keepstep: generators, modes, buffers,
and what DDP remembers of its last forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepstep.training.randomness import read_randomness, restore_randomness
from keepstep.training.reset import ddp_modules


class Aside(contextlib.AbstractContextManager[None]):
    """What the parts of a session are now; put back at the end of the block.

    A buffer that was given another size stays: the program may have noted that somewhere else, and
    would look for what the old one cannot hold.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._randomness = read_randomness()
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._syncs: list[tuple[Any, bool]] = []
        self._parameters: list[tuple[nn.Parameter, int]] = []
        for part in parts:
            if isinstance(part, torch.Generator):
                self._generators.append((part, part.get_state()))
            elif isinstance(part, nn.Module):
                self._modes += [(module, module.training) for module in part.modules()]
                self._buffers += [(b, b.detach().clone()) for b in part.buffers()]
                self._parameters += [(p, p._version) for p in part.parameters()]
                self._syncs += [(d, d.require_forward_param_sync) for d in ddp_modules(part)]

    @property
    def moved(self) -> bool:
        """Were parameters changed since? They are not put back."""
        return any(p._version != version for p, version in self._parameters)

    def __exit__(self, *_: object) -> None:
        for module, training in self._modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in self._buffers:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
        for ddp, sync in self._syncs:
            ddp.require_forward_param_sync = sync
        for generator, state in self._generators:
            generator.set_state(state)
        restore_randomness(self._randomness)
