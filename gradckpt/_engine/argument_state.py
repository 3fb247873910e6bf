"""Arguments of a region beside their values: state that a restored one gets back, writes of the
region that another argument or the caller sees, and, with ``debug=True``, what has changed since.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import itertools
import reprlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gradckpt._compression import warn_user
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import module_behind, name_of

# ---- state: attributes of tensors, and what pytree drops of containers ----

# C calls this for the rare argument that has any. Only plain values may be carried to another
# object: a tensor, or an object of unknown kind, might refer to what is being compressed.

_SCALARS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SEQUENCES = frozenset((tuple, list, set, frozenset, torch.Size))

#: A container inside an argument, by the positions of its children, with its attributes.
State = list[tuple[tuple[int, ...], dict[str, Any]]]


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in _SCALARS or isinstance(value, enum.Enum):
        return True
    if depth > 20:  # it may contain itself
        return False
    if kind in _SEQUENCES:
        return all(_is_plain(item, depth + 1) for item in value)
    return kind is dict and all(_is_plain(k, depth + 1) and _is_plain(v, depth + 1) for k, v in value.items())


def plain_attributes(attributes: dict[str, Any]) -> dict[str, Any] | None:
    """Return a copy, or None where a value is not plain."""
    return dict(attributes) if _is_plain(attributes) else None


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether they are one object, or equal containers of such and of plain values."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > 20:
        return False
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(value, b[key], depth + 1) for key, value in a.items())
    return _is_plain(a) and bool(a == b)


def attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    state = object.__getstate__(x)  # None, a dict, or the dict and the slots
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts for name, value in (part or {}).items()}


def _items(container: Any) -> Any:
    """Return what it holds as a dict or sequence."""
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, (tuple, list)) else None


def _children(container: Any) -> tuple[list[Any], Any]:
    children, spec = private.tree_flatten(container, is_leaf=lambda x: x is not container)
    return children, spec


def _lost(container: Any, children: list[Any], spec: Any, only_plain: bool) -> dict[str, Any] | None:
    """Return the attributes that pytree does not give back; None where it cannot be a copy."""
    twin = private.tree_unflatten(children, spec)
    if only_plain and (type(twin) is not type(container) or not _same(_items(container), _items(twin))):
        return None
    made = attributes_of(twin)
    lost = {
        name: value
        for name, value in attributes_of(container).items()
        if name not in made or not _same(value, made[name])
    }
    return None if only_plain and not _is_plain(lost) else lost


def _add_state(state: State, container: Any, path: tuple[int, ...], only_plain: bool) -> bool:
    """Return whether all of it can be carried."""
    children, spec = _children(container)
    if len(children) == 1 and children[0] is container:
        return True  # a leaf
    if type(container) not in (tuple, list, dict):
        lost = _lost(container, children, spec, only_plain)
        if lost is None:
            return False
        if lost:
            state.append((path, lost))
    inner = ((i, child) for i, child in enumerate(children) if not isinstance(child, torch.Tensor))
    return all(_add_state(state, child, (*path, i), only_plain) for i, child in inner)


def container_state(container: Any, only_plain: int) -> State | None:
    """Return what pytree drops of the container and of those inside it; None where some of that is
    not plain, so that no copy is what the container is.
    """
    state: State = []
    return state if _add_state(state, container, (), bool(only_plain)) else None


def give_container_state(container: Any, state: State) -> None:
    for path, attributes in state:
        at = container
        for i in path:
            at = _children(at)[0][i]
        own = getattr(at, "__dict__", None)
        for name, value in attributes.items():
            if own is None or isinstance(getattr(type(at), name, None), types.MemberDescriptorType):
                object.__setattr__(at, name, value)  # a slot
            else:
                own[name] = value


# ---- writes of the region to its arguments ----

#: An argument, what the function got for it, the payload that holds it or None, and its version
#: (-1: none).
Row = tuple[torch.Tensor, torch.Tensor, Any, int]


def check_and_write_back(rows: list[Row]) -> None:
    """Check all writes, then copy what a region wrote to the fake-quantized replacement of an
    argument to the argument.

    Raises:
        RuntimeError: A write reached two arguments, one of which is restored from a payload; or the
            replacement's shape or dtype changed, so it cannot be copied.
    """
    for i, (x, fed, packed, version) in enumerate(rows):
        if version < 0 or fed._version == version:
            continue
        for j, (other, _, other_packed, _) in enumerate(rows):
            if i != j and (packed or other_packed) and overlap(x, other):
                raise RuntimeError(
                    "gradckpt: a compressed region writes in place to an argument that shares memory with another, of "
                    f"shapes {list(x.shape)} and {list(other.shape)}; clone one of them"
                )
    for x, fed, _, version in rows:
        if fed is x or fed._version == version:
            continue
        if fed.shape != x.shape or fed.dtype != x.dtype:
            raise RuntimeError(
                "gradckpt: a region with fake_quantize=True changed the shape of its input in place, "
                f"{list(x.shape)} to {list(fed.shape)}; clone the input first"
            )
        x.copy_(fed)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the tensors share an element.

    For layouts that no slicing of a contiguous tensor makes, it returns True when unsure.
    """
    if a.numel() == 0 or b.numel() == 0 or not _one_storage(a, b):
        return False
    if a.data_ptr() > b.data_ptr():
        a, b = b, a
    offset, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if offset > sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)):
        return False
    if rest or a.element_size() != b.element_size():
        return True
    return _boxes_overlap(_sizes(a), _sizes(b), offset)


