"""What a step can reach and change, to be put back: :class:`Reachable`."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

#: Packages whose classes and globals are not the user's.
_FOREIGN = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "gradckpt", "triton", "pytest", "_pytest"}
#: What of these may hold what a step made; other threads change what others of Python hold.
_HOLDERS = {"builtins", "collections", "functools", "weakref", "types", "_thread", "random"}
#: What of torch a step changes and must find again.
_MACHINERY = ("torch.distributed", "torch.cuda", "torch._")
#: They hold samples, and what steps do not change.
_DATA = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.optim.Optimizer)

_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice}
_CACHE: Any = type(functools.lru_cache(lambda: None))
_ABSENT = object()
#: They hold what they call, and nothing that changes.
_PASSING = {types.MethodType, functools.partial, staticmethod, classmethod, property}

#: The elements of larger containers are not looked at, and larger tensors, or more bytes of
#: tensors, are not copied.
_MOST, _LARGE, _ALL = 10_000, 2**26, 2**30


class Reachable:
    """All objects that a model and others lead to, and what they hold now: attributes, slots,
    containers, closures, caches of functions, and the globals that functions name.

    ``values``: what tensors hold, too. ``leaves``: the tensors that may get gradients.
    """

    def __init__(self, model: Module, *others: Any, values: bool) -> None:
        self.leaves: list[Tensor] = []
        self._values = values
        self._left = _ALL
        self._buffers = set(map(id, model.buffers())) if values else set()
        self._seen: dict[int, Any] = {}  # so that no other object gets an id
        self._names: set[tuple[int, str]] = set()
        self._undo: list[Callable[[], object]] = []
        self._watched: list[tuple[Any, Callable[[], object], object]] = []
        self._stack: list[Any] = [*contextvars.copy_context().values(), *reversed(others), model]
        while self._stack:
            x = self._stack.pop()
            if type(x) not in _ATOMS and id(x) not in self._seen:
                self._seen[id(x)] = x
                self._visit(x, type(x))

    @property
    def known(self) -> Container[int]:
        """The ids of these objects."""
        return self._seen

    def put_back(self) -> None:
        """Let all of them hold what they held."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def changed(self) -> Any:
        """Return an object that cannot be put back and has changed, None if there is none."""
        return next((x for x, look, before in self._watched if look() != before), None)

    # ---- the walk

    def _visit(self, x: Any, kind: type) -> None:
        if issubclass(kind, Tensor):
            self._keep_tensor(x, kind)
        elif kind is types.FunctionType:
            self._visit_function(x)
        elif issubclass(kind, type):
            self._visit_class(x)
        elif kind is _CACHE:
            self._keep_cache(x)
        elif kind in _PASSING:
            self._follow(gc.get_referents(x))
        elif issubclass(kind, weakref.ref):
            self._stack.append(x())
        elif kind is types.GeneratorType:
            self._watch(x, lambda: _position(x))
        elif not issubclass(kind, (types.ModuleType, *_DATA)):
            self._visit_object(x, kind)

    def _visit_object(self, x: Any, kind: type) -> None:
        if issubclass(kind, (tuple, frozenset)):
            self._follow(x)
        elif issubclass(kind, dict):
            self._keep_dict(x)
        elif issubclass(kind, (list, set, collections.deque, bytearray)):
            self._keep_container(x)
        elif issubclass(kind, (random.Random, torch.Generator)):
            self._keep_generator(x)
        elif kind.__module__.partition(".")[0] == "numpy":
            self._keep_of_numpy(x)
        name = kind.__module__
        if name.partition(".")[0] == "gradckpt":
            self._follow((_attributes(x) or {}).values())
        elif name.startswith(_MACHINERY) and not issubclass(kind, Module):
            return
        elif not _is_foreign(name) or name in _HOLDERS or name.startswith("torch.") or kind is threading.local:
            self._keep_attributes(x, kind)
        self._stack.append(kind)

    def _follow(self, found: Iterable[Any]) -> None:
        self._stack += islice(found, _MOST)

    def _visit_function(self, x: Any) -> None:
        foreign = _is_foreign(x.__module__ or "")
        for cell in x.__closure__ or ():
            value = _inside(cell)
            if not foreign:
                self._undo.append(functools.partial(_refill, cell, value))
            self._stack.append(value)
        self._stack.append(vars(x).get("__wrapped__"))
        if foreign:
            return
        self._keep_dict(vars(x))
        self._stack += (x.__defaults__, x.__kwdefaults__)
        names = frozenset(_names_in(x.__code__))
        self._keep_globals(x.__globals__, names)
        for name in names:
            module = x.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not _is_foreign(module.__name__):
                self._keep_globals(vars(module), names)

    def _keep_globals(self, place: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if (id(place), name) not in self._names:
                self._names.add((id(place), name))
                value = place.get(name, _ABSENT)
                self._undo.append(functools.partial(_set_item, place, name, value))
                self._stack.append(value)

    def _visit_class(self, x: type) -> None:
        if _is_foreign(x.__module__):
            return
        before = {name: value for name, value in vars(x).items() if not _is_of_python(name)}
        self._undo.append(functools.partial(_restore_class, x, before))
        self._follow(before.values())
        self._stack += x.__mro__

    # ---- what is kept

    def _watch(self, x: Any, look: Callable[[], object]) -> None:
        self._watched.append((x, look, look()))

    def _keep_dict(self, x: dict[Any, Any]) -> None:
        before = list(dict.items(x))
        self._undo.append(functools.partial(_restore_dict, x, before))
        self._follow(chain.from_iterable(before[:_MOST]))

    def _keep_container(self, x: Any) -> None:
        before = list(x)
        self._undo.append(functools.partial(_restore_container, x, before))
        if not isinstance(x, bytearray):
            self._follow(before)

    def _keep_attributes(self, x: Any, kind: type) -> None:
        if (attributes := _attributes(x)) is not None and id(attributes) not in self._seen:
            self._seen[id(attributes)] = attributes
            self._keep_dict(attributes)
        for slot in _slots(kind):
            value = _slot_of(x, slot)
            self._undo.append(functools.partial(_set_slot, x, slot, value))
            self._stack.append(value)

    def _keep_cache(self, x: Any) -> None:
        """Keep what a cache of a function has; one with a limit can only be emptied."""
        inside = [each for each in gc.get_referents(x) if type(each) is dict and each is not vars(x)]
        if x.cache_parameters()["maxsize"] is None and len(inside) == 1:
            self._keep_dict(inside[0])
        else:
            before = x.cache_info()
            self._undo.append(functools.partial(_empty_cache, x, before.misses, before.currsize))
            self._follow(gc.get_referents(x))
        self._stack.append(x.__wrapped__)

    def _keep_generator(self, x: Any) -> None:
        if isinstance(x, random.Random):
            self._undo.append(functools.partial(x.setstate, x.getstate()))
        else:
            self._undo.append(functools.partial(x.set_state, x.get_state()))

    def _keep_of_numpy(self, x: Any) -> None:
        numpy = sys.modules["numpy"]
        if isinstance(x, numpy.random.Generator):
            self._undo.append(functools.partial(setattr, x.bit_generator, "state", x.bit_generator.state))
        elif isinstance(x, numpy.random.RandomState):
            self._undo.append(functools.partial(x.set_state, x.get_state()))
        elif isinstance(x, numpy.ndarray) and x.dtype != object and x.flags.writeable and self._takes(x.nbytes):
            self._undo.append(functools.partial(numpy.copyto, x, x.copy()))

    def _keep_tensor(self, x: Tensor, kind: type) -> None:
        if kind.__module__.startswith(_MACHINERY):
            return
        if (attributes := _attributes(x)) is not None:
            self._keep_dict(attributes)
        if (x.requires_grad or issubclass(kind, Parameter)) and _is_leaf(x):
            self.leaves.append(x)
        if not self._values or issubclass(kind, Parameter) or x.device.type == "meta" or _is_emptied(x):
            return
        if id(x) in self._buffers or (_is_plain(x, kind) and self._takes(x.nbytes)):
            before = x.detach().to("cpu", copy=True)
            self._undo.append(functools.partial(_restore_tensor, x, None if x.is_inference() else x._version, before))
        elif not x.is_inference():
            self._watch(x, lambda: x._version)

    def _takes(self, nbytes: int) -> bool:
        """Return whether so many bytes may still be copied."""
        if nbytes > min(_LARGE, self._left):
            return False
        self._left -= nbytes
        return True


# ---- what objects are


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _is_of_python(name: str) -> bool:
    return name in ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")


def _is_plain(x: Tensor, kind: type) -> bool:
    """Return whether a tensor can be copied, and be written with the copy."""
    if kind is not Tensor or x.layout is not torch.strided or x.is_quantized:
        return False
    return all(stride or size < 2 for size, stride in zip(x.shape, x.stride(), strict=True))


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view that must not be used any more
        return False


def _is_emptied(x: Tensor) -> bool:
    """Return whether the storage was resized to nothing, as FSDP does."""
    try:
        return bool(x.numel()) and not x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # it has none
        return False


def _attributes(x: Any) -> dict[str, Any] | None:
    if isinstance(x, threading.local):
        return vars(x)  # of this thread
    try:
        found = object.__getattribute__(x, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


@functools.cache
def _slots(kind: type) -> tuple[Any, ...]:
    own = [each for each in kind.__mro__ if "__slots__" in vars(each) and not _is_foreign(each.__module__)]
    return tuple(x for each in own for x in vars(each).values() if type(x) is types.MemberDescriptorType)


def _slot_of(x: Any, slot: Any) -> Any:
    try:
        return slot.__get__(x)
    except AttributeError:
        return _ABSENT


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


def _position(generator: Any) -> object:
    """Return where a generator is, and what its variables are."""
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, [(name, id(value)) for name, value in frame.f_locals.items()])


# ---- putting back


def _is_gone(x: Any) -> bool:
    return isinstance(x, weakref.ref) and x() is None


def _restore_dict(x: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(x))
    if len(now) == len(before) and all(a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)):
        return
    kind: Any = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
    kind.clear(x)
    for key, value in before:
        if not _is_gone(key) and not _is_gone(value):
            kind.__setitem__(x, key, value)


