"""What would not come back exactly from another rank, found while nothing fails.

    in a registered part, in an optimizer's groups   refused before the first step, with the fix
    in an optimizer's own state                      said, when its first update has made it
    in mode observe                                  said

The script cannot change what an optimizer keeps for itself, and in mode observe nobody was promised
anything: training goes on, a rank with such state has nothing to give, and a fault is a fallback.

Must never: look at a tensor's bytes, or stop a run that has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.errors import ConfigError
from keepstep.training.optimizers import groups_of, hidden_of
from keepstep.training.plain import FIX_GROUPS, FIX_PART, uncarried
from keepstep.training.registry import Registry

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper


def check(keeper: Keeper) -> None:
    """Before the first step of this process."""
    registry = keeper.registry
    found = [(n, uncarried(groups_of(o)), FIX_GROUPS) for n, o in registry.optimizers.items()]
    found += [(n, uncarried(o.state_dict()), FIX_PART) for n, o in registry.others.items()]
    for name, kind, fix in found:
        if kind and keeper.place.observed:
            keeper.uncovered.not_carried(name, kind)
        elif kind:
            raise ConfigError(f"{name!r}: state of {kind} cannot be moved exactly; {fix}")
    check_made(keeper)


def check_made(keeper: Keeper) -> None:
    """What optimizers have made for themselves by now."""
    for name, kind in _made(keeper.registry):
        keeper.uncovered.not_carried(name, kind)


def by_optimizers(registry: Registry) -> bool:
    """Can all be carried that optimizers go by and have made?"""
    groups = all(not uncarried(groups_of(o)) for o in registry.optimizers.values())
    return groups and not _made(registry)


def _made(registry: Registry) -> list[tuple[str, str]]:
    named = ((name, uncarried(hidden_of(o))) for name, o in registry.optimizers.items())
    return [(name, kind) for name, kind in named if kind]
