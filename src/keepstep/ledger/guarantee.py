"""The guarantee's terms: written down, signed before the job, and named by it at its submission.

What the terms mean is in verify.py, which whoever pays can run alone; the report uses the very same
functions. Here is what comes before: the file, its signature, and the proof that it was there.
"""

from __future__ import annotations

import datetime
import hashlib
import tomllib
from pathlib import Path

from keepstep.errors import ConfigError
from keepstep.ledger import verify
from keepstep.ledger.signing import Signer

DEFAULT = """\
# What is promised, and how it is counted. Sign it (keepstep admin terms --sign terms.toml) and name
# it when the job is submitted (keepstep run --terms terms.toml): the job's chain then begins with
# its digest, so nobody can exchange it later.

[guarantee]
promised = 0.90         # of the training failures that count: resolved live, no progress lost
credit = 0.25           # of the period's fees, owed if the rate is below that
begins = ""             # the period's first day, like "2026-01-31"; empty: the whole chain
days = 365              # the contract year

# The denominator. Every unplanned incident of the chain counts, and so does every gap in the step
# stream longer than this many median steps that no incident explains, whoever noticed it.
gap_medians = 10.0
gap_seconds_min = 0.0   # no gap shorter than this counts; for steps of milliseconds
confidence = 0.95       # of the interval around the rate (Wilson's)

# Not counted, but listed: user_error (the script raised), stopped (by an operator), not_begun (no
# step was committed yet, so none was lost), no_spare (none came within the hold time).
# Planned moves are never counted, unless they lose something or pause for longer than a gap may be.
excluded = ["user_error", "stopped", "not_begun"]
"""
KINDS = frozenset({"user_error", "stopped", "not_begun", "no_spare"})


def load(path: Path) -> tuple[verify.Terms, str]:
    """The terms in a file, checked, and the file's digest."""
    try:
        raw = path.read_bytes()
        terms = verify.Terms(**tomllib.loads(raw.decode()).get("guarantee", {}))
        datetime.date.fromisoformat(terms.begins or "2026-01-31")
        shares = {"promised": terms.promised, "confidence": terms.confidence}
        within = {name: 0 < value < 1 for name, value in shares.items()}
        sound = terms.gap_medians >= 1 and 1 <= terms.days < 100_000 and 0 <= terms.credit <= 1
        sound = sound and terms.gap_seconds_min >= 0 and not isinstance(terms.excluded, str)
        strange = set(terms.excluded) - KINDS
    except OSError as error:
        raise ConfigError(f"cannot read the terms {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name in (name for name, good in within.items() if not good):
        raise ConfigError(f"{path}: {name} is a share, between 0 and 1")
    if not sound:
        raise ConfigError(f"{path}: gap_medians and days are 1 or more, credit is a share")
    if strange:
        raise ConfigError(f"{path}: excluded knows {', '.join(sorted(KINDS))}, not {min(strange)}")
    return terms, digest(raw)


def digest(raw: bytes) -> str:
    """What a job names its terms by."""
    return hashlib.sha256(raw).hexdigest()


def sign(path: Path, signer: Signer) -> Path:
    """Write the signature beside the terms."""
    load(path)
    beside = path.with_name(path.name + ".sig")
    beside.write_text(signer.seal_terms(path.read_bytes()), encoding="utf-8")
    return beside


def named(chain: verify.Chain) -> str:
    """The digest of the terms that the job was submitted under; empty: none."""
    return min(chain.terms, default="")
