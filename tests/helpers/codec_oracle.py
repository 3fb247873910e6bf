"""A second opinion on the payload format: an encoder and a decoder in numpy.

Written from the text at the top of group.h and docs/codecs.md, by other means than
the C: FP8 by searching the table of all values, the rotation by explicit matrices, integers by
the exact product in float64, levels by searching lists. It is slow and short. Values travel as
the bits of their dtype; noise is uint16 [G, 128], None: to nearest."""

import importlib.util
import itertools

import direct_oracle
import numpy as np
from oracle_groups import (
    centre,
    decode_centred,
    decode_classes,
    encode_centred,
    encode_classes,
    of_one_sign,
    plain_or_clusters,
    two_classes,
)
from oracle_values import (
    BITS,
    F32,
    FORMATS,
    HADAMARD,
    LARGE,
    LIMIT,
    MAX,
    ROTATED,
    STAGES,
    TINY,
    WORDS,
    WORDS_BESIDE,
    Fp8,
    decode_int4,
    decode_rotated,
    encode_int4,
    encode_rotated,
    kind,
    pack,
    power,
    signs_of,
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


def is_doubtful(codec, x, stored, amax, words):
    """Groups that another form may suit better."""
    largest = np.abs(x).max(axis=1)
    negative = np.signbit(x[:, :32]).sum(axis=1)
    far = (F32(4) * np.abs(x) >= largest[:, None]).sum(axis=1)
    one_sided = F32(4) * np.minimum(x.max(axis=1, initial=0), -x.min(axis=1, initial=0)) < largest
    peaked, flat = amax > F32(20) * largest, amax < F32(9) * largest
    out = (negative < 8) | (negative > 24) | one_sided | peaked | (flat & (far <= 8))
    return out | is_lost(codec, stored, words)


def is_lost(codec, stored, words):
    """int4: is the step of the rest less than that of field 1?"""
    least = np.maximum((words[:, -1].astype(np.int64) >> 7 & 255) - 5, 0) * 16
    return (stored >> 3 < least) if codec == "int4" else np.zeros(len(words), bool)


def encode_doubtful(codec, x, dtype, signs, stored, lost, noise):
    """(groups that get another form, their packed codes, their words)"""
    classes = two_classes(codec, x, np.ones_like(x, bool), stored, noisy=noise is not None)
    centred = centre(codec, x, signs, stored)
    bound = np.where(lost | (of_one_sign(x) & (noise is None)), F32(np.inf), F32(0.94))
    if noise is not None:
        centred.estimate[:] = np.inf
    exact = (classes.estimate == 0) & (classes.near <= 8) & (centred.estimate == 0)
    apart = (classes.estimate < bound) & ~(centred.estimate < classes.estimate) & ~exact
    beside = (centred.estimate < bound) & ~apart
    packed = np.zeros((len(x), 16 * BITS.get(codec, 8)), np.uint8)
    words = np.zeros((len(x), WORDS_BESIDE.get(codec, 1)), np.uint16)
    some = [None if noise is None else noise[rows] for rows in (apart, beside)]
    packed[apart], words[apart] = encode_classes(codec, classes.of(apart), x[apart], dtype, some[0])
    codes, words[beside] = encode_centred(codec, centred.of(beside), x[beside], some[1])
    packed[beside] = pack(codec, codes)
    return apart | beside, packed, words


def encode_other(codec, x, dtype, noise):
    """Tiny groups, and those with escapes."""
    packed = np.zeros((len(x), 16 * BITS.get(codec, 8)), np.uint8)
    words = np.zeros((len(x), WORDS_BESIDE.get(codec, 1)), np.uint16)
    table = ((np.abs(x) > LIMIT[dtype]) & (np.abs(x) < MAX[dtype])).any(axis=1)
    for g in np.flatnonzero(table):
        amax = np.where(np.abs(x[g]) <= LIMIT[dtype], np.abs(x[g]), F32(0)).max()
        packed[g], words[g] = encode_table(codec, x[g], dtype, amax), [0xFF80, 0x7F80][: words.shape[1]]
    x, some = x[~table], None if noise is None else noise[~table]
    groups = plain_or_clusters(codec, x, dtype, noise is not None)
    packed[~table], words[~table] = encode_classes(codec, groups, x, dtype, some)
    return packed, words


def encode_groups(codec, x, dtype, noise):
    """(packed codes [G, bytes], words beside them [G, 1 or 2])"""
    if codec not in ROTATED:
        codes, scales = encode_unrotated(codec, x, dtype, False, noise)
        return codes, scales[:, None]
    signs = signs_of(len(x))
    ordinary = encode_int4 if codec == "int4" else encode_rotated
    codes, words, stored, amax, other = ordinary(codec, x, dtype, signs, noise)
    packed = pack(codec, codes)
    at = np.flatnonzero(~other & is_doubtful(codec, x, stored, amax, words) & (stored > 0))
    some, lost = None if noise is None else noise[at], is_lost(codec, stored[at], words[at])
    chosen, its_packed, its_words = encode_doubtful(codec, x[at], dtype, signs[at], stored[at], lost, some)
    packed[at[chosen]], words[at[chosen]] = its_packed[chosen], its_words[chosen]
    some = None if noise is None else noise[other]
    packed[other], words[other] = encode_other(codec, x[other], dtype, some)
    return packed, words


def encode(codec, bits, dtype, noise=None, shape=()):
    """The payload, as bytes: the codes, and then the scales. Of `shape` the last size counts."""
    if codec == "raw":
        return bits.view(np.uint8).copy()
    if codec not in FORMATS:
        return oracle_of(codec).encode(codec, bits, dtype)[0]
    if bits.size == 0:
        return np.zeros(0, np.uint8)
    groups = -(-bits.size // GROUP)
    x = np.zeros(groups * GROUP, F32)
    x[: bits.size] = to_float(bits, dtype)
    rows, length = np.zeros(0, np.uint8), row_of(codec, shape)
    with np.errstate(all="ignore"):
        if length:
            x[: bits.size], rows = scale(x[: bits.size], length, dtype)
        packed, words = encode_groups(codec, x.reshape(groups, GROUP), dtype, noise)
    return np.concatenate([packed.ravel(), words.ravel().astype("<u2").view(np.uint8), rows])


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
    signs = signs_of(len(codes))
    out = decode_int4(codes, words, signs) if codec == "int4" else decode_rotated(codec, codes, scales, signs)
    exact = np.zeros(out.shape, bool)
    other = words[:, 1] & 0x7F80 == 0x7F80 if codec == "int4" else scales >= 0x8000
    centred = np.flatnonzero(other & (scales & 1 == 0) & (scales != 0xFF80))
    out[centred] = decode_centred(codec, codes[centred], words[centred], signs[centred])
    for g in np.flatnonzero(other & (scales & 1 == 1)):
        out[g], exact[g] = decode_classes(codec, packed[g], words[g], dtype)
    for g in np.flatnonzero(other & (scales == 0xFF80)):
        out[g], exact[g] = decode_table(codec, packed[g], dtype)
    return out, exact


def decode(codec, payload, numel, dtype, shape=()):
    """The decoded values, as bits of `dtype`."""
    length = row_of(codec, shape)
    if length:
        rows = payload[payload.size - numel // length :]
        decoded = decode(codec, payload[: payload.size - rows.size], numel, dtype)
        with np.errstate(all="ignore"):
            return unscale(decoded, rows, length, dtype)
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


# ---- Rows that do not end with a group: the shifts of their shares, from the text of rows.h.
#
# Slow and by other means than the C: sorted lists in place of counts.

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
