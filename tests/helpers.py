"""What several test modules share: random inputs, small models, dense oracles, made-up records."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from sinkutils import LMConfig, TransformerLM
from sinkutils.measuring import passes
from sinkutils.model import fast
from sinkutils.model.attention import SIMILARITIES, AttentionSpec, attend
from sinkutils.paths import ROOT
from sinkutils.study.grid import by_name, config, unavailable
from sinkutils.study.record import Record, record_folder
from sinkutils.study.store import write_record
from sinkutils.study.train import Run

CPU = torch.device("cpu")
END = {"step": 60, "sink_1": 0.0, "valid_loss": 3.0}  # the least that the end of a run may say
DONE = {"status": "done", "reason": None, "curve": [], "final": END}  # and metrics.json
SHAPE = {"vocab_size": 60, "context_length": 32, "num_layers": 2, "num_heads": 2}
SHAPE |= {"hidden_size": 16, "intermediate_size": 24}


def architectures() -> dict[str, dict[str, Any]]:
    """Fields of a small model: what the experiments train at smoke, by the first name of each, and combinations."""
    trained: dict[str, dict[str, Any]] = {}
    rows = [e.name for e in by_name().values() if "smoke" in e.presets]
    for name in (name for name in rows if name not in unavailable("smoke")):
        fields = {k: v for k, v in vars(config(name, "smoke").model).items() if k not in SHAPE}
        if (fields["attention"].bias_dims or 0) <= 8 and fields not in trained.values():
            trained[name] = fields
    unnormalised = AttentionSpec(similarity="sigmoid", normalizer="none")
    return trained | {
        "gated_elements_add": {"gate": "element", "head_merge": "add"},
        "learnable_sink_token": {"position": "learnable", "sink_token": True},
        "t5_k_bias": {"position": "relative_learned", "attention": AttentionSpec(bias="k")},
        "sigmoid_k_bias": {"attention": replace(unnormalised, bias="k")},
        "alibi_sink_logit": {"position": "alibi", "attention": AttentionSpec(sink_logit="learned")},
        "alibi_differential": {"position": "alibi", "attention": AttentionSpec(differential=True)},
        "prefix_sink_logit": {"attention": AttentionSpec(sink_logit="learned", prefix=7)},
        "window_differential": {"attention": AttentionSpec(differential=True, window=5)},
    }


def name_of(spec: AttentionSpec) -> str:
    """What differs from softmax, as the name of a test."""
    default = AttentionSpec()
    changes = [f"{k}={v}" for k, v in vars(spec).items() if v != getattr(default, k)]
    return " ".join(changes) or "softmax"


def draw(
    spec: AttentionSpec,
    length: int,
    position: str = "none",
    dtype: torch.dtype = torch.float64,
    *,
    shape: tuple[int, int, int] = (2, 2, 6),  # B, H, D
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the keyword arguments that the spec needs, every tensor of them with a gradient."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, dim = shape

    def leaf(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    inputs, extras = [leaf(batch, heads, length, dim) for _ in range(3)], {}
    if spec.has_key_bias:
        extras["key_bias"] = leaf(heads, dim)
    if spec.bias in ("kv", "v"):
        extras["value_bias"] = leaf(heads, dim)
    if position != "none":
        extras["distance_bias"] = leaf(1 if position == "shared" else heads, length + 2)
    if spec.sink_logit == "learned":
        extras["sink_logit"] = leaf(heads)
    if spec.differential:
        extras["mix"] = leaf()
    if spec.kernel == "mlp":
        first, second = leaf(dim, dim), leaf(dim, dim)
        inputs += [first, second]
        extras["mlp"] = lambda x: torch.tanh(x @ first) @ second / dim
    return inputs, extras


def own_model(gain: float = 2.0, **fields: Any) -> TransformerLM:
    """A small model of ours whose attention is far from uniform: its start times `gain`."""
    model = TransformerLM(LMConfig(**{**SHAPE, **fields}), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    return model


def tokens(samples: int = 3, length: int = 20, least: int = 0, vocabulary: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(least, vocabulary, (samples, length), generator=generator)


def word_tokenizer(words: int, special: tuple[str, ...] = ("<eos>", "<bos>", "<fix>")) -> Tokenizer:
    """One of the special tokens and, behind them, the words w0, w1, ..; any other word is w0."""
    names = [*special, *(f"w{i}" for i in range(words))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(names)}, "w0"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(list(special))
    return made


def by_the_reference(model: TransformerLM, ids: Tensor) -> Tensor:
    """Logits (B, T, V) with attention computed by the dense reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fast, "attention_output", lambda *inputs, **extras: attend(*inputs, **extras)[0]
        )
        return model(ids)


