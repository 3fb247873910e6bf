"""``buffers="once"``: running statistics are updated by the forward and not again by the recompute.

Before a region runs again, the buffers of its stateful modules are saved; afterwards, also when early stop or an
exception leaves it, they are put back. Stateful are BatchNorm, SyncBatchNorm and InstanceNorm with running
statistics, and every class given to :func:`register`.

Which modules those are is read from the function: a module, a bound method of one, a ``functools.partial`` of
such, a segment of ``checkpoint_sequential``. A plain function is read too: when all it can reach (closure, defaults,
globals it names, arguments) is known and holds no stateful module, there is nothing to do. Any other callable is
watched while it runs again: a module is saved when it is first called. Not seen are: modules that a module keeps
outside its registered children, ``forward`` called by name inside a plain function, TorchScript, code compiled by
``torch.compile`` inside a plain function (give the module itself), and calls from threads that the function starts.
A norm in eval mode has nothing to save.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Union

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from gradckpt import _C

__all__ = ["Handle", "forget", "register"]

Names = Union[tuple[str, ...], Callable[[Module], Iterable[str]]]

#: One object for every rule: (class, names).
_rules: list[tuple[type, Names]] = []

#: The classes of the rules, for isinstance().
_classes: tuple[type, ...] = ()


# ---- rules ----


class Handle:
    """Of one :func:`register`; ``remove()`` takes the rule back. Also a context manager."""

    def __init__(self, rule: tuple[type, Names]) -> None:
        self._rule = rule

    def remove(self) -> None:
        _change_rules([rule for rule in _rules if rule is not self._rule])

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _change_rules(rules: list[tuple[type, Names]]) -> None:
    global _classes
    _rules[:] = rules
    _classes = tuple(module_class for module_class, _ in rules)
    forget()


def register(module_class: type[Module], names: Names) -> Handle:
    """Keep the recompute from changing these buffers too.

    Args:
        module_class: The rule holds for its subclasses as well. Several rules for one module add up.
        names: Names of buffers (parameters and plain attributes work too), or a function of the module that
            returns the names, asked at each recompute: empty when there is nothing to save in its present mode.

    Returns:
        A handle with ``remove()``.

    Example:
        ``gradckpt.buffers.register(torch.nn.utils.parametrizations._SpectralNorm, ("_u", "_v"))``
    """
    if not (isinstance(module_class, type) and issubclass(module_class, Module)):
        raise TypeError(f"gradckpt: a buffers rule is for a subclass of torch.nn.Module, not {module_class!r}")
    if not callable(names):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError("gradckpt: names must be a tuple of buffer names, or a function of the module")
        names = tuple(names)
    rule = (module_class, names)
    _change_rules([*_rules, rule])
    return Handle(rule)


def _names_of(module: Module) -> list[str]:
    names: list[str] = []
    for module_class, rule in _rules:
        if isinstance(module, module_class):
            names.extend(name for name in (rule(module) if callable(rule) else rule) if name not in names)
    return names


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _norm_names(module: Any) -> tuple[str, ...]:
    """In training; and InstanceNorm whose flag was switched off later also writes to the buffers it still has."""
    if not module.training and module.track_running_stats:
        return ()
    buffers = module._buffers
    return tuple(name for name in _STATISTICS if buffers.get(name) is not None)


# ---- which modules ----

#: id(root) -> weak reference to the root, and to each stateful module in it.
_trees: dict[int, tuple[weakref.ref[Module], tuple[weakref.ref[Module], ...]]] = {}
_registration_hook: Any = None


def forget() -> None:
    """Look for stateful modules afresh. Needed only after a change of the module tree that torch does not announce,
    such as ``ModuleList.insert``; assignment, ``add_module`` and ``append`` are noticed."""
    _trees.clear()
    _C.forget_modules()


def _on_registration(module: Module, name: str, child: Module | None) -> None:
    if _trees and child is not None:
        forget()


def _stateful(root: Module) -> tuple[weakref.ref[Module], ...]:
    known = _trees.get(id(root))
    if known is not None and known[0]() is root:
        return known[1]
    global _registration_hook
    if _registration_hook is None:
        _registration_hook = register_module_module_registration_hook(_on_registration)
    key = id(root)
    tree = {key: root}  # not root.modules(): it hashes, and a module need not be hashable
    pending = [root]
    while pending:
        children = [child for child in pending.pop()._modules.values() if child is not None and id(child) not in tree]
        tree.update((id(child), child) for child in children)
        pending += children
    found = tuple(weakref.ref(module) for module in tree.values() if isinstance(module, _classes))
    _trees[key] = weakref.ref(root, lambda _: _trees.pop(key, None)), found
    return found


def stateless(module: Module) -> bool:
    """No module in it has a rule, whatever its mode; holds until :func:`forget`."""
    return not _stateful(module)


def _collect(function: Any, roots: list[Module]) -> bool:
    """Append the modules that the function runs; True when it may run others, so that calls must be watched."""
    while True:
        if isinstance(function, Module):
            roots.append(function)
            return False
        if type(function) is MethodType:
            function = function.__self__
            if not isinstance(function, Module):
                return True
        elif isinstance(function, functools.partial):
            function = function.func
        else:
            parts = getattr(function, "__gradckpt_functions__", None)  # of Segment and Decorated
            if not isinstance(parts, tuple):
                return True
            watch = [_collect(part, roots) for part in parts]
            return any(watch)


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Tensor,
    torch.dtype,
    torch.device,
    torch.Size,
    ModuleType,
    type(None),
)
_MAX_DEPTH = 8


def _known(value: Any, roots: list[Module], depth: int) -> bool:
    """Whether every module that can be called through ``value`` is one of ``roots``, to which they are added."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Module):
        roots.append(value)
        return True
    if depth > _MAX_DEPTH:
        return False
    if type(value) in (tuple, list):
        return _all_known(value, roots, depth + 1)
    if type(value) is dict:
        return _all_known(value.values(), roots, depth + 1)
    if type(value) is functools.partial:
        return _known(value.func, roots, depth + 1) and _known((value.args, value.keywords), roots, depth + 1)
    if type(value) is MethodType:
        return isinstance(value.__self__, Module) and _known(value.__self__, roots, depth + 1)
    return type(value) is FunctionType and _known_function(value, roots, depth + 1)


