"""A second opinion on the payload format: an encoder and a decoder in numpy.

Written from the text at the top of group.h and docs/codecs.md, by other means than
the C: FP8 by searching the table of all values, the rotation by explicit matrices, integers by
the exact product in float64, levels by searching lists. It is slow and short. Values travel as
the bits of their dtype; noise is uint16 [G, 128], None: to nearest.
"""

import importlib.util
import math

import direct_oracle
import numpy as np
from oracle_rotation import (
    HADAMARD,
    STAGES,
    decode_int4,
    decode_outlier,
    decode_rotated,
    encode_int4,
    encode_rotated,
    signs_of,
)
from oracle_values import (
    BITS,
    F32,
    FORMATS,
    LARGE,
    LIMIT,
    MAX,
    ROTATED,
    TINY,
    WORDS,
    WORDS_BESIDE,
    Fp8,
    pack,
    power,
    to_bits,
    to_float,
    unpack,
    upper_half,
)

import gradckpt

__all__ = [
    "FORMATS",
    "HADAMARD",
    "LIMIT",
    "MAX",
    "STAGES",
    "WORDS",
    "decode",
    "encode",
    "signs_of",
    "to_bits",
    "to_float",
]

GROUP = 128
#: Form B: bits of a code, half the range of its integers, kinds that have codes,
#: table entries, offset of the step.
TABLES = {"int6": (5, 11, 5, 3, 24), "int4": (3, 1, 3, 2, 24)}


def form_b(codec):
    return TABLES.get(codec, (7, 59, 5, 3, 32))


PHILOX = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


# ---- noise ----


def oracle_of(codec):
    """The module that knows a codec: oracle_<codec>.py, or direct_oracle.py."""
    own = importlib.util.find_spec(f"oracle_{codec}")
    return direct_oracle if own is None else importlib.import_module(own.name)


for _codec in gradckpt.codecs.names():
    if hasattr(oracle_of(_codec), "FORMAT"):  # a group codec: its numbers are all that differs
        FORMATS[_codec], BITS[_codec], TABLES[_codec] = oracle_of(_codec).FORMAT


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011): four words and two, as Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = PHILOX[0][0] * c[0], PHILOX[0][1] * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & 0xFFFFFFFF, low >> 32 ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(a + b) & 0xFFFFFFFF for a, b in zip(k, PHILOX[1], strict=True)]
    return c


def noise_of(groups, seed, step, tensor, first=0):
    out = np.empty((groups, GROUP), np.uint16)
    for g in range(groups):
        for b in range(16):
            block = (first + g) * 16 + b
            words = philox((block & 0xFFFFFFFF, block >> 32, tensor, step), (seed & 0xFFFFFFFF, seed >> 32))
            out[g, 8 * b : 8 * b + 8] = [w >> shift & 0xFFFF for w in words for shift in (0, 16)]
    return out


# ---- groups ----


def kind(v, dtype):
    """0 NaN, 1 +Inf, 2 -Inf, 3 +MAX, 4 -MAX, 5 another escape, -1 none."""
    if math.isnan(v):
        return 0
    if math.isinf(v):
        return 2 if v < 0 else 1
    if abs(v) == MAX[dtype]:
        return 4 if v < 0 else 3
    return 5 if abs(v) > LIMIT[dtype] else -1


