"""sinkutils: see, measure and re-train attention sinks.

A companion to "When Attention Sink Emerges in Language Models: An Empirical View" (ICLR 2025).
Each public name is imported on first use, so that training needs neither transformers nor pandas.
`__init__.pyi` lists them, for this module as for editors and type checkers.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
# Each public name, and the module or the package that has it
_HOMES = {name: home for home, name in re.findall(r"from (\S+) import (\w+) as", _stub)}
__all__ = [*_HOMES]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkutils' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    if hasattr(home, "__path__"):  # a package: the name is a module of it, as in su.surgery.hide
        value: Any = import_module(f"{home.__name__}.{name}")
    else:
        value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
