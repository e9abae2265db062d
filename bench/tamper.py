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


def removed(texts: list[str], at: int, rng: random.Random) -> None:
    del texts[at]


def changed(texts: list[str], at: int, rng: random.Random) -> None:
    """One value somewhere in the entry, as a forger would want it or at random."""
    body = json.loads(texts[at])
    entry = body["entry"]
    facts: dict[str, Any] = next(iter(entry.get("jobs", {}).values()), {})
    closed = facts.get("closed")
    acts: list[Callable[[], None]] = [
        lambda: entry.__setitem__("why", str(entry["why"]) + " as agreed"),
        lambda: entry.__setitem__("now", float(entry["now"]) - rng.uniform(0.001, 100)),
        lambda: body.__setitem__("term", int(body["term"]) + 1),
        lambda: facts.__setitem__("step", int(facts.get("step", 0)) + 1),
        lambda: entry.__setitem__("event", {**entry["event"], "kind": "Forged"}),
    ]
    if closed:
        acts.append(lambda: closed.__setitem__("outcome", "moved"))
        acts.append(lambda: closed.__setitem__("causes_count", closed["causes_count"] + 1))
    rng.choice(acts)()
    if _text(body) == texts[at]:
        entry["why"] = "something else"
    texts[at] = _text(body)


def reordered(texts: list[str], at: int, rng: random.Random) -> None:
    other = rng.choice([n for n in range(len(texts)) if n != at])
    texts[at], texts[other] = texts[other], texts[at]


def invented(texts: list[str], at: int, rng: random.Random) -> None:
    made = json.loads(texts[at])
    made["entry"]["why"] = "a spare was ready all the time"
    texts.insert(at, _text(made))


def cut(texts: list[str], at: int, rng: random.Random) -> None:
    del texts[at:]


def _text(body: Body) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


CLASSES: dict[str, Callable[[list[str], int, random.Random], None]] = {
    "removed": removed,
    "changed": changed,
    "reordered": reordered,
    "invented": invented,
    "cut": cut,
}


def forged(
    export: Sequence[Body], quoted: int, what: str, skill: str, rng: random.Random, key: bytes
) -> list[str]:
    """A forgery of an export. `quoted`: the last link whose head the step log has."""
    *links, seal = export
    texts = [str(link["body"]) for link in links]
    numbers = range(quoted if skill == "insider" else len(texts))
    at = rng.choice(numbers[1:] if what == "cut" else numbers)
    CLASSES[what](texts, at, rng)
    if skill == "plainly":
        return _plain_lines(links, texts, seal, rng)
    made, head = [], verify.ROOT
    for number, text in enumerate(texts, 1):
        head = hashlib.sha256(f"{head}\n{text}".encode()).hexdigest()
        made.append(json.dumps({"number": number, "hash": head, "body": text}))
    if skill == "rehashed":
        return [*made, json.dumps(seal)]
    signer = signing.signer(key if skill == "insider" else rng.randbytes(32))
    return [*made, signer.seal(seal["seal"]["job"], len(made), head).strip()]


def _plain_lines(
    links: Sequence[Body], texts: Sequence[str], seal: Body, rng: random.Random
) -> list[str]:
    """Edited with a text editor: the old lines where they fit, a changed one with its old hash."""
    known = {link["body"]: link for link in links}
    lines = []
    for number, text in enumerate(texts, 1):
        old = {**links[min(number, len(links)) - 1], "body": text}
        lines.append(json.dumps(known.get(text, old)))
    return lines if rng.random() < 0.5 else [*lines, json.dumps(seal)]


def caught(lines: Sequence[str], steps: Sequence[Body], key: str) -> str:
    """What the verifier says; empty: nothing."""
    try:
        chain = verify.read_chain(lines, key)
        verify.check_heads(chain, steps)
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
    parsed = [json.loads(line) for line in export]
    kinds = [(what, skill) for what in CLASSES for skill in SKILLS]
    found = []
    for number in range(count):
        what, skill = kinds[number % len(kinds)]
        lines = forged(parsed, quoted, what, skill, rng, signer.seed)
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
