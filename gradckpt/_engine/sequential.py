"""A chain of functions as a row of regions: :func:`checkpoint_sequential`."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

from gradckpt._C import checkpoint
from gradckpt._compression import Compress
from gradckpt._engine.arguments import OPTIONS
from gradckpt._engine.places import place_of
from gradckpt._engine.torch_errors import for_sequential, warn_torchs
from gradckpt._offload import OffloadLike

Segments = Union[int, str, Sequence[int]]


class Segment:
    """Functions that are called one after the other.

    Unlike a closure it can be pickled, and gradckpt._engine.buffers sees its modules.
    """

    __slots__ = ("functions", "unpack_tuples")

    def __init__(self, functions: Iterable[Callable[..., Any]], unpack_tuples: bool = False) -> None:
        self.functions = tuple(functions)
        self.unpack_tuples = unpack_tuples

    def __call__(self, *inputs: Any) -> Any:
        value = inputs if self.unpack_tuples else inputs[0]
        for function in self.functions:
            value = function(*_spread(value)) if self.unpack_tuples else function(value)
        if self.functions or not self.unpack_tuples or len(inputs) != 1:  # Dynamo compares no tuples by `is`
            return value
        return inputs[0]

    @property
    def __gradckpt_functions__(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions inside, for gradckpt._engine.buffers."""
        return self.functions

    def __repr__(self) -> str:
        return f"Segment({list(self.functions)!r})"


def _spread(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _boundaries(segments: Segments, n: int) -> list[int]:
    """Return the indices at which the second and later segments start."""
    if n == 0:
        raise ValueError("gradckpt: checkpoint_sequential() got no functions; pass at least one")
    if isinstance(segments, str):
        if segments != "sqrt":
            raise ValueError(f"gradckpt: segments is an int, 'sqrt' or the indices of new segments, not {segments!r}")
        segments = round(math.sqrt(n))
    if isinstance(segments, Sequence) and not isinstance(segments, (bytes, bytearray)):
        return _check_starts([_index(start, "an index in segments") for start in segments], n)
    count = _index(segments, "segments")
    if not 1 <= count <= n:
        raise ValueError(f"gradckpt: segments must be from 1 to the number of functions, {n}; got {count}")
    size = n // count
    return [i * size for i in range(1, count)]


def _index(value: Any, what: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"gradckpt: {what} must be an int, not bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"gradckpt: {what} must be an int, not {type(value).__name__}") from None


def _check_starts(starts: list[int], n: int) -> list[int]:
    previous = 0
    for start in starts:
        if not 0 < start < n:
            raise ValueError(
                f"gradckpt: a segment cannot start at {start}: of {n} functions, the index is 1 to {n - 1}"
            )
        if start <= previous:
            raise ValueError(f"gradckpt: segments must rise: {start} comes after {previous}")
        previous = start
    return starts


def checkpoint_sequential(
    functions: Iterable[Callable[..., Any]],
    segments: Segments,
    input: Any,
    use_reentrant: bool | None = False,
    *,
    compress: Compress = None,
    offload: OffloadLike = None,
    unpack_tuples: bool = False,
    **options: Any,
) -> Any:
    """Run the functions in order, each segment but the last in one :func:`gradckpt.checkpoint`.

    The last segment's backward comes first, so running it again would save nothing.

    Args:
        functions: An ``nn.Sequential``, or any iterable of callables. A module that occurs several
            times in an ``nn.Sequential`` is called each time, as the Sequential does (torch's
            function calls it once).
        segments: The number of segments. As in torch, all are ``n // segments`` functions long and
            the last takes the remainder. ``"sqrt"``: the square root of the number of functions,
            rounded, which minimizes memory for equal layers. A sequence of ints: the indices at
            which a new segment starts, rising, each between 1 and n - 1; empty means one segment,
            so no region.
        input: The argument of the first function.
        use_reentrant: As in :func:`gradckpt.checkpoint`.
        compress, offload: As in :func:`gradckpt.checkpoint`: how and where the inputs of the
            segments are kept.
        unpack_tuples: ``False``: a tuple goes from function to function as one object, as in
            ``nn.Sequential``. ``True``: it becomes the next function's positional arguments, so
            that several tensors pass between functions.
        **options: ``policy``, ``preserve_rng_state``, ``context_fn``, ``determinism_check``,
            ``debug``, ``early_stop``, ``respect_saved_tensors_hooks``, ``buffers`` of
            :func:`gradckpt.checkpoint`.

    Returns:
        The result of the last function.

    Raises:
        ValueError: an invalid number of segments, index or keyword.
        TypeError: segments of another type.

    Source: torch.utils.checkpoint.checkpoint_sequential; Chen et al. 2016, arXiv:1604.06174.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise for_sequential(dict.fromkeys(unknown))
    if use_reentrant is None:
        warn_torchs("sequential_not_explicit")
        use_reentrant = True
    if (place := place_of(offload)) is not None:
        options["offload"] = place
    chain = list(functions)
    starts = [0, *_boundaries(segments, len(chain))]
    for start, end in itertools.pairwise(starts):
        segment = Segment(chain[start:end], unpack_tuples)
        inputs = _spread(input) if unpack_tuples else (input,)
        input = checkpoint(segment, *inputs, compress=compress, use_reentrant=use_reentrant, **options)
    return Segment(chain[starts[-1] :], unpack_tuples)(*(_spread(input) if unpack_tuples else (input,)))
