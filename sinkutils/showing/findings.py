"""What each notebook finds, in a sentence with the numbers that it rests on, from records and measurements."""

from __future__ import annotations

from sinkutils.measuring.open_lms import recorded
from sinkutils.showing.tables import records


def findings(preset: str) -> dict[str, str]:
    """One sentence a notebook with the numbers that it rests on."""
    frame, real = records(preset), {name: recorded(name) for name in ("smollm2", "gemma-3-270m")}

    def ours(name: str, column: str = "sink_1") -> str:
        values = frame.loc[(frame["experiment"] == name) & (frame["status"] == "done"), column].dropna()
        if values.empty:
            return "not recorded yet"
        return f"{values.mean():.1f} % ({len(values)} seed{'s' if len(values) > 1 else ''})"

    def measured(name: str, kind: str, first: str = "text") -> str:
        return f"{real[name]['probes'][kind][first]['sink']['1']['0.3']:.1f} %"

    smol, gemma, hidden = "smollm2", "gemma-3-270m", real["smollm2"]["operations"]["hide"]["sink_2"]
    return {
        "00_quickstart": (
            f"In SmolLM2, a model of 135M, {measured(smol, 'natural')} of heads have a sink on the first token. "
            "Softmax has to spend its attention somewhere; given a place of its own, it goes there."
        ),
        "01_properties": (
            f"SmolLM2: {measured(smol, 'natural')} on text, {measured(smol, 'random')} on random tokens, "
            f"{measured(smol, 'repeat')} on one token repeated. Gemma 3 270M: {measured(gemma, 'natural')} without its "
            f"BOS, {measured(gemma, 'natural', 'BOS')} with it."
        ),
        "02_optimization": (
            f"A small model whose texts begin with a BOS ends at {ours('fixed_1')}; one that meets any first token, at "
            f"{ours('default')}."
        ),
        "03_data": f"With the fixed token at position 2, Sink₂: {ours('fixed_2', 'sink_2')}; Sink₁: {ours('fixed_2')}.",
        "04_loss": (
            f"Sink₁ with a weight decay of 0.1: {ours('fixed_1')}; without any: {ours('weight_decay_0')}; with 0.5: "
            f"{ours('weight_decay_0.5')}."
        ),
        "05_architecture": f"With K biases, Sink₁: {ours('k_bias')}; on the bias: {ours('k_bias', 'sink_star')}.",
        "06_attention_operation": (
            f"Sink₁ with sigmoid attention that is not normalised: {ours('sigmoid')}; normalised: "
            f"{ours('sigmoid_normalised')}."
        ),
        "07_after_pretraining": (
            f"Sink₁ after fine-tuning, of the softmax model: {ours('sft_softmax')}; of the sigmoid model: "
            f"{ours('sft_sigmoid')}."
        ),
        "08_what_it_is_for": (
            f"Drop the first token, and {hidden:.1f} % of SmolLM2's heads have their sink on the next one."
        ),
        "09_after_the_paper": (
            f"Sink₁ with a gate on each head's output: {ours('gate_head')}; with softpick: {ours('softpick')}; with a "
            f"learned sink logit: {ours('sink_logit')}."
        ),
    }
