"""Dtypes, formats and packing of the codec oracle (codec_oracle.py)."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

GROUP = 128
F32 = np.float32
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
#: Largest finite value that is not an escape, and the largest finite value.
LIMIT = {"float32": F32(1e30), "float16": F32(65472), "bfloat16": F32(float.fromhex("0x1.92p99"))}
MAX = {"float32": np.finfo(F32).max, "float16": F32(65504), "bfloat16": F32(float.fromhex("0x1.fep127"))}
TINY, LARGE, LEAST = F32(2.0**-80), F32(2.0**13), F32(2.0**-110)


# ---- dtypes ----


def to_float(bits, dtype):
    if dtype == "float32":
        return bits.view(F32)
    if dtype == "float16":
        return bits.view(np.float16).astype(F32)
    return (bits.astype(np.uint32) << 16).view(F32)


def to_bits(values, dtype):
    """float32 to the bits of `dtype`, rounded to nearest even;
    NaN becomes the quiet NaN without a payload."""
    values = np.where(np.isnan(values), F32(np.nan), np.asarray(values, F32)).astype(F32)
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def bits_of(values):
    return np.asarray(values, F32).view(np.uint32)


def bfloat16(values):
    """float32, rounded to the values of bfloat16."""
    return to_float(to_bits(np.asarray(values, F32), "bfloat16"), "bfloat16")


def exponent_of(values):
    """floor(log2), of 0 some number."""
    return np.frexp(values.astype(np.float64))[1] - 1


def kind(v, dtype):
    """0 NaN, 1 +Inf, 2 -Inf, 3 +MAX, 4 -MAX, 5 another escape, -1 none."""
    if math.isnan(v):
        return 0
    if math.isinf(v):
        return 2 if v < 0 else 1
    if abs(v) == MAX[dtype]:
        return 4 if v < 0 else 3
    return 5 if abs(v) > LIMIT[dtype] else -1


# ---- FP8 by table ----


def fp8_values(exponent_bits, mantissa_bits, bias):
    """The non-negative values of an FP8 format in code order, as OCP defines them;
    NaN and Inf as if finite."""
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, Fraction(code & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
        value = (
            mantissa * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + mantissa) * Fraction(2) ** (exponent - bias)
        )
        values.append(value)
    assert exponent_bits + mantissa_bits == 7
    return values


class Fp8:
    def __init__(self, exponent_bits, mantissa_bits, bias, top, top_escaped, offset, shift, codes):
        exact = fp8_values(exponent_bits, mantissa_bits, bias)
        self.values = np.array([float(v) for v in exact])
        self.middles = np.array([float((a + b) / 2) for a, b in pairwise(exact)])
        self.top, self.top_escaped, self.offset, self.shift = top, top_escaped, offset, shift
        self.escapes = codes  # NaN, +Inf, -Inf, +MAX, -MAX

    def factor(self, escaped):
        return np.where(escaped, F32(2.0**self.offset / self.top_escaped), F32(2.0**self.offset / self.top))

    def store(self, t, noise=None):
        """float32 to its upper half, nearest even; with noise upwards."""
        if noise is not None:
            return round_up(t, 16)
        u = t.view(np.uint32).astype(np.uint64)
        low, high = u & 0xFFFF, u >> 16
        return (high + ((low > 0x8000) | ((low == 0x8000) & (high % 2 == 1)))).astype(np.uint32)

    def codes(self, x, inverse, escaped, noise=None):
        """x: scaled values [G, 128]; inverse: 1 / s [G, 1]. Rounds float32(x * m),
        m = float32(2^shift / s)."""
        product = x * (inverse * F32(2.0**self.shift))
        magnitude = np.abs(product).astype(np.float64) * 2.0**-self.shift
        if noise is not None:
            below = np.minimum(np.searchsorted(self.values, magnitude, side="right") - 1, 126)
            gap = self.values[below + 1] - self.values[below]
            up = (magnitude - self.values[below]) / gap + (noise + 0.5) / 65536 >= 1
            last = np.searchsorted(self.values, np.where(escaped, self.top_escaped, self.top))[:, None]
            code = np.minimum(below + up, last)
            return (code + np.where(np.signbit(product), 128, 0)).astype(np.uint8)
        low = np.searchsorted(self.middles, magnitude, side="left")
        high = np.searchsorted(self.middles, magnitude, side="right")  # differs from low at a tie only
        code = np.where(low % 2 == 0, low, high)
        return (code + np.where(np.signbit(product), 128, 0)).astype(np.uint8)

    def value(self, codes):
        return np.where(codes >= 128, -1.0, 1.0) * self.values[codes & 127]


class Int:
    """Integers of `bits` bits, the ordinary ones up to `top`; with escapes the largest three of
    each sign are taken."""

    def __init__(self, bits, top=127):
        self.bits, self.mask = bits, 2**bits - 1
        self.offset = 28 if bits == 4 else 32
        half = 2 ** (bits - 1)
        self.top, self.top_escaped = top, half - 3
        self.escapes = tuple(c & self.mask for c in (-half, half - 1, 1 - half, half - 2, 2 - half))

    def factor(self, escaped):
        return np.where(escaped, F32(2.0**self.offset / self.top_escaped), F32(2.0**self.offset / self.top))

    def store(self, t, noise=None):
        return round_up(t, 16)

    def codes(self, x, inverse, escaped, noise=None):
        if noise is None:
            code = np.rint(x.astype(np.float64) * inverse.astype(np.float64)).astype(np.int64)
        else:
            top = np.where(escaped, self.top_escaped, self.top)[:, None]
            code = np.clip(np.floor((x * inverse) + uniform(noise)).astype(np.int64), -top, top)
        return (code & self.mask).astype(np.uint8)

    def value(self, codes):
        code = codes.astype(np.int64)
        return np.where(code >= 2 ** (self.bits - 1), code - 2**self.bits, code).astype(np.float64)


FORMATS = {
    "fp8_e4m3": Fp8(4, 3, 7, 448, 384, 32, -120, [0x7F, 0x7E, 0xFE, 0x7D, 0xFD]),
    "fp8_e5m2": Fp8(5, 2, 15, 57344, 57344, 40, -112, [0x7E, 0x7C, 0xFC, 0x7D, 0xFD]),
    "int8": Int(8),
    "int8_plain": Int(8),
    "int6": Int(6),
    "int4": Int(4),
}
BITS = {"int6": 6, "int4": 4}
WORDS_BESIDE = {"int4": 2}
#: Bits of a header that lie in the words beside the codes.
BESIDE = {"int4": 8}
ROTATED = ("int8", "int6", "int4")


def uniform(noise):
    return (noise.astype(F32) + F32(0.5)) * F32(2.0**-16)


def round_up(t, dropped):
    """float32 without its last `dropped` bits, upwards: the upper half."""
    u = t.view(np.uint32).astype(np.uint64)
    return ((u + 2**dropped - 1) >> dropped << dropped >> 16).astype(np.uint32)


def power(exponent):
    return F32(2.0**exponent)


def power_of(exponents):
    return np.ldexp(1.0, exponents).astype(F32)


def upper_half(stored):
    return (np.asarray(stored, np.uint32) << 16).view(F32)


# ---- packing ----


def bit_rows(codes, bits):
    return (codes[:, :, None] >> np.arange(bits)) & 1


def pack(codec, codes):
    """[G, 128] codes to [G, bytes]: bit fields, lowest first; int6: four bits each,
    then two bits each."""
    bits = BITS.get(codec, 8)
    rows = bit_rows(codes.astype(np.uint8), bits)
    parts = [rows] if bits != 6 else [rows[:, :, :4], rows[:, :, 4:]]
    fields = [p.reshape(len(p), GROUP * p.shape[2]) for p in parts]
    return np.concatenate([np.packbits(f, axis=1, bitorder="little") for f in fields], axis=1)


def unpack(codec, packed):
    bits = BITS.get(codec, 8)
    rows = np.unpackbits(packed, axis=1, bitorder="little")
    if bits == 6:
        rows = np.concatenate([rows[:, :512].reshape(-1, 128, 4), rows[:, 512:].reshape(-1, 128, 2)], axis=2)
    return (rows.reshape(-1, 128, bits).astype(np.int64) << np.arange(bits)).sum(axis=2).astype(np.uint8)


# ---- groups that are not ordinary ----


class Groups:
    """A dataclass of arrays whose rows are groups."""

    def of(self, rows):
        return type(self)(*(value[rows] for value in vars(self).values()))

    def where(self, condition, other):
        """These groups where the condition holds, else the others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(np.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))


class Fields:
    """A number of bit fields, the first one lowest."""

    def __init__(self):
        self.number = self.bits = 0

    def add(self, value, bits):
        assert 0 <= int(value) < 1 << bits
        self.number |= int(value) << self.bits
        self.bits += bits
        return self


class Reader:
    """Bit fields of a number."""

    def __init__(self, number):
        self.number, self.taken = number, 0

    def take(self, bits):
        value = self.number >> self.taken & ((1 << bits) - 1)
        self.taken += bits
        return value


def split(codec, scale, header):
    """(words beside the codes, the header's bits that lie in the codes, how many)"""
    if codec != "int4":
        return [scale], header.number, header.bits
    first = header.number & 255
    return [scale, 0x7F80 | first & 127 | first >> 7 << 15], header.number >> 8, max(header.bits - 8, 0)


def join(codec, words, number):
    """The header, of its bits in the codes and the words beside them."""
    if codec != "int4":
        return number
    return number << 8 | int(words[1]) & 127 | int(words[1]) >> 15 << 7


# ---- The rotated formats of the codec oracle: rotation, levels, ordinary groups.

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
