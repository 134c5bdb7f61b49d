"""sinkutils: see, measure and re-train attention sinks.

A companion to "When Attention Sink Emerges in Language Models: An Empirical View" (ICLR 2025).
Each public name is imported on first use, so that training needs neither transformers nor pandas.
"""

from importlib import import_module
from typing import Any

# Each public name, and the module that defines it.
_HOMES = {
    "AttentionSpec": "model.config",
    "attention": "model.attention",  # the module itself: su.attention.register
    "attend": "model.attention",
    "LMConfig": "model.config",
    "TransformerLM": "model.decoder",
    "measure": "measuring.measure",
    "report": "measuring.maps",
    "compare": "measuring.compare",
    "families": "measuring.families",  # the module itself: su.families.register, su.families.check
    "surgery": "measuring.surgery",  # the module itself: su.surgery.hide, su.surgery.edit, ..
    "sinkcheck": "measuring.sinkcheck",  # the module itself: su.sinkcheck.run
    "SinkCallback": "measuring.callback",
    "probe": "names",
    "load_lm": "names",
    "load_corpus": "study.corpus",
    "config": "study.grid",
    "experiments": "study.grid",
    "train": "study.train",
    "record": "study.store",
    "runs": "study.frames",
    "blocks": "study.frames",
    "heads": "study.frames",
    "curves": "study.frames",
    "compare_runs": "study.frames",
    "claims": "ledger.table",
    "claim_checks": "ledger.table",
    "verdict": "ledger.table",
    "theme": "plots.theme",
    "save": "plots.theme",
    "explore": "plots.interactive",
    "film": "plots.interactive",
    "Interactive": "plots.interactive",
    "report_page": "plots.report",
    "report_model": "plots.report",
}
__all__ = [*_HOMES]
MODULES = (
    "attention",
    "families",
    "surgery",
    "sinkcheck",
)  # public names that are modules themselves
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkutils' has no attribute {name!r}")
    module = import_module(f"sinkutils.{_HOMES[name]}")
    value = module if name in MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
