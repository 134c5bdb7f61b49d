"""The paper's claims about open language models, judged on measurements of them in data/measurements.

Each file there is written by `python -m sinkutils measure MODEL --probe natural random repeat --save`. Where a model
of ours can stand beside them, it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sinkutils.ledger.evidence import (
    ABSENT,
    EMERGED,
    MASSIVE,
    PRESENT,
    SMALL_VALUE,
    SPREAD,
    Check,
    Results,
    after_massive,
    ratio_by_block,
)
from sinkutils.ledger.trials import own_sink
from sinkutils.measuring.saved import measured_domains, measured_sink, measurements
from sinkutils.study.grid import config

CHAT = 9.2  # points: the paper's own pairs differ by up to 9.15 (Mistral-7B, Table 1 right)
SMALL_PARAMETERS = 125e6


def measure_command(model: str, domain: str = "") -> str:
    """How a missing measurement is made; with a domain of the Pile, that of Fig. 9."""
    inputs = f"--corpus 'pile:{domain}'" if domain else "--probe natural random repeat"
    return f"python -m sinkutils measure {model} {inputs} --save"


def _sinks(kind: str = "natural", keep: Callable[[str], bool] | None = None) -> dict[str, float]:
    return {m: measured_sink(r) for m, r in measurements(kind).items() if keep is None or keep(m)}


def _facts(sinks: dict[str, float], kind: str = "natural") -> tuple[tuple[str, str], ...]:
    return tuple((f"Sink_1 % on {kind} input", f"{model} {sink:.1f}") for model, sink in sinks.items())


def _at_least(sinks: dict[str, float], kind: str = "natural") -> list[Check]:
    return [
        Check(f"{model}: Sink_1 at least {EMERGED:g}", sink >= EMERGED, _facts({model: sink}, kind))
        for model, sink in sinks.items()
    ]


def _beside(results: Results, ours: Check, theirs: list[Check]) -> list[Check]:
    """Our own check beside those of open models; these alone where ours was not made or our base has no sink."""
    has_sink = (results.mean("base") or 0) >= EMERGED
    return [ours, *theirs] if not theirs or (has_sink and ours.holds is not None) else theirs


def _absolute(model: str) -> bool:
    """Whether the paper's model has learned absolute positions."""
    return model.startswith(("GPT2", "OPT"))


def small_models(results: Results) -> list[Check]:
    """Fig. 4 left: a sink in our own small model and in the small measured ones."""
    from sinkutils.measuring.load import MODELS

    small = {model.name for model in MODELS if model.parameters <= SMALL_PARAMETERS}
    says = f"{results.label('base')}: Sink_1 at least {EMERGED:g}"
    ours = results.check(says, [("base", "sink_1")], lambda x: x >= EMERGED)
    return _beside(results, ours, _at_least(_sinks("natural", lambda model: model in small)))


def random_input(results: Results) -> list[Check]:
    """Table 1 left: a sink on random tokens too."""
    ours = own_sink(results, "base", "random", lambda x: x >= PRESENT, f"at least {PRESENT} on random tokens")
    return _beside(results, ours, _at_least(_sinks("random"), "random"))


def repeated_input(results: Results) -> list[Check]:
    """Table 1 left: no sink on repeated tokens without absolute positions."""
    ours = own_sink(results, "base", "repeat", lambda x: x <= ABSENT, f"at most {ABSENT} on repeated tokens")
    theirs = _sinks("repeat", lambda model: not _absolute(model))
    return _beside(results, ours, [Check(f"{m}: at most {ABSENT}", s <= ABSENT, _facts({m: s}, "repeat"))
                          for m, s in theirs.items()])  # fmt: skip


def repeated_input_with_positions(results: Results) -> list[Check]:
    """Table 1 left, GPT2-XL: with learned positions the sink stays; not where ours is tied to a fixed token."""
    theirs = _at_least(_sinks("repeat", _absolute), "repeat")
    if theirs and config("base", results.preset).data.fixed_position:
        return theirs
    ours = own_sink(results, "learnable", "repeat", lambda x: x >= PRESENT, f"at least {PRESENT} on repeated tokens")
    return _beside(results, ours, theirs)


def universal() -> list[Check]:
    """Section 3: every measured model of Table 8 has a sink."""
    from sinkutils.measuring.load import MODELS

    listed = {model.name for model in MODELS if model.in_paper}
    return _at_least(_sinks("natural", lambda model: model in listed)) or [
        Check("", None, missing=(measure_command("gpt2"),))
    ]


def base_and_chat() -> list[Check]:
    """Table 1 right: a chat model's Sink_1 is near its base's."""
    from sinkutils.measuring.load import MODELS

    sinks = _sinks("natural")
    pairs = [
        (base.name, chat.name)
        for base in MODELS
        for chat in MODELS
        if (base.family, base.parameters, base.chat, chat.chat) == (chat.family, chat.parameters, False, True)
        and base.name.split()[0] == chat.name.split()[0]
        and {base.name, chat.name} <= set(sinks)
    ]
    return [
        Check(
            f"{chat}: within {CHAT} points of {base}",
            abs(sinks[base] - sinks[chat]) <= CHAT,
            _facts({base: sinks[base], chat: sinks[chat]}),
        )
        for base, chat in pairs
    ] or [Check("", None, missing=("a base and its chat model: " + measure_command("mistralai/Mistral-7B-v0.1"),))]


def larger_pythia() -> list[Check]:
    """Fig. 4 left: within Pythia, larger models have more of a sink."""
    from sinkutils.measuring.load import MODELS

    sinks = _sinks("natural")
    sizes = sorted((m.parameters, m.name) for m in MODELS if m.family == "Pythia" and m.name in sinks)
    if len(sizes) < 3:
        return [Check("", None, missing=("three sizes: " + measure_command("EleutherAI/pythia-14m"),))]
    small, large = sizes[0][1], sizes[-1][1]
    return [Check(f"{large} above {small}", sinks[large] > sinks[small],
                  _facts({name: sinks[name] for _, name in sizes}))]  # fmt: skip


def norms_everywhere() -> list[Check]:
    """Figs. 11-14: a massive ||h_1|| and a small ||v_1|| in every measured model."""
    checks = []
    for model, report in measurements().items():
        if "hidden_norms" in report:
            checks += first_token_norms(model, report)
    return checks or [Check("", None, missing=(measure_command("gpt2"),))]


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
    sinks = _sinks("natural", lambda model: model.startswith("Jamba"))
    return [Check(f"{model}: Sink_1 above 50", sink > 50, _facts({model: sink})) for model, sink in sinks.items()] or [
        Check("", None, missing=(measure_command("ai21labs/Jamba-v0.1"),))
    ]


def domains() -> list[Check]:
    """Fig. 9: Sink_1 at eps = 0.3 hardly depends on the domain."""
    checks = []
    for model in measurements():
        sinks = {domain: measured_sink(report) for domain, report in measured_domains(model).items()}
        if len(sinks) > 1:
            facts = tuple((f"Sink_1 % of {model}", f"{domain} {sink:.1f}") for domain, sink in sinks.items())
            spread = max(sinks.values()) - min(sinks.values())
            checks.append(Check(f"{model}: domains within {SPREAD:g} points", spread <= SPREAD, facts))
    return checks or [Check("", None, missing=(measure_command("gpt2", "<domain>"),))]
