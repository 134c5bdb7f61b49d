"""Loading language models, by a name (of Table 8 or newer), a hub id or a path."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from sinkutils.checks import Refused, choice
from sinkutils.checks import device as find_device
from sinkutils.measuring.measure import token_ids
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, model_folder
from sinkutils.measuring.weights import (
    NEWER,
    base_of_adapter,
    broken_gguf,
    check_loaded,
    check_path,
    gguf_file,
    other_names,
)
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER, read_csv

DTYPES = ("float32", "bfloat16", "float16", "float64")
ONE_STATE = "revision is of a hub id, and {0!r} has one state only: leave it out"
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken")
TEKKEN = "tekken.json"  # the tokenizer of Mistral's own format


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
        raise Refused(ONE_STATE.format(name))
    if here:
        check_path(path)
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
    from transformers import AutoTokenizer

    try:
        from transformers.utils.logging import set_tqdm_hook
    except ImportError:  # transformers 4
        from sinkutils.measuring.older import set_tqdm_hook

    # We ask once whether the hub answers. Offline, its library would retry each file for half a
    # minute.
    path = Path(name)
    local = path.exists()
    complete = local and Path(base_of_adapter(path) or name).exists()
    offline = not complete and not hub_reachable()
    common: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": offline,
        "revision": revision or "main",
    }
    where: Any = name
    gguf = gguf_file(path)
    if gguf:  # transformers wants the folder and the file's name, and dequantises the weights
        where = gguf.parent
        common["gguf_file"] = gguf.name
    if dtype is None:
        dtype = torch.float32 if find_device(target).type == "cpu" else "auto"
    bars = set_tqdm_hook(_plain_bar)
    try:
        options: dict[str, Any] = {
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # `check_loaded` below names and refuses them
            "dtype": dtype,
            "device_map": "auto" if target is None else None,
        }
        model, info = _from_pretrained(where, **options, **common)
        names = other_names(model, info)
        if names:
            model, info = _from_pretrained(where, key_mapping=names, **options, **common)
        tokenizer: Any = WithoutTokenizer(model, (path / TEKKEN).is_file())
        if not local or gguf or _has_tokenizer(path):
            tokenizer = AutoTokenizer.from_pretrained(where, **common)
    except Exception as error:  # anything: wrong shapes, broken JSON, a missing package, ..
        raise ModelUnavailable(_why(name, offline, error)) from error
    finally:
        set_tqdm_hook(bars)
    check_loaded(name, model, info)
    if target:
        model.to(target)
    return model.eval(), tokenizer


def _from_pretrained(where: Any, **options: Any) -> Any:
    """A causal LM, or a model of pictures and text, with its loading info."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        return AutoModelForCausalLM.from_pretrained(where, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        try:
            return AutoModelForImageTextToText.from_pretrained(where, **options)
        except ValueError as other:
            if "Unrecognized configuration class" not in str(other):
                raise
        raise


def _plain_bar(bar: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A progress bar made of text, and none where stderr is no terminal but a file or a notebook."""
    kind = tqdm if issubclass(bar, tqdm) else bar
    return kind(*args, **{"disable": None, **kwargs})


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer that can be read here."""
    patterns = list(TOKENIZER_FILES)
    if importlib.util.find_spec("mistral_common"):
        patterns.append(TEKKEN)
    return any(any(folder.glob(pattern)) for pattern in patterns)


class WithoutTokenizer:
    """Stands in for a missing tokenizer. It is enough for the random and the repeated probe."""

    bos_token_id = None

    def __init__(self, model: Any, tekken: bool = False) -> None:
        self.why = "this folder has no tokenizer files"
        if tekken:
            self.why = f"the tokenizer of this folder, {TEKKEN}, needs: pip install mistral-common"
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
        raise Refused(f"{self.why}; without it, only random and repeated ids can be made")

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
    if isinstance(error, KeyError):  # such as an activation, or a part of the tokenizer
        message = f"transformers looked up {message} and found nothing of that name"
    path = Path(name)
    find_spec = importlib.util.find_spec  # returns None if a package is not installed
    if gguf_file(path):
        if find_spec("gguf") is None:
            return f"{name!r} is a GGUF file: pip install gguf"
        if broken_gguf(error):
            return f"{name!r} could not be loaded: the GGUF file is cut or broken: {message[:200]}"
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
        base = base_of_adapter(path)
        wanted = f"{base!r}, the base model of the adapter {name!r}," if base else repr(name)
        return (
            f"{wanted} is not in the local cache and the hub cannot be reached: "
            "connect, or give a local folder"
        )
    return f"{name!r} could not be loaded: {message[:300]}"
