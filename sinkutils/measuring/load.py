"""Loading language models by transformers. `names.load_lm` knows what a name stands for.

What transformers would read wrongly, or without a word, is refused with advice.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sinkutils.checks import choice
from sinkutils.checks import device as find_device
from sinkutils.measuring.files import (
    ADAPTER,
    base_of_adapter,
    first_difference,
    gguf_file,
    has_file,
    is_index,
    read_config,
    weights_in,
    whole_numbers,
)
from sinkutils.measuring.probes import WithoutTokenizer
from sinkutils.measuring.real import ModelUnavailable, hub_reachable
from sinkutils.paths import read_yaml

DTYPES = ("float32", "bfloat16", "float16", "float64")
VOCABULARY_FILES = ("tokenizer.json", "vocab*", "merges*", "*.model", "*.tiktoken", "*.gguf")
TOKENIZER_FILES = ("*token*", *VOCABULARY_FILES)
TEKKEN = "tekken.json"  # the tokenizer of Mistral's own format
# Reasons why a model does not load
PICKLED = "a .bin file that is cut, or holds more than tensors, which could run any code"
OFFLINE = "is not in the local cache and the hub cannot be reached: connect, or give a local folder"
# The beginning of a weight's name: "model.layers.3." -> "model.layers.", "3".
BLOCK = re.compile(r"(.*?)(\d+)\.")
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # of a GGUF file that was split
# For example, transformers 4 does not find the rotary base of version 5, and takes its default.
NEWER = "was saved by a later transformers, whose files this one reads wrongly: update transformers"
MADE_OF = "load the model that it was made of"
# What other files hold, what has to be done first, and which weights tell of quantisation
FOREIGN = read_yaml(Path(__file__).with_name("foreign.yaml"))
# Weights in a file that a sink does not depend on: scales of a quantised cache, and tables that a
# model computes itself.
HARMLESS = re.compile(
    r"\.(k|v|q|kv|qk|prob)_(\w+_)?scale$|_proj\.(output|k|v)_scale$|\.(rotary_emb\.)?inv_freq$"
    r"|\.attn\.(masked_)?bias$"
)


def find_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of this name. Raises ValueError unless it is None or one of DTYPES."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    choice("dtype", name, DTYPES)
    return getattr(torch, name)  # type: ignore[no-any-return]


def from_transformers(
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
    from transformers.utils import logging

    # Asked once. Offline, the hub's library would retry each file for half a minute.
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
    options: dict[str, Any] = common | {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `check_loaded` below names and refuses them
        "dtype": dtype,
        "device_map": "auto" if target is None else None,
    }
    set_hook = getattr(logging, "set_tqdm_hook", lambda _: None)  # transformers 4 has none
    bars = set_hook(_plain_bar)
    try:
        model, info = _causal_lm("from_pretrained", where, **options)
        names = other_names(model, info)
        if names:
            model, info = _causal_lm("from_pretrained", where, key_mapping=names, **options)
    except Exception as error:  # anything: wrong shapes, broken JSON, a missing package, ..
        raise ModelUnavailable(_why(name, offline, error)) from error
    finally:
        set_hook(bars)
    check_loaded(name, model, info)
    tokenizer: Any = WithoutTokenizer(model)
    tekken = (path / TEKKEN).is_file()
    read_here = has_file(path, TOKENIZER_FILES) or (tekken and find_spec("mistral_common"))
    try:
        if not local or gguf or read_here:
            tokenizer = AutoTokenizer.from_pretrained(where, **common)
        elif tekken:
            tokenizer.why = f"its tokenizer, {TEKKEN}, needs: pip install mistral-common"
    except Exception as error:
        if not local or has_file(path, VOCABULARY_FILES):
            failed = "has a tokenizer that could not be read:"
            raise ModelUnavailable(_why(name, offline, error, failed)) from error
        tokenizer.why = "this folder has settings of a tokenizer, but no vocabulary"
    if target:
        model.to(target)
    return model.eval(), tokenizer


def _causal_lm(method: str, source: Any, **options: Any) -> Any:
    """What a class method of the causal LMs returns, or of the models of pictures and text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    first: ValueError | None = None
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            return getattr(kind, method)(source, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            first = first or error
    assert first is not None
    raise first


def _plain_bar(bar: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A progress bar made of text, and none where stderr is no terminal but a file or a notebook."""
    kind = tqdm if issubclass(bar, tqdm) else bar
    return kind(*args, **{"disable": None, **kwargs})


# --- before a model is loaded


def why_not(path: Path) -> str:
    """Why a path holds no model that transformers reads, with advice; "" if it may hold one."""
    if path.is_file() and path.suffix != ".gguf":
        return "is a file: give the folder that holds it"
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        small = file.is_file() and file.stat().st_size < 1024
        if small and file.read_bytes().startswith(b"version https://git-lfs"):
            return f"has git-lfs pointers in place of files ({file.name}): run `git lfs pull` in it"
    gguf = gguf_file(path)
    if gguf:
        return _why_no_gguf(gguf, path)
    if (path / ADAPTER).is_file():
        return _why_no_adapter(path)
    if (path / "config.json").is_file():
        if not read_config(path / "config.json"):
            return "has a config.json that is no JSON object, or empty"
        return _why_unread(path) or _why_not_these(path) or _why_too_large(path)
    for config in path.glob("*/config.json"):  # perhaps a training's folder of checkpoints
        return f"has no config.json: give a folder in it, {str(config.parent)!r} for instance"
    return f"has no config.json: {_what_it_is(path) or 'is it the folder of a model?'}"


def _what_it_is(path: Path) -> str:
    for pattern, what in FOREIGN["converted"].items():
        if any(path.glob(pattern)) or any(path.glob(f"*/{pattern}")):
            return f"it holds {what}"
    return ""


def _why_no_gguf(file: Path, path: Path) -> str:
    part = PART.search(file.name)
    files = [*path.glob("*.gguf")]
    if len(files) > 1 and not part:
        return f"holds {len(files)} GGUF files: give one of them, {str(file)!r}"
    if part and int(part[1]) > 1:
        return (
            f"is one of {int(part[1])} parts of a model, and transformers reads one file: join "
            "them first (llama-gguf-split --merge)"
        )
    with file.open("rb") as opened:
        start = opened.read(24)
    whole = start.startswith(b"GGUF") and len(start) == 24
    return "" if whole else "is no GGUF file, or is cut off"


def _why_no_adapter(path: Path) -> str:
    base = base_of_adapter(path)
    if base is None:
        return f"has an {ADAPTER} that names no base model"
    is_path = base.startswith((".", "/", "~")) or base.count("/") > 1 or "\\" in base
    if is_path and not Path(base).exists():
        return f"names the base model {base!r} in {ADAPTER}, and that is not there: write it anew"
    both = [file.name for file in path.glob("model*.safetensors")]
    if both and (path / "config.json").is_file():
        warnings.warn(
            f"{str(path)!r} holds an adapter and a whole model ({min(both)}): the adapter is "
            f"loaded, on {base!r}",
            stacklevel=4,
        )
    return ""


def _why_unread(path: Path) -> str:
    """The scheme of quantisation that config.json names, if transformers does not know it."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    config = read_config(path / "config.json")
    scheme = config.get("quantization_config")
    if not isinstance(scheme, dict | None):
        return "has a config.json whose quantization_config is no JSON object"
    scheme = scheme or {}
    method = scheme.get("quant_method")
    mlx = isinstance(config.get("quantization"), dict) or {"group_size", "bits"} <= scheme.keys()
    if method is None and mlx:
        name = "MLX"
    elif (path / "hf_quant_config.json").is_file() or method == "modelopt":
        name = "ModelOpt"
    elif method is not None and method not in (*KNOWN, "bitsandbytes"):
        name = str(method)
    elif method is None and scheme and not {"load_in_8bit", "load_in_4bit"} & scheme.keys():
        name = f"a scheme without a name ({', '.join(sorted(scheme)[:3])})"
    else:
        return ""
    advice = "dequantise it (mlx_lm.convert --dequantize), or " if name == "MLX" else ""
    return f"is quantised by {name}, which this transformers does not read: {advice}{MADE_OF}"


def _why_not_these(path: Path) -> str:
    """Why it is not clear which of a folder's files of weights are meant.

    transformers takes the first that is there of model.safetensors, its index of shards,
    pytorch_model.bin and its index.
    """
    names = ("model.safetensors", "pytorch_model.bin")
    pairs = ([path / name, path / f"{name}.index.json"] for name in names)
    new, old = ([file for file in pair if file.is_file()] for pair in pairs)
    if not new and not old and (what := _what_it_is(path)):
        return f"has no model.safetensors: {what}"
    used = new or old
    if used and used[0].suffix == ".json" and not is_index(used[0]):
        return f"has a {used[0].name} that is cut, or lacks metadata or weight_map"
    other = None
    with suppress(Exception):  # of any kind: `from_pretrained` meets it as well
        other = first_difference(*used) if len(used) == 2 else None
    if other:
        single, index = (file.name for file in used)
        return (
            f"holds {single} and the shards of {index}, and they differ ({other}); transformers "
            "would load the former without a word: move away those that you do not mean"
        )
    if new and old and old[0].stat().st_mtime > new[0].stat().st_mtime + 60:
        warnings.warn(
            f"{str(path)!r} holds {new[0].name} and {old[0].name}, which is newer: the former is "
            "loaded",
            stacklevel=4,
        )
    return ""


def _why_too_large(path: Path) -> str:
    """Why config.json is of another model than the weights beside it: one of 20 times as many.

    transformers takes its defaults for sizes that config.json lacks, and builds the whole model
    before it compares shapes, which may need more memory than there is.
    """
    from transformers import AutoConfig

    # A number of a quantised file may hold several weights. A model's own code is not run here.
    if {"quantization_config", "auto_map"} & read_config(path / "config.json").keys():
        return ""
    try:
        held = sum(x.numel() for _, x in weights_in(path))
        with torch.device("meta"):  # shapes without numbers
            model = _causal_lm("from_config", AutoConfig.from_pretrained(path))
    except Exception:  # of any kind: `from_pretrained` meets it as well, and `_why` explains it
        return ""
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if not held or wanted <= 20 * held:
        return ""
    says = f"has a config.json of a model with {wanted:,} weights, and {held:,} in its files"
    return f"{says}: does config.json lack sizes? transformers then takes its defaults"


# --- after it is loaded, or not


def _why(name: str, offline: bool, error: Exception, failed: str = "could not be loaded:") -> str:
    """Why a model did not load, in one line: transformers' own message, unless it misleads."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError) and " " not in message:  # a name, such as an activation's
        message = f"transformers looked up {message} and found nothing of that name"
    path = Path(name)
    gguf = gguf_file(path)
    damaged = (struct.error, IndexError, KeyError, OverflowError, EOFError, UnicodeDecodeError)
    broken = isinstance(error, damaged)
    broken = broken or (isinstance(error, ValueError) and "support" not in message)
    # PyTorch's own advice, to load without weights_only, would run any code that the file holds.
    # transformers 4 speaks of a pytorch checkpoint file where it is cut.
    pickled = isinstance(error, pickle.UnpicklingError | EOFError)
    pickled = pickled or "weights_only" in message or "pytorch checkpoint file" in message
    kind = re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", message)
    base = base_of_adapter(path)
    is_adapter = (path / ADAPTER).exists()
    start = message[:200]
    # The reason is the first of these sentences whose condition holds.
    reasons = (
        (gguf and not find_spec("gguf"), "is a GGUF file: pip install gguf"),
        (gguf and broken, f"{failed} the GGUF file is cut or broken: {start}"),
        (
            is_adapter and not find_spec("peft"),
            "holds an adapter of another model: pip install peft",
        ),
        (pickled, f"has {PICKLED}: not loaded"),
        (
            "deserializing header" in message,
            f"{failed} its .safetensors file is cut or is something else: {start}",
        ),
        ("TokenizersBackend" in message, NEWER),
        (kind, f"is no causal language model: transformers has none for {kind and kind[1]}"),
        (offline and base, f"is an adapter of {base!r}, which {OFFLINE}"),
        (offline, OFFLINE),
        (True, f"{failed} {message[:300]}"),
    )
    reason = next(says for holds, says in reasons if holds)
    return f"{name!r} {reason}"


def check_loaded(name: str, model: Any, info: dict[str, Any]) -> None:
    """Raise ModelUnavailable if a file's weights do not fit the model, or its version is too new.

    transformers itself only logs a line: it fills missing weights with random numbers, and drops
    unknown ones. A sink measured on such a model would mean nothing. A warning is enough if no
    block depends on them: if the unembedding is missing, or weights of another head, or of layers
    that predict further tokens (MTP), are unused.
    info: the loading info of `from_pretrained`.
    """
    # Compare the major versions: 5 of 5.17.0.
    installed, *_ = version("transformers").split(".")
    saved = re.match(r"\d+", str(getattr(model.config, "transformers_version", "")))
    if saved and int(saved[0]) > int(installed):
        raise ModelUnavailable(f"{name!r} {NEWER}")
    adapter = (Path(name) / ADAPTER).is_file()
    config = ADAPTER if adapter else "config.json"
    message = f"the weights of {name!r} are not those of its {config}: "
    missing = sorted(info["missing_keys"])
    unused = sorted(key for key in info["unexpected_keys"] if not HARMLESS.search(key))
    mismatched = sorted(info.get("mismatched_keys", ()))
    for key in unused if missing or mismatched else ():
        scheme = FOREIGN["quantised"].get(key.rpartition(".")[2])
        if scheme:
            raise ModelUnavailable(
                f"the weights of {name!r} are quantised ({key}: {scheme}), which its config.json "
                f"does not say: {MADE_OF}"
            )
    if mismatched:
        raise ModelUnavailable(message + _sizes(mismatched, config, model))
    # The number of such weights, and the name of one
    message += f"without {len(missing)} {missing[:1]}, with {len(unused)} unused {unused[:1]}"
    if _in_base(model, missing) or _leaves_out_a_block(model, unused):  # missing ones are random
        advice = "rename them in the file, or mend config.json"
        if adapter:
            advice = "is the file whole, and of this base model?"
        if Path(name).suffix == ".gguf":
            advice = "is it a part of a model, or cut?"
        raise ModelUnavailable(f"{message}; {advice}")
    if missing:
        message += "; attention does not depend on them, but the logits are random"
    if missing or unused:
        warnings.warn(message, stacklevel=5)
    whole = None if getattr(model, "is_quantized", False) else whole_numbers(Path(name))
    if whole:
        says = "they are quantised, and config.json does not say how"
        raise ModelUnavailable(f"{name!r} holds whole numbers ({whole}): {says}: {MADE_OF}")


def other_names(model: Any, info: dict[str, Any]) -> dict[str, str]:
    """How `from_pretrained` has to rename weights whose base model has another name in the file.

    In a question answering model of LLaMA it is "transformer", and "model" in its causal LM.
    {} if that does not explain all missing weights of the base model.
    """
    name = f"{model.base_model_prefix}."
    unexpected = info["unexpected_keys"]
    missing = {key for key in info["missing_keys"] if key.startswith(name)}
    for other in {key.partition(".")[0] + "." for key in unexpected if missing}:
        if missing <= {name + key.removeprefix(other) for key in unexpected}:
            return {f"^{re.escape(other)}": name}
    return {}


def _sizes(mismatched: Sequence[Any], config: str, model: Any) -> str:
    """In words, which weights have another size, and what may be the reason."""
    more = f" (and {len(mismatched) - 1} more)"
    first = mismatched[0]
    if not isinstance(first, tuple):  # transformers 4 gives the name alone
        return f"{first} has another size{more}"
    key, in_file, in_model = first
    said = f"{key} is {tuple(in_file)} in the file and {tuple(in_model)} by {config}{more}"
    if config == ADAPTER:
        # lora_A is (rank, width of the base), and lora_B (width of the base, rank).
        rank = 0 if "lora_A" in key else 1
        what = "base model" if in_file[rank] == in_model[rank] else "rank (r)"
        return f"{said}: is it of another {what}?"
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabularies = {len(table.weight) for table in tables if table is not None}
    resized = all(
        rows[0] != own[0] and rows[1:] == own[1:] and own[0] in vocabularies
        for _, rows, own in mismatched
    )
    reason = "was the vocabulary resized without saving" if resized else None
    return f"{said}: {reason or 'are they of a model of another size'}?"


def _in_base(model: Any, missing: Sequence[str]) -> bool:
    """Whether some missing weights belong to the blocks, and not to the head above them only."""
    base = model.base_model
    own = {id(parameter) for parameter in base.parameters()}
    head = {key for key, value in model.named_parameters() if id(value) not in own}
    return any(key not in head for key in missing)


def _leaves_out_a_block(model: Any, unused: Sequence[str]) -> bool:
    """Whether unused weights belong to a block that the model should have.

    MTP layers do not count. Their weights are numbered as blocks behind the last one.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", 0)
    predicting = getattr(config, "num_nextn_predict_layers", 0) or 0  # number of MTP layers
    further = range(count, count + predicting)
    # The names of the lists of blocks in the model, such as "model.layers."
    lists = {match[1] for key in model.state_dict() if (match := BLOCK.match(key))}
    blocks = [match for key in unused if (match := BLOCK.match(key))]
    return any(block[1] in lists and int(block[2]) not in further for block in blocks)
