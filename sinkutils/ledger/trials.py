"""What no record's numbers settle: the paper's proofs on random weights, and trials on weights that records kept."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from sinkutils.ledger.rules import FAILS, HOLDS, Outcome
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.study.config import from_dict

if TYPE_CHECKING:
    from sinkutils.measuring.own import Subject
    from sinkutils.measuring.propositions import RepeatedTokens

SEQUENCES = 50
EPSILON = 0.3
EXACT = 1e-9  # float64 over a few blocks or steps
EDITED = (5, 10, 15, 20, 25, 30)  # t of Table 7; its sixth column is headed 25 again


# --- Appendix B.1 and C.4 on random weights, in float64 --------------------------------------------------------------


@lru_cache
def _seen(position: str, length: int) -> RepeatedTokens:
    from sinkutils.measuring.propositions import repeated_tokens

    return repeated_tokens(position, length)


def _outcome(says: str, holds: bool, facts: str = "") -> Outcome:
    return Outcome(says, HOLDS if holds else FAILS, facts=facts, why="" if holds else "exact")


def _alpha_1(position: str, length: int) -> float:
    """The largest alpha_1 over layers and heads."""
    return float(_seen(position, length).weights[..., 0].mean(dim=-1).max())


def _said(position: str, length: int) -> str:
    return f"alpha_1 at T = {length}: {position} {_alpha_1(position, length):.3f}"


def _follows(position: str, length: int) -> bool:
    """Whether the attention is that of the proposition's closed form."""
    seen = _seen(position, length)
    return float((seen.weights - seen.closed_form()).abs().max()) < EXACT


def _never_grows(position: str, length: int) -> bool:
    """Whether g never grows with the distance, as Propositions 2 and 3 take it to."""
    return bool((_seen(position, length).logits.diff(dim=-1) <= EXACT).all())


def _tiny(difference: float) -> str:
    """A rounding error without the digits that differ from machine to machine."""
    return f"under {EXACT:.0e}" if difference < EXACT else f"{difference:.1e}"


def equal_states() -> list[Outcome]:
    """Eqs. 10-17: repeated tokens have one hidden state in every block."""
    from sinkutils.measuring.propositions import PROPOSITION

    apart = {position: _seen(position, 64).hidden_difference for position in PROPOSITION}
    return [
        _outcome(f"{name}: all h_t equal h_1", largest < EXACT, f"largest difference: {name} {_tiny(largest)}")
        for name, largest in apart.items()
    ]


def uniform_without_positions() -> list[Outcome]:
    """Proposition 1: A_ti = 1/t."""
    return [_outcome("attention is 1/t", _follows("nope", 64), _said("nope", 64))]


def relative_has_no_sink() -> list[Outcome]:
    """Proposition 2 for T5's bucket numbers, which the published code adds: the closed form, the proof's premise, and
    the conclusion at lengths below and far beyond D = 128, for which the proof argues.
    """
    lengths = (64, 160, 512)
    return [
        _outcome("the closed form of Eq. 20", all(_follows("relative", length) for length in lengths)),
        _outcome("g never grows with the distance", _never_grows("relative", 160)),
        *(_outcome(f"alpha_1 at most {EPSILON} at T = {length}", _alpha_1("relative", length) <= EPSILON,
                   _said("relative", length)) for length in lengths),
    ]  # fmt: skip


def alibi_has_no_sink() -> list[Outcome]:
    """Proposition 3: attention falls with the distance, so that x_1 gets less than uniform attention gives it."""
    return [
        _outcome("g never grows with the distance", _never_grows("alibi", 64)),
        _outcome("alpha_1 below uniform attention's", _alpha_1("alibi", 64) < _alpha_1("nope", 64), _said("alibi", 64)),
    ]


