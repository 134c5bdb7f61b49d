"""What is done to a model while it is measured, and how all of it is undone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# A model is put in another state while it is measured, and models share configurations.
ONE_AT_A_TIME = threading.RLock()


class LeftAsFound:
    """Undoes what was done to a model when its context ends. Enter it twice, in one line:

        with ONE_AT_A_TIME, state, state:

    An interrupt (^C) can come at any line, also while things are put back. Then the outer context
    puts them back once more. For that, every step is noted before the change that it undoes, and
    a step can be repeated. Entering changes nothing.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    def __enter__(self) -> LeftAsFound:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.steps):
            undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object or a class."""
        if isinstance(owner, type) and name not in vars(owner):  # it is inherited
            undo = partial(_forget, owner, name)
        else:
            undo = partial(setattr, owner, name, getattr(owner, name))
        self.steps.append(undo)
        setattr(owner, name, value)

    def evaluate(self, model: nn.Module) -> None:
        """Put every module in eval mode, and compute no gradients."""
        self.steps.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(False)
        # A frozen part may be in another mode than the whole: each module gets its own back.
        # Not by `model.eval()`: a class may do more there, such as merging its adapters.
        modes = [(module, module.training) for module in model.modules()]
        self.steps.append(partial(_set_modes, modes))
        _set_modes([(module, False) for module, _ in modes])

    def hook(self, hooks: Any, hook: Callable[..., Any], *, with_kwargs: Any = None) -> None:
        """Add a hook to those of a module, `module._forward_hooks` for instance.

        This is what `register_forward_hook` does, except that an interrupt cannot come between
        the registration and the note of how to undo it. with_kwargs: the module's table of the
        hooks that also take keyword arguments, if this one does.
        """
        tables = () if with_kwargs is None else with_kwargs
        handle = RemovableHandle(hooks, extra_dict=tables)
        self.steps.append(handle.remove)
        if with_kwargs is not None:
            with_kwargs[handle.id] = True
        hooks[handle.id] = hook


def _forget(owner: type, name: str) -> None:
    """Delete what a class did not define itself."""
    if name in vars(owner):
        delattr(owner, name)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        vars(module)["training"] = training
