"""What operators return, by their meta kernels: :func:`meta_results`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["map_tensors", "meta_results", "tensors_in"]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_in(x)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def map_tensors(function: Any, tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, x) for x in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, x) for key, x in tree.items()}
    return tree


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


#: What operators returned on meta, by their operands' shapes: blocks of a model repeat them.
_seen: dict[Any, Any] = {}
_MOST_SEEN = 2**14


def meta_results(func: Any, args: Any, kwargs: Any) -> Any:
    key: Any = func, _frozen(args), _frozen(kwargs)
    try:
        found = _seen.get(key, _seen)
    except TypeError:  # an argument that has no hash
        return func(*map_tensors(_meta, args), **_meta_options(map_tensors(_meta, kwargs)))
    if found is _seen:
        found = func(*map_tensors(_meta, args), **_meta_options(map_tensors(_meta, kwargs)))
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[key] = found
    return found


def _frozen(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.size(), tree.stride(), tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple([_frozen(x) for x in tree])
    if isinstance(tree, dict):
        return tuple([(key, _frozen(x)) for key, x in tree.items()])
    return type(tree), tree  # 1, 1.0 and True are equal


def _meta_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {"device": torch.device("meta"), "pin_memory": False, "generator": None}
    return {name: changed.get(name, value) if value is not None else None for name, value in kwargs.items()}
