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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
)
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from sinkutils.measuring import surgery
from sinkutils.measuring.families import REFUSED, configurations
from sinkutils.measuring.hf import observe
from sinkutils.measuring.measure import measure
from sinkutils.measuring.passes import Measuring
from sinkutils.measuring.tally import LeftAsFound, Tally
from sinkutils.paths import ROOT

VOCAB = 96
WINDOW = 7
# A small value for whatever a family's configuration calls it; a name that it does not have is left out.
SMALL: dict[str, int] = {
    name: value
    for value, names in {
        VOCAB: "vocab_size vocab_size_per_layer_input",
        32: """hidden_size d_model n_embd emb_dim dim backbone_hidden_size embed_dim projection_dim out_hidden_size
            decoder_hidden_size cross_attention_hidden_size word_embed_proj_dim hidden_size_global embedding_size
            output_dim adapter_out_dim adapter_in_dim adapter_input_size mamba_d_ssm""",
        2: """num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers
            num_encoder_layers conf_num_hidden_layers depth num_key_value_heads kv_n_heads swa_num_key_value_heads
            num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token index_n_heads index_topk_heads
            hc_mult eos_token_id""",
        4: """num_attention_heads attention_heads num_heads n_head n_heads decoder_attention_heads
            encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads qk_rope_head_dim
            mamba_n_heads num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num""",
        48: """intermediate_size ffn_dim ffn_hidden_size n_inner dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim
            moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size feed_forward_size
            shared_experts_intermediate_size""",
        320: "max_position_embeddings n_positions max_seq_len max_target_positions model_max_length",
        8: "head_dim qk_nope_head_dim v_head_dim index_head_dim rotary_dim index_topk",
        16: "mamba_chunk_size chunk_size q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input",
        1: "bos_token_id n_group topk_group num_expert_group",
        0: "pad_token_id",
        WINDOW: "sliding_window window_size attention_window_size",
    }.items()
    for name in names.split()
}
MIXED = ["sliding_attention", "full_attention"]
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

QWEN4 = HYBRID | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
                  "indexer_compress_ratio": 4}  # fmt: skip


def small_config(family: str) -> PretrainedConfig:
    """A configuration of the family with 2 layers of 4 heads or so, whose model has well under a million parameters."""
    return _shrink(CONFIG_MAPPING[family], SPECIAL.get(family, {}))


def _shrink(kind: type[PretrainedConfig], special: dict[str, Any]) -> PretrainedConfig:
    default, given = kind(), dict(special)
    for name, value in SMALL.items():
        # Only what the configuration itself sets to a number: aliases of other names and per-layer lists follow.
        if type(vars(default).get(name)) is int and name not in kind.attribute_map:
            given.setdefault(name, value)
    if "sliding_window" in vars(default):
        given.setdefault("sliding_window", WINDOW)
    if hasattr(default, "is_decoder"):
        given.setdefault("is_decoder", True)
    if "kv_lora_rank" in vars(default):  # multi-head latent attention: as many keys as queries
        given = {
            name: value
            for name, value in given.items()
            if name not in ("num_key_value_heads", "head_dim")
        }
        given |= {"num_key_value_heads": 4} | special
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            given[name] = _shrink(type(part), special.get(name, {}))
    return kind(**given)


SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bailing_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), HYBRID),
    **{family: {"text_config": HYBRID} for family in ("qwen3_5", "qwen3_5_moe")},
    **{family: {"head_dim": 8} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 8, "patcher_config": {"vocab_size": 260}},
    "cohere_compass_text": {"layer_types": MIXED, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "first_k_dense_replace": 1, "max_window_layers": 1},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense", "dense"]}},
    "falcon_h1": {"mamba_d_head": 8, "mamba_d_state": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 48, "layer_types": MIXED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": HYBRID | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": MIXED},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8,
                           "index_topk_blocks": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
              "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "use_mamba_kernels": False},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

LENGTHS = (5, 64, 300)
TARGETS = (1, 2, 5)
SAMPLES = 2
TOLERANCE = 2e-5  # of alpha; and of logits relative to the largest


