"""Whether a folder or a file holds a model that transformers reads as it is meant.

Otherwise the advice is what the files are, and what to do with them first.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sinkutils.measuring.real import ModelUnavailable

# The beginning of a weight's name: "model.layers.3." -> "model.layers.", "3".
BLOCK = re.compile(r"(.*?)(\d+)\.")
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # of a GGUF file that was split
# For example, transformers 4 does not find the rotary base where version 5 writes it, and would
# silently use its own default.
NEWER = "was saved by a later transformers, whose files this one reads wrongly: update transformers"
MADE_OF = "load the model that it was made of"
# What a folder holds if no file has weights that transformers reads. A name -> what has to be done.
CONVERTED = {
    "*.distcp": "shards of FSDP: gather them first (accelerate merge-weights)",
    "zero_to_fp32.py": "shards of DeepSpeed: gather them first (python zero_to_fp32.py . OUT)",
    "*zero_pp_rank_*": "shards of DeepSpeed: gather them first (its zero_to_fp32.py)",
    "mp_rank_*": "shards of Megatron or DeepSpeed: gather and convert them first",
    "consolidated*.pth": "weights in Meta's own form: convert them first, by the script "
    "convert_<family>_weights_to_hf.py of transformers",
    "consolidated*.safetensors": "weights in Mistral's own form: convert them first, by "
    "transformers' script for the family",
    "lit_model.pth": "a model of LitGPT: convert it first (litgpt convert_from_litgpt)",
    "*.nemo": "a model of NeMo: export it to Hugging Face's form first",
    "_CHECKPOINT_METADATA": "a checkpoint of Orbax (JAX): convert it first",
    "flax_model*": "weights of Flax: convert them first, by transformers 4",
    "tf_model*": "weights of TensorFlow: convert them first, by transformers 4",
    "*.npz": f"weights of MLX: {MADE_OF}",
    "qmodel.pt": f"a model quantised by HQQ itself: {MADE_OF}",
    "*.onnx": f"an ONNX export: {MADE_OF}",
    "openvino_model.*": f"an OpenVINO export: {MADE_OF}",
    "*.engine": f"an engine of TensorRT: {MADE_OF}",
    "*.ckpt": "a checkpoint of a trainer: save the model in it by save_pretrained first",
    "*.pt": "a file of torch.save: build the model, load it there and call save_pretrained",
    "*.pth": "a file of torch.save: build the model, load it there and call save_pretrained",
}
# Endings of the names of weights that say how a model was quantised.
QUANTISED = {
    "scales": "MLX",
    "biases": "MLX",
    "q_weight": "EXL2",
    "q_scale": "EXL2",
    "trellis": "EXL3",
    "W_q": "HQQ",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "weight_scale": "ModelOpt or another scheme of 8 or 4 bits",
    "weight_scale_2": "ModelOpt",
    "weight_scale_inv": "a scheme of 8 bits",
    "weight_packed": "compressed-tensors",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}
# Weights in a file that a sink does not depend on: scales of a quantised cache, and tables that a
# model computes itself.
HARMLESS = re.compile(
    r"\.(k|v|q|kv|qk|prob)_(\w+_)?scale$|_proj\.(output|k|v)_scale$|\.(rotary_emb\.)?inv_freq$"
    r"|\.attn\.(masked_)?bias$"
)


# --- before a model is loaded


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at this path, or the only one in a folder without a config.json; else None.

    Raises ModelUnavailable for a folder that has several, and a file that is no whole one.
    """
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or (path / "config.json").exists():
        return None
    if len(files) > 1 and not PART.search(files[0].name):
        raise ModelUnavailable(
            f"{str(path)!r} holds {len(files)} GGUF files: give one of them, {str(files[0])!r}"
        )
    return files[0]


