"""Tensors without values, and what a simulated step has to know of operators on them.

Their addresses are of memory that is never touched (:func:`shared_space`). All modes share them and
take them in turn: there is room for few such spaces, and what a step keeps must not lie where a
later one puts its tensors. Meta kernels say what operators return (:func:`meta_results`).

Where a tensor has several uses, autograd's engine adds their gradients, in place if nothing else
holds the first one. Under a dispatch mode it never does, so a mode has to tell where it would
(:func:`accumulates_in_place`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._trial_process import shown_as_base

aten = torch.ops.aten


@shown_as_base
class NotSimulated(RuntimeError):
    """An operator needs the values of a tensor that has none, or cannot be run without values."""


_ADDRESSES = 2**44
_ALIGNMENT = 64
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13


class _Mapped(mmap.mmap):
    """What reads one of them by mistake finds zeros."""

    first = next = 0


class _Unmapped(ctypes.c_byte * _ADDRESSES):  # type: ignore[misc]
    """Addresses that the system does not give away, for a process that may not have so large
    a mapping (``ulimit -v``, strict overcommitting).
    """

    first = next = 0


def _unused(size: int) -> int:
    """Return the address of so many bytes in the middle of the largest gap between mappings, to
    whose ends the system adds new ones.
    """
    with open("/proc/self/maps") as file:
        bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in file]
    ends = [end for _, end in bounds if end < 2**47]
    gaps = [(start - end, end) for end, (start, _) in zip([2**32, *ends], bounds, strict=False) if start < 2**47]
    length, first = max(gaps)
    if length < 2 * size:
        raise OSError("gradckpt: this process has no addresses for a simulated step; plan in another one")
    return first + (length - size) // 2 // mmap.PAGESIZE * mmap.PAGESIZE


_spaces: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def shared_space() -> Any:
    """Return the addresses that all simulated tensors take in turn."""
    space: Any = _spaces.get("")
    if space is None:
        try:
            space = _Mapped(-1, _ADDRESSES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError:
            space = _Unmapped.from_address(_unused(_ADDRESSES))
        space.first = torch.frombuffer(space, dtype=torch.uint8, count=1).data_ptr()
        _spaces[""] = space
    return space


def take(space: Any, nbytes: int) -> Any:
    """Return a storage of so many bytes, which keeps the space."""
    if space.next + nbytes > _ADDRESSES:
        space.next = 0
    whole = torch.frombuffer(space, dtype=torch.uint8, count=nbytes, offset=space.next)
    space.next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return whole.untyped_storage()


def bounds(space: Any) -> tuple[int, int]:
    """Return the first address, and that after the last one."""
    return space.first, space.first + _ADDRESSES


def tensors_without_values() -> list[torch.Tensor]:
    """Return the tensors that Python knows and that have no values."""
    if (space := _spaces.get("")) is None:
        return []
    first, end = bounds(space)
    found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not has_rules(type(x)))
    return [x for x in found if x.device.type == "cpu" and first <= _address(x) < end]


def _address(x: torch.Tensor) -> int:
    try:
        return int(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return 0


_READING = ("numpy", "tolist", "__dlpack__")  # numpy.asarray(x) calls the first


@contextlib.contextmanager
def refuse_reads(has_values: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Raise :class:`NotSimulated` where a method that reads memory meets a simulated tensor."""
    own = {name: vars(torch.Tensor)[name] for name in _READING if name in vars(torch.Tensor)}
    for name in _READING:
        setattr(torch.Tensor, name, _refusing(has_values, name))
    try:
        yield
    finally:
        for name in _READING:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)  # TensorBase has torch's own


def _refusing(has_values: Callable[[torch.Tensor], bool], name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layout is torch.strided and self.device.type == "cpu" and not has_values(self):
            reason = f"Tensor.{name}() reads values"
            raise NotSimulated(reason)
        return method(self, *args, **kwargs)

    return read


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_in(x)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def map_tensors(function: Any, tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, x) for x in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, x) for key, x in tree.items()}
    return tree


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


#: What operators returned on meta, by their operands' shapes: blocks of a model repeat them.
_seen: dict[Any, Any] = {}
_MOST_SEEN = 2**14


def meta_results(func: Any, args: Any, kwargs: Any) -> Any:
    key: Any = func, _frozen(args), _frozen(kwargs)
    try:
        found = _seen.get(key, _seen)
    except TypeError:  # an argument that has no hash
        return func(*map_tensors(_meta, args), **_meta_options(map_tensors(_meta, kwargs)))
    if found is _seen:
        found = func(*map_tensors(_meta, args), **_meta_options(map_tensors(_meta, kwargs)))
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[key] = found
    return found


