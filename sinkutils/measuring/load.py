"""The language models of Table 8 and newer ones by name, loading of any of them, and Table 7's surgery on positions."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from sinkutils.checks import device as find_device
from sinkutils.checks import require
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, installed
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.presets import PRESETS
from sinkutils.study.record import CorruptRecord, read_record
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


def _pythia(size: str, parameters: float) -> ZooModel:
    return ZooModel(f"Pythia-{size}", f"EleutherAI/pythia-{size.lower()}", "Pythia", parameters)


def _opt(size: str, parameters: float) -> ZooModel:
    return ZooModel(f"OPT-{size}", f"facebook/opt-{size.lower()}", "OPT", parameters)


def _newer(name: str, hub_id: str, family: str, parameters: float, chat: bool = False) -> ZooModel:
    return ZooModel(name, hub_id, family, parameters, chat, in_paper=False)


MODELS = (
    ZooModel("LLaMA2-7B Base", "meta-llama/Llama-2-7b-hf", "LLaMA2", 7e9, sink_1=92.47),
    ZooModel("LLaMA2-7B Chat", "meta-llama/Llama-2-7b-chat-hf", "LLaMA2", 7e9, True, sink_1=92.88),
    ZooModel("LLaMA2-13B Base", "meta-llama/Llama-2-13b-hf", "LLaMA2", 13e9, sink_1=91.69),
    ZooModel("LLaMA2-13B Chat", "meta-llama/Llama-2-13b-chat-hf", "LLaMA2", 13e9, True, sink_1=90.94),
    ZooModel("LLaMA3-8B Base", "meta-llama/Meta-Llama-3-8B", "LLaMA3", 8e9, sink_1=99.02),
    ZooModel("LLaMA3-8B Instruct", "meta-llama/Meta-Llama-3-8B-Instruct", "LLaMA3", 8e9, True, sink_1=98.85),
    ZooModel("LLaMA3.1-8B Base", "meta-llama/Meta-Llama-3.1-8B", "LLaMA3", 8e9),
    ZooModel("LLaMA3.1-8B Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct", "LLaMA3", 8e9, True),
    ZooModel("GPT2", "openai-community/gpt2", "GPT2", 124e6),
    ZooModel("GPT2-Medium", "openai-community/gpt2-medium", "GPT2", 355e6),
    ZooModel("GPT2-Large", "openai-community/gpt2-large", "GPT2", 774e6),
    ZooModel("GPT2-XL", "openai-community/gpt2-xl", "GPT2", 1.5e9, sink_1=77.00),
    ZooModel("Mistral-7B", "mistralai/Mistral-7B-v0.1", "Mistral", 7e9, sink_1=97.49),
    ZooModel("Mistral-7B Instruct", "mistralai/Mistral-7B-Instruct-v0.1", "Mistral", 7e9, True, sink_1=88.34),
    _pythia("14M", 14e6),
    _pythia("31M", 31e6),
    _pythia("70M", 70e6),
    _pythia("160M", 160e6),
    _pythia("410M", 410e6),
    _pythia("1B", 1e9),
    _pythia("1.4B", 1.4e9),
    _pythia("2.8B", 2.8e9),
    _pythia("6.9B", 6.9e9),
    _pythia("12B", 12e9),
    _opt("125M", 125e6),
    _opt("350M", 350e6),
    _opt("1.3B", 1.3e9),
    _opt("2.7B", 2.7e9),
    _opt("6.7B", 6.7e9),
    _opt("13B", 13e9),
    ZooModel("Jamba-v0.1", "ai21labs/Jamba-v0.1", "Jamba", 52e9, sink_1=88.48),
    ZooModel("Jamba-1.5 Mini", "ai21labs/AI21-Jamba-1.5-Mini", "Jamba", 52e9, True, sink_1=87.88),
    _newer("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", "SmolLM2", 135e6),
    _newer("SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M", "SmolLM2", 360e6),
    _newer("SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B", "SmolLM2", 1.7e9),
    _newer("TinyStories-33M", "roneneldan/TinyStories-33M", "TinyStories", 33e6),
    _newer("Qwen3-0.6B Base", "Qwen/Qwen3-0.6B-Base", "Qwen3", 0.6e9),
    _newer("Qwen3-8B Base", "Qwen/Qwen3-8B-Base", "Qwen3", 8e9),
    _newer("Qwen3-Next-80B Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next", 80e9, True),
    _newer("Gemma2-2B", "google/gemma-2-2b", "Gemma2", 2e9),
    _newer("Gemma3-270M", "google/gemma-3-270m", "Gemma3", 270e6),
    _newer("Gemma3-1B", "google/gemma-3-1b-pt", "Gemma3", 1e9),
    _newer("OLMo2-1B", "allenai/OLMo-2-0425-1B", "OLMo2", 1e9),
    _newer("OLMo2-7B", "allenai/OLMo-2-1124-7B", "OLMo2", 7e9),
    _newer("Phi-2", "microsoft/phi-2", "Phi", 2.7e9),
    _newer("gpt-oss-20b", "openai/gpt-oss-20b", "gpt-oss", 21e9, True),
    _newer("BLOOM-560M", "bigscience/bloom-560m", "BLOOM", 560e6),
    _newer("Falcon-7B", "tiiuae/falcon-7b", "Falcon", 7e9),
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
    name, kind = str(name_or_path), _dtype(dtype)
    target = find_device(None if device == "auto" else device)
    folder = Path(name)
    if (recorded := Runs(runs).named(name)) is not None:
        return _load_record(recorded, target, kind)
    if name.lower() in REAL_MODELS and not folder.is_dir():
        model, tokenizer = _load_transformers(str(installed(name.lower())), device, target, kind, None, False)
        named: Any = model
        named.name_or_path = named.config.name_or_path = name.lower()  # reports show it; no folder of the cache
        return model, tokenizer
    if not name or not folder.is_dir():
        _refuse_unrecorded(name, Runs(runs).folder)
    known = find(name)
    hub_id = known.hub_id if known and not folder.is_dir() else name
    return _load_transformers(hub_id, device, target, kind, revision, trust_remote_code)


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
    from safetensors.torch import load_file

    from sinkutils.data.tokenizer import open_tokenizer
    from sinkutils.model.config import LMConfig
    from sinkutils.study.config import from_dict

    try:
        record = read_record(folder)
    except CorruptRecord as error:
        raise ModelUnavailable(str(error)) from error
    if record.weights is None:
        preset, name, seed = (record.config[key] for key in ("preset", "experiment", "seed"))
        raise ModelUnavailable(f"the record {'/'.join(folder.parts[-3:])} was written without weights: python -m "
                               f"sinkutils train {name} --preset {preset} --seed {seed} --keep-weights")  # fmt: skip
    try:
        config = from_dict(LMConfig, record.config["model"])
        with torch.device("meta"):  # takes no memory, whatever the config says
            shapes = TransformerLM(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelUnavailable(f"config.json of the record {'/'.join(folder.parts[-3:])} is of no model of this "
                               f"version: {error}") from error  # fmt: skip
    weights = load_file(record.weights)
    fits = {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in shapes.state_dict().items()}
    if not fits or sum(table.nbytes for table in shapes.buffers()) > LARGEST_TABLES:
        raise ModelUnavailable(f"the record {'/'.join(folder.parts[-3:])}: model.safetensors holds another model than "
                               "config.json: delete the folder and train the run again")  # fmt: skip
    model = TransformerLM(config)
    model.load_state_dict(weights)
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    return model.to(device, dtype or torch.float32).eval(), tokenizer


def _load_transformers(
    hub_id: str,
    device: str | torch.device | None,
    target: torch.device,
    dtype: torch.dtype | None,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[nn.Module, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(f"loading {hub_id!r} needs transformers: pip install transformers") from error
    local = Path(hub_id).is_dir()
    common = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    common["local_files_only"] = offline = not local and not hub_reachable()
    kind = dtype or (torch.float32 if target.type == "cpu" else "auto")
    placement = {"device_map": "auto"} if device == "auto" else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(hub_id, dtype=kind, **placement, **common)
        tokenizer = AutoTokenizer.from_pretrained(hub_id, **common)
    except Exception as error:  # files of others fail in every way: unpickling, shapes, JSON, a missing package
        raise ModelUnavailable(_why(hub_id, local, offline, error)) from error
    if not placement:
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


def _why(hub_id: str, local: bool, offline: bool, error: BaseException) -> str:
    """One line on why a model did not load, from the chain of errors behind it."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = {type(cause).__name__ for cause in causes}
    what = f"{'the folder ' if local else ''}{hub_id!r}"
    if "weights_only" in str(error) or "UnpicklingError" in kinds:
        return f"{what} has weights in a .bin file that holds more than tensors, which could run any code: not loaded"
    if other := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error)):
        return f"{what} is no causal language model: transformers has none for {other[1]}"
    if "requires `accelerate`" in str(error):
        return "device 'auto' needs accelerate: pip install accelerate"
    if "trust_remote_code" in str(error):
        return f"{hub_id!r} needs code from the hub: read it, then pass trust_remote_code=True"
    if "GatedRepoError" in kinds:
        return f"{hub_id!r} is gated: accept its terms on the hub, then log in with `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{hub_id!r} has no such revision"
    if "RepositoryNotFoundError" in kinds:
        return f"{hub_id!r} is not on the hub (or is private: log in with `hf auth login`)"
    if offline:
        return f"{hub_id!r} is not in the local cache and the hub cannot be reached: connect, or give a local folder"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{what} could not be loaded: {first}"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is not None or dtype is not None:
        allowed = [getattr(torch, name) for name in DTYPES]
        require(found in allowed, f"dtype must be one of {', '.join(DTYPES)}, or None; got {dtype!r}")
    return found


