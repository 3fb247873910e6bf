"""Running statistics are updated by the forward and not again by the recompute.

Before a region runs again, the buffers of its stateful modules are saved. Afterwards they are
restored, also when early stop or an exception leaves the region. Stateful are BatchNorm,
SyncBatchNorm and InstanceNorm with running statistics, and every class given to :func:`register`.

``buffers=`` of :func:`gradckpt.checkpoint` names the modules. By default it is the module that the
function is or belongs to (a module, a bound method of one, a ``functools.partial`` of these, each
function of a segment), with all its submodules. Any other function is run again as torch does,
unless the modules are passed: ``buffers=module``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Union

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.hooks import RemovableHandle

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import without_partials

Names = Union[tuple[str, ...], Callable[[Module], Iterable[str]]]


# ---- rules ----


class _Rules(dict[int, tuple[Any, Names]]):
    """Map a number to a rule.

    C remembers which types have no rule until a rule is added or removed.
    """

    def __setitem__(self, key: int, rule: tuple[type, Names]) -> None:
        super().__setitem__(key, rule)
        _C.forget_types()

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        _C.forget_types()


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _norm_names(module: Any) -> tuple[str, ...]:
    """Return the names of the statistics that the module's forward updates.

    It does so in training. InstanceNorm whose ``track_running_stats`` was switched off later also
    writes to the buffers that it still has.
    """
    if not module.training and module.track_running_stats:
        return ()
    buffers = module._buffers
    return tuple(name for name in _STATISTICS if buffers.get(name) is not None)


_rules = _Rules({-1: (private.NormBase, _norm_names)})


def register(module_class: type[Module], names: Names) -> RemovableHandle:
    """Keep the recompute from changing these buffers too.

    Args:
        module_class: The rule also holds for its subclasses. Several rules for one module add
            up.
        names: Names of buffers, parameters or plain attributes. Or a function of the module
            that returns the names. It is called at each recompute and returns an empty tuple when
            nothing has to be saved in the module's present mode.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``module_class`` is not a subclass of ``torch.nn.Module``, or ``names`` holds
            anything but strings.

    Example:
        ``gradckpt._engine.buffers.register(_SpectralNorm, ("_u", "_v"))`` with ``_SpectralNorm`` of
        ``torch.nn.utils.parametrizations``
    """
    if not (isinstance(module_class, type) and issubclass(module_class, Module)):
        raise TypeError(f"gradckpt: a buffers rule is for a subclass of torch.nn.Module, not {module_class!r}")
    if not callable(names):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError("gradckpt: names must be a tuple of buffer names, or a function of the module")
        names = tuple(names)
    handle = RemovableHandle(_rules)
    _rules[handle.id] = (module_class, names)
    return handle


def has_rule(module_class: type) -> bool:
    """Return whether a rule covers the class. C calls this once for each type of module."""
    for kind, _ in _rules.values():  # noqa: SIM110 - an interrupt in a generator that is being closed would be lost
        if issubclass(module_class, kind):
            return True
    return False


def with_rule(module: Module) -> list[Module]:
    """Return the modules in this one that have a rule."""
    return [part for part in module.modules() if has_rule(type(part))]


def _names_of(module: Module) -> list[str]:
    names: list[str] = []
    for module_class, rule in list(_rules.values()):
        if isinstance(module, module_class):
            names.extend(name for name in (rule(module) if callable(rule) else rule) if name not in names)
    return names


# ---- which modules ----


@dataclasses.dataclass(slots=True, eq=False)
class Calling:
    """What calls a function with other arguments; the modules are those behind the function."""

    function: Callable[..., Any]

    @property
    def __gradckpt_functions__(self) -> tuple[Any, ...]:
        return (self.function,)


def _modules_behind(function: Any) -> list[Module | None]:
    """Return the module that the function is or belongs to, or None.

    A function that calls others returns one for each of them.
    """
    function = without_partials(function)
    if isinstance(function, Module):
        return [function]
    parts = getattr(function, "__gradckpt_functions__", None)  # Segment, Decorated and Calling have it
    if isinstance(parts, tuple):
        return list(itertools.chain.from_iterable(map(_modules_behind, parts)))
    owner = getattr(function, "__self__", None)
    return [owner if isinstance(owner, Module) else None]


def _as_modules(given: Any) -> list[Module] | None:
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    return modules if all(isinstance(module, Module) for module in modules) else None


def check(given: Any, function: Any) -> None:
    """Check a ``buffers=`` that is neither None nor ``"torch"``. C calls this.

    Raises:
        ValueError: an unknown word, or ``"once"`` for a function that belongs to no module.
        TypeError: neither a word nor modules.
    """
    if not isinstance(given, str):
        if _as_modules(given) is None:
            raise TypeError(f"gradckpt: buffers must be a module, a list of modules, or a word, not {given!r}")
    elif given != "once":
        raise ValueError(f"gradckpt: buffers must be 'once', 'torch' or a module, not {given!r}")
    elif None in _modules_behind(function):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"gradckpt: buffers='once' needs a module or its method, and {name} is neither; pass buffers=MODULE"
        )


def roots_of(given: Any, function: Any) -> list[Module]:
    """Return the modules of ``buffers=``, or those behind the function.

    C calls this before a region runs again.
    """
    if given is not None:
        return _as_modules(given) or []
    return [module for module in _modules_behind(function) if module is not None]


# ---- values ----


@contextlib.contextmanager
def _no_modes() -> Any:
    """Hide our copies from modes: selective checkpointing, logs and counters must not see them."""
    with private.without_modes(), private.without_function_modes():
        yield


def _quiet() -> Any:
    return _no_modes() if private.dispatch_stack_len() or private.function_stack_len() else contextlib.nullcontext()


#: The dict that holds the value, its name, the object, and a copy of its values (None: the object
#: is enough).
_Value = tuple[dict[str, Any], str, Any, Union[torch.Tensor, None]]


def _home(module: Module, name: str) -> dict[str, Any]:
    homes: tuple[dict[str, Any], ...] = (module._buffers, module._parameters, module.__dict__)
    for home in homes:
        if name in home:
            return home
    raise AttributeError(
        f"gradckpt: the buffers rule for {type(module).__name__} names {name!r}, which this module does not have"
    )


def _has_values(value: Any) -> bool:
    lazy = (UninitializedBuffer, UninitializedParameter)
    if not isinstance(value, torch.Tensor) or value.is_meta or isinstance(value, lazy):
        return False
    return not (_C.is_simulated() and value.is_floating_point())


def _read(module: Module, names: list[str]) -> list[_Value]:
    values: list[_Value] = []
    with _quiet():
        for name in names:
            home = _home(module, name)
            value = home[name]
            values.append((home, name, value, value.detach().clone() if _has_values(value) else None))
    return values


def _put_back(values: list[_Value]) -> None:
    with _quiet():
        for home, name, original, copy in values:
            if home.get(name) is not original:
                home[name] = original
            if copy is not None:  # .data leaves the version alone, which another part of the graph may check
                original.data.copy_(copy)


# ---- guards ----


@dataclasses.dataclass(slots=True, eq=False)
class _Entered:
    """A module that some recompute runs, with its values from before the first of them."""

    module: Module  # the reference keeps the id valid
    values: list[_Value]
    guards: set[int] = dataclasses.field(default_factory=set)


#: id(module) -> its record, while it has guards.
_entered: dict[int, _Entered] = {}

_lock = threading.RLock()


class Guard:
    """One recompute.

    Guards nest and interleave across threads: the last guard to leave a module restores what the
    first one found.
    """

    _modules: Any = ()  # list[_Entered], unless an interrupt came first

    def __init__(self) -> None:
        self._modules = []

    def save(self, module: Module) -> None:
        """Save the module's values, unless its rules name none now."""
        names = _names_of(module)
        if not names:
            return
        with _lock:
            entered = _entered.get(id(module)) or _Entered(module, _read(module, names))
            self._modules.append(entered)  # before other threads can see it: an interrupt may come at any point
            entered.guards.add(id(self))
            _entered[id(module)] = entered

    def close(self) -> None:
        """Restore everything, then raise the first failure. A second call does nothing."""
        failure: Exception | None = None
        while self._modules:
            entered = self._modules[-1]
            with _lock:
                entered.guards.discard(id(self))
                key, values = id(entered.module), entered.values
                if not entered.guards and _entered.get(key) is entered:
                    try:
                        _put_back(values)
                    except Exception as error:
                        failure = failure or error
                    del _entered[key]
            self._modules.pop()
        self.__class__ = Guard
        if failure is not None:
            raise failure


class _OpenGuard(Guard):
    """A guard that closes itself if an interrupt loses it before it is closed.

    A closed guard is a plain Guard without a finalizer, because an interrupt inside a finalizer
    would be lost.
    """

    def __del__(self) -> None:
        self.close()


def enter(modules: list[Module]) -> Guard:
    """Save the modules that have a rule. C calls this before a region runs again.

    C calls ``close()`` of the guard afterwards in any case.
    """
    guard = _OpenGuard()
    try:
        for module in modules:
            guard.save(module)
    except BaseException:
        guard.close()
        raise
    return guard
