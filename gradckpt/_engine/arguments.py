"""Keywords of :func:`gradckpt.checkpoint` beside those of the function that it runs."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from gradckpt._config import instead_of

__all__ = ["CHOICES", "FLAGS", "OPTIONS", "note_keyword", "own_keywords", "unbound"]

FLAGS = ("preserve_rng_state", "early_stop", "debug")
CHOICES = {"determinism_check": ("default", "none"), "buffers": ("once", "torch")}
OPTIONS = ("compress", "context_fn", "policy", *FLAGS, *CHOICES)

#: Keywords that gradckpt.checkpoint takes for its own.
TAKEN = frozenset({*OPTIONS, "function", "use_reentrant"})


def own_keywords(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Bind to the function those of ``kwargs`` that :func:`gradckpt.checkpoint` would take for its
    own. They are removed from ``kwargs``.
    """
    if kwargs and not TAKEN.isdisjoint(kwargs):
        return functools.partial(function, **{key: kwargs.pop(key) for key in TAKEN & kwargs.keys()})
    return function


def note_keyword(error: TypeError, kwargs: dict[str, Any]) -> None:
    """Add a note to the error of a function that rejects a keyword, if it was perhaps meant for
    :func:`gradckpt.checkpoint`, which passes on what it does not know.
    """
    with contextlib.suppress(Exception):  # an error that cannot be read is still the function's
        for key in re.findall(r"got an unexpected keyword argument '(\w+)'", str(error)):
            instead = instead_of(key, kwargs[key], OPTIONS) if key in kwargs else None
            if instead is None:
                continue
            note = (
                f"gradckpt: checkpoint() passed {key!r} on to the function; did you mean {instead}? "
                "help(gradckpt.checkpoint) lists all"
            )
            if note not in getattr(error, "__notes__", ()):  # of a region inside
                error.add_note(note)


def unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Take the tensors that require grad out of what a functools.partial binds by keyword.

    transformers binds a layer's keywords, hidden states among them, to the function that it
    checkpoints.
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
