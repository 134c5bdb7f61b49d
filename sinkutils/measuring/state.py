"""Changing a model while it is measured, and undoing all changes afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# Measuring changes the state of a model, and different models may share a configuration. So only
# one thread measures at a time.
ONE_AT_A_TIME = threading.RLock()


class LeftAsFound:
    """A context that undoes all changes to a model when it ends. Enter it twice, in one line:

        with ONE_AT_A_TIME, state, state:

    An interrupt (^C) can come at any line, even while the inner context undoes the changes. The
    outer context then undoes them again. This works because every undo step is noted before its
    change is made, and can be repeated. Entering the context changes nothing.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []  # undo steps, run in reverse order

    def __enter__(self) -> LeftAsFound:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.steps):
            undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object or a class until the context ends."""
        if isinstance(owner, type) and name not in vars(owner):  # the class inherits it
            undo = partial(_forget, owner, name)
        else:
            undo = partial(setattr, owner, name, getattr(owner, name))
        self.steps.append(undo)
        setattr(owner, name, value)

    def evaluate(self, model: nn.Module) -> None:
        """Put every module in eval mode, and switch gradients off."""
        self.steps.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(False)
        # Modules may be in different modes (a frozen part, for instance), so we note each one's.
        # We do not call `model.eval()`: a class may do more there, such as merging its adapters.
        modes = [(module, module.training) for module in model.modules()]
        self.steps.append(partial(_set_modes, modes))
        _set_modes([(module, False) for module, _ in modes])

    def hook(self, hooks: Any, hook: Callable[..., Any], *, with_kwargs: Any = None) -> None:
        """Add a hook to a module's table of hooks, for instance `module._forward_hooks`.

        It does the same as `register_forward_hook`, but notes how to remove the hook before it adds
        it: no interrupt can come in between.
        with_kwargs: the module's table of hooks that also take keyword arguments, if this one does.
        """
        tables = () if with_kwargs is None else with_kwargs
        handle = RemovableHandle(hooks, extra_dict=tables)
        self.steps.append(handle.remove)
        if with_kwargs is not None:
            with_kwargs[handle.id] = True
        hooks[handle.id] = hook


def _forget(owner: type, name: str) -> None:
    """Delete an attribute that we set on a class, so that it inherits the attribute again."""
    if name in vars(owner):
        delattr(owner, name)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Set each module's mode: True for training, False for eval."""
    for module, training in modes:
        vars(module)["training"] = training