def check_path(path: Path) -> None:
    """Raise ModelUnavailable, with advice, if a path holds no model that transformers reads."""
    where = repr(str(path))
    if path.is_file() and path.suffix != ".gguf":
        raise ModelUnavailable(f"{where} is a file: give the folder that holds it")
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file() and file.stat().st_size < 1024:
                if file.read_bytes().startswith(b"version https://git-lfs"):
                    raise ModelUnavailable(
                        f"{where} has git-lfs pointers in place of files ({file.name}): "
                        "run `git lfs pull` in it"
                    )
    gguf = gguf_file(path)
    if gguf:
        _check_gguf(gguf)
    elif (path / "adapter_config.json").is_file():
        _check_adapter(path)
    elif (path / "config.json").is_file():
        if not read_config(path / "config.json"):
            raise ModelUnavailable(f"{where} has a config.json that is no JSON object, or empty")
        _check_quantisation(path)
        _check_weights(path)
    else:
        advice = _what_it_is(path) or "is it the folder of a model?"
        for config in path.glob("*/config.json"):  # perhaps a training's folder of checkpoints
            advice = f"give a folder in it, {str(config.parent)!r} for instance"
        raise ModelUnavailable(f"{where} has no config.json: {advice}")


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, {} if it is no JSON object: transformers says what is wrong."""
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def _what_it_is(path: Path) -> str:
    for pattern, what in CONVERTED.items():
        for folder in ("", "*/"):  # also one folder below
            if any(path.glob(folder + pattern)):
                return f"it holds {what}"
    return ""


def _check_gguf(file: Path) -> None:
    part = PART.search(file.name)
    if part and int(part[1]) > 1:
        raise ModelUnavailable(
            f"{str(file)!r} is one of {int(part[1])} parts of a model, and transformers reads one "
            "file: join them first (llama-gguf-split --merge)"
        )
    with file.open("rb") as opened:
        start = opened.read(24)
    if not start.startswith(b"GGUF") or len(start) < 24:
        raise ModelUnavailable(f"{str(file)!r} is no GGUF file, or is cut off")


def broken_gguf(error: Exception) -> bool:
    """Whether an error while a GGUF file is read means that it is cut or damaged."""
    kinds = (struct.error, IndexError, KeyError, OverflowError, EOFError, UnicodeDecodeError)
    return isinstance(error, kinds) or (
        isinstance(error, ValueError) and "support" not in str(error)
    )


def base_of_adapter(path: Path) -> str | None:
    """The base model that an adapter's folder names."""
    name = read_config(path / "adapter_config.json").get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _check_adapter(path: Path) -> None:
    base = base_of_adapter(path)
    if base is None:
        raise ModelUnavailable(f"{str(path)!r} has an adapter_config.json that names no base model")
    is_path = base.startswith((".", "/", "~")) or base.count("/") > 1 or "\\" in base
    if is_path and not Path(base).exists():
        raise ModelUnavailable(
            f"the base model that adapter_config.json of {str(path)!r} names, {base!r}, is not "
            "there: write its folder or hub id into that file"
        )
    both = [file.name for file in path.glob("model*.safetensors")]
    if both and (path / "config.json").is_file():
        warnings.warn(
            f"{str(path)!r} holds an adapter and a whole model ({min(both)}): the adapter is "
            f"loaded, on {base!r}",
            stacklevel=4,
        )


def _check_quantisation(path: Path) -> None:
    """Raise ModelUnavailable if config.json names a scheme that transformers does not know."""
    config = read_config(path / "config.json")
    scheme = config.get("quantization_config")
    scheme = scheme if isinstance(scheme, dict) else {}
    method = scheme.get("quant_method")
    mlx = {"group_size", "bits"}
    name = ""
    if method is None and (isinstance(config.get("quantization"), dict) or mlx <= scheme.keys()):
        name = "MLX"
    elif (path / "hf_quant_config.json").is_file() or method == "modelopt":
        name = "ModelOpt"
    elif method is not None and method not in _known_schemes():
        name = str(method)
    elif method is None and scheme and not {"load_in_8bit", "load_in_4bit"} & scheme.keys():
        name = f"a scheme without a name ({', '.join(sorted(scheme)[:3])})"
    if name:
        advice = "dequantise it (mlx_lm.convert --dequantize), or " if name == "MLX" else ""
        raise ModelUnavailable(
            f"{str(path)!r} is quantised by {name}, which this transformers does not read: "
            f"{advice}{MADE_OF}"
        )


def _known_schemes() -> set[str]:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}


def _check_weights(path: Path) -> None:
    """Check that it is clear which of a folder's files of weights are meant.

    transformers takes the first that is there of model.safetensors, its index of shards,
    pytorch_model.bin and its index.
    """
    single = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    old = [
        file
        for file in ("pytorch_model.bin", "pytorch_model.bin.index.json")
        if (path / file).is_file()
    ]
    new = [file for file in (single, index) if file.is_file()]
    if single.is_file() and index.is_file():
        other = _first_difference(single, index)
        if other:
            raise ModelUnavailable(
                f"{str(path)!r} holds model.safetensors and the shards of {index.name}, and they "
                f"differ ({other}); transformers would load the former without a word: move away "
                "those that you do not mean"
            )
    elif not new and not old and (what := _what_it_is(path)):
        raise ModelUnavailable(f"{str(path)!r} has no model.safetensors: {what}")
    elif new and old and (path / old[0]).stat().st_mtime > new[0].stat().st_mtime + 60:
        warnings.warn(
            f"{str(path)!r} holds {new[0].name} and {old[0]}, which is newer: the former is loaded",
            stacklevel=5,
        )


