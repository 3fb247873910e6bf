"""The rotated formats of the codec oracle: rotation, levels, ordinary groups."""

import numpy as np
from oracle_values import F32, FORMATS, LIMIT, TINY, power, round_up, uniform, upper_half

GROUP = 128

# ---- the rotation ----


def hadamard_matrix():
    """Natural order: the sign of entry (i, j) is the parity of i & j."""
    both = np.arange(GROUP)[:, None] & np.arange(GROUP)[None, :]
    return 1 - 2 * (np.array([[bin(v).count("1") for v in row] for row in both]) % 2)


def stage_matrix(bit):
    """One stage: row i adds (bit clear) or subtracts (bit set) the two
    values whose indices differ in `bit`."""
    stage = np.zeros((GROUP, GROUP), np.int64)
    for i in range(GROUP):
        stage[i, i & ~(1 << bit)] = 1
        stage[i, i | 1 << bit] = -1 if i >> bit & 1 else 1
    return stage


HADAMARD = hadamard_matrix()
STAGES = [stage_matrix(bit) for bit in range(7)]


def fraction_of_pi(bits):
    """Machin's formula."""
    one = 1 << bits + 32

    def arctan_of_inverse(n):
        term = total = one // n
        for k in range(3, bits, 2):
            term //= -n * n
            total += term // k
        return total

    return (4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) - 3 * one) >> 32


