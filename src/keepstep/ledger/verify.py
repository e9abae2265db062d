"""Check a job's account with Python alone: `python verify.py export.jsonl steps.jsonl --key KEY`.

For whoever pays. Checked are each link's hash, the signature below, and that every head that your
step log quotes is there: a chain written anew lacks them. Exit 1: it does not fit; 2: no key, head.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = hashlib.sha256(b"keepstep journal 1").hexdigest()
EXPORT, TERMS = b"keepstep export 1\n", b"keepstep terms 1\n"  # what is signed begins with its kind
EXCLUDED = {"failed": "user_error", "saved": "no_spare", "restart": "not_begun"}
WISHED = ("moved", "abandoned", "parked", "saved", "stopped")
BUSY, OVER = ("running", "migrating", "held"), ("finished", "saved", "failed", "stopped")
Lines = Sequence[Mapping[str, Any]]
Stretch = tuple[dict[str, Any], dict[str, Any], range, int, float, float]
"""Two steps, the generations begun between, gone back to or -1, seconds not declared, declared."""
WRONG = (OSError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


class Broken(Exception):
    """The first thing that does not fit; the rest would only follow from it."""


P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P  # Ed25519 (RFC 8032), verification
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    x, y, t = a[0] * b[1] + b[0] * a[1], a[1] * b[1] + a[0] * b[0], D * a[0] * b[0] * a[1] * b[1]
    return x * pow(1 + t, -1, P) % P, y * pow(1 - t, -1, P) % P


def times(number: int, point: Point) -> Point:
    rest = times(number >> 1, add(point, point)) if number else (0, 1)
    return add(rest, point) if number & 1 else rest


def unpack(raw: bytes) -> Point:
    sign, y = divmod(int.from_bytes(raw, "little"), 1 << 255)
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * pow(2, (P - 1) // 4, P) % P
    if len(raw) != 32 or y >= P or x * x % P != square or (x == 0 and sign):
        raise ValueError("not a point of the curve")
    return (P - x if x & 1 != sign else x), y


BASE = unpack((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def signed(key: str, message: bytes, signature: str) -> bool:
    """Did the holder of this key sign this? Key and signature in hexadecimal."""
    try:
        public, raw = bytes.fromhex(key), bytes.fromhex(signature)
        point, nonce, s = unpack(public), unpack(raw[:32]), int.from_bytes(raw[32:], "little")
    except ValueError:
        return False
    h = int.from_bytes(hashlib.sha512(raw[:32] + public + message).digest(), "little") % L
    return len(raw) == 64 and s < L and times(s, BASE) == add(nonce, times(h, point))


@dataclass(frozen=True, slots=True)
class Chain:  # an export whose links fit
    job: str
    bodies: tuple[dict[str, Any], ...]  # {"entry": …, "seq": …, "term": …}, one per link told
    hashes: tuple[str, ...]  # of all links
    key: str = ""  # that signed it; empty: nobody did
    withheld: int = 0  # links that tell of other customers' jobs
    terms: frozenset[str] = frozenset()  # their digests; one of "": none

    def facts(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Where an entry says that the job stood after it; nothing in an old one."""
        return dict(body["entry"].get("jobs", {}).get(self.job, {}))


