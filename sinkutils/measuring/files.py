"""What the files in a model's folder hold, read without loading the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, {} if it is no JSON object: transformers says what is wrong."""
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def count_weights(path: Path) -> int:
    """How many weights the safetensors files in a folder hold, by their headers."""
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # it is no dict
                count += math.prod(opened.get_slice(key).get_shape())
    return count


def first_difference(single: Path, index: Path) -> str | None:
    """A weight in which a file and the shards of an index differ, or None."""
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or set(places.values()) <= {single.name}:
        return None
    with safe_open(single, "pt") as one:
        keys = set(one.keys())
        if keys != set(places):
            return str(min(keys ^ set(places)))
        for file in sorted(set(places.values())):
            shard = single.with_name(str(file))
            if not shard.is_file():
                return f"{file} is not there"
            with safe_open(shard, "pt") as other:
                for key in (key for key, place in places.items() if place == file):
                    there = key in other.keys()
                    if not there or not torch.equal(one.get_tensor(key), other.get_tensor(key)):
                        return str(key)
    return None


def whole_numbers(path: Path) -> str | None:
    """A matrix of integers among the weights in a folder, with its type, or None."""
    for file in path.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # it is no dict
                part = opened.get_slice(key)
                kind = part.get_dtype()
                if key.endswith(".weight") and len(part.get_shape()) > 1 and kind[0] in "IU":
                    return f"{key}: {kind}"
    return None
