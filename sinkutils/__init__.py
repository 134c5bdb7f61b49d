"""sinkutils: see, measure and re-train attention sinks.

A companion to "When Attention Sink Emerges in Language Models: An Empirical View" (ICLR 2025). Names load on first
use, so that training needs neither transformers nor pandas.
"""

from importlib import import_module
from typing import Any

# Three functions share their names with modules. Python binds a module to the package when it first loads it, so they
# are loaded here, once, and unbound: after that the names below mean the functions.
from sinkutils import claims, experiments, records

del claims, experiments, records

_HOMES = {
    "AttentionSpec": "attention",
    "attend": "attention",
    "LMConfig": "model",
    "TransformerLM": "model",
    "measure": "capture",
    "probe": "probes",
    "load_lm": "zoo",
    "load_corpus": "corpora",
    "config": "experiments",
    "experiments": "experiments",
    "train": "training",
    "records": "tables",
    "paper_beside_ours": "tables",
    "claims": "claims",
}
__all__ = [*_HOMES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkutils' has no attribute {name!r}")
    value = getattr(import_module(f"sinkutils.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
