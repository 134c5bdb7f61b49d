"""The paper's proofs on random weights, in float64 (Appendix B.1 and C.4): what no record's numbers settle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from sinkutils.ledger.rules import Outcome, told

if TYPE_CHECKING:
    from sinkutils.measuring.propositions import RepeatedTokens

EPSILON = 0.3
EXACT = 1e-9  # float64 over a few blocks or steps
_proved = partial(told, why="computed in float64")
TITLES = {
    "nope": "no positions",
    "relative": "bucket numbers",
    "relative_learned": "learned buckets",
    "alibi": "ALiBi",
    "rotary": "rotary",
}


@lru_cache
def _seen(position: str, length: int) -> RepeatedTokens:
    from sinkutils.measuring.propositions import repeated_tokens

    return repeated_tokens(position, length)


def _alpha_1(position: str, length: int) -> float:
    return _seen(position, length).alpha_1


def _said(position: str, length: int) -> str:
    return f"alpha_1 at T = {length}, {TITLES[position]}: {_alpha_1(position, length):.3f}"


def _follows(position: str, length: int) -> bool:
    """Whether the attention is that of the proposition's closed form."""
    return _seen(position, length).closed_form_difference < EXACT


def _tiny(difference: float) -> str:
    """A rounding error without the digits that differ from machine to machine."""
    return f"under {EXACT:.0e}" if difference < EXACT else f"{difference:.1e}"


def equal_states() -> list[Outcome]:
    """Eqs. 10-17: repeated tokens have one hidden state in every block."""
    from sinkutils.measuring.propositions import PROPOSITION

    apart = {position: _seen(position, 64).hidden_difference for position in PROPOSITION}
    return [
        _proved(
            f"{TITLES[name]}: all h_t equal h_1",
            largest < EXACT,
            f"largest difference, {TITLES[name]}: {_tiny(largest)}",
        )
        for name, largest in apart.items()
    ]


def proposition_1() -> list[Outcome]:
    """Proposition 1: A_ti = 1/t."""
    return [_proved("attention is 1/t", _follows("nope", 64), _said("nope", 64))]


def proposition_2() -> list[Outcome]:
    """Proposition 2 for T5's bucket numbers, which the published code adds: the closed form, the proof's premise, and
    the conclusion at lengths below and far beyond D = 128, for which the proof argues.
    """
    lengths = (64, 160, 512)
    outcomes = [
        _proved("the closed form of Eq. 20", all(_follows("relative", length) for length in lengths)),
        _proved("g never grows with the distance", _seen("relative", 160).never_grows(EXACT)),
    ]
    for length in lengths:
        below = _alpha_1("relative", length) <= EPSILON
        outcomes.append(_proved(f"alpha_1 at most {EPSILON} at T = {length}", below, _said("relative", length)))
    return outcomes


def proposition_3() -> list[Outcome]:
    """Proposition 3: attention falls with the distance, so that x_1 gets less than uniform attention gives it."""
    below = _alpha_1("alibi", 64) < _alpha_1("nope", 64)
    return [
        _proved("g never grows with the distance", _seen("alibi", 64).never_grows(EXACT)),
        _proved("alpha_1 below uniform attention's", below, _said("alibi", 64)),
    ]


def proposition_4() -> list[Outcome]:
    """Proposition 4: the bound of Eq. 28, and attention that falls with t."""
    short, long = (_seen("rotary", length) for length in (16, 160))
    facts = f"{_said('rotary', 16)}; {_said('rotary', 160)}"
    return [
        _proved("A_ti within the bound of Eq. 28", min(short.bound_slack, long.bound_slack) >= -EXACT),
        _proved("alpha_1 falls with T", long.alpha_1 < short.alpha_1, facts),
        _proved(f"alpha_1 at most {EPSILON} at T = 160", long.alpha_1 <= EPSILON),
    ]


# The powers of alpha by which a run without it changes its settings to follow one with it (after Eqs. 35 and 42).
RESCALED = {"sgd": {"lr": 2}, "adamw": {"lr": 1, "eps": -1, "weight_decay": -1}}
_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-2, "weight_decay": 0.0},
    "adamw": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1},
}


def scaling_differences(
    optimizer: str, alpha: float = 0.2, steps: int = 20, powers: Mapping[str, int] | None = None
) -> list[float]:
    """Largest difference between alpha W_O and a rescaled run's weights after each of `steps` steps (Eqs. 32-42).

    One matrix in float64: normalisation scaled by alpha on one side; on the other the initialisation multiplied by
    alpha, and each setting of the optimiser by alpha to its power of `powers` (default: RESCALED, the rule).
    optimizer: "sgd" or "adamw", or ValueError.
    """
    if optimizer not in _SETTINGS:
        raise ValueError(f"optimizer must be 'sgd' or 'adamw', got {optimizer!r}")
    powers = RESCALED[optimizer] if powers is None else powers
    settings = _SETTINGS[optimizer]
    generator = torch.Generator().manual_seed(0)
    start, inputs, targets = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    changed = settings | {name: alpha ** powers[name] * settings[name] for name in powers}
    scaled, rescaled = _Stepped(start.clone(), settings), _Stepped(alpha * start, changed)
    differences = []
    for _ in range(steps):
        for run, factor in ((scaled, alpha), (rescaled, 1.0)):
            weight = run.weight.clone().requires_grad_()
            (gradient,) = torch.autograd.grad((inputs @ (factor * weight) - targets).square().mean(), weight)
            run.step(optimizer, gradient)
        differences.append(float((alpha * scaled.weight - rescaled.weight).abs().max()))
    return differences


class _Stepped:
    """A matrix and what its optimiser remembers of it, by torch's functional forms: the classes import the compiler."""

    def __init__(self, weight: Tensor, settings: dict[str, Any]) -> None:
        self.weight, self.settings = weight, settings
        self.first, self.second, self.count = torch.zeros_like(weight), torch.zeros_like(weight), torch.zeros(())

    def step(self, optimizer: str, gradient: Tensor) -> None:
        options = self.settings | {"maximize": False}
        if optimizer == "sgd":
            sgd([self.weight], [gradient], [None], momentum=0.0, dampening=0.0, nesterov=False, **options)
        else:
            options |= {"amsgrad": False, "beta1": 0.9, "beta2": 0.95}
            adamw([self.weight], [gradient], [self.first], [self.second], [], [self.count], **options)


@lru_cache
def scaling_difference(optimizer: str) -> float:
    """The largest of `scaling_differences` under the paper's rule."""
    return max(scaling_differences(optimizer))


def scale_is_rescaling() -> list[Outcome]:
    """Eqs. 32-42."""
    largest = {title: scaling_difference(name) for name, title in (("sgd", "plain SGD"), ("adamw", "AdamW"))}
    return [
        _proved(
            f"{title}: both runs have the same weights at every step",
            difference < EXACT,
            f"largest difference in 20 steps, {title}: {_tiny(difference)}",
        )
        for title, difference in largest.items()
    ]


_PROOFS = (equal_states, proposition_1, proposition_2, proposition_3, proposition_4, scale_is_rescaling)
PROOFS: dict[str, Callable[[], list[Outcome]]] = {proof.__name__: proof for proof in _PROOFS}  # by claim
