"""The decorator form: ``@gradckpt.checkpoint(compress="int8")`` above a function or a method."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["Bound", "Decorated", "check_runs_at_call", "decorate"]


def decorate(checkpoint: Callable[..., Any], options: dict[str, Any]) -> Callable[[Any], Decorated]:
    """Called by C when ``checkpoint`` is given keywords only: what turns a function into a region."""
    return functools.partial(Decorated, checkpoint=checkpoint, options=dict(options))


def check_runs_at_call(function: Any, name: str, instead: str) -> None:
    """For decorators that act while the function is called.

    Raises:
        TypeError: no function, or one whose body runs after the call; ``instead`` is the way out.
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"gradckpt: {name} decorates a function or a method, not {function!r}")
    if any(
        test(function)
        for test in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        raise TypeError(f"gradckpt: {name} cannot decorate {function!r}: its body runs after the call; use {instead}")


def _named(module: str, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


class Decorated:
    """A function, each call of which is one region with the keywords given once."""

    def __init__(self, function: Any, checkpoint: Callable[..., Any], options: dict[str, Any]) -> None:
        if isinstance(function, type) or not (callable(function) or hasattr(function, "__get__")):
            what = f"the class {function.__name__}; decorate its method" if isinstance(function, type) else function
            raise TypeError(f"gradckpt: checkpoint(...) decorates a function or a method, not {what!s}")
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.checkpoint = checkpoint
        self.options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(self.function, *args, **self.options, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        get = getattr(type(self.function), "__get__", None)
        bound = self.function if get is None else get(self.function, instance, owner)
        return self if bound is self.function else Bound(bound, self)

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        """For gradckpt.buffers."""
        return (self.function,)

    def __reduce__(self) -> Any:
        """By name where the name leads here, as functions are pickled; else by parts."""
        path = getattr(self, "__qualname__", "")
        try:
            by_name = _named(self.__module__, path) is self
        except (AttributeError, ImportError):
            by_name = False
        return path if by_name else (Decorated, (self.function, self.checkpoint, self.options))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<checkpoint({given}) of {self.function!r}>"


class Bound:
    """A :class:`Decorated` method of an object (or class): light, for one is made at every access."""

    __slots__ = ("__wrapped__", "_decorated")

    def __init__(self, bound: Any, decorated: Decorated) -> None:
        self.__wrapped__ = bound
        self._decorated = decorated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = self._decorated
        return decorated.checkpoint(self.__wrapped__, *args, **decorated.options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """``__self__``, ``__name__``, ``__doc__`` and the rest of the method."""
        return getattr(self.__wrapped__, name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.__wrapped__.__doc__

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        return (self.__wrapped__,)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Bound) and self._decorated is other._decorated
        return same and bool(self.__wrapped__ == other.__wrapped__)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __reduce__(self) -> Any:
        """As a method is pickled: its object and its name, under which the object has the decorated one."""
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is None:  # a static method
            return _named, (self.__wrapped__.__module__, self.__wrapped__.__qualname__)
        return getattr, (owner, self.__wrapped__.__name__)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._decorated.options.items())
        return f"<checkpoint({given}) of {self.__wrapped__!r}>"
