"""Centred groups and groups with outliers of the codec oracle (codec_oracle.py)."""

import math
from dataclasses import dataclass

import numpy as np
from oracle_rotation import integers, level_codes, level_values, noisy_level_codes, rotate, unrotate
from oracle_values import (
    BESIDE,
    F32,
    FORMATS,
    GROUP,
    LEAST,
    TINY,
    Fields,
    Groups,
    Reader,
    bfloat16,
    bits_of,
    exponent_of,
    join,
    power,
    power_of,
    round_up,
    split,
    upper_half,
)

MOST_OUTLIERS = 8
#: Bits of a mean.
NARROW, WIDE = 9, 14


@dataclass
class Centred(Groups):
    """What is chosen for groups [G, 128]; `outliers` [G, 8] are their indices, `n` [G] of them."""

    mean: np.ndarray
    mean_bits: np.ndarray
    one_sign: np.ndarray
    outliers: np.ndarray
    n: np.ndarray
    y: np.ndarray
    stored: np.ndarray
    estimate: np.ndarray  # infinite: no such form


def of_one_sign(x):
    """Of which groups no value is negative, or none positive."""
    return (x >= 0).all(axis=1) | (x <= 0).all(axis=1)


def header_length(n, mean_bits):
    return np.where(n == 0, mean_bits, np.where(n <= 2, 4 + mean_bits + 39 * n, 12 + mean_bits + 19 * n))


def noise_of_header(codec, bits):
    """128 times the noise of a group whose codes have none of their bits taken."""
    taken = np.maximum(bits - BESIDE.get(codec, 0), 0)
    return 128 + 3 * taken + 9 * np.maximum(taken - GROUP, 0)


def mean_of(x, chosen):
    """The mean of the chosen values of each group."""
    x = np.where(chosen, x, F32(0))
    largest, n = np.abs(x).max(axis=1), chosen.sum(axis=1)
    exponent = exponent_of(largest)
    total = np.rint(x.astype(np.float64) * np.ldexp(1.0, 15 - exponent)[:, None]).sum(axis=1)
    mean = bfloat16(total.astype(F32) / n.astype(F32) * power_of(exponent - 15))
    return np.where((n == 0) | (largest < TINY), F32(0), mean)


def find_outliers(codec, x, mean):
    """(indices [G, 8] from the farthest on, how many, q, unit of q)"""
    z = np.abs(x - mean[:, None])
    largest = z.max(axis=1)
    exponent = exponent_of(largest)
    q = np.floor(z.astype(np.float64) * np.ldexp(1.0, 11 - exponent)[:, None]).astype(np.int64)
    q[largest < TINY] = 0
    order = np.argsort(-q, axis=1, kind="stable")[:, :MOST_OUTLIERS]
    squares = np.take_along_axis(q, order, axis=1) ** 2
    rest = (q**2).sum(axis=1)[:, None] - np.pad(np.cumsum(squares, axis=1), ((0, 0), (1, 0)))
    cost = rest * noise_of_header(codec, header_length(np.arange(MOST_OUTLIERS + 1), NARROW))
    cost[:, 1:][squares == 0] = np.iinfo(np.int64).max
    return order, np.argmin(cost, axis=1), q, np.where(largest < TINY, F32(0), power_of(exponent - 11))


def without(order, n):
    """The values of each group that are no outliers."""
    kept = np.ones((len(order), GROUP), bool)
    for g, many in enumerate(n):
        kept[g, order[g, :many]] = False
    return kept


def centre(codec, x, signs, ordinary):
    """The form of groups x; ordinary: the stored steps of the ordinary groups."""
    mean = mean_of(x, np.ones_like(x, bool))
    order, n, q, unit = find_outliers(codec, x, mean)
    found = np.flatnonzero(n)
    mean[found] = mean_of(x[found], without(order[found], n[found]))
    again = find_outliers(codec, x[found], mean[found])
    order[found], n[found], q[found], unit[found] = again
    kept = without(order, n)
    mean = mean_of(x, kept)

    size = np.where(unit == 0, F32(0), (mean / unit) ** 2 * F32(128))
    rest = np.where(kept, q**2, 0).sum(axis=1).astype(F32)
    one_sign = of_one_sign(x)
    has_mean = one_sign | (size > rest * F32(0.25))
    mean_bits = np.where(has_mean, np.where(size <= rest * F32(16), NARROW, WIDE), 0)
    mean_bits[(mean == 0) | (unit == 0) & ~one_sign] = 0
    short = bits_of(mean).astype(np.int64)
    short = ((short + 0x7FFFF + (short >> 20 & 1)) >> 20 << 20).astype(np.uint32).view(F32)
    mean = np.where(mean_bits == NARROW, short, np.where(mean_bits == WIDE, mean, F32(0)))

    y = rotate(np.where(kept, x - mean[:, None], F32(0)), signs)
    amax = np.abs(y).max(axis=1)
    stored = np.where(amax < LEAST, 0, round_up(amax * F32(2.0**25 / 127), 18)).astype(np.int64)
    exponent = (bits_of(mean).astype(np.int64) >> 23 & 255) + 25  # beside that of the step
    stored = np.where(mean_bits > 0, np.maximum(stored, exponent - np.where(mean_bits == NARROW, 7, 15) << 7), stored)
    faint = (mean_bits > 0) & one_sign & (exponent < stored >> 7)
    mean = np.where(faint, np.copysign(power_of((stored >> 7) - 25 - 127), mean), mean).astype(F32)
    none = (mean_bits > 0) & ~faint & (exponent < stored >> 7) | (mean_bits == 0) & (n == 0)
    ratio = upper_half(stored) / upper_half(ordinary)
    estimate = ratio**2 * noise_of_header(codec, header_length(n, mean_bits)).astype(F32) * power(-7)
    return Centred(mean, mean_bits, one_sign, order, n, y, stored, np.where(none, F32(np.inf), estimate))


