"""transformers' key-value caches among the arguments of a region: each recompute gets the state
before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from gradckpt._engine.buffers import Calling

#: The types of most arguments; they are tested first, for speed.
NO_CACHE = (torch.Tensor, type(None), int, float, str, tuple)


def is_cache(value: Any) -> bool:
    """Return whether this is a cache of transformers, which the forward writes to."""
    kind = type(value)
    return hasattr(kind, "get_seq_length") and hasattr(kind, "update")


def snapshot(value: Any) -> Any:
    """Return a copy that shares its tensors: an update replaces them."""
    if type(value) in (list, tuple):
        return type(value)(map(snapshot, value))
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value).__module__.startswith("transformers.cache_utils") or is_cache(value):
        twin = copy.copy(value)
        vars(twin).update({key: snapshot(item) for key, item in vars(value).items()})
        return twin
    return value


class Cache:
    """The replacement of a cache among a region's arguments.

    It gives the cache itself to the forward, and its state before the forward to each recompute,
    which would otherwise append its keys a second time.
    """

    __slots__ = ("before", "live")

    def __init__(self, cache: Any) -> None:
        self.live = cache
        self.before = snapshot(cache)

    def take(self) -> Any:
        live, self.live = self.live, None  # otherwise it would hold the keys of all layers until the backward
        return live if live is not None else snapshot(self.before)

    @staticmethod
    def hold(value: Any) -> Any:
        return Cache(value) if is_cache(value) else value

    @staticmethod
    def release(value: Any) -> Any:
        return value.take() if isinstance(value, Cache) else value


class WithCaches(Calling):
    """A forward that gets a :class:`Cache` for each cache."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given = {key: Cache.release(value) for key, value in kwargs.items()}
        return self.function(*map(Cache.release, args), **given)


def with_caches(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return these three with each cache replaced, or unchanged without a cache."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if not isinstance(value, NO_CACHE) and is_cache(value):
            args = tuple(Cache.hold(value) for value in args)
            kwargs = {key: Cache.hold(value) for key, value in kwargs.items()}
            return WithCaches(forward), args, kwargs
    return forward, args, kwargs
