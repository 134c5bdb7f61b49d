#!/usr/bin/env bash
# Expected: a GGUF file says how its rotary positions are stretched (LLAMA.rope.scaling.type, .factor,
# .original_context_length), and transformers, which reads GGUF files, stretches them so.
# What happens: transformers reads these keys for gpt-oss alone. A Llama or Qwen2 file with linear or
# YaRN scaling is loaded with plain positions, without a warning: the weights are those of the file,
# the angles are not.
# transformers 5.23.0, gguf 0.19.0, torch 2.13.0. Sources: transformers/modeling_gguf_pytorch_utils.py
# ("Reconstruct rope_scaling from GGUF metadata") and GGUF_CONFIG_MAPPING in
# transformers/integrations/ggml.py; the keys are those of the GGUF specification (docs/gguf.md of
# ggml), and llama.cpp obeys them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np
from transformers import AutoModelForCausalLM

draw = np.random.default_rng(0)
shapes = {"token_embd": (8, 32), "output": (8, 32), "output_norm": (32,)}
shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_output": (32, 32)}
shapes |= {"blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}

writer = gguf.GGUFWriter("long.gguf", "llama")
writer.add_context_length(4096)
writer.add_embedding_length(32)
writer.add_block_count(1)
writer.add_feed_forward_length(64)
writer.add_head_count(4)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(8)
writer.add_vocab_size(8)
writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
writer.add_rope_scaling_factor(4.0)
writer.add_rope_scaling_orig_ctx_len(1024)
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

fields = gguf.GGUFReader("long.gguf").fields
written = {key: field.contents() for key, field in fields.items() if "rope.scaling" in key}
model = AutoModelForCausalLM.from_pretrained(".", gguf_file="long.gguf")
loaded = model.config.rope_parameters
frequency = float(model.model.rotary_emb.inv_freq[0])
print("in the file:", written)
print("as loaded:", loaded, "first frequency:", frequency, "(0.25 if it were scaled)")
assert written["llama.rope.scaling.type"] == "linear" and written["llama.rope.scaling.factor"] == 4
assert loaded["rope_type"] == "default" and frequency == 1, "the behaviour has changed"
PYTHON
