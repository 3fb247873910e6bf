"""Compiled graphs: the inputs of regions leave the forward graph as payloads.

A region's input passes one of two operators before it enters the region, which mark it for what follows:

* ``gradckpt::region_input(x, codec, version)``: exact mode. Returns ``x``; gone from the graph once that is packed.
* ``gradckpt::rounded(x, codec, version)``: replay mode. Returns what the codec makes of ``x``; its gradient goes
  straight through.

The version is :func:`version`, so that no graph comes from a cache that another gradckpt filled.

An output that a policy keeps compressed is marked by its node's ``meta`` (:func:`keep_packed`).

While AOTAutograd cuts the joint graph into forward and backward, the saved-tensor hooks of :data:`HOOKS` are on; it
calls them for every tensor that crosses the cut. They replace the marked ones by a payload in the forward and its
restored values in the backward, and let all others pass. Nothing of it is left when the graph runs but the
operators ``gradckpt::encode`` and ``gradckpt::decode``.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from gradckpt import _C
from gradckpt import _torch_private as private
from gradckpt.config import CompressionConfig, warn_inactive

__all__ = ["MARKS", "Packed", "available", "hooks", "keep_packed", "region_input", "rounded", "version"]

_library = torch.library.Library("gradckpt", "FRAGMENT")  # kept: what it registers goes with it
for _name in ("region_input", "rounded"):
    if not hasattr(torch.ops.gradckpt, _name):  # else by a gradckpt that was imported before: torch defines once
        _library.define(f"{_name}(Tensor x, str codec, str version) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

region_input = torch.ops.gradckpt.region_input.default
rounded = torch.ops.gradckpt.rounded.default
MARKS = (region_input, rounded)


@functools.cache
def version() -> str:
    """Of what rewrites graphs, and of the payloads: graphs in Inductor's cache on disk have been rewritten already."""
    from gradckpt import __version__

    return f"{__version__}+{zlib.crc32(Path(__file__).read_bytes()):08x}"


class Packed(NamedTuple):
    """One tensor that leaves a forward graph as a payload."""

    numel: int
    dtype: torch.dtype
    codec: str

    @classmethod
    def of(cls, x: torch.Tensor, codec: str) -> Packed:
        return cls(hint(x.numel()), x.dtype, codec)


class _Compiling(threading.local):
    """What this thread compiles."""

    #: How many :func:`hooks` it is in.
    depth = 0
    #: Times the hooks still have to pass for ones that can be traced; see :class:`_Hook`.
    answers = 0
    #: What was packed in the innermost of them.
    packed: list[Packed] | None = None
    #: The forward graph that :func:`_sweep` has seen.
    swept: weakref.ref[Graph] | None = None


_compiling = _Compiling()

#: A ``patched()`` compresses. Then a graph that runs as Dynamo made it does, too: it calls torch's checkpoint.
patched = False


# ---- the operators that mark ----


