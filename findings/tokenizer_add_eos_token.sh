#!/usr/bin/env bash
# A tokenizer that puts a BOS in front of every text is loaded with add_eos_token=True.
# Expected: an EOS is added behind the text, and the BOS in front stays.
# Seen: the BOS is gone. Before that, add_bos_token reads False although a BOS is added.
# transformers 5.23.0 and tokenizers 0.23.3 (TokenizersBackend builds the template anew from its two
# options as soon as one of them is given; source: transformers/tokenization_utils_tokenizers.py).
# It matters for sinks: a model trained with a BOS is then measured without one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder/tokenizer" <<'PYTHON'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PreTrainedTokenizerFast(tokenizer_object=raw, **roles).save_pretrained(sys.argv[1])

plain = AutoTokenizer.from_pretrained(sys.argv[1])
with_eos = AutoTokenizer.from_pretrained(sys.argv[1], add_eos_token=True)
print("as saved:          ", plain("a b")["input_ids"], "add_bos_token:", plain.add_bos_token)
print("add_eos_token=True:", with_eos("a b")["input_ids"])
same = plain("a b")["input_ids"] == [1, 3, 4] and not plain.add_bos_token
sys.exit(0 if same and with_eos("a b")["input_ids"] == [3, 4, 2] else 1)
PYTHON
