"""The language models of Table 8 and newer ones by name, loading of any of them, and Table 7's surgery on positions."""

from __future__ import annotations

import csv
import os
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from sinkutils.checks import device as find_device
from sinkutils.checks import require
from sinkutils.data.tokenizer import open_tokenizer
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
    offline = not local and not hub_reachable()
    common = {"revision": revision or "main", "trust_remote_code": trust_remote_code, "local_files_only": offline}
    kind = dtype or (torch.float32 if find_device(target).type == "cpu" else "auto")
    placement = {} if target else {"device_map": "auto"}
    try:
        model = AutoModelForCausalLM.from_pretrained(hub_id, dtype=kind, **placement, **common)
        tokenizer = AutoTokenizer.from_pretrained(hub_id, **common)
    except Exception as error:  # files of others fail in every way: unpickling, shapes, JSON, a missing package
        raise ModelUnavailable(_why(hub_id, local, offline, error)) from error
    if target:
        model.to(target)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def hub_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub answers; asked once, because the library itself would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlparse(constants.ENDPOINT)
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the proxy could tell
    try:
        with socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), seconds):
            return True
    except OSError:
        return False


# What is in the text of an error, or is the kind of one behind it -> why the model did not load.
REASONS = {
    "weights_only|UnpicklingError": "{what} has weights in a .bin file that holds more than tensors, which could run "
    "any code: not loaded",
    r"Unrecognized configuration class <class '[\w.]*?(\w+)'>": "{what} is no causal language model: transformers has "
    "none for {found[1]}",
    "requires `accelerate`": "device 'auto' needs accelerate: pip install accelerate",
    "trust_remote_code": "{hub_id!r} needs code from the hub: read it, then pass trust_remote_code=True",
    "GatedRepoError": "{hub_id!r} is gated: accept its terms on the hub, then log in with `hf auth login`",
    "RevisionNotFoundError": "{hub_id!r} has no such revision",
    "RepositoryNotFoundError": "{hub_id!r} is not on the hub (or is private: log in with `hf auth login`)",
}


def _why(hub_id: str, local: bool, offline: bool, error: Exception) -> str:
    """One line on why a model did not load, from the chain of errors behind it."""
    what, said = f"{'the folder ' if local else ''}{hub_id!r}", str(error)
    kinds: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(kinds) < 20:  # errors can stand behind each other in a circle
        kinds.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    for pattern, reason in REASONS.items():
        if found := re.search(pattern, "\n".join([said, *kinds])):
            return reason.format(what=what, hub_id=hub_id, found=found)
    if offline:
        return f"{hub_id!r} is not in the local cache and the hub cannot be reached: connect, or give a local folder"
    return f"{what} could not be loaded: {said.strip().splitlines()[0] if said.strip() else kinds[0]}"


def replace_position(model: nn.Module, t: int) -> AbstractContextManager[nn.Module]:
    """While open, p_1 is p_t (Table 7 top); t counts from 1. The model's own table is put back."""
    return _edited(model, t, [1, 1])


def swap_positions(model: nn.Module, t: int) -> AbstractContextManager[nn.Module]:
    """While open, p_1 and p_t have changed places (Table 7 bottom); t counts from 1."""
    return _edited(model, t, [1, 0])


@contextmanager
def _edited(model: nn.Module, t: int, which: list[int]) -> Iterator[nn.Module]:
    """While open, positions 1 and t have the embeddings `which` of theirs: 0 is p_1, 1 is p_t."""
    table, offset = position_table(model)
    if not 1 < t <= len(table) - offset:
        raise ValueError(f"t must be a position after the first, 2..{len(table) - offset}, got {t}")
    rows = [offset, offset + t - 1]
    before = table[rows]  # a copy
    table[rows] = before[which]
    try:
        yield model
    finally:
        table[rows] = before


def position_table(model: nn.Module) -> tuple[Tensor, int]:
    """The learned position embeddings (positions, d) of a model, and the row of position 1."""
    if isinstance(model, TransformerLM):
        if model.config.position == "learnable":
            return model.position_embedding.detach(), int(model.config.sink_token)
    else:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions"):
                return module.weight.detach(), getattr(module, "offset", 0)  # OPT keeps two rows for padding
    own = "a TransformerLM with position='learnable'"
    raise ValueError(f"{type(model).__name__} has no learned position embeddings: use GPT-2, OPT, or {own}")