def seal_message(job: str, links: int, head: str) -> bytes:
    said = {"head": head, "job": job, "links": links}
    return EXPORT + json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def read_chain(lines: Iterable[str], key: str = "") -> Chain:
    """The links and the seal. A withheld link's hash is taken as given: what follows covers it."""
    bodies, hashes, seal = list[dict[str, Any]](), [ROOT], dict[str, Any]()
    for at, line in enumerate(lines, 1):
        plain = _object(line, f"line {at} of the export")
        if plain.keys() == {"seal"} and not seal:
            seal = plain["seal"]
            continue
        if seal or plain.keys() != {"number", "hash", "body"}:
            raise Broken(f"line {at} of the export is no link, or comes after the seal")
        if plain["number"] != at:
            raise Broken(f"link {at} is missing: number {plain['number']} is in its place")
        body = _object(plain["body"], f"the body of link {at}")
        fits = hashlib.sha256(f"{hashes[-1]}\n{plain['body']}".encode()).hexdigest()
        hashes.append(str(plain["hash"]))
        if body.keys() != {"withheld"}:
            bodies.append(body)
            if fits != hashes[-1]:
                raise Broken(f"link {at} was changed, or what came before it was")
    events, withheld = [body["entry"]["event"] for body in bodies], len(hashes) - 1 - len(bodies)
    specs = [event["body"]["spec"] for event in events if event["kind"] == "Submitted"]
    if not specs or not (withheld or events[0]["kind"] == "Submitted"):
        raise Broken("the chain does not begin with a job's submission")
    job, links, head = str(specs[0]["job"]), len(hashes) - 1, hashes[-1]
    if seal or key:
        if [seal.get("links"), seal.get("head"), seal.get("job")] != [links, head, job]:
            raise Broken("the seal is missing, or of other links: the tail may have been cut off")
        if key and str(seal.get("key")).lower() != key.lower():
            raise Broken(f"signed by {seal.get('key')}, and the key that you gave is {key}")
        if not signed(str(seal["key"]), seal_message(job, links, head), str(seal.get("signature"))):
            raise Broken("the signature of the seal is wrong")
    terms, by = frozenset(spec.get("terms") or "" for spec in specs), str(seal.get("key", ""))
    return Chain(job, tuple(bodies), tuple(hashes[1:]), by, withheld, terms)


def _once(pairs: list[tuple[str, Any]]) -> Any:
    return dict(pairs) if len(dict(pairs)) == len(pairs) else int("a name came twice")


def _object(text: str, what: str) -> dict[str, Any]:
    try:  # Strictly: each name once, and no NaN, which no limit is ever below or above.
        return dict(json.loads(text, object_pairs_hook=_once, parse_constant=int))
    except (ValueError, TypeError, RecursionError):
        raise Broken(f"{what} is no JSON object") from None


