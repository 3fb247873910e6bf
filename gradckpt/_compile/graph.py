"""Compiled graphs: the inputs of regions leave the forward graph as payloads.

Before it enters the region, a region's input passes one of two operators, which mark it:

* ``gradckpt::region_input(x, codec, version)``: exact mode. It returns ``x`` and is removed from
  the graph once the input is packed.
* ``gradckpt::rounded(x, codec, version)``: fake-quantize mode. It returns ``x`` encoded and
  decoded; the gradient goes straight through.

The version is :func:`version`, so that no graph comes from a cache that another gradckpt filled.

An output that a policy keeps compressed is marked by its node's ``meta`` (:func:`keep_packed`).

While AOTAutograd cuts the joint graph into forward and backward, the saved-tensor hooks of
:data:`HOOKS` are on. AOTAutograd calls them for every tensor that crosses the cut. They replace the
marked tensors by a payload in the forward and by restored values in the backward, and pass all
others unchanged. When the graph runs, only the operators ``gradckpt::encode`` and
``gradckpt::decode`` remain.
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
from gradckpt._compile.saved_forms import CAST, hint, memory_order, pack_saved, unpack_saved
from gradckpt._compression import CompressionConfig, warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._version import __version__

library = torch.library.Library("gradckpt", "FRAGMENT")  # torch drops the registrations with this object


def define(name: str, signature: str, kernel: Callable[..., Any], key: str = "CompositeExplicitAutograd") -> Any:
    """Return a new operator of ``torch.ops.gradckpt``."""
    if not hasattr(torch.ops.gradckpt, name):  # else a gradckpt imported before has defined it: torch defines once
        library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, key)
    return getattr(torch.ops.gradckpt, name).default


@functools.cache
def version() -> str:
    """Return the version of the code that rewrites graphs and of the payloads.

    Graphs in Inductor's cache on disk have already been rewritten.
    """
    checksum = 0
    saved = ("saved_blocks", "saved_cut", "saved_forms", "saved_joint", "saved_roles_traced")
    for name in ("graph", "joint_graph", *saved):
        checksum = zlib.crc32(Path(__file__).with_name(f"{name}.py").read_bytes(), checksum)
    checksum = zlib.crc32(repr(_C.saved_nodes()).encode(), checksum)
    return f"{__version__}+{checksum:08x}"


class Packed(NamedTuple):
    """A tensor that leaves a forward graph as a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: str

    @classmethod
    def of(cls, x: torch.Tensor, codec: str) -> Packed:
        return cls(tuple(map(hint, x.shape)), x.dtype, codec)


class _Compiling(threading.local):
    """The state of the compilation in this thread."""

    #: How many :func:`hooks` are open.
    depth = 0
    #: How often the hooks still have to claim that they can be traced; see :class:`_Hook`.
    answers = 0
    #: Of the graph for which they do.
    context: Any = None
    #: What was packed in the innermost of them.
    packed: list[Packed] | None = None
    #: The forward graph that :func:`_sweep` has seen.
    swept: weakref.ref[Graph] | None = None
    #: What else decides at the cut of a forward and a backward graph.
    at_cut: Callable[[Graph, Graph], None] | None = None


_compiling = _Compiling()

#: True while a ``patched()`` compresses. Then a graph that runs as Dynamo made it compresses too,
#: because it calls torch's checkpoint.
patched = False


# ---- the operators that mark ----


