"""Groups of two classes, and plain ones, of the codec oracle (codec_oracle.py)."""

from dataclasses import dataclass

import numpy as np
from oracle_values import (
    BITS,
    F32,
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
    kind,
    power,
    round_up,
    uniform,
    upper_half,
)

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