@contextmanager
def replace_position(model: nn.Module, t: int) -> Iterator[nn.Module]:
    """While open, p_1 is p_t (Table 7 top); t counts from 1. The model's own table is put back."""
    with _edited(model, t) as (table, first, other):
        table[first] = table[other]
        yield model


@contextmanager
def swap_positions(model: nn.Module, t: int) -> Iterator[nn.Module]:
    """While open, p_1 and p_t have changed places (Table 7 bottom); t counts from 1."""
    with _edited(model, t) as (table, first, other):
        table[[first, other]] = table[[other, first]]
        yield model


@contextmanager
def _edited(model: nn.Module, t: int) -> Iterator[tuple[Tensor, int, int]]:
    """The table of position embeddings and the rows of positions 1 and t; its rows are put back at the end."""
    table, offset = position_table(model)
    if not 1 < t <= len(table) - offset:
        raise ValueError(f"t must be a position after the first, 2..{len(table) - offset}, got {t}")
    rows = [offset, offset + t - 1]
    before = table[rows].clone()
    try:
        yield table, rows[0], rows[1]
    finally:
        table[rows] = before


def position_table(model: nn.Module) -> tuple[Tensor, int]:
    """The learned position embeddings (positions, d) of a model, and the row of position 1.

    Raises ValueError for models without (only absolute positions can be told apart by their embeddings).
    """
    if isinstance(model, TransformerLM):
        if model.config.position == "learnable":
            return model.position_embedding.detach(), int(model.config.sink_token)
    else:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions"):
                return module.weight.detach(), getattr(module, "offset", 0)  # OPT keeps two rows for padding
    raise ValueError(f"{type(model).__name__} has no learned position embeddings: use GPT-2, OPT, or a TransformerLM "
                     "with position='learnable'")  # fmt: skip
