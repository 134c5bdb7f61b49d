"""Small random models of transformers, as benchmarks/families.py builds each family, and variants of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import helpers
import pytest
import torch
from torch import Tensor, nn

VARIANTS: dict[str, dict[str, Any]] = {
    "falcon+alibi": {"alibi": True},
    "gemma2+softcap": {"attn_logit_softcapping": 2.0},
    "gpt2+inverse_layer": {"scale_attn_by_inverse_layer_idx": True},
    "llama4_text+chunks": {"attention_chunk_size": families.WINDOW, "num_hidden_layers": 4},
}


@contextmanager
def family_of(name: str, **changes: Any) -> Iterator[str]:
    """The family of a variant; while this is open, the family is built as that variant, with changes of its config."""
    family = name.partition("+")[0]
    with pytest.MonkeyPatch.context() as patch:
        special = families.SPECIAL.get(family, {}) | VARIANTS.get(name, {}) | changes
        patch.setitem(families.SPECIAL, family, special)
        yield family


def build(name: str, **changes: Any) -> nn.Module:
    """A random model of two layers and four heads whose attention is far from uniform, with windows of 7."""
    with family_of(name, **changes) as family:
        return families.build(family)


def tokens(samples: int = 3, length: int = 24) -> Tensor:
    """Texts for them, without special tokens."""
    return helpers.tokens(samples, length, least=3, vocabulary=families.VOCAB)


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """What an operation has to leave as it was, besides weights: hooks, attributes, modes, the kind of attention."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    parts = hooks + [(set(vars(m)), m.training) for m in model.modules()]
    return model.config._attn_implementation, parts


@torch.no_grad()
def eager_maps(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    """The attention maps (B, H, T, T) of the model's own eager attention, which is what `build` chooses."""
    assert model.config._attn_implementation == "eager"
    maps = model(ids, output_attentions=True, use_cache=False).attentions
    return tuple(m for m in maps if m is not None)


def eager_alpha(model: nn.Module, ids: Tensor, targets: tuple[int, ...]) -> Tensor:
    """alpha of the targets by definition, (B, K, L, H)."""
    return helpers.alpha_by_definition(eager_maps(model, ids), targets)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: nn.Module, vocabulary: dict[str, Any]) -> None:
    """A Llama as llama.cpp writes it: other names, q and k with the halves of a rotated pair apart.

    vocabulary: what a writer of GGUF adds, by name, of the tokens.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10000.0,
        "vocab_size": config.vocab_size,
    }
    for name, value in (sizes | vocabulary).items():
        getattr(writer, f"add_{name}")(value)
    for name, weight in model.state_dict().items():
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        for part, count in heads.items():
            if part + "." in name:
                rows = len(weight) // count // 2
                weight = weight.unflatten(0, (count, 2, rows)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
