"""What the files in a model's folder hold, read without loading the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor

ADAPTER = "adapter_config.json"


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, {} if it is no JSON object: transformers says what is wrong."""
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at this path, or the first in a folder without a config.json; else None."""
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf"))
    return files[0] if files and not (path / "config.json").exists() else None


def base_of_adapter(path: Path) -> str | None:
    """The base model that an adapter's folder names."""
    name = read_config(path / ADAPTER).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def weights(file: Path) -> dict[str, Tensor]:
    """The weights in a file by name, whose numbers are read from the disk once they are used."""
    if file.suffix == ".safetensors":
        return load_file(file)
    lazily = is_zipfile(file)  # older files are no archives, and are read whole
    held = torch.load(file, map_location="cpu", weights_only=True, mmap=lazily)
    return {key: x for key, x in held.items() if isinstance(x, Tensor)}


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights in a folder, by name: of its .safetensors files, or else of its .bin files."""
    for file in [*folder.glob("model*.safetensors")] or folder.glob("pytorch_model*.bin"):
        yield from weights(file).items()


def has_file(folder: Path, patterns: Iterable[str]) -> bool:
    """Whether a folder has a file whose name is of one of these patterns."""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def is_index(file: Path) -> bool:
    """Whether a file says in which shard each weight is."""
    index = read_config(file)
    return "metadata" in index and bool(index.get("weight_map"))


def first_difference(single: Path, index: Path) -> str | None:
    """A weight in which a file and the shards of an index differ, or None."""
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or set(places.values()) <= {single.name}:
        return None
    one = weights(single)
    if one.keys() != places.keys():
        return str(min(one.keys() ^ places.keys()))
    for file in sorted(set(places.values())):
        try:
            other = weights(single.with_name(str(file)))
        except Exception:  # of any kind
            return f"{file} is not there, or damaged"
        for key in (key for key, place in places.items() if place == file):
            if key not in other or not torch.equal(one[key], other[key]):
                return str(key)
    return None


def whole_numbers(folder: Path) -> str | None:
    """A matrix of integers among the weights in a folder, with its type, or None."""
    for key, x in weights_in(folder):
        integers = not (x.is_floating_point() or x.is_complex())
        if key.endswith(".weight") and x.ndim > 1 and integers:
            return f"{key}: {x.dtype}"
    return None
