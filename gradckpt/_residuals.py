"""List what a forward keeps for its backward: :func:`residuals`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradckpt import _C
from gradckpt._C import OP_LABEL, OP_SAVE
from gradckpt._engine import saved_roles, selective
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import module_behind
from gradckpt._engine.op_policy import Policy
from gradckpt._engine.trial_calls import graph_behind
from gradckpt._engine.user_lines import ENGINES, outside, outwards
from gradckpt._stats import advice, columns, format_bytes

#: A tensor outside all nodes of the graph: the input of a checkpoint region, or of a node that ends
#: with the call.
_NO_NODE = "(no node)"

#: Whether a SavedTensor shows the value that the hook returned.
_SHOWS_DATA = hasattr(private.SavedTensor, "data")


@dataclasses.dataclass(frozen=True)
class Residual:
    """One tensor that autograd saved.

    ``operator``: the name of the node that holds it, without ``Backward0``; ``"(no node)"`` for a
    tensor outside the graph, such as the input of a checkpoint region; for an output that a policy
    keeps in a region, the operator that made it. ``argument``: the node's name for it. ``module``:
    the name of the module that was running, or the class of the outermost one; ``""`` outside all
    modules. ``source``: ``file:line`` of the innermost frame outside torch and gradckpt. ``bytes``:
    the bytes that it adds, its whole storage; 0 if that is alive anyway, for the reason in
    ``shared``: ``"parameter"``, ``"input"``, ``"residual"`` (an earlier row has it), ``""``.
    """

    operator: str
    argument: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    shared: str


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The rows in the order in which autograd saved them; ``str()`` is the table.

    ``exact_functions``: the names of nodes, as ``operators=`` of
    :class:`gradckpt.CompressionConfig` takes them, of autograd Functions of which nothing is known,
    so that :class:`gradckpt.compress_saved` keeps what they save exactly.
    """

    rows: tuple[Residual, ...]
    exact_functions: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The bytes that only the graph keeps alive."""
        return sum(row.bytes for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Residual:
        return self.rows[index]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for each row, which JSON can carry."""
        return [dataclasses.asdict(row) | {"shape": list(row.shape)} for row in self.rows]

    def table(self) -> str:
        """Return plain text, one line for each row, and the total."""
        head = ("operator", "argument", "module", "shape", "dtype", "bytes", "shared", "source")
        cells = [
            (
                *(r.operator, r.argument, r.module, "x".join(map(str, r.shape)) or "()", r.dtype),
                *(f"{r.bytes:,}", r.shared, r.source),
            )
            for r in self.rows
        ]
        total = f"{len(self.rows)} tensors saved, {self.total_bytes:,} bytes ({format_bytes(self.total_bytes)})"
        rules = advice(self.exact_functions)
        exact = [f"compress_saved() keeps exactly what these save: {', '.join(self.exact_functions)};"] if rules else []
        return "\n".join([*columns([head, *cells], right=(5,)), total, *exact, *rules])

    __str__ = table


class _Saved:
    """A tensor that autograd saved, or that a policy keeps of one operator."""

    __slots__ = ("argument", "module", "operator", "parameter", "source", "tensor")

    def __init__(self, x: torch.Tensor, place: tuple[str, str], operator: str = _NO_NODE, argument: str = "") -> None:
        # It is detached: through this object, a node must not hold the tensor that it made.
        self.tensor = x if x.is_leaf else x.detach()
        self.parameter = isinstance(x if x._base is None else x._base, torch.nn.Parameter)
        self.source, self.module = place
        self.operator = operator
        self.argument = argument


#: The code object of every module call.
_CALL = getattr(private.module_call, "__code__", None)


