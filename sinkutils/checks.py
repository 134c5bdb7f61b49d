"""Checks of arguments.

Each raises `Refused`, a ValueError that names the argument, says what it must be and shows what it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    import torch


class Refused(ValueError):
    """An error of the user's input: the message says what is wrong, and what there is instead.

    The command line prints it in one line. Any other ValueError may be a mistake of ours, and keeps
    its traceback.
    """


def require(condition: bool, message: str) -> None:
    """Raise `Refused` with the message unless the condition holds."""
    if not condition:
        raise Refused(message)


def short(value: Any) -> str:
    """The value as an error message shows it: on one line, cut after about 60 characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 60 else line[:58] + " …"


def integer(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Check that a value is an integer in least..most, and return it as a Python int.

    True and False are refused.
    """
    # NumPy integers are accepted, because our own data frames hold them. They are converted,
    # because neither JSON nor PyTorch accepts them.
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole:
        raise Refused(f"{name} must be an integer, got {short(value)}")
    if not least <= value <= most:
        wanted = f"at least {least}" if most == math.inf else f"in {least}..{most}"
        raise Refused(f"{name} must be {wanted}, got {value}")
    return int(value)


def integers(name: str, values: Any, least: int, most: float = math.inf) -> list[int]:
    """Check that all values are integers in least..most, and return them as a list."""
    require(isinstance(values, Iterable), f"{name} must be several integers, got {short(values)}")
    return [integer(f"each of {name}", value, least, most) for value in values]


def real(name: str, value: Any, wanted: str, least: float = 0.0, more: bool = False) -> None:
    """Check that a value is a finite number of at least `least`, or, if `more`, greater than it.

    wanted: the condition in words, for the message.
    """
    number = math.nan  # every comparison with nan is false
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    enough = number > least if more else number >= least
    if not enough or number == math.inf:
        raise Refused(f"{name} must be {wanted}, got {short(value)}")


def choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check that a value is one of the allowed names."""
    require(
        isinstance(value, str) and value in allowed,
        f"{name} must be one of {', '.join(allowed)}; got {value!r}",
    )


def instance(name: str, value: Any, kind: type) -> None:
    """Check that a value is an instance of `kind`."""
    if not isinstance(value, kind):
        raise Refused(
            f"{name} must be of type {kind.__name__}, got {type(value).__name__}: {short(value)}"
        )


@lru_cache
def types(cls: Any) -> dict[str, tuple[Any, ...]]:
    """For each field of a dataclass, the types that its annotation allows.

    int -> (int,), int | None -> (int, None's type), tuple[int, ...] -> (int, ...), and for
    Literal["a", "b"] its values, ("a", "b"). The annotations are strings, which `get_type_hints`
    evaluates.
    """
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(cls).items()}


def fields(config: Any, **least: float) -> None:
    """Check every field of a config, a frozen dataclass, against its annotated type.

    An integer must be at least 1 and a float at least 0, unless `least` gives another bound for the
    field. None is accepted where the annotation allows it. Of a tuple every element is checked.
    NumPy numbers are replaced by Python's own, so that the config can be written as JSON.
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
            if type(element).__module__ == "numpy" and hasattr(element, "item"):
                element = element.item()
            if isinstance(kind, str):
                choice(name, element, (kind, *others))
            elif kind is int:
                integer(name, element, int(least.get(name, 1)))
            elif kind is float:
                wanted = "finite" if name in least else "finite and not negative"
                real(name, element, wanted, least.get(name, 0.0))
            else:
                instance(name, element, kind)
            elements.append(element)
        value = tuple(elements) if several else elements[0]
        object.__setattr__(config, name, value)  # a frozen dataclass refuses config.name = value


def first_line(error: BaseException) -> str:
    """An error on one line: its type and the first 200 characters of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Check that values is a list, array or tensor of numbers, and return them as floats."""
    import numpy as np

    try:
        (_,) = np.shape(values)  # one dimension
        return tuple(map(float, values))
    except (TypeError, ValueError) as error:
        raise Refused(f"{name} must be a sequence of numbers, got {short(values)}") from error


def device(name: str | torch.device | None) -> torch.device:
    """The device of this name. None chooses CUDA if it is available, and the CPU otherwise.

    Raises ValueError for a name that PyTorch does not know, and for a GPU that does not exist. A
    computation that is meant for a GPU never falls back to the CPU.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = f"device must be cpu, cuda, cuda:0, .. or mps; got {str(name)!r}"
    try:
        target = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise Refused(wanted) from error
    require(target.type in ("cpu", "cuda", "mps", "xpu"), wanted)
    if target.type != "cpu":
        count = torch.get_device_module(target).device_count()
        there = (target.index or 0) < count
        require(there, f"{wanted}, but PyTorch sees {count} of that kind here")
    return target


def launched() -> tuple[int, int]:
    """The rank of this process, from 0, among those that a launcher has started, and their number.

    A launcher, such as torchrun, sets four variables. One that is left over from elsewhere does not
    count. Without a launcher the result is (0, 1).
    """
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
