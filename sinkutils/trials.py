"""Claims that need more than a record: propositions on random weights, inputs to our own weights, open LMs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils.evidence import (
    ABSENT,
    EMERGED,
    EPSILON,
    MASSIVE,
    PRESENT,
    SMALL_VALUE,
    SPREAD,
    Check,
    Results,
    after_massive,
    measured_domains,
    measured_sink,
    measurements,
    ratio_by_block,
)

SEQUENCES = 50
EXACT = 1e-9  # float64 over a few blocks or steps
CHAT = 9.2  # points: the paper's own pairs differ by up to 9.15 (Mistral-7B, Table 1 right)


def measure_command(model: str, extra: str = "") -> str:
    """How a missing measurement is made."""
    name = model.rsplit("/", 1)[-1]
    options = extra or " --probe natural random repeat"
    return f"python -m sinkutils measure {model}{options} --json > data/measurements/{name}.json"


# --- Appendix B.1 and C.4 on random weights, in float64 --------------------------------------------------------------


@lru_cache
def _propositions(length: int) -> dict[str, dict[str, Any]]:
    from sinkutils.propositions import propositions

    return {row["position"]: row for row in propositions(length)}


def _alpha_fact(position: str, length: int) -> tuple[str, str]:
    return f"alpha_1 at T = {length}", f"{position} {_propositions(length)[position]['alpha_1']:.3f}"


def equal_states() -> list[Check]:
    """Eqs. 10-17: repeated tokens have one hidden state in every block."""
    rows = _propositions(64)
    facts = tuple(("largest difference", f"{name} {row['hidden_difference']:.0e}") for name, row in rows.items())
    return [Check("all h_t equal h_1", all(row["hidden_difference"] < EXACT for row in rows.values()), facts)]


def uniform_without_positions() -> list[Check]:
    """Proposition 1: A_ti = 1/t."""
    row = _propositions(64)["nope"]
    return [Check("attention is 1/t", row["closed_form_difference"] < EXACT, (_alpha_fact("nope", 64),))]


def relative_has_no_sink() -> list[Check]:
    """Proposition 2 for Eq. 6 as printed: the closed form, and the conclusion at two lengths."""
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


@lru_cache
def scaling_difference(optimizer: str, alpha: float = 0.2, steps: int = 20) -> float:
    """Largest difference between alpha W_O and a rescaled run's weights, along `steps` steps (Eqs. 32-42).

    One matrix in float64: normalisation scaled by alpha on one side; learning rate (SGD: alpha^2, AdamW: alpha),
    initialisation (alpha), Adam's eps and weight decay (1 / alpha) on the other.
    """
    generator = torch.Generator().manual_seed(0)
    start, inputs, targets = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    scaled, rescaled = nn.Parameter(start.clone()), nn.Parameter(alpha * start)
    if optimizer == "sgd":
        pair: list[Any] = [torch.optim.SGD([scaled], 1e-2), torch.optim.SGD([rescaled], alpha**2 * 1e-2)]
    elif optimizer == "adamw":
        pair = [
            torch.optim.AdamW([scaled], 1e-2, (0.9, 0.95), 1e-4, weight_decay=0.1),
            torch.optim.AdamW([rescaled], alpha * 1e-2, (0.9, 0.95), 1e-4 / alpha, weight_decay=0.1 / alpha),
        ]
    else:
        raise ValueError(f"optimizer must be 'sgd' or 'adamw', got {optimizer!r}")
    largest = 0.0
    for _ in range(steps):
        for weight, factor, step in ((scaled, alpha, pair[0]), (rescaled, 1.0, pair[1])):
            step.zero_grad()
            (inputs @ (factor * weight) - targets).square().mean().backward()
            step.step()
        largest = max(largest, float((alpha * scaled - rescaled).detach().abs().max()))
    return largest


def scaling_is_rescaling() -> list[Check]:
    """Eqs. 32-42."""
    return [
        Check(f"{name}: both runs have the same weights at every step", scaling_difference(name) < EXACT,
              (("largest difference in 20 steps", f"{name} {scaling_difference(name):.0e}"),))
        for name in ("sgd", "adamw")
    ]  # fmt: skip


# --- Section 3 on our own weights ------------------------------------------------------------------------------------


def _own(results: Results, name: str) -> tuple[nn.Module, Any, Any] | None:
    """Model, tokenizer and record of a run whose weights were kept."""
    from sinkutils.zoo import load_lm

    record = results.weights(name)
    return None if record is None else (*load_lm(record.folder, "cpu"), record)


def _no_weights(results: Results, name: str) -> str:
    label = results.label(name)
    return f"the weights of {label}: python -m sinkutils train {label} --preset {results.preset} --keep-weights"


def _inputs(kind: str, tokenizer: Any, record: Any, length: int | None = None) -> Tensor:
    """A probe of our own model at its T, with its fixed token where it has one; repeated tokens are left alone."""
    from sinkutils.packing import fix_position
    from sinkutils.probes import probe
    from sinkutils.tokenization import special_ids

    ids = probe(kind, tokenizer, SEQUENCES, length or record.config["train"]["eval_length"])
    if kind == "repeat":
        return ids
    return fix_position(ids, record.config["data"]["fixed_position"], special_ids(tokenizer, "kept")["fix_id"])


def _own_sink(results: Results, name: str, kind: str) -> tuple[float | None, tuple[tuple[str, str], ...]]:
    from sinkutils.capture import measure

    own = _own(results, name)
    if own is None:
        return None, ()
    model, tokenizer, record = own
    value = measure(model, _inputs(kind, tokenizer, record), norms=False).sink(1, EPSILON)
    return value, ((f"Sink_1 % on {kind} tokens", f"{results.label(name)} {value:.1f}"),)


def _measured(kind: str, keep: Any = None) -> dict[str, float]:
    return {m: measured_sink(r) for m, r in measurements(kind).items() if keep is None or keep(m)}


def _sink_facts(kind: str, sinks: dict[str, float]) -> tuple[tuple[str, str], ...]:
    return tuple((f"Sink_1 % on {kind} input", f"{model} {sink:.1f}") for model, sink in sinks.items())


def _absolute(model: str) -> bool:
    """Whether the paper's model has learned absolute positions."""
    return model.startswith(("GPT2", "OPT"))


