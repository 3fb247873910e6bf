"""Saved activations kept compressed, nothing recomputed: :class:`compress_saved`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gradckpt import _C, _activity, _savers
from gradckpt.config import Compress, CompressionConfig, parse_compress
from gradckpt.decorator import check_runs_at_call

__all__ = ["compress_saved"]

P = ParamSpec("P")
R = TypeVar("R")


def _config(compress: Compress) -> CompressionConfig | None:
    config = parse_compress(compress)
    if config is not None and config.replay:
        raise ValueError(
            "gradckpt: replay=True is for regions that are recomputed; compress_saved() recomputes nothing"
        )
    if config is not None and config.include != "activations":
        raise ValueError(
            f"gradckpt: include={config.include!r} means the arguments of a region; among saved tensors, floating ones "
            "that do not require grad are statistics and frozen weights, which compress_saved() keeps exact"
        )
    return config


class compress_saved:
    """Within it, or in what it decorates, autograd keeps activations as payloads until backward.

    ``with compress_saved("int8"): loss = model(x)`` and ``@compress_saved("int8")`` above a function or method.
    Nothing is recomputed: forward is exact, backward computes with restored values. Compressed are floating
    tensors that require grad and are not leaves, when an operator saves them of which :meth:`table` says that its
    backward bears it; which operator saves a tensor is known a moment later, and until then the tensor waits as it
    is. Bool masks become ``mask`` payloads and a ReLU's output, of which only the sign is read, one bit per value.
    Views share the payload of the tensor they are views of. By reference, checked for changes in place as without
    hooks: all else, parameters and other leaves, what reaches one through views or casts (``w.t()``, the autocast
    copy), integers, subclasses. With a codec that loses nothing, everything that requires grad is compressed.

    What the last operators of a ``with`` block save stays as it is unless another block of the same thread
    continues the graph; a decorated function's results are looked at, and nothing waits when it has returned.

    The forward decides: backward may run outside. Inner saved-tensor hooks win, as in torch; hooks around it see the
    payloads' bytes (``torch.autograd.graph.save_on_cpu`` offloads them, a checkpoint region drops and rebuilds
    them). Hooks belong to a thread: a ``yield`` or ``await`` inside the block leaves them on for whoever runs next.

    Args:
        compress: As ``compress=`` of :func:`gradckpt.checkpoint`; ``None`` or ``False``: autograd as it is.

    Raises:
        ValueError: unknown codec, ``replay=True`` or ``include="floating"``, which mean nothing here.
        TypeError: it decorates a class, generator or coroutine function.
        RuntimeError: saved-tensor hooks are disabled here (torch's words).

    ``torch.compile`` cannot trace it: entered inside compiled code, it breaks the graph (or raises, with
    ``fullgraph=True``). Around a compiled call it sees what the compiled graph saves, which mostly stays exact,
    for there the grad flags are gone.
    """

    def __init__(self, compress: Compress = "int8") -> None:
        self.config = _config(compress)

    def __enter__(self) -> None:
        if self.config is not None:
            _C.saved_push(self.config)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.config is not None:
            _C.saved_pop(kind is not None)
            _activity.note_saved()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        instead = "`with compress_saved(...)` around what it computes between two yields or awaits"
        check_runs_at_call(function, "compress_saved()", instead)
        config = self.config

        @functools.wraps(function, updated=())
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            if config is None:
                return function(*args, **kwargs)
            result: R = _C.saved_call(config, function, args, kwargs)
            _activity.note_saved()
            return result

        return within

    @staticmethod
    def table() -> str:
        """Return what a lossy codec encodes: autograd node, argument, and how; all else is kept exactly."""
        table = _savers.TABLE.items()
        rows = [(node, argument, role.text) for node, roles in table for argument, role in roles.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{node:{widths[0]}}  {argument:{widths[1]}}  {how}" for node, argument, how in rows)

    def __repr__(self) -> str:
        return f"compress_saved({self.config!r})"