def _one_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # subclasses without a storage
        return False


def _sizes(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions with more than one element and a nonzero stride."""
    return [(s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s > 0]


def _boxes_overlap(a: list[tuple[int, int]], b: list[tuple[int, int]], offset: int) -> bool:
    """Return whether two layouts share an element; ``b`` begins ``offset`` elements after ``a``.

    The strides of both are the weights of digits. Each tensor is a box of digits, and two boxes
    meet where the intervals of all digits do.
    """
    strides = sorted({stride for stride, _ in (*a, *b)}, reverse=True)
    sizes_a, sizes_b = dict(a), dict(b)
    if len(sizes_a) < len(a) or len(sizes_b) < len(b):
        return True
    if any(wide % narrow for wide, narrow in itertools.pairwise(strides)):
        return True
    outer, apart = 0, False
    for stride in strides:
        begin, offset = divmod(offset, stride)
        size_a, size_b = sizes_a.get(stride, 1), sizes_b.get(stride, 1)
        if outer and max(size_a, begin + size_b) > outer // stride:
            return True  # it carries into the digit before, so it is not a box
        apart |= begin >= size_a
        outer = stride
    return not (apart or offset)


# ---- what changed since the forward: only debug=True looks ----

# Seen are tensors (their versions, and whether they are the same objects), numbers and texts, in
# containers and in the attributes of objects. What the region has a copy of, such as a compressed
# tensor and the list around it, is left out. A tensor is known by a weak reference.

#: Deeper values, and those after so many, are not looked at.
DEPTH = 9
COUNT = 2000
#: So many changes are named.
NAMED = 5

_CONTAINERS = (dict, list, tuple, set, frozenset)
_VERSION = "version "
#: Objects of these change for reasons of their own (locks, loggers), or tell nothing (functions).
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_FOREIGN = (sys.stdlib_module_names - {"types", "argparse"}) | {"torch", "numpy"}

_Inside = list[tuple[str, Any]]


class _Seen(NamedTuple):
    """One value: what is compared, and the words for it."""

    key: Any
    text: str
    tensor: weakref.ref[torch.Tensor] | None = None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _tensor(x: torch.Tensor) -> _Seen:
    version = -1 if x.is_inference() else x._version
    itself = weakref.ref(x)  # equal ones would compare values; for one tensor it is one object
    return _Seen((id(itself), version), f"{_VERSION}{version}", itself)


def _container(x: Any) -> tuple[_Seen, _Inside]:
    first = list(itertools.islice(x.items() if isinstance(x, dict) else x, COUNT))
    inside: _Inside = []
    if isinstance(x, dict):
        inside = [(f"[{reprlib.repr(k)}]", value) for k, value in first]
    elif isinstance(x, (list, tuple)):
        names = [f".{name}" for name in getattr(x, "_fields", ())] or [f"[{i}]" for i in range(len(first))]
        inside = list(zip(names, first, strict=True))
    keys = frozenset(path for path, _ in inside) if isinstance(x, dict) else None
    return _Seen((type(x), len(x), keys), _count(len(x), "item")), inside


def _attributes(x: Any) -> _Inside:
    return [(f".{name}", value) for name, value in attributes_of(x).items()]


def _look(x: Any) -> tuple[_Seen | None, _Inside]:
    """Return what is seen of a value itself, and what is in it."""
    kind = type(x)
    if isinstance(x, torch.Tensor):
        return _tensor(x), _attributes(x)
    if isinstance(x, torch.nn.Module):  # its running statistics and caches are its own affair
        return None, [(f".{name}", parameter) for name, parameter in x.named_parameters()]
    if isinstance(x, _SCALARS):
        return _Seen(repr(x), reprlib.repr(x)), []  # NaN equals NaN
    if isinstance(x, _CONTAINERS):
        seen, inside = _container(x)
        return seen, inside + ([] if kind in _CONTAINERS else _attributes(x))
    if kind is functools.partial:
        return None, [(".args", x.args), (".keywords", x.keywords), (".func", x.func)]
    if isinstance(x, _OPAQUE) or kind.__module__.partition(".")[0] in _FOREIGN:
        return _Seen(kind, kind.__name__), []
    inside = _attributes(x)
    return _Seen((kind, len(inside)), f"{kind.__name__} with {_count(len(inside), 'attribute')}"), inside


def _differences(then: dict[str, _Seen], now: dict[str, _Seen]) -> list[str]:
    found = []
    for path in (path for path in then if path in now and then[path].key != now[path].key):
        before, after = then[path], now[path]
        same = "another tensor" if before.tensor is not None else "other contents"
        tensor = after.text.removeprefix(_VERSION) if before.tensor is not None else "a tensor"
        changed = f"{before.text}, now {after.text if after.tensor is None else tensor}"
        found.append(f"{path}: {same if before.text == after.text else changed}")
    return found[:NAMED] + ([f"and {len(found) - NAMED} more"] if len(found) > NAMED else [])


def _parameter_versions(function: Any) -> list[tuple[str, torch.Tensor, int]]:
    module = module_behind(function)
    return [] if module is None else [(name, p, p._version) for name, p in module.named_parameters()]


def _check_parameters(parameters: list[tuple[str, torch.Tensor, int]]) -> None:
    changed = [f"{name} (version {then}, now {p._version})" for name, p, then in parameters if p._version != then]
    if changed:
        raise RuntimeError(
            "gradckpt: parameters changed between the forward and the recompute of their region, so gradients would be "
            f"wrong; call optimizer.step() after backward: {', '.join(changed)}"
        )


class Watch:
    """The contexts of the two runs, which look at parameters and arguments before each."""

    def __init__(self, function: Any, forward: Any, recompute: Any) -> None:
        self._name = name_of(function)
        self._parameters = _parameter_versions(function)
        self._bound = function if isinstance(function, functools.partial) else None
        self._forward, self._recompute = forward, recompute
        self._kept: set[str] = set()  # paths of what the region keeps by reference
        self._seen: dict[str, _Seen] = {}

    def _walk(self, args: Any, kwargs: Any, frame: Any = None) -> dict[str, _Seen]:
        """Return what is seen, by path, the nearest first.

        With a frame, remember what it keeps: the rest is made anew for the recompute.
        """
        kept = set() if frame is None else {id(x) for x in gc.get_referents(frame)}
        seen: dict[str, _Seen] = {}
        waiting: list[tuple[str, Any, bool, tuple[int, ...]]]
        waiting = [("args", args, False, ()), ("kwargs", kwargs, False, ()), ("function", self._bound, True, ())]
        for path, x, within, around in waiting:
            if not within and id(x) in kept:
                self._kept.add(path)
            within = within or path in self._kept
            if len(seen) >= COUNT or id(x) in around or not (within or issubclass(type(x), _CONTAINERS)):
                continue
            try:
                itself, inside = _look(x)
            except Exception:  # an object that cannot be read is not looked at
                continue
            if itself is not None and within:
                seen[path] = itself
            if len(around) < DEPTH and len(waiting) < 4 * COUNT:
                waiting += [(path + name, value, within, (*around, id(x))) for name, value in inside]
        return seen

    @contextlib.contextmanager
    def around_forward(self, frame: Any, args: Any, kwargs: Any) -> Iterator[None]:
        self._seen = self._walk(args, kwargs, frame)
        with self._forward:
            yield

    @contextlib.contextmanager
    def around_recompute(self, args: Any, kwargs: Any) -> Iterator[None]:
        _check_parameters(self._parameters)
        changed = _differences(self._seen, self._walk(args, kwargs))
        if changed:
            warn_user(
                f"gradckpt: arguments of {self._name} changed between the forward of its region and the recompute; "
                f"change them after backward, or pass a copy: {', '.join(changed)}",
                UserWarning,
            )
        with self._recompute:
            yield
