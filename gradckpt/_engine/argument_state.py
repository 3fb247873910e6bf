"""State of a region's arguments that is neither values nor layout: attributes of tensors, and what
pytree drops of containers. A restored argument gets it back.

C calls this for the rare argument that has any. Only plain values may be carried to another object:
a tensor, or an object of unknown kind, might refer to what is being compressed.
"""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

from gradckpt._engine import torch_private as private

_SCALARS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_SEQUENCES = frozenset((tuple, list, set, frozenset, torch.Size))

#: A container inside an argument, by the positions of its children, with its attributes.
State = list[tuple[tuple[int, ...], dict[str, Any]]]


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in _SCALARS or isinstance(value, enum.Enum):
        return True
    if depth > 20:  # it may contain itself
        return False
    if kind in _SEQUENCES:
        return all(_is_plain(item, depth + 1) for item in value)
    return kind is dict and all(_is_plain(k, depth + 1) and _is_plain(v, depth + 1) for k, v in value.items())


def plain_attributes(attributes: dict[str, Any]) -> dict[str, Any] | None:
    """Return a copy, or None where a value is not plain."""
    return dict(attributes) if _is_plain(attributes) else None


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether they are one object, or equal containers of such and of plain values."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > 20:
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(value, b[key], depth + 1) for key, value in a.items())
    return _is_plain(a) and bool(a == b)


def attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    state = object.__getstate__(x)  # None, a dict, or the dict and the slots
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts for name, value in (part or {}).items()}


def _items(container: Any) -> Any:
    """Return what it holds as a dict or sequence."""
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, (tuple, list)) else None


def _children(container: Any) -> tuple[list[Any], Any]:
    children, spec = private.tree_flatten(container, is_leaf=lambda x: x is not container)
    return children, spec


def _lost(container: Any, children: list[Any], spec: Any, only_plain: bool) -> dict[str, Any] | None:
    """Return the attributes that pytree does not give back; None where it cannot be a copy."""
    twin = private.tree_unflatten(children, spec)
    if only_plain and (type(twin) is not type(container) or not _same(_items(container), _items(twin))):
        return None
    made = attributes_of(twin)
    lost = {
        name: value
        for name, value in attributes_of(container).items()
        if name not in made or not _same(value, made[name])
    }
    return None if only_plain and not _is_plain(lost) else lost


def _add_state(state: State, container: Any, path: tuple[int, ...], only_plain: bool) -> bool:
    """Return whether all of it can be carried."""
    children, spec = _children(container)
    if len(children) == 1 and children[0] is container:
        return True  # a leaf
    if type(container) not in (tuple, list, dict):
        lost = _lost(container, children, spec, only_plain)
        if lost is None:
            return False
        if lost:
            state.append((path, lost))
    inner = ((i, child) for i, child in enumerate(children) if not isinstance(child, torch.Tensor))
    return all(_add_state(state, child, (*path, i), only_plain) for i, child in inner)


def container_state(container: Any, only_plain: int) -> State | None:
    """Return what pytree drops of the container and of those inside it; None where some of that is
    not plain, so that no copy is what the container is.
    """
    state: State = []
    return state if _add_state(state, container, (), bool(only_plain)) else None


def give_container_state(container: Any, state: State) -> None:
    for path, attributes in state:
        at = container
        for i in path:
            at = _children(at)[0][i]
        own = getattr(at, "__dict__", None)
        for name, value in attributes.items():
            if own is None or isinstance(getattr(type(at), name, None), types.MemberDescriptorType):
                object.__setattr__(at, name, value)  # a slot
            else:
                own[name] = value
