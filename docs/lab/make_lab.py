"""Put the lab together, `make lab`: one page, index.html, of the sources beside it and of weights and stored maps.

data/lab/<experiment>/<step>.safetensors are checkpoints of `laptop` runs. Without them the page keeps the weights that
it has, and without new sentences the maps of the real models.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import sinkutils as su
from sinkutils.data.packing import fix_position
from sinkutils.paths import read_yaml
from sinkutils.plots.figures import token_label
from sinkutils.plots.interactive import PALETTE, shade
from sinkutils.plots.theme import COLORS
from sinkutils.study.config import RunConfig

LAB = Path(__file__).parent
PAGE, CHECKPOINTS = LAB / "index.html", LAB.parents[1] / "data" / "lab"
SOURCES = ("style.css", "model.js", "draw.js", "page.js", "stored.js", "tour.js")
MODELS = (
    "fixed_1",
    "k_bias",
    "sigmoid",
    "default",
    "learnable_random_1_unscored",
)  # in the order of the page
REAL = {"smollm2": "SmolLM2 135M", "gemma-3-270m": "Gemma 3 270M"}
SIZES = {"L": "num_layers", "H": "num_heads", "D": "head_dim", "F": "intermediate_size"}
# How far apart the levels of a weight are, in standard deviations of its matrix; the first name that fits. Finest where
# alpha_1 hangs on it: the FFN of block 1, whose one neuron writes the large element, and queries and keys.
LEVELS = {
    "unembed": 0.27,
    "blocks.0.ffn.down": 0.08,
    "qkv": 0.13,
    "embed": 0.25,
    "ffn": 0.33,
    "out": 0.45,
    "": 0,
}
FINER = {"0": 0.5, "12000": 1.7}  # by step: random weights tell little, the last ones most


def short(value: float) -> float:
    """A number of four digits."""
    return float(f"{value:.4g}")


def packed(parts: list[bytes]) -> str:
    """Deflated, as a browser's DecompressionStream takes it, each part by a code of its own; in letters of base 85.

    What repeats among random numbers does so by chance, and naming it takes more bits than Huffman's code alone.
    """
    contents = []
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY):
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        content = b"".join(deflate.compress(part) + deflate.flush(zlib.Z_BLOCK) for part in parts)
        contents.append(content + deflate.flush())
    return (
        base64.b85encode(min(contents, key=len)).decode().replace("<", ",")
    )  # "<!--" would mean something


def quantise(weights: dict, base: dict, fine: float) -> tuple[dict, dict]:
    """A set of weights as the page has it, and what the page makes of it.

    Of a tensor stands there what differs from its share of the same tensor of `base`, as a scale times 8-bit integers.
    """
    scales, shares, integers, made = [], [], [], {}
    for name, tensor in weights.items():
        values = tensor.double().numpy()
        before = base.get(name, np.zeros_like(values)).astype(float)
        share = short((values * before).sum() / max((before**2).sum(), 1e-30))
        rest = values - share * before
        level = next(level for part, level in LEVELS.items() if part in name)
        scale = short(max(level / fine * values.std(), np.abs(rest).max() / 126, 1e-6))
        rounded = np.rint(rest / scale).astype(np.int8)
        scales.append(scale)
        shares.append(share)
        integers.append(rounded.tobytes())
        made[name] = (rounded * scale + share * before).astype(np.float32)
    return {"scales": scales, "shares": shares, "packed": packed(integers)}, made


def small_models() -> tuple[dict, dict]:
    """Each model's configuration and sets of weights by step, and what their rounding changes, at the worst.

    The base of a set is the one a step before, or that of the first model at the same step: whichever makes it smaller.
    """
    models, made, changes = {}, {"": {}}, []
    for model in MODELS:
        run = su.config(model, "laptop")
        cfg, sets, last = run.model, {}, ""
        for file in sorted(
            (CHECKPOINTS / model).glob("*.safetensors"), key=lambda file: int(file.stem)
        ):
            weights = load_file(file)
            bases = {"", last, f"{MODELS[0]}/{file.stem}"} & made.keys()
            fine = FINER.get(file.stem, 1)
            coded = {base: quantise(weights, made[base], fine) for base in sorted(bases)}
            base = min(coded, key=lambda base: len(coded[base][0]["packed"]))
            last = f"{model}/{file.stem}"
            made[last] = coded[base][1]
            sets[file.stem] = {"base": base, **coded[base][0]}
            changes.append(change(run, weights, made[last]))
            print(last, base, len(sets[file.stem]["packed"]), changes[-1])
        if not sets:
            continue
        config = {letter: getattr(cfg, name) for letter, name in SIZES.items()}
        config |= {
            "sigmoid": cfg.attention.similarity == "sigmoid",
            "star": cfg.attention.has_key_bias,
        }
        config |= {"learned": cfg.position == "learnable", "fixed": run.data.fixed_position == 1}
        tensors = [[name, *np.atleast_2d(value).shape] for name, value in weights.items()]
        models[model] = {"config": config, "tensors": tensors, "sets": sets}
    return models, {name: max(row[name] for row in changes) for name in changes[0]}


def change(run: RunConfig, weights: dict, made: dict) -> dict:
    """What rounding does on 100 texts: to a head's alpha_1 on average, to its mean at most, and to the loss."""
    corpus = su.load_corpus("docstrings", run.model.vocab_size)
    ids = fix_position(
        su.probe("natural", corpus.tokenizer), run.data.fixed_position, corpus.fix_id
    )
    model, alphas, losses = su.TransformerLM(run.model).eval(), [], []
    for state in (weights, made):
        model.load_state_dict(
            {name: torch.as_tensor(value).float() for name, value in state.items()}
        )
        alphas.append(su.measure(model, ids, norms=False).alpha)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:]).item())
    moved = alphas[1] - alphas[0]
    heads = moved.mean(dim=0).abs().max()
    return {
        "alpha": short(moved.abs().mean()),
        "heads": short(heads),
        "loss": short(abs(losses[1] - losses[0])),
    }


