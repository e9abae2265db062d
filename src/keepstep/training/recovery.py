"""A rank's way through a migration: what it does for each order.

    QUIESCE  leave the step for its boundary, digest, report
    APPLY    make the update that others have made (vote.py), report QUIESCE again
    REFORM   new groups, state in (or out), private state to its second home, digest, report
    RESUME   train on;  SAVE  write a just-in-time checkpoint and wait for the end

A receiver marks itself torn before the first byte lands, and is whole again only when its own
digest of what arrived equals the one that the holders agreed on.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from keepstep import sabotage, wire
from keepstep.errors import ConfigError, NoHome, Permanent
from keepstep.model import Phase, Rank
from keepstep.page import Mark
from keepstep.sealed import store_prefix
from keepstep.training import checkpoint, halfway
from keepstep.training.finding import Finding, take_private
from keepstep.training.movement import agree_on_groups, move_state
from keepstep.training.pointed_store import connect
from keepstep.training.private import check_whole
from keepstep.training.reset import reset

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

STORE_SECONDS_MAX = 5.0
"""For finding a generation's store, and for each answer of it."""


def obey(keeper: Keeper, order: wire.Order) -> bool:
    """Carry out one order. True when training may go on."""
    generation = int(order.generation)
    if keeper.leaves_in == generation and not isinstance(order.action, wire.Quiesce | wire.Stop):
        # Another worker has our rank in this generation.
        return False
    match order.action:
        case wire.Assign() as assign:
            # Another rank fell while this one was on its way here: the same seat once more.
            keeper.report("Assign", Phase.QUIESCE, empty_seat(keeper, generation), generation)
            if assign.forms:
                known = assign.membership
                keeper.connect_groups(generation, known.store, known.secret)
        case wire.Quiesce() as quiesce:
            if keeper.is_leaving(quiesce):
                keeper.leaves_in = generation
            _quiesce(keeper, generation, quiesce)
        case wire.Apply() as apply:
            if keeper.place.rank in apply.ranks:
                # Past the update, or no more able to make it: say where this rank is.
                unwind(keeper)
                report_boundary(keeper, generation, "Quiesce Apply")
        case wire.Reform() as reform:
            keeper.saves.fence(generation)
            _reform(keeper, generation, reform)
        case wire.Resume() as resume:
            _resume(keeper, generation, resume)
            return True
        case wire.Save() as save:
            _save(keeper, generation, save)
        case wire.Stop() as stop:
            _leave(keeper, stop.exit_code)
        case other:
            raise ConfigError(f"a worker got an order that is not for it: {other}")
    return False


def _quiesce(keeper: Keeper, generation: int, quiesce: wire.Quiesce) -> None:
    keeper.abort(generation)
    halfway.settle(keeper)
    keeper.reach("quiesce")
    _end_finding(keeper)
    if keeper.reformed:
        # A round that did not end in training: perhaps because a remembered digest was stale.
        keeper.registry.forget_digests()
    unwind(keeper)
    if keeper.leaves_in == generation:
        # Whoever has our rank speaks for it.
        return
    # Others may be longer on their way to the boundary: use the time.
    keeper.prepare(generation, quiesce)
    report_boundary(keeper, generation, "Quiesce")


def unwind(keeper: Keeper) -> None:
    """Leave a broken step for its boundary. Safe to repeat."""
    if keeper.boundary.unwind():
        keeper.step_through(keeper.boundary.step - 1)
        # What was remembered is a step older, and a forward pass moves buffers unseen.
        keeper.rest.forget()
    if keeper.boundary.doubtful:
        keeper.uncovered.buffer_moves_unseen(keeper.boundary.doubtful)
    if keeper.boundary.shrunk:
        keeper.uncovered.buffer_put_back(keeper.boundary.shrunk)
    if keeper.registry.regrouped():
        keeper.uncovered.regrouped()


