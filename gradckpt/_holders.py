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


def holder_of(x: Any) -> str | None:
    """Return what a message calls the place where an object is, None if nothing but frames of
    functions leads there.
    """
    seen, level = {id(x)}, [x]
    for _ in range(_DEPTH):
        above: list[Any] = []
        for each in level:
            for holder in gc.get_referrers(each):
                if id(holder) in seen or _is_passing(holder) or holder is level or holder is above:
                    continue
                seen.add(id(holder))
                if found := _named(each, holder):
                    return found
                above.append(holder)
        level = above
    return None


def _is_passing(holder: Any) -> bool:
    """Return whether it holds an object only while a function runs, as this search itself."""
    return isinstance(holder, types.FrameType) or type(holder).__module__.startswith("gradckpt")


def _named(x: Any, holder: Any) -> str | None:
    if isinstance(holder, _CACHE):
        return f"the cache of {holder.__wrapped__.__qualname__}()"
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
