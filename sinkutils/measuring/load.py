"""Loading language models, by a name (of Table 8 or newer), a hub id or a path."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from sinkutils.checks import choice
from sinkutils.checks import device as find_device
from sinkutils.measuring.measure import token_ids
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, model_folder
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER, read_csv

DTYPES = ("float32", "bfloat16", "float16", "float64")
ONE_STATE = "revision is of a hub id, and {0!r} has one state only: leave it out"
# The beginning of a weight's name: "model.layers.3." -> "model.layers.", "3".
BLOCK = re.compile(r"(.*?)(\d+)\.")
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken")
# For example, transformers 4 does not find the rotary base where version 5 writes it, and would
# silently use its own default.
NEWER = "was saved by a later transformers, whose files this one reads wrongly: update transformers"


def load_lm(
    name_or_path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """Load a causal LM and its tokenizer, as `names.load_lm`, which also knows records."""
    name = str(name_or_path)
    path = Path(name_or_path)
    kind = find_dtype(dtype)
    target = None if device == "auto" else find_device(device)
    # The name is one of three: a local path, a model from pip, or a model on the hub.
    here = name != "" and path.exists()
    lowered = name.lower()  # REAL_MODELS has lower-case names
    real = not here and lowered in REAL_MODELS
    if revision is not None and (here or real):
        raise ValueError(ONE_STATE.format(name))
    if here:
        check_folder(path)
        where = name
    elif real:
        where = str(model_folder(lowered))
    else:
        where = _hub_id(name)
    model, tokenizer = _load_transformers(where, target, kind, revision, trust_remote_code)
    if real:  # reports shall show this name, not the path of a cache folder
        model.name_or_path = model.config.name_or_path = lowered
    return model, tokenizer


def find_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of this name. Raises ValueError unless it is None or one of DTYPES."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    choice("dtype", name, DTYPES)
    found: torch.dtype = getattr(torch, name)
    return found


def _hub_id(name: str) -> str:
    """The hub id of a model of Table 8. Any other name is taken for a hub id already.

    Raises ModelUnavailable for a name that looks like a path.
    """
    if name.lower().endswith((".gguf", ".safetensors", ".bin")):
        raise ModelUnavailable(f"there is no file {name!r}")
    if not name or name.startswith((".", "/", "~")):
        raise ModelUnavailable(f"there is no folder {name!r}")
    for row in read_csv(PAPER / "models.csv"):
        if row["name"].lower() == name.lower():
            return row["hub_id"]
    return name


def _load_transformers(
    name: str,
    target: torch.device | None,
    dtype: Any,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer by transformers, from a hub id or a folder.

    target: the device; None lets accelerate choose the devices.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers.utils.logging import set_tqdm_hook
    except ImportError:  # transformers 4
        from sinkutils.measuring.older import set_tqdm_hook

    # We ask once whether the hub answers. Offline, its library would retry each file for half a
    # minute.
    local = Path(name).exists()
    offline = not local and not hub_reachable()
    common: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": offline,
        "revision": revision or "main",
    }
    where: Any = name
    gguf = gguf_file(Path(name))
    if gguf:  # transformers wants the folder and the file's name, and dequantises the weights
        where = gguf.parent
        common["gguf_file"] = gguf.name
    if dtype is None:
        dtype = torch.float32 if find_device(target).type == "cpu" else "auto"
    bars = set_tqdm_hook(_plain_bar)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` below names and refuses them
            dtype=dtype,
            device_map="auto" if target is None else None,
            **common,
        )
        model, info = loaded
        tokenizer: Any = WithoutTokenizer(model)
        if not local or gguf or _holds(Path(name), TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(where, **common)
    except Exception as error:  # anything: wrong shapes, broken JSON, a missing package, ..
        raise ModelUnavailable(_why(name, offline, error)) from error
    finally:
        set_tqdm_hook(bars)
    check_loaded(name, model, info)
    if target:
        model.to(target)
    return model.eval(), tokenizer


def _plain_bar(bar: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A progress bar made of text. Widgets are lost in a saved notebook ("model not found")."""
    kind = tqdm if issubclass(bar, tqdm) else bar
    return kind(*args, **kwargs)


