"""The language models of Table 8 and newer ones by name, and loading of any of them."""

from __future__ import annotations

import csv
import importlib.util
import os
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkutils.checks import device as find_device
from sinkutils.checks import require
from sinkutils.data.tokenizer import open_tokenizer
from sinkutils.measuring.measure import special_ids
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, installed
from sinkutils.model.config import LMConfig
from sinkutils.model.decoder import TransformerLM
from sinkutils.paths import PAPER
from sinkutils.study.config import from_dict
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import ADVICE, CorruptRecord, read_record
from sinkutils.study.store import Runs

DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGEST_TABLES = 2**30  # bytes of a model's position tables


@dataclass(frozen=True)
class ZooModel:
    """One line of Table 8, or a newer model (in_paper is False)."""

    name: str  # as the paper writes it
    hub_id: str
    family: str
    parameters: float  # nominal, all of them where only some are active
    chat: bool = False
    in_paper: bool = True
    sink_1: float | None = None  # the paper's Sink_1 in percent on natural text (Table 1, Appendix B.3), where printed


def _table(name: str) -> list[dict[str, str]]:
    with open(PAPER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


_TABLE_8 = [row for row in _table("open_lms.csv") if row["item"] == "Table 8"]
_PRINTED = {row["hub_id"]: float(row["sink_1"]) for row in _TABLE_8 if row["sink_1"]}
MODELS = tuple(
    ZooModel(name, hub_id, family, float(parameters), chat == "1", in_paper == "1", _PRINTED.get(hub_id))
    for name, hub_id, family, parameters, chat, in_paper in map(dict.values, _table("models.csv"))
)


def find(name: str) -> ZooModel | None:
    """The registry's entry by name (in any case) or hub id, or None."""
    return next((model for model in MODELS if name.lower() in (model.name.lower(), model.hub_id.lower())), None)


def load_lm(
    name_or_path: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    runs: Path | str | None = None,
) -> tuple[nn.Module, Any]:
    """Load a causal LM and its tokenizer, in eval mode.

    name_or_path: a name of the registry, a hub id, a local folder, a recorded run that kept its weights
        ("laptop/fixed_1/0", or the folder of any record), or a model of `python -m sinkutils models` ("smollm2").
    device: None is CUDA where there is one; "auto" spreads a model over devices by accelerate.
    dtype: one of DTYPES; None is float32 on the CPU and the checkpoint's own elsewhere.
    revision: of a hub id, for instance "step1000" of Pythia.
    trust_remote_code: run code from the hub; off unless asked for.
    runs: the folder of the records, if it is another one.

    Weights are read from safetensors where a model has them; else from its .bin files, as tensors only, which is
    what transformers allows. Raises ModelUnavailable (an OSError) with one line that says what to do, ValueError for
    another device or dtype.
    """
    name = str(name_or_path)
    kind: Any = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    allowed = [None, *(getattr(torch, one) for one in DTYPES)]
    require(kind in allowed, f"dtype must be one of {', '.join(DTYPES)}, or None; got {dtype!r}")
    target = None if device == "auto" else find_device(device)
    recorded, is_folder = Runs(runs).named(name), name != "" and Path(name).is_dir()
    here = recorded is not None or is_folder or name.lower() in REAL_MODELS
    require(revision is None or not here, f"revision is of a hub id, and {name!r} has one state only: leave it out")
    if recorded is not None:
        return _load_record(recorded, find_device(target), kind)
    if here and not is_folder:
        model, tokenizer = _load_transformers(str(installed(name.lower())), target, kind, None, False)
        named: Any = model
        named.name_or_path = named.config.name_or_path = name.lower()  # reports show it; no folder of the cache
        return model, tokenizer
    known = None if is_folder else find(name)
    if not is_folder:
        _refuse_unrecorded(name, Runs(runs).folder)
    return _load_transformers(known.hub_id if known else name, target, kind, revision, trust_remote_code)


def _refuse_unrecorded(name: str, runs: Path) -> None:
    """Raise ModelUnavailable, with the seeds there are, for a name that can only be meant as a record's."""
    preset, _, rest = name.partition("/")
    recorded = runs / preset / rest.partition("/")[0] if rest else runs
    seeds = sorted(path.name for path in recorded.glob("*/") if path.name.isdecimal()) if rest else []
    if seeds:
        which = " or ".join(f"{preset}/{recorded.name}/{seed}" for seed in seeds)
        raise ModelUnavailable(f"no recorded run {name!r}: of this experiment take {which}")
    if name.endswith(".gguf") and Path(name).is_file():
        file = Path(name)
        raise ModelUnavailable(f"{name!r} is a GGUF file: {GGUF.format(folder=file.parent, file=file.name)}")
    if not name or name.startswith((".", "/", "~")):
        raise ModelUnavailable(f"there is no folder {name!r}")
    if name.count("/") == 2 or preset in PRESETS:
        raise ModelUnavailable(f"no recorded run {name!r}: train it with `python -m sinkutils train`, or give a hub id")


def _load_record(folder: Path, device: torch.device, dtype: torch.dtype | None) -> tuple[TransformerLM, Any]:
    try:
        record = read_record(folder)
        weights = record.load_weights() if record.weights else {}
    except CorruptRecord as error:
        raise ModelUnavailable(str(error)) from error
    which = f"the record {'/'.join(folder.parts[-3:])}"
    if record.weights is None:
        preset, name, seed = (record.config[key] for key in ("preset", "experiment", "seed"))
        command = f"python -m sinkutils train {name} --preset {preset} --seed {seed} --keep-weights"
        raise ModelUnavailable(f"{which} was written without weights: {command}")
    try:
        config = from_dict(LMConfig, record.config["model"])
        with torch.device("meta"):  # takes no memory, whatever the config says
            shapes = TransformerLM(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelUnavailable(f"config.json of {which} is of no model of this version: {error}") from error
    fits = {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in shapes.state_dict().items()}
    if not fits or sum(table.nbytes for table in shapes.buffers()) > LARGEST_TABLES:
        raise ModelUnavailable(f"{which}: model.safetensors holds another model than config.json: {ADVICE}")
    model = TransformerLM(config)
    model.load_state_dict(weights)
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    return model.to(device, dtype or torch.float32).eval(), tokenizer


def _load_transformers(
    hub_id: str, target: torch.device | None, dtype: torch.dtype | None, revision: str | None, trust_remote_code: bool
) -> tuple[nn.Module, Any]:
    """target: None leaves the devices to accelerate."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(f"loading {hub_id!r} needs transformers: pip install transformers") from error
    local = Path(hub_id).is_dir()
    if local:
        _refuse_files(Path(hub_id))
    offline = not local and not hub_reachable()
    common = {"revision": revision or "main", "trust_remote_code": trust_remote_code, "local_files_only": offline}
    kind = dtype or (torch.float32 if find_device(target).type == "cpu" else "auto")
    placement = {} if target else {"device_map": "auto"}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            hub_id, dtype=kind, output_loading_info=True, **placement, **common
        )
        model, found = loaded
        tokenizer: Any = WithoutTokenizer(model)
        if not local or any(file for pattern in TOKENIZER_FILES for file in Path(hub_id).glob(pattern)):
            tokenizer = AutoTokenizer.from_pretrained(hub_id, **common)
    except Exception as error:  # files of others fail in every way: unpickling, shapes, JSON, a missing package
        raise ModelUnavailable(_why(hub_id, local, offline, error)) from error
    _refuse_other_weights(hub_id, model, found)
    if target:
        model.to(target)
    return model.eval(), tokenizer


TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken")


class WithoutTokenizer:
    """In place of the tokenizer of a folder that has none: enough for probes of random and of repeated ids."""

    bos_token_id, eos_token_id = None, None

    def __init__(self, model: Any) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}
        self.size = len(model.get_input_embeddings().weight)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        self.all_special_ids = sorted(set().union(*(special_ids(model, name) for name in names)))

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(self.size)}

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise ValueError(
            "this folder has no tokenizer files, so only random and repeated ids can be made of it, no text"
        )

    def decode(self, ids: Any) -> str:
        return " ".join(f"<{int(i)}>" for i in ids)


def _refuse_files(folder: Path) -> None:
    """Raise ModelUnavailable for a folder whose files are read in another way."""
    here = {file.name for file in folder.iterdir()}
    gguf = next((name for name in sorted(here) if name.endswith(".gguf")), None)
    if gguf and "config.json" not in here:
        raise ModelUnavailable(f"{str(folder)!r} holds a GGUF file: {GGUF.format(folder=folder, file=gguf)}")
    if "adapter_config.json" in here and importlib.util.find_spec("peft") is None:
        raise ModelUnavailable(f"{str(folder)!r} holds an adapter of another model: pip install peft")


GGUF = "load it by AutoModelForCausalLM.from_pretrained({folder!s}, gguf_file={file!r}) and measure that model"


def _refuse_other_weights(hub_id: str, model: nn.Module, found: dict[str, Any]) -> None:
    """Raise ModelUnavailable where weights are missing, which would be random, or where blocks have unused ones.

    Other weights that are not used, such as those of another head, give a warning.
    """
    missing = sorted(found["missing_keys"])
    unused = sorted(found["unexpected_keys"])
    lists = {name[: place.start()] for name in model.state_dict() if (place := re.search(r"\d+\.", name))}
    of_blocks = [name for name in unused if (place := re.search(r"\d+\.", name)) and name[: place.start()] in lists]
    parts = []
    for what, names in (("without", missing), ("with unused", unused)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"{what} {names[0]}{more}")
    says = f"the weights of {hub_id!r} are not those of its config.json: {', '.join(parts)}"
    if missing or of_blocks:
        raise ModelUnavailable(f"{says}; rename them in the file, or mend config.json")
    if unused:
        warnings.warn(says, stacklevel=4)


def hub_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub answers; asked once, because its library would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception:  # of httpx or requests, whichever the library uses
        return False
    return True


def _why(hub_id: str, local: bool, offline: bool, error: Exception) -> str:
    """One line on why a model did not load: transformers' own, but where that says nothing or too much."""
    what, said = f"{'the folder ' if local else ''}{hub_id!r}", " ".join(str(error).split())
    if "weights_only" in said or isinstance(error, pickle.UnpicklingError):
        return f"{what} has weights in a .bin file that holds more than tensors, which could run any code: not loaded"
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", said):
        return f"{what} is no causal language model: transformers has none for {found[1]}"
    if offline:
        return f"{hub_id!r} is not in the local cache and the hub cannot be reached: connect, or give a local folder"
    return f"{what} could not be loaded: {said[:300] or type(error).__name__}"