def rotary_is_bounded() -> list[Outcome]:
    """Proposition 4: the bound of Eq. 28, and attention that falls with t."""
    both = [_seen("rotary", length) for length in (16, 160)]
    slack = min(float((seen.bound()[..., None] - seen.weights).min()) for seen in both)
    return [
        _outcome("A_ti within the bound of Eq. 28", slack >= -EXACT),
        _outcome("alpha_1 falls with T", _alpha_1("rotary", 160) < _alpha_1("rotary", 16),
                 f"{_said('rotary', 16)}; {_said('rotary', 160)}"),
        _outcome(f"alpha_1 at most {EPSILON} at T = 160", _alpha_1("rotary", 160) <= EPSILON),
    ]  # fmt: skip


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
        if optimizer == "sgd":
            sgd([self.weight], [gradient], [None], momentum=0.0, dampening=0.0, nesterov=False, maximize=False,
                **self.settings)  # fmt: skip
        else:
            adamw([self.weight], [gradient], [self.first], [self.second], [], [self.count], amsgrad=False, beta1=0.9,
                  beta2=0.95, maximize=False, **self.settings)  # fmt: skip


@lru_cache
def scaling_difference(optimizer: str) -> float:
    """The largest of `scaling_differences` under the paper's rule."""
    return max(scaling_differences(optimizer))


def scaling_is_rescaling() -> list[Outcome]:
    """Eqs. 32-42."""
    return [
        _outcome(f"{name}: both runs have the same weights at every step", scaling_difference(name) < EXACT,
                 f"largest difference in 20 steps: {name} {_tiny(scaling_difference(name))}")
        for name in ("sgd", "adamw")
    ]  # fmt: skip


PROOFS: dict[str, Callable[[], list[Outcome]]] = {
    "equal_states": equal_states,
    "proposition_1": uniform_without_positions,
    "proposition_2": relative_has_no_sink,
    "proposition_3": alibi_has_no_sink,
    "proposition_4": rotary_is_bounded,
    "scale_is_rescaling": scaling_is_rescaling,
}


# --- on the weights of a record: a number a seed, which the rules judge like any other -------------------------------


def _repeat(own: Subject) -> float:
    """Excess alpha_1 on one token repeated (Table 1 left)."""
    return own.measure(own.inputs("repeat", SEQUENCES, own.length), norms=False).excess(1)


def _window_first(own: Subject) -> float:
    """Fig. 6 middle: mean excess of the first key that each query t > w sees, t - w + 1, at T = C; uniform is 1 / w.

    NaN, which counts as not held, for a model without a window, such as the base.
    """
    shape: Any = own.model.config
    window = shape.attention.window
    if window is None:
        return math.nan
    heads = [(layer, head) for layer in range(shape.num_layers) for head in range(shape.num_heads)]
    ids = own.inputs("random", SEQUENCES, own.context)
    report = own.measure(ids, norms=False, heads=heads, keep=("map",))
    maps = torch.stack([kept.map for kept in report.kept.values() if kept.map is not None])
    first = maps.diagonal(offset=1 - window, dim1=-2, dim2=-1)[..., 1:]  # A[t, t - w + 1] for t > w
    return float((first.mean() - 1 / window) / (1 - 1 / window))


class HiddenNorms:
    """An `Observer` of ||h^l|| at every position, x* included: `blocks` has a row of means over samples for each."""

    def __init__(self) -> None:
        self.blocks: list[list[float]] = []

    def embedding(self, hidden: Tensor) -> None:
        """Not looked at."""

    def attention(self, *args: Any) -> None:
        """Not looked at."""

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.blocks.append(torch.linalg.vector_norm(hidden, dim=-1).mean(dim=0).tolist())


def sink_token_ratios(model: nn.Module, ids: Tensor) -> list[float]:
    """||h|| at the sink token x* over the mean of x_1..x_T, for each block, mean over ids (samples, T) (Fig. 7 middle).

    What `measure` gives has x_1 as its first position; here x* is the first of T + 1. Raises ValueError for a model
    without a sink token.
    """
    from sinkutils.measuring.report import norm_ratio

    if not isinstance(model, TransformerLM) or not model.config.sink_token:
        raise ValueError("model must be a TransformerLM with a sink token: LMConfig(sink_token=True)")
    seen = HiddenNorms()
    with torch.no_grad():
        model.hidden(ids.to(model.embed.weight.device), seen)
    return norm_ratio(seen.blocks)


