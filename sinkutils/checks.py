"""Checks of arguments: each raises ValueError that names the argument, what it must be and what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import numpy as np
import torch


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_count(value: Any) -> bool:
    """Whether this is an integer of at least 1; True is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def integer(name: str, value: Any, least: int, most: float = math.inf) -> None:
    """An integer in least..most; True and False are not integers here."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    wanted = f"must be at least {least}" if most == math.inf else f"must be in {least}..{most}"
    require(whole, f"{name} must be an integer, got {value!r}")
    require(least <= value <= most, f"{name} {wanted}, got {value}")


def real(name: str, value: Any, wanted: str, low: float = 0.0, high: float = math.inf, ends: str = "") -> None:
    """A finite number between low and high, `ends` ("low", "high", "both") included; `wanted` says it in words."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    inside = number and (
        low < value < high or (value == low and ends in ("low", "both")) or (value == high and ends in ("high", "both"))
    )
    require(inside, f"{name} must be {wanted}, got {value!r}")


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """One of the names allowed."""
    require(isinstance(value, str) and value in allowed, f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def flag(name: str, value: Any) -> None:
    """True or False."""
    require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def instance(name: str, value: Any, kind: type) -> None:
    """A value of that type."""
    require(isinstance(value, kind), f"{name} must be of type {kind.__name__}, got {value!r}")


@lru_cache
def types(cls: Any) -> dict[str, tuple[Any, ...]]:
    """The type of each field of a dataclass, with what else it takes; annotations are strings here."""
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(cls).items()}


def fields(config: Any, **least: int) -> None:
    """Every field of a dataclass by its type: integers of at least 1 (or `least`), floats that are not negative.

    A type may be one with None; of tuples every element is checked.
    """
    for name, (kind, *others) in types(config.__class__).items():
        value = getattr(config, name)
        if value is None and type(None) in others:
            continue
        if ... in others:
            instance(name, value, tuple)
        for one in value if ... in others else (value,):
            if kind is int:
                integer(name, one, least.get(name, 1))
            elif kind is float:
                real(name, one, "finite and not negative", ends="low")
            else:
                instance(name, one, kind)


def first_line(error: BaseException) -> str:
    """What went wrong, on one line: the kind of the error and the beginning of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """A list, array or tensor of numbers as floats."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise ValueError(f"{name} must be a sequence of numbers, got {values!r}")
    return tuple(array.astype(float).tolist())


def device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None is CUDA where there is one, else the CPU.

    Raises ValueError for a name that PyTorch does not know or a GPU that is not there: nothing asked for on a GPU
    runs on the CPU instead.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = "device must be cpu, cuda, cuda:0, .. or mps"
    try:
        target = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{wanted}; got {name!r}") from error
    has_weights = target.type in ("cpu", "cuda", "mps", "xpu")
    require(has_weights, f"{wanted}, where a model has weights; got {name!r}")
    if target.type != "cpu":
        module = torch.get_device_module(target)
        count = module.device_count() if module.is_available() else 0
        seen = f"PyTorch sees {count or 'none'} of that kind here: give another, or cpu"
        require((target.index or 0) < count, f"device {str(name)!r} was asked for, but {seen}")
    return target