def _restore_container(x: Any, before: list[Any]) -> None:
    now = list(x)
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return
    kind: Any = next(each for each in (list, set, collections.deque, bytearray) if isinstance(x, each))
    kind.clear(x)
    (kind.update if kind is set else kind.extend)(x, before)


def _restore_class(x: type, before: dict[str, Any]) -> None:
    now = {name: value for name, value in vars(x).items() if not _is_of_python(name)}
    for name, value in before.items():
        if now.get(name, _ABSENT) is not value:
            type.__setattr__(x, name, value)
    for name in now.keys() - before.keys():
        type.__delattr__(x, name)


def _restore_tensor(x: Tensor, version: int | None, before: Tensor) -> None:
    if _is_emptied(x):
        return
    if x._version != version or not torch.equal(x.detach().cpu(), before):
        x.data.copy_(before)  # which graphs that hold it need not know


def _set_item(place: dict[str, Any], name: str, value: Any) -> None:
    if value is not _ABSENT:
        place[name] = value
    else:
        place.pop(name, None)


def _set_slot(x: Any, slot: Any, value: Any) -> None:
    now = _slot_of(x, slot)
    if value is _ABSENT and now is not _ABSENT:
        slot.__delete__(x)
    elif now is not value:
        slot.__set__(x, value)


def _refill(cell: types.CellType, value: Any) -> None:
    if value is not _ABSENT:
        cell.cell_contents = value
    elif _inside(cell) is not _ABSENT:
        del cell.cell_contents


def _empty_cache(x: Any, misses: int, size: int) -> None:
    holds_tensors = any(isinstance(each, Tensor) for each in gc.get_referents(x))
    if x.cache_info().misses != misses and (holds_tensors or not size):
        x.cache_clear()