PHI = {"identity": lambda x: x, "elu": lambda x: torch.where(x > 0, x + 1, x.exp())}
SIZES = {  # what a key adds to its row's sum, by the formulas alone
    "exp": lambda s: (s - s.amax(dim=-1, keepdim=True)).exp(),  # the largest cancels
    "sigmoid": lambda s: 1 / (1 + (-s).exp()),
    "elu": PHI["elu"],
    "linear": torch.abs,
    "relu": lambda s: s.clamp(min=0),
    "softpick": lambda s: torch.expm1(s).abs(),
}


def dense_shares(q: Tensor, k: Tensor, spec: AttentionSpec, extras: dict[str, Any]) -> Tensor:
    """What alpha is the mean of, (B, H, T, S): weights, or where they do not sum to one |f| over its row sum.

    From the formulas, without the package's own attention, in float64.
    """
    if spec.differential:
        plain = replace(spec, differential=False)
        given = {n: x for n, x in extras.items() if n != "mix"}
        first, second = (dense_shares(q[..., n::2], k[..., n::2], plain, given) for n in (0, 1))
        shares = (first - extras["mix"] * second).abs()
        return shares / shares.sum(dim=-1, keepdim=True)
    phi = extras["mlp"] if spec.kernel == "mlp" else PHI[spec.kernel]
    queries, keys, root = phi(q).double(), phi(k).double(), q.shape[-1] ** 0.5
    logits = queries @ keys.mT / root
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (distance >= 0) & (distance < (spec.window or math.inf))
    if spec.prefix > 1:
        seen = seen | (torch.arange(q.shape[2]) < spec.prefix)
    if "distance_bias" in extras:
        logits = logits + extras["distance_bias"][:, distance.clamp(min=0)]
    if spec.has_star:
        star = torch.zeros(len(q), q.shape[1], q.shape[2], 1)
        if spec.has_key_bias:
            star = queries @ phi(extras["key_bias"]).double()[:, :, None] / root
        elif spec.sink_logit == "learned":
            star = star + extras["sink_logit"][:, None, None]
        logits = torch.cat([star, logits], dim=-1)
        seen = torch.cat([torch.ones(q.shape[2], 1, dtype=torch.bool), seen], dim=-1)
    logits = (logits + spec.logit_bias).masked_fill(~seen, -math.inf)
    size_of = SIZES.get(spec.similarity) or SIMILARITIES[spec.similarity]
    sizes = size_of(logits).abs().masked_fill(~seen, 0)
    total = sizes.sum(dim=-1, keepdim=True)
    if spec.similarity == "softpick":  # negative ones count in the sum alone
        sizes = sizes.masked_fill(logits < 0, 0)
    return sizes / total.masked_fill(total == 0, 1)


