#!/usr/bin/env bash
# Expected: a hook on a linear layer of a causal LM's FFN sees (batch, tokens, neurons), as in
# LLaMA, so that x[:, 0] are the neurons at the first token of each text.
# What happens: OPT puts all tokens of a batch into one axis before its FFN and gives fc2
# (batch * tokens, neurons). x[:, 0] is then neuron 0 at all tokens. A hook that is meant to silence
# the first token's neurons silences one neuron everywhere instead, and nothing is raised.
# transformers 5.23.0, torch 2.13.0. Source: transformers/models/opt/modeling_opt.py,
# OPTDecoderLayer.forward ("hidden_states.reshape(-1, hidden_states.size(-1))").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
llama = LlamaForCausalLM(LlamaConfig(intermediate_size=48, **sizes)).eval()
opt = OPTForCausalLM(OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **sizes)).eval()
ids = torch.randint(3, 96, (2, 12))
layers = {"llama": llama.model.layers[0].mlp.down_proj, "opt": opt.model.decoder.layers[0].fc2}
shapes, zeros = {}, {}


def silence_first_token(_, args):
    x = args[0].clone()
    x[:, 0] = 0
    return (x,)


def look(name):
    def hook(_, args):
        x = args[0].reshape(2, 12, 48)
        shapes[name] = tuple(args[0].shape)
        # at the first tokens, and of neuron 0
        zeros[name] = bool((x[:, 0] == 0).all()), bool((x[..., 0] == 0).all())

    return hook


for name, model in (("llama", llama), ("opt", opt)):
    layers[name].register_forward_pre_hook(silence_first_token)
    layers[name].register_forward_pre_hook(look(name))
    with torch.no_grad():
        model(ids)
print("what the layer is given:", shapes)
print("silent: (the first tokens, neuron 0):", zeros)
assert shapes == {"llama": (2, 12, 48), "opt": (24, 48)}, "the behaviour has changed"
assert zeros == {"llama": (True, False), "opt": (False, True)}, "the behaviour has changed"
PYTHON
