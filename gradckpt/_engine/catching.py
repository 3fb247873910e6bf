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
#: The key as higher-order operators know it, or None where torch does not tell.
_key: Any = None if isinstance(private.DispatchKey, private.Missing) else getattr(private.DispatchKey, _KEY)
_lock = threading.Lock()
_begun: set[Any] = set()
_caught: set[Any] = set()
_watching = False  # the operators that may change a kept output are among them
_libraries: dict[str, torch.library.Library] = {}  # by namespace


def is_catchable(op: Any) -> bool:
    """Return whether C kernels can catch the operator.

    Views, and operators that have a kernel of torch's on the key, need a mode.
    """
    if isinstance(op, private.HigherOrderOperator):
        return op in _caught or (_key is not None and not op.has_kernel_for_dispatch_key(_key))
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


def _writers() -> list[Any]:
    """Return the operators that change their first argument, and those that return views of it with
    a version counter of their own.

    ``copy_`` and the overloads with ``out=`` are not among them: what these write makes a kept
    output run again.
    """
    found = list(unseen_views)
    for name in private.all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or not base.endswith("_") or base.startswith(("_foreach", "_fused", "_amp", "__")):
            continue
        known = private.has_kernel(name) and not private.has_kernel_for_key(name, _KEY)
        if known and not private.has_kernel_for_key(name, "CompositeImplicitAutograd"):
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if op._schema.is_mutable and op._schema.arguments[0].name == "self":
                found.append(op)
    return found


def catch(policy: Any) -> None:
    """Register the kernels of a policy's operators, once in a process.

    With the first policy that keeps outputs, those of operators that may change a kept output, too.
    They do nothing while no region names their operator. At interpreter exit torch removes them.
    Threads that still run then get torch's own fallback.
    """
    if policy.caught:
        return
    if _C.selective_key() is None:
        return _say_modes_only()
    global _watching
    with _lock:
        _let_higher_order_operators_pass()
        first = () if _caught else (getattr(torch.ops.aten, name).default for name in WRITING_KERNELS)
        more = _writers() if policy.keeps_outputs and not _watching else ()
        for op in (*first, *policy.rules):
            _register(op)
        if more:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own kernel for a view only passes it on
                for op in more:
                    _register(op, op in unseen_views)
        _watching |= policy.keeps_outputs
    policy.caught = True


def _let_higher_order_operators_pass() -> None:
    """Let those that no policy names ignore the key, as other operators do by torch's fallback.

    torch has none for them: each has a set of the keys that it obeys. Those that are made later
    read a list of the keys that none obeys.
    """
    if _key is not None and _key not in private.higher_order_fallthrough:
        private.higher_order_fallthrough.append(_key)
        for op in list(private.higher_order_operators.values()):
            if not op.has_kernel_for_dispatch_key(_key):
                op.fallthrough(_key)


def _register(op: Any, override: bool = False) -> None:
    if isinstance(op, private.HigherOrderOperator):
        if not op.has_kernel_for_dispatch_key(_key):
            op.py_impl(_key)(_C.catcher(op))
        _caught.add(op)
    if op not in _caught:
        if op.namespace not in _libraries:
            _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
        override |= op in _begun  # an interrupt came before the line that notes it
        _begun.add(op)
        _libraries[op.namespace].impl(op, _C.catcher(op), _KEY, allow_override=override)
        _caught.add(op)


@functools.cache
def _say_modes_only() -> None:
    logging.getLogger("gradckpt").info(
        "gradckpt: the dispatch key Negative has no fallback in this torch; named operators take a dispatch mode, "
        "which costs more host time"
    )
