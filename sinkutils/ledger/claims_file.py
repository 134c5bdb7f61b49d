"""The claims of data/claims.yaml as Python objects, with the checks that decide them.

These are all kinds of checks, as they are written in the file:

    checks:
      - {present: [kv_bias, k_bias], of: excess_star}
            each of these experiments has a sink (`absent`: none of them has one)
      - {more: [lr_x2, base, lr_half]}
            each experiment has a larger value than the next
      - {more: base, than: [gate_head, gate_element]}
            the first has a larger value than each of the others
      - {kept: post_norm}
            the value is no less than that of the base (`same`: neither less nor more)
      - {loss: [sigmoid, elu]}
            the validation loss is no worse than that of the base (`worse`: it is worse)
      - {alike: sft_sigmoid, than: sft_softmax, of: end}
            the two values differ by at most a factor of two
      - {together: dyt}
            there are both a sink and a large element, or neither (`apart`: only one of them)
      - {fails: linear}
            the training fails (`trains`: it does not)
      - {real: sink_natural, above: 2.9}
            a number of each real model (`readings.real_models`) lies above the bar (or `below`)

`of` names the quantity; the default is `excess` (`valid_loss` for `loss` and `worse`). `than` names
the experiment to compare with; the default is `base`. `fresh: 3` judges a check on the seeds from 3
on, which were trained after the others were known; beside a claim's id it does so for all of its
checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path

from sinkutils import paths
from sinkutils.checks import Refused, choice, fields, integer, require, short
from sinkutils.ledger.quantities import QUANTITIES
from sinkutils.ledger.readings import real_models
from sinkutils.study.config import Json

OF_ONE_RUN = ("present", "absent", "together", "apart", "fails", "trains")
OF_RUNS = (*OF_ONE_RUN, "more", "same", "kept", "alike", "loss", "worse")
REAL = ("above", "below")  # the kinds of checks on a number of a real model
# For each gate, the presets that cannot show the claim.
GATED = {
    "none": (),
    "trained": ("smoke",),  # a run of seconds has learned nothing yet
    # These models are so small that they have no sink on an ordinary first token.
    "any token": ("smoke", "minute", "laptop"),
    # A training that fails at 60M parameters is not contradicted by one that succeeds at 0.3M.
    "large": ("smoke", "minute", "laptop", "desk", "gpu"),
}


# What a claim of one's own is, where its file does not say it.
OWN = {"part": "ours", "gate": "none"}


@dataclass(frozen=True)
class Check:
    """One check, on one or two experiments or on a real model ("above", "below")."""

    kind: str
    runs: tuple[str, ...]  # the experiments, or the real model
    quantity: str
    bar: float = math.nan  # in a check on a real model, the number to compare with
    fresh: int = 0  # the first seed that counts


@dataclass(frozen=True)
class Claim:
    """One claim.

    given: the premises. If they do not hold, the claim is not tested.
    gate: names the presets that cannot show the claim (GATED).
    remark: a comment written by hand.
    trivial: the reason why the claim could not have failed here, if there is one. It holds in an
    untrained model ("untrained"), by "mathematics" ("mathematics, in part" if not in every case) or
    by "construction". With "no sink to lose, in part", part of the claim is that a sink vanishes
    which our models do not have.
    """

    id: str
    source: str
    claim: str
    checks: tuple[Check, ...]
    given: tuple[Check, ...]
    paper: str = ""  # the paper's numbers as printed
    part: str = "paper"  # "later" for a claim of a later paper, "ours" for one of this project
    gate: str = "trained"
    trivial: str = ""
    remark: str = ""

    def __post_init__(self) -> None:
        fields(self)
        choice("gate", self.gate, GATED)


@lru_cache(maxsize=2)
def read_claims(path: Path = paths.LEDGER / "claims.yaml") -> tuple[Claim, ...]:
    """All claims, in the order of the file.

    Raises ValueError, which names the claim and the mistake in it.
    """
    return _claims(paths.read_yaml(path))


def read_own(path: str | Path) -> tuple[Claim, ...]:
    """The claims of a file of your own, of which an entry needs an id, a claim and checks.

    Raises ValueError as `read_claims`, and OSError if there is no such file.
    """
    entries = paths.read_own_yaml(path)
    listed = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    require(listed and len(entries) > 0, f"{path} is no list of claims, as data/claims.yaml is")
    claims = _claims([OWN | {"source": Path(path).name} | entry for entry in entries])
    for claim in claims:
        require(len(claim.checks) > 0, f"claim {claim.id}: it has no checks")
    return claims


def _claims(entries: list[Json]) -> tuple[Claim, ...]:
    claims = []
    for entry in entries:
        try:
            values = dict(entry)
            fresh = values.pop("fresh", 0)
            values["checks"] = _checks(entry.get("checks", []), fresh)
            values["given"] = _checks(entry.get("given", []))
            claims.append(Claim(**values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"claim {entry.get('id', 'without id')}: {error}") from error
        ids = [claim.id for claim in claims]
        require(ids.count(ids[-1]) == 1, f"two claims have the id {ids[-1]!r}")
    return tuple(claims)


def _checks(lines: list[Json], fresh: int = 0) -> tuple[Check, ...]:
    """The checks of some lines of YAML: one for each run, pair of runs or real model in them.

    fresh: the first seed that counts, if a line does not say it.
    """
    checks = list[Check]()
    listed = isinstance(lines, list) and all(isinstance(line, dict) for line in lines)
    require(listed, f"checks must be a list such as [{{present: k_bias}}], got {short(lines)}")
    for line in lines:
        line = dict(line)
        first = integer("fresh", line.pop("fresh", fresh), least=0)
        kinds = line.keys() - {"real", "of", "than"}
        require(len(kinds) == 1, f"a check asks for one thing: {line}")
        kind = kinds.pop()
        if "real" in line:
            checks += _of_models(kind, line)
        else:
            checks += [replace(check, fresh=first) for check in _of_runs(kind, line)]
    return tuple(checks)


def _of_models(kind: str, line: Json) -> list[Check]:
    question = line["real"]
    bar = line[kind]
    models = [model for model, its_question in real_models() if its_question == question]
    known = kind in REAL and len(models) > 0
    require(known and len(line) == 2, f"no such check: {line}")
    number = isinstance(bar, int | float) and math.isfinite(bar)
    require(number, f"the bar is no number: {line}")
    return [Check(kind, (model,), question, bar) for model in models]


def _of_runs(kind: str, line: Json) -> list[Check]:
    usual = "valid_loss" if kind in ("loss", "worse") else "excess"
    quantity = line.get("of", usual)
    require(kind in OF_RUNS and quantity in QUANTITIES, f"no such check: {line}")
    names = _listed(line[kind])
    if kind in OF_ONE_RUN:
        require("than" not in line, f"{kind} compares with nothing: {line}")
        judged = QUANTITIES[quantity]
        has_bar = judged.excess or judged.bar is not None or kind in ("fails", "trains")
        require(has_bar, f"no bar says how much of {quantity} is {kind}: {line}")
        return [Check(kind, (name,), quantity) for name in names]
    if kind == "more" and "than" not in line:  # each run has more than the next
        require(len(names) > 1, f"more than what? {line}")
        pairs = [*pairwise(names)]
    else:
        others = _listed(line.get("than", "base"))
        pairs = [*product(names, others)]
    for one, other in pairs:
        require(one != other, f"a check compares {one} with itself: {line}")
    return [Check(kind, pair, quantity) for pair in pairs]


def _listed(names: str | list[str]) -> list[str]:
    listed = names if isinstance(names, list) else [names]
    named = len(listed) > 0 and all(isinstance(name, str) for name in listed)
    require(named, f"a check is of names of experiments, got {names}")
    return listed