#: 16 patterns of 128 signs: the fraction of pi in words of 32 bits,
#: each of which counts from its low end.
PI = fraction_of_pi(2048)
SIGNS = np.array([[1 - 2 * (PI >> (2047 - i // 32 * 32 - 31 + i % 32) & 1) for i in range(2048)]], F32).reshape(16, 128)


def signs_of(groups, first=0):
    """[G, 128], for groups `first` and on."""
    return SIGNS[(np.arange(first, first + groups, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF) >> 28]


def rotate(x, signs):
    """H (d o x), in float32, stage by stage."""
    y = x * signs
    for stage in STAGES:
        pairs = [np.flatnonzero(row) for row in stage]
        first, second = [p[0] for p in pairs], [p[1] for p in pairs]
        signs = stage[np.arange(GROUP), second].astype(F32)
        y = y[:, first] + signs * y[:, second]  # float32: one rounding; the product is exact
    return y


# ---- levels ----

#: Lower ends of the cells of |t| and what a cell's values become, from the smallest.
INT4_CELLS = [0, 12, 24, 36, 49, 64, 81, 103]
INT4_LEVELS = [5.5, 17.5, 29.5, 41.5, 55.5, 71.5, 89.5, 115.5]
INT6_CELLS = [0, 3, 5, 7, 9, 11, 13, 15, 17, *range(20, 96, 4), 96, 104, 112, 120]
INT6_LEVELS = [*(a + 0.5 for a in (1, 3, 5, 7, 9, 11, 13, 15, 17)), *(a + 1.5 for a in range(20, 96, 4)), 99.5, 107.5,
               115.5, 123.5]  # fmt: skip
UNIFORM_CELLS = list(range(0, 128, 4))
UNIFORM_LEVELS = [a + 1.5 for a in UNIFORM_CELLS]


def cells_of(codec, even):
    """(cells, levels) of one group."""
    if codec == "int4":
        return np.array(INT4_CELLS), np.array(INT4_LEVELS)
    return np.array(UNIFORM_CELLS if even else INT6_CELLS), np.array(UNIFORM_LEVELS if even else INT6_LEVELS)


def level_codes(codec, t, even):
    """Codes of integers t [G, 128]; even [G]: uniform levels."""
    out = np.empty(t.shape, np.uint8)
    odd_place = np.arange(GROUP) % 2 == 1
    for choice in (False, True):
        rows = even == choice
        cells, _ = cells_of(codec, choice)
        index = np.searchsorted(cells, np.abs(t[rows]), side="right") - 1
        negative = np.where(odd_place, t[rows] <= 0, t[rows] < 0)
        out[rows] = index + np.where(negative, len(cells), 0)
    return out


def noisy_level_codes(codec, p, even, noise):
    """Codes of float32 p [G, 128], one of the two levels around, by the noise."""
    out = np.empty(p.shape, np.uint8)
    for choice in (False, True):
        rows = even == choice
        _, levels = cells_of(codec, choice)
        n = len(levels)
        all_levels = np.concatenate([-levels[::-1], levels]).astype(F32)
        below = np.clip(np.searchsorted(all_levels, p[rows], side="right") - 1, 0, 2 * n - 1)
        above = np.minimum(below + 1, 2 * n - 1)
        reached = p[rows] + (all_levels[above] - all_levels[below]) * uniform(noise[rows]) >= all_levels[above]
        which = np.where(reached, above, below)
        out[rows] = np.where(which >= n, which - n, n + (n - 1 - which))
    return out


def level_values(codec, codes, even):
    out = np.empty(codes.shape)
    for choice in (False, True):
        rows = even == choice
        _, levels = cells_of(codec, choice)
        out[rows] = np.concatenate([levels, -levels])[codes[rows]]
    return out


# ---- int8 and int6 ----

DROPPED = {"int8": 16, "int6": 17, "int4": 19}
NOISY_TOP = {"int8": 127, "int6": 125.5, "int4": 115.5}


def step_of(codec, amax, noise):
    """The upper half of the step of y, and its reciprocal; 0 and 0 for amax = 0."""
    top = 127 if noise is None else NOISY_TOP[codec]
    stored = np.where(amax > 0, round_up(amax * F32(2.0**25 / top), DROPPED[codec]), 0).astype(np.uint32)
    return stored, np.where(amax > 0, F32(1) / (upper_half(stored) * power(-25)), F32(0)).astype(F32)


def integers(y, inverse):
    return np.rint(y.astype(np.float64) * inverse.astype(np.float64)[:, None]).astype(np.int64)


def encode_rotated(codec, x, dtype, signs, noise=None):
    """(codes, words [G, 1], stored steps, amax of y, groups that are tiny or have escapes)"""
    ordinary = (np.abs(x) <= LIMIT[dtype]).all(axis=1)
    x = np.where(ordinary[:, None], x, F32(0))
    y = rotate(x, signs)
    amax = np.abs(y).max(axis=1, initial=0)
    stored, inverse = step_of(codec, amax, noise)
    t, p = integers(y, inverse), y * inverse[:, None]
    large = ((t >= 64) | (t < -64) if noise is None else (p >= 63.5) | (p < -64.5)).sum(axis=1)
    even = (large > 48) & (codec == "int6")
    if codec == "int6":
        codes = level_codes(codec, t, even) if noise is None else noisy_level_codes(codec, p, even, noise)
    else:
        codes = FORMATS["int8"].codes(y, inverse[:, None], np.zeros(len(x), bool), noise)
    codes[stored == 0] = 0
    scales = stored + even
    return codes, scales.astype(np.uint16)[:, None], stored, amax, ~ordinary | ((amax > 0) & (amax < TINY))


def decode_rotated(codec, codes, scales, signs):
    """float32 [G, 128] of ordinary groups."""
    stored = (scales & 0x7FFE if codec == "int6" else scales).astype(np.uint32)
    value = level_values(codec, codes, scales & 1 == 1) if codec == "int6" else FORMATS["int8"].value(codes)
    return unrotate(value, upper_half(stored)[:, None] * power(-32), signs)


def unrotate(value, step, signs):
    """d o (H value) * step; values in half steps are integers twice as large and half the step."""
    return signs * ((2 * value @ HADAMARD).astype(F32) * (step * F32(0.5)))


# ---- int4 ----


def encode_int4(codec, x, dtype, signs, noise=None):
    """(codes, words [G, 2], stored steps, amax of y, groups that are tiny or have escapes)"""
    rows = np.arange(len(x))
    largest = np.abs(x).max(axis=1)
    other = ~(largest <= LIMIT[dtype]) | ((largest > 0) & (largest < TINY))
    x = np.where(other[:, None], F32(0), x)
    at = np.argmax(np.abs(x), axis=1)
    v = x[rows, at]
    bits = v.view(np.uint32).astype(np.uint64)
    carry = 0x7FFF + (bits >> 16 & 1) if noise is None else noise[rows, at].astype(np.uint64)
    outlier = np.where(v == 0, 0, (bits + carry) >> 16).astype(np.int64)
    rest = x.copy()
    rest[rows, at] = 0
    y = rotate(rest, signs)
    amax = np.abs(y).max(axis=1)
    stored, _ = step_of(codec, amax, noise)
    low = ((outlier >> 7 & 255) - 5) * 16
    q = stored.astype(np.int64) >> 3
    least = F32(1) / (upper_half(np.maximum(low, 1) << 3) * power(-25))
    none = (amax == 0) | ((q < low) & (amax * least < 12))
    q = np.maximum(q, low)
    inverse = np.where(none, F32(0), F32(1) / (upper_half(np.where(none, 1, q) << 3) * power(-25))).astype(F32)
    even = np.zeros(len(x), bool)
    if noise is None:
        codes = level_codes(codec, integers(y, inverse), even)
    else:
        codes = noisy_level_codes(codec, y * inverse[:, None], even, noise)
    codes[none] = 0
    field = np.where(none, 0, q - low + 1)
    words = np.stack([np.where(v == 0, 0, at) << 9 | field, outlier], axis=1)
    return codes, words.astype(np.uint16), stored, amax, other


def decode_int4(codes, words, signs):
    """float32 [G, 128], the large value as it is stored."""
    words = words.astype(np.int64)
    field, at, outlier = words[:, 0] & 511, words[:, 0] >> 9, words[:, 1]
    q = np.where(field > 0, field - 1 + ((outlier >> 7 & 255) - 5) * 16, 0)
    value = level_values("int4", codes, np.zeros(len(codes), bool))
    out = unrotate(value, upper_half(q << 3)[:, None] * power(-32), signs)
    out[np.arange(len(codes)), at] = (outlier.astype(np.uint32) << 16).view(F32)
    return out