def _all_known(values: Iterable[Any], roots: list[Module], depth: int) -> bool:
    for value in values:  # noqa: SIM110 - an interrupt in a generator that is being closed would be lost
        if not _known(value, roots, depth):
            return False
    return True


def _known_function(function: FunctionType, roots: list[Module], depth: int) -> bool:
    codes = [function.__code__]
    for code in codes:  # grows: functions inside the function
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)  # a global, or an attribute that happens to be called like one
            if isinstance(value, Module):
                roots.append(value)
            elif value is not None and not isinstance(value, _PLAIN):
                return False
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell not filled yet
        return False
    return _known([*cells, *(function.__defaults__ or ()), function.__kwdefaults__], roots, depth)


# ---- values ----


@contextlib.contextmanager
def _no_modes() -> Any:
    """Our copies are no part of the program: selective checkpointing, logs and counters must not see them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


_nothing = contextlib.nullcontext()


def _quiet() -> Any:
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _no_modes()
    return _nothing


#: Where it lives, its name, the object, a copy of its values (None: the object says it all).
_Value = tuple[dict[str, Any], str, Any, Union[torch.Tensor, None]]


def _home(module: Module, name: str) -> dict[str, Any]:
    homes: tuple[dict[str, Any], ...] = (module._buffers, module._parameters, module.__dict__)
    for home in homes:
        if name in home:
            return home
    raise AttributeError(
        f"gradckpt: the buffers rule for {type(module).__name__} names {name!r}, which this module does not have"
    )


def _read(module: Module, names: list[str]) -> list[_Value]:
    values: list[_Value] = []
    with _quiet():
        for name in names:
            home = _home(module, name)
            value = home[name]
            copied = isinstance(value, torch.Tensor) and not value.is_meta and not is_lazy(value)
            values.append((home, name, value, value.detach().clone() if copied else None))
    return values


def _put_back(values: list[_Value]) -> None:
    with _quiet():
        for home, name, original, copy in values:
            if home.get(name) is not original:
                home[name] = original
            if copy is not None:  # .data: another part of the graph may check the buffer's version
                original.data.copy_(copy)


# ---- guards ----


class _First:
    """Of a module that some recompute is touching: its values before any of them did."""

    __slots__ = ("guards", "module", "values")

    def __init__(self, module: Module, values: list[_Value]) -> None:
        self.module = module  # keeps its id
        self.values = values
        self.guards: set[int] = set()


#: id(module) -> _First, while it has guards.
_touched: dict[int, _First] = {}

#: thread -> guards that watch module calls, innermost last; weak, so that a lost guard closes itself.
_watching: dict[int, list[weakref.ref[Guard]]] = {}

_lock = threading.RLock()


class Guard:
    """One recompute. Guards nest, and interleave across threads: each puts back what it found, and the last one
    to leave a module what the first one found."""

    _saved: Any = ()  # list[tuple[_First, list[_Value]]], unless an interrupt came first
    _thread: int | None = None

    def __init__(self) -> None:
        self._saved = []

    def save(self, module: Module | None) -> None:
        """Once per module; nothing when its rules name nothing now."""
        if module is None or not (names := _names_of(module)):
            return
        with _lock:
            first = _touched.get(id(module))
            if first is not None and id(self) in first.guards:
                return
            values = _read(module, names)
            first = first or _First(module, values)
            self._saved.append((first, values))  # before others can see it: an interrupt may come at any point
            first.guards.add(id(self))
            _touched[id(module)] = first

    def watch(self) -> None:
        """Save each stateful module when this thread first calls it."""
        self._thread = get_ident()
        with _lock:
            _watching.setdefault(self._thread, []).append(weakref.ref(self))
            _switch_hook(True)

    def close(self) -> None:
        """Put everything back. May be called again. Raises the first failure, after trying the rest."""
        failure: Exception | None = None
        if self._thread is not None:
            self._unwatch()
        while self._saved:
            first, values = self._saved[-1]
            with _lock:
                first.guards.discard(id(self))
                try:
                    _put_back(values if first.guards else first.values)
                except Exception as error:
                    failure = failure or error
                key = id(first.module)
                if not first.guards and _touched.get(key) is first:
                    del _touched[key]
            self._saved.pop()
        self.__class__ = Guard
        if failure is not None:
            raise failure

    def _unwatch(self) -> None:
        thread: Any = self._thread
        with _lock:
            guards = _watching.setdefault(thread, [])
            if guards and guards[-1]() is self:
                guards.pop()
            else:  # closed out of order: by its finalizer, where the reference may be dead, or after an interrupt
                guards[:] = [ref for ref in guards if ref() is not None and ref() is not self]
            if not guards:
                del _watching[thread]
            if not _watching:
                _switch_hook(False)
        self._thread = None


class _OpenGuard(Guard):
    """Until it is closed, a guard that an interrupt lost closes itself. Afterwards it has no finalizer, in which
    an interrupt would be lost in turn."""

    def __del__(self) -> None:
        self.close()


_idle = Guard()


def enter(function: Any, others: tuple[Any, ...] = ()) -> Guard | None:
    """Called by C before ``function`` runs again; it calls ``close()`` of the guard afterwards, in any case.

    ``others``: those of its arguments that are no tensors. None: there is no stateful module in the function. What C is
    told of modules and functions holds until :func:`forget` calls ``_C.forget_modules()``.
    """
    roots: list[Module] = []
    if type(function) is FunctionType:
        if _known((function, others), roots, 0) and not [root for root in roots if _stateful(root)]:
            if not any(isinstance(constant, CodeType) for constant in function.__code__.co_consts):
                _C.remember_stateless([function.__code__, *roots, *_PLAIN, torch.nn.Parameter])
            return None
        roots, watch = [], True
    else:
        watch = _collect(function, roots)
    found = _stateful(roots[0]) if len(roots) == 1 else [ref for root in roots for ref in _stateful(root)]
    if not found and not watch:
        if isinstance(function, Module):
            _C.remember_stateless([function])
        return None
    guard = _OpenGuard()
    try:
        for ref in found:
            guard.save(ref())
        if watch:
            guard.watch()
    except BaseException:
        guard.close()
        raise
    return guard if guard._saved or watch else _idle


# ---- watching calls ----

#: torch's dictionary of global forward pre-hooks and our key in it.
_call_hooks: Any = None
_call_hook_id = 0

#: torch.compile(module) warns of global hooks; ours is of no concern to its user.
_COMPILED = (
    "ignore",
    re.compile("Using `torch.compile\\(module\\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)


def _on_call(module: Module, args: Any) -> None:
    stateful = isinstance(module, _classes)
    if not stateful and "_orig_mod" not in module._modules:
        return
    guards = _watching.get(get_ident())
    guard = guards[-1]() if guards else None
    if guard is None:
        return
    if stateful:
        guard.save(module)
    else:  # torch.compile(module): no hook is called inside
        for ref in _stateful(module):
            guard.save(ref())


def _switch_hook(on: bool) -> None:
    """The global hook is there only while some guard watches: with it, every module call is slower."""
    global _call_hooks, _call_hook_id
    if _call_hooks is None:
        handle = register_module_forward_pre_hook(_on_call)
        handle.remove()
        _call_hooks, _call_hook_id = handle.hooks_dict_ref(), handle.id
    if on == (_call_hook_id in _call_hooks):
        return
    filters: Any = warnings.filters
    if on:
        _call_hooks[_call_hook_id] = _on_call
        if "torch._dynamo" in sys.modules:
            filters.insert(0, _COMPILED)
    else:
        del _call_hooks[_call_hook_id]
        if _COMPILED in filters:
            filters.remove(_COMPILED)


register(_NormBase, _norm_names)