def report_boundary(
    keeper: Keeper, generation: int, kinds: str = "Quiesce", *, ready: bool = False
) -> None:
    """Where this rank is, and what it holds there."""
    rank = Rank(keeper.place.rank)
    digests = _digests(keeper) if keeper.has_state and keeper.boundary.whole else {}
    if not digests:
        keeper.report(kinds, Phase.QUIESCE, empty_seat(keeper, generation), generation)
        return
    unsynced = keeper.registry.synced() if keeper.boundary.unsynced else ()
    seat = wire.SeatReport(
        rank,
        boundary=keeper.boundary.step,
        intact=True,
        digests={name: d for name, d in digests.items() if name not in unsynced},
        unsynced=unsynced,
        ready=ready,
        covers=keeper.covers,
        entries=keeper.homes.boundaries(),
        state_bytes=keeper.registry.state_bytes(),
        unsettled=keeper.unsettled,
        step_seconds=keeper.step_seconds,
        groups=_groups_made(keeper, generation),
    )
    keeper.report(kinds, Phase.QUIESCE, seat, generation)


def empty_seat(keeper: Keeper, generation: int) -> wire.SeatReport:
    """What a rank without whole state says at a boundary: which groups it has made."""
    return wire.SeatReport(Rank(keeper.place.rank), groups=_groups_made(keeper, generation))


def _groups_made(keeper: Keeper, generation: int) -> str:
    """Nothing if another one was made after the generation was prepared: then all begin anew."""
    made, prepared = keeper.groups.log_digest(), keeper.groups.prepared(generation)
    return made if prepared in (None, made) else ""


def _digests(keeper: Keeper, received: Mapping[str, str] | None = None) -> dict[str, str]:
    """By portion; none where state cannot be carried: such a rank gives nothing."""
    if sabotage.off("digest"):
        return dict.fromkeys(keeper.registry.portions(), "unchecked")
    try:
        return keeper.registry.shared_digests(received)
    except ConfigError as error:
        keeper.uncovered.nothing_to_give(str(error))
        return {}


def _are_right(
    found: Mapping[str, str], reform: wire.Reform, by_themselves: Collection[str]
) -> bool:
    """Is every portion what its holders agreed on? Who could make no digests has none that is."""
    return bool(found) and all(
        value == reform.digests.get(portion) or portion in by_themselves
        for portion, value in found.items()
    )


def _form_groups(keeper: Keeper, generation: int, reform: wire.Reform) -> None:
    def overtaken() -> bool:
        return keeper.inbox.generation != generation

    def store() -> dist.Store:
        return connect(reform.membership.store, STORE_SECONDS_MAX, overtaken)

    prefix = store_prefix(reform.membership.secret)
    if not reform.groups_alike:
        meeting = dist.PrefixStore(f"{prefix}/{generation}/log", store())
        agree_on_groups(keeper.groups, meeting, overtaken)
        # What was begun with other groups than these is worth nothing, and must not be met again.
        prefix = f"{prefix}/met"
    keeper.groups.reform(store, prefix, generation)


