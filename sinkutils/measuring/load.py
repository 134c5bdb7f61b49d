"""The language models of Table 8 and newer ones by name, and loading of any of them."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkutils.checks import choice, short
from sinkutils.checks import device as find_device
from sinkutils.measuring.measure import token_ids
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, installed
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER, read_csv
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import CorruptRecord, read_record, short_name
from sinkutils.study.store import Folder, Runs

DTYPES = ("float32", "bfloat16", "float16", "float64")
NUMBER = re.compile(r"\d+\.")  # of a block, in the name of a weight
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken")


def load_lm(
    name_or_path: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    runs: Folder = None,
) -> tuple[nn.Module, Any]:
    """Load a causal LM and its tokenizer, in eval mode.

    name_or_path: a name of data/paper/models.csv, a hub id, a local folder, a
        GGUF file (with the package gguf), recorded run that kept its weights ("laptop/fixed_1/0",
        or the folder of any record), or a model of `python -m sinkutils models` ("smollm2").
    device: None is CUDA where there is one; "auto" spreads a model over devices by accelerate.
    dtype: one of DTYPES; None is float32 on the CPU and the checkpoint's own elsewhere.
    revision: of a hub id, for instance "step1000" of Pythia.
    trust_remote_code: run code from the hub; off unless asked for.
    runs: the folder of the records, if it is another one.

    Weights are read from safetensors where a model has them; else from its .bin files, as
    tensors only, which is what transformers allows. Raises ModelUnavailable (an OSError)
    with one line that says what to do, ValueError for another device or dtype.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"name_or_path must be a name or a path, got {short(name_or_path)}")
    name, path = str(name_or_path), Path(name_or_path)
    kind: Any = dtype
    if dtype is not None:
        asked = str(dtype).removeprefix("torch.")
        choice("dtype", asked, DTYPES)
        kind = getattr(torch, asked)
    target = None if device == "auto" else find_device(device)
    recorded = Runs(runs).named(name)
    here = name != "" and path.exists()
    real = not here and name.lower() in REAL_MODELS
    if revision is not None and (recorded or here or real):
        raise ValueError(f"revision is of a hub id, and {name!r} has one state only: leave it out")
    if recorded is not None:
        return _load_record(recorded, find_device(target), kind)
    if here:
        check_folder(path)
        where = name
    elif real:
        where = str(installed(name.lower()))
    else:
        if not name or name.startswith((".", "/", "~")):
            raise ModelUnavailable(f"there is no folder {name!r}")
        if name.count("/") == 2 or name.partition("/")[0] in PRESETS:
            raise ModelUnavailable(
                f"no recorded run {name!r}: give preset/experiment/seed of one, `python -m sinkutils train` it, or "
                "give a hub id"
            )
        table = {row["name"].lower(): row["hub_id"] for row in read_csv(PAPER / "models.csv")}
        where = table.get(name.lower(), name)
    model, tokenizer = _load_transformers(where, target, kind, revision, trust_remote_code)
    if real:
        # Reports show it; no folder of the cache
        model.name_or_path = model.config.name_or_path = name.lower()
    return model, tokenizer


def _load_record(
    folder: Path, device: torch.device, dtype: torch.dtype | None
) -> tuple[TransformerLM, Any]:
    try:
        record = read_record(folder)
        if record.weights is None:
            preset, name, seed = (record.config[key] for key in ("preset", "experiment", "seed"))
            raise ModelUnavailable(
                f"the record {short_name(folder)} was written without weights: "
                f"python -m sinkutils train {name} --preset {preset} --seed {seed} --keep-weights"
            )
        return record.load_model().to(device, dtype or torch.float32), record.tokenizer
    except CorruptRecord as error:
        raise ModelUnavailable(str(error)) from error


