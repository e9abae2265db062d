"""Check a job's account with Python alone: `python verify.py export.jsonl steps.jsonl --key KEY`.

For whoever pays. It needs no Keepstep: this file, the exported chain of the job, and the step log
that the job itself wrote. It checks

    chain        each link's hash covers the link before it; none is missing, moved or put between
    signature    Ed25519 over the head and the number of links, by the key that you were given
    heads        every head that your own step log quotes is in this chain, and in this order: a
                 chain that was written anew does not have them, whatever key signed it
    counts       steps without a hole, samples once each, as many incidents as the job counted
    rate         of the failures that count, those resolved live: reckoned again from the above

Links after the last quoted head rest on the signature alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = hashlib.sha256(b"keepstep journal 1").hexdigest()
EXPORT, TERMS = b"keepstep export 1\n", b"keepstep terms 1\n"
"""What is signed begins with its kind: a signature of one thing is none of another."""
Lines = Sequence[Mapping[str, Any]]


class Broken(Exception):
    """The first thing that does not fit; the rest would only follow from it."""


# ---------------------------------------------------------------- Ed25519 (RFC 8032), verification

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int, int, int]


def add(a: Point, b: Point) -> Point:
    m, n = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    c, d = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    e, f, g, h = n - m, d - c, d + c, n + m
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(number: int, point: Point) -> Point:
    found: Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            found = add(found, point)
        point, number = add(point, point), number >> 1
    return found


def pack(point: Point) -> bytes:
    inverse = pow(point[2], P - 2, P)
    x, y = point[0] * inverse % P, point[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def unpack(raw: bytes) -> Point:
    number = int.from_bytes(raw, "little")
    sign, y = number >> 255, number & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if len(raw) != 32 or y >= P or x * x % P != square or (x == 0 and sign):
        raise ValueError("not a point of the curve")
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


BASE = unpack((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))


def signed(key: str, message: bytes, signature: str) -> bool:
    """Did the holder of this key sign this? Key and signature in hexadecimal."""
    try:
        public, raw = bytes.fromhex(key), bytes.fromhex(signature)
        point, nonce, s = unpack(public), unpack(raw[:32]), int.from_bytes(raw[32:], "little")
    except ValueError:
        return False
    h = int.from_bytes(hashlib.sha512(raw[:32] + public + message).digest(), "little") % L
    good = pack(times(s, BASE)) == pack(add(nonce, times(h, point)))
    return good and len(raw) == 64 and s < L


@dataclass(frozen=True, slots=True)
class Chain:
    """An export whose links fit."""

    job: str
    bodies: tuple[dict[str, Any], ...]  # {"entry": …, "seq": …, "term": …}, one per link
    hashes: tuple[str, ...]
    key: str = ""  # that signed it; empty: nobody did

    def facts(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Where an entry says that the job stood after it; nothing in an old one."""
        return dict(body["entry"].get("jobs", {}).get(self.job, {}))


def seal_message(job: str, links: int, head: str) -> bytes:
    said = {"head": head, "job": job, "links": links}
    return EXPORT + json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def read_chain(lines: Iterable[str], key: str = "") -> Chain:
    """The links and the seal below them. With a key, only its signature will do."""
    bodies: list[dict[str, Any]] = []
    hashes = [ROOT]
    seal: dict[str, Any] = {}
    for at, line in enumerate(lines, 1):
        plain = _object(line, f"line {at} of the export")
        if seal:
            raise Broken(f"line {at} of the export comes after the seal")
        if plain.keys() == {"seal"}:
            seal = plain["seal"]
            continue
        if plain.keys() != {"number", "hash", "body"}:
            raise Broken(f"line {at} of the export is no link")
        if plain["number"] != at:
            raise Broken(f"link {at} is missing: number {plain['number']} is in its place")
        fits = hashlib.sha256(f"{hashes[-1]}\n{plain['body']}".encode()).hexdigest()
        if fits != plain["hash"]:
            raise Broken(f"link {at} was changed, or what came before it was")
        hashes.append(fits)
        bodies.append(_object(plain["body"], f"the body of link {at}"))
    if not bodies or bodies[0]["entry"]["event"]["kind"] != "Submitted":
        raise Broken("the chain does not begin with a job's submission")
    job = str(bodies[0]["entry"]["event"]["body"]["spec"]["job"])
    if seal or key:
        _check_seal(seal, job, hashes, key)
    return Chain(job, tuple(bodies), tuple(hashes[1:]), str(seal.get("key", "")))


