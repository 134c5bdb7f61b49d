"""What a name means: a model or a record of the study, a corpus or the held-out documents.

This module stands above both halves. `measuring` knows models and texts of anybody, and `study`
knows records and corpora; the latter is imported only where a name turns out to be one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkutils import paths
from sinkutils.checks import Refused, instance, require, short
from sinkutils.checks import device as find_device
from sinkutils.measuring import load, probes
from sinkutils.measuring.probes import Corpus, Subject
from sinkutils.measuring.real import REAL_MODELS, ModelUnavailable, hub_id, model_folder
from sinkutils.measuring.texts import adds_bos

Name = str | os.PathLike[str]


def load_lm(
    name_or_path: Name,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    runs: Name | None = None,
) -> tuple[nn.Module, Any]:
    """Load a causal LM in eval mode, and its tokenizer.

    name_or_path: one of these:
        - a name from data/paper/models.csv, or a hub id
        - a local folder, or a GGUF file (which needs the package gguf)
        - a recorded run that kept its weights: "laptop/fixed_1/0", or the folder of the record
        - a model that `python -m sinkutils models` installed, such as "smollm2"
    device: None chooses CUDA if it is available, and the CPU otherwise. "auto" lets accelerate
        spread the model over several devices.
    dtype: float32, bfloat16, float16 or float64. None chooses float32 on a CPU, and the
        checkpoint's dtype elsewhere.
    revision: the revision of a hub id, for instance "step1000" for Pythia.
    trust_remote_code: whether code from the hub may run.
    runs: the folder of the records; None: data/runs.

    Weights are read from safetensors files if the model has them. Otherwise transformers reads the
    .bin files, and accepts nothing but tensors in them.
    Raises ModelUnavailable (an OSError) with one line that says what to do, and ValueError for an
    unknown device or dtype.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise Refused(f"name_or_path must be a name or a path, got {short(name_or_path)}")
    name = str(name_or_path)
    path = Path(name_or_path)
    kind = load.find_dtype(dtype)
    target = None if device == "auto" else find_device(device)
    # The name is that of a record, of a local path, of a model from pip, or of one on the hub.
    record = record_named(name_or_path, runs)
    here = name != "" and path.exists()
    real = not here and name.lower() in REAL_MODELS
    one_state = f"revision is of a hub id, and {name!r} has one state only: leave it out"
    require(revision is None or not (record or here or real), one_state)
    if record is not None:
        return _load_record(record, target or find_device(None), kind)
    reason = load.why_not(path) if here else ""
    if reason:
        raise ModelUnavailable(f"{name!r} {reason}")
    where = name if here else hub_id(name)
    if real:
        where = str(model_folder(name.lower()))
    model, tokenizer = load.from_transformers(where, target, kind, revision, trust_remote_code)
    if real:  # reports shall show this name, not the path of a cache folder
        model.name_or_path = model.config.name_or_path = name.lower()
    return model, tokenizer


def subject(name: str, device: str | None = None, **options: Any) -> Subject:
    """Load a model with all that a `Subject` has. A record also gives T and the fixed position.

    name, device, options: as in `load_lm`.
    """
    model, tokenizer = load_lm(name, device, **options)
    folder = record_named(name, options.get("runs"))
    if folder is None:
        # For some models we know whether training texts began with a BOS. For the others we assume
        # that they did if the tokenizer puts one.
        known = REAL_MODELS.get(name.lower())
        bos = known.bos if known else bool(adds_bos(tokenizer))
        return Subject(Path(name).name, model, tokenizer, bos_in_training=bos)
    from sinkutils.study.record import read_record

    run = read_record(folder).config
    return Subject(
        run["experiment"],
        model,
        tokenizer,
        fixed_position=run["data"]["fixed_position"],
        length=run["train"]["eval_length"],
    )


