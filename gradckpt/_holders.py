"""Who holds an object, in words: :func:`holder_of`."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Container, Mapping
from typing import Any

_CACHE: Any = type(functools.lru_cache(lambda: None))

#: Containers in containers that are looked through.
_DEPTH = 10


def holder_of(x: Any, known: Container[int]) -> str | None:
    """Return what a message calls the place where an object is, None if nothing but frames of
    functions leads there.

    ``known``: the ids of objects that are there for longer than such frames, as globals and classes
    are.
    """
    names: dict[int, str | None] = {id(x): None}
    level = [x]
    for _ in range(_DEPTH):
        above: list[Any] = []
        for each in level:
            for holder in gc.get_referrers(each):
                if id(holder) in names or _is_passing(holder) or holder is level or holder is above:
                    continue
                names[id(holder)] = name = names[id(each)] or _named(each, holder)
                if name is not None and (id(holder) in known or _is_lasting(holder)):
                    return name
                above.append(holder)
        level = above
    return None


def _is_lasting(holder: Any) -> bool:
    return isinstance(holder, (_CACHE, type)) or (isinstance(holder, dict) and "__builtins__" in holder)


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
