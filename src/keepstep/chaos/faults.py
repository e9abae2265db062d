"""The catalogue of faults: which kinds strike in which windows, and what must come of it. Pure.

A cell is one kind in one window, with its expected outcome. `schedule` turns a seed into a list of
faults: every kind comes before any kind comes twice, then every cell before any cell comes twice,
so that short campaigns are broad and long ones are complete. The same seed gives the same list.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from keepstep.errors import ConfigError


class Outcome(StrEnum):
    """What became of the job."""

    LIVE = "live"
    """The ranks moved live, and training went on at the boundary where it stopped."""
    UNTOUCHED = "untouched"
    """No migration at all: training did not notice."""
    MOVED = "moved"
    """The ranks that were asked to move have moved live, whatever happened on the way."""
    HELD = "held"
    """Survivors held at the boundary, a spare came, and training went on live."""
    SAVED = "saved"
    """A just-in-time checkpoint, exit 75; the rerun went on at that boundary."""
    FALLBACK = "fallback"
    """A declared restart from an older checkpoint: some state had no home left."""
    FAILED = "failed"
    """The job ended with the user's own traceback."""
    STUCK = "stuck"
    """Nothing that was expected happened in time. Never expected."""


class Mix(StrEnum):
    """Which part of the catalogue a campaign draws from."""

    UNPLANNED = "unplanned"
    PLANNED = "planned"
    ALL = "all"
    """Unplanned and planned, mixed."""
    HOLD = "hold"
    FALLBACK = "fallback"
    USER = "user"
    FLIPS = "flips"
    """Bits flip at rest, and somebody looks for them."""
    FAILOVER = "failover"
    """Those who decide are struck in the middle of a migration, and their database."""


