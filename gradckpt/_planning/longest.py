"""The longest sequence that fits: :func:`longest`."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradckpt._planning.values import NotOnPaper

__all__ = ["longest"]

#: A sequence longer by this factor has been found not to fit.
_CLOSE = 1.03

#: Where a step is tried, of where it should fit.
_BELOW = 0.99

#: Logarithm of the factor between lengths that tell how sizes grow, through the allocator's steps.
_APART = 0.2

#: Steps that are tried at most, those whose sizes are trusted to tell the next, and tokens.
_TRIES, _TRUSTED, _MOST = 14, 6, 2**26


def longest(
    tokens: int, size: int, needed: Callable[[int], int], held: int, limit: int, positions: int | None
) -> int | None:
    """Return the tokens of a step that was tried and fits, where one of 1.03 times as many was
    tried and does not, or the model's positions end there; 0: none fits. None: unknown.

    Args:
        tokens: Of a step whose size is known.
        size: That size, in bytes.
        needed: Returns the size of a step of so many tokens.
        held: What is there during the whole step.
        limit: The bytes that are there.
        positions: The most tokens of the model, or None.
    """
    if held > limit:
        return 0
    most = positions or _MOST
    sizes = {0: held, tokens: size}
    for _ in range(_TRIES):
        fits = max(length for length, each in sizes.items() if each <= limit)
        fails = min((length for length, each in sizes.items() if each > limit), default=most + 1)
        if fails <= max(fits + 1, int(fits * _CLOSE)) or fits >= most:
            return fits
        length = _next(sizes, limit, fits, fails)
        try:
            sizes[length] = needed(length)
        except NotOnPaper:  # so long a step asks for values that a shorter one knows
            return fits or None
        except Exception:  # the model takes other lengths alone
            return None
    return None


def _next(sizes: dict[int, int], limit: int, fits: int, fails: int) -> int:
    """Return the tokens to try, between those that fit and those that do not."""
    guess = _guess(sizes, limit, fits, fails)
    if fits and fits * _CLOSE >= guess:
        length = int(fits * _CLOSE)
    elif guess * _CLOSE >= fails:
        length = math.ceil(fails / _CLOSE)
    else:
        length = int(guess * _BELOW)
    if fails not in sizes and length * _CLOSE >= fails:  # so many positions there are
        length = fails - 1
    return min(max(length, fits + 1), fails - 1)


def _guess(sizes: dict[int, int], limit: int, fits: int, fails: int) -> float:
    """Return where the size should reach the limit: above what is held it grows with a power of the
    length, which the nearest step and another one tell.
    """
    held, near = sizes[0], fits or fails
    if fits and fails in sizes and len(sizes) > _TRUSTED:
        return math.sqrt(fits * fails)
    if sizes[near] <= held:
        return near * 2.0
    apart = (length for length in sizes if length and sizes[length] > held and abs(math.log(length / near)) > _APART)
    other = fails if fits and fails in sizes else next(apart, None)
    power = 1.0
    if other is not None:
        power = math.log((sizes[other] - held) / (sizes[near] - held)) / math.log(other / near)
    guess = near * ((limit - held) / (sizes[near] - held)) ** (1 / min(max(power, 0.5), 3.0))
    return float(min(max(guess, fits), fails))