def _frozen(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.size(), tree.stride(), tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple([_frozen(x) for x in tree])
    if isinstance(tree, dict):
        return tuple([(key, _frozen(x)) for key, x in tree.items()])
    return type(tree), tree  # 1, 1.0 and True are equal


def _meta_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {"device": torch.device("meta"), "pin_memory": False, "generator": None}
    return {name: changed.get(name, value) if value is not None else None for name, value in kwargs.items()}


#: Operators that only call others, which then run one by one: what these allocate counts, and a
#: region that keeps discrete results sees theirs. Other composite kernels may read memory.
_PARTS = {
    aten._safe_softmax.default,
    aten.logsumexp.default,
    aten.constant_pad_nd.default,
    aten.repeat.default,
}


class Again:
    """Enter a mode from inside its handler, for the operators that an operator calls.

    The key on which a region catches discrete operators is off within modes.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._key = _C.selective_key() if _C.replays_discrete() else None

    def __enter__(self) -> None:
        private.push_dispatch_mode(self._mode)
        if self._key is not None:
            self._included = private.is_included(self._key)
            self._excluded = private.is_excluded(self._key)
            private.set_excluded(self._key, False)
            private.set_included(self._key, True)

    def __exit__(self, *_: object) -> None:
        if self._key is not None:
            private.set_included(self._key, self._included)
            private.set_excluded(self._key, self._excluded)
        private.pop_dispatch_mode(None)


def has_rules(kind: type[torch.Tensor]) -> bool:
    """Return whether operators on tensors of this class run as the class says, as while something
    is traced.
    """
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@functools.cache
def composite_key(func: Any) -> Any:
    """Return where the kernel lies that only calls other operators; below autograd, a mode gets the
    operators that autograd would have taken apart.
    """
    if func.namespace == "fsdp":  # its operators call others, with one kernel for all devices or one for each
        on_cpu = private.has_kernel_for_key(func.name(), "CPU")  # torch crashes where the named key has none
        return private.DispatchKey.CPU if on_cpu else private.DispatchKey.CompositeExplicitAutograd
    implicit = private.has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
    if implicit and not private.has_kernel_for_key(func.name(), "CPU"):
        return private.DispatchKey.CompositeImplicitAutograd
    return private.DispatchKey.CompositeExplicitAutograd if func in _PARTS else None


#: Files of a mode's handler, and of torch that keep Dynamo away from it.
_WRAPS_HANDLERS = re.compile(r"(torch.(_compile\.py|_dynamo.eval_frame\.py)|_planning.simulation\.py)$")


def in_backward() -> bool:
    """Return whether a node of autograd runs, and not a region again."""
    return private.graph_task_id() != -1 and not torch.is_grad_enabled()


def accumulates_in_place(func: Any, args: Any) -> bool:
    """Return whether an operator is a sum that the engine would make in its first operand, outside
    of a dispatch mode. To be called by ``__torch_dispatch__``.
    """
    if func is not aten.add.Tensor or not in_backward():
        return False
    old = args[0]
    return (
        _is_dense(old)
        and private.storage_uses(old.untyped_storage()._cdata) <= 2  # the tensor, and the storage in Python
        and old._use_count() <= uses_of_one()
        and _is_of_the_engine(sys._getframe(1))
    )


#: With these, autograd's formulas fill zeros that they have just made: in place, but under a mode.
_FILLS = {aten.index_add.default, aten.index_put.default, aten.masked_scatter.default, aten.put.default}
_FILLS |= {aten.scatter.src, aten.scatter_add.default}


def fills_in_place(func: Any) -> bool:
    """Return whether an operator fills zeros for a formula of autograd, which outside of a dispatch
    mode would write into them. To be called by ``__torch_dispatch__``.
    """
    return func in _FILLS and in_backward() and _is_of_the_engine(sys._getframe(1))


def _is_dense(x: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.size(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_of_the_engine(frame: FrameType | None) -> bool:
    """Return whether no Python function runs between the engine and the mode's handler."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or _WRAPS_HANDLERS.search(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class _Counting(private.TorchDispatchMode):  # type: ignore[misc]
    uses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.uses = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@functools.cache
def uses_of_one() -> int:
    """Return the count of uses that a mode sees of a gradient which the engine alone holds. To be
    called outside of a backward.
    """
    with private.without_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        loss = torch.stack([y.sin(), y.cos()]).sum()
        with _Counting() as mode:
            torch.autograd.grad(loss, x)
    uses: int = mode.uses
    return uses