def read_steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Its lines; the last one may have been cut short by a death."""
    texts, found = list(lines), list[dict[str, Any]]()
    for at, text in enumerate(texts, 1):
        try:
            found.append(_object(text, f"line {at} of the step log"))
        except Broken:
            if at < len(texts) or text.endswith("\n"):
                raise
    dated = any("at" in line for line in found)
    for line in found:
        times = [*line.get("busy", {}).values(), line.get("at") if dated else 0]
        if "fallback_to" not in line and not all(0 <= float(each) < 1e12 for each in times):
            raise Broken(f"step {line['step']} of the step log has an impossible time")
    return found


def check_heads(chain: Chain, steps: Lines) -> tuple[int, int]:
    """How many heads the step log quotes, in order, and how many links come after the last."""
    number = {hash_: at for at, hash_ in enumerate(chain.hashes, 1)}
    before, quoting = 0, [line for line in steps if line.get("head")]
    for line in quoting:
        if number.get(line["head"], -1) < before:
            raise Broken(f"head {line['head']} of step {line['step']} is not in this chain by then")
        before = number[line["head"]]
    return len(quoting), len(chain.hashes) - before


def stretches(steps: Lines) -> list[Stretch]:
    """Of the step log; its steps have no hole, and its samples come once each."""
    found, one, back, ends = list[Stretch](), dict[str, Any](), -1, {0: 0}
    for two in map(dict, steps):
        due = back if back >= 0 else one.get("step", -2) + 1
        if "fallback_to" in two:
            back = two["fallback_to"]
            if not 0 <= back < due and one:
                raise Broken(f"a fallback to step {back} where {due} is due")
            continue
        step, (first, past), at = two["step"], two["samples"], two.get("at", 0)
        if step != due >= 0:
            raise Broken(f"the step log goes on with step {step} where {due} is due")
        if not ends.get(step, first) == first <= past:
            raise Broken(f"samples of step {step} begin at {first}, not at {ends.get(step)}")
        whole, busy = at - one.get("at", at), sum(two.get("busy", {}).values())
        busy = busy if busy <= whole + 0.1 else 0.0  # More than there was excuses nothing.
        low, high = one.get("generation", 0), two["generation"]
        new = range(low + 1 if low <= high else high, high + 1)
        found.append((one, two, new, back, whole - busy, busy))
        one, back, ends[step + 1] = two, -1, past
    return found


@dataclass(frozen=True, slots=True)
class Terms:  # what was promised: the part `[guarantee]` of terms.toml
    promised: float = 0.90  # of the failures that count: resolved live, no progress lost
    credit: float = 0.25  # of the period's fees, owed if the rate is below that
    begins: str = ""  # the period's first day, like 2026-01-31; empty: the whole chain
    days: int = 365
    gap_medians: float = 10.0  # a gap of more median steps than this is an incident by itself
    gap_seconds_min: float = 0.0  # no gap shorter than this is one
    confidence: float = 0.95
    excluded: Sequence[str] = ("user_error", "stopped", "not_begun")  # or no_spare; listed


@dataclass(frozen=True, slots=True)
class Judged:
    incident: str
    at: float
    standing: str  # resolved | missed | unproven (the step log does not show it): these count;
    why: str  # planned | excluded | open | joined (the step log shows it as one with the next)


@dataclass(frozen=True, slots=True)
class Guarantee:  # the rate, Wilson's interval around it, and what it is made of
    resolved: int
    counted: int
    rate: float  # 1 where nothing counted
    low: float
    high: float
    credit: float  # of the fees; 0 while the promise is kept
    incidents: tuple[Judged, ...]
    declared: Mapping[str, float]  # seconds that the job declared as pauses: not hidden
    notes: tuple[str, ...]
    finished: bool  # the chain ends where the job does


class Told:  # what the chain says, by generation and incident; as many as the job counted
    def __init__(self, chain: Chain) -> None:
        self.owner: dict[int, str] = {}  # of a generation: the incident that it began in, or start
        self.opened, self.closed, seen = dict[str, float](), dict[str, dict[str, Any]](), set[str]()
        self.digests: dict[int, set[tuple[str, str]]] = {}
        self.last, self.hidden, self.quit, asked, orderly = dict[str, Any](), 0, 0.0, 1e99, True
        for body in chain.bodies:
            facts, event, now = chain.facts(body), body["entry"]["event"], body["entry"]["now"]
            closed, state, said = facts.get("closed", {}), self.last.get("state", ""), event["body"]
            if event["kind"] == "Submitted":  # Anew, maybe: it may count from none again.
                orderly, asked = state in ("", *OVER), 1e99
                seen = seen if facts.get("incidents") else set()
            if event["kind"] == "StopAsked" and not said.get("rewind"):
                alone = state in BUSY and "incident" not in self.last
                asked, self.quit = min(asked, now), now if alone else 0.0
            for r in (r for r in said.get("reports", [said]) if r.get("phase") == "verify"):
                agreed = {e for s in r["seats"] for e in s.get("digests", {}).items()}
                self.digests.setdefault(r["generation"], set()).update(agreed)
            if "incident" in facts:
                self.opened.setdefault(facts["incident"], facts["opened_at"])
            if closed:
                if closed["id"] in self.closed:
                    raise Broken(f"incident {closed['id']} is closed for the second time")
                self.opened.pop(closed["id"], None)
                self.closed[closed["id"]] = {**closed, "asked": asked < closed["opened_at"]}
            start = facts.get("kind") == "start" and orderly and state not in BUSY
            name = "start" if start else facts.get("incident") or closed.get("id", "")
            self.owner.setdefault(facts.get("generation", 0), name)
            seen |= {facts.get("incident", ""), closed.get("id", "")} - {""}
            self.hidden = facts.get("incidents", len(seen) + self.hidden) - len(seen)
            if self.hidden < 0 or (self.hidden and not chain.withheld):
                raise Broken(f"{self.hidden} of the incidents that the job counts are not here")
            self.last = {**(facts or self.last), "now": now}


def guarantee(chain: Chain, steps: Lines, terms: Terms) -> Guarantee:
    """Every incident of the chain and every stretch of the step log, judged by the same rules."""
    told, found, judged, notes = Told(chain), stretches(steps), list[Judged](), list[str]()
    usual = [seconds for one, _, new, back, seconds, _ in found if one and not new and back < 0]
    limit = max(terms.gap_medians * statistics.median_low(usual or [0]), terms.gap_seconds_min)
    notes += [] if len(usual) >= 5 else ["too few steps to say what a gap is"]
    claimed, known = set[int](), {"start", *told.closed}
    for name, closed in told.closed.items():
        g = closed["generation"]
        own = [n for n, s in enumerate(found) if g in s[2][-1:] and n not in claimed]
        here = own[0] if own and told.owner.get(g, "") in ("", name) else -1
        closed["joined"] = here < 0 and any(g in s[2][:-1] and s[0] and s[3] < 0 for s in found)
        closed["alike"] = len(told.digests.get(g, ())) == len(dict(told.digests.get(g, ()))) > 0
        judged.append(_judged(closed, found[here] if here >= 0 else None, terms, limit))
        claimed |= {here}
    for n in range(told.hidden):
        judged.append(Judged(f"withheld-{n}", told.last["now"], "unproven", "in a withheld link"))
    for name, at in told.opened.items():
        long = told.last["now"] - at > limit or name != told.last.get("incident")
        judged.append(Judged(name, at, "missed" if long else "open", "not resolved"))
    tail = told.quit - (found[-1][1].get("at", 1e99) if found else 1e99)  # By two clocks.
    found += [(found[-1][1], {"step": "end"}, range(0), -1, tail, 0.0)] if tail > 60 else []
    for n, (one, two, new, back, seconds, busy) in enumerate(found):
        owners, why = {told.owner.get(g, "") for g in new}, ""
        waiting = owners & told.opened.keys()  # What is open explains one change, and no more.
        told.opened = {k: v for k, v in told.opened.items() if k not in waiting}
        if back >= 0 and n not in claimed and "start" not in owners:
            why = f"went back to step {back}"
        elif one and new and not (owners & known or waiting):
            why = f"generation {new[-1]} began"
        elif one and not new and seconds > limit:
            why = f"{seconds:.3g} s without a step"
        notes += [f"{busy:.3g} s before step {two['step']} were declared"] if busy > limit else []
        gap = Judged(f"gap-{two['step']}", one.get("at", 0.0), "missed", f"{why}, unexplained")
        judged += [gap] if why else []
    if terms.begins:
        first = datetime.fromisoformat(terms.begins).replace(tzinfo=UTC).timestamp()
        judged = [j for j in judged if first <= j.at < first + terms.days * 86_400]
    ends = [j.standing for j in judged]
    resolved = ends.count("resolved")
    counted = resolved + ends.count("missed") + ends.count("unproven")
    notes.append(f"with exclusions: {resolved} of {counted + ends.count('excluded')} resolved live")
    rate, declared = resolved / counted if counted else 1.0, dict[str, float]()
    for name, length in (each for line in steps for each in line.get("busy", {}).items()):
        declared[name] = declared.get(name, 0.0) + length
    figures = resolved, counted, rate, *wilson(resolved, counted, terms.confidence)
    listed = tuple(judged), declared, tuple(notes), told.last.get("state") in OVER
    return Guarantee(*figures, terms.credit * (rate < terms.promised), *listed)


def _judged(closed: Mapping[str, Any], mine: Stretch | None, terms: Terms, limit: float) -> Judged:
    """Resolved means: live, at the last committed step, nothing twice, all holders alike."""
    name, at, outcome = closed["id"], float(closed["opened_at"]), closed["outcome"]
    one, two, _, back, seconds, _ = mine or ({}, {}, range(0), -1, 0.0, 0.0)
    problem = f"went back to step {back}" if back >= 0 else ""
    if outcome in WISHED and not closed["causes_count"]:
        problem = problem or (f"a planned pause of {seconds:.3g} s" if seconds > limit else "")
        return Judged(name, at, "missed" if problem else "planned", problem or "nothing had failed")
    raised = ["exception"] * closed["causes_count"] == [cause["sign"] for cause in closed["causes"]]
    fresh = bool(two and not one and not two["step"])
    true = {"failed": raised, "stopped": closed["asked"], "restart": fresh}.get(outcome, True)
    if true and (exclusion := EXCLUDED.get(outcome, outcome)) in terms.excluded:
        return Judged(name, at, "excluded", f"{exclusion}: ended as {outcome}")
    if outcome != "resumed":
        problem = problem or f"ended as {outcome}"
    elif not closed["alike"]:
        problem = "the digests of the holders were not alike, or not compared"
    elif one and one["step"] >= closed["boundary"]:
        problem = f"resumed at {closed['boundary']}, and step {one['step']} was committed"
    elif not one:
        why = f"the step log does not show how generation {closed['generation']} began"
        return Judged(name, at, "joined" if closed["joined"] else "unproven", why)
    return Judged(name, at, "missed" if problem else "resolved", problem or "live, nothing lost")


def wilson(good: int, of: int, confidence: float) -> tuple[float, float]:
    if not of:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    rate, spread = good / of, z * z / of
    middle = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (rate * (1 - rate) / of + spread / of / 4) ** 0.5
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def lines_of(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line for line in file if line.strip()]


def check(asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    raw = asked.terms.read_bytes() if asked.terms else b""
    terms = Terms(**tomllib.loads(raw.decode()).get("guarantee", {}))
    chain = read_chain(lines_of(asked.export), asked.key)
    if chain.terms != {hashlib.sha256(raw).hexdigest() if asked.terms else ""}:
        raise Broken("the terms were changed, not named by the job, or not given (--terms)")
    if asked.terms:
        seal = _object(Path(f"{asked.terms}.sig").read_text(), "the terms' signature")
        ours = (asked.key or seal["key"]).lower() == seal["key"].lower()
        if not ours or not signed(seal["key"], TERMS + raw, seal["signature"]):
            raise Broken("the terms are not signed by this key")
    steps = read_steps(lines_of(asked.steps))
    (heads, after), found = check_heads(chain, steps), guarantee(chain, steps, terms)
    good, links = asked.unsigned or bool(asked.key and heads), len(chain.hashes)
    made = [line["step"] for line in steps if "step" in line] or [-1]
    end = "kept" if found.rate >= terms.promised else f"MISSED, owed: {found.credit:.0%} of fees"
    told = {"good": good, "job": chain.job, "links": links, "links_after_last_head": after}
    told |= {"links_withheld": chain.withheld, "key": chain.key or "NOBODY", "heads": heads}
    told |= {"steps": [made[0], max(made)], "fallbacks": sum("fallback_to" in s for s in steps)}
    told |= {"terms": asdict(terms)} | asdict(found)
    rate = f"{found.resolved} of {found.counted} resolved live: {found.rate:.1%} (Wilson "
    rate += f"{terms.confidence:.0%}: {found.low:.1%} to {found.high:.1%}), promised "
    told["verdict"] = f"{rate}{terms.promised:.0%}: {end}" + "; NOT FINISHED" * (not found.finished)
    lines = [f"{name:<22}{value}" for name, value in told.items() if name != "incidents"]
    lines += [f"  {each.standing:<9}{each.incident:<12}{each.why}" for each in found.incidents]
    lines += [] if good else ["NOT PROVEN: no --key was given, or no head is quoted (--unsigned)"]
    return told, "".join("".join(c if c.isprintable() else "?" for c in s) + "\n" for s in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check an exported chain and its step log.")
    parser.add_argument("export", type=Path)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--key", help="who must have signed, in hexadecimal")
    parser.add_argument("--unsigned", action="store_true", help="good without a key or a head too")
    parser.add_argument("--terms", type=Path, help="terms.toml, with terms.toml.sig beside it")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        plain, text = check(asked)
    except (Broken, *WRONG) as e:
        what = str(e) if isinstance(e, Broken) else f"not as it was written: {e!r}"
        plain, text = {"good": False, "why": what}, f"BAD: {what}\n"
    sys.stdout.write(json.dumps(plain) + "\n" if asked.json else text)
    return 0 if plain["good"] else 1 if "why" in plain else 2


if __name__ == "__main__":
    sys.exit(main())
