"""Families of decoder models in transformers: each one's model in small, and why some cannot be measured.

`benchmarks/families.py` measures them all against dense attention and writes docs/families.md.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 96
WINDOW = 7
# A small value for whatever a family's configuration calls it; a name that it does not have is left out.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "backbone_hidden_size", "embed_dim",
                     "projection_dim", "out_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size",
                     "word_embed_proj_dim", "hidden_size_global",
                     "embedding_size", "output_dim", "adapter_out_dim", "adapter_in_dim", "adapter_input_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "conf_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "attention_heads", "num_heads", "n_head", "n_heads",
                     "decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads",
                     "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "dim_ff", "d_inner",
                     "decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
                     "expert_ffn_hidden_size", "feed_forward_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions",
                     "model_max_length"), 320),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "rotary_dim"), 8),
    "qk_rope_head_dim": 4,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16), "mamba_d_ssm": 32, "mamba_n_heads": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("index_n_heads", "index_topk_heads", "hc_mult"), 2), "index_topk": 8,
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), WINDOW),
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
# Why a family cannot be measured, by its model_type.
REFUSED = {
    "blt": "it attends over patches of bytes and within them, in several stacks: alpha_k is of tokens",
    "cpmant": "it puts a prompt of its own before the tokens, so that position 1 is none of them",
    "deepseek_v4": "it attends to compressed runs of tokens beside single ones: alpha_k is of tokens",
    "diffllama": "its weights are the difference of two softmaxes, neither positive nor of sum one",
    "gemma4_assistant": "it drafts from the keys and values of another model and has none of its own",
    "gemma4_unified_assistant": "it drafts from the keys and values of another model and has none of its own",
    "hrm_text": "its layers run many times a token (H and L cycles), so that a layer has no one attention",
    "musicgen_decoder": "it reads several codebooks of sound at a step, not one token",
    "musicgen_melody_decoder": "it reads several codebooks of sound at a step, not one token",
    "prophetnet": "its layers carry n-gram predictions as further positions beside the tokens",
    "reformer": "it attends within chunks and hash buckets (local and LSH attention), without weights over all keys",
    "xlm": "its attention modules stand in a list of their own, not in blocks, and see later tokens by default",
    "xlnet": "without a permutation mask it sees later tokens",
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

QWEN4 = HYBRID | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
                  "indexer_compress_ratio": 4}  # fmt: skip


def small_config(family: str) -> PreTrainedConfig:
    """A configuration of the family with 2 layers of 4 heads or so, whose model has well under a million parameters."""
    return _shrink(CONFIG_MAPPING[family], SPECIAL.get(family, {}))


def _shrink(kind: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
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
        given = {name: value for name, value in given.items() if name not in ("num_key_value_heads", "head_dim")}
        given |= {"num_key_value_heads": 4} | special
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            given[name] = _shrink(type(part), special.get(name, {}))
    return kind(**given)


SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": HYBRID,
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
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": HYBRID | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": MIXED},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8,
                           "index_topk_blocks": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_5": {"text_config": HYBRID},
    "qwen3_5_moe": {"text_config": HYBRID},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
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
