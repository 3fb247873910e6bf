"""A chain of functions as a row of regions: :func:`checkpoint_sequential`."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

import torch

from gradckpt.config import Compress

__all__ = ["Segment", "checkpoint_sequential"]

Segments = Union[int, str, Sequence[int]]

_OPTIONS = ("buffers", "context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")

_NOT_EXPLICIT = (
    "torch.utils.checkpoint.checkpoint_sequential: the use_reentrant parameter should be passed explicitly. In version "
    "2.9 we will raise an exception if use_reentrant is not passed. use_reentrant=False is recommended, but if you "
    "need to preserve the current default behavior, you can pass use_reentrant=True. Refer to docs for more details on "
    "the differences between the two variants."
)


class Segment:
    """Functions called one after the other. Unlike a closure it can be pickled, and gradckpt.buffers sees the
    modules in it."""

    __slots__ = ("functions", "unpack_tuples")

    def __init__(self, functions: Iterable[Callable[..., Any]], unpack_tuples: bool = False) -> None:
        self.functions = tuple(functions)
        self.unpack_tuples = unpack_tuples

    def __call__(self, *inputs: Any) -> Any:
        if not self.unpack_tuples:
            (value,) = inputs
            for function in self.functions:
                value = function(value)
            return value
        value = inputs
        for function in self.functions:
            value = function(*_spread(value))
        return value if self.functions or len(inputs) != 1 else inputs[0]

    @property
    def __gradckpt_functions__(self) -> tuple[Callable[..., Any], ...]:
        """For gradckpt.buffers."""
        return self.functions

    def __repr__(self) -> str:
        return f"Segment({list(self.functions)!r})"


def _spread(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _boundaries(segments: Segments, n: int) -> list[int]:
    """The indices at which the second and later segments start."""
    if n == 0:
        raise ValueError("gradckpt: checkpoint_sequential was given no functions")
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
    unpack_tuples: bool = False,
    **options: Any,
) -> Any:
    """Run the functions in order, each segment of them one :func:`gradckpt.checkpoint` region, but for the last:
    its backward comes first, so running it again would save nothing.

    Args:
        functions: An ``nn.Sequential``, or any iterable of callables. (torch's own function calls a module that is
            in an ``nn.Sequential`` several times only once; this one calls it each time, as the Sequential does.)
        segments: How many: as in torch, all are ``n // segments`` long and the last takes what is left over.
            ``"sqrt"``: the square root of the number of functions, rounded, which for equal layers keeps memory
            lowest. A sequence of ints: the indices at which a new segment starts, rising, each between 1 and n - 1;
            empty: one segment, so no region.
        input: What the first function gets.
        use_reentrant: As in :func:`gradckpt.checkpoint`.
        compress: As in :func:`gradckpt.checkpoint`: how the inputs of the segments are kept.
        unpack_tuples: ``False``: a tuple goes from function to function as one object, as in ``nn.Sequential``.
            ``True``: it becomes the next function's positional arguments, so that several tensors come and go.
        **options: ``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``,
            ``buffers`` of :func:`gradckpt.checkpoint`.

    Returns:
        What the last function returned.

    Raises:
        ValueError: a number of segments, an index or a keyword that cannot be.
        TypeError: segments of another type.
    """
    from gradckpt import checkpoint  # late, so that what stands there now is called

    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError("Unexpected keyword arguments: " + ",".join(unknown))
    if use_reentrant is None:
        warnings.warn(_NOT_EXPLICIT, stacklevel=2)
        use_reentrant = True
    chain = list(functions)
    starts = [0, *_boundaries(segments, len(chain))]
    for start, end in itertools.pairwise(starts):
        segment = Segment(chain[start:end], unpack_tuples)
        inputs = _spread(input) if unpack_tuples else (input,)
        input = checkpoint(segment, *inputs, compress=compress, use_reentrant=use_reentrant, **options)
    return Segment(chain[starts[-1] :], unpack_tuples)(*(_spread(input) if unpack_tuples else (input,)))


def torch_checkpoint_sequential(
    functions: Any, segments: Any, input: Any, use_reentrant: Any = None, **kwargs: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint_sequential`` to the letter, over ``gradckpt.compat.checkpoint``."""
    from gradckpt.compat import checkpoint

    if use_reentrant is None:
        warnings.warn(_NOT_EXPLICIT, stacklevel=2)
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if isinstance(functions, torch.nn.Sequential):
        functions = list(functions.children())  # a module in it twice is called once: torch does so
    size = len(functions) // segments
    end = 0
    for start in range(0, size * (segments - 1), size):
        end = start + size
        segment = Segment(functions[i] for i in range(start, end))
        input = checkpoint(segment, input, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    return Segment(functions[i] for i in range(end, len(functions)))(input)


# gradckpt.compat.checkpoint_sequential: in its place, texts of Python itself name the function too.
torch_checkpoint_sequential.__module__ = "gradckpt.compat"
torch_checkpoint_sequential.__name__ = torch_checkpoint_sequential.__qualname__ = "checkpoint_sequential"
