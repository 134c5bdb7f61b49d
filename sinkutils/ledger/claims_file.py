"""The claims of data/claims.yaml as Python objects: what each says, and the checks that decide it.

    checks:
      - {present: [kv_bias, k_bias], of: excess_star}   each has a sink; `absent`: none has
      - {more: [lr_x2, base, lr_half]}                  each has more than the next
      - {more: base, than: [gate_head, gate_element]}   the one has more than each of the others
      - {kept: post_norm}                               no less than the base; `same`: neither less nor more
      - {loss: [sigmoid, elu]}                          no worse a validation loss than the base's; `worse`: a worse one
      - {alike: sft_sigmoid, than: sft_softmax, of: end}   within a factor of two
      - {together: dyt}                                 sink and massive activation, or neither; `apart`: one of them
      - {fails: linear}                                 training fails; `trains`: it does not
      - {real: sink_on_natural_text}                    a judge of `real_models`
`of` names a quantity, `excess` where none stands; `than` what is compared with, `base` where nothing stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sinkutils import paths
from sinkutils.ledger.quantities import QUANTITIES

ONE_RUN = ("present", "absent", "together", "apart", "fails", "trains")
TWO_RUNS = ("more", "same", "kept", "alike", "loss", "worse")
PARTS = ("paper", "later", "ours")
TRIVIAL = ("", "untrained", "mathematics", "construction")
GATES = ("trained", "any token", "none")
FIELDS = ("id", "part", "source", "claim", "paper", "gate", "trivial", "given", "checks", "fresh", "remark")


@dataclass(frozen=True)
class Check:
    """One question about one or two experiments, or a judge of real models (kind "real", its name as the quantity)."""

    kind: str
    runs: tuple[str, ...]
    quantity: str
    fresh: bool = False  # only seeds that came after the claim count


@dataclass(frozen=True)
class Claim:
    """One claim. trivial: why it could not have failed here, if so. given: what it takes for granted."""

    id: str
    source: str
    claim: str
    paper: str
    part: str
    gate: str
    trivial: str
    remark: str
    checks: tuple[Check, ...]
    given: tuple[Check, ...]


def claims_path() -> Path:
    """data/claims.yaml."""
    return paths.ROOT / "data" / "claims.yaml"


def read_claims(path: Path | None = None) -> tuple[Claim, ...]:
    """Every claim, in the file's order. Raises ValueError that names the claim and what is wrong with it."""
    path = path or claims_path()
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: Path, written: int) -> tuple[Claim, ...]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
    claims = tuple(_claim(entry) for entry in yaml.load(path.read_text(encoding="utf-8"), loader))
    ids = [claim.id for claim in claims]
    twice = {id for id in ids if ids.count(id) > 1}
    if twice:
        raise ValueError(f"{path.name}: claims with the same id: {', '.join(sorted(twice))}")
    return claims


def _claim(entry: dict[str, Any]) -> Claim:
    name = entry.get("id", "a claim without id")
    for field in ("id", "source", "claim"):
        if not entry.get(field):
            raise ValueError(f"claim {name}: {field} is missing")
    for field in entry:
        if field not in FIELDS:
            raise ValueError(f"claim {name}: unknown field {field!r}; known are {', '.join(FIELDS)}")
    chosen = {}
    for field, choices in (("part", PARTS), ("gate", GATES), ("trivial", TRIVIAL)):
        chosen[field] = entry.get(field, choices[0])
        if chosen[field] not in choices:
            raise ValueError(f"claim {name}: {field} must be one of {', '.join(choices)}; got {chosen[field]!r}")
    checks = {}
    for field in ("checks", "given"):
        found: list[Check] = []
        for line in entry.get(field, ()):
            found += _checks(name, line, entry.get("fresh", False))
        checks[field] = tuple(found)
    words = {field: str(entry.get(field, "")) for field in ("source", "claim", "paper", "remark")}
    return Claim(id=name, **words, **chosen, **checks)


def _checks(claim: str, line: dict[str, Any], fresh: bool) -> list[Check]:
    """The checks of one line of YAML, one for each run or pair of runs."""
    kinds = [key for key in line if key not in ("of", "than")]
    if len(kinds) != 1 or kinds[0] not in (*ONE_RUN, *TWO_RUNS, "real"):
        raise ValueError(f"claim {claim}: no such check: {line}")
    kind = kinds[0]
    names = _listed(line[kind])
    if kind == "real":
        return [Check(kind, (), name) for name in names]
    quantity = line.get("of", "valid_loss" if kind in ("loss", "worse") else "excess")
    if quantity not in QUANTITIES:
        raise ValueError(f"claim {claim}: no such quantity: {quantity}")
    if kind in ONE_RUN:
        return [Check(kind, (name,), quantity, fresh) for name in names]
    if kind == "more" and "than" not in line:
        return [Check(kind, pair, quantity, fresh) for pair in pairwise(names)]
    others = _listed(line.get("than", "base"))
    return [Check(kind, (name, other), quantity, fresh) for name in names for other in others]


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]
