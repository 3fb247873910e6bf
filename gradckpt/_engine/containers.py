"""Containers of tensors: :func:`holds_still`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradckpt._engine import torch_private as private


def holds_still(tree: Any, leaves: Sequence[Any], spec: Any) -> bool:
    """Return whether containers have the leaves and the structure that they had: a call has not
    written into them.
    """
    now, structure = private.tree_flatten(tree)
    return structure == spec and len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))