@lru_cache(maxsize=512)
def untrained_ratio(model: str, length: int, name: str, positions: tuple[int, ...]) -> float:
    """The largest norm ratio at these positions of a model before its first step, on 2 texts of random tokens.

    model: the LMConfig of a record, as JSON. x_1 sees only itself, so that its state is not a mean of others': with
    softmax its norm is about three times theirs without any training.
    """
    from sinkutils.measuring.measure import measure

    untrained = TransformerLM(from_dict(LMConfig, json.loads(model))).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(untrained.config.vocab_size, (2, length), generator=generator)
    report = measure(untrained, ids, targets=(1,))
    return max(max(report.norm_ratio(name, k)) for k in positions)


def _star_hidden(own: Subject) -> float:
    """The largest of `sink_token_ratios` before the last block, over that of an untrained model, whose x* stands out a
    little too because it sees only itself; any input will do.
    """
    ids = own.inputs("random", SEQUENCES, own.length)
    trained, untrained = (
        max(sink_token_ratios(model, ids)[:-1])
        for model in (own.model, TransformerLM(own.model.config))  # type: ignore[arg-type]
    )
    return trained / untrained


def _edited(own: Subject, swap: bool) -> float:
    """Table 7 on one token repeated, the weakest of its columns: with p_1 replaced by p_t, the largest share of the
    excess on x_1 that is left; with both swapped, the least excess of alpha_t over alpha_1.
    """
    from sinkutils.measuring.load import replace_position, swap_positions

    ids = own.inputs("repeat", SEQUENCES, own.length)
    before = own.measure(ids, norms=False).excess(1)
    seen = []
    for t in EDITED:
        with (swap_positions if swap else replace_position)(own.model, t):
            report = own.measure(ids, targets=(1, t), norms=False)
        seen.append(report.excess(t) - report.excess(1) if swap else report.excess(1) / before)
    return min(seen) if swap else max(seen)


def _unbiased(own: Subject) -> Subject:
    """The same weights in a model without the biases k*, v* (Section 7.3)."""
    shape: Any = own.model.config
    plain = TransformerLM(dataclasses.replace(shape, attention=dataclasses.replace(shape.attention, bias="none")))
    plain.load_state_dict(own.model.state_dict(), strict=False)
    return dataclasses.replace(own, model=plain.eval())


def _without_bias(own: Subject) -> float:
    """Excess alpha_1 on natural text after the biases are taken away."""
    return _unbiased(own).measure(own.inputs("natural", SEQUENCES, own.length), norms=False).excess(1)


def _loss_without_bias(own: Subject) -> float:
    """What the loss on natural text rises by when the biases are taken away, in nats a token."""
    ids = own.inputs("natural", SEQUENCES, own.length)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()))

    return loss(_unbiased(own).model) - loss(own.model)


_TRIALS: dict[str, Callable[[Subject], float]] = {
    "repeat": _repeat,
    "window_first": _window_first,
    "star_hidden": _star_hidden,
    "replaced": lambda own: _edited(own, swap=False),
    "swapped": lambda own: _edited(own, swap=True),
    "without_bias": _without_bias,
    "loss_without_bias": _loss_without_bias,
}


@lru_cache
def trial(name: str, folder: Path, written: int) -> float:
    """The number of a trial on the weights of a record; `written`: when, so that new ones are tried anew."""
    from sinkutils.measuring.own import subject
    from sinkutils.training.trainer import one_thread

    with one_thread(torch.device("cpu")):  # too small for several
        return _TRIALS[name](subject(str(folder), "cpu"))
