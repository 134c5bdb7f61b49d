#!/usr/bin/env bash
# Expected: a SentencePiece model with byte_fallback=True can write any text, line breaks included.
# What happens: with the default normalisation (nmt_nfkc) and remove_extra_whitespaces, a line break
# is a space before it comes to the pieces, and spaces in a row are one. So a model that is trained
# on such tokens never sees a line break or an indent, although bytes for both are in the
# vocabulary. (normalization_rule_name="identity" and remove_extra_whitespaces=False keep them, as
# in Llama's.)
# sentencepiece 0.2.3. Source: doc/normalization.md and doc/options.md of google/sentencepiece.
# It matters for sinks: line breaks are where small models rest when they have no first token to
# rest on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q sentencepiece==0.2.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

import sentencepiece

lines = ["def f(x):", "    return x + 1", "", "print(f(2))"] * 200
code = "def f(x):\n    return x + 1\n"


def there_and_back(**options):
    model = io.BytesIO()
    options |= {"vocab_size": 320, "byte_fallback": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **options
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return pieces.decode(pieces.encode(code)), pieces.piece_to_id("<0x0A>")


default, line_break = there_and_back()
kept, _ = there_and_back(normalization_rule_name="identity", remove_extra_whitespaces=False)
print("the text:         ", repr(code))
print("there and back:   ", repr(default), "and the line break's own token is", line_break)
print("with both options:", repr(kept))
assert line_break > 0 and kept == code
assert default == "def f(x): return x + 1", "the behaviour has changed"
PYTHON