class _Recorder:
    """Saved-tensor hooks that remember every tensor, in order."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self.root = root  # its forward may have been called without a call of the module
        self.saved: list[_Saved] = []
        self.unpacked: list[_Saved] = []
        self.stores: list[tuple[Any, Any, tuple[str, str]]] = []
        self.functions: set[str] = set()  # nodes of Functions of which nothing is known
        self.names: dict[int, dict[int, str]] = {}  # of the modules inside one, by the id of that one

    def place(self, frame: Any) -> tuple[str, str]:
        """Return the source line and the name of the module, from this frame outwards."""
        user = outside(frame, ENGINES)
        modules = [each.f_locals["self"] for each in outwards(frame) if each.f_code is _CALL]
        if self.root is not None and self.root not in modules[-1:]:
            modules.append(self.root)
        source = f"{user.f_code.co_filename}:{user.f_lineno}" if user is not None else "(unknown)"
        if not modules:
            return source, ""
        inner, outer = modules[0], modules[-1]
        names = self.names.setdefault(id(outer), {})
        if not names:
            names.update((id(module), name) for name, module in outer.named_modules())
        return source, names.get(id(inner)) or type(inner).__name__

    def pack(self, x: torch.Tensor) -> _Saved:
        one = _Saved(x, self.place(sys._getframe(1)))
        self.saved.append(one)
        return one

    def add_store(self, store: Any, policy: Any) -> None:
        """Record a region with a policy: the outputs that it keeps are not saved tensors. Called
        once for each.
        """
        self.stores.append((store, policy, self.place(sys._getframe(1))))

    def look_into_stores(self) -> None:
        for store, policy, place in self.stores:
            for op, calls in store.storage.items():
                rule = policy.rules.get(op) if isinstance(policy, Policy) else None
                if rule is not None and rule.keep not in (OP_SAVE, OP_LABEL):
                    continue  # kept by replay_discrete
                for kept in private.tree_leaves(list(calls.values())):
                    value = getattr(kept, "val", None)
                    arrays = (value.codes, value.scales) if isinstance(value, _C.Payload) else (value,)
                    self.saved += [_Saved(x, place, str(op), "output") for x in arrays if isinstance(x, torch.Tensor)]

    def unpack(self, one: _Saved) -> torch.Tensor:
        self.unpacked.append(one)
        return one.tensor

    def name(self, outputs: Any) -> None:
        """Find the node that holds each saved tensor."""
        for node in graph_behind(x for x in private.tree_leaves(outputs) if isinstance(x, torch.Tensor)):
            operator = node.name()
            for argument, one in self._held(node) if _SHOWS_DATA else self._read(node):
                one.operator = operator.rpartition("Backward")[0] or operator
                one.argument = argument
                if not saved_roles.is_known(node):
                    self.functions.add(operator)

    def _held(self, node: Any) -> Iterator[tuple[str, _Saved]]:
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                raw, argument = getattr(node, attribute), attribute.removeprefix("_raw_saved_")
                for place, saved in enumerate(raw if isinstance(raw, (tuple, list)) else (raw,)):
                    if isinstance(saved.data, _Saved):
                        yield str(place) if argument == "tensors" else argument, saved.data

    def _read(self, node: Any) -> Iterator[tuple[str, _Saved]]:
        """Yield the tensors that a node unpacks.

        A region also unpacks its inputs, to make other tensors, so storages are compared.
        """
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
    """Return an id that tensors in the same memory share, and its bytes; None without a storage."""
    try:
        storage = x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other wrappers
        return None
    return (storage._cdata, storage.nbytes()) if storage.nbytes() else None


def _rows(saved: list[_Saved], module: torch.nn.Module | None, inputs: Any) -> Iterator[Residual]:
    known: dict[Any, str] = {}
    parameters = [*module.parameters(), *module.buffers()] if module is not None else []
    for kind, tensors in (("parameter", parameters), ("input", private.tree_leaves(inputs))):
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
            one.module,
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
        fn: A function or a ``Module``. It runs as in training, with grad enabled; its result is
            dropped and random generators are restored. Other side effects remain (running
            statistics, printing).
        *args, **kwargs: Its arguments; tensors among them count as inputs, which are alive anyway.

    Returns:
        :class:`Residuals`: the rows as objects, ``.table()`` as text, ``.to_dicts()`` as data,
        ``.total_bytes``. For checkpoint regions inside, the rows are what the regions keep: their
        inputs, uncompressed or compressed, and the outputs that a policy keeps.

    Raises:
        RuntimeError: torch has disabled saved-tensor hooks. Exceptions of ``fn`` arrive unchanged.
    """
    module = module_behind(fn)
    recorder = _Recorder(module)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        with (
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
            selective.observed(recorder.add_store),
        ):
            outputs = fn(*args, **kwargs)
        recorder.name(outputs)
        recorder.look_into_stores()
    return Residuals(tuple(_rows(recorder.saved, module, (args, kwargs))), tuple(sorted(recorder.functions)))