def _region_input(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    return x.clone()


def _rounded(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    payload = torch.ops.gradckpt.encode(x, codec)
    out = torch.empty_like(x)
    return out.copy_(torch.ops.gradckpt.decode(payload, codec, x.shape, x.dtype))


_MARK = "(Tensor x, str codec, str version) -> Tensor"
region_input, rounded = define("region_input", _MARK, _region_input), define("rounded", _MARK, _rounded)
MARKS = (region_input, rounded)


@torch.library.register_fake("gradckpt::region_input", lib=library)  # type: ignore[untyped-decorator]
@torch.library.register_fake("gradckpt::rounded", lib=library)  # type: ignore[untyped-decorator]
def _like(x: torch.Tensor, codec: str, version: str) -> torch.Tensor:
    return torch.empty_like(x)


def _traced(ctx: Any, inputs: tuple[torch.Tensor, str, str], output: torch.Tensor) -> None:
    """Record that autograd saw a mark:

    AOTAutograd makes a joint graph, or else the mark has no effect.
    """
    if _compiling.depth:
        claim()
        return
    keys = private.mode_keys
    tracing = private.get_dispatch_mode(keys.FUNCTIONAL) is not None
    if tracing or (private.get_dispatch_mode(keys.FAKE) is None and not patched):
        _warn_unpacked()


@functools.cache
def _warn_unpacked() -> None:
    warn_inactive(
        "torch.compile: nothing is compressed in this graph; call gradckpt.checkpoint in it, and choose a backend with "
        'AOTAutograd, as "inductor" or "aot_eager"',
    )


def claim() -> None:
    """Let AOTAutograd trace the hooks for this graph, and not for those that Inductor makes of its
    patterns meanwhile.
    """
    _compiling.answers = len(HOOKS)
    _compiling.context = private.tracing_context()


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return grad, None, None


for _name in ("region_input", "rounded"):
    torch.library.register_autograd(f"gradckpt::{_name}", _straight_through, setup_context=_traced, lib=library)


#: The ``meta`` keys of a node that is kept compressed: the codec, and the form of what
#: ``compress_saved()`` keeps.
CODEC, FORM = "gradckpt_codec", "gradckpt_form"
_SETTLED = "gradckpt_settled"


def keep_packed(op: Any, config: CompressionConfig) -> None:
    """Mark the operator's latest output, while AOTAutograd traces it, to cross the cut as a
    payload.
    """
    if not _compiling.depth:
        _warn_unpacked()
        return
    if may_overflow(config.codec):
        return
    claim()
    mode = private.dynamo.get_proxy_mode()
    nodes = reversed(mode.tracer.graph.nodes) if mode is not None else iter(())
    later = []  # the nodes behind it: one for each of its outputs
    for node in itertools.islice(nodes, 16):
        if node.target is op:
            break
        later.append(node)
    else:
        return
    # As in op_storage.c: only the first value is compressed. The others (log-sum-exp, states
    # of a generator) stay exact.
    first = [n for n in later if n.target is operator.getitem and n.args[0] is node and n.args[1] == 0] or [node]
    value = first[0].meta.get("val")
    if isinstance(value, torch.Tensor) and value.numel() >= config.min_numel and value.dtype in dtypes(config.codec):
        first[0].meta[CODEC] = config.codec


@functools.cache
def may_overflow(codec: str) -> bool:
    """Return whether the codec may overflow: there are values that it cannot hold.

    A graph cannot check for that, so the tensors of such a codec stay uncompressed, with one
    warning.
    """
    overflows: bool = _C.codec_info(codec)["may_overflow"]
    if overflows:
        warn_inactive(
            f"torch.compile: codec {codec!r} may overflow, which compiled graphs cannot detect, so its tensors stay "
            "uncompressed; use 'int8'",
        )
    return overflows


@functools.cache
def dtypes(codec: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that the codec takes."""
    return tuple(getattr(torch, name) for name in _C.codec_info(codec)["dtypes"])


# ---- the hooks ----


class _Hook:
    """A saved-tensor hook that AOTAutograd may take for a GraphModule, so that it traces the hook.

    AOTAutograd asks twice. Before it traces the hooks, when a joint graph with marks was made, the
    answer is yes. At the end, to turn every hook off while the graph runs, the answer is no, so
    that outer hooks (``save_on_cpu``) see the payloads. It also asks when the graph comes from a
    cache and nothing is traced; then the answer is no.
    """

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self.hook = hook

    def __call__(self, saved: Any) -> Any:
        return self.hook(saved)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if not _compiling.answers or _compiling.context is not private.tracing_context():
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
    form: str | None  # None: of a region


def _cut() -> _Cut | None:
    """Return the value that the hooks are called for; None if it is not marked."""
    context = private.load_cut()()
    if context is None:
        return None
    forward, backward, node = context["_fw_graph"], context["_bw_graph"], context["_node"]
    if _compiling.swept is None or _compiling.swept() is not forward:
        _compiling.swept = weakref.ref(forward)
        _name_rng_states(forward, backward)
        for graph in (forward, backward):
            _sweep(graph)
        if _compiling.at_cut is not None:
            _compiling.at_cut(forward, backward)
    codec = node.args[1] if node.target in MARKS else node.meta.get(CODEC)
    return None if codec is None else _Cut(forward, backward, node, codec, node.meta.get(FORM))


def _pack(x: torch.Tensor) -> Any:
    """Return the payload and the sizes, which the backward needs and does not know."""
    cut = _cut()
    if cut is None:
        return x
    _sink(cut.backward)  # restores of earlier tensors
    if cut.form is not None:
        return pack_saved(x, cut.codec, cut.form)
    return (torch.ops.gradckpt.encode(x, cut.codec), *x.shape)


def _unpack(packed: Any) -> torch.Tensor:
    cut = _cut()
    if cut is None:
        x: torch.Tensor = packed
        return x
    value = cut.node.meta["val"]
    if _settle(cut.node) and _compiling.packed is not None:
        _compiling.packed.append(Packed.of(value, cut.codec))
    if cut.form is not None:
        return unpack_saved(packed, cut.codec, cut.form, value)
    payload, *sizes = packed
    x = torch.ops.gradckpt.decode(payload, cut.codec, sizes, value.dtype)
    order = memory_order(value)
    if order != sorted(order):  # the backward was traced with these strides
        x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
    return x


HOOKS = (_Hook(_pack), _Hook(_unpack))


# ---- what becomes of the graphs ----


def _settle(node: Node) -> bool:
    """Encode right behind the node and not at the end of the graph.

    The node's value then dies after its last use. A mark is replaced by its input.
    Return False if this was done before: the hook is traced again.
    """
    if node.meta.get(_SETTLED):
        return False
    node.meta[_SETTLED] = True
    if FORM in node.meta:
        _settle_saved(node)
        return True
    encode = next(user for user in node.users if user.target is torch.ops.gradckpt.encode.default)
    node.append(encode)
    if node.target is rounded:
        x: Any = node.args[0]
        encode.replace_input_with(node, x)
    elif node.target is region_input:
        _drop(node)
    return True


def _settle_saved(node: Node) -> None:
    """Place what makes the payload of a saved tensor right behind it."""
    at = node if node.op != "placeholder" else node.graph.find_nodes(op="placeholder")[-1]
    made = node
    while made is node or made.target not in (torch.ops.gradckpt.encode.default, CAST):
        made = max(user for user in made.users if user.target in _STEPS)  # the hook's are the last ones of the graph
        at.append(made)
        at = made


def _drop(mark: Node) -> None:
    x: Any = mark.args[0]
    # else the graph was traced with the strides of a dense copy
    if x.meta["val"].stride() == mark.meta["val"].stride():
        mark.replace_all_uses_with(x)
        mark.graph.erase_node(mark)


def _sweep(graph: Graph) -> None:
    """Drop marks of inputs that do not cross: inputs that the region does not need, that are inside
    other regions, or of which only a view crosses. Such a view is marked instead.
    """
    output = graph.output_node()
    for mark in MARKS:
        for node in graph.find_nodes(op="call_function", target=mark):
            if output in node.users:
                continue
            for view in _views(node):
                view.meta[CODEC] = node.args[1]
            if mark is region_input:
                _drop(node)


def _views(node: Node) -> Iterator[Node]:
    """Yield the nodes that hold all of the node's values in another shape."""
    for user in node.users:
        if user.target in _VIEWS:
            yield user
            yield from _views(user)


def _name_rng_states(forward: Graph, backward: Graph) -> None:
    """Give the states of random generators the same name in both graphs.

    The partitioner renames them in the backward. With hooks on, AOTAutograd (torch 2.13) looks for
    the same name and fails.
    """
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
    """Restore each tensor right before its first use, not all of them when the backward starts."""
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
_STEPS = (
    *(torch.ops.gradckpt.encode.default, CAST),
    *(torch.ops.aten.permute.default, torch.ops.aten.clamp.default),
)
_LAYOUT = (torch.ops.aten.permute.default, torch.ops.aten.clone.default)


# ---- around the backend ----


@functools.cache
def warn_unavailable(what: str) -> None:
    """Warn where AOTAutograd does not tell hooks which node they are called for."""
    warn_inactive(
        f"torch.compile: torch {torch.__version__} does not tell hooks what they save, so {what} uncompressed; install "
        "torch 2.12",
    )


def is_compiling() -> bool:
    """Return whether :func:`hooks` are open in this thread."""
    return _compiling.depth > 0


@contextmanager
def hooks(at_cut: Callable[[Graph, Graph], None] | None = None) -> Iterator[list[Packed]]:
    """Pack what is marked while AOTAutograd runs in this block, and add it to the list.

    ``at_cut`` may mark more of the forward graph's nodes, by :data:`CODEC` and :data:`FORM`.
    """
    before = vars(_compiling).copy()
    _compiling.depth += 1
    _compiling.answers = 0
    packed: list[Packed] = []
    _compiling.packed = packed
    _compiling.at_cut = at_cut
    private.push_hooks(*HOOKS)
    try:
        yield packed
    finally:
        private.pop_hooks()
        vars(_compiling).clear()
        vars(_compiling).update(before)
