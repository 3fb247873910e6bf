"""Stochastic rounding: from which noise, and its state for a resumed run."""

from __future__ import annotations

from gradckpt import _C

__all__ = ["get_rounding_state", "set_rounding_state"]


def check_key(key: tuple[int, int, int]) -> None:
    """Raises unless key is (seed, step, tensor), of 64, 32 and 32 bits."""
    if not isinstance(key, tuple) or len(key) != 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in key):
        raise TypeError(f"gradckpt: dither is (seed, step, tensor), three ints, not {key!r}")
    for name, number, bits in zip(("seed", "step", "tensor"), key, (64, 32, 32), strict=True):
        if not 0 <= number < 2**bits:
            raise ValueError(f"gradckpt: {name} is between 0 and 2^{bits} - 1, not {number}")


def get_rounding_state() -> tuple[int, int]:
    """``(step, tensor)`` of the next tensor that a region with ``CompressionConfig(stochastic=True)`` encodes.

    The noise of a value is Philox4x32-10 (Salmon et al. 2011) of (seed, step, tensor, index of the
    value): no generator of torch is read, and the bytes do not depend on threads or on the device. A
    step ends with the first backward that restores something; ``tensor`` counts regions and tensors within it,
    and what a region encodes inside is counted by the region, so that its recompute repeats it. Save the state
    with a checkpoint of the training run and a resumed run repeats the same bytes.
    """
    return _C.rounding_state()


def set_rounding_state(state: tuple[int, int]) -> None:
    """Continue from what :func:`get_rounding_state` gave; ``(0, 0)`` starts over.

    Raises:
        ValueError: a number is not between 0 and 2^32 - 1.
        TypeError: not a tuple of two ints.
    """
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"gradckpt: a rounding state is (step, tensor), not {state!r}")
    check_key((0, *state))
    _C.set_rounding_state(*state)
