"""Since when the ledger stands: its hash, and every later change with its reason.

A record's provenance holds the hash of the ledger that it was made under; `results` reads only records of a ledger that
is listed in frozen.json, so none that was made before the claims and rules were fixed. After a change of the ledger
`python -m sinkutils.ledger.frozen "reason"` adds the entry. The claims of later papers (`ledger.later`) were written
after the paper's own: the records of their variants count from the entry on that says so ("later": true). Of the claim
on norms that keep sinks, added once more, this cannot be read off the records of its two variants: they name the entry
before, whose rules stood in the clone that trained them, though their code is that of the commit that added the claim.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import lru_cache
from pathlib import Path

from sinkutils import paths

PATH = Path(__file__).with_name("frozen.json")


def ledger_sha256() -> str:
    """The hash of the modules whose text decides the ledger's verdicts."""
    names = ("claims", "conclusions", "effects", "later", "open_models", "proofs", "results", "rules", "trials")
    text = b"".join((paths.PACKAGE / "ledger" / f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(text).hexdigest()


@lru_cache
def ledgers(later: bool = False) -> tuple[str, ...]:
    """The hashes of the ledger, the frozen one first; later: of those that hold the claims of later papers."""
    entries = json.loads(PATH.read_text(encoding="utf-8"))
    first = next((i for i, entry in enumerate(entries) if entry.get("later")), len(entries)) if later else 0
    return tuple(entry["sha256"] for entry in entries[first:])


def change(reason: str) -> None:
    """Add the ledger as it is now to frozen.json. Raises ValueError without a reason, and where it is listed."""
    entries = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else []
    current = ledger_sha256()
    if not reason.strip() or current in {entry["sha256"] for entry in entries}:
        raise ValueError("give the reason of a change that is not listed yet")
    entries.append({"sha256": current, "reason": reason})
    PATH.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    change(" ".join(sys.argv[1:]))
