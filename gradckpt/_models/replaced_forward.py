"""The replacement of ``module.forward`` on one instance: :class:`ReplacedForward`.

Rules:
    1. It refers to its module weakly, and strongly only inside a pickle or a deep copy.
    2. Copies, pickles and DataParallel's replicas have replacements of their own.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.nn import Module

from gradckpt._models.weak import WeakModule

#: Copies and pickles ask an object for these: functions have none.
_NOT_OF_FUNCTIONS = ("__wrapped__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")

#: A module's own method that DataParallel calls; it binds a replica to its own replacement.
_REPLICATE = "_replicate_for_data_parallel"


class ReplacedForward:
    """A callable in place of a module's forward, in front of an earlier one or the class's."""

    def __init__(self, module: Module) -> None:
        self._module = WeakModule(module)
        self.kind = type(module).__name__
        self.own: Any = None  # the earlier replacement of forward on the instance; None: the class's method
        self.active = False

    def install(self) -> None:
        attributes = vars(self.module)
        self.own = attributes.get("forward")
        self.active = True
        attributes["forward"] = self
        attributes[_REPLICATE] = self.replicate

    def remove(self) -> None:
        """Restore the module's forward.

        If other code has replaced ours since, it may still call us; we then only call the forward.
        """
        was_active, self.active = self.active, False
        module = self._module()
        if not was_active or module is None:
            return
        attributes = vars(module)
        if attributes.get("forward") is self:
            if self.own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self.own
        if getattr(attributes.get(_REPLICATE), "__self__", None) is self:
            del attributes[_REPLICATE]
            if isinstance(self.own, ReplacedForward) and self.own.active:
                attributes[_REPLICATE] = self.own.replicate

    @property
    def module(self) -> Module:
        module: Module | None = self._module()
        if module is None:
            raise ReferenceError(f"gradckpt: the {self.kind} of this checkpointed forward is gone")
        return module

    def forward_of(self, module: Module) -> Callable[..., Any]:
        """Return what this replaces, to be called."""
        return self.own or _forward_of(module)

    def is_called(self) -> bool:
        """Return whether the module's forward still leads here, as far as its wrappers tell."""
        module = self._module()
        forward = vars(module).get("forward") if module is not None else None
        if forward is None or forward is self.own or getattr(forward, "__func__", None) is type(module).forward:
            return forward is self
        seen: set[int] = set()
        waiting: list[Any] = [forward, *vars(module).values()]  # accelerate keeps the old one as an attribute
        while waiting:
            x = waiting.pop()
            if x is self:
                return True
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, ReplacedForward):
                waiting.append(x.own)
            elif isinstance(x, functools.partial):
                waiting += (x.func, *x.args, *x.keywords.values())
            elif isinstance(x, (types.FunctionType, types.MethodType)):
                waiting += (getattr(x, "__wrapped__", None), getattr(x, "__func__", None))
                waiting += (
                    cell.cell_contents for cell in getattr(x, "__closure__", None) or () if cell != types.CellType()
                )
        return False

    # ---- as the function that it replaces ----

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, which inspect.signature() reads."""
        return _own_forward(self.module) if self.own is None else self.own

    @property
    def __func__(self) -> Self:
        """What other code binds again: that of the forward would lose us."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return ``__code__``, ``__self__`` and the other attributes of the module's forward."""
        if name == "__get__":  # not of the class: Dynamo before 2.12 takes such an object for the class's attribute
            return lambda instance, owner=None: self
        module = self._module() if "_module" in vars(self) else None  # a copy in the making has none
        if module is None or name in _NOT_OF_FUNCTIONS:
            raise AttributeError(name)
        return getattr(_own_forward(module) if self.own is None else self.own, name)

    # ---- replicas ----

    def replicate(self) -> Module:
        """Make a replica for DataParallel, which copies attributes and so would share our
        forward.
        """
        module = self.module
        replica: Module = getattr(type(module), _REPLICATE).__get__(module)()
        if vars(replica).get("forward") is self:
            twin = self._of(replica)
            vars(replica)["forward"] = twin
            vars(replica)[_REPLICATE] = twin.replicate
        return replica

    def _of(self, replica: Module) -> Self:
        twin = copy.copy(self)
        twin._module = WeakModule(replica)
        if isinstance(self.own, ReplacedForward):
            twin.own = self.own._of(replica)
        return twin


def unbound(module: Module, args: Any) -> Any:
    """Return the arguments without the module, to which accelerate binds the forward again."""
    return args[1:] if args and args[0] is module else args


def replacements_of(module: Module) -> list[ReplacedForward]:
    """Return those of a module, the outermost first, also if other code has replaced its forward
    since.
    """
    found: list[ReplacedForward] = []
    last = getattr(vars(module).get(_REPLICATE), "__self__", None)
    while isinstance(last, ReplacedForward):
        found += [last] if last.active else []
        last = last.own
    return found


def _forward_of(module: Module) -> Callable[..., Any]:
    """Return the class's forward, bound to the instance."""
    if torch.compiler.is_compiling():
        # At a graph break, a method is looked up by its name, under which the module has its
        # region.
        return functools.partial(type(module).forward, module)
    return _own_forward(module)


def _own_forward(module: Module) -> Callable[..., Any]:
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound
