"""The claims of data/claims.yaml as Python objects: what each says, and the checks that decide it.

    checks:
      - {present: [kv_bias, k_bias], of: excess_star}
            each has a sink; `absent`: none has
      - {more: [lr_x2, base, lr_half]}
            each has more than the next
      - {more: base, than: [gate_head, gate_element]}
            the one has more than each of the others
      - {kept: post_norm}
            no less than the base; `same`: neither less nor more
      - {loss: [sigmoid, elu]}
            no worse a validation loss than the base's; `worse`: a worse one
      - {alike: sft_sigmoid, than: sft_softmax, of: end}
            within a factor of two
      - {together: dyt}
            sink and large element, or neither; `apart`: one of the two
      - {fails: linear}
            training fails; `trains`: it does not
      - {real: sink_natural, above: 2.9}
            a number of each model in `real_models`; or `below` the bar

`of` names a quantity, `excess` where none stands; `than` what is compared with, `base` where
nothing stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path

from sinkutils import paths
from sinkutils.checks import require
from sinkutils.ledger.quantities import QUANTITIES
from sinkutils.ledger.readings import real_models
from sinkutils.study.config import Json

OF_ONE_RUN = ("present", "absent", "together", "apart", "fails", "trains")
OF_RUNS = (*OF_ONE_RUN, "more", "same", "kept", "alike", "loss", "worse")
REAL = ("above", "below")  # of a real model's number


@dataclass(frozen=True)
class Check:
    """One question about one or two experiments, or about a real model ("above", "below")."""

    kind: str
    runs: tuple[str, ...]  # or the model
    quantity: str
    bar: float = math.nan  # of a question about a real model


@dataclass(frozen=True)
class Claim:
    """One claim.

    given: what it takes for granted, without which nothing is tested. remark: by hand.
    gate: which presets cannot show it (`judge.GATED`). trivial: why it could not have failed here,
    if so: it holds in an untrained model ("untrained"), by "mathematics" ("mathematics, in part":
    not in every case), or by "construction"; or part of it is that a sink goes which our models
    do not have ("no sink to lose, in part"). fresh: only seeds that came after the claim count.
    """

    id: str
    source: str
    claim: str
    checks: tuple[Check, ...]
    given: tuple[Check, ...]
    paper: str = ""  # its numbers as printed
    part: str = "paper"  # "later": of a later paper; "ours": of this project
    gate: str = "trained"
    trivial: str = ""
    fresh: bool = False
    remark: str = ""


@lru_cache(maxsize=2)
def read_claims(path: Path = paths.LEDGER / "claims.yaml") -> tuple[Claim, ...]:
    """Every claim, in the file's order.

    Raises ValueError that names the claim and what is wrong with it.
    """
    claims = []
    for entry in paths.read_yaml(path):
        try:
            checks = _checks(entry.get("checks", []))
            given = _checks(entry.get("given", []))
            fields = entry | {"checks": checks, "given": given}
            claims.append(Claim(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"claim {entry.get('id', 'without id')}: {error}") from error
    return tuple(claims)


def _checks(lines: list[Json]) -> tuple[Check, ...]:
    """One check for each run, or pair of runs, or real model, of each line of YAML."""
    checks = list[Check]()
    for line in lines:
        kinds = line.keys() - {"real", "of", "than"}
        require(len(kinds) == 1, f"a check asks for one thing: {line}")
        kind = kinds.pop()
        if "real" in line:
            checks += _of_models(kind, line)
        else:
            checks += _of_runs(kind, line)
    return tuple(checks)


def _of_models(kind: str, line: Json) -> list[Check]:
    question = line["real"]
    bar = line[kind]
    models = [model for model, asked in real_models() if asked == question]
    known = kind in REAL and len(models) > 0
    require(known and len(line) == 2, f"no such check: {line}")
    require(isinstance(bar, int | float), f"the bar is no number: {line}")
    return [Check(kind, (model,), question, bar) for model in models]


def _of_runs(kind: str, line: Json) -> list[Check]:
    usual = "valid_loss" if kind in ("loss", "worse") else "excess"
    quantity = line.get("of", usual)
    require(kind in OF_RUNS and quantity in QUANTITIES, f"no such check: {line}")
    names = _listed(line[kind])
    if kind in OF_ONE_RUN:
        require("than" not in line, f"{kind} compares with nothing: {line}")
        return [Check(kind, (name,), quantity) for name in names]
    if kind == "more" and "than" not in line:  # each more than the next
        require(len(names) > 1, f"more than what? {line}")
        pairs = [*pairwise(names)]
    else:
        others = _listed(line.get("than", "base"))
        pairs = [*product(names, others)]
    return [Check(kind, pair, quantity) for pair in pairs]


def _listed(names: str | list[str]) -> list[str]:
    return names if isinstance(names, list) else [names]