def probe(
    kind: str | None = None,
    tokenizer: Any = None,
    n: int | None = None,
    length: int = 64,
    seed: int = 0,
    *,
    bos: bool = False,
    corpus: str | Corpus = "docstrings",
    texts: Iterable[str] | None = None,
) -> Tensor:
    """Token ids (n, length), int64, to measure sinks on. They depend on the arguments only.

    kind: "natural" takes the first tokens of n documents. "random" draws every token uniformly from
    the vocabulary without special tokens. "repeat" draws one such token for each sequence and
    repeats it. None cuts each of `texts` into consecutive windows of `length` tokens; the rest at
    the end of a text is not used.
    tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer. No special token is added, and
    the name of a special token inside a text is read as ordinary text.
    n: the number of sequences. None means 100, or with kind=None all windows. If n is smaller than
    the number of windows, n of them are drawn and keep their order.
    bos: whether each sequence begins with the tokenizer's BOS, which counts towards `length`.
    corpus: the corpus whose probe split, which no training sees, gives the natural text. For
    "docstrings" that is read from the installed packages; another one is opened or built first.
    texts: texts to use instead of a corpus.

    Raises ValueError for an unknown kind, an object that is no tokenizer, a tokenizer without BOS
    if bos is set, or too little text.
    """
    source = open_corpus(corpus) if kind == "natural" and texts is None else None
    return probes.probe(kind, tokenizer, n, length, seed, bos=bos, corpus=source, texts=texts)


def open_corpus(corpus: str | Corpus) -> Corpus | None:
    """The corpus of this name. None stands for the held-out documents of "docstrings"."""
    if corpus == "docstrings":
        return None
    if not isinstance(corpus, str):
        instance("corpus", corpus, Corpus)
        return corpus
    from sinkutils.study.corpus import load_corpus

    return load_corpus(corpus)


def record_named(name: Name, runs: Name | None = None) -> Path | None:
    """The folder of a record of the study, or None if there is none of this name.

    name: the folder itself, or preset/experiment/seed.
    Raises ModelUnavailable for a name that only a record can have, if there is no such record.
    """
    if Path(name).is_dir():
        return Path(name) if _is_record(Path(name)) else None
    for folder in (Path(name), Path(runs or paths.RUNS) / name):
        folder = paths.standing(folder)
        if _is_record(folder):
            return folder
    preset, *rest = str(name).split("/")
    if Path(name).exists() or str(name).startswith((".", "/", "~")) or not rest:
        return None
    if len(rest) == 2 or preset in paths.read_yaml(paths.LEDGER / "presets.yaml"):
        raise ModelUnavailable(
            f"no recorded run {str(name)!r}: give preset/experiment/seed of one, "
            "`python -m sinkutils train` it, or give a hub id"
        )
    return None


def _is_record(folder: Path) -> bool:
    """Whether a folder is a record of the study, which may be damaged, and not that of a model.

    A model's folder may have a SHA256SUMS or a provenance.json too.
    """
    config = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if (folder / "config.json").is_file():  # reading a pipe would wait for ever
            config = json.loads((folder / "config.json").read_bytes())
    ours = isinstance(config, dict) and "experiment" in config
    if isinstance(config, dict) and not ours:
        return False
    # A damaged record may have lost one of its files. Reading it gives a clear message then.
    names = ("SHA256SUMS", "provenance.json", "metrics.json")
    return ours + sum((folder / name).is_file() for name in names) >= 2


def _load_record(
    folder: Path, target: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, Any]:
    from sinkutils.study.record import CorruptRecord, read_record, short_name

    try:
        record = read_record(folder)
        if record.weights is None:
            run = record.config
            raise ModelUnavailable(
                f"the record {short_name(folder)} was written without weights: python -m sinkutils "
                f"train {run['experiment']} --preset {run['preset']} --seed {run['seed']} "
                "--keep-weights"
            )
        model = record.load_model()
        return model.to(target, dtype or torch.float32), record.tokenizer
    except CorruptRecord as error:
        raise ModelUnavailable(str(error)) from error