def _holds(folder: Path, patterns: Sequence[str]) -> bool:
    """Whether a folder has a file that matches one of the patterns."""
    for pattern in patterns:
        if any(folder.glob(pattern)):
            return True
    return False


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at this path, or the only one in a folder without a config.json; else None.

    Raises ModelUnavailable for a folder that has several.
    """
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


def check_folder(path: Path) -> None:
    """Raise ModelUnavailable if a path is not the folder of a model, with advice which one is."""
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
    if _holds(path, ("config.json", "adapter_config.json", "*.gguf")):
        return
    advice = "is it the folder of a model?"
    for config in path.glob("*/config.json"):  # perhaps a training's folder of checkpoints
        advice = f"give a folder in it, {str(config.parent)!r} for instance"
    raise ModelUnavailable(f"{str(path)!r} has no config.json: {advice}")


def check_loaded(name: str, model: Any, info: dict[str, Any]) -> None:
    """Raise ModelUnavailable if a file's weights do not fit the model, or its version is too new.

    transformers itself only logs a line: it fills missing weights with random numbers, and drops
    unknown ones. A sink measured on such a model would mean nothing. Unused weights are a mere
    warning if they belong to another head, or to layers that predict further tokens (MTP).
    info: the loading info of `from_pretrained`.
    """
    # Compare the major versions: 5 of 5.17.0.
    installed, *_ = version("transformers").split(".")
    saved = re.match(r"\d+", str(getattr(model.config, "transformers_version", "")))
    if saved and int(saved[0]) > int(installed):
        raise ModelUnavailable(f"{name!r} {NEWER}")
    message = f"the weights of {name!r} are not those of its config.json: "
    mismatched = sorted(info.get("mismatched_keys", ()))
    if mismatched:
        first = mismatched[0]
        if isinstance(first, tuple):  # transformers 4 gives the name alone
            key, in_file, in_model = first
            first = f"{key} is {tuple(in_file)} in the file and {tuple(in_model)} by config.json"
        more = len(mismatched) - 1
        raise ModelUnavailable(
            f"{message}{first} (and {more} more): was the vocabulary resized without saving?"
        )
    missing = sorted(info["missing_keys"])
    unused = sorted(info["unexpected_keys"])
    # The number of such weights, and the name of one
    message += f"without {len(missing)} {missing[:1]}, "
    message += f"with {len(unused)} unused {unused[:1]}"
    if missing or _leaves_out_a_block(model, unused):  # missing weights would be random
        raise ModelUnavailable(f"{message}; rename them in the file, or mend config.json")
    if unused:
        warnings.warn(message, stacklevel=4)


def _leaves_out_a_block(model: Any, unused: Sequence[str]) -> bool:
    """Whether unused weights belong to a block that the model should have.

    MTP layers do not count. Their weights are numbered as blocks behind the last one.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", 0)
    predicting = getattr(config, "num_nextn_predict_layers", 0) or 0  # number of MTP layers
    further = range(count, count + predicting)
    used = set()  # the names of the lists of blocks in the model, such as "model.layers."
    for key in model.state_dict():
        match = BLOCK.match(key)
        if match:
            used.add(match[1])
    for key in unused:
        match = BLOCK.match(key)
        if match and match[1] in used and int(match[2]) not in further:
            return True
    return False


class WithoutTokenizer:
    """Stands in for a missing tokenizer. It is enough for the random and the repeated probe."""

    bos_token_id = None

    def __init__(self, model: Any) -> None:
        if isinstance(model, TransformerLM):
            size = model.config.vocab_size
        else:
            size = len(model.get_input_embeddings().weight)
        self.vocabulary = {f"<{i}>": i for i in range(size)}
        self.all_special_ids: set[int] = set()
        for role in ("bos", "eos", "pad"):
            self.all_special_ids |= token_ids(model, f"{role}_token_id")

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise ValueError(
            "this folder has no tokenizer files, so only random and repeated ids can be made of it"
        )

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(f"<{int(i)}>" for i in ids)


def hub_reachable() -> bool:
    """Whether the hub answers within five seconds."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of httpx or of requests: it depends on the version of huggingface_hub
        return False
    return True


def _why(name: str, offline: bool, error: Exception) -> str:
    """Why a model did not load, in one line: transformers' own message, unless it misleads."""
    message = " ".join(str(error).split()) or type(error).__name__
    path = Path(name)
    find_spec = importlib.util.find_spec  # returns None if a package is not installed
    if gguf_file(path) and find_spec("gguf") is None:
        return f"{name!r} is a GGUF file: pip install gguf"
    adapter = path / "adapter_config.json"
    if adapter.exists() and find_spec("peft") is None:
        return f"{name!r} holds an adapter of another model: pip install peft"
    # PyTorch's own advice, to load without weights_only, would run any code that the file holds.
    cut = "pytorch checkpoint file" in message  # the message of transformers 4 for a cut file
    if cut or "weights_only" in message or isinstance(error, pickle.UnpicklingError | EOFError):
        return (
            f"{name!r} has a .bin file that is cut, or holds more than tensors, which could run "
            "any code: not loaded"
        )
    if "deserializing header" in message:
        return (
            f"{name!r} could not be loaded: its .safetensors file is cut or is something else: "
            f"{message[:200]}"
        )
    if "TokenizersBackend" in message:
        return f"{name!r} {NEWER}"
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", message):
        return f"{name!r} is no causal language model: transformers has none for {found[1]}"
    if offline:
        return (
            f"{name!r} is not in the local cache and the hub cannot be reached: "
            "connect, or give a local folder"
        )
    return f"{name!r} could not be loaded: {message[:300]}"
