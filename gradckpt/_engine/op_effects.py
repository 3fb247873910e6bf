"""Operators with an ordered effect (a print, a counter, a callback): torch's selective checkpoints
keep what they return, unless a policy says MUST_RECOMPUTE, so that no effect comes twice (2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from gradckpt._engine import torch_private as private

#: All effects and the operators that have one, as torch was last read.
_read: tuple[list[Any], frozenset[Any]] = ([], frozenset())


def with_effect() -> frozenset[Any]:
    """Return the operators of which :func:`has_effect` says yes.

    It is read again when torch knows others: an effect may be registered at any time.
    """
    global _read
    effects = private.operator_effects()
    if effects != _read[0]:
        known = map(_overload, private.names_with_effect())
        _read = effects, frozenset(op for op in known if op is not None and has_effect(op))
    return _read[1]


def has_effect(op: Any) -> bool:
    """Return whether a selective region keeps the operator's outputs without being asked.

    Raw collectives of c10d, which return a handle, are not among them, as in torch.
    """
    if not private.has_effect(getattr(op, "_name", "")) or op.namespace == "c10d":
        return False
    return not any(arg.alias_info is not None for arg in op._schema.arguments)


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace == "higher_order":
        return None
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
