"""Centred groups and groups with outliers of the codec oracle (codec_oracle.py)."""

import math
from dataclasses import dataclass

import numpy as np
from oracle_values import (
    BESIDE,
    BITS,
    F32,
    FORMATS,
    GROUP,
    LEAST,
    LIMIT,
    MAX,
    TINY,
    Fields,
    Groups,
    Reader,
    bfloat16,
    bits_of,
    exponent_of,
    integers,
    join,
    kind,
    level_codes,
    level_values,
    noisy_level_codes,
    power,
    power_of,
    rotate,
    round_up,
    split,
    uniform,
    unrotate,
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


def centred_header_of(group, x):
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
        words[g], number, length = split(codec, scales[g], centred_header_of(groups.of(g), x[g]))
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


# ---- Groups of two classes, and plain ones, of the codec oracle (codec_oracle.py).

#: Lowest bits of the scale.
PLAIN, SENTINEL, MASK, CLUSTERS = 1, 3, 5, 7
#: (bits of the header in each number, digits to which base, levels of the far class)
SHAPES = {
    PLAIN: (0, {"int8": 256, "int6": 64, "int4": 16}, {"int8": 0, "int6": 0, "int4": 0}),
    SENTINEL: (1, {"int8": 215, "int6": 53, "int4": 13}, {"int8": 1, "int6": 1, "int4": 1}),
    MASK: (1, {"int8": 215, "int6": 53, "int4": 13}, {"int8": 4, "int6": 2, "int4": 2}),
    CLUSTERS: (2, {"int8": 181, "int6": 45, "int4": 11}, {"int8": 64, "int6": 16, "int4": 4}),
}
KINDS = 5
OFFSET = {"int8": 32, "int6": 32, "int4": 28}


@dataclass
class Class(Groups):
    """One class of each group: which values, how many, the ends."""

    inside: np.ndarray
    n: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def width(self):
        return self.high - self.low

    def constant(self):
        return self.low == self.high

    def middle(self):
        return self.low / F32(2) + self.high / F32(2)


@dataclass
class Form(Groups):
    """Groups [G, 128] in one form each."""

    form: np.ndarray
    kinds: np.ndarray
    far_values: np.ndarray
    near: np.ndarray
    far: np.ndarray
    far_step: np.ndarray
    centre: np.ndarray
    sign: np.ndarray
    stored: np.ndarray
    estimate: np.ndarray


def levels_of(codec, form, kinds):
    """(levels of the far class, the largest near integer)"""
    _, base, far = SHAPES[form]
    levels = np.where(kinds > 0, min(far[codec], 1), far[codec])
    return levels, (base[codec] - levels - kinds - 1) // 2


def class_of(x, inside, empty):
    low = np.where(inside, x, F32(np.inf)).min(axis=1) + F32(0)  # no zero has a sign
    high = np.where(inside, x, F32(-np.inf)).max(axis=1) + F32(0)
    n = inside.sum(axis=1)
    return Class(inside, n, np.where(n > 0, low, empty), np.where(n > 0, high, empty))


def part(x, there):
    """(lower class, upper class) of each group."""
    whole = class_of(x, there, F32(0))
    span = whole.width()
    place = np.floor((x - whole.low[:, None]) * (F32(64) / span)[:, None])
    place = np.where(there & (span >= TINY)[:, None], np.minimum(place, 63), 0).astype(int)
    taken = np.zeros((len(x), 64), bool)
    np.put_along_axis(taken, place, True, axis=1)
    last, longest, ends = np.zeros((3, len(x)), int)  # the last place with a value; ends of the lower class
    longest -= 1
    for at in range(1, 64):
        better = taken[:, at] & (at - last - 1 > longest)
        ends = np.where(better, last, ends)
        longest = np.where(better, at - last - 1, longest)
        last = np.where(taken[:, at], at, last)
    below = place <= ends[:, None]
    return class_of(x, there & below, whole.high), class_of(x, there & ~below, whole.high)


def form_of(codec, form, far, near, kinds, ordinary, sign):
    """The numbers of a form; near and far are classes."""
    levels, top = levels_of(codec, form, kinds)
    lowest = np.full(len(far.low), True) if form == MASK else np.abs(far.low) <= np.abs(far.high)
    first = np.where(lowest, far.low, far.high)
    if form == MASK:
        first = (bits_of(first).astype(np.int64) + 255 & 0xFFFFFF00).astype(np.uint32).view(F32)
    reach = np.where(lowest, far.high - first, first - far.low)
    dropped = 23 if form == MASK else 19
    far_step = upper_half(round_up(reach / np.maximum(levels - 1, 1).astype(F32), dropped))
    far_step = np.where((levels > 1) & (reach >= LEAST), far_step, F32(0)) * np.where(lowest, F32(1), F32(-1))
    centre = bfloat16(near.middle()) if form == CLUSTERS else np.zeros(len(first), F32)
    centre = np.where(near.n > 0, centre, F32(0))
    size = np.where(near.n > 0, np.maximum(near.high - centre, centre - near.low), F32(0))
    size = np.where(size < LEAST, F32(0), size)
    stored = round_up(size * (F32(2.0 ** OFFSET[codec]) / top.astype(F32)), 19)
    step = upper_half(ordinary) * power(-32)
    error = (size / top.astype(F32) / step) ** 2
    far_error = (far_step / step) ** 2 if form == CLUSTERS else np.zeros(len(first), F32)
    weight = {"int8": 1, "int6": 16, "int4": 290}[codec]
    n = near.n + far.n
    estimate = (near.n.astype(F32) * error + far.n.astype(F32) * far_error) / (128 * n * weight).astype(F32)
    kinds = np.broadcast_to(kinds, first.shape)
    return Form(np.full(len(n), form), kinds, far.inside, near.n, first, far_step, centre, sign, stored, estimate)


def two_classes(codec, x, there, ordinary, escapes=False, noisy=False):
    """The best of the forms of two classes; of groups with escapes the estimate is 0, or infinite
    where there is none."""
    lower, upper = part(x, there)
    gap = np.where((lower.n > 0) & (upper.n > 0), upper.low - lower.high, F32(0))
    positive, negative = ((~there | each).all(axis=1) for each in (x >= 0, x <= 0))
    sign = np.where(noisy, 0, np.where(positive, 1, np.where(negative, -1, 0)))
    mask = (lower.high <= -64) & (F32(8) * lower.width() <= gap) & (lower.n > 0) & (not noisy)
    mask &= (F32(2) * lower.width() <= F32(3) * upper.width()) | (2 * lower.n >= lower.n + upper.n)
    both_wide = ~lower.constant() & ~upper.constant()
    both_constant = lower.constant() & upper.constant()
    larger = np.abs(upper.high) > np.abs(lower.low)
    alone = (np.where(larger, upper.n, lower.n) == 1) & (lower.n + upper.n > 2)
    larger ^= alone & (np.where(larger, lower.low, upper.high) != 0)
    far_is_lower = np.where(
        both_wide,
        mask | (lower.width() <= upper.width()),
        np.where(both_constant, ~larger, lower.constant()),
    )
    far, near = lower.where(far_is_lower, upper), upper.where(far_is_lower, lower)
    kinds = np.where(escapes, KINDS, 0)
    clusters = form_of(codec, CLUSTERS, far, near, kinds, ordinary, sign)
    if escapes:
        clusters.estimate = np.where(far.constant(), F32(0), F32(np.inf))
        return clusters
    sentinel = form_of(codec, SENTINEL, far, near, kinds, ordinary, sign)
    masked = form_of(codec, MASK, far, near, kinds, ordinary, sign)
    best = sentinel.where(sentinel.estimate <= clusters.estimate, clusters)
    repeated = (far.n >= 2) & (gap >= near.width()) & (best.estimate < F32(0.94))
    best.estimate = np.where(repeated, F32(0), best.estimate)
    apart = both_wide & (F32(2) * gap >= np.maximum(lower.width(), upper.width()))
    clusters.estimate = np.where(apart, F32(0.5) * clusters.estimate, clusters.estimate)
    return best.where(far.constant(), masked.where(mask & far_is_lower, clusters))


def plain_or_clusters(codec, x, dtype, noisy):
    """Groups with escapes, or tiny ones."""
    escape = ~(np.abs(x) <= LIMIT[dtype])
    amax = np.where(escape, F32(0), np.abs(x)).max(axis=1)
    tiny, groups, zero = amax < TINY, len(x), np.zeros(len(x), F32)
    _, top = levels_of(codec, PLAIN, np.array(KINDS))
    scaled = amax * np.where(tiny, power(64), power(0))
    stored = round_up(scaled * F32(2.0 ** OFFSET[codec] / top), 19).astype(np.int64)
    stored = np.where(amax > 0, stored - np.where(tiny, 64 << 7, 0), 0)
    plain = Form(np.full(groups, PLAIN), np.full(groups, KINDS), escape, zero, zero, zero, zero, zero, stored, zero)
    clusters = two_classes(codec, x, ~escape, np.ones(groups, np.int64), True, noisy)
    apart = escape.any(axis=1) & ~tiny & (clusters.estimate == 0) & (clusters.stored < stored)
    return clusters.where(apart, plain)


def inverse_of(step):
    return np.where(step != 0, F32(1) / step, F32(0)).astype(F32)


def near_codes(codec, form, x, top, noise):
    """Integers of the near values."""
    tiny = (form.form == PLAIN) & (np.abs(x).max(axis=1) < TINY)
    scale = np.where(tiny, power(64), power(0)).astype(F32)
    step = upper_half(form.stored + np.where(tiny, 64 << 7, 0)) * power(-OFFSET[codec])
    inverse = np.where(form.stored > 0, inverse_of(step), F32(0))[:, None]
    distance = x * scale[:, None] - form.centre[:, None]
    if noise is None:
        number = np.rint(distance.astype(np.float64) * inverse.astype(np.float64))
    else:
        number = np.floor(distance * inverse + uniform(noise))
    return np.clip(number, -top, top).astype(np.int64)


def header_of(group):
    fields = Fields()
    if group.form == SENTINEL:
        fields.add(bits_of(group.far), 32)
    elif group.form == MASK:
        fields.add(int(bits_of(group.far)) >> 8, 24).add(int(bits_of(group.far_step)) >> 23, 8)
    elif group.form == CLUSTERS:
        fields.add(bits_of(group.far), 32).add(int(bits_of(group.far_step)) >> 19 & 0xFFF, 12)
        fields.add(int(bits_of(group.centre)) >> 16, 16).add(bool(group.kinds), 1)
        fields.add(int(bits_of(group.far_step)) >> 31, 1).add(int(group.sign) & 3, 2)
    return fields


def encode_classes(codec, groups, x, dtype, noise=None):
    """(packed codes [G, bytes], words [G, 1 or 2])"""
    width = 4 * BITS.get(codec, 8)
    packed = np.empty((len(x), GROUP * width // 32), np.uint8)
    words = np.empty((len(x), 2 if codec == "int4" else 1), np.uint16)
    escape = ~(np.abs(x) <= LIMIT[dtype])
    for form, (share, bases, _) in SHAPES.items():
        rows = np.flatnonzero(groups.form == form)
        some = groups.of(rows)
        levels, top = levels_of(codec, form, some.kinds)
        levels, top = levels[:, None], top[:, None]
        values = np.where(escape[rows], F32(0), x[rows])
        codes = near_codes(codec, some, values, top, None if noise is None else noise[rows]) + top
        half = F32(0.5) if noise is None else uniform(noise[rows])
        far = (values - some.far[:, None]) * inverse_of(some.far_step)[:, None] + half
        far = np.clip(np.floor(far), 0, np.maximum(levels - 1, 0)).astype(np.int64) + 2 * top + 1
        codes = np.where(some.far_values, far, codes)
        for g, at in zip(*np.nonzero(escape[rows]), strict=True):
            codes[g, at] = 2 * top[g, 0] + 1 + levels[g, 0] + kind(x[rows[g], at], dtype)
        numbers = (codes.reshape(-1, 32, 4) * bases[codec] ** np.arange(4)).sum(axis=2)
        for g, row in enumerate(rows):
            scale = int(some.stored[g]) + 0x8000 + form
            header = header_of(some.of(g)).number
            words[row] = [scale, 0x7F80][: words.shape[1]]
            bits = [
                int(n) | (header >> share * i & (1 << share) - 1) << width - share for i, n in enumerate(numbers[g])
            ]
            packed[row] = np.frombuffer(b"".join(n.to_bytes(width // 8, "little") for n in bits), np.uint8)
    return packed, words


def decode_classes(codec, packed, words, dtype):
    """One group: (float32 [128], which of them are escapes)."""
    scale = int(words[0]) & 0x7FFF
    form = scale & 7
    share, bases, _ = SHAPES[form]
    size = BITS.get(codec, 8) // 2
    digits, header = [], 0
    for i in range(32):
        number = int.from_bytes(packed[size * i : size * i + size].tobytes(), "little")
        header |= number >> 8 * size - share << share * i
        number &= (1 << 8 * size - share) - 1
        for _ in range(4):
            digits.append(number % bases[codec])
            number //= bases[codec]
    fields = Reader(header)
    far = far_step = centre = F32(0)
    sign = 0
    kinds = KINDS if form == PLAIN else 0
    if form in (SENTINEL, CLUSTERS):
        far = np.uint32(fields.take(32)).view(F32)
    if form == MASK:
        far, far_step = np.uint32(fields.take(24) << 8).view(F32), np.uint32(fields.take(8) << 23).view(F32)
    if form == CLUSTERS:
        far_step, centre = np.uint32(fields.take(12) << 19).view(F32), np.uint32(fields.take(16) << 16).view(F32)
        kinds = KINDS * fields.take(1)
        far_step = -far_step if fields.take(1) else far_step
        sign = (0, 1, 0, -1)[fields.take(2)]
    levels, top = (int(n) for n in levels_of(codec, form, np.array(kinds)))
    codes = np.array(digits)
    near = (codes - top).astype(F32) * (upper_half(scale & 0x7FF8) * power(-16)) * power(16 - OFFSET[codec])
    near = near + centre if form == CLUSTERS else near
    near = np.where((sign != 0) & ((near < 0) != (sign < 0)), F32(0), near)
    number = codes - (2 * top + 1)
    apart = far + number.astype(F32) * far_step
    out = np.where(number < 0, near, apart)
    escape = (number >= levels) & (kinds > 0)
    special = np.array([np.nan, np.inf, -np.inf, MAX[dtype], -MAX[dtype]], F32)
    out[escape] = special[np.minimum(number[escape] - levels, 4)]
    return out.astype(F32), escape
