"""What a registered part that is no module and no optimizer has to be able to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class SaveRestore:
    """Model-aware mode: the user's own functions in place of a state_dict."""

    save: Callable[[], dict[str, Any]]
    restore: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        return self.save()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.restore(state_dict)
