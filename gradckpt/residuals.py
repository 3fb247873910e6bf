"""What a forward would keep for its backward: :func:`residuals`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradckpt import _torch_private as private
from gradckpt.stats import format_bytes

__all__ = ["Residual", "Residuals", "residuals"]

#: Frames of these are no user's source lines.
_HIDDEN = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, __file__))

#: A tensor that no node of the graph holds: the input of a checkpoint region, or of a node that dies with the call.
_NO_NODE = "(no node)"

#: torch 2.12 and later: a SavedTensor tells what the hook gave for it.
_SHOWS_DATA = hasattr(private.SavedTensor, "data")


@dataclasses.dataclass(frozen=True)
class Residual:
    """One tensor that autograd saved.

    ``operator``: name of the node that holds it, without ``Backward0``; ``"(no node)"`` for what is kept outside the
    graph, as the inputs of a checkpoint region are. ``argument``: what that node calls it. ``source``: ``file:line``
    of the innermost frame outside torch and gradckpt. ``bytes``: what it adds, its whole storage; 0 when that is
    alive anyway, which ``shared`` says: ``"parameter"``, ``"input"``, ``"residual"`` (an earlier row has it), ``""``.
    """

    operator: str
    argument: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    shared: str


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The rows in the order in which autograd saved them; ``str()`` is the table."""

    rows: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the graph keeps alive and that nothing else does."""
        return sum(row.bytes for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Residual:
        return self.rows[index]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row, which JSON can carry."""
        return [dataclasses.asdict(row) | {"shape": list(row.shape)} for row in self.rows]

    def table(self) -> str:
        """Plain text, one line for each row, and the total."""
        head = ("operator", "argument", "shape", "dtype", "bytes", "shared", "source")
        cells = [
            (r.operator, r.argument, "x".join(map(str, r.shape)) or "()", r.dtype, f"{r.bytes:,}", r.shared, r.source)
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [
            "  ".join(c.rjust(w) if i == 4 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in (head, *cells)
        ]
        total = f"{len(self.rows)} tensors saved, {self.total_bytes:,} bytes ({format_bytes(self.total_bytes)})"
        return "\n".join([line.rstrip() for line in lines] + [total])

    __str__ = table


class _Saved:
    """What the hook gave autograd for one tensor."""

    __slots__ = ("argument", "operator", "parameter", "source", "tensor")

    def __init__(self, x: torch.Tensor, source: str) -> None:
        # Detached: a node must not hold, through us, the tensor that it made.
        self.tensor = x if x.is_leaf else x.detach()
        self.parameter = isinstance(x if x._base is None else x._base, torch.nn.Parameter)
        self.source = source
        self.operator = _NO_NODE
        self.argument = ""


def _source() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_HIDDEN, "<")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "(unknown)"


class _Recorder:
    """Saved-tensor hooks that remember every tensor, in order."""

    def __init__(self) -> None:
        self.saved: list[_Saved] = []
        self.unpacked: list[_Saved] = []

    def pack(self, x: torch.Tensor) -> _Saved:
        one = _Saved(x, _source())
        self.saved.append(one)
        return one

    def unpack(self, one: _Saved) -> torch.Tensor:
        self.unpacked.append(one)
        return one.tensor

    def name(self, outputs: Any) -> None:
        """Find the node that holds each."""
        stack = [x.grad_fn for x in private.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            operator = node.name()
            for argument, one in self._held(node) if _SHOWS_DATA else self._read(node):
                one.operator = operator.rpartition("Backward")[0] or operator
                one.argument = argument
            stack.extend(edge[0] for edge in node.next_functions)

    def _held(self, node: Any) -> Iterator[tuple[str, _Saved]]:
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                raw = getattr(node, attribute)
                for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                    if isinstance(saved.data, _Saved):
                        yield attribute.removeprefix("_raw_saved_"), saved.data

    def _read(self, node: Any) -> Iterator[tuple[str, _Saved]]:
        """By unpacking, which shows what is behind; a region unpacks its inputs, too, to make other tensors."""
        for attribute in dir(node):
            if not attribute.startswith("_saved_") and attribute != "saved_tensors":
                continue
            self.unpacked.clear()
            try:
                read = private.tree_leaves(getattr(node, attribute))
            except RuntimeError:  # freed by a backward inside the function
                continue
            storages = {_storage(x) for x in read if isinstance(x, torch.Tensor)}
            for one in self.unpacked:
                if _storage(one.tensor) in storages:
                    yield attribute.removeprefix("_saved_").removeprefix("saved_"), one


def _storage(x: torch.Tensor) -> tuple[int, int] | None:
    """What tensors in the same memory have in common, and its bytes; None: no memory of this kind."""
    try:
        storage = x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other wrappers
        return None
    return (storage._cdata, storage.nbytes()) if storage.nbytes() else None


def _parameters(fn: Any) -> list[torch.Tensor]:
    """Parameters and buffers of the module behind a function, as far as it can be seen."""
    fn = getattr(fn, "func", fn)
    owner = getattr(fn, "__self__", fn)
    return [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else []


def _rows(saved: list[_Saved], fn: Any, inputs: Any) -> Iterator[Residual]:
    known: dict[Any, str] = {}
    for kind, tensors in (("parameter", _parameters(fn)), ("input", private.tree_leaves(inputs))):
        for x in tensors:
            found = _storage(x) if isinstance(x, torch.Tensor) else None
            if found is not None:
                known.setdefault(found, kind)
    for one in saved:
        x = one.tensor
        key = _storage(x) or (id(x), x.numel() * x.element_size())
        shared = "parameter" if one.parameter else known.get(key, "")
        known.setdefault(key, shared or "residual")
        yield Residual(
            one.operator,
            one.argument,
            one.source,
            tuple(x.shape),
            str(x.dtype).removeprefix("torch."),
            str(x.device),
            0 if shared else key[1],
            shared,
        )


def residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """Run ``fn(*args, **kwargs)`` once and list what it would keep for backward.

    Args:
        fn: A function or a ``Module``. It runs as it would in training, with grad enabled; its result is dropped and
            random generators are put back. What else it does stays done (running statistics, printing).
        *args, **kwargs: For it; tensors among them count as inputs, which are alive anyway.

    Returns:
        :class:`Residuals`: the rows as objects, ``.table()`` as text, ``.to_dicts()`` as data, ``.total_bytes``. Of
        checkpoint regions inside, only what the regions keep is listed.

    Raises:
        What ``fn`` raises. RuntimeError where torch has disabled saved-tensor hooks.
    """
    recorder = _Recorder()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            outputs = fn(*args, **kwargs)
        recorder.name(outputs)
    return Residuals(tuple(_rows(recorder.saved, fn, (args, kwargs))))