def header_of(group, x):
    """The header of one group, as (number, bits)."""
    fields = Fields()
    n, long = int(group.n), int(group.mean_bits) == WIDE
    mean = int(bits_of(group.mean))
    if n:
        fields.add(n - 1, 3).add(bool(group.mean_bits), 1)
    if group.mean_bits:
        exponent = (mean >> 23 & 255) + 25 - (int(group.stored) >> 7)
        fields.add(long, 1)
        fields.add(mean >> 16 & 127 if long else mean >> 20 & 7, 7 if long else 3)
        fields.add(exponent, 4 if long else 3).add(mean >> 31, 1).add(bool(group.one_sign), 1)
    outliers = [(int(at), x[at]) for at in group.outliers[:n]]
    if n <= 2:
        for at, value in outliers:
            fields.add(at, 7).add(bits_of(value), 32)
        return fields
    words = [int(bits_of(bfloat16(value))) >> 16 for _, value in outliers]
    top = max(word >> 7 & 255 for word in words)
    fields.add(top, 8)
    for (at, _), word in zip(outliers, words, strict=True):
        below = min(top - (word >> 7 & 255), 15)
        fields.add(at, 7).add(word & 127 if below < 15 else 0, 7).add(below, 4)
        fields.add(word >> 15, 1)
    return fields


def encode_centred(codec, groups, x, noise=None):
    """(codes [G, 128], words [G, 1 or 2]) of groups that have such a form."""
    step = upper_half(groups.stored) * power(-25)
    inverse = np.where(groups.stored > 0, F32(1) / step, F32(0)).astype(F32)
    even = np.zeros(len(x), bool)
    if codec == "int8":
        codes = FORMATS["int8"].codes(groups.y, inverse[:, None], even, noise)
    elif noise is None:
        codes = level_codes(codec, integers(groups.y, inverse), even)
    else:
        codes = noisy_level_codes(codec, groups.y * inverse[:, None], even, noise)
    codes[groups.stored == 0] = 0
    scales = groups.stored + 0x8000 + np.where(groups.n > 0, 2, 0)
    words = np.zeros((len(x), 2 if codec == "int4" else 1), np.uint16)
    for g in range(len(x)):
        words[g], number, length = split(codec, scales[g], header_of(groups.of(g), x[g]))
        for b in range(length):
            plane, at = divmod(b, GROUP)
            codes[g, at] = codes[g, at] & 255 - (1 << plane) | (number >> b & 1) << plane
    return codes, words


def decode_header(codec, codes, words):
    """(mean, is it of one sign, {index: value}, how many bits of codes are taken) of one group."""
    bits = np.concatenate([codes & 1, codes >> 1 & 1]).astype(np.uint8)
    header = Reader(join(codec, words, int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")))
    scale = int(words[0]) & 0x7FFF
    n, has_mean = (header.take(3) + 1, header.take(1)) if scale & 2 else (0, 1)
    mean, one_sign = 0.0, 0
    if has_mean:
        long = header.take(1)
        mantissa = 1 + header.take(7) / 128 if long else 1 + header.take(3) / 8
        exponent = header.take(4 if long else 3) - 25 + (scale >> 7) - 127
        mean = math.ldexp(-mantissa if header.take(1) else mantissa, exponent)
        one_sign = header.take(1)
    top = header.take(8) if n > 2 else 0
    exact = {}
    for _ in range(n):
        at = header.take(7)
        if n <= 2:
            exact[at] = np.uint32(header.take(32)).view(F32)
        else:
            mantissa, below, sign = header.take(7), header.take(4), header.take(1)
            word = mantissa | max(top - below, 0) << 7 if below < 15 else 0
            exact[at] = np.uint32((word | sign << 15) << 16).view(F32)
    return F32(mean), one_sign, exact, max(header.taken - BESIDE.get(codec, 0), 0)


def decode_centred(codec, codes, words, signs):
    """float32 [G, 128]"""
    headers = [decode_header(codec, *both) for both in zip(codes, words, strict=True)]
    taken = np.array([length for *_, length in headers])[:, None]
    index = np.arange(GROUP)
    lost = (index < taken).astype(int) + (index + GROUP < taken)  # bits of each code
    clear = codes & ~((1 << lost) - 1)
    if codec == "int8":
        value = FORMATS["int8"].value(clear.astype(np.uint8)) + (2.0**lost - 1) / 2
    else:
        even = np.zeros(len(codes), bool)
        first, second = (level_values(codec, (clear + np.minimum(lost, k)).astype(np.uint8), even) for k in (0, 1))
        value = np.choose(lost, [first, (first + second) / 2, second])
    scale = upper_half(words[:, 0].astype(np.int64) & 0x7FFC)
    out = unrotate(value, scale[:, None] * power(-32), signs)
    mean = np.array([mean for mean, *_ in headers], F32)[:, None]
    out = np.where(mean != 0, out + mean, out)
    one_sign = np.array([each for _, each, *_ in headers], bool)[:, None]
    out = np.where(one_sign & ((out < 0) != (mean < 0)), F32(0), out)
    for g, (_, _, exact, _) in enumerate(headers):
        for at, value in exact.items():
            out[g, at] = value
    return out
