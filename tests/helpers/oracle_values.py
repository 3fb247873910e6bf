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
