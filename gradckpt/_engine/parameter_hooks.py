"""Hooks of parameters during a backward that runs inside a backward.

SelectiveRecompute differentiates a region by a backward of its own and passes the gradients of
parameters on to the backward around it. Where the inner backward captures the gradient of a
parameter, torch's engine calls the parameter's hooks, which are meant for the final sum. So each
hook is put into an object that skips the call during an inner backward. The objects stay: the
engine reads the dictionary of hooks at each call without a lock of ours, so its content must be
right at any time. Nothing is ever removed from the engine's own list.

A C++ hook has no such dictionary and is called for each region too.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private

#: Graph tasks of inner backwards that are running.
_inner: set[int] = set()


class GuardedHook:
    """A hook of a parameter that an inner backward skips."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, grad: torch.Tensor) -> Any:
        if _inner and private.graph_task_id() in _inner:
            return None
        return self.hook(grad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hook, name)  # its __name__, and the marks of torch.utils.hooks

    def __reduce__(self) -> Any:
        return GuardedHook, (self.hook,)

    def __repr__(self) -> str:
        return repr(self.hook)


class GuardedHooks(collections.OrderedDict[int, Any]):
    """The hooks of one parameter. Hooks registered later are guarded too."""

    __slots__ = ()

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook if type(hook) is GuardedHook else GuardedHook(hook))


def capture(
    run_backward: Callable[..., tuple[torch.Tensor | None, ...]],
    roots: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs, without calling the parameters' hooks."""
    for parameter in parameters:
        hooks = parameter._backward_hooks
        if hooks is not None and type(hooks) is not GuardedHooks:
            _C.guard_hooks(hooks, GuardedHooks, GuardedHook)
    tasks: set[int] = set()

    def enter(_: Any) -> None:
        """Record the number of the inner graph task before any gradient reaches a parameter.

        The engine reports this number nowhere else.
        """
        if not tasks:
            tasks.add(private.graph_task_id())
            _inner.update(tasks)

    with torch.enable_grad():  # a root that is a parameter itself has no node to hook
        roots = tuple(root if root.grad_fn is not None else root.view_as(root) for root in roots)
    handles = [root.grad_fn.register_prehook(enter) for root in roots if root.grad_fn is not None]
    try:
        return run_backward(roots, grads, False, False, inputs, True, False)
    finally:
        for handle in handles:
            handle.remove()
        _inner.difference_update(tasks)
