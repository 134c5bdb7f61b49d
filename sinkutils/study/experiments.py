"""The study as data: every row of every pre-training table and figure, and the fine-tunings, at every scale.

An experiment is what it changes: dotted paths into `RunConfig` and values. A preset is a scale; `grid` joins them. The
paper's values stand beside the names in data/paper/pretraining.csv.

Learning rates, steps, batch sizes, windows, d_a and data amounts scale with the preset (`Scaled`). All else is as
printed: weight decay, prefix, positions, alpha, p, m and numbers of heads. The warm-up stays the preset's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sinkutils.checks import choice
from sinkutils.study.config import RunConfig
from sinkutils.study.paper import PaperRow, paper_rows
from sinkutils.study.presets import PRESETS, Preset

AFTER_PAPER = "8"  # what came after the paper, which has seven sections: data/paper/after_paper.csv
SECTIONS = ("4", "5", "6", "7", "C", "D", AFTER_PAPER)


@dataclass(frozen=True)
class Scaled:
    """A value of an override that depends on the preset."""

    apply: Callable[[Any, RunConfig, Preset], Any]  # of the base's value, the base's run, and the preset


def times(factor: float) -> Scaled:
    """A multiple of the base's value; of an integer, rounded and at least 1."""
    return Scaled(lambda old, run, scale: _whole(factor * old) if isinstance(old, int) else factor * old)


def of_context(share: float, at_most_base: bool = False) -> Scaled:
    """A share of the context length C, rounded, at least 1; with `at_most_base`, no more than the base's value."""
    return Scaled(lambda old, run, scale: _whole(share * run.model.context_length, old if at_most_base else math.inf))


def of_head_dim(share: float) -> Scaled:
    """A share of the head dimension d_h, rounded, at least 1."""
    return Scaled(lambda old, run, scale: _whole(share * run.model.head_dim))


def of_four_epochs(share: float) -> Scaled:
    """A share of the text of which the preset's run makes four passes, as the paper's 20B tokens do of 5B."""
    return Scaled(lambda old, run, scale: share * scale.four_epochs)


def same_tokens(context_length: int) -> Scaled:
    """The batch size that makes a step as many tokens as the base's, at another context length."""
    return Scaled(lambda old, run, scale: _whole(old * run.model.context_length / context_length))


MINUS_LOG_CONTEXT = Scaled(lambda old, run, scale: -math.log(run.model.context_length))


def _whole(value: float, most: float = math.inf) -> int:
    return int(min(max(1, int(value + 0.5)), most))


@dataclass(frozen=True)
class Experiment:
    """One run of the study as the difference from its base."""

    name: str
    section: str  # 4 to 7, C or D for what stands in that appendix alone, 8 for what came after the paper
    title: str
    overrides: dict[str, Any] = field(hash=False)  # dotted path into the config -> value
    base: bool = True  # changes the preset's base experiment; False: the preset itself
    weights: int = 0  # of how many seeds the weights are kept at small presets: for a notebook 1, for a claim 3
    presets: tuple[str, ...] = ("smoke", "minute", "laptop", "desk", "gpu", "paper")
    start: str | None = None  # of a fine-tuning: the experiment whose weights it starts from
    download: bool = False  # needs the network: trained where it is named, not with the rest

    @property
    def seeds(self) -> int:
        """How many seeds a sweep trains, from 0; no verdict rests on fewer than three."""
        return SEEDS.get(self.start or self.name, 3)

    @property
    def rows(self) -> list[PaperRow]:
        """The paper's rows of this run."""
        names = (self.name, "base") if self.name == "default" else (self.name,)
        return [row for row in paper_rows() if row.experiment in names]

    @property
    def item(self) -> str:
        """The first table of the paper that reports this run, else its first figure or section, else nothing."""
        return min((row.item for row in self.rows), key=lambda item: not item.startswith("Table"), default="")

    @property
    def paper(self) -> dict[str, float]:
        """What the paper reports: sink_1 to sink_4, sink_star (percent), valid_loss; only cells that are readable."""
        return {k: v for row in self.rows for k, v in row.values.items()}


def _attention(**fields: Any) -> dict[str, Any]:
    return {f"model.attention.{name}": value for name, value in fields.items()}


