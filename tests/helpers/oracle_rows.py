"""Rows that do not end with a group: the shifts of their shares, from the text of rows.h.

Slow and by other means than the C: sorted lists in place of counts."""

import itertools

import numpy as np
from oracle_values import F32, LIMIT, to_bits, to_float

GROUP = 128
#: The codecs that scale rows apart.
ROWS = ("int8", "int8_plain", "int6", "int4")


def row_of(codec, shape):
    """The length of rows that count, or 0."""
    length = shape[-1] if len(shape) > 1 and codec in ROWS else 0
    return length if length >= 64 and length % GROUP else 0


def level(keys):
    """The level of a share."""
    keys = sorted((int(k) for k in keys), reverse=True)
    values = [k for k in keys if k > 0]
    if not values:
        return 0
    found = values[len(values) // 16]
    gap = 32 if len(values) >= 8 else 80
    for _ in range(2):
        below = [k for k in values if k < found - gap]
        if below and not [k for k in values if found - gap <= k < found - 4]:
            found = below[0]
    return found


def shares_of(group, length, numel):
    """[(row, first value, end)] of a group, in values of the tensor."""
    first, end = group * GROUP, min(group * GROUP + GROUP, numel)
    cuts = [first, *range((first // length + 1) * length, end, length), end]
    return [(a // length, a, b) for a, b in itertools.pairwise(cuts)]


def shifts_of(x, shares, dtype):
    parts = [x[a:b] for _, a, b in shares]
    if any((~(np.abs(p) <= LIMIT[dtype])).any() for p in parts):
        return [0] * len(parts)
    keys = [p.view(np.uint32) >> 20 & 0x7FF for p in parts]
    levels, largest = [level(k) for k in keys], [int(k.max()) for k in keys]
    reach = [a + max(max(largest) - b - 1, 0) for a, b in zip(levels, largest, strict=True) if a > 0]
    common = min([max(levels), *reach])
    shifts = [min(max(common - a, 0) // 8, 120) if a > 0 else 0 for a in levels]
    return [s - min(shifts) for s in shifts]


def scale(x, length, dtype):
    """The values as they are encoded, and the byte of each row."""
    x, rows = x.copy(), np.zeros(x.size // length, np.int8)
    for group in range(-(-x.size // GROUP)):
        shares = shares_of(group, length, x.size)
        if len(shares) > 1:
            shifts = shifts_of(x, shares, dtype)
            for k, (row, a, b) in enumerate(shares):
                x[a:b] *= F32(2.0 ** shifts[k])
                if k:
                    rows[row] = shifts[k] - shifts[k - 1]
    return x, rows.view(np.uint8)


def unscale(bits, rows, length, dtype):
    """Decoded values, as bits of `dtype`, scaled back."""
    x = to_float(bits, dtype)
    for group in range(-(-x.size // GROUP)):
        shares, shifts = shares_of(group, length, x.size), [0]
        shifts += [int(rows.view(np.int8)[row]) for row, _, _ in shares[1:]]
        shifts = np.cumsum(shifts)
        for s, (_, a, b) in zip(shifts - shifts.min(), shares, strict=True):
            x[a:b] *= F32(2.0 ** -int(s))
    return np.where(to_float(bits, dtype) == x, bits, to_bits(x, dtype))
