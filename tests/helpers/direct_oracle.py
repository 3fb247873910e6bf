"""A second opinion on the payloads of `bf16`, `fp16`, `mask` and `lossless`, in numpy.

Written from docs/codecs.md by other means than the C: casts by the exact neighbours, lossless
by whole arrays of exponents and of bits. Values travel as the bits of their dtype.
"""

import numpy as np

GROUP, BLOCK, ARENA = 128, 4096, 64
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16, "bool": np.uint8}
#: dtype: bits of the word, of the exponent, of a coded value.
FIELDS = {"float32": (32, 8, 28), "float16": (16, 5, 15), "bfloat16": (16, 8, 12)}
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def padded(a, multiple):
    return np.append(a, np.zeros(-a.size % multiple, a.dtype))


# ---- casts ----


def narrow(bits, dtype):
    """float32 to `dtype` (bits of both), and whether all finite values stayed finite."""
    sign, magnitude = (bits >> 16 & 0x8000).astype(np.uint16), bits & 0x7FFFFFFF
    if dtype == "float16":
        with np.errstate(over="ignore"):
            out = magnitude.view(np.float32).astype(np.float16).view(np.uint16)
    else:
        down = magnitude >> 16  # the two neighbours, and the exact distances to them
        below, above = magnitude - (down << 16), ((down + 1) << 16) - magnitude
        out = np.where((below > above) | ((below == above) & (down % 2 == 1)), down + 1, down).astype(np.uint16)
    infinity, drop = (0x7C00, 13) if dtype == "float16" else (0x7F80, 16)
    overflow = (out >= infinity) & (magnitude < 0x7F800000)
    out = np.where(overflow, NAN[dtype], out)
    payload = magnitude >> drop & (0x3FF if dtype == "float16" else 0x7F)
    out = np.where(magnitude > 0x7F800000, NAN[dtype] | payload, out)
    return (out | sign).astype(np.uint16), not overflow.any()


def widen(bits, dtype):
    wide = bits.view(np.float16).astype(np.float32).view(np.uint32) if dtype == "float16" else None
    wide = bits.astype(np.uint32) << 16 if wide is None else wide
    nan = (wide & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, wide | 0x400000, wide).astype(np.uint32)


# ---- lossless ----


def rotated(bits, dtype):
    width = FIELDS[dtype][0]
    return (bits.astype(np.uint64) << 1 | bits.astype(np.uint64) >> (width - 1)) & (2**width - 1)


def escapes_from(exponent, base):
    return (exponent > 0) & ((exponent > base) | (exponent < base - 13))


def base_of(exponent, special):
    """Of one group. The first of the candidates from which the fewest escape,
    unless the very first will do."""
    found = sorted({int(e) for e in exponent if e > 0}, reverse=True)
    finite = [e for e in found if e < special]
    candidates = [max(e, 14) for e in ((finite or found or [0])[0], *found)]
    counts = [escapes_from(exponent, base).sum() for base in candidates]
    return candidates[0 if counts[0] <= 2 else int(np.argmin(counts))]


def lossless_encode(bits, dtype):
    """The payload, and whether the values fit."""
    width, exponent_bits, coded_bits = FIELDS[dtype]
    low_bits, spare = width - exponent_bits, width - coded_bits
    rows, groups = width // spare, -(-bits.size // GROUP)
    words = rotated(padded(bits, GROUP), dtype).reshape(groups, GROUP).astype(np.int64)
    exponent, low = words >> low_bits, words & (2**low_bits - 1)
    base = np.array([base_of(group, 2**exponent_bits - 1) for group in exponent], np.int64)
    escaped = escapes_from(exponent, base[:, None])
    code = np.where(exponent == 0, 0, np.where(escaped, 1, exponent - base[:, None] + 15))
    coded = (code << low_bits | low).reshape(groups, rows, GROUP // rows)
    pieces = np.stack([coded[:, -1] >> spare * r & (2**spare - 1) for r in range(rows - 1)], axis=1)
    stored = (coded[:, :-1] | pieces << coded_bits).astype(WORDS[dtype])
    arenas = np.zeros((-(-groups // 32), ARENA), np.uint8)
    fits = True
    for b, arena in enumerate(arenas):
        own = slice(32 * b, 32 * b + 32)
        found = exponent[own][escaped[own]]
        arena[: found.size] = found[:ARENA]
        if found.size > ARENA:
            base[own], fits = 0, False
    parts = (stored.ravel().view(np.uint8), arenas.ravel(), base.astype(np.uint8))
    return np.concatenate(parts), fits


def lossless_decode(payload, numel, dtype):
    width, exponent_bits, coded_bits = FIELDS[dtype]
    low_bits, spare = width - exponent_bits, width - coded_bits
    rows, groups = width // spare, -(-numel // GROUP)
    columns = GROUP // rows
    blocks, size = -(-groups // 32), (GROUP - columns) * width // 8
    stored = payload[: groups * size].copy().view(WORDS[dtype]).astype(np.int64).reshape(groups, rows - 1, columns)
    arenas = payload[groups * size :][: blocks * ARENA].reshape(blocks, ARENA)
    base = payload[groups * size + blocks * ARENA :].astype(np.int64)
    last = sum((stored[:, r] >> coded_bits) << spare * r for r in range(rows - 1))
    coded = np.concatenate([stored & (2**coded_bits - 1), last[:, None]], axis=1).reshape(groups, GROUP)
    code, low = coded >> low_bits, coded & (2**low_bits - 1)
    exponent = np.where(code == 0, 0, base[:, None] - 15 + code)
    for b, arena in enumerate(arenas):
        own = slice(32 * b, 32 * b + 32)
        escaped = code[own] == 1
        exponent[own][escaped] = arena[np.minimum(np.arange(escaped.sum()), ARENA - 1)]
    word = (exponent << low_bits | low) & (2**width - 1)
    bits = word >> 1 | (word & 1) << (width - 1)
    bits[base < 14] = NAN[dtype]
    return bits.ravel()[:numel].astype(WORDS[dtype])


# ---- all four ----


def encode(codec, bits, dtype):
    """The payload as bytes, and whether the values fit; when not, it is what the kernels leave."""
    if codec == "lossless":
        return lossless_encode(bits, dtype)
    if codec == "mask":
        return np.packbits(padded(bits, GROUP) != 0, bitorder="little"), True
    out, fits = narrow(bits, {"bf16": "bfloat16", "fp16": "float16"}[codec])
    return out.view(np.uint8), fits


def decode(codec, payload, numel, dtype):
    if codec == "lossless":
        return lossless_decode(payload, numel, dtype)
    if codec == "mask":
        return np.unpackbits(payload, bitorder="little")[:numel]
    return widen(payload.copy().view(np.uint16), {"bf16": "bfloat16", "fp16": "float16"}[codec])
