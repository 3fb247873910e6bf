"""Operators with an ordered effect (a print, a counter, a callback): torch's selective checkpoints
keep what they return, unless a policy says MUST_RECOMPUTE, so that no effect comes twice (2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from gradckpt._engine import torch_private as private

#: How many operators torch had when it was last read, and those with an effect.
_read: tuple[int, frozenset[Any]] = (0, frozenset())


def with_effect() -> frozenset[Any]:
    """Return the operators of which a selective region keeps the outputs without being asked.

    Raw collectives of c10d, which return a handle, are not among them, as in torch.
    """
    global _read
    known = private.operator_entries()
    if len(known) != _read[0]:
        names = [name for name, entry in known.items() if entry.effect.effect is not None]
        _read = len(known), frozenset(op for op in map(_overload, names) if op is not None)
    return _read[1]


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace in ("c10d", "higher_order"):
        return None
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return None if op is None or any(arg.alias_info is not None for arg in op._schema.arguments) else op
