"""Every public name with its signature and docstring, into docs/api.md: python docs/api.py"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sinkutils as su
from sinkutils.measuring.report import Report
from sinkutils.study.record import Record

PAGE = Path(__file__).with_name("api.md")
OPENING = """# Every public name

Each of them is an attribute of `sinkutils`, and loads on first use. What `measure` and `record`
return is described at the end. The commands describe themselves: `python -m sinkutils --help`.
This page is made from the docstrings, by `docs/api.py`.
"""
RETURNED = (Report, Record)


def signature(name: str, value: Any) -> str:
    """The signature as one writes it, with an argument a line where it is long."""
    arguments = inspect.signature(value)
    written, named_only = [], False
    for parameter in arguments.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named_only:
            named_only = True
            written.append("*")
        if dataclasses.is_dataclass(parameter.default):  # its defaults, which stand elsewhere
            parameter = parameter.replace(default=Default(f"{type(parameter.default).__name__}()"))
        written.append(str(parameter))
    returned = arguments.return_annotation
    arrow = f" -> {returned}" if isinstance(returned, str) and not inspect.isclass(value) else ""
    line = f"{name}({', '.join(written)}){arrow}"
    if len(line) > 88:
        line = "\n".join([f"{name}(", *(f"    {argument}," for argument in written), f"){arrow}"])
    return re.sub(r""": (["'])(.*?)\1""", r": \2", line)  # annotations are strings


class Default(str):
    """Of an argument, as it is to be shown."""

    __repr__ = str.__str__


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The public functions and properties of a class, or what a module names as public."""
    for name in getattr(value, "__all__", vars(value)):
        member = vars(value)[name]
        is_code = (
            isinstance(member, property) or inspect.isroutine(member) or inspect.isclass(member)
        )
        if is_code and member.__doc__ and not name.startswith("_"):
            yield name, member


def entry(heading: str, name: str, value: Any) -> str:
    """A heading, the signature of what can be called, and the docstring as it is written."""
    parts = [f"{heading} `{name}`"]
    if callable(value):
        parts.append(f"```python\n{signature(name.rpartition('.')[2], value)}\n```")
    if value.__doc__:
        parts.append(f"```text\n{inspect.getdoc(value)}\n```")
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The whole page."""
    entries = [OPENING]
    shown = [(name, getattr(su, name)) for name in su.__all__]
    shown += [(kind.__name__, kind) for kind in RETURNED]
    for name, value in shown:
        entries.append(entry("##", name, value))
        if inspect.isclass(value) or inspect.ismodule(value):
            for member, inner in members(value):
                entries.append(entry("###", f"{name}.{member}", inner))
    return "\n".join(entries)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
