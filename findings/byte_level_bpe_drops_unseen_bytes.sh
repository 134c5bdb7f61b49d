#!/usr/bin/env bash
# Expected: byte-level BPE can write any text, because each of the 256 bytes is a token.
# What happens: BpeTrainer makes tokens only of the bytes that it met in training, unless it gets
# initial_alphabet=ByteLevel.alphabet(). A byte that it did not meet is dropped from a later text,
# with no unknown token and no error. A tokenizer that was trained on prose drops the braces and the
# figures of code, so the text that is measured is another one, and shorter.
# tokenizers 0.23.3. Source: the documentation of tokenizers.trainers.BpeTrainer (initial_alphabet)
# and of tokenizers.models.BPE (unk_token, None by default).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

prose = ["the cat sat on the mat and the dog ran to the river"] * 50
code = "for cat in {7}: the(cat)"


def trained(**options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, **options)
    tokenizer.train_from_iterator(prose, trainer)
    return tokenizer.decode(tokenizer.encode(code).ids)


default = trained()
whole = trained(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
print("the text:             ", code)
print("encoded and decoded:  ", default)
print("with initial_alphabet:", whole)
assert whole == code and not set("{7}:()f") & set(default), "the behaviour has changed"
PYTHON
