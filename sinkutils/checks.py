"""Checks of arguments: a ValueError names the argument, what it must be and what it was."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

import numpy as np
import torch


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def short(value: Any) -> str:
    """A value as a message shows it: one line, and of a long one the beginning."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 60 else line[:58] + " …"


def integer(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """An integer in least..most, as Python's own; True and False are not integers here."""
    # NumPy's integers count: our own frames hand them out, and neither JSON nor PyTorch takes them.
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole:
        raise ValueError(f"{name} must be an integer, got {short(value)}")
    if not least <= value <= most:
        wanted = f"at least {least}" if most == math.inf else f"in {least}..{most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def integers(name: str, values: Any, least: int, most: float = math.inf) -> list[int]:
    """Several integers in least..most, as a list."""
    require(isinstance(values, Iterable), f"{name} must be several integers, got {short(values)}")
    return [integer(f"each of {name}", value, least, most) for value in values]


def real(name: str, value: Any, wanted: str, least: float = 0.0, more: bool = False) -> None:
    """A finite number of at least so much, or of `more` than that; `wanted` says it in words."""
    number = math.nan  # which no comparison holds for
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    enough = number > least if more else number >= least
    if not enough or number == math.inf:
        raise ValueError(f"{name} must be {wanted}, got {short(value)}")


def choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of the names allowed."""
    require(
        isinstance(value, str) and value in allowed,
        f"{name} must be one of {', '.join(allowed)}; got {value!r}",
    )


def instance(name: str, value: Any, kind: type) -> None:
    """A value of that type."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be of type {kind.__name__}, got {type(value).__name__}: {short(value)}"
        )


@lru_cache
def types(cls: Any) -> dict[str, tuple[Any, ...]]:
    """The type of each field of a dataclass and what else it takes; annotations are strings."""
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(cls).items()}


def fields(config: Any, **least: float) -> None:
    """Every field of a dataclass by its type: integers of at least 1, floats of at least 0.

    least: another least number, by field. A type may be one with None; of a tuple every element is
    checked. Numbers of NumPy become Python's own, of which JSON can be made.
    """
    for name, (kind, *others) in types(config.__class__).items():
        value = getattr(config, name)
        if value is None and type(None) in others:
            continue
        several = ... in others  # tuple[int, ...]
        if several:
            instance(name, value, tuple)
        elements = []
        for element in value if several else (value,):
            if isinstance(element, np.generic):
                element = element.item()
            if kind is int:
                integer(name, element, int(least.get(name, 1)))
            elif kind is float:
                wanted = "finite" if name in least else "finite and not negative"
                real(name, element, wanted, least.get(name, 0.0))
            else:
                instance(name, element, kind)
            elements.append(element)
        value = tuple(elements) if several else elements[0]
        object.__setattr__(config, name, value)  # as the config is frozen


def first_line(error: BaseException) -> str:
    """What went wrong, on one line: the kind of the error and the beginning of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """A list, array or tensor of numbers as floats."""
    try:
        (_,) = np.shape(values)
        return tuple(map(float, values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a sequence of numbers, got {short(values)}") from error


def device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None is CUDA where there is one, else the CPU.

    Raises ValueError for a name that PyTorch does not know or a GPU that is
    not there: nothing asked for on a GPU runs on the CPU instead.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = f"device must be cpu, cuda, cuda:0, .. or mps; got {str(name)!r}"
    try:
        target = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(wanted) from error
    require(target.type in ("cpu", "cuda", "mps", "xpu"), wanted)
    if target.type != "cpu":
        count = torch.get_device_module(target).device_count()
        there = (target.index or 0) < count
        require(there, f"{wanted}, but PyTorch sees {count} of that kind here")
    return target