def _window(share: int) -> dict[str, Any]:
    return _attention(window=of_context(1 / share)) | {"train.eval_length": of_context(1 / 4, at_most_base=True)}


_SIGMOID = _attention(similarity="sigmoid", normalizer="none")
_RATE, _STEPS, _DECAY = "train.learning_rate", "train.steps", "train.weight_decay"
# name, kernel, in words, normaliser
_KERNELS = (
    ("elu_kernel", "elu", "elu + 1", "sum"),
    ("linear", "identity", "identity", "max_abs_sum"),
    ("mlp", "mlp", "MLP", "max_abs_sum"),
)

EXPERIMENTS: tuple[Experiment, ...] = (
    # Section 4: optimisation (Table 9, Table 10 left, Figure 4)
    Experiment("default", "4", "any first token (the paper's default)", {}, base=False),
    # the authors' published config; the paper's text says cosine
    Experiment("default_constant_lr", "4", "the default at a constant learning rate", {"train.lr_floor": 1.0},
               base=False),
    Experiment("constant_lr", "4", "the base at a constant learning rate", {"train.lr_floor": 1.0}),
    Experiment("lr_x2.5", "4", "learning rate x 2.5", {_RATE: times(2.5)}),
    Experiment("lr_x2", "4", "learning rate x 2", {_RATE: times(2)}),
    Experiment("lr_x2_steps_half", "4", "learning rate x 2, half the steps", {_RATE: times(2), _STEPS: times(1 / 2)}),
    Experiment("lr_half", "4", "learning rate / 2", {_RATE: times(1 / 2)}),
    Experiment("lr_half_steps_x2", "4", "learning rate / 2, steps x 2", {_RATE: times(1 / 2), _STEPS: times(2)}),
    Experiment("lr_quarter", "4", "learning rate / 4", {_RATE: times(1 / 4)}),
    Experiment("lr_quarter_steps_x4", "4", "learning rate / 4, steps x 4", {_RATE: times(1 / 4), _STEPS: times(4)}),
    Experiment("lr_quarter_steps_x2", "4", "learning rate / 4, steps x 2", {_RATE: times(1 / 4), _STEPS: times(2)}),
    Experiment("lr_x0.025", "4", "learning rate / 40, steps x 4", {_RATE: times(1 / 40), _STEPS: times(4)}),
    *(Experiment(f"batch_{name}", "4", f"batch size x {factor:g}", {"train.batch_size": times(factor)})
      for name, factor in (("quarter", 0.25), ("half", 0.5), ("x2", 2.0))),
    # what the smallest batch lacks at our base: a rate that it stands, or the tokens that it does not see
    *(Experiment(f"batch_quarter_{name}", "4", f"batch size x 0.25, {title}",
                 {"train.batch_size": times(0.25)} | change)
      for name, title, change in (("lr_half", "learning rate / 2", {_RATE: times(1 / 2)}),
                                  ("steps_x4", "steps x 4", {_STEPS: times(4)}))),
    # Section 5: data distribution (Figure 5 right, Table 10 right)
    *(Experiment(f"fixed_{k}", "5", f"a fixed token at position {k}", {"data.fixed_position": k},
                 base=False, weights=3 * (k == 1)) for k in (1, 2, 3)),
    *(Experiment(f"random_{name}", "5", title, {"data.random_positions": positions}, base=False)
      for name, title, positions in (
          ("1", "a random token at position 1", (1,)),
          ("1_2", "random tokens at positions 1 and 2", (1, 2)),
          ("2", "a random token at position 2", (2,)),
          ("1_to_5", "random tokens at positions 1 to 5", (1, 2, 3, 4, 5)),
          ("1_to_10", "random tokens at positions 1 to 10", tuple(range(1, 11))))),
    *(Experiment(f"data_share_{share:g}", "5", f"text x {share:g}", {"data.share": of_four_epochs(share)})
      for share in (1.0, 0.5, 0.1, 0.04, 0.02, 0.01)),
    # Section 6: loss function (Table 2, Figures 5 and 6)
    *(Experiment(f"weight_decay_{decay:g}", "6", f"weight decay {decay:g}", {_DECAY: decay})
      for decay in (0.0, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)),
    *(Experiment(f"prefix_{p}", "6", f"prefix of {p} tokens", _attention(prefix=p),
                 weights=int(p == 5))
      for p in (2, 3, 4, 5, 10)),
    Experiment("prefix_5_default", "6", "prefix of 5 tokens, none of them fixed", _attention(prefix=5), base=False),
    *(Experiment(f"window_1_{share}", "6", f"window of C / {share}", _window(share),
                 weights=3 * (share == 4))
      for share in (64, 32, 16, 8, 4, 2)),
    Experiment("window_none", "6", "no window, measured at the windows' T",
               {"train.eval_length": of_context(1 / 4, at_most_base=True)}),
    # Section 7.1 and 7.2: positions and norms (Table 3)
    *(Experiment(name, "7", title, {"model.position": name})
      for name, title in (
        ("nope", "no position embedding"), ("absolute", "sinusoidal positions"), ("learnable", "learnable positions"),
        ("relative", "relative positions, T5's bucket number as the bias"),
        ("relative_learned", "relative positions, a learned bias a bucket (T5)"),
        ("alibi", "ALiBi"))),
    Experiment("learnable_default", "7", "learnable positions, no fixed token", {"model.position": "learnable"},
               base=False),
    Experiment("post_norm", "7", "post-norm blocks (Eq. 3)", {"model.norm": "post"}),
    # Section 7.3: biases (Tables 4 and 5)
    Experiment("sink_token", "7", "a learnable sink token x*", {"model.sink_token": True}),
    Experiment("sink_token_default", "7", "a learnable sink token x*, no fixed token", {"model.sink_token": True},
               base=False, weights=3),
    Experiment("kv_bias", "7", "KV biases", _attention(bias="kv")),
    Experiment("k_bias", "7", "K biases", _attention(bias="k"), weights=3),
    Experiment("v_bias", "7", "V biases", _attention(bias="v")),
    *(Experiment(f"k_bias_{name}_{norm}", "7", f"K biases with v* = {norm} {symbol}",
                 _attention(bias="k", fixed_value=name, fixed_value_norm=float(norm)))
      for name, symbol in (("first", "v'"), ("uniform", "v''")) for norm in (1, 5, 20)),
    # Section 7.4: attention operations (Tables 6 and 15, Figure 8)
    Experiment("sigmoid", "7", "sigmoid, no normalisation", _SIGMOID, weights=1),
    Experiment("sigmoid_normalised", "7", "sigmoid, normalised", _attention(similarity="sigmoid")),
    Experiment("elu", "7", "elu + 1, no normalisation", _attention(similarity="elu", normalizer="none")),
    Experiment("elu_normalised", "7", "elu + 1, normalised", _attention(similarity="elu")),
    Experiment("exp_unnormalised", "7", "exp, no normalisation", _attention(normalizer="none")),
    *(Experiment(name + suffix, "7", f"{title} kernel, {'normalised' if suffix else 'no normalisation'}",
                 _attention(similarity="linear", kernel=kernel, normalizer=normalizer if suffix else "none"))
      for name, kernel, title, normalizer in _KERNELS for suffix in ("_normalised", "")),
    Experiment("softmax_1b", "7", "1B parameters, softmax", {}, base=False, presets=("paper-1b",)),
    Experiment("sigmoid_1b", "7", "1B parameters, sigmoid without normalisation", _SIGMOID, presets=("paper-1b",)),
    # Appendix C: FFN, heads, biases, normalisers (Tables 11 to 14, Figure 29)
    *(Experiment(f"ffn_{name}", "C", f"{title} FFN", {"model.ffn": name}) for name, title in (
        ("relu", "ReLU"), ("gelu", "GeLU"), ("swish", "Swish"), ("reglu", "ReGLU"), ("geglu", "GeGLU"))),
    *(Experiment(f"heads_{h}", "C", f"{h} head{'s' * (h > 1)}", {"model.num_heads": h}) for h in (8, 4, 2, 1)),
    Experiment("heads_add", "C", "heads added, not concatenated", {"model.head_merge": "add"}),
    *(Experiment(f"{bias}_bias_shared", "C", f"{bias.upper()} biases shared by the heads of a block",
                 _attention(bias=bias, bias_shared=True)) for bias in ("kv", "k", "v")),
    # the paper's number of heads: whether that is why its heads lose by sharing KV biases and ours do not
    *(Experiment(f"kv_bias{name}_heads_8", "C", f"KV biases{title}, 8 heads", changes | {"model.num_heads": 8})
      for name, title, changes in (
          ("", "", _attention(bias="kv")),
          ("_shared", " shared by the heads of a block", _attention(bias="kv", bias_shared=True)))),
    *(Experiment(f"k_bias_dims_{dims}", "C", f"K biases learnable in {dims} / 96 of their dimensions",
                 _attention(bias="k", bias_dims=of_head_dim(dims / 96))) for dims in (1, 2, 4, 8, 16, 32, 64)),
    *(Experiment(f"scale_{scale:g}", "C", f"softmax scaled by alpha = {scale:g}", _attention(scale=scale))
      for scale in (2.0, 0.2, 0.1, 0.05)),
    *(Experiment(f"sigmoid_weight_decay_{decay:g}", "C", f"sigmoid, no normalisation, weight decay {decay:g}",
                 _SIGMOID | {_DECAY: decay}) for decay in (0.0, 0.5, 1.0)),
    *(Experiment(f"sigmoid_lr_{name}", "C", f"sigmoid, no normalisation, learning rate x {factor:g}",
                 _SIGMOID | {_RATE: times(factor)}) for name, factor in (("x2.5", 2.5), ("quarter", 0.25))),
    *(Experiment(f"softmax_p{name}", "C", f"p-normalised softmax, p = {name.replace('_', '/')}",
                 _attention(normalizer="p_norm", p=p))
      for name, p in (("1_2", 1 / 2), ("1_3", 1 / 3), ("1_4", 1 / 4), ("2", 2.0), ("3", 3.0), ("4", 4.0))),
    *(Experiment(f"sigmoid_p{p}", "C", f"p-normalised sigmoid, p = {p}",
                 _attention(similarity="sigmoid", normalizer="p_norm", p=float(p))) for p in (2, 3, 4)),
    # Appendix D: supervised fine-tuning (Figure 30), at as many seeds as what it starts from
    *(Experiment(f"sft_{name}{suffix}", "D", f"{title}, fine-tuned{on}", changes, base=False,
                 presets=tuple(PRESETS), start=start, download=bool(suffix))
      for suffix, on, changes in (("", "", {}), ("_ultrachat", " on UltraChat", {"instructions": "ultrachat"}))
      for name, title, start in (("softmax", "the base", "base"), ("sigmoid", "sigmoid, no normalisation", "sigmoid"))),
    # After the paper: data/paper/after_paper.csv says where each comes from
    *(Experiment(name, AFTER_PAPER, title, overrides, presets=("smoke", "minute", "laptop", "desk", "gpu"))
      for name, title, overrides in (
        ("gate_head", "an output gate per head", {"model.gate": "head"}),
        ("gate_element", "an output gate per element", {"model.gate": "element"}),
        ("sink_logit", "a learned sink logit per head", _attention(sink_logit="learned")),
        ("softmax_plus_one", "softmax plus one", _attention(sink_logit="zero")),
        ("softpick", "softpick", _attention(similarity="softpick")),
        ("sigmoid_log_bias", "sigmoid with bias -log C, no normalisation",
         _SIGMOID | _attention(logit_bias=MINUS_LOG_CONTEXT)),
        ("relu_length", "ReLU over the number of keys", _attention(similarity="relu", normalizer="length")),
        ("qk_norm", "queries and keys normed", {"model.qk_norm": True}),
        ("v_scale", "V-scale: small values made smaller", {"model.value_scale": True}),
        ("dyt", "dynamic tanh instead of RMSNorm", {"model.normalization": "dyt"}),
        ("gated_norm", "RMSNorm with a gate", {"model.normalization": "gated"}),
        ("sandwich_norm", "sandwich norm", {"model.norm": "sandwich"}),
        ("differential", "differential attention, half the heads",
         _attention(differential=True) | {"model.num_heads": times(1 / 2)}),
        # of 30, 100 and 300 times AdamW's rate the one with the least loss after 400 steps, at a seed of its own
        ("sgd", "SGD with momentum, rate x 100, no weight decay",
         {"train.optimizer": "sgd", _RATE: times(100), _DECAY: 0.0}),
        ("muon", "Muon for the blocks' matrices", {"train.optimizer": "muon"}),
        *((f"depth_{layers}", f"{layers} block{'s' * (layers > 1)}", {"model.num_layers": layers})
          for layers in (1, 2, 3, 6)),
        # all measured on texts as long as the shortest context: alpha_1 falls with T whatever was trained on
        *((f"context_{length}", f"context {length}, as many tokens a step",
           {"model.context_length": length, "train.batch_size": same_tokens(length), "train.eval_length": 32})
          for length in (32, 64, 128, 256, 512)))),
    # Two sinks: the same models when the first token need not predict the second
    *(Experiment(f"{name}_unscored", AFTER_PAPER, f"{title}, the first prediction unscored",
                 changes | {"data.unscored": (1,)}, base=name != "random_1", presets=("smoke", "minute", "laptop"))
      for name, title, changes in (
          ("base", "the base", {}),
          ("k_bias", "K biases", _attention(bias="k")),
          ("sink_logit", "a learned sink logit per head", _attention(sink_logit="learned")),
          ("gate_head", "an output gate per head", {"model.gate": "head"}),
          ("softpick", "softpick", _attention(similarity="softpick")),
          ("random_1", "a random token at position 1", {"data.random_positions": (1,)}),
          ("sigmoid", "sigmoid, no normalisation", _SIGMOID))),
    # Controls of ours for open verdicts: longer runs of a fixed token further in, of other doses of weight decay, and
    # of a random first token, the last also with more blocks
    *(Experiment(f"fixed_{k}_steps_x2", AFTER_PAPER, f"a fixed token at position {k}, steps x 2",
                 {"data.fixed_position": k, _STEPS: times(2)}, base=False, presets=("smoke", "laptop"))
      for k in (2, 3)),
    *(Experiment(f"weight_decay_{decay:g}_steps_x2", AFTER_PAPER, f"weight decay {decay:g}, steps x 2",
                 {_DECAY: decay, _STEPS: times(2)}, presets=("smoke", "laptop")) for decay in (0.0, 0.03, 0.3)),
    *(Experiment(f"random_1_{name}", AFTER_PAPER, f"a random token at position 1, {title}",
                 {"data.random_positions": (1,)} | change, base=False, presets=("smoke", "laptop"))
      for name, title, change in (("steps_x4", "steps x 4", {_STEPS: times(4)}),
                                  ("depth_6", "6 blocks", {"model.num_layers": 6}))),
)  # fmt: skip
# Three more seeds for what the paper's headline rests on, and for what was seen by block in seeds 0 to 2 or left open.
HEADLINE = (
    *("default", "base", "fixed_1", "learnable", "post_norm", "sink_token", "sink_token_default", "kv_bias", "k_bias"),
    *("v_bias", "sigmoid", "sigmoid_normalised", "weight_decay_0", "weight_decay_5", "prefix_5", "window_1_2"),
    *("window_1_64", "softpick", "sigmoid_log_bias"),
)
CONFIRMED = (
    *("weight_decay_0.001", "weight_decay_0.5", "weight_decay_1", "elu_normalised", "sandwich_norm"),
    *("softmax_plus_one", "mlp", "sigmoid_lr_quarter", "sigmoid_weight_decay_0", "fixed_2", "batch_quarter"),
    "softmax_p4",
)
SEEDS = dict.fromkeys(HEADLINE + CONFIRMED, 6) | {"random_1_steps_x4": 2, "random_1_depth_6": 2}  # 48k steps are long

BY_NAME = {e.name: e for e in EXPERIMENTS}


def experiments(section: str | None = None) -> list[Experiment]:
    """Every experiment, or those of a section: 4, 5, 6, 7, C, D or 8."""
    if section is None:
        return list(EXPERIMENTS)
    choice("section", str(section), SECTIONS)
    return [e for e in EXPERIMENTS if e.section == str(section)]


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the names that are close."""
    if name in BY_NAME:
        return BY_NAME[name]
    close = difflib.get_close_matches(name, [e.name for e in EXPERIMENTS], n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise ValueError(f"unknown experiment {name!r}: {hint}`python -m sinkutils list` shows all {len(EXPERIMENTS)}")
