"""Claims that need more than a record's numbers: propositions on random weights, and trials on our own weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkutils.ledger.evidence import (
    ABSENT,
    EPSILON,
    MASSIVE,
    PRESENT,
    Check,
    Results,
    ratio_by_block,
)
from sinkutils.model.decoder import TransformerLM

if TYPE_CHECKING:
    from sinkutils.measuring.own import Subject

SEQUENCES = 50
EXACT = 1e-9  # float64 over a few blocks or steps


# --- Appendix B.1 and C.4 on random weights, in float64 --------------------------------------------------------------


@lru_cache
def _propositions(length: int) -> dict[str, dict[str, Any]]:
    from sinkutils.measuring.propositions import propositions

    return {row["position"]: row for row in propositions(length)}


def _alpha_fact(position: str, length: int) -> tuple[str, str]:
    return f"alpha_1 at T = {length}", f"{position} {_propositions(length)[position]['alpha_1']:.3f}"


def _tiny(difference: float) -> str:
    """A rounding error without the digits that differ from machine to machine."""
    return f"under {EXACT:.0e}" if difference < EXACT else f"{difference:.1e}"


def equal_states() -> list[Check]:
    """Eqs. 10-17: repeated tokens have one hidden state in every block."""
    rows = _propositions(64)
    return [
        Check(f"{name}: all h_t equal h_1", row["hidden_difference"] < EXACT,
              (("largest difference", f"{name} {_tiny(row['hidden_difference'])}"),)) for name, row in rows.items()
    ]  # fmt: skip


def uniform_without_positions() -> list[Check]:
    """Proposition 1: A_ti = 1/t."""
    row = _propositions(64)["nope"]
    return [Check("attention is 1/t", row["closed_form_difference"] < EXACT, (_alpha_fact("nope", 64),))]


def relative_has_no_sink() -> list[Check]:
    """Proposition 2 with T5's bucket number as the bias: the closed form, and the conclusion at two lengths."""
    rows = {length: _propositions(length)["relative"] for length in (16, 64)}
    return [
        *(Check(f"alpha_1 at most {EPSILON} at T = {length} (Eq. 6 grows with the distance, against the proof)",
                row["alpha_1"] <= EPSILON, (_alpha_fact("relative", length),)) for length, row in rows.items()),
        Check("the closed form of Eq. 20", all(row["closed_form_difference"] < EXACT for row in rows.values()),
              core=False),
    ]  # fmt: skip


def alibi_has_no_sink() -> list[Check]:
    """Proposition 3: attention falls with the distance, so that x_1 gets less than uniform attention gives it."""
    row, uniform = _propositions(64)["alibi"], _propositions(64)["nope"]["alpha_1"]
    return [
        Check("g never grows with the distance", bool(row["premise"])),
        Check("alpha_1 below uniform attention's", row["alpha_1"] < uniform,
              (_alpha_fact("alibi", 64), _alpha_fact("nope", 64))),
    ]  # fmt: skip


def rotary_is_bounded() -> list[Check]:
    """Proposition 4: the bound of Eq. 28, and attention that falls with t."""
    short, long = _propositions(16)["rotary"], _propositions(160)["rotary"]
    facts = (_alpha_fact("rotary", 16), _alpha_fact("rotary", 160))
    return [
        Check("A_ti within the bound of Eq. 28", min(short["bound_slack"], long["bound_slack"]) >= -EXACT),
        Check("alpha_1 falls with T", long["alpha_1"] < short["alpha_1"], facts),
        Check(f"alpha_1 at most {EPSILON} at T = 160", long["alpha_1"] <= EPSILON, facts),
    ]


# The powers of alpha by which a run without it changes its settings to follow one with it (after Eqs. 35 and 42).
RESCALED = {"sgd": {"lr": 2}, "adamw": {"lr": 1, "eps": -1, "weight_decay": -1}}
_SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
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
    make, settings = _SETTINGS[optimizer]
    generator = torch.Generator().manual_seed(0)
    start, inputs, targets = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    scaled, rescaled = nn.Parameter(start.clone()), nn.Parameter(alpha * start)
    changed = {name: alpha ** powers[name] * settings[name] for name in powers}
    runs = ((scaled, alpha, make([scaled], **settings)), (rescaled, 1.0, make([rescaled], **settings | changed)))
    differences = []
    for _ in range(steps):
        for weight, factor, step in runs:
            step.zero_grad()
            (inputs @ (factor * weight) - targets).square().mean().backward()
            step.step()
        differences.append(float((alpha * scaled - rescaled).detach().abs().max()))
    return differences


