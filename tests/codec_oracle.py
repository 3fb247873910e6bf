"""A second opinion on the payload format: an encoder and a decoder in numpy.

Written from the text at the top of csrc/codec/group.h and docs/codecs.md, by other means than
the C: FP8 by searching the table of all values, the rotation by explicit matrices, integers by
the exact product in float64. It is slow and short. Values travel as the bits of their dtype.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np

GROUP = 128
F32 = np.float32
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
#: Largest finite value that is not an escape, and the largest finite value.
LIMIT = {"float32": F32(1e30), "float16": F32(65472), "bfloat16": F32(float.fromhex("0x1.92p99"))}
MAX = {"float32": np.finfo(F32).max, "float16": F32(65504), "bfloat16": F32(float.fromhex("0x1.fep127"))}
TINY, LARGE = F32(2.0**-80), F32(2.0**13)


# ---- dtypes ----


def to_float(bits, dtype):
    if dtype == "float32":
        return bits.view(F32)
    if dtype == "float16":
        return bits.view(np.float16).astype(F32)
    return (bits.astype(np.uint32) << 16).view(F32)


def to_bits(values, dtype):
    """float32 to the bits of `dtype`, rounded to nearest even; NaN becomes the quiet NaN without a payload."""
    values = np.where(np.isnan(values), F32(np.nan), np.asarray(values, F32)).astype(F32)
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


# ---- FP8 by table ----


def fp8_values(exponent_bits, mantissa_bits, bias):
    """The non-negative values of an FP8 format in code order, as OCP defines them; NaN and Inf as if finite."""
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

    def store(self, t):
        """float32 to its upper half, nearest even."""
        u = t.view(np.uint32).astype(np.uint64)
        low, high = u & 0xFFFF, u >> 16
        return (high + ((low > 0x8000) | ((low == 0x8000) & (high % 2 == 1)))).astype(np.uint32)

    def codes(self, x, inverse):
        """x: scaled values [G, 128]; inverse: 1 / s [G, 1]. Rounds float32(x * m), m = float32(2^shift / s)."""
        product = x * (inverse * F32(2.0**self.shift))
        magnitude = np.abs(product).astype(np.float64) * 2.0**-self.shift
        low = np.searchsorted(self.middles, magnitude, side="left")
        high = np.searchsorted(self.middles, magnitude, side="right")  # differs from low at a tie only
        code = np.where(low % 2 == 0, low, high)
        return (code + np.where(np.signbit(product), 128, 0)).astype(np.uint8)

    def value(self, codes):
        return np.where(codes >= 128, -1.0, 1.0) * self.values[codes & 127]


class Int:
    top, top_escaped, offset = 127, 125, 32
    escapes = (256 - 128, 127, 256 - 127, 126, 256 - 126)

    def factor(self, escaped):
        return np.where(escaped, F32(2.0**32 / 125), F32(2.0**32 / 127))

    def store(self, t):
        """float32 to its upper half, upwards."""
        u = t.view(np.uint32)
        return (u >> 16) + (u & 0xFFFF != 0).astype(np.uint32)

    def codes(self, x, inverse):
        return np.rint(x.astype(np.float64) * inverse.astype(np.float64)).astype(np.int8).view(np.uint8)

    def value(self, codes):
        return codes.view(np.int8).astype(np.float64)


FORMATS = {
    "fp8_e4m3": Fp8(4, 3, 7, 448, 384, 32, -120, [0x7F, 0x7E, 0xFE, 0x7D, 0xFD]),
    "fp8_e5m2": Fp8(5, 2, 15, 57344, 57344, 40, -112, [0x7E, 0x7C, 0xFC, 0x7D, 0xFD]),
    "int8": Int(),
    "int8_plain": Int(),
}


def power(exponent):
    return F32(2.0**exponent)


def upper_half(stored):
    return (np.asarray(stored, np.uint32) << 16).view(F32)


# ---- the rotation ----


def hadamard_matrix():
    """Natural order: the sign of entry (i, j) is the parity of i & j."""
    both = np.arange(GROUP)[:, None] & np.arange(GROUP)[None, :]
    return 1 - 2 * (np.array([[bin(v).count("1") for v in row] for row in both]) % 2)


def stage_matrix(bit):
    """One stage: row i adds (bit clear) or subtracts (bit set) the two values whose indices differ in `bit`."""
    stage = np.zeros((GROUP, GROUP), np.int64)
    for i in range(GROUP):
        stage[i, i & ~(1 << bit)] = 1
        stage[i, i | 1 << bit] = -1 if i >> bit & 1 else 1
    return stage


HADAMARD = hadamard_matrix()
STAGES = [stage_matrix(bit) for bit in range(7)]
PI = (
    0x243F6A8885A308D313198A2E03707344  # the fraction of pi, 128 bits; each word of 32 counts its bits from the low end
)
SIGNS = np.array([-1.0 if PI >> (96 - i // 32 * 32 + i % 32) & 1 else 1.0 for i in range(GROUP)], F32)


def rotate(x):
    """H (d o x), in float32, stage by stage."""
    y = x * SIGNS
    for stage in STAGES:
        pairs = [np.flatnonzero(row) for row in stage]
        first, second = [p[0] for p in pairs], [p[1] for p in pairs]
        signs = stage[np.arange(GROUP), second].astype(F32)
        y = y[:, first] + signs * y[:, second]  # float32: one rounding; the product is exact
    return y


# ---- groups ----


def kind(v, dtype):
    """0 NaN, 1 +Inf, 2 -Inf, 3 +MAX, 4 -MAX, 5 another escape, -1 none."""
    if np.isnan(v):
        return 0
    if np.isinf(v):
        return 2 if v < 0 else 1
    if abs(v) == MAX[dtype]:
        return 4 if v < 0 else 3
    return 5 if abs(v) > LIMIT[dtype] else -1


def encode_table(x, dtype, amax):
    """Form B: 128 codes of 7 bits, the step, a table of three values."""
    scale = power(64) if amax < TINY else power(0)
    step = F32(F32(amax * scale) * F32(2.0**32 / 59))
    inverse = F32(1) / F32(step * power(-32)) if amax > 0 else F32(0)
    number, table = 0, []
    for i, v in enumerate(x):
        k = kind(v, dtype)
        if k < 0:
            code = round(Fraction(float(F32(v * scale))) * Fraction(float(inverse))) + 59
        elif k < 5:
            code = 119 + k
        elif float(v) in table:
            code = 124 + table.index(float(v))
        elif len(table) < 3:
            code = 124 + len(table)
            table.append(float(v))
        else:
            code = 123 if v < 0 else 122
        number |= code << 7 * i
    words = np.array([step * (power(-64) if amax < TINY else power(0)), *table, *[0.0] * (3 - len(table))], F32)
    return np.frombuffer(number.to_bytes(112, "little") + words.tobytes(), np.uint8)


def encode_unrotated(codec, x, dtype, escaped):
    f = FORMATS[codec]
    escape = ~(np.abs(x) <= LIMIT[dtype])
    escaped = escaped | escape.any(axis=1)
    amax = np.where(escape, F32(0), np.abs(x)).max(axis=1, initial=0)
    shift = np.where(amax < TINY, 64, np.where((amax >= LARGE) & isinstance(f, Fp8), -96, 0))
    scale = np.where(shift == 64, power(64), np.where(shift == -96, power(-96), power(0)))
    stored = f.store((amax * scale) * f.factor(escaped))
    inverse = F32(1) / (upper_half(stored) * power(-f.offset))
    zero = amax == 0
    inverse = np.where(zero, F32(0), inverse)
    codes = f.codes(np.where(escape, F32(0), x) * scale[:, None], inverse[:, None])
    codes[zero] = 0
    scales = np.where(zero, 0, stored.astype(np.int64) - shift * 128) + np.where(escaped, 0x8000, 0)
    for g, i in zip(*np.nonzero(escape), strict=True):
        k = kind(x[g, i], dtype)
        codes[g, i] = f.escapes[k] if k < 5 else 0
    inside = escape & np.isfinite(x) & (np.abs(x) != MAX[dtype])
    for g in np.flatnonzero(inside.any(axis=1)):
        codes[g] = encode_table(x[g], dtype, amax[g])
        scales[g] = 0xFF80
    return codes, scales.astype(np.uint16)


def encode_rotated(x, dtype):
    ordinary = (np.abs(x) <= LIMIT[dtype]).all(axis=1)
    y = rotate(np.where(ordinary[:, None], x, F32(0)))
    amax = np.abs(y).max(axis=1, initial=0)
    stored = FORMATS["int8"].store(amax * F32(2.0**25 / 127))
    inverse = np.where(amax > 0, F32(1) / (upper_half(stored) * power(-25)), F32(0))
    codes = FORMATS["int8"].codes(y, inverse[:, None])
    scales = np.where(amax > 0, stored, 0).astype(np.uint16)
    other = ~ordinary | ((amax > 0) & (amax < TINY))
    codes[other], scales[other] = encode_unrotated("int8", x[other], dtype, True)
    return codes, scales


def encode(codec, bits, dtype):
    """The payload, as bytes."""
    if codec == "raw":
        return bits.view(np.uint8).copy()
    groups = -(-bits.size // GROUP)
    x = np.zeros(groups * GROUP, F32)
    x[: bits.size] = to_float(bits, dtype)
    x = x.reshape(groups, GROUP)
    with np.errstate(all="ignore"):
        codes, scales = encode_rotated(x, dtype) if codec == "int8" else encode_unrotated(codec, x, dtype, False)
    return np.concatenate([codes.ravel(), scales.astype("<u2").view(np.uint8)])


def decode_table(codes, dtype):
    number = int.from_bytes(codes[:112].tobytes(), "little")
    step, *table = codes[112:].copy().view("<f4")
    out = np.empty(GROUP, F32)
    escape = np.zeros(GROUP, bool)
    special = [np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype], *table]
    for i in range(GROUP):
        code = number >> 7 * i & 127
        escape[i] = code > 118
        out[i] = special[code - 119] if code > 118 else F32(F32(code - 59) * F32(step * power(-16))) * power(-16)
    return out, escape


def decode(codec, payload, numel, dtype):
    """The decoded values, as bits of `dtype`."""
    if codec == "raw":
        return payload.view(WORDS[dtype]).copy()
    f = FORMATS[codec]
    groups = -(-numel // GROUP)
    codes = payload[: groups * GROUP].reshape(groups, GROUP)
    scales = payload[groups * GROUP :].copy().view("<u2")
    escaped = scales >= 0x8000
    with np.errstate(all="ignore"):
        step = upper_half(scales & 0x7FFF)[:, None]
        out = (f.value(codes).astype(F32) * (step * power(-16))) * power(16 - f.offset)
        if codec == "int8":
            sums = (f.value(codes) @ HADAMARD).astype(F32)
            rotated = SIGNS * (sums * (step * power(-32)))
            out = np.where(escaped[:, None], out, rotated)
    escape = np.zeros_like(codes, bool)
    special = [np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype]]
    for k, code in enumerate(f.escapes):
        hit = (codes == code) & (escaped & (scales != 0xFF80))[:, None]
        out[hit], escape[hit] = special[k], True
    for g in np.flatnonzero(scales == 0xFF80):
        out[g], escape[g] = decode_table(codes[g], dtype)
    if dtype == "float16":
        out = np.where(escape, out, np.clip(out, -LIMIT[dtype], LIMIT[dtype]))
    return to_bits(out.ravel()[:numel], dtype)
