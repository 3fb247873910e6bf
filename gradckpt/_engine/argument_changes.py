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
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gradckpt._config import warn_user
from gradckpt._engine.arguments import module_behind, without_partials

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


class _Seen(NamedTuple):
    """One value: what is compared, and the words for it."""

    key: tuple[Any, ...]
    text: str
    tensor: weakref.ref[torch.Tensor] | None = None


def _tensor(x: torch.Tensor) -> _Seen:
    try:
        version = x._version
    except Exception:  # an inference tensor, or a subclass, that has none
        version = -1
    itself = weakref.ref(x)  # equal ones would compare values; for one tensor it is one object
    return _Seen((id(itself), version), f"{_VERSION}{version}", itself)


def _value(x: Any) -> _Seen:
    """Return a value as it is printed, so that NaN equals NaN; a subclass may print anything."""
    base: Any = next(base for base in _VALUES if issubclass(type(x), base))
    if base in (str, bytes):
        n, start = base.__len__(x), repr(base.__getitem__(x, slice(40)))
        return _Seen((n, base.__hash__(x), start), start if n <= 40 else f"{start}...")
    return _Seen((base.__repr__(x),), base.__repr__(x))


def _container(x: Any, base: Any) -> tuple[_Seen, list[tuple[str, Any]]]:
    """Return what is in a container, by the methods of its base class; faster: its first items."""
    n, first = base.__len__(x), list(itertools.islice(base.items(x) if base is dict else base.__iter__(x), COUNT))
    if base is dict:
        inside = [(f"[{_value(k).text if type(k) in _VALUES else type(k).__name__}]", value) for k, value in first]
    elif base in (list, tuple):
        names = dict(enumerate(getattr(type(x), "_fields", ()) if base is tuple else ()))
        inside = [(f".{names[i]}" if i in names else f"[{i}]", value) for i, value in enumerate(first)]
    else:  # a set has no paths
        inside = []
    keys = frozenset(path for path, _ in inside) if base is dict else None
    return _Seen((type(x), n, keys), f"{n} item{'s' * (n != 1)}"), inside


def _attributes(x: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, those in slots too, without running code of its class."""
    found = {}
    for base in type(x).__mro__:
        for name, slot in () if _is_foreign(base) else vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and name != "__dict__":
                with contextlib.suppress(AttributeError):  # not set
                    found[name] = slot.__get__(x)
    with contextlib.suppress(AttributeError):
        found |= object.__getattribute__(x, "__dict__")
    return [(f".{name}", value) for name, value in found.items()]


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _look(x: Any) -> tuple[_Seen | None, list[tuple[str, Any]]]:
    """Return what is seen of a value itself, and what is in it."""
    kind = type(x)
    if issubclass(kind, torch.Tensor):
        return _tensor(x), _attributes(x)
    if issubclass(kind, torch.nn.Module):  # its running statistics and caches are its own affair
        return None, [(f".{name}", parameter) for name, parameter in x.named_parameters()]
    if issubclass(kind, _VALUES):
        return _value(x), []
    if issubclass(kind, _CONTAINERS):
        seen, inside = _container(x, next(base for base in _CONTAINERS if issubclass(kind, base)))
        return seen, inside if kind in _CONTAINERS else inside + _attributes(x)
    if kind is functools.partial:
        return None, [(".args", x.args), (".keywords", x.keywords), (".func", x.func)]
    if issubclass(kind, _OPAQUE) or _is_foreign(kind):
        return _Seen((kind,), kind.__name__), []
    inside = _attributes(x)
    return _Seen((kind, len(inside)), f"{kind.__name__} with {len(inside)} attribute{'s' * (len(inside) != 1)}"), inside


def _differences(then: dict[str, _Seen], now: dict[str, _Seen]) -> list[str]:
    found = []
    for path in (path for path in then if path in now and then[path].key != now[path].key):
        before, after = then[path], now[path]
        if before.text != after.text:
            found.append(f"{path}: {before.text}, now {after.text.removeprefix(_VERSION)}")
        else:
            found.append(f"{path}: another tensor" if before.tensor is not None else f"{path}: other contents")
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
        self._name = getattr(without_partials(function), "__qualname__", type(function).__qualname__)
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
                f"gradckpt: arguments of {self._name} changed between the forward of its region and the recompute, "
                f"which may read other values; change them after backward: {', '.join(changed)}",
                UserWarning,
            )
        with self._recompute:
            yield
