"""How a node shows that it was told of a generation: by a word that only its members can make.

A generation's secret goes to the nodes that have its ranks, and a leader can derive it anew for any
generation, also for one that its journal has forgotten. The word names the node, so nobody else can
use it; it stays valid for a generation that is over, so its number is part of it. Pure.
"""

from __future__ import annotations

import hmac

from keepstep.model import Generation, JobId, NodeId

DIGITS_MAX = 15
"""No generation has more."""


def word(secret: str, job: JobId, generation: Generation, node: NodeId) -> str:
    """What a node says that was told this generation's secret."""
    text = f"{job}/{generation}/{node}"
    return f"{generation}/{hmac.new(secret.encode(), text.encode(), 'sha256').hexdigest()}"


def generation_of(said: str) -> Generation | None:
    """Of which generation a word claims to be; None: it is no word."""
    number = said.partition("/")[0]
    if not (number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX):
        return None
    return Generation(int(number))


def same(said: str, expected: str) -> bool:
    """Compared without telling by its duration how much was right."""
    return hmac.compare_digest(said.encode(), expected.encode())