def _reform(keeper: Keeper, generation: int, reform: wire.Reform) -> None:
    place = keeper.place
    rank = Rank(place.rank)
    keeper.reformed = True
    unwind(keeper)
    keeper.reach("reform")

    receiving = any(move.target == place.rank for move in reform.moves)
    # A joiner has nothing to lose. A survivor that lags behind keeps its older state, which may be
    # needed after all, until the newer one begins to land.
    joining = receiving and not keeper.has_state
    finding = keeper.finding = Finding(keeper, reform, joining)
    _form_groups(keeper, generation, reform)
    keeper.report("Reformed", Phase.REFORM, wire.SeatReport(rank), generation)
    try:
        payload = finding.payload()
        if receiving:
            # Before anything lands: a survivor's older state is still whole.
            check_whole(payload)
    except Permanent as error:
        unfit = wire.SeatReport(rank, problem=str(error))
        keeper.report("Reform", Phase.VERIFY, unfit, generation)
        return

    def check(received: Mapping[str, str]) -> bool:
        """Is every portion right? What this rank received is whole only then."""
        found.clear()
        found.update(_digests(keeper, received))
        right = not unsynced and _are_right(found, reform, by_themselves)
        if receiving and right and not keeper.has_state:
            if not joining:
                _end_finding(keeper)
                # The batches too: the loop's body may hold them already and not ask again.
                keeper.finding = Finding(keeper, reform, receiving=True, known=payload)
                keeper.finding.payload()
            keeper.arrive(reform.boundary, payload)
        return right

    found: dict[str, str] = {}
    # Nobody can say what these should be. Of what is rebuilt every part is checked as it comes;
    # what is synced anew is compared when all have told what they found.
    by_themselves = {portion for portion, digest in reform.digests.items() if not digest}
    unsynced = by_themselves - {move.portion for move in reform.moves if move.rebuilt}
    keeper.reach("transfer")
    try:
        received = move_state(keeper, reform, check)
    except Permanent as error:
        unfit = wire.SeatReport(rank, problem=str(error))
        keeper.report("Reform", Phase.VERIFY, unfit, generation)
        return
    if unsynced:
        received = halfway.complete(keeper, unsynced, received)
        unsynced = set()
    keeper.mirror_stride = reform.membership.mirror_stride
    keeper.reach("verify")
    # Before the mirrors are made anew: from here on the older boundary is not needed any more.
    check(received)
    keeper.secret = reform.membership.secret
    # No barrier: whoever says VERIFY holds its neighbour's entry, and all say it before a resume.
    keeper.open_mirror(reform.boundary, payload, generation)
    intact = bool(found) and keeper.has_state and keeper.boundary.step == reform.boundary
    moved_bytes, moved_seconds = keeper.moved
    seat = wire.SeatReport(
        rank,
        boundary=reform.boundary,
        intact=intact,
        digests=found,
        moved_bytes=moved_bytes,
        moved_seconds=moved_seconds,
    )
    keeper.report("Reform", Phase.VERIFY, seat, generation)


def _end_finding(keeper: Keeper) -> None:
    """The cursor and the generators belong to one thread at a time: from here on to this one."""
    if keeper.finding is not None:
        keeper.finding.finish()
        keeper.finding = None


def _resume(keeper: Keeper, generation: int, resume: wire.Resume) -> None:
    assert keeper.has_state and keeper.boundary.step == resume.boundary, "verified state resumes"
    keeper.reach("resume")
    _end_finding(keeper)
    keeper.reformed = False
    keeper.generation = generation
    keeper.page.set_generation(generation)
    for module in keeper.registry.modules.values():
        reset(module)
    keeper.registry.drop_gradients()
    if keeper.covering is not None:
        keeper.covering.settled()
    keeper.know_holders()
    keeper.expected_collectives = 1
    keeper.page.count_launches_from_here()
    keeper.log.forget_after(resume.boundary)
    keeper.resumed_report_due = True


def _save(keeper: Keeper, generation: int, save: wire.Save) -> None:
    unwind(keeper)
    try:
        checkpoint.rescue(keeper, save)
        seat = wire.SeatReport(Rank(keeper.place.rank), boundary=save.boundary, intact=True)
    except (ConfigError, OSError, NoHome, Permanent) as error:
        seat = wire.SeatReport(Rank(keeper.place.rank), problem=f"cannot save: {error}")
    keeper.report("Save", Phase.SAVE, seat, generation)


def load_checkpoint(keeper: Keeper, found: checkpoint.Found) -> None:
    payload = checkpoint.load(found, keeper)
    take_private(keeper, payload, found.boundary)
    keeper.boundary.arrive(found.boundary)
    keeper.commits.start_after(found.boundary - 1)


def _leave(keeper: Keeper, exit_code: int) -> NoReturn:
    keeper.page.mark(Mark.FINISHED, keeper.boundary.step)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(exit_code)