def encode_table(codec, x, dtype, amax):
    """Form B: 128 codes of fewer bits, the step, a table of values."""
    bits, half, kinds, size, offset = form_b(codec)
    special = 2 * half + 1
    scale = power(64) if amax < TINY else power(0)
    step = F32(F32(amax * scale) * F32(2.0**offset / half))
    inverse = F32(1) / F32(step * power(-offset)) if amax > 0 else F32(0)
    kinds_of = [kind(v, dtype) for v in x.tolist()]
    others = list(dict.fromkeys(float(v) for v, k in zip(x, kinds_of, strict=True) if k >= kinds))
    table = others[:size]
    infinite = {k - 1 for k in kinds_of if k in (1, 2)}
    if kinds == 3:  # a sign whose infinity is there needs an entry
        for sign in infinite:
            its = [v for v in others if (v < 0) == sign]
            if its and its[0] not in table:
                table[1] = its[0]
    number = as_max = 0
    for i, (v, k) in enumerate(zip(x, kinds_of, strict=True)):
        if k < 0:
            code = round(float(F32(v * scale)) * float(inverse)) + half  # 24 bits by 24: exact
        elif k < kinds:
            code = special + k
        elif float(v) in table:
            code = special + kinds + table.index(float(v))
        elif kinds == 5:  # MAX of its sign
            code = special + (4 if v < 0 else 3)
        elif int(v < 0) not in infinite:  # MAX too
            code = special + 1 + int(v < 0)
            as_max |= 1 << int(v < 0)
        else:  # the first entry of its sign
            code = special + kinds + next(n for n, entry in enumerate(table) if (entry < 0) == (v < 0))
        number |= code << bits * i
    words = np.array([step * (power(-64) if amax < TINY else power(0)), *table, *[0.0] * (3 - len(table))], F32)
    if kinds == 3:
        words.view(np.uint32)[3] = as_max
    return np.frombuffer(number.to_bytes(16 * bits, "little") + words.tobytes(), np.uint8)


def encode_unrotated(codec, x, dtype, escaped, noise=None):
    """(packed codes, scales)"""
    f = FORMATS[codec]
    escape = ~(np.abs(x) <= LIMIT[dtype])
    escaped = escaped | escape.any(axis=1)
    amax = np.where(escape, F32(0), np.abs(x)).max(axis=1, initial=0)
    shift = np.where(amax < TINY, 64, np.where((amax >= LARGE) & isinstance(f, Fp8), -96, 0))
    scale = np.where(shift == 64, power(64), np.where(shift == -96, power(-96), power(0)))
    stored = f.store((amax * scale) * f.factor(escaped), noise)
    inverse = F32(1) / (upper_half(stored) * power(-f.offset))
    zero = amax == 0
    inverse = np.where(zero, F32(0), inverse)
    codes = f.codes(np.where(escape, F32(0), x) * scale[:, None], inverse[:, None], escaped, noise)
    codes[zero] = 0
    scales = np.where(zero, 0, stored.astype(np.int64) - shift * 128) + np.where(escaped, 0x8000, 0)
    for g, i in zip(*np.nonzero(escape), strict=True):
        k = kind(x[g, i], dtype)
        codes[g, i] = f.escapes[k] if k < 5 else 0
    packed = pack(codec, codes)
    inside = escape & np.isfinite(x) & (np.abs(x) != MAX[dtype])
    for g in np.flatnonzero(inside.any(axis=1)):
        packed[g] = encode_table(codec, x[g], dtype, amax[g])
        scales[g] = 0xFF80
    return packed, scales.astype(np.uint16)


def encode_groups(codec, x, dtype, noise):
    """(packed codes [G, bytes], words beside them [G, 1 or 2])"""
    if codec not in ROTATED:
        codes, scales = encode_unrotated(codec, x, dtype, False, noise)
        return codes, scales[:, None]
    if codec == "int4":
        codes, words, other = encode_int4(x, dtype, signs_of(len(x)), noise)
    else:
        codes, scales, other = encode_rotated(codec, x, dtype, signs_of(len(x)), noise)
        words = scales[:, None]
    packed = pack(codec, codes)
    if other.any():
        packed[other], scales = encode_unrotated(codec, x[other], dtype, True, None if noise is None else noise[other])
        words[other, 0] = scales
        if codec == "int4":
            words[other, 1] = 0x7F80
    return packed, words