STEP_WINDOWS = ("forward", "backward", "allreduce", "optimizer", "updated")
RECOVERY_WINDOWS = ("quiesce", "reform", "transfer", "verify", "resume")
RANDOM = "random"
VOTE_WINDOWS = ("vote", "voted")
"""Before the vote of a sharded job, and past it with the update not begun."""
MIRROR_WINDOW = "mirror"
"""Before a rank writes ahead what the update of what it alone holds will need."""
SYNC_WINDOWS = ("halfway", "sync")
"""With the rank's own update made and its sync not begun, and in the sync's collectives."""
PARALLEL = ("ddp", "hsdp", "tp", "fsdp", "zero1")
"""How the job's model is spread. hsdp and tp are a mesh of 2 x half the world: each piece of state
has two holders, half the world apart. In fsdp it has one, and a mirror on the next rank; in zero1
the same is true of the optimizer's state, and everybody has the model."""
AT_REST, COMPARED = "at_rest", "compared"
"""Where flips are found: by each rank alone at every step, or by comparison every K steps."""
LOAN = "park"
"""The kind that needs a second job, whose devices are borrowed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of fault in one window."""

    kind: str
    window: str
    expected: Outcome = Outcome.LIVE
    spares: int = 1
    """Ready standbys that must be there before it may strike."""
    needs_network: bool = False
    """Only where nodes are network namespaces."""
    mix: Mix = Mix.UNPLANNED
    parallel: tuple[str, ...] = PARALLEL
    """Only where the model is spread like this."""

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.window}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One cell, aimed."""

    number: int
    cell: Cell
    rank: int
    other: int
    """Another rank, for the kinds that strike two."""
    delay_seconds: float
    """After the job runs steadily: random moments must not be in step with the campaign."""


def _cells(kind: str, windows: Iterable[str], cell: Cell = Cell("", "")) -> list[Cell]:
    return [replace(cell, kind=kind, window=window) for window in windows]


_TWO = Cell("", "", spares=2)
_SHARDED = ("hsdp", "tp", "fsdp", "zero1")
_VOTE = Cell("", "", parallel=_SHARDED)
_VOTE_TWO = Cell("", "", spares=2, parallel=_SHARDED)
_MIRROR = Cell("", "", parallel=("fsdp", "zero1"))
_SYNC = Cell("", "", parallel=("zero1",))
_SYNC_TWO = Cell("", "", spares=2, parallel=("zero1",))
_SILENT = Cell("", "", needs_network=True)
_QUIET = Cell("", "", Outcome.UNTOUCHED, spares=0)
_HOLD = Cell("", "", Outcome.HELD, spares=2, mix=Mix.HOLD)
_SAVE = Cell("", "", Outcome.SAVED, spares=2, mix=Mix.HOLD)
_LOST = Cell("", "", Outcome.FALLBACK, spares=2, mix=Mix.FALLBACK)
_MOVE = Cell("", "", Outcome.MOVED, spares=1, mix=Mix.PLANNED)
_MOVE_TWO = Cell("", "", Outcome.MOVED, spares=2, mix=Mix.PLANNED)
_RACK = Cell("", "", spares=2, mix=Mix.PLANNED)
_BORROW = Cell("", "", Outcome.HELD, spares=2, mix=Mix.PLANNED)
_BUG = Cell("", "", Outcome.FAILED, spares=1, mix=Mix.USER)
_ODD = Cell("", "", Outcome.LIVE, spares=1, mix=Mix.USER)
_LEADER = Cell("", "", spares=1, mix=Mix.FAILOVER)
_LEADER_CUT = Cell("", "", spares=1, mix=Mix.FAILOVER, needs_network=True)
_LEADER_MOVE = Cell("", "", Outcome.MOVED, spares=1, mix=Mix.FAILOVER)
_LEADER_CUT_MOVE = replace(_LEADER_MOVE, needs_network=True)
_FLIP = Cell("", "", spares=0, mix=Mix.FLIPS)
# Three holders or more: with two, nobody can tell which of them is wrong.
_FLIP_SHARED = Cell("", "", spares=0, mix=Mix.FLIPS, parallel=("ddp",))
_FLIP_MIRROR = Cell("", "", spares=0, mix=Mix.FLIPS, parallel=("fsdp",))

CATALOGUE: tuple[Cell, ...] = (
    *_cells("sigkill", (*STEP_WINDOWS, RANDOM)),
    *_cells("sigstop", ("forward", "backward", "allreduce", "optimizer", RANDOM)),
    *_cells("gil", ("forward", "backward", "optimizer")),
    *_cells("node_loss", ("forward", "backward", "allreduce", "optimizer", RANDOM)),
    *_cells("silent_node", ("forward", "backward", RANDOM), _SILENT),
    # The update is in on one rank, and nobody else can know it.
    *_cells("silent_after_allreduce", ("optimizer",), _SILENT),
    *_cells("rank0", ("forward", "backward", "allreduce", "optimizer", RANDOM)),
    *_cells("rank0_node", ("backward", RANDOM)),
    *_cells("two_ranks", ("backward", "optimizer", RANDOM), _TWO),
    *_cells("second_failure", RECOVERY_WINDOWS, _TWO),
    *_cells("joiner_dies", ("reform", "transfer", "verify", "resume"), _TWO),
    # Right before it is needed, and while it attaches.
    *_cells("standby_dies", ("before", "attach"), _TWO),
    *_cells("orchestrator_killed", ("allocate", "quiesce", "reform", "resume")),
    *_cells("orchestrator_killed", ("healthy",), _QUIET),
    *_cells("agent_killed", ("quiesce", "reform")),
    *_cells("agent_killed", ("healthy",), _QUIET),
    # The living generation has met already; the brain forms the groups anew all the same.
    *_cells("store_killed", ("healthy", "reform")),
    *_cells("preload_killed", ("healthy",), _QUIET),
    *_cells("returning_fenced", ("save",)),
    *_cells("corrupt_source", ("updated",)),
    *_cells("exception", ("forward", "backward")),
    *_cells("sigkill", VOTE_WINDOWS, _VOTE),
    *_cells("sigstop", VOTE_WINDOWS, _VOTE),
    *_cells("node_loss", VOTE_WINDOWS, _VOTE),
    *_cells("rank0", VOTE_WINDOWS, _VOTE),
    *_cells("two_ranks", VOTE_WINDOWS, _VOTE_TWO),
    *_cells("sigkill", (MIRROR_WINDOW,), _MIRROR),
    *_cells("sigstop", (MIRROR_WINDOW,), _MIRROR),
    *_cells("node_loss", (MIRROR_WINDOW,), _MIRROR),
    *_cells("rank0", (MIRROR_WINDOW,), _MIRROR),
    *_cells("sigkill", SYNC_WINDOWS, _SYNC),
    *_cells("sigstop", SYNC_WINDOWS, _SYNC),
    *_cells("node_loss", SYNC_WINDOWS, _SYNC),
    *_cells("rank0", SYNC_WINDOWS, _SYNC),
    *_cells("two_ranks", SYNC_WINDOWS, _SYNC_TWO),
    # A second one falls while the sync of the first one's step is repeated, and after it.
    *_cells("second_in_sync", ("transfer", "resync", "verify"), _SYNC_TWO),
    *_cells("migrate", (RANDOM,), _MOVE),
    *_cells("migrate_two", (RANDOM,), _MOVE_TWO),
    *_cells("drain", (RANDOM,), _MOVE),
    *_cells("drain_two", (RANDOM,), _MOVE_TWO),
    *_cells("drain_and_power_off", (RANDOM,), _MOVE),
    *_cells("target_dies", ("attach", "reform", "transfer", "verify", "resume"), _MOVE_TWO),
    *_cells("leaver_dies", ("attach", "reform", "transfer", "resume"), _MOVE),
    *_cells("leavers_node_lost", ("attach", "reform", "resume"), _MOVE),
    *_cells("bystander_dies", ("attach", "reform", "transfer", "resume"), _MOVE_TWO),
    *_cells("orchestrator_killed_moving", ("warm", "agree", "quiesce", "reform", "resume"), _MOVE),
    *_cells("agent_killed_moving", ("attach", "reform", "resume"), _MOVE),
    *_cells("rack", (RANDOM,), _RACK),
    *_cells("taint_storm", (RANDOM,), _MOVE_TWO),
    *_cells("imminent_dies", ("attach", "reform", "resume"), _MOVE),
    *_cells("go_home", (RANDOM,), _MOVE_TWO),
    *_cells(LOAN, ("drain",), _MOVE_TWO),
    *_cells(LOAN, ("node_lost", "lenders_node_lost", "orchestrator_killed"), _BORROW),
    *_cells("hold", ("no_spare",), _HOLD),
    *_cells("hold_timeout", ("no_spare",), _SAVE),
    *_cells("sigterm", ("healthy", "reform"), _SAVE),
    *_cells("both_homes_lost", (RANDOM, "backward"), _LOST),
    *_cells("exception_once", ("forward",), _ODD),
    *_cells("exception_always", ("forward",), _BUG),
    *_cells("flip_parameter", (AT_REST,), _FLIP),
    *_cells("flip_moment", (AT_REST,), _FLIP),
    # Each rank's own, or overwritten from rank 0 by DDP: no comparison tells.
    *_cells("flip_buffer", (AT_REST,), _FLIP),
    *_cells("flip_mirror", (AT_REST,), _FLIP_MIRROR),
    *_cells("leader_killed", ("quiesce", "reform", "resume", RANDOM), _LEADER),
    *_cells("leader_stopped", ("quiesce", "reform", "resume", RANDOM), _LEADER),
    *_cells("leader_cut", ("quiesce", "reform", "resume", RANDOM), _LEADER_CUT),
    *_cells("leader_without_database", ("reform", RANDOM), _LEADER_CUT),
    *_cells("leader_without_agents", ("reform", RANDOM), _LEADER_CUT),
    *_cells("leader_killed_moving", ("warm", "agree", "quiesce", "reform", "resume"), _LEADER_MOVE),
    *_cells("leader_stopped_moving", ("warm", "agree", "reform"), _LEADER_MOVE),
    *_cells("leader_cut_moving", ("agree", "reform", RANDOM), _LEADER_CUT_MOVE),
    *_cells("database_restarted", ("quiesce", "reform", "resume", RANDOM), _LEADER),
    *_cells("database_frozen", ("quiesce", "reform", "resume", RANDOM), _LEADER),
    *_cells("flip_parameter", (COMPARED,), _FLIP_SHARED),
    *_cells("flip_moment", (COMPARED,), _FLIP_SHARED),
)

TELLING: dict[str, tuple[str, ...]] = {
    "rng": ("sigkill",),
    "loader": ("sigkill",),
    "buffers": ("sigkill", "rank0"),
    "fence": ("returning_fenced",),
    "digest": ("corrupt_source",),
    "reset": ("sigkill", "rank0"),
    "fsdp-reset": ("sigkill", "rank0"),
    "vote": ("sigkill", "node_loss"),
    "mirror": ("sigkill", "node_loss"),
    "phase": ("sigkill", "rank0"),
}
"""The kinds that must notice when a protection is switched off."""
AT_WORK: dict[str, tuple[str, ...]] = {
    "fsdp-reset": ("hsdp", "fsdp"),
    "vote": ("hsdp", "tp", "fsdp", "zero1"),
    "mirror": ("fsdp", "zero1"),
    "phase": ("zero1",),
}
"""Protections that not every job has: where there is none, nothing can be switched off."""


NOT_SHARDED = frozenset(
    {
        # Needs three holders: with two, nobody can tell which of them is wrong.
        "corrupt_source",
        # Takes two nodes that are no mirror of each other: in a small mesh, both of a shard.
        "rack",
        # An update on one rank alone: what the vote rules out.
        "silent_after_allreduce",
        # Two jobs; what is lent is the same whatever runs there.
        LOAN,
    }
)
"""Kinds that mean nothing, or an honest fallback, where each shard has two holders."""


def choose_cells(
    mix: Mix, kinds: Sequence[str], *, network: bool, parallel: str = "ddp", check_steps: int = 0
) -> tuple[Cell, ...]:
    """The cells that a campaign draws from. Raises ConfigError, which says the fix."""
    mixes = (Mix.UNPLANNED, Mix.PLANNED) if mix is Mix.ALL else (mix,)
    unfit = NOT_SHARDED if parallel != "ddp" else frozenset()
    unseen = COMPARED if check_steps <= 1 else AT_REST
    fit = [c for c in CATALOGUE if parallel in c.parallel and c.window != unseen]
    catalogue = [c for c in fit if c.kind not in unfit]
    known = {cell.kind for cell in catalogue if cell.mix in mixes}
    for kind in kinds:
        if kind not in known:
            raise ConfigError(
                f"no fault of --mix {mix} is called {kind!r}; known are: {', '.join(sorted(known))}"
            )
    cells = [c for c in catalogue if c.mix in mixes and (not kinds or c.kind in kinds)]
    silent = sorted({cell.kind for cell in cells if cell.needs_network})
    if silent and kinds and not network:
        raise ConfigError(
            f"{', '.join(silent)} need network namespaces: run as root with iproute2, or leave "
            "these kinds out"
        )
    return tuple(cell for cell in cells if network or not cell.needs_network)


def schedule(
    cells: Sequence[Cell], faults: int, seed: int, world: int, *, parallel: str = "ddp"
) -> tuple[Fault, ...]:
    """The faults of a campaign, in order."""
    if not cells:
        raise ConfigError("no kind of fault is left to draw from")
    chance = random.Random(seed)
    chosen: list[Cell] = []
    while len(chosen) < faults:
        chosen += _one_round(cells, chance)
    aimed = (_aim(n, cell, seed, world) for n, cell in enumerate(chosen[:faults]))
    return tuple(_spare_the_other_home(fault, world, parallel) for fault in aimed)


def _one_round(cells: Sequence[Cell], chance: random.Random) -> list[Cell]:
    """Every cell once; kinds take turns."""
    decks: dict[str, list[Cell]] = {}
    for cell in cells:
        decks.setdefault(cell.kind, []).append(cell)
    kinds = list(decks)
    for deck in decks.values():
        chance.shuffle(deck)
    order: list[Cell] = []
    while decks:
        chance.shuffle(kinds)
        for kind in kinds:
            order.append(decks[kind].pop())
            if not decks[kind]:
                del decks[kind]
        kinds = list(decks)
    return order


def _aim(number: int, cell: Cell, seed: int, world: int) -> Fault:
    # Each fault has its own chance: a longer campaign begins like the shorter one.
    chance = random.Random(f"{seed}/{number}")
    rank = 0 if cell.kind.startswith("rank0") else chance.randrange(world)
    other = (rank + chance.randrange(1, world)) % world if world > 1 else rank
    return Fault(number, cell, rank, other, round(chance.uniform(0.0, 0.25), 3))


def _spare_the_other_home(fault: Fault, world: int, parallel: str) -> Fault:
    """A second victim is never the other home of the first one's shard: that is a fallback."""
    across = (fault.rank + world // 2) % world
    if parallel in ("fsdp", "zero1"):
        # Neighbours are each other's mirrors; across the world nobody is.
        return replace(fault, other=across)
    if parallel != "ddp" and fault.other == across:
        return replace(fault, other=(fault.other + 1) % world)
    return fault


def matrix(cells: Iterable[Cell], struck: Iterable[Cell]) -> dict[str, dict[str, int]]:
    """How often each cell was struck: kind -> window -> count, zeros included."""
    counts = Counter(cell.name for cell in struck)
    found: dict[str, dict[str, int]] = {}
    for cell in cells:
        found.setdefault(cell.kind, {})[cell.window] = counts[cell.name]
    return found
