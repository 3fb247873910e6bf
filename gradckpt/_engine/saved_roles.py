"""Which of the tensors that compress_saved() may encode need values to be looked at.

The table of all of them is in C (csrc/engine/saved/saved_node.c), which calls these functions.
"""

from __future__ import annotations

from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private

#: False while a step on paper stands for one on a GPU, where reading values would synchronize.
are_rows_read = True


def table() -> str:
    """Return the table of what a lossy codec encodes: node, argument, operators, and how."""
    rows = [(node, argument, family or "any", how) for node, argument, family, how in _C.saved_roles()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{node:{widths[0]}}  {argument:{widths[1]}}  {family:{widths[2]}}  {how}"
        for node, argument, family, how in rows
    )


def rows_are_alike(node: Any, x: torch.Tensor, values: int) -> bool:
    """Return whether groups of 128 values can hold several rows of ``x`` without one vanishing
    beside another.

    ``node`` is the norm that saves it, and a row is ``values`` values under one mean and scale.
    """
    if _kept(node, "result1") is None:
        return False
    rows = x.detach().reshape(-1, values)
    touching = min(127 // rows.shape[1] + 2, rows.shape[0])  # rows that share a group
    variance, mean = torch.var_mean(rows.float(), 1, correction=0)
    largest = torch.nn.functional.max_pool1d((variance + mean.square())[None], touching, 1)
    least = -torch.nn.functional.max_pool1d(-variance[None], touching, 1)
    alike = largest < 16 * least  # false for rows that are not finite or have no spread
    return are_rows_read and _holds(alike)


def _kept(node: Any, *arguments: str) -> torch.Tensor | None:
    """Return the uncompressed tensor that the node saves through ``compress_saved()``.

    It returns None where outer hooks hold the tensor. Unpacking it there may recompute a region,
    which gets other values than its forward but must make the same choice.
    """
    names = [f"_raw_saved_{argument}" for argument in arguments]
    raw = next((getattr(node, name) for name in names if hasattr(node, name)), None)
    data = getattr(raw, "data", None)
    value = getattr(getattr(data, "packed", data), "value", None)  # other hooks may hold it in an object of theirs
    return value if isinstance(value, torch.Tensor) else None


def _holds(condition: torch.Tensor) -> bool:
    """Return whether it holds everywhere; on paper, where values are assumed to be ordinary, it
    does.
    """
    everywhere = condition.all()
    return _C.on_paper() or bool(everywhere)


def nodes_behind(result: Any) -> list[Any]:
    """Return the nodes that made a function's results."""
    tensors = (leaf for leaf in private.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return [x.grad_fn for x in tensors if x.grad_fn is not None]
