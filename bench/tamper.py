"""A thousand forgeries of one real export: `keepstep verify` must catch every one of them.

    python -m bench.tamper --export FILE --steps FILE --key-file FILE [--count 1000] [--seed 1]

What is done to the chain: an entry is removed, changed, invented, or moved, or the tail is cut off.
How well the forger covers it up:

    plainly    the line is edited, and no more
    rehashed   every number and hash after it is made to fit; the seal stays as it was
    resealed   and a new seal is made, with a key of the forger's own
    insider    and the seal is made with the real key: only the heads in the step log are left

An insider's forgery begins at or before the last head that the step log quotes. What comes after
that head rests on the signature alone, so an insider can forge it; docs/account.md says so.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import record
from keepstep.ledger import signing, verify

Body = dict[str, Any]
SKILLS = ("plainly", "rehashed", "resealed", "insider")


def removed(bodies: list[Body], at: int, rng: random.Random) -> None:
    del bodies[at]


def changed(bodies: list[Body], at: int, rng: random.Random) -> None:
    """One value somewhere in the entry, as a forger would want it or at random."""
    entry = bodies[at]["entry"]
    facts = next(iter(entry.get("jobs", {}).values()), {})
    closed = facts.get("closed")
    acts: list[Callable[[], None]] = [
        lambda: entry.__setitem__("why", str(entry["why"]) + " as agreed"),
        lambda: entry.__setitem__("now", float(entry["now"]) - rng.uniform(0.001, 100)),
        lambda: bodies[at].__setitem__("term", int(bodies[at]["term"]) + 1),
        lambda: facts.__setitem__("step", int(facts.get("step", 0)) + 1),
        lambda: entry.__setitem__("event", {**entry["event"], "kind": "Forged"}),
    ]
    if closed:
        acts.append(lambda: closed.__setitem__("outcome", "moved"))
        acts.append(lambda: closed.__setitem__("causes_count", closed["causes_count"] + 1))
    rng.choice(acts)()


def reordered(bodies: list[Body], at: int, rng: random.Random) -> None:
    other = rng.choice([n for n in range(len(bodies)) if n != at])
    bodies[at], bodies[other] = bodies[other], bodies[at]


def invented(bodies: list[Body], at: int, rng: random.Random) -> None:
    made = json.loads(json.dumps(bodies[at]))
    made["entry"]["why"] = "a spare was ready all the time"
    bodies.insert(at, made)


def cut(bodies: list[Body], at: int, rng: random.Random) -> None:
    del bodies[at:]


CLASSES: dict[str, Callable[[list[Body], int, random.Random], None]] = {
    "removed": removed,
    "changed": changed,
    "reordered": reordered,
    "invented": invented,
    "cut": cut,
}


def forged(
    export: Sequence[str], quoted: int, what: str, skill: str, rng: random.Random, key: bytes
) -> list[str]:
    """A forgery of an export. `quoted`: the last link whose head the step log has."""
    *links, seal = [json.loads(line) for line in export]
    bodies = [json.loads(link["body"]) for link in links]
    numbers = list(range(len(bodies)))
    if skill == "insider":
        numbers = numbers[:quoted]
    if what == "cut":
        # With the seal left below it, unless the forger can do better.
        numbers = numbers[1:]
    at = rng.choice(numbers)
    before = [json.dumps(body, sort_keys=True) for body in bodies]
    CLASSES[what](bodies, at, rng)
    if [json.dumps(body, sort_keys=True) for body in bodies] == before:
        bodies[at]["entry"]["why"] = "something else"
    if skill == "plainly":
        return _plain_lines(links, bodies, before, seal, rng)
    made, head = [], verify.ROOT
    for number, body in enumerate(bodies, 1):
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        head = hashlib.sha256(f"{head}\n{text}".encode()).hexdigest()
        made.append(json.dumps({"number": number, "hash": head, "body": text}))
    if skill == "rehashed":
        return [*made, json.dumps(seal)]
    signer = signing.signer(key if skill == "insider" else rng.randbytes(32))
    return [*made, signer.seal(seal["seal"]["job"], len(made), head).strip()]


def _plain_lines(
    links: list[Body], bodies: list[Body], before: list[str], seal: Body, rng: random.Random
) -> list[str]:
    """Edited with a text editor: the old lines where they fit, the rest with made-up hashes."""
    known = dict(zip(before, links, strict=True))
    lines = []
    for number, body in enumerate(bodies, 1):
        text = json.dumps(body, sort_keys=True)
        link = known.get(text)
        if link is None:
            body_text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            old = links[min(number, len(links)) - 1]
            link = {"number": number, "hash": old["hash"], "body": body_text}
        lines.append(json.dumps(link))
    return lines if rng.random() < 0.5 else [*lines, json.dumps(seal)]


def caught(lines: Sequence[str], steps: Sequence[Body], key: str) -> str:
    """What the verifier says; empty: nothing."""
    try:
        chain = verify.read_chain(lines, key)
        verify.check_heads(chain, steps)
        verify.check_counts(chain, steps)
        verify.guarantee(chain, steps, verify.Terms())
    except verify.Broken as error:
        return str(error)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"not as it was written: {error!r}"
    return ""


def last_quoted(export: Sequence[str], steps: Sequence[Body]) -> int:
    number = {json.loads(line).get("hash"): at for at, line in enumerate(export, 1)}
    return max(number[line["head"]] for line in steps if line.get("head"))


def campaign(
    export: Sequence[str], steps: Sequence[Body], signer: signing.Signer, count: int, seed: int
) -> list[dict[str, str]]:
    """All classes and skills in turn; each with what the verifier said."""
    rng = random.Random(seed)
    quoted = last_quoted(export, steps)
    kinds = [(what, skill) for what in CLASSES for skill in SKILLS]
    found = []
    for number in range(count):
        what, skill = kinds[number % len(kinds)]
        lines = forged(export, quoted, what, skill, rng, signer.seed)
        said = caught(lines, steps, signer.public)
        found.append({"what": what, "skill": skill, "said": said})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    export = verify.lines_of(asked.export)
    steps = verify.read_steps(verify.lines_of(asked.steps))
    signer = signing.load(asked.key_file)
    untouched = caught(export, steps, signer.public)
    found = campaign(export, steps, signer, asked.count, asked.seed)
    missed = [each for each in found if not each["said"]]
    by_kind = collections.Counter(f"{f['what']}, {f['skill']}" for f in found if f["said"])
    for kind, number in sorted(by_kind.items()):
        print(f"  {kind:<24}{number} caught")
    path = record.keep(
        "tamper",
        {"seed": asked.seed, "links": len(export) - 1, "untouched": untouched, "forgeries": found},
    )
    print(f"untouched: {untouched or 'passes'}")
    print(f"{len(found) - len(missed)} of {len(found)} forgeries caught; raw result: {path.name}")
    return 1 if missed or untouched else 0


if __name__ == "__main__":
    sys.exit(main())
