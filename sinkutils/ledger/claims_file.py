"""The claims of data/claims.yaml as Python objects: what each says, and the checks that decide it.

    checks:
      - {present: [kv_bias, k_bias], of: excess_star}   each has a sink; `absent`: none has
      - {more: [lr_x2, base, lr_half]}                  each has more than the next
      - {more: base, than: [gate_head, gate_element]}   the one has more than each of the others
      - {kept: post_norm}                               no less than the base; `same`: neither less nor more
      - {loss: [sigmoid, elu]}                          no worse a validation loss than the base's; `worse`: a worse one
      - {alike: sft_sigmoid, than: sft_softmax, of: end}   within a factor of two
      - {together: dyt}                                 sink and large element, or neither; `apart`: one of the two
      - {fails: linear}                                 training fails; `trains`: it does not
      - {real: sink_natural, above: 2.9}                a number of each model in `real_models`; or `below` the bar
`of` names a quantity, `excess` where none stands; `than` what is compared with, `base` where nothing stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml

from sinkutils import paths
from sinkutils.ledger.quantities import QUANTITIES

KINDS_OF_ONE = ("present", "absent", "together", "apart", "fails", "trains")
KINDS = (*KINDS_OF_ONE, "more", "same", "kept", "alike", "loss", "worse")
PARTS = ("paper", "later", "ours")  # the paper's claims, those of later papers, those of this project


@dataclass(frozen=True)
class Check:
    """One question about one or two experiments, or about real models (kinds "above" and "below", no runs)."""

    kind: str
    runs: tuple[str, ...]
    quantity: str
    fresh: bool = False  # only seeds that came after the claim count
    bar: float = math.nan  # of a question about real models


@dataclass(frozen=True)
class Claim:
    """One claim. given: what it takes for granted, without which nothing is tested. remark: by hand.

    gate: which presets cannot show it (`judge.GATED`). trivial: why it could not have failed here, if so: it holds in
    an untrained model ("untrained"), by "mathematics" ("mathematics, in part": not in every case), or by
    "construction".
    """

    id: str
    source: str
    claim: str
    checks: tuple[Check, ...]
    given: tuple[Check, ...]
    paper: str = ""  # its numbers as printed
    part: str = "paper"
    gate: str = "trained"
    trivial: str = ""
    fresh: bool = False
    remark: str = ""


@lru_cache(maxsize=2)
def read_claims(path: Path = paths.LEDGER / "claims.yaml") -> tuple[Claim, ...]:
    """Every claim, in the file's order. Raises ValueError that names the claim and what is wrong with it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
    return tuple(_claim(entry) for entry in yaml.load(path.read_text(encoding="utf-8"), loader))


def _claim(entry: dict[str, Any]) -> Claim:
    """A claim from its entry in the file."""
    try:
        fresh = entry.get("fresh", False)
        checks = {field: _checks(entry.get(field, []), fresh) for field in ("checks", "given")}
        return Claim(**{**entry, **checks})
    except (TypeError, ValueError) as error:
        raise ValueError(f"claim {entry.get('id', 'without id')}: {error}") from error


def _checks(lines: list[dict[str, Any]], fresh: bool) -> tuple[Check, ...]:
    """One check for each run, or pair of runs, of each line of YAML."""
    checks: list[Check] = []
    for line in lines:
        if "real" in line:
            kind = "above" if "above" in line else "below"
            checks.append(Check(kind, (), line["real"], bar=float(line[kind])))
            continue
        kind, *more = [key for key in line if key not in ("of", "than")]
        quantity = line.get("of", "valid_loss" if kind in ("loss", "worse") else "excess")
        if more or kind not in KINDS or quantity not in QUANTITIES:
            raise ValueError(f"no such check: {line}")
        names = _listed(line[kind])
        groups: Iterable[tuple[str, ...]] = product(names, _listed(line.get("than", "base")))
        if kind in KINDS_OF_ONE:
            groups = zip(names, strict=True)
        elif kind == "more" and "than" not in line:
            groups = pairwise(names)
        checks += [Check(kind, runs, quantity, fresh) for runs in groups]
    return tuple(checks)


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]