def _first_difference(single: Path, index: Path) -> str | None:
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
                    if key not in other.keys() or not torch.equal(
                        one.get_tensor(key), other.get_tensor(key)
                    ):
                        return str(key)
    return None


# --- after it is loaded


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
    adapter = (Path(name) / "adapter_config.json").is_file()
    config = "adapter_config.json" if adapter else "config.json"
    message = f"the weights of {name!r} are not those of its {config}: "
    missing = sorted(info["missing_keys"])
    unused = sorted(key for key in info["unexpected_keys"] if not HARMLESS.search(key))
    mismatched = sorted(info.get("mismatched_keys", ()))
    scheme = _scheme(unused)
    if scheme and (missing or mismatched):
        raise ModelUnavailable(
            f"the weights of {name!r} are quantised ({scheme}), which its config.json does not "
            f"say: {MADE_OF}"
        )
    if mismatched:
        more = f" (and {len(mismatched) - 1} more)"
        raise ModelUnavailable(message + _sizes(mismatched, config, model, more))
    # The number of such weights, and the name of one
    message += f"without {len(missing)} {missing[:1]}, "
    message += f"with {len(unused)} unused {unused[:1]}"
    if _in_base(model, missing) or _leaves_out_a_block(model, unused):  # missing ones are random
        advice = "rename them in the file, or mend config.json"
        if Path(name).suffix == ".gguf":
            advice = "is it a part of a model, or cut?"
        elif adapter:
            advice = "is the file whole, and of this base model?"
        raise ModelUnavailable(f"{message}; {advice}")
    if missing:
        message += "; attention does not depend on them, but the logits are random"
    if missing or unused:
        warnings.warn(message, stacklevel=5)
    whole = None if getattr(model, "is_quantized", False) else _whole_numbers(Path(name))
    if whole:
        raise ModelUnavailable(
            f"{name!r} holds whole numbers ({whole}), which transformers takes as weights as they "
            f"are: they are quantised, and config.json does not say how: {MADE_OF}"
        )


def _whole_numbers(path: Path) -> str | None:
    """A matrix of integers among the weights in a folder, with its type, or None."""
    for file in path.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # it is no dict
                part = opened.get_slice(key)
                kind = part.get_dtype()
                if key.endswith(".weight") and len(part.get_shape()) > 1 and kind[0] in "IU":
                    return f"{key}: {kind}"
    return None


def other_names(model: Any, info: dict[str, Any]) -> dict[str, str]:
    """How `from_pretrained` has to rename weights whose base model has another name in the file.

    In a question answering model of LLaMA it is "transformer", and "model" in its causal LM.
    {} if that does not explain all missing weights of the base model.
    """
    name = f"{model.base_model_prefix}."
    missing = {key for key in info["missing_keys"] if key.startswith(name)}
    for other in {key.partition(".")[0] + "." for key in info["unexpected_keys"]}:
        renamed = {name + key.removeprefix(other) for key in info["unexpected_keys"]}
        if missing and missing <= renamed:
            return {f"^{re.escape(other)}": name}
    return {}


def _scheme(unused: Iterable[str]) -> str | None:
    """How a model was quantised, with a weight that shows it."""
    for key in unused:
        ending = key.rpartition(".")[2]
        if ending in QUANTISED:
            return f"{key}: {QUANTISED[ending]}"
    return None


def _sizes(mismatched: Sequence[Any], config: str, model: Any, more: str) -> str:
    """In words, which weights have another size, and what may be the reason."""
    first = mismatched[0]
    if not isinstance(first, tuple):  # transformers 4 gives the name alone
        return f"{first} has another size{more}"
    key, in_file, in_model = first
    said = f"{key} is {tuple(in_file)} in the file and {tuple(in_model)} by {config}{more}"
    if config == "adapter_config.json":
        # lora_A is (rank, width of the base), and lora_B (width of the base, rank).
        rank = 0 if "lora_A" in key else 1
        another_rank = in_file[rank] != in_model[rank]
        return f"{said}: is it of another {'rank (r)' if another_rank else 'base model'}?"
    vocabularies = {
        len(part.weight)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        if part is not None
    }
    resized = all(
        rows[0] != own[0] and rows[1:] == own[1:] and own[0] in vocabularies
        for _, rows, own in mismatched
    )
    if resized:
        return f"{said}: was the vocabulary resized without saving?"
    return f"{said}: are they of a model of another size?"


def _in_base(model: Any, missing: Sequence[str]) -> bool:
    """Whether some missing weights belong to the blocks, and not to the head above them only."""
    base = model.base_model
    if base is model:
        return len(missing) > 0
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
