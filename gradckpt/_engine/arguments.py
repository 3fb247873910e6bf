"""Keywords of :func:`gradckpt.checkpoint` beside those of the function that it runs, and what is
bound to that function.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import torch

from gradckpt._compression import instead_of, written

FLAGS = ("preserve_rng_state", "early_stop", "debug")
#: A flag, too; None: as torch does by default.
HOOKS_SEE_KEPT = "respect_saved_tensors_hooks"
CHOICES = {"determinism_check": ("default", "warn", "none"), "buffers": ("once", "torch")}
OPTIONS = ("compress", "context_fn", "policy", *FLAGS, HOOKS_SEE_KEPT, *CHOICES)

#: Keywords that gradckpt.checkpoint takes for its own.
TAKEN = frozenset({*OPTIONS, "function", "offload", "use_reentrant"})


def check_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"gradckpt: {key} is True or False, not {written(value)}")
    return value


def check_int(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"gradckpt: {key} is an int, not {written(value)}")
    if value < least:
        raise ValueError(f"gradckpt: {key} is {least} or more, not {value}")
    return value


def check_option(key: str, value: Any) -> None:
    """Check the value of a keyword of :func:`gradckpt.checkpoint` where a model is enabled, not in
    its first step.

    Raises:
        ValueError, TypeError: It is none that the keyword takes.
    """
    if key in FLAGS or (key == HOOKS_SEE_KEPT and value is not None):
        check_bool(key, value)
    if key in CHOICES and value not in CHOICES[key]:
        *first, last = map(json.dumps, CHOICES[key])
        raise ValueError(f"gradckpt: {key} is {', '.join(first)} or {last}, not {value!r}")
    if key == "context_fn" and not callable(value):
        raise TypeError(f"gradckpt: context_fn is a function that returns two context managers, not {value!r}")


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


def without_partials(function: Any) -> Any:
    """Return the function inside functools.partial, of which several may lie around one another."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Return what messages call a region's function: its name, or the class of a module."""
    function = without_partials(function)
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def module_behind(function: Any) -> torch.nn.Module | None:
    """Return the module behind a bound method or partial, or None where it cannot be seen."""
    function = without_partials(function)
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


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


def need_grad(*values: Any) -> bool:
    """Return whether a tensor in these requires grad.

    In eval mode a module is a region for them: a frozen critic, or a classifier that guides a
    sampler, through which gradients pass. An evaluation has no grad.
    """
    for x in values:
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                return True
        elif isinstance(x, dict):
            if need_grad(*x.values()):
                return True
        elif isinstance(x, (tuple, list)) and need_grad(*x):
            return True
    return False