def real_models(sentences: list[str]) -> dict:
    """Every head's map of each sentence, without and with a BOS, in the levels of PALETTE."""
    models = {}
    for name, title in REAL.items():
        model, words = su.load_lm(name)
        layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
        pairs = [(layer, head) for layer in range(layers) for head in range(heads)]
        texts, levels = [], []
        for sentence in sentences:
            plain = words.encode(sentence, add_special_tokens=False)
            for ids in (plain, [words.bos_token_id, *plain]):
                report = su.measure(model, torch.tensor([ids]), heads=pairs, norms=False)
                maps = np.stack([report.kept[pair].map[0] for pair in pairs])  # (heads, T, T)
                levels.append(shade(np.sqrt(maps))[:, *np.tril_indices(len(ids))].tobytes())
                alpha = [short(share) for share in report.alpha.flatten()]
                texts.append(
                    {"tokens": [token_label(token, words) for token in ids], "alpha": alpha}
                )
        models[name] = {"title": title, "H": heads, "texts": texts, "packed": packed(levels)}
    return models


def tokenizer() -> dict:
    """The letters of every token, by id, and the pairs that are merged, the first first."""
    model = json.loads(su.load_corpus("docstrings", 1024).tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    return {"vocabulary": vocabulary, "merges": [" ".join(pair) for pair in model["merges"]]}


def embedded(page: str) -> dict:
    """The data that a page holds."""
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def assemble(data: dict) -> str:
    """The page: words, sources and data in their places."""
    parts = {name: (LAB / name).read_text(encoding="utf-8") for name in SOURCES}
    # "</script>" in a text would end the element that holds it.
    parts |= {**read_yaml(LAB / "texts.yaml")["page"], "data": in_lines(data).replace("</", "<\\/")}
    page = (LAB / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\[\[(\S+?)\]\]", lambda found: parts[found[1]], page)


def in_lines(data: object, depth: int = 4) -> str:
    """JSON with a line for each item, down to a depth: what editors and git can bear."""
    if depth == 0 or not isinstance(data, dict):
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (
        "{"
        + ",\n".join(f'"{key}":{in_lines(value, depth - 1)}' for key, value in data.items())
        + "}"
    )


def main() -> None:
    data = embedded(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    texts = read_yaml(LAB / "texts.yaml")
    if data.get("sentences") != texts["sentences"]:
        data["real"] = real_models(texts["sentences"])
    if CHECKPOINTS.exists():
        data["models"], data["rounding"] = small_models()
    data |= {
        "words": texts["models"],
        "palette": PALETTE,
        "colors": COLORS,
        "tokenizer": tokenizer(),
    }
    data |= {name: texts[name] for name in ("samples", "sentences", "welcome", "tour")}
    PAGE.write_text(assemble(data), encoding="utf-8", newline="\n")
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