def encode(codec, bits, dtype, noise=None):
    """The payload, as bytes."""
    if codec == "raw":
        return bits.view(np.uint8).copy()
    if codec not in FORMATS:
        return oracle_of(codec).encode(codec, bits, dtype)[0]
    if bits.size == 0:
        return np.zeros(0, np.uint8)
    groups = -(-bits.size // GROUP)
    x = np.zeros(groups * GROUP, F32)
    x[: bits.size] = to_float(bits, dtype)
    with np.errstate(all="ignore"):
        packed, words = encode_groups(codec, x.reshape(groups, GROUP), dtype, noise)
    return np.concatenate([packed.ravel(), words.ravel().astype("<u2").view(np.uint8)])


def decode_table(codec, packed, dtype):
    bits, half, kinds, size, offset = form_b(codec)
    unit = power(-offset // 2)
    number = int.from_bytes(packed[: 16 * bits].tobytes(), "little")
    step, *table = packed[16 * bits :].copy().view("<f4")
    out = np.empty(GROUP, F32)
    escape = np.zeros(GROUP, bool)
    special = [*[np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype]][:kinds], *table[:size]]
    if kinds == 3:
        as_max = int(packed[16 * bits + 12])
        special[1:3] = [MAX[dtype] if as_max & 1 else np.inf, -MAX[dtype] if as_max & 2 else -np.inf]
    for i in range(GROUP):
        code = (number >> bits * i & (2**bits - 1)) - half
        escape[i] = code > half
        out[i] = special[code - half - 1] if escape[i] else F32(F32(code) * F32(step * unit)) * unit
    return out, escape


def decode_unrotated(codec, packed, scales, dtype):
    """(values [G, 128], which of them are stored exactly)"""
    f = FORMATS[codec]
    codes = unpack(codec, packed)
    escaped = scales >= 0x8000
    step = upper_half(scales & 0x7FFF)[:, None]
    out = (f.value(codes).astype(F32) * (step * power(-16))) * power(16 - f.offset)
    escape = np.zeros_like(codes, bool)
    special = [np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype]]
    for k, code in enumerate(f.escapes):
        hit = (codes == code) & escaped[:, None]
        out[hit], escape[hit] = special[k], True
    for g in np.flatnonzero(scales == 0xFF80):
        out[g], escape[g] = decode_table(codec, packed[g], dtype)
    return out, escape


def decode_groups(codec, packed, words, dtype):
    """(values, which of them are stored exactly)"""
    scales = words[:, 0]
    if codec not in ROTATED:
        return decode_unrotated(codec, packed, scales, dtype)
    codes = unpack(codec, packed)
    other = words[:, 1] & 0x7F80 == 0x7F80 if codec == "int4" else scales >= 0x8000
    signs = signs_of(len(codes))
    out = decode_int4(codes, words, signs) if codec == "int4" else decode_rotated(codec, codes, scales, signs)
    escape = np.zeros(out.shape, bool)
    if other.any():
        out[other], escape[other] = decode_unrotated(codec, packed[other], scales[other], dtype)
    for g in np.flatnonzero((scales == 0xFF81) & (codec != "int4")):
        out[g], at = decode_outlier(codec, codes[g], signs[g])
        escape[g] = np.arange(GROUP) == at
    return out, escape


def decode(codec, payload, numel, dtype):
    """The decoded values, as bits of `dtype`."""
    if codec == "raw":
        return payload.view(WORDS[dtype]).copy()
    if codec not in FORMATS:
        return oracle_of(codec).decode(codec, payload, numel, dtype)
    groups, beside = -(-numel // GROUP), WORDS_BESIDE.get(codec, 1)
    packed = (
        payload[: payload.size - 2 * beside * groups].reshape(groups, -1) if groups else np.zeros((0, 128), np.uint8)
    )
    words = payload[payload.size - 2 * beside * groups :].copy().view("<u2").reshape(groups, beside)
    with np.errstate(all="ignore"):
        out, escape = decode_groups(codec, packed, words, dtype) if groups else (np.zeros((0, 128), F32), False)
    if dtype == "float16":
        out = np.where(escape, out, np.clip(out, -LIMIT[dtype], LIMIT[dtype]))
    return to_bits(out.ravel()[:numel], dtype)
