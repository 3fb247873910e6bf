"""What changed in the arguments of a region since its forward: only ``debug=True`` looks.

Seen are tensors (their versions, and whether they are the same objects), numbers and texts, in
containers and in the attributes of objects. What the region has a copy of, such as a compressed
tensor and the list around it, is left out. A tensor is known by a weak reference.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import reprlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gradckpt._config import warn_user
from gradckpt._engine.argument_state import attributes_of
from gradckpt._engine.arguments import module_behind, name_of

#: Deeper values, and those after so many, are not looked at.
DEPTH = 9
COUNT = 2000
#: So many changes are named.
NAMED = 5

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_VERSION = "version "
#: Objects of these change for reasons of their own (locks, loggers), or tell nothing (functions).
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_FOREIGN = (sys.stdlib_module_names - {"types", "argparse"}) | {"torch", "numpy"}

_Inside = list[tuple[str, Any]]


class _Seen(NamedTuple):
    """One value: what is compared, and the words for it."""

    key: Any
    text: str
    tensor: weakref.ref[torch.Tensor] | None = None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _tensor(x: torch.Tensor) -> _Seen:
    version = -1 if x.is_inference() else x._version
    itself = weakref.ref(x)  # equal ones would compare values; for one tensor it is one object
    return _Seen((id(itself), version), f"{_VERSION}{version}", itself)


def _container(x: Any) -> tuple[_Seen, _Inside]:
    first = list(itertools.islice(x.items() if isinstance(x, dict) else x, COUNT))
    inside: _Inside = []
    if isinstance(x, dict):
        inside = [(f"[{reprlib.repr(k)}]", value) for k, value in first]
    elif isinstance(x, (list, tuple)):
        names = [f".{name}" for name in getattr(x, "_fields", ())] or [f"[{i}]" for i in range(len(first))]
        inside = list(zip(names, first, strict=True))
    keys = frozenset(path for path, _ in inside) if isinstance(x, dict) else None
    return _Seen((type(x), len(x), keys), _count(len(x), "item")), inside


def _attributes(x: Any) -> _Inside:
    return [(f".{name}", value) for name, value in attributes_of(x).items()]


def _look(x: Any) -> tuple[_Seen | None, _Inside]:
    """Return what is seen of a value itself, and what is in it."""
    kind = type(x)
    if isinstance(x, torch.Tensor):
        return _tensor(x), _attributes(x)
    if isinstance(x, torch.nn.Module):  # its running statistics and caches are its own affair
        return None, [(f".{name}", parameter) for name, parameter in x.named_parameters()]
    if isinstance(x, _VALUES):
        return _Seen(repr(x), reprlib.repr(x)), []  # NaN equals NaN
    if isinstance(x, _CONTAINERS):
        seen, inside = _container(x)
        return seen, inside + ([] if kind in _CONTAINERS else _attributes(x))
    if kind is functools.partial:
        return None, [(".args", x.args), (".keywords", x.keywords), (".func", x.func)]
    if isinstance(x, _OPAQUE) or kind.__module__.partition(".")[0] in _FOREIGN:
        return _Seen(kind, kind.__name__), []
    inside = _attributes(x)
    return _Seen((kind, len(inside)), f"{kind.__name__} with {_count(len(inside), 'attribute')}"), inside


def _differences(then: dict[str, _Seen], now: dict[str, _Seen]) -> list[str]:
    found = []
    for path in (path for path in then if path in now and then[path].key != now[path].key):
        before, after = then[path], now[path]
        same = "another tensor" if before.tensor is not None else "other contents"
        tensor = after.text.removeprefix(_VERSION) if before.tensor is not None else "a tensor"
        changed = f"{before.text}, now {after.text if after.tensor is None else tensor}"
        found.append(f"{path}: {same if before.text == after.text else changed}")
    return found[:NAMED] + ([f"and {len(found) - NAMED} more"] if len(found) > NAMED else [])


def _parameter_versions(function: Any) -> list[tuple[str, torch.Tensor, int]]:
    module = module_behind(function)
    return [] if module is None else [(name, p, p._version) for name, p in module.named_parameters()]


def _check_parameters(parameters: list[tuple[str, torch.Tensor, int]]) -> None:
    changed = [f"{name} (version {then}, now {p._version})" for name, p, then in parameters if p._version != then]
    if changed:
        raise RuntimeError(
            "gradckpt: parameters changed between the forward and the recompute of their region, so gradients would be "
            f"wrong; call optimizer.step() after backward: {', '.join(changed)}"
        )


class Watch:
    """The contexts of the two runs, which look at parameters and arguments before each."""

    def __init__(self, function: Any, forward: Any, recompute: Any) -> None:
        self._name = name_of(function)
        self._parameters = _parameter_versions(function)
        self._bound = function if isinstance(function, functools.partial) else None
        self._forward, self._recompute = forward, recompute
        self._kept: set[str] = set()  # paths of what the region keeps by reference
        self._seen: dict[str, _Seen] = {}

    def _walk(self, args: Any, kwargs: Any, frame: Any = None) -> dict[str, _Seen]:
        """Return what is seen, by path, the nearest first.

        With a frame, remember what it keeps: the rest is made anew for the recompute.
        """
        kept = set() if frame is None else {id(x) for x in gc.get_referents(frame)}
        seen: dict[str, _Seen] = {}
        waiting: list[tuple[str, Any, bool, tuple[int, ...]]]
        waiting = [("args", args, False, ()), ("kwargs", kwargs, False, ()), ("function", self._bound, True, ())]
        for path, x, within, around in waiting:
            if not within and id(x) in kept:
                self._kept.add(path)
            within = within or path in self._kept
            if len(seen) >= COUNT or id(x) in around or not (within or issubclass(type(x), _CONTAINERS)):
                continue
            try:
                itself, inside = _look(x)
            except Exception:  # an object that cannot be read is not looked at
                continue
            if itself is not None and within:
                seen[path] = itself
            if len(around) < DEPTH and len(waiting) < 4 * COUNT:
                waiting += [(path + name, value, within, (*around, id(x))) for name, value in inside]
        return seen

    @contextlib.contextmanager
    def around_forward(self, frame: Any, args: Any, kwargs: Any) -> Iterator[None]:
        self._seen = self._walk(args, kwargs, frame)
        with self._forward:
            yield

    @contextlib.contextmanager
    def around_recompute(self, args: Any, kwargs: Any) -> Iterator[None]:
        _check_parameters(self._parameters)
        changed = _differences(self._seen, self._walk(args, kwargs))
        if changed:
            warn_user(
                f"gradckpt: arguments of {self._name} changed between the forward of its region and the recompute; "
                f"change them after backward, or pass a copy: {', '.join(changed)}",
                UserWarning,
            )
        with self._recompute:
            yield
