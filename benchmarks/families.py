"""Every causal LM family of the pinned transformers, in small: `measure` against dense attention, or why it is refused.

    python benchmarks/families.py                     all of them, and docs/families.md is written
    python benchmarks/families.py llama gpt_oss       these, printed only

A family's model has random weights, two layers and a window of 7 where it has windows. Dense attention is computed
here from queries, keys, values and mask alone (`dense`); its own logits must be those of the family's eager attention,
or it would not be the attention that the model means. Families that choose no attention function have every softmax
over T keys recorded instead.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from sinkutils.measuring import families
from sinkutils.measuring.hf import capturing
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Request, Tally
from sinkutils.paths import ROOT

LENGTHS = (5, 64, 300)
TARGETS = (1, 2, 5)
SAMPLES = 2
TOLERANCE = 2e-5  # of alpha; and of logits relative to the largest


def build(family: str) -> nn.Module:
    """A random model of the family, in eval mode, whose attention is far from uniform. Raises what its class raises."""
    torch.manual_seed(0)
    config = families.small_config(family)
    if family.startswith("musicgen"):  # its causal LM takes the decoder's configuration
        model = getattr(transformers, CLASSES[family])._from_config(config.decoder, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model.eval()


def tokens(length: int) -> Tensor:
    """Sequences of random tokens, (SAMPLES, length)."""
    return torch.randint(3, families.VOCAB, (SAMPLES, length), generator=torch.Generator().manual_seed(length))


class Oracle:
    """Attention by its definition in float64, one layer's weights after the other."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """softmax over the keys and, where there is one, a learned sink logit that has no value."""
        scale = kwargs.get("scaling")
        group = q.shape[1] // k.shape[1]
        logits = torch.einsum("bhid,bhjd->bhij", q.double(), k.repeat_interleave(group, 1).double())
        logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
        if kwargs.get("softcap") is not None:
            logits = kwargs["softcap"] * torch.tanh(logits / kwargs["softcap"])
        if kwargs.get("position_bias") is not None:
            logits = logits + kwargs["position_bias"]
        mask = attention_mask
        if mask is None:
            mask = torch.full(logits.shape[-2:], -torch.inf).triu(1)
        if kwargs.get("indices") is not None:  # sparse attention: the keys that each query chose
            chosen = (kwargs["indices"][:, :, :, None] == torch.arange(k.shape[2])).any(dim=2)
            logits = logits.masked_fill(~chosen[:, None], -torch.inf)
        if kwargs.get("block_indices") is not None:  # the blocks of keys that each group of heads chose
            block = torch.arange(k.shape[2]) // module.config.index_block_size
            chosen = (kwargs["block_indices"][..., None] == block).any(dim=3)
            logits = logits.masked_fill(~chosen.repeat_interleave(q.shape[1] // chosen.shape[1], 1), -torch.inf)
        logits = logits.masked_fill(mask < -1e30, -torch.inf) + mask.masked_fill(mask < -1e30, 0)
        total = logits.logsumexp(dim=-1, keepdim=True)
        sink = kwargs.get("s_aux", kwargs.get("sinks"))
        if sink is not None:
            sink = sink.double().reshape(1, -1, 1, 1) if sink.ndim == 1 else sink.double()
            total = torch.logaddexp(total, sink)
        weights = torch.exp(logits - total)
        self.maps.append(weights)
        out = torch.einsum("bhij,bhjd->bihd", weights, v.repeat_interleave(group, 1).double())
        return out.to(q.dtype).contiguous(), None


class Softmaxes(TorchFunctionMode):
    """Records every softmax (B, H, T, T) of a forward pass."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.maps: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        square = isinstance(out, Tensor) and out.ndim >= 3 and out.shape[-2:] == (self.length, self.length)
        if getattr(function, "__name__", "") == "softmax" and square:
            self.maps.append(out.reshape(SAMPLES, -1, self.length, self.length))
        return out


@contextmanager
def attention(model: nn.Module, name: str) -> Iterator[None]:
    """While this is open, every part of the model computes attention by the function of that name."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation = value


def dense(model: nn.Module, ids: Tensor, legacy: bool) -> tuple[Tensor, Tensor, list[int]]:
    """By dense attention: logits, alpha (samples, targets, layers, heads), and how many keys the last query sees."""
    record: Oracle | Softmaxes = Softmaxes(ids.shape[1]) if legacy else Oracle()
    if isinstance(record, Softmaxes):
        with record:
            logits = model(ids, use_cache=False).logits
    else:
        AttentionInterface.register("dense", record.attend)
        AttentionMaskInterface.register("dense", eager_mask)
        with attention(model, "dense"):
            logits = model(ids, use_cache=False).logits
    weights = torch.stack(record.maps, dim=1)  # (samples, layers, heads, T, T)
    alpha = torch.stack([weights[..., k - 1 :, k - 1].mean(dim=-1) for k in TARGETS], dim=1)
    seen = [sum(bool(x) for x in layer) for layer in (weights[0, :, :, -1] > 0).any(dim=1)]  # keys of the last query
    return logits, alpha.float(), seen


@dataclass
class Result:
    """What one family's check found; gaps are largest differences over T = 5, 64, 300."""

    family: str
    refused: str = ""  # why it cannot be measured
    path: str = ""
    alpha: float = 0.0  # to dense attention, by the default path and by the exact one
    logits: float = 0.0  # while measured, to the family's eager logits, relative to the largest
    definition: float = 0.0  # the logits of dense attention, likewise
    remarks: str = ""

    @property
    def wrong(self) -> bool:
        return not self.refused and not max(self.alpha, self.logits, self.definition) <= TOLERANCE


@torch.no_grad()
def check(family: str, lengths: tuple[int, ...] = LENGTHS) -> Result:
    """Measure a small model of the family at several T and compare. Raises what is no refusal: a bug of ours."""
    result = Result(family)
    try:
        model = build(family)
    except ImportError as error:
        library = re.search(r"the (\w+) library", str(error))
        return replace(result, refused=f"not built here: {library[1] if library else error} is not installed")
    except Exception:
        if family not in families.REFUSED:
            raise
        return replace(result, refused=f"{families.REFUSED[family]} (not built here)")
    ids = [tokens(length) for length in lengths]
    try:
        reports = [[measure(model, x, TARGETS, exact=exact) for exact in (False, True)] for x in ids]
    except ValueError as error:
        return replace(result, refused=str(error))
    report = reports[-1][0]
    result.path = report.path
    for x, both in zip(ids, reports, strict=True):
        eager = model(x, use_cache=False).logits
        scale = float(eager.abs().max())
        logits, alpha, seen = dense(model, x, legacy=result.path == "eager weights")
        result.definition = max(result.definition, float((logits - eager).abs().max()) / scale)
        for exact, report in zip((False, True), both, strict=True):
            result.alpha = max(result.alpha, float((report.alpha - alpha).abs().max()))
            if report.star is not None:  # what is left of each row, however it was computed
                both_stars = (report.star - both[0].star).abs().max()
                result.alpha = max(result.alpha, float(both_stars))
            with capturing(model, Request(TARGETS), Tally(x.shape[1]), exact):
                during = model(x, use_cache=False).logits
            result.logits = max(result.logits, float((during - eager).abs().max()) / scale)
    blocks = len(report.hidden_norms)  # type: ignore[arg-type]
    remarks = [f"attention in {len(report.layers)} of {blocks} blocks"] if len(report.layers) < blocks else []
    hidden = sorted({count for count in seen if count < lengths[-1]})
    if hidden:
        layers = sum(count < lengths[-1] for count in seen)
        remarks.append(f"{layers} of {len(seen)} layers see {' or '.join(map(str, hidden))} of {lengths[-1]} keys")
    remarks += ["learned sink logit"] if report.star is not None else []
    result.remarks = ", ".join(remarks)
    return result


def at_most(gap: float) -> str:
    """The power of ten that bounds a gap, whose own digits depend on the machine."""
    return "0" if gap == 0 else f"1e{math.ceil(math.log10(gap))}"


def page(results: list[Result]) -> str:
    """docs/families.md."""
    measured = [r for r in results if not r.refused]
    refused = [r for r in results if r.refused]
    lines = [
        "# Families of models",
        "",
        f"Written by `python benchmarks/families.py` with transformers {transformers.__version__}: every family of "
        f"its `AutoModelForCausalLM`, {len(results)} of them, as a model of random weights with two layers or so and a "
        f"window of {families.WINDOW}. `measure` has numbers for {len(measured)}; {len(refused)} are refused by name.",
        "",
        f"alpha_1, alpha_2 and alpha_5 at T = {', '.join(map(str, LENGTHS))}, by the default path and by `exact=True`, "
        "are held against dense attention computed in float64 from queries, keys and mask alone, whose logits have to "
        "be those of the family's own eager attention; families that choose no attention function, against the "
        "softmaxes of a plain eager pass. The columns bound the largest difference: of alpha, and of the logits while "
        "a model is measured, relative to the largest logit.",
        "",
        "How: *fused* is a kernel's log-sum-exp, *exact* the family's eager function on chunks of queries (where "
        "keys and values differ in width, say), *eager weights* a hook on the weights that the modules return.",
        "",
        "| family | class | how | alpha | logits | remarks |",
        "|---|---|---|---|---|---|",
        *(f"| {r.family} | {CLASSES[r.family]} | {r.path} | {at_most(r.alpha)} | {at_most(r.logits)} | {r.remarks} |"
          for r in measured),
        "",
        "## Refused, and why",
        "",
        "| family | class | reason |",
        "|---|---|---|",
        *(f"| {r.family} | {CLASSES[r.family]} | {r.refused} |" for r in refused),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names in transformers (default: all, into docs/families.md)")
    names = parser.parse_args().families
    unknown = sorted(set(names) - set(CLASSES))
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; there are {', '.join(CLASSES)}")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    results = []
    for name in names or CLASSES:
        results.append(check(name))
        print(results[-1], flush=True)
    if not names:
        (ROOT / "docs" / "families.md").write_text(page(results), encoding="utf-8")
    wrong = [r.family for r in results if r.wrong]
    refused = sum(bool(r.refused) for r in results)
    print(f"{len(results)} families, {refused} refused, wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