class DenseMaps:
    """An observer that keeps what it is shown, and whole maps of it."""

    def __init__(self, model: TransformerLM, ids: Tensor) -> None:
        self.maps: list[Tensor] = []  # (B, H, T, S) by layer, x* or k* first
        self.qkv: list[tuple[Tensor, Tensor, Tensor]] = []
        self.hidden: list[Tensor] = []
        self.before: list[Tensor] = []
        with torch.no_grad():
            model(ids, self)
        self.length = ids.shape[1]
        self.star = int(model.config.attention.has_star or model.config.sink_token)

    def embedding(self, hidden: Tensor) -> None:
        self.first = hidden

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: dict
    ) -> None:
        self.maps.append(dense_shares(q, k, spec, extras))
        self.qkv.append((q, k, v))

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None:
        self.hidden.append(hidden)
        self.before.append(before_norm)

    def own(self, layer: int) -> Tensor:
        """The map of a layer without a star, (B, H, T, T)."""
        return self.maps[layer][:, :, -self.length :, self.star :]

    def alpha(self, targets: Sequence[int]) -> Tensor:
        """alpha of the targets by definition, (B, K, L, H)."""
        return alpha_by_definition([self.own(layer) for layer in range(len(self.maps))], targets)

    def star_share(self) -> Tensor:
        """The share of the star, (B, L, H)."""
        return torch.stack([m[:, :, -self.length :, 0].mean(-1) for m in self.maps], 1)


def alpha_by_definition(maps: Sequence[Tensor], targets: Sequence[int]) -> Tensor:
    """alpha_k = mean over i = k..T of A_ik of whole maps, each (B, H, T, T): (B, K, L, H)."""
    alphas = [[m[:, :, k - 1 :, k - 1].mean(-1) for m in maps] for k in targets]
    return torch.stack([torch.stack(of_key, 1) for of_key in alphas], 1)


WRONG = {  # a log-sum-exp (B, H, T) over so many keys, made wrong
    "in row 3": lambda lse, keys: (
        lse + torch.nn.functional.one_hot(torch.tensor(3), lse.shape[-1]) / 4
    ),
    "in base 2": lambda lse, keys: lse / math.log(2),
}


def spoil(patch: pytest.MonkeyPatch, where: str) -> None:
    """Make the kernel's log-sum-exp wrong."""
    right = passes.fused

    def wrong(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(q, k, v, **kw)
        return out, WRONG[where](lse, k.shape[2])

    patch.setattr(passes, "fused", wrong)


@contextmanager
def refused(message: str, kind: Any = ValueError) -> Iterator[None]:
    """Hold that what follows raises an error of one line, in which the pattern `message` is found."""
    with pytest.raises(kind, match=message) as error:
        yield
    assert "\n" not in str(error.value)


def refuses(
    message: str, call: Callable, *given: Any, kind: Any = ValueError, **options: Any
) -> None:
    """The same of one call with this input."""
    with refused(message, kind):
        call(*given, **options)


@contextmanager
def interrupted(step: int) -> Iterator[None]:
    """While this is open, a run stops when it is to take its step of this number, counted from 0."""

    def advance(run: Run, really: Any = Run.advance) -> Tensor:
        if run.step == step:
            raise KeyboardInterrupt
        return really(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "advance", advance)
        yield


def made_up(
    runs: Path,
    name: str,
    seed: int = 0,
    preset: str = "smoke",
    kept: Any = None,
    made: Any = None,
    **metrics: Any,
) -> Record:
    """A record of an experiment with these metrics, which nothing trained.

    kept: what else `write_record` keeps, by its name: weights, tokenizer, arrays. made: of its provenance.
    """
    run, folder = config(name, preset, seed), record_folder(preset, name, seed, runs)
    said = DONE | metrics | {"final": END | metrics.get("final", {})}
    made = {"wall_seconds": 1.0, "instruction_set": ["avx2"]} | (made or {})
    return write_record(folder, run, said, made, **(kept or {}))


def environment(**more: str) -> dict[str, str]:
    """Of a process that a test starts: one thread, and the modules of this checkout and of its tests."""
    folders = (ROOT, ROOT / "tests", ROOT / "benchmarks")
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    """Two processes that run this together, to their end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *arguments], env=environment(), **streams)
    try:
        stdout, stderr = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # and not kill: torchrun ends its processes with itself
        process.wait(60)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
