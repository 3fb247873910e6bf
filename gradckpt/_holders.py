"""Who holds an object, in words: :func:`holder_of`."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["holder_of"]

_CACHE: Any = type(functools.lru_cache(lambda: None))

#: Containers in containers that are looked through.
_DEPTH = 6


def holder_of(x: Any) -> str:
    """Return what a message calls the place where an object is."""
    return _place(x, {id(x)}, _DEPTH) or f"a {type(x).__name__}"


def _place(x: Any, passed: set[int], depth: int) -> str | None:
    """Return the name of a place that leads to an object, None if there is none."""
    holders = [each for each in gc.get_referrers(x) if not _is_passing(each) and id(each) not in passed]
    for holder in holders:
        if found := _named(x, holder):
            return found
    if not depth:
        return None
    return next((found for each in holders if (found := _place(each, passed | {id(each)}, depth - 1))), None)


def _is_passing(holder: Any) -> bool:
    """Return whether it holds what a function is about to do, as the search itself."""
    return isinstance(holder, types.FrameType) or type(holder).__module__.startswith("gradckpt")


def _named(x: Any, holder: Any) -> str | None:
    if isinstance(holder, _CACHE):
        return f"the cache of {holder.__wrapped__.__qualname__}()"
    if isinstance(holder, types.FunctionType):
        return f"{holder.__qualname__}()"
    if isinstance(holder, dict):
        key = _key_of(x, holder)
        if "__name__" in holder and "__builtins__" in holder:
            return f"{holder['__name__']}.{key}"
        owner = next((each for each in gc.get_referrers(holder) if getattr(each, "__dict__", None) is holder), None)
        return None if owner is None else f"{type(owner).__qualname__}.{key}"
    if isinstance(holder, type):
        return f"{holder.__qualname__}.{_key_of(x, vars(holder))}"
    if key := _key_of(x, getattr(holder, "__dict__", {})):
        return f"{type(holder).__qualname__}.{key}"
    return None


def _key_of(x: Any, place: Mapping[Any, Any]) -> str | None:
    return next((str(key) for key, value in place.items() if value is x), None)