def _check_seal(seal: Mapping[str, Any], job: str, hashes: Sequence[str], key: str) -> None:
    links, head = len(hashes) - 1, hashes[-1]
    if [seal.get("links"), seal.get("head"), seal.get("job")] != [links, head, job]:
        raise Broken("the seal is missing, or of other links: the tail may have been cut off")
    if key and seal.get("key") != key:
        raise Broken(f"signed by {seal.get('key')}, and the key that you gave is {key}")
    if not signed(str(seal["key"]), seal_message(job, links, head), str(seal.get("signature"))):
        raise Broken("the signature of the seal is wrong")


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise Broken(f"{what} is no JSON object") from None


def read_steps(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Its lines; the last one may have been cut short by a death."""
    texts = list(lines)
    if texts and not texts[-1].rstrip().endswith("}"):
        texts.pop()
    return [_object(text, f"line {at} of the step log") for at, text in enumerate(texts, 1)]


def check_heads(chain: Chain, steps: Lines) -> int:
    """How many heads the step log quotes; each must be in the chain, in order."""
    number = {hash_: at for at, hash_ in enumerate(chain.hashes, 1)}
    before, quoting = 0, [line for line in steps if line.get("head")]
    for line in quoting:
        if number.get(line["head"], -1) < before:
            raise Broken(f"head {line['head']} of step {line['step']} is not in this chain by then")
        before = number[line["head"]]
    return len(quoting)


def check_counts(chain: Chain, steps: Lines) -> None:
    """Steps without a hole, samples once each, and as many incidents as the job counted."""
    expected, ends = -1, {0: 0}
    for line in steps:
        if "fallback_to" in line:
            expected = line["fallback_to"]
            continue
        step, (first, past) = line["step"], line["samples"]
        if step != expected >= 0:
            raise Broken(f"the step log goes on with step {step} where {expected} is due")
        if first != ends.get(step, first):
            raise Broken(f"samples of step {step} begin at {first}, not at {ends[step]}")
        expected, ends[step + 1] = step + 1, past
    counted, seq, seen = 0, 0, set[str | None]()
    for body in chain.bodies:
        if body["seq"] <= seq:
            raise Broken(f"entry {body['seq']} comes after entry {seq}")
        seq, facts = body["seq"], chain.facts(body)
        if body["entry"]["event"]["kind"] == "Submitted" and facts.get("incidents") == 0:
            seen = set()  # Submitted anew, maybe: it counts from none again.
        counted = facts.get("incidents", counted)
        seen |= {facts.get("incident"), facts.get("closed", {}).get("id")} - {None}
        if facts and len(seen) != counted:
            raise Broken(f"entry {seq}: the job counts {counted} incidents, {len(seen)} are here")


@dataclass(frozen=True, slots=True)
class Terms:
    """What was promised: the part `[guarantee]` of terms.toml."""

    promised: float = 0.90  # of the failures that count: resolved live, no progress lost
    credit: float = 0.25  # of the period's fees, owed if the rate is below that
    begins: str = ""  # the period's first day, like 2026-01-31; empty: the whole chain
    days: int = 365
    gap_medians: float = 10.0  # a gap of more median steps than this is an incident by itself
    gap_seconds_min: float = 0.0  # no gap shorter than this is one
    confidence: float = 0.95
    excluded: Sequence[str] = ("user_error", "stopped", "not_begun")  # or no_spare; listed


def read_terms(text: str) -> Terms:
    plain: dict[str, Any] = tomllib.loads(text).get("guarantee", {})
    if unknown := plain.keys() - {field.name for field in fields(Terms)}:
        raise Broken(f"the terms have an unknown setting: {min(unknown)}")
    return Terms(**plain)


@dataclass(frozen=True, slots=True)
class Judged:
    """One incident: resolved | missed (both count) | planned | excluded | open (these do not)."""

    incident: str
    at: float
    standing: str
    why: str


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The rate, Wilson's interval around it, and what it is made of."""

    resolved: int
    counted: int
    rate: float  # 1 where nothing counted
    low: float
    high: float
    credit: float  # of the fees; 0 while the promise is kept
    incidents: tuple[Judged, ...]
    declared: Mapping[str, float]  # seconds that the job declared as pauses: not hidden


def guarantee(chain: Chain, steps: Lines, terms: Terms) -> Guarantee:
    """Every incident of the chain and every gap of the step stream, judged by the same rules."""
    judged: list[Judged] = []
    digests: dict[int, dict[str, set[str]]] = {}
    explained, opened, declared = set[int](), dict[str, float](), dict[str, float]()
    begun = {line.get("generation", -1): at for at, line in reversed([*enumerate(steps)])}
    for body in chain.bodies:
        facts, event = chain.facts(body), body["entry"]["event"]
        if event["kind"] == "PhaseReport" and event["body"]["phase"] == "verify":
            for seat in event["body"]["seats"]:
                for portion, digest in seat.get("digests", {}).items():
                    agreed = digests.setdefault(event["body"]["generation"], {})
                    agreed.setdefault(portion, set()).add(digest)
        if "incident" in facts:
            opened.setdefault(facts["incident"], facts["opened_at"])
        if "incident" in facts or facts.get("kind") == "start":
            explained.add(facts["generation"])
        if closed := facts.get("closed"):
            opened.pop(closed["id"], None)
            explained.add(closed["generation"])
            alike = digests.get(closed["generation"], {}).values()
            judged.append(_judged(closed, steps, begun, terms, [len(found) for found in alike]))
    for name, at in opened.items():  # Only one that the chain ends in may still be open.
        end = "open" if name == chain.facts(chain.bodies[-1]).get("incident") else "missed"
        judged.append(Judged(name, at, end, "not resolved"))
    judged += _gaps(steps, explained, terms)
    if terms.begins:
        first = datetime.fromisoformat(terms.begins).replace(tzinfo=UTC).timestamp()
        judged = [j for j in judged if first <= j.at < first + terms.days * 86_400]
    resolved = sum(1 for j in judged if j.standing == "resolved")
    counted = resolved + sum(1 for j in judged if j.standing == "missed")
    rate = resolved / counted if counted else 1.0
    for name, seconds in (each for line in steps for each in line.get("busy", {}).items()):
        declared[name] = declared.get(name, 0.0) + seconds
    low, high = wilson(resolved, counted, terms.confidence)
    owed = 0.0 if rate >= terms.promised else terms.credit
    return Guarantee(resolved, counted, rate, low, high, owed, tuple(judged), declared)


def _judged(
    closed: Mapping[str, Any], steps: Lines, begun: dict[int, int], terms: Terms, digests: list[int]
) -> Judged:
    """Resolved means: live, at the last committed step, nothing twice, all holders alike."""
    name, at, outcome = closed["id"], float(closed["opened_at"]), closed["outcome"]
    wished = outcome in ("moved", "abandoned", "parked", "saved", "stopped")
    if wished and not closed["causes_count"]:
        return Judged(name, at, "planned", f"nothing had failed: {outcome}")
    here = min((i for g, i in begun.items() if g >= closed["generation"]), default=len(steps))
    before = steps[here - 1] if here else {}
    raised = any(cause["sign"] == "exception" for cause in closed["causes"])
    kinds = {"failed": "user_error" if raised else "", "stopped": "stopped", "saved": "no_spare"}
    exclusion = kinds.get(outcome, "not_begun" if outcome == "restart" and not before else "")
    if exclusion in terms.excluded:
        return Judged(name, at, "excluded", f"{exclusion}: ended as {outcome}")
    then = steps[here] if here < len(steps) and before else {}
    problem = ""
    if outcome != "resumed":
        problem = f"ended as {outcome}"
    elif "fallback_to" in before:
        problem = f"went back to step {before['fallback_to']}"
    elif not digests or max(digests) > 1:
        problem = "the digests of the holders were not alike, or not compared"
    elif before and before["step"] >= closed["boundary"]:
        problem = f"resumed at {closed['boundary']}, and step {before['step']} was committed"
    elif then and [then["step"] - 1, then["samples"][0]] != [before["step"], before["samples"][1]]:
        problem = f"went on with step {then['step']} after step {before['step']}, or other samples"
    return Judged(name, at, "missed" if problem else "resolved", problem or "live, nothing lost")


def _gaps(steps: Lines, explained: set[int], terms: Terms) -> list[Judged]:
    """Gaps and changes of generation that no incident of the chain explains: incidents too."""
    pairs = [p for p in pairwise(steps) if p[0].get("at") and p[1].get("at")]
    lengths = [two["at"] - one["at"] - sum(two.get("busy", {}).values()) for one, two in pairs]
    limit = max(terms.gap_medians * statistics.median(lengths or [0]), terms.gap_seconds_min)
    found = []
    for (one, two), seconds in zip(pairs, lengths, strict=True):
        new = set(range(one["generation"] + 1, two["generation"] + 1))
        if (new or seconds > limit) and not new & explained:
            why = f"generation {max(new)} began" if new else f"{seconds:.3g} s without a step"
            found.append(Judged(f"gap-{two['step']}", one["at"], "missed", f"{why}, unexplained"))
    return found


def wilson(good: int, of: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval: right for small numbers and for rates near one."""
    if not of:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    rate, spread = good / of, z * z / of
    middle = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (rate * (1 - rate) / of + spread / of / 4) ** 0.5
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").split("\n") if line.strip()]


def check(asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What was found, for programs and for people."""
    raw = asked.terms.read_bytes() if asked.terms else b""
    terms = read_terms(raw.decode())
    chain = read_chain(lines_of(asked.export), asked.key)
    if raw:
        seal = _object(Path(f"{asked.terms}.sig").read_text(), "the terms' signature")
        named = chain.bodies[0]["entry"]["event"]["body"]["spec"].get("terms")
        ours = named == hashlib.sha256(raw).hexdigest() and asked.key in ("", seal["key"])
        if not ours or not signed(seal["key"], TERMS + raw, seal["signature"]):
            raise Broken("the terms were changed, not named by the job, or not signed by this key")
    steps = read_steps(lines_of(asked.steps))
    heads = check_heads(chain, steps)
    check_counts(chain, steps)
    found = guarantee(chain, steps, terms)
    by = f"signed by {chain.key or 'NOBODY'}" + ("" if asked.key else " (no --key was given)")
    listed = "".join(f"  {e.standing:<9}{e.incident:<12}{e.why}\n" for e in found.incidents)
    quoted = f"{heads} heads, all in the chain" if heads else "NO head: nothing betrays a rewrite"
    end = "kept" if found.rate >= terms.promised else f"MISSED, owed: {found.credit:.0%} of fees"
    return {"good": True, "heads": heads, **asdict(found)}, (
        f"chain    {len(chain.hashes)} links of job {chain.job}, whole, {by}\n"
        f"steps    {len(steps)} lines, no hole, samples once; {quoted}\n"
        f"{listed}  declared pauses: {dict(found.declared) or 'none'}\n"
        f"rate     {found.resolved} of {found.counted} resolved live: {found.rate:.1%} "
        f"(Wilson {terms.confidence:.0%}: {found.low:.1%} to {found.high:.1%}), "
        f"promised {terms.promised:.0%}: {end}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check an exported chain and its step log.")
    parser.add_argument("export", type=Path)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--key", default="", help="who must have signed, in hexadecimal")
    parser.add_argument("--terms", type=Path, help="terms.toml, with terms.toml.sig beside it")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        plain, text = check(asked)
    except (Broken, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        what = str(error) if isinstance(error, Broken) else f"not as it was written: {error!r}"
        plain, text = {"good": False, "why": what}, f"BAD: {what}\n"
    sys.stdout.write(json.dumps(plain) + "\n" if asked.json else text)
    return 0 if plain["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