def random_input(results: Results) -> list[Check]:
    """Table 1 left: a sink on random tokens too."""
    value, facts = _own_sink(results, "base", "random")
    says = f"{results.label('base')}: Sink_1 at least {PRESENT} on random tokens"
    missing = "" if value is not None else _no_weights(results, "base")
    sinks = _measured("random")
    return [
        Check(says, None if value is None else value >= PRESENT, facts, missing=missing),
        *(Check(f"{m}: at least {EMERGED:g}", s >= EMERGED, _sink_facts("random", {m: s})) for m, s in sinks.items()),
    ]


def repeated_input(results: Results) -> list[Check]:
    """Table 1 left: no sink on repeated tokens without absolute positions."""
    value, facts = _own_sink(results, "base", "repeat")
    says = f"{results.label('base')}: Sink_1 at most {ABSENT} on repeated tokens"
    missing = "" if value is not None else _no_weights(results, "base")
    sinks = _measured("repeat", lambda model: not _absolute(model))
    return [
        Check(says, None if value is None else value <= ABSENT, facts, missing=missing),
        *(Check(f"{m}: at most {ABSENT}", s <= ABSENT, _sink_facts("repeat", {m: s})) for m, s in sinks.items()),
    ]


def repeated_input_with_positions(results: Results) -> list[Check]:
    """Table 1 left, GPT2-XL: with learned positions the sink stays."""
    sinks = _measured("repeat", _absolute)
    checks = [Check(f"{m}: at least {EMERGED:g}", s >= EMERGED, _sink_facts("repeat", {m: s}))
              for m, s in sinks.items()]  # fmt: skip
    value, facts = _own_sink(results, "learnable", "repeat")
    if value is not None:
        says = f"{results.label('learnable')}: Sink_1 at least {PRESENT} on repeated tokens"
        checks.append(Check(says, value >= PRESENT, facts))
    return checks or [Check("", None, missing=measure_command("gpt2"))]


