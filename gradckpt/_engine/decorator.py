"""The decorator form: ``@gradckpt.checkpoint(compress="int8")`` above a function or a method."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from gradckpt._engine.arguments import TAKEN, own_keywords
from gradckpt._engine.torch_errors import for_reentrant, warn_torchs


def decorate(
    module: Any, names: tuple[str, ...], values: tuple[Any, ...], unknown: dict[str, Any] | None, exact: int
) -> Callable[[Any], Decorated]:
    """Return the decorator for a call of C's ``checkpoint`` without a function.

    ``exact``: of ``compat``, which takes no keyword of the function, as torch.
    """
    if unknown and exact:
        raise for_reentrant(unknown)
    options = {name: value for name, value in zip(names, values, strict=True) if name != "function"}
    if exact:
        options.setdefault("use_reentrant", None)
    checkpoint = module.compat_checkpoint if exact else module.checkpoint
    return functools.partial(Decorated, checkpoint=checkpoint, options=options)


def call(
    checkpoint: Callable[..., Any],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Call ``checkpoint`` with its own keywords, ``options``, and with the function's, ``kwargs``.

    Both may have the same names.
    """
    if kwargs and not TAKEN.isdisjoint(kwargs):
        reentrant = options.get("use_reentrant", False)
        if reentrant is None:
            warn_torchs("not_explicit")
        if reentrant is None or reentrant:
            raise for_reentrant(kwargs)
        function = own_keywords(function, kwargs)
    return checkpoint(function, *args, **options, **kwargs)


def check_runs_at_call(function: Any, name: str, instead: str) -> None:
    """Check what a decorator receives that acts while the function is called.

    Raises:
        TypeError: it is not a function, or its body runs after the call. ``instead`` names the
            alternative.
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


def _bind(function: FunctionType, first: Any) -> Any:
    if torch.compiler.is_compiling():
        # At a graph break Dynamo looks a method up by its name and would arrive here again.
        return functools.partial(function, first)
    return MethodType(function, first)


class Decorated:
    """A function of which each call is one region, with the keywords given once."""

    def __init__(self, function: Any, checkpoint: Callable[..., Any], options: dict[str, Any]) -> None:
        if isinstance(function, type) or not (callable(function) or hasattr(function, "__get__")):
            what = f"the class {function.__name__}; decorate its method" if isinstance(function, type) else function
            raise TypeError(f"gradckpt: checkpoint(...) decorates a function or a method, not {what!s}")
        functools.update_wrapper(self, function, updated=())
        self.static = type(function) is staticmethod
        # In a tuple: Dynamo before 2.12 takes a descriptor in an object for one of its class.
        self._function = (function.__func__ if self.static else function,)
        self.checkpoint = checkpoint
        self.options = options

    @property
    def function(self) -> Any:
        return self._function[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self.checkpoint, self.function, args, kwargs, self.options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        function, kind = self.function, type(self.function)
        if self.static:
            return self
        if kind is FunctionType:
            # The type decides, not what __get__ returns: Dynamo takes a method and its function for
            # the same.
            return self if instance is None else Bound(_bind(function, instance), self)
        if kind is classmethod and type(function.__func__) is FunctionType:
            return Bound(_bind(function.__func__, type(instance) if owner is None else owner), self)
        get = getattr(kind, "__get__", None)
        bound = function if get is None else get(function, instance, owner)
        return self if bound is function else Bound(bound, self)

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        """Return the functions inside, for gradckpt._engine.buffers."""
        return (self.function,)

    def __reduce__(self) -> Any:
        """Pickle by name where the name leads here, as functions are pickled, else by parts."""
        path = getattr(self, "__qualname__", "")
        try:
            by_name = _named(self.__module__, path) is self
        except (AttributeError, ImportError):
            by_name = False
        given = staticmethod(self.function) if self.static else self.function
        return path if by_name else (Decorated, (given, self.checkpoint, self.options))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<checkpoint({given}) of {self.function!r}>"


class Bound:
    """A :class:`Decorated` method of an object or class.

    It has no slots: Dynamo's guards read ``__dict__``.
    """

    def __init__(self, bound: Any, decorated: Decorated) -> None:
        self.__wrapped__ = bound
        self._decorated = (decorated,)  # see Decorated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = self._decorated[0]
        return call(decorated.checkpoint, self.__wrapped__, args, kwargs, decorated.options)

    def __getattr__(self, name: str) -> Any:
        """Return ``__self__``, ``__name__``, ``__doc__`` and the other attributes of the method."""
        if name in ("__wrapped__", "_decorated"):  # Dynamo and copies create objects without __init__
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.__wrapped__.__doc__

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        return (self.__wrapped__,)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Bound) and self._decorated[0] is other._decorated[0]
        return same and bool(self.__wrapped__ == other.__wrapped__)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(vars(self).get("__wrapped__"))  # Dynamo before 2.12 asks one made without __init__

    def __reduce__(self) -> Any:
        """Pickle as a method: its object, and the name under which the object has the decorated
        function.
        """
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is None:  # another descriptor made it: pickle it by its own name
            return _named, (self.__wrapped__.__module__, self.__wrapped__.__qualname__)
        return getattr, (owner, self.__wrapped__.__name__)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._decorated[0].options.items())
        return f"<checkpoint({given}) of {self.__wrapped__!r}>"
