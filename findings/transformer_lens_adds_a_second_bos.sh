#!/usr/bin/env bash
# Expected: TransformerLens reads a text with the model's own tokenizer. If that puts no BOS in
# front (SmolLM2's, Qwen's), there is none, and a text that begins with its BOS, as a chat template
# writes it, has one.
# What happens: boot_transformers sets the tokenizer to add a BOS, whatever the model was trained
# with. So plain text gets one, and a text of a chat template has two. (prepend_bos=False is for
# each call, and for the configuration default_prepend_bos.)
# transformer-lens 4.3.0, transformers 5.23.0, torch 2.13.0. Source: the documentation of
# prepend_bos and default_prepend_bos; transformer_lens/model_bridge.
# It matters for sinks: a BOS in front moves Sink_1 of SmolLM2-135M from 73 to 67 % and of
# Qwen2.5-Coder-0.5B from 55 to 1 %.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 transformer-lens==4.3.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PreTrainedTokenizerFast(tokenizer_object=raw, **roles).save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=5, num_attention_heads=4, num_key_value_heads=2, **sizes)
LlamaForCausalLM(config).save_pretrained("model")

own = AutoTokenizer.from_pretrained("model")
bridge = TransformerBridge.boot_transformers("model", device="cpu")
seen = {}
for text in ("a b", "<s>a b"):
    seen[text] = own(text)["input_ids"], bridge.to_tokens(text)[0].tolist()
    print(f"{text!r}: by its own tokenizer {seen[text][0]}, by TransformerLens {seen[text][1]}")
expected = {"a b": ([3, 4], [1, 3, 4]), "<s>a b": ([1, 3, 4], [1, 1, 3, 4])}
assert seen == expected, "the behaviour has changed"
PYTHON
