"""Keywords of :func:`gradckpt.checkpoint` beside those of the function that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CHOICES", "FLAGS", "OPTIONS", "own_keywords", "unbound"]

FLAGS = ("preserve_rng_state", "early_stop", "debug")
CHOICES = {"determinism_check": ("default", "none"), "buffers": ("once", "torch")}
OPTIONS = ("compress", "context_fn", "policy", *FLAGS, *CHOICES)

#: Keywords that gradckpt.checkpoint would take for its own.
TAKEN = frozenset({*OPTIONS, "function", "use_reentrant"})


def own_keywords(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function with those of its keywords, taken out of ``kwargs``, that gradckpt.checkpoint has names for."""
    if kwargs and not TAKEN.isdisjoint(kwargs):
        return functools.partial(function, **{key: kwargs.pop(key) for key in TAKEN & kwargs.keys()})
    return function


def unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Take the tensors that require grad out of what a functools.partial binds by keyword.

    transformers calls a layer's checkpointing function with the layer's keywords bound, hidden states among them.
    """
    if not isinstance(function, functools.partial):
        return function, {}
    tensors = {
        key: value
        for key, value in function.keywords.items()
        if isinstance(value, torch.Tensor) and value.requires_grad and key not in TAKEN
    }
    if not tensors:
        return function, {}
    rest = {key: value for key, value in function.keywords.items() if key not in tensors}
    return functools.partial(function.func, *function.args, **rest), tensors