def longer_and_stricter(results: Results) -> list[Check]:
    """Fig. 3: Sink_1 falls with T, and more so for a larger eps; on random tokens."""
    from sinkutils.capture import measure

    says = "Sink_1 at T = C not above that at T = C / 4", "the share lost is larger at eps = 0.4 than at 0.2"
    own = _own(results, "base")
    if own is None:
        return [Check(says[0], None, missing=_no_weights(results, "base"))]
    model, tokenizer, record = own
    context = record.config["model"]["context_length"]
    lengths = (context // 4, context)
    reports = [measure(model, _inputs("random", tokenizer, record, t), norms=False) for t in lengths]
    sinks = {eps: [report.sink(1, eps) for report in reports] for eps in (0.2, 0.3, 0.4)}
    facts = tuple(
        (f"Sink_1 % at T = {lengths[0]} and {lengths[1]}", f"eps {eps} {short:.1f} and {long:.1f}")
        for eps, (short, long) in sinks.items()
    )
    kept = {eps: long / short if short else 1.0 for eps, (short, long) in sinks.items()}
    return [Check(says[0], sinks[0.3][1] <= sinks[0.3][0], facts), Check(says[1], kept[0.4] < kept[0.2], facts)]


def angles_not_norms(results: Results) -> list[Check]:
    """Fig. 2 bottom: in the heads with a sink, cos(q_t, k_1) is larger than others' and ||q_t|| ||k_1|| smaller."""
    from sinkutils.capture import measure

    says = "cos(q_t, k_1) above cos(q_t, k_j)", "||q_t|| ||k_1|| below ||q_t|| ||k_j||"
    own = _own(results, "base")
    if own is None:
        return [Check(says[0], None, missing=_no_weights(results, "base"))]
    model, tokenizer, record = own
    shape = record.config["model"]
    heads = [(layer, head) for layer in range(shape["num_layers"]) for head in range(shape["num_heads"])]
    report = measure(model, _inputs("random", tokenizer, record), norms=False, heads=heads, keep=("qk",))
    strong = [(layer, head) for layer, head in heads if float(report.alpha[:, 0, layer, head].mean()) > EPSILON]
    if not strong:
        return [Check(says[0], None, missing=f"a head of {results.label('base')} with a sink on random tokens")]
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
    from sinkutils.capture import measure

    says = f"{results.label(name)}: at most {ABSENT} % of heads on the window's first token"
    own = _own(results, name)
    if own is None:
        return [Check(says, None, missing=_no_weights(results, name))]
    model, tokenizer, record = own
    shape = record.config["model"]
    heads = [(layer, head) for layer in range(shape["num_layers"]) for head in range(shape["num_heads"])]
    ids = _inputs("random", tokenizer, record, shape["context_length"])
    report = measure(model, ids, norms=False, heads=heads, keep=("map",))
    maps = torch.stack([kept.map for kept in report.kept.values() if kept.map is not None])
    first = maps.diagonal(offset=1 - window, dim1=-2, dim2=-1)[..., 1:]  # A[t, t - w + 1] for t > w
    value = 100 * float((first.mean(dim=-1) > EPSILON).double().mean())
    return [Check(says, value <= ABSENT, (("heads on the window's first token, %", f"{name} {value:.1f}"),))]


def edited_positions(results: Results, edit: str) -> list[Check]:
    """Table 7: what p_1 replaced by, or swapped with, p_t does to the sink on repeated tokens; t = 5, 10."""
    from sinkutils.capture import measure
    from sinkutils.zoo import replace_position, swap_positions

    says = "Sink_1 falls below half" if edit == "replace" else "Sink_t above Sink_1"
    own = _own(results, "learnable")
    if own is None:
        return [Check(says, None, missing=_no_weights(results, "learnable"))]
    model, tokenizer, record = own
    ids = _inputs("repeat", tokenizer, record)
    before = measure(model, ids, norms=False).sink(1, EPSILON)
    facts = [("Sink_1 % on repeated tokens", f"untouched {before:.1f}")]
    held = before >= PRESENT
    for t in (5, 10):
        with (replace_position if edit == "replace" else swap_positions)(model, t):
            report = measure(model, ids, (1, t), norms=False)
        first, other = report.sink(1, EPSILON), report.sink(t, EPSILON)
        facts.append((f"{edit}, Sink_1 and Sink_t", f"t = {t} {first:.1f} and {other:.1f}"))
        held = held and (first < before / 2 if edit == "replace" else other > first)
    return [Check(says, held, tuple(facts))]


# --- Section 3 and Appendix B on open LMs, from data/measurements ----------------------------------------------------


def universal() -> list[Check]:
    """Section 3: every measured model of Table 8 has a sink."""
    from sinkutils.zoo import MODELS

    listed = {model.name for model in MODELS if model.in_paper}
    sinks = _measured("natural", lambda model: model in listed)
    return [
        Check(f"{model}: Sink_1 at least {EMERGED:g}", sink >= EMERGED, _sink_facts("natural", {model: sink}))
        for model, sink in sinks.items()
    ] or [Check("", None, missing=measure_command("gpt2"))]


def small_models(results: Results) -> list[Check]:
    """Fig. 4 left: a sink in our own small model and in the small measured ones (up to 125M parameters)."""
    from sinkutils.zoo import MODELS

    small = {model.name for model in MODELS if model.parameters <= 125e6}
    sinks = _measured("natural", lambda model: model in small)
    checks = [Check(f"{m}: at least {EMERGED:g}", s >= EMERGED, _sink_facts("natural", {m: s}))
              for m, s in sinks.items()]  # fmt: skip
    return [results.check(f"the base: Sink_1 at least {EMERGED:g}", [("base", "sink_1")], lambda x: x >= EMERGED),
            *checks]  # fmt: skip


def base_and_chat() -> list[Check]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""
    from sinkutils.zoo import MODELS

    sinks = _measured("natural")
    pairs = [
        (base.name, chat.name)
        for base in MODELS
        for chat in MODELS
        if (base.family, base.parameters, base.chat, chat.chat) == (chat.family, chat.parameters, False, True)
        and base.name.split()[0] == chat.name.split()[0]
        and {base.name, chat.name} <= set(sinks)
    ]
    return [
        Check(f"{chat}: within {CHAT} points of {base}", abs(sinks[base] - sinks[chat]) <= CHAT,
              _sink_facts("natural", {base: sinks[base], chat: sinks[chat]})) for base, chat in pairs
    ] or [Check("", None, missing=measure_command("mistralai/Mistral-7B-Instruct-v0.1") + ", and its base")]  # fmt: skip


def larger_pythia() -> list[Check]:
    """Fig. 4 left: within Pythia, larger models have more of a sink."""
    from sinkutils.zoo import MODELS

    sinks = _measured("natural")
    sizes = sorted((m.parameters, m.name) for m in MODELS if m.family == "Pythia" and m.name in sinks)
    if len(sizes) < 3:
        return [Check("", None, missing="three sizes: " + measure_command("EleutherAI/pythia-14m"))]
    small, large = sizes[0][1], sizes[-1][1]
    return [Check(f"{large} above {small}", sinks[large] > sinks[small],
                  _sink_facts("natural", {name: sinks[name] for _, name in sizes}))]  # fmt: skip


def norms_everywhere() -> list[Check]:
    """Figs. 11-14: a massive ||h_1|| and a small ||v_1|| in every measured model."""
    checks = []
    for model, report in measurements().items():
        if "hidden_norms" in report:
            checks += first_token_norms(model, report)
    return checks or [Check("", None, missing=measure_command("gpt2"))]


def first_token_norms(name: str, report: dict[str, Any]) -> list[Check]:
    """Fig. 2 top: ||h_1|| massive, and in the layers after that ||k_1|| smaller and ||v_1|| much smaller."""
    hidden = max(ratio_by_block(report["hidden_norms"]))
    checks = [Check(f"{name}: ||h_1|| at least {MASSIVE:g} times the others", hidden >= MASSIVE,
                    (("norm ratio of h_1", f"{name} {hidden:.2f}"),))]  # fmt: skip
    for symbol, key, limit in (("k_1", "key_norms", 1.0), ("v_1", "value_norms", SMALL_VALUE)):
        ratio = after_massive(report, key)
        checks.append(
            Check(f"{name}: ||{symbol}|| below {limit:g} of the others", ratio is not None and ratio < limit,
                  () if ratio is None else ((f"norm ratio of {symbol}", f"{name} {ratio:.2f}"),))
        )  # fmt: skip
    return checks


def jamba() -> list[Check]:
    """Appendix B.3: Jamba has a strong sink, in most heads."""
    sinks = _measured("natural", lambda model: model.startswith("Jamba"))
    return [
        Check(f"{model}: Sink_1 above 50", sink > 50, _sink_facts("natural", {model: sink}))
        for model, sink in sinks.items()
    ] or [Check("", None, missing=measure_command("ai21labs/Jamba-v0.1"))]


def domains() -> list[Check]:
    """Fig. 9: Sink_1 at eps = 0.3 hardly depends on the domain."""
    checks = []
    for model in measurements():
        sinks = {domain: measured_sink(report) for domain, report in measured_domains(model).items()}
        if len(sinks) > 1:
            facts = tuple((f"Sink_1 % of {model}", f"{domain} {sink:.1f}") for domain, sink in sinks.items())
            checks.append(Check(f"{model}: domains within {SPREAD:g} points", _range(sinks.values()) <= SPREAD, facts))
    command = "python -m sinkutils measure gpt2 --corpus pile:<domain> --json > data/measurements/gpt2@<domain>.json"
    return checks or [Check("", None, missing=command)]


def _range(values: Any) -> float:
    listed: Sequence[float] = list(values)
    return max(listed) - min(listed)
