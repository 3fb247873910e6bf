"""Catch named operators in regions by C kernels on a dispatch key that passes others on cheaply."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._engine.torch_objects import unseen_views

_OpOverload = type(torch.ops.aten.mm.default)

_KEY = "Negative"
_lock = threading.Lock()
_begun: set[Any] = set()
_caught: set[Any] = set()
_libraries: dict[str, torch.library.Library] = {}  # by namespace


def is_catchable(op: Any) -> bool:
    """Return whether C kernels can catch the operator.

    Views, and operators that have a kernel of torch's on the key, need a mode.
    """
    if not isinstance(op, _OpOverload) or any(arg.alias_info is not None for arg in op._schema.arguments):
        return False
    name = op.name()
    known = private.has_kernel(name)  # False for TorchScript's own operators, which nothing can call
    return op in _caught or not (known and private.has_kernel_for_key(name, _KEY))


#: Operators whose kernels call others and write into the results unseen by version counters: a kept
#: output would change. Our kernels replace them, so that no region sees the operators they call, as
#: under torch's modes. Operators that write only into memory they allocated are not listed.
WRITING_KERNELS = (
    *("_embedding_bag", "_euclidean_dist", "_linalg_det", "_linalg_slogdet", "allclose", "logsumexp", "mvlgamma"),
    *("binary_cross_entropy_with_logits", "renorm", "rot90"),
)


def catch(policy: Any) -> None:
    """Register the kernels of a policy's operators, once in a process.

    With the first policy that keeps outputs, those of :data:`unseen_views` too. They do nothing
    while no region names their operator. At interpreter exit torch removes them. Threads that still
    run then get torch's own fallback.
    """
    if policy.caught:
        return
    if _C.selective_key() is None:
        return _say_modes_only()
    with _lock:
        first = () if _caught else (getattr(torch.ops.aten, name).default for name in WRITING_KERNELS)
        for op in (*first, *(unseen_views if policy.keeps_outputs else ()), *policy.rules):
            if op not in _caught:
                _register(op)
    policy.caught = True


def _register(op: Any) -> None:
    if op.namespace not in _libraries:
        _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
    again = op in _begun or op in unseen_views  # begun: an interrupt came before the line that notes it
    _begun.add(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own kernel for a view only passes it on
        _libraries[op.namespace].impl(op, _C.catcher(op), _KEY, allow_override=again)
    _caught.add(op)


@functools.cache
def _say_modes_only() -> None:
    logging.getLogger("gradckpt").info(
        "gradckpt: the dispatch key Negative has no fallback in this torch; named operators take a dispatch mode, "
        "which costs more host time"
    )
