"""sinkutils: see, measure and re-train attention sinks.

A companion to "When Attention Sink Emerges in Language Models: An Empirical View" (ICLR 2025). Names load on first
use, so that `import sinkutils` is quick and training needs neither transformers nor pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkutils.attention import AttentionSpec, attend
    from sinkutils.capture import measure
    from sinkutils.corpora import load_corpus
    from sinkutils.experiments import config, experiments
    from sinkutils.model import LMConfig, TransformerLM
    from sinkutils.probes import probe
    from sinkutils.tables import claims, paper_beside_ours, records
    from sinkutils.training import train
    from sinkutils.zoo import load_lm

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
    return getattr(import_module(f"sinkutils.{_HOMES[name]}"), name)
