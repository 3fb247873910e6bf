"""A walk through a graph of autograd: :func:`leaves_behind`, :func:`reaches_before`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def leaves_behind(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves that the gradients of these tensors flow to."""
    for node in _nodes_behind(roots):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable


def reaches_before(roots: Iterable[torch.Tensor], number: int) -> bool:
    """Return whether gradients flow to nodes that were made before the one of this number."""
    return any(node._sequence_nr() < number for node in _nodes_behind(roots))


def _nodes_behind(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    seen: set[Any] = set()
    nodes = [x.grad_fn for x in roots if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [each for each, _ in node.next_functions if each is not None]