def _region_input(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    return x.clone()


def _rounded(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    payload = torch.ops.gradckpt.encode(x, codec)
    out = torch.empty_like(x)
    return out.copy_(torch.ops.gradckpt.decode(payload, codec, x.shape, x.dtype))


_library.impl("region_input", _region_input, "CompositeExplicitAutograd")
_library.impl("rounded", _rounded, "CompositeExplicitAutograd")


@torch.library.register_fake("gradckpt::region_input", lib=_library)  # type: ignore[untyped-decorator]
@torch.library.register_fake("gradckpt::rounded", lib=_library)  # type: ignore[untyped-decorator]
def _like(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    return torch.empty_like(x)


def _traced(ctx: Any, inputs: tuple[torch.Tensor, str, str], output: torch.Tensor) -> None:
    """Autograd records a mark: AOTAutograd makes a joint graph, or nobody does and the mark is in vain."""
    if _compiling.depth:
        _compiling.answers = len(HOOKS)
        return
    keys = private.mode_keys
    tracing = private.get_dispatch_mode(keys.FUNCTIONAL) is not None
    if tracing or (private.get_dispatch_mode(keys.FAKE) is None and not patched):
        _warn_unpacked()


@functools.cache
def _warn_unpacked() -> None:
    warn_inactive(
        "torch.compile: nothing is compressed in a graph that comes from another checkpoint than gradckpt's, or from "
        'a backend that does not use AOTAutograd while Dynamo waits ("inductor" and "aot_eager" do)',
    )


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return grad, None, None


for _name in ("region_input", "rounded"):
    torch.library.register_autograd(f"gradckpt::{_name}", _straight_through, setup_context=_traced, lib=_library)


#: Under which a node's ``meta`` says that it is kept compressed.
_CODEC = "gradckpt_codec"
_SETTLED = "gradckpt_settled"


def keep_packed(op: Any, config: CompressionConfig) -> None:
    """What the operator just returned, while AOTAutograd traces it, crosses the cut as a payload, if it crosses."""
    if not _compiling.depth:
        _warn_unpacked()
        return
    if may_refuse(config.codec):
        return
    _compiling.answers = len(HOOKS)
    mode = private.dynamo.get_proxy_mode()
    nodes = reversed(mode.tracer.graph.nodes) if mode is not None else iter(())
    later = []  # behind it: one for each of its outputs
    for node in itertools.islice(nodes, 16):
        if node.target is op:
            break
        later.append(node)
    else:
        return
    # As in csrc/engine/store.c: what comes besides the first value (log-sum-exp, states of a generator) stays exact.
    first = [n for n in later if n.target is operator.getitem and n.args[0] is node and n.args[1] == 0] or [node]
    value = first[0].meta.get("val")
    if isinstance(value, torch.Tensor) and value.numel() >= config.min_numel and value.dtype in dtypes(config.codec):
        first[0].meta[_CODEC] = config.codec


@functools.cache
def may_refuse(codec: str) -> bool:
    """There are values that the codec cannot hold. A graph cannot ask, so it keeps what such a codec is asked for as it
    is; that is said once."""
    refuses: bool = _C.codec_info(codec)["refuses"]
    if refuses:
        warn_inactive(
            f"torch.compile: codec {codec!r} may refuse values, which a compiled graph cannot find out; its tensors "
            "stay uncompressed, use 'int8' or do not compile",
        )
    return refuses


@functools.cache
def dtypes(codec: str) -> tuple[torch.dtype, ...]:
    """Those that the codec takes."""
    return tuple(getattr(torch, name) for name in _C.codec_info(codec)["dtypes"])


# ---- the hooks ----


class _Hook:
    """A saved-tensor hook that passes for a GraphModule when AOTAutograd asks whether it may trace it.

    It asks twice. Before it traces the hooks, when a joint graph with marks was made: then yes. And at the end, to
    turn every hook off while the graph runs: then no, so that outer hooks (``save_on_cpu``) see the payloads. It is
    also asked when the graph comes from a cache, where there is nothing to trace: no.
    """

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self.hook = hook

    def __call__(self, saved: Any) -> Any:
        return self.hook(saved)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if not _compiling.answers:
            return _Hook
        _compiling.answers -= 1
        answer: type = GraphModule
        return answer


class _Cut(NamedTuple):
    """A marked value that crosses from one graph into the other."""

    forward: Graph
    backward: Graph
    node: Node
    codec: str


def _cut() -> _Cut | None:
    """What the hooks are called for; None: it is not marked."""
    context = private.load_cut()()
    if context is None:
        return None
    forward, backward, node = context["_fw_graph"], context["_bw_graph"], context["_node"]
    if _compiling.swept is None or _compiling.swept() is not forward:
        _compiling.swept = weakref.ref(forward)
        _name_rng_states(forward, backward)
        for graph in (forward, backward):
            _sweep(graph)
    codec = node.args[1] if node.target in MARKS else node.meta.get(_CODEC)
    return None if codec is None else _Cut(forward, backward, node, codec)


def _pack(x: torch.Tensor) -> Any:
    """The payload and the sizes: what the backward needs and does not know."""
    cut = _cut()
    if cut is None:
        return x
    _sink(cut.backward)  # of the ones before
    return (torch.ops.gradckpt.encode(x, cut.codec), *x.shape)


def _unpack(packed: Any) -> torch.Tensor:
    cut = _cut()
    if cut is None:
        x: torch.Tensor = packed
        return x
    value = cut.node.meta["val"]
    if _settle(cut.node) and _compiling.packed is not None:
        _compiling.packed.append(Packed.of(value, cut.codec))
    payload, *sizes = packed
    x = torch.ops.gradckpt.decode(payload, cut.codec, sizes, value.dtype)
    order = _memory_order(value)
    if order != sorted(order):  # the backward was traced with these strides
        x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
    return x


HOOKS = (_Hook(_pack), _Hook(_unpack))


def hint(size: int | torch.SymInt) -> int:
    """Of a symbolic size: what it was when the graph was traced; a guess, if only the run will tell."""
    if not isinstance(size, torch.SymInt):
        return size
    known: int | None = size.node.hint
    return int(size.node.expr.xreplace(dict.fromkeys(size.node.expr.free_symbols, 4096))) if known is None else known


def _memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions, largest stride first."""
    return sorted(range(x.dim()), key=lambda dim: -hint(x.stride()[dim]))


# ---- what becomes of the graphs ----


def _settle(node: Node) -> bool:
    """Encodes right behind the node and not at the end of the graph, so that its value dies after its last use; a mark
    gives way to its input. False: that was done, the hook is traced again."""
    if node.meta.get(_SETTLED):
        return False
    node.meta[_SETTLED] = True
    encode = next(user for user in node.users if user.target is torch.ops.gradckpt.encode.default)
    node.append(encode)
    if node.target is rounded:
        x: Any = node.args[0]
        encode.replace_input_with(node, x)
    elif node.target is region_input:
        _drop(node)
    return True


def _drop(mark: Node) -> None:
    x: Any = mark.args[0]
    if x.meta["val"].stride() == mark.meta["val"].stride():  # else the graph was traced with those of a dense copy
        mark.replace_all_uses_with(x)
        mark.graph.erase_node(mark)


def _sweep(graph: Graph) -> None:
    """Drops marks of inputs that do not cross: of regions that do not need them, that are inside other regions, or of
    which a view crosses; which is marked then."""
    output = graph.output_node()
    for mark in MARKS:
        for node in graph.find_nodes(op="call_function", target=mark):
            if output in node.users:
                continue
            for view in _views(node):
                view.meta[_CODEC] = node.args[1]
            if mark is region_input:
                _drop(node)


def _views(node: Node) -> Iterator[Node]:
    """All of its values, in another shape."""
    for user in node.users:
        if user.target in _VIEWS:
            yield user
            yield from _views(user)


def _name_rng_states(forward: Graph, backward: Graph) -> None:
    """The partitioner gives the states of random generators another name in the backward; AOTAutograd looks for the
    same, with hooks on (torch 2.13), and fails."""
    placeholders = backward.find_nodes(op="placeholder")
    states = [node for node in placeholders if str(node.target).startswith("rng_state_output")]
    names = {node.name for node in placeholders}
    outputs: Any = forward.output_node().args[0]
    unknown = [n for n in outputs if isinstance(n, Node) and n.name not in names and _is_rng_state(n)]
    for state, node in zip(states, unknown, strict=False):
        state.name = state.target = node.name


def _is_rng_state(node: Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, Node) and source.target is torch.ops.higher_order.run_and_save_rng_state


def _sink(backward: Graph) -> None:
    """Restores each tensor right before its first use, and not all of them when the backward starts."""
    for decode in backward.find_nodes(op="call_function", target=torch.ops.gradckpt.decode.default):
        steps = [decode]
        while len(steps[-1].users) == 1 and (user := next(iter(steps[-1].users))).target in _LAYOUT:
            steps.append(user)
        if steps[-1].users:
            first = min(steps[-1].users)
            for step in steps:
                first.prepend(step)


_VIEWS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *((name, "default") for name in ("t", "view", "permute", "alias", "unsqueeze", "detach", "_unsafe_view")),
        ("transpose", "int"),
        ("squeeze", "dim"),
        ("squeeze", "dims"),
    )
)
_LAYOUT = (torch.ops.aten.permute.default, torch.ops.aten.clone.default)


# ---- around the backend ----


def available() -> bool:
    """This torch has what is needed: AOTAutograd tells hooks which node they are asked about (2.8 and later)."""
    return private.load_cut() is not None


@contextmanager
def hooks() -> Iterator[list[Packed]]:
    """AOTAutograd called in here packs what is marked, and adds it to the list."""
    before = vars(_compiling).copy()
    _compiling.depth += 1
    _compiling.answers = 0
    packed: list[Packed] = []
    _compiling.packed = packed
    private.push_hooks(*HOOKS)
    try:
        yield packed
    finally:
        private.pop_hooks()
        vars(_compiling).clear()
        vars(_compiling).update(before)