@lru_cache
def scaling_difference(optimizer: str) -> float:
    """The largest of `scaling_differences` under the paper's rule."""
    return max(scaling_differences(optimizer))


def scaling_is_rescaling() -> list[Check]:
    """Eqs. 32-42."""
    return [
        Check(f"{name}: both runs have the same weights at every step", scaling_difference(name) < EXACT,
              (("largest difference in 20 steps", f"{name} {_tiny(scaling_difference(name))}"),))
        for name in ("sgd", "adamw")
    ]  # fmt: skip


# --- Section 3 on our own weights ------------------------------------------------------------------------------------


def _own(results: Results, name: str) -> Subject | None:
    """The model of a run whose weights were kept."""
    from sinkutils.measuring.own import subject

    record = results.weights(name)
    return None if record is None else subject(str(record.folder), "cpu")


def _no_weights(results: Results, name: str) -> str:
    label = results.label(name)
    return f"the weights of {label}: python -m sinkutils train {label} --preset {results.preset} --keep-weights"


def _heads(own: Subject) -> list[tuple[int, int]]:
    """Every (layer, head) of one of our models."""
    shape: Any = own.model.config
    return [(layer, head) for layer in range(shape.num_layers) for head in range(shape.num_heads)]


def own_sink(results: Results, name: str, kind: str, test: Callable[[float], bool], says: str) -> Check:
    """A check of `test` on Sink_1 of our own model on random or repeated tokens."""
    says = f"{results.label(name)}: {says}"
    own = _own(results, name)
    if own is None:
        return Check(says, None, missing=(_no_weights(results, name),))
    value = own.measure(own.inputs(kind, SEQUENCES, own.length), norms=False).sink(1, EPSILON)
    return Check(says, test(value), ((f"Sink_1 % on {kind} tokens", f"{results.label(name)} {value:.1f}"),))