def build(family: str) -> nn.Module:
    """A random model of the family, in eval mode, whose attention is far from uniform. Raises what its class raises."""
    torch.manual_seed(0)
    config = small_config(family)
    if family.startswith("musicgen"):  # its causal LM takes the decoder's configuration
        model = getattr(transformers, CLASSES[family])._from_config(
            config.decoder, attn_implementation="eager"
        )
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
    return torch.randint(
        3, VOCAB, (SAMPLES, length), generator=torch.Generator().manual_seed(length)
    )


class Oracle:
    """Attention by its definition in float64, one layer's weights after the other."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """softmax over the keys and, where there is one, a learned sink logit that has no value."""
        scale = kwargs.get("scaling")
        group = q.shape[1] // k.shape[1]
        logits = torch.einsum("bhid,bhjd->bhij", q.double(), k.repeat_interleave(group, 1).double())
        logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
        if (cap := kwargs.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        if (bias := kwargs.get("position_bias")) is not None:
            logits = logits + bias
        mask = (
            torch.full(logits.shape[-2:], -torch.inf).triu(1)
            if attention_mask is None
            else attention_mask
        )
        if (
            indices := kwargs.get("indices")
        ) is not None:  # sparse attention: the keys that each query chose
            chosen = (indices[:, :, :, None] == torch.arange(k.shape[2])).any(dim=2)
            logits = logits.masked_fill(~chosen[:, None], -torch.inf)
        if (
            blocks := kwargs.get("block_indices")
        ) is not None:  # the blocks of keys that each group of heads chose
            chosen = (
                blocks[..., None] == torch.arange(k.shape[2]) // module.config.index_block_size
            ).any(dim=3)
            logits = logits.masked_fill(
                ~chosen.repeat_interleave(q.shape[1] // chosen.shape[1], 1), -torch.inf
            )
        logits = logits.masked_fill(mask < -1e30, -torch.inf) + mask.masked_fill(mask < -1e30, 0)
        total = logits.logsumexp(dim=-1, keepdim=True)
        sink = kwargs.get("s_aux", kwargs.get("sinks"))
        if sink is not None:
            total = torch.logaddexp(
                total, (sink.reshape(1, -1, 1, 1) if sink.ndim == 1 else sink).double()
            )
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

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        square = (
            isinstance(out, Tensor)
            and out.ndim >= 3
            and out.shape[-2:] == (self.length, self.length)
        )
        if getattr(function, "__name__", "") == "softmax" and square:
            self.maps.append(out.reshape(SAMPLES, -1, self.length, self.length))
        return out


@contextmanager
def attention(model: nn.Module, name: str) -> Iterator[None]:
    """While this is open, every part of the model computes attention by the function of that name."""
    configs = configurations(model)
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
    if legacy:
        record = watched = Softmaxes(ids.shape[1])
    else:
        record, watched = Oracle(), attention(model, "dense")
        AttentionInterface.register("dense", record.attend)
        AttentionMaskInterface.register("dense", eager_mask)
    with watched:
        logits = model(ids, use_cache=False).logits
    weights = torch.stack(record.maps, dim=1)  # (samples, layers, heads, T, T)
    alpha = torch.stack([weights[..., k - 1 :, k - 1].mean(dim=-1) for k in TARGETS], dim=1)
    seen = [
        sum(bool(x) for x in layer) for layer in (weights[0, :, :, -1] > 0).any(dim=1)
    ]  # keys of the last query
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
    surgery: str = ""  # right, or why it is refused
    remarks: str = ""

    @property
    def wrong(self) -> bool:
        gap = max(self.alpha, self.logits, self.definition)
        return not self.refused and (not gap <= TOLERANCE or self.surgery.startswith("wrong"))


def operated(model: nn.Module, ids: Tensor) -> str:
    """What surgery does: its report against `measure`; a transplant from texts of one first token against that token
    in front; and whether nothing behind a hidden x_1 hangs on it.
    """

    def off(a: Tensor, b: Tensor) -> bool:
        return not bool((a - b).abs().max() <= 10 * TOLERANCE * max(1.0, float(b.abs().max())))

    try:
        found, right = surgery.untouched(model, ids).report, measure(model, ids, (1, 2))
        assert found is not None
        if off(found.alpha, right.alpha) or (
            right.star is not None and off(found.star, right.star)
        ):  # type: ignore[arg-type]
            return "wrong report"
    except ValueError as error:
        return str(error)
    first = torch.full_like(ids[:, :1], 7)
    longer = torch.cat([first, ids], dim=1)
    try:
        if off(
            surgery.transplant(model, ids, longer).losses,
            surgery.untouched(model, longer).losses[:, 1:],
        ):
            return "wrong transplant"
        pair = [
            surgery.hide(model, torch.cat([one, ids], dim=1)).losses[:, 1:]
            for one in (first, first + 1)
        ]
    except ValueError as error:
        return f"right where no keys are changed; else {error}"
    return "wrong where x_1 is hidden" if off(*pair) else "right"


@torch.no_grad()
def check(family: str, lengths: tuple[int, ...] = LENGTHS) -> Result:
    """Measure a small model of the family at several T and compare. Raises what is no refusal: a bug of ours."""
    result = Result(family)
    try:
        model = build(family)
    except ImportError as error:
        library = re.search(r"the (\w+) library", str(error))
        return replace(
            result, refused=f"not built here: {library[1] if library else error} is not installed"
        )
    except Exception:
        if family not in REFUSED:
            raise
        return replace(result, refused=f"{REFUSED[family]} (not built here)")
    ids = [tokens(length) for length in lengths]
    try:
        reports = [
            [measure(model, x, TARGETS, exact=exact) for exact in (False, True)] for x in ids
        ]
    except ValueError as error:
        return replace(result, refused=str(error))
    result.path = reports[-1][0].path
    for x, both in zip(ids, reports, strict=True):
        eager = model(x, use_cache=False).logits
        scale = float(eager.abs().max())
        logits, alpha, seen = dense(model, x, legacy=result.path == "eager weights")
        result.definition = max(result.definition, float((logits - eager).abs().max()) / scale)
        for exact, report in zip((False, True), both, strict=True):
            gaps = [report.alpha - alpha]
            if report.star is not None:  # what is left of each row, however it was computed
                gaps.append(report.star - both[0].star)
            result.alpha = max(result.alpha, *(float(gap.abs().max()) for gap in gaps))
            state = LeftAsFound()
            with state, state:
                capture = observe(model, Measuring(Tally(TARGETS, x.shape[1]), exact), state)
                capture.start(x)
                during = model(x, use_cache=False).logits
            result.logits = max(result.logits, float((during - eager).abs().max()) / scale)
    result.surgery = operated(model, ids[0])
    blocks = len(report.hidden_norms)  # type: ignore[arg-type]
    remarks = (
        [f"attention in {len(report.layers)} of {blocks} blocks"]
        if len(report.layers) < blocks
        else []
    )
    hidden = [count for count in seen if count < lengths[-1]]
    if hidden:
        keys = " or ".join(map(str, sorted(set(hidden))))
        remarks.append(f"{len(hidden)} of {len(seen)} layers see {keys} of {lengths[-1]} keys")
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
        f"window of {WINDOW}. `measure` has numbers for {len(measured)}; why not for {len(refused)} stands below.",
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
        "Surgery: *right* is a report with the numbers of `measure`, a transplant from texts of one first token that "
        "is that token in front, and a hidden first token that nothing behind it hangs on; else why it is refused.",
        "",
        "| family | class | how | alpha | logits | surgery | remarks |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{r.family}` | `{CLASSES[r.family]}` | {r.path} | {at_most(r.alpha)} | {at_most(r.logits)} "
            f"| {r.surgery} | {r.remarks} |"
            for r in measured
        ),
        "",
        "## Without numbers, and why",
        "",
        "| family | class | reason |",
        "|---|---|---|",
        *(f"| `{r.family}` | `{CLASSES[r.family]}` | {r.refused} |" for r in refused),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families", nargs="*", help="names in transformers (default: all, into docs/families.md)"
    )
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
