"""What goes wrong, when, and to whom: read from a file, drawn from a seed. Pure.

    scenario = parse(name, text)
    strikes = schedule(scenario, world=4, nominal_seconds=180.0, horizon_seconds=600.0)

The schedule depends on the file, the world and the length of the fault-free run, and on nothing
that an arm does: all arms get the same strikes at the same seconds after their first step. Who
takes longer meets more of them.

    [[strike]]   share of the nominal length, or seconds; kind; rank
    [every]      seconds, first_seconds, kind; ranks are drawn
    [mix]        mean_seconds between faults; kind = weight, kept as closely as whole strikes can
                 within the nominal length; moments, order and ranks are drawn
    [trace]      length_seconds, laid over the length of the run, or time_scale;
                 [[trace.event]] seconds, kind, rank

Kinds: kill (SIGKILL), hang (SIGSTOP; an operator kills it later), slow (stopped in slices), drain.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError

DIRECTORY = Path(__file__).parent / "scenarios"
KINDS = ("kill", "hang", "slow", "drain")
TABLES = ("title", "why", "seed", "strike", "every", "mix", "trace", "hang", "slow")
DRAWN_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: seconds after the first step that all ranks finished."""

    at: float
    kind: str
    rank: int


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    why: str = ""
    seed: int = 1
    strikes: tuple[Mapping[str, Any], ...] = ()
    every: Mapping[str, Any] = field(default_factory=dict)
    mix: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    operator_seconds: float = 45.0
    """A stopped process that nobody replaced is killed after this long, in every arm."""
    slow_seconds: float = 60.0
    stopped_share: float = 0.5
    digest: str = ""
    """Of the file, byte by byte: two may have one name."""


def names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def shipped() -> dict[str, str]:
    """The digests of the scenarios that ship, by name."""
    return {name: read(name).digest for name in names()}


def read(name: str) -> Scenario:
    """By the name of a file of ours, or by a path."""
    path = Path(name) if name.endswith(".toml") else DIRECTORY / f"{name}.toml"
    try:
        return parse(path.stem, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no scenario {name!r}; there are {', '.join(names())}") from None


def parse(name: str, text: str) -> Scenario:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {name}: {error}") from None
    unknown = sorted(raw.keys() - set(TABLES))
    if unknown:
        raise ConfigError(f"scenario {name}: unknown: {', '.join(unknown)}")
    hang, slow = raw.get("hang", {}), raw.get("slow", {})
    made = Scenario(
        name,
        str(raw.get("title", name)),
        str(raw.get("why", "")).strip(),
        int(raw.get("seed", 1)),
        tuple(raw.get("strike", ())),
        raw.get("every", {}),
        raw.get("mix", {}),
        raw.get("trace", {}),
        float(hang.get("operator_seconds", 45.0)),
        float(slow.get("seconds", 60.0)),
        float(slow.get("stopped_share", 0.5)),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )
    if not 0.0 < made.stopped_share < 1.0:
        raise ConfigError(f"scenario {name}: stopped_share lies between 0 and 1")
    return made


def schedule(
    scenario: Scenario, world: int, nominal_seconds: float, horizon_seconds: float
) -> list[Strike]:
    """All strikes up to the horizon, in order of time."""
    found = [
        *_single(scenario, nominal_seconds),
        *_regular(scenario, world, horizon_seconds),
        *_mixed(scenario, world, nominal_seconds, horizon_seconds),
        *_traced(scenario, nominal_seconds),
    ]
    for strike in found:
        if strike.kind not in KINDS:
            raise ConfigError(f"scenario {scenario.name}: no kind {strike.kind!r}: {KINDS}")
        if not 0 <= strike.rank < world:
            raise ConfigError(f"scenario {scenario.name}: no rank {strike.rank} of {world}")
        if strike.at < 0:
            raise ConfigError(f"scenario {scenario.name}: a strike before the first step")
    return sorted((s for s in found if s.at <= horizon_seconds), key=lambda s: (s.at, s.rank))


def _single(scenario: Scenario, nominal_seconds: float) -> list[Strike]:
    found = []
    for raw in scenario.strikes:
        if ("share" in raw) == ("seconds" in raw):
            raise ConfigError(f"scenario {scenario.name}: a strike has share or seconds")
        at = raw["seconds"] if "seconds" in raw else raw["share"] * nominal_seconds
        found.append(Strike(float(at), str(raw["kind"]), int(raw["rank"])))
    return found


def _regular(scenario: Scenario, world: int, horizon: float) -> list[Strike]:
    if not scenario.every:
        return []
    seconds = float(scenario.every["seconds"])
    if seconds <= 0:
        raise ConfigError(f"scenario {scenario.name}: every.seconds is more than 0")
    chance = random.Random(f"{scenario.seed}/every")
    found: list[Strike] = []
    at = float(scenario.every.get("first_seconds", seconds))
    while at <= horizon and len(found) < DRAWN_MAX:
        found.append(Strike(at, str(scenario.every["kind"]), chance.randrange(world)))
        at += seconds
    return found


def _mixed(scenario: Scenario, world: int, nominal: float, horizon: float) -> list[Strike]:
    """One strike in every `mean_seconds`, at a moment in it that is drawn, and a shuffled deck of
    kinds for each nominal length. If each were drawn by itself, a run of eight strikes would be a
    mix of its own making, of three to fifteen."""
    if not scenario.mix:
        return []
    mean = float(scenario.mix["mean_seconds"])
    weights = {kind: float(w) for kind, w in scenario.mix.items() if kind != "mean_seconds"}
    if mean <= 0 or not weights or min(weights.values()) <= 0:
        raise ConfigError(
            f"scenario {scenario.name}: mix.mean_seconds is more than 0, and so is a kind's weight"
        )
    chance, order = (random.Random(f"{scenario.seed}/mix{part}") for part in ("", "/order"))
    dealt: Counter[str] = Counter()
    deck: list[str] = []
    found: list[Strike] = []
    while (begin := len(found) * mean) <= horizon and len(found) < DRAWN_MAX:
        if not deck:
            deck = _deck(weights, dealt, max(1, round(nominal / mean)))
            order.shuffle(deck)
        at = round(begin + chance.random() * mean, 3)
        found.append(Strike(at, deck.pop(), chance.randrange(world)))
    return found


def _deck(weights: Mapping[str, float], dealt: Counter[str], many: int) -> list[str]:
    """So many kinds more: each time the one that is owed most, so that shares are as close to the
    weights as whole strikes can be, also over several decks."""
    total = sum(weights.values())
    deck = []
    for _ in range(many):
        after = dealt.total() + 1
        kind = max(sorted(weights), key=lambda kind: weights[kind] / total * after - dealt[kind])
        dealt[kind] += 1
        deck.append(kind)
    return deck


def _traced(scenario: Scenario, nominal_seconds: float) -> list[Strike]:
    scale = float(scenario.trace.get("time_scale", 1.0))
    if "length_seconds" in scenario.trace:
        if "time_scale" in scenario.trace or float(scenario.trace["length_seconds"]) <= 0:
            raise ConfigError(
                f"scenario {scenario.name}: trace has length_seconds of more than 0, or time_scale"
            )
        scale = nominal_seconds / float(scenario.trace["length_seconds"])
    return [
        Strike(float(e["seconds"]) * scale, str(e["kind"]), int(e["rank"]))
        for e in scenario.trace.get("event", ())
    ]