def longer_and_stricter(results: Results) -> list[Check]:
    """Fig. 3: Sink_1 falls with T, and more so for a larger eps; on random tokens."""
    from sinkutils.measuring.report import uniform_alpha

    says = "Sink_1 at T = C not above that at a smaller T", "the share lost is larger at eps = 0.4 than at 0.2"
    own = _own(results, "base")
    if own is None:
        return [Check(says[0], None, missing=(_no_weights(results, "base"),))]
    # Where uniform attention alone exceeds eps, as at T = 16 and eps = 0.2, every head would count.
    lengths = (next(t for t in (own.context // 4, own.context // 2) if uniform_alpha(t) < 0.2), own.context)
    reports = [own.measure(own.inputs("random", SEQUENCES, t), norms=False) for t in lengths]
    sinks = {eps: [report.sink(1, eps) for report in reports] for eps in (0.2, 0.3, 0.4)}
    facts = tuple(
        (f"Sink_1 % at T = {lengths[0]} and {lengths[1]}", f"eps {eps} {short:.1f} and {long:.1f}")
        for eps, (short, long) in sinks.items()
    )
    kept = {eps: long / short if short else 1.0 for eps, (short, long) in sinks.items()}
    return [Check(says[0], sinks[0.3][1] <= sinks[0.3][0], facts), Check(says[1], kept[0.4] < kept[0.2], facts)]


def angles_not_norms(results: Results) -> list[Check]:
    """Fig. 2 bottom: in the heads with a sink, cos(q_t, k_1) is larger than others' and ||q_t|| ||k_1|| smaller."""
    says = "cos(q_t, k_1) above cos(q_t, k_j)", "||q_t|| ||k_1|| below ||q_t|| ||k_j||"
    own = _own(results, "base")
    if own is None:
        return [Check(says[0], None, missing=(_no_weights(results, "base"),))]
    heads = _heads(own)
    report = own.measure(own.inputs("random", SEQUENCES, own.length), norms=False, heads=heads, keep=("qk",))
    strong = [(layer, head) for layer, head in heads if float(report.alpha[:, 0, layer, head].mean()) > EPSILON]
    if not strong:
        return [Check(says[0], None, missing=(f"a head of {results.label('base')} with a sink on random tokens",))]
    cosines = _first_and_others(report.kept[pair].cosine for pair in strong)
    norms = _first_and_others(report.kept[pair].norm_product for pair in strong)
    return [
        Check(says[0], cosines[0] > cosines[1], (("mean cosine", f"x_1 {cosines[0]:.2f}, others {cosines[1]:.2f}"),)),
        Check(says[1], norms[0] < norms[1], (("mean norm product", f"x_1 {norms[0]:.1f}, others {norms[1]:.1f}"),)),
    ]


def _first_and_others(maps: Any) -> tuple[float, float]:
    """The mean of maps (samples, T, T) over queries t > 2: at key 1, and at the keys 2..t."""
    stacked = torch.stack(list(maps))[..., 2:, :]
    below = torch.ones_like(stacked).tril(2)
    below[..., 0] = 0
    return float(stacked[..., 0].mean()), float((stacked * below).sum() / below.sum())


def relative_first_token(results: Results, name: str, window: int) -> list[Check]:
    """Fig. 6 middle: Sink of the first key that each query t > w can see, t - w + 1, at T = C."""
    says = f"{results.label(name)}: at most {ABSENT} % of heads on the window's first token"
    own = _own(results, name)
    if own is None:
        return [Check(says, None, missing=(_no_weights(results, name),))]
    ids = own.inputs("random", SEQUENCES, own.context)
    report = own.measure(ids, norms=False, heads=_heads(own), keep=("map",))
    maps = torch.stack([kept.map for kept in report.kept.values() if kept.map is not None])
    first = maps.diagonal(offset=1 - window, dim1=-2, dim2=-1)[..., 1:]  # A[t, t - w + 1] for t > w
    value = 100 * float((first.mean(dim=-1) > EPSILON).double().mean())
    return [Check(says, value <= ABSENT, (("heads on the window's first token, %", f"{name} {value:.1f}"),))]


def edited_positions(results: Results, edit: str) -> list[Check]:
    """Table 7: what p_1 replaced by, or swapped with, p_t does to the sink on repeated tokens; t = 5, 10."""
    from sinkutils.measuring.load import replace_position, swap_positions

    says = "Sink_1 falls below half" if edit == "replace" else "Sink_t above Sink_1"
    own = _own(results, "learnable")
    if own is None:
        return [Check(says, None, missing=(_no_weights(results, "learnable"),))]
    ids = own.inputs("repeat", SEQUENCES, own.length)
    before = own.measure(ids, norms=False).sink(1, EPSILON)
    facts = [("Sink_1 % on repeated tokens", f"untouched {before:.1f}")]
    held = before >= PRESENT
    for t in (5, 10):
        with (replace_position if edit == "replace" else swap_positions)(own.model, t):
            report = own.measure(ids, targets=(1, t), norms=False)
        first, other = report.sink(1, EPSILON), report.sink(t, EPSILON)
        facts.append((f"{edit}, Sink_1 and Sink_t", f"t = {t} {first:.1f} and {other:.1f}"))
        held = held and (first < before / 2 if edit == "replace" else other > first)
    return [Check(says, held, tuple(facts))]


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
    if not isinstance(model, TransformerLM) or not model.config.sink_token:
        raise ValueError("model must be a TransformerLM with a sink token: LMConfig(sink_token=True)")
    seen = HiddenNorms()
    with torch.no_grad():
        model.hidden(ids.to(model.embed.weight.device), seen)
    return ratio_by_block(seen.blocks)


def massive_sink_token(results: Results) -> list[Check]:
    """Section 7.3, Fig. 7 middle: x* itself has massive activations, in some block.

    The paper's ratio at its first position, which is x*. x* sees only itself, so that its norm is the same on any
    input; random tokens are what the other trials use too.
    """
    label = results.label("sink_token")
    says = f"{label}: ||h|| at x* at least {MASSIVE:g} times the others'"
    own = _own(results, "sink_token")
    if own is None:
        return [Check(says, None, missing=(_no_weights(results, "sink_token"),))]
    ratio = max(sink_token_ratios(own.model, own.inputs("random", SEQUENCES, own.length)))
    return [Check(says, ratio >= MASSIVE, (("norm ratio of h at x*", f"{label} {ratio:.2f}"),))]
