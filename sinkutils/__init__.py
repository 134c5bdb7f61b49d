"""sinkutils: see, measure and re-train attention sinks.

A companion to "When Attention Sink Emerges in Language Models: An Empirical View" (ICLR 2025). Names load on first
use, so that training needs neither transformers nor pandas.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AttentionSpec": "model.attention",
    "attend": "model.attention",
    "LMConfig": "model.config",
    "TransformerLM": "model.decoder",
    "measure": "measuring.measure",
    "compare": "measuring.compare",
    "SinkCallback": "measuring.callback",
    "probe": "data.probes",
    "load_lm": "measuring.load",
    "load_corpus": "data.corpus",
    "config": "study.grid",
    "experiments": "study.experiments",
    "train": "training.trainer",
    "runs": "ledger.frames",
    "blocks": "ledger.frames",
    "heads": "ledger.frames",
    "curves": "ledger.frames",
    "records": "ledger.frames",  # another name of runs
    "claims": "ledger.table",
    "claim_checks": "ledger.table",
    "verdict": "ledger.table",
    "theme": "plots.theme",
    "save": "plots.theme",
    "explore": "plots.explorer",
    "film": "plots.interactive",
    "logits": "plots.interactive",
    "report_page": "plots.report",
    "report_model": "plots.report",
}
# Which extra of pyproject.toml brings a package; what is not here is a dependency of the core.
_EXTRAS = {"nbclient": "notebooks", "nbformat": "notebooks", "papermill": "notebooks", "datasets": "hub"}
__all__ = [*_HOMES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkutils' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"sinkutils.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(missing(error, f"su.{name}")) from error
    globals()[name] = value
    return value


def missing(error: ModuleNotFoundError, purpose: str) -> str:
    """In one line, which package is not installed and what brings it. Raises `error` again if it is a part of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "sinkutils"):
        raise error
    install = f"'sinkutils[{_EXTRAS[package]}]'" if package in _EXTRAS else package
    return f"{package} is needed for {purpose}: pip install {install}"


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
