"""Make the weights and maps that the lab holds, and put its page together with them.

- Weights, of the checkpoints in data/lab/<experiment>/<step>.safetensors (24 MB in float16, not in Git):
  `laptop`, seed 0, trained on a GPU by `studies/card.py PLAN` with a line for each of MODELS, such as
  "laptop fixed_1 0 snapshots=0,200,500,1000,2000,4000,8000,12000". Its lab-<n>.tar holds them. Without
  them the page keeps its weights.
- Maps, norms and next tokens of the real models for the sentences in texts.yaml: `make models` installs the two.
- The text that a model reads which grows in the page: the docstrings of this package, as they are now.
- The first map, which the page shows while it is still being read: Node makes it by the page's own script.
"""

from __future__ import annotations

import json
import subprocess
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from make_lab import PAGE, data_of, write_page
from safetensors.numpy import load_file

import sinkutils as su
from sinkutils.paths import read_yaml
from sinkutils.plots.interactive import PALETTE
from sinkutils.plots.lab import SOURCES, deflated, in_letters, own_text, record
from sinkutils.study.config import RunConfig
from sinkutils.study.task import fix_position

CHECKPOINTS = PAGE.parents[2] / "data" / "lab"
MODELS = ("fixed_1", "k_bias", "sigmoid", "default", "learnable_random_1_unscored")
REAL = ("smollm2", "gemma-3-270m")
# How far apart the levels of a weight are, in standard deviations of its tensor; the first name that
# fits. Finest where alpha_1 hangs on it: queries, keys, and the FFN that writes the large element.
LEVELS = {
    "unembed": 0.30,
    "blocks.0.ffn.down": 0.09,
    "qkv": 0.145,
    "embed": 0.28,
    "ffn": 0.37,
    "out": 0.50,
    "": 0,  # the others are small: as fine as eight bits allow
}
FINER = {"0": 0.5, "200": 0.7, "12000": 1.7}  # by step: the first tell little, the last most


def packed(parts: list[bytes]) -> str:
    """Deflated, each part with a code of its own, in letters."""
    # Only runs of one byte are named: what else repeats among random numbers does so by chance.
    deflate = zlib.compressobj(9, strategy=zlib.Z_RLE)
    content = b"".join(deflate.compress(part) + deflate.flush(zlib.Z_BLOCK) for part in parts)
    return in_letters(content + deflate.flush())


def quantise(weights: dict, base: dict, fine: float) -> tuple[dict, dict]:
    """A set of weights as the page holds it, and as the page unpacks it.

    A tensor is a share of the same tensor of `base`, plus a scale times 8-bit integers.
    """
    scales, shares, integers, unpacked = [], [], [], {}
    for name, tensor in weights.items():
        values = tensor.astype(float)
        before = base.get(name, np.zeros_like(values)).astype(float)
        share = (values * before).sum() / max((before**2).sum(), 1e-30)
        share = float(f"{share:.4g}")
        rest = values - share * before
        level = next(level for part, level in LEVELS.items() if part in name)
        scale = max(level / fine * values.std(), np.abs(rest).max() / 126, 1e-6)
        scale = float(f"{scale:.4g}")
        rounded = np.rint(rest / scale).astype(np.int8)
        scales.append(scale)
        shares.append(share)
        integers.append(rounded.tobytes())
        unpacked[name] = (rounded * scale + share * before).astype(np.float32)
    return {"scales": scales, "shares": shares, "packed": packed(integers)}, unpacked