def _load_transformers(
    name: str,
    target: torch.device | None,
    dtype: torch.dtype | None,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """From a hub id or a folder. target: None leaves the devices to accelerate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = Path(name).exists()
    offline = not local and not hub_reachable()
    common: dict = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": offline,
        "revision": revision or "main",
    }
    where: Any = name
    if gguf := gguf_file(Path(name)):
        # transformers takes the folder and the file's name, and computes in full precision
        where, common["gguf_file"] = gguf.parent, gguf.name
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            dtype=dtype or (torch.float32 if find_device(target).type == "cpu" else "auto"),
            device_map="auto" if target is None else None,
            **common,
        )
        model, info = loaded
        tokenizer: Any = WithoutTokenizer(model)
        files = [file for pattern in TOKENIZER_FILES for file in Path(name).glob(pattern)]
        if not local or gguf or files:
            tokenizer = AutoTokenizer.from_pretrained(where, **common)
    except Exception as error:  # files of others fail in every way: shapes, JSON, a missing package
        raise ModelUnavailable(_why(name, offline, error)) from error
    check_loaded(name, model, info)
    if target:
        model.to(target)
    return model.eval(), tokenizer


def check_folder(path: Path) -> None:
    """Raise ModelUnavailable for a path that is not the folder of a model, saying which is."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelUnavailable(f"{str(path)!r} is a file: give the folder that holds it")
        return
    for file in sorted(path.iterdir()):
        if file.is_file() and file.stat().st_size < 1024:
            if file.read_bytes().startswith(b"version https://git-lfs"):
                raise ModelUnavailable(
                    f"{str(path)!r} has git-lfs pointers in place of files ({file.name}): "
                    "run `git lfs pull` in it"
                )
    known = ("config.json", "adapter_config.json", "*.gguf")
    if any(file for pattern in known for file in path.glob(pattern)):
        return
    inner = [file.parent for file in path.glob("*/config.json")]
    if inner:
        newest = max(inner, key=lambda folder: folder.stat().st_mtime)
        raise ModelUnavailable(
            f"{str(path)!r} holds no model itself, but {len(inner)} folders of models: "
            f"give one of them, {str(newest)!r} for instance"
        )
    raise ModelUnavailable(f"{str(path)!r} has no config.json: is it the folder of a model?")


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or the one in a folder without a config.json."""
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or (path / "config.json").exists():
        return None
    if len(files) > 1:
        raise ModelUnavailable(
            f"{str(path)!r} holds {len(files)} GGUF files: give one of them, {str(files[0])!r}"
        )
    return files[0]


def check_loaded(name: str, model: Any, info: dict) -> None:
    """Raise ModelUnavailable for weights that are not those of the configuration.

    Unused ones of another head, or of layers that predict further tokens (MTP), are a warning.
    """
    for key, in_file, in_model in sorted(info.get("mismatched_keys", ())):
        raise ModelUnavailable(
            f"the weights of {name!r} are not those of its config.json: {key} is "
            f"{tuple(in_file)} in the file and {tuple(in_model)} by config.json (and "
            f"{len(info['mismatched_keys']) - 1} more): was the vocabulary resized without saving?"
        )
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    message = (
        f"the weights of {name!r} are not those of its config.json: "
        f"without {len(missing)} {missing[:1]}, with {len(unused)} unused {unused[:1]}"
    )
    lists = {NUMBER.split(key)[0] for key in model.state_dict()}  # of blocks, as "model.layers."
    config = model.config.get_text_config()
    last = getattr(config, "num_hidden_layers", 0) - 1
    further = getattr(config, "num_nextn_predict_layers", 0) or 0
    for key in unused:
        number = NUMBER.search(key)
        if NUMBER.split(key)[0] in lists and number:  # a block's, that would be left out
            if not last < int(number[0][:-1]) <= last + further:
                missing.append(key)
    if missing:  # they would be random
        raise ModelUnavailable(f"{message}; rename them in the file, or mend config.json")
    if unused:
        warnings.warn(message, stacklevel=4)


class WithoutTokenizer:
    """In place of the tokenizer of a folder that has none:
    enough for probes of random and of repeated ids.
    """

    bos_token_id = None

    def __init__(self, model: Any) -> None:
        if isinstance(model, TransformerLM):
            size = model.config.vocab_size
        else:
            size = len(model.get_input_embeddings().weight)
        self.vocabulary = {f"<{i}>": i for i in range(size)}
        special = [token_ids(model, f"{role}_token_id") for role in ("bos", "eos", "pad")]
        self.all_special_ids = set().union(*special)

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise ValueError(
            "this folder has no tokenizer files, so only random and repeated ids can be made of it"
        )

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(f"<{int(i)}>" for i in ids)


def hub_reachable() -> bool:
    """Whether the hub answers; asked once, because its library would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of httpx or requests, whichever the library uses
        return False
    return True


def _why(name: str, offline: bool, error: Exception) -> str:
    """One line on why a model did not load: transformers' own,
    but where that says nothing or too much.
    """
    said, path = " ".join(str(error).split()), Path(name)
    if gguf_file(path) and not importlib.util.find_spec("gguf"):
        return f"{name!r} is a GGUF file: pip install gguf"
    if (path / "adapter_config.json").exists() and importlib.util.find_spec("peft") is None:
        return f"{name!r} holds an adapter of another model: pip install peft"
    if re.search("Unsupported (global|class)", said):
        return (
            f"{name!r} has weights in a .bin file that holds more than tensors, which could run any "
            "code: not loaded"
        )
    if "weights_only" in said or isinstance(error, pickle.UnpicklingError | EOFError):
        return (
            f"{name!r} has a .bin file that torch.save did not write, or a cut one: fetch it again"
        )
    if "deserializing header" in said:
        return f"{name!r} could not be loaded: {said[:200]} (is its .safetensors file cut?)"
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", said):
        return f"{name!r} is no causal language model: transformers has none for {found[1]}"
    if offline:
        return f"{name!r} is not in the local cache and the hub cannot be reached: connect, or give a local folder"
    return f"{name!r} could not be loaded: {said[:300] or type(error).__name__}"
