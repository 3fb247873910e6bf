"""Saved activations are compressed and nothing is recomputed: :class:`compress_saved`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradckpt import _C
from gradckpt._compression import Compress, CompressionConfig, explains_keywords, parse_compress
from gradckpt._engine import saved_roles
from gradckpt._engine.decorator import check_runs_at_call
from gradckpt._engine.places import SAVED, place_of
from gradckpt._models import inactivity_warning
from gradckpt._offload import Offload, OffloadLike, parse_offload

P = ParamSpec("P")
R = TypeVar("R")


def _config(compress: Compress) -> CompressionConfig | None:
    config = parse_compress(compress)
    if config is not None and config.fake_quantize:
        raise ValueError(
            "gradckpt: fake_quantize=True applies to regions, which compress_saved() does not recompute; leave it out"
        )
    if config is not None and config.include != "activations":
        raise ValueError(
            f"gradckpt: include={config.include!r} applies to the arguments of regions, not to compress_saved(); leave "
            "it out"
        )
    return config


def parse_saved(compress: Compress, offload: OffloadLike) -> tuple[Any, Offload | None, Any, tuple[Any, ...], Any]:
    """Return the settings of a block: the config, the place, and both as C takes them."""
    where = parse_offload(offload)
    config = plan = _config(compress if where is None or compress not in (None, False) else "raw")
    formats = tuple(config.operators) if config is not None else ()
    if config is not None and formats:
        plan = dataclasses.replace(config, operators=())
    return config, where, plan, formats, place_of(where, SAVED)


def call_saved(saves: compress_saved, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """Call a function as if it were decorated."""
    if saves._plan is None:
        return function(*args, **kwargs)
    saves._check()
    result: R = _C.saved_call(saves._plan, saves._formats, saves._place, function, args, kwargs)
    _note_saved()
    return result


def _note_saved() -> None:
    if not torch.compiler.is_compiling():  # a graph counts by itself
        inactivity_warning.note_saved()


@explains_keywords
class compress_saved:
    """Keep activations that autograd saves as payloads until backward, in a block or a function.

    Use ``with compress_saved("int8"): loss = model(x)``, or ``@compress_saved("int8")`` above a
    function or method. Nothing but attention is recomputed: the forward is exact, and the backward
    computes with restored values. Compressed are floating tensors that require grad and are not
    leaves, when the operator that saves them is listed in :meth:`table`. Which operator saves a
    tensor is known a moment later; until then the tensor stays uncompressed. Bool masks become
    ``mask`` payloads. The output of a ReLU, of which only the sign is read, takes one bit per
    value. Views share the payload of their base. Everything else is kept by reference and checked
    for changes in place as without hooks: parameters and other leaves, tensors that reach one
    through views or casts (``w.t()``, the autocast copy), integers, subclasses. A codec that loses
    nothing compresses everything that requires grad.

    What the last operators of a ``with`` block save stays uncompressed unless another block of the
    same thread continues the graph. A decorated function's results are examined, so nothing is
    pending when it has returned.

    The forward decides what is compressed: backward may run outside. Inner saved-tensor hooks take
    precedence, as in torch. Outer hooks see the payloads' bytes
    (``torch.autograd.graph.save_on_cpu`` offloads them, a checkpoint region drops and rebuilds
    them). Hooks belong to a thread: a ``yield`` or ``await`` inside the block leaves them on for
    whatever code the thread runs next.

    Args:
        compress: As ``compress=`` of :func:`gradckpt.checkpoint`. ``None`` or ``False`` leaves
            autograd unchanged, but with ``offload=``, which moves what requires grad as it is.
        offload: Where the payloads live: ``None``, ``"cpu"``, ``"disk"`` or an
            :class:`gradckpt.Offload`.

    Raises:
        ValueError: unknown codec, or ``fake_quantize=True`` or ``include="floating"``, which do
            not apply here.
        TypeError: it decorates a class, generator or coroutine function.
        RuntimeError: saved-tensor hooks are disabled here (torch's message).

    In code that ``torch.compile`` compiles, a block becomes part of the graph: what crosses from
    the forward graph into the backward graph is encoded by the same rules. Around a call of code
    that was compiled by itself, it sees saved tensors without grad flags, which stay exact.
    """

    def __init__(self, compress: Compress = "int8", *, offload: OffloadLike = None) -> None:
        self.config, self.offload, self._plan, self._formats, self._place = parse_saved(compress, offload)
        self._checked = not self._formats

    def __enter__(self) -> None:
        if self.config is not None:
            self._check()
            _C.saved_push(self._plan, self._formats, self._place)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.config is not None:
            _C.saved_pop(kind is not None)
            _note_saved()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        instead = "`with compress_saved(...)` around what it computes between two yields or awaits"
        check_runs_at_call(function, "compress_saved()", instead)

        @functools.wraps(function, updated=())
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            return call_saved(self, function, args, kwargs)

        return within

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """The pair ``(pack, unpack)``, for whatever takes saved-tensor hooks.

        Pass it to ``torch.autograd.graph.saved_tensors_hooks(*pair)`` or to
        ``torch_remat.checkpoint(saved_tensors_hooks=pair)``. The rules are those of the block. The
        pair belongs to no block and no thread: it may be used again, and ``unpack`` works as long
        as the graph lives. As with any pair, hooks around it do not see what it packs.

        Raises:
            ValueError: ``compress`` is ``None``, so there is nothing to pack.
        """
        if self._plan is None:
            raise ValueError("gradckpt: compress_saved(None) compresses nothing and has no hooks; pass a codec")
        self._check()
        return _C.saved_pair(self._plan, self._formats, self._place)

    def _check(self) -> None:
        """Check what the model has to be loaded for. Dynamo does not trace it."""
        if not self._checked and not torch.compiler.is_compiling():
            saved_roles.check_functions(self._formats)
            self._checked = True

    @staticmethod
    def table() -> str:
        """Return the table of what a lossy codec encodes: node, argument, operators, and how; then
        that of autograd Functions of libraries: package, node, places, or why it stays exact.

        Everything else is kept exactly.
        """
        return saved_roles.table()

    def __repr__(self) -> str:
        place = "" if self.offload is None else f", offload={self.offload!r}"
        return f"compress_saved({self.config!r}{place})"