def small_models() -> tuple[dict, dict]:
    """Each model's configuration and its sets of weights by step; and what their rounding changes."""
    models, unpacked, changes = {}, {"": {}}, []
    for name in MODELS:
        run, sets, base = su.config(name, "laptop"), {}, ""
        files = sorted((CHECKPOINTS / name).glob("*.safetensors"), key=lambda file: int(file.stem))
        for file in files:
            weights, step = load_file(file), file.stem
            # All models begin alike; later each is most like itself at the step before.
            if name != MODELS[0] and step in ("0", "200"):
                base = f"{MODELS[0]}/{step}"
            coded, made = quantise(weights, unpacked[base], FINER.get(step, 1))
            sets[step] = {"base": base, **coded}
            base = f"{name}/{step}"
            unpacked[base] = made
            changes.append(change(run, weights, made))
            print(base, changes[-1])
        cfg = run.model
        config = {"L": cfg.num_layers, "H": cfg.num_heads, "D": cfg.head_dim}
        config |= {"F": cfg.intermediate_size, "star": cfg.attention.has_key_bias}
        config["sigmoid"] = cfg.attention.similarity == "sigmoid"
        config["learned"] = cfg.position == "learnable"
        config["fixed"] = run.data.fixed_position == 1
        tensors = [[key, *np.atleast_2d(value).shape] for key, value in weights.items()]
        models[name] = {"config": config, "tensors": tensors, "sets": sets}
    return models, {key: max(row[key] for row in changes) for key in changes[0]}


@torch.no_grad()
def change(run: RunConfig, weights: dict, unpacked: dict) -> dict:
    """By how much rounding moves a head's alpha_1 on a text, on average, and the loss of 100 texts."""
    corpus = su.load_corpus("docstrings", run.model.vocab_size)
    ids = su.probe("natural", corpus.tokenizer)
    ids = fix_position(ids, run.data.fixed_position, corpus.fix_id)
    model, alphas, losses = su.TransformerLM(run.model).eval(), [], []
    for state in (weights, unpacked):
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
        alphas.append(su.measure(model, ids, norms=False).alpha)
        losses.append(F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:]).item())
    alpha = (alphas[1] - alphas[0]).abs().mean().item()
    return {"alpha": alpha, "loss": abs(losses[1] - losses[0])}


def real_models(sentences: list[str]) -> dict:
    """What was recorded of each sentence, without and with a BOS; maps in shades of PALETTE."""
    models = {}
    for name in REAL:
        model, words = su.load_lm(name)
        texts, maps = [], []
        for sentence in sentences:
            plain = words.encode(sentence, add_special_tokens=False)
            for ids in (plain, [words.bos_token_id, *plain]):
                shown, shades, report = record(model, torch.tensor([ids]), words, len(PALETTE))
                texts.append(shown)
                maps.append(shades)
        H = report.alpha.shape[-1]
        models[name] = {"H": H, "texts": texts, "packed": packed(maps), "withBos": True}
    return models


def first_map() -> dict:
    """What the page shows first, of its own weights and by its own script."""
    texts, place = read_yaml(SOURCES / "texts.yaml"), 0
    name, head, step = MODELS[0], texts["models"][MODELS[0]]["head"] - 1, 12_000
    case = {"model": name, "step": step, "text": texts["samples"][0], "place": place}
    case["edits"] = {"hide": 0, "element": 1, "flat": 0}
    script = PAGE.parents[2] / "tests" / "end_to_end" / "lab_in_node.js"
    command = ["node", str(script), str(PAGE)]
    done = subprocess.run(
        command, input=json.dumps([case]), capture_output=True, text=True, check=True
    )
    [answer] = json.loads(done.stdout)["answers"]
    labels = answer["labels"]
    T = len(labels)
    weights = np.reshape(answer["maps"], (-1, T, T))[head]
    block, of_block = divmod(head, su.config(name, "laptop").model.num_heads)
    said = texts["said"]
    title = said["map_title"].format(
        model=texts["models"][name]["title"],
        steps=said["steps_of"].format(steps=f"{step:,}"),
        head=f"Head {of_block + 1} of block {block + 1}",
        share=f"{weights[:, place].mean():.2f}",
        token=labels[place],
    )
    rows = [[round(float(x), 3) for x in row[: i + 1]] for i, row in enumerate(weights)]
    return {"labels": labels, "weights": rows, "title": title, "query": 8}


def main() -> None:
    data = data_of(PAGE.read_text(encoding="utf-8"))
    sentences = read_yaml(SOURCES / "texts.yaml")["sentences"]
    data |= {"sentences": sentences, "real": real_models(sentences)}
    if CHECKPOINTS.exists():
        data["models"], data["rounding"] = small_models()
    data["text"] = deflated(own_text().encode())
    write_page(data)
    write_page(data | {"first": first_map()})


if __name__ == "__main__":
    main()
