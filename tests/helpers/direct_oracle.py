"""A second opinion on the payloads of `bf16`, `fp16`, `mask` and `lossless`, in numpy.

Written from docs/codecs.md by other means than the C: casts by the exact neighbours, lossless
by whole arrays of exponents and of bits. Values travel as the bits of their dtype."""

import numpy as np
import oracle_values

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


def encode(codec, bits, dtype, room=None):
    """The payload as bytes, and whether the values fit; when not, it is what the kernels leave."""
    if codec in ("sparse", "sparse_int8"):
        return (encode_sparse if codec == "sparse" else encode_sparse_int8)(codec, bits, dtype, room)
    if codec == "lossless":
        return lossless_encode(bits, dtype)
    if codec == "mask":
        return bitmap_of(bits != 0), True
    out, fits = narrow(bits, {"bf16": "bfloat16", "fp16": "float16"}[codec])
    return out.view(np.uint8), fits


def decode(codec, payload, numel, dtype):
    if codec in ("sparse", "sparse_int8"):
        return (decode_sparse if codec == "sparse" else decode_sparse_int8)(codec, payload, numel, dtype)
    if codec == "lossless":
        return lossless_decode(payload, numel, dtype)
    if codec == "mask":
        return np.unpackbits(payload, bitorder="little")[:numel]
    return widen(payload.copy().view(np.uint16), {"bf16": "bfloat16", "fp16": "float16"}[codec])


# ---- A second opinion on the payload of `sparse`, in numpy, written from docs/codecs.md.
#
# `lossless` takes its form, too. Values travel as the bits of their dtype. `room`: bytes of the
# payload, as a device is given them; None: what the values need.

FILL = 0xA5


def blocks_of(numel):
    return -(-numel // BLOCK)


def head_of(numel):
    """Bytes before the values."""
    return 16 * -(-numel // GROUP) + 8 * blocks_of(numel)


def counts_of(nonzero):
    """How many are set in each block."""
    return padded(nonzero, BLOCK).reshape(-1, BLOCK).sum(axis=1).astype(np.uint64)


def bitmap_of(nonzero):
    return np.packbits(padded(nonzero, GROUP), bitorder="little")


def encode_sparse(codec, bits, dtype, room=None):
    """The payload, with FILL where nothing is written, and whether the values fit."""
    nonzero = bits != 0
    counts = counts_of(nonzero)
    before = np.cumsum(counts, dtype=np.uint64) - counts
    least = head_of(bits.size) + int(counts.sum()) * bits.itemsize
    room = least if room is None else room
    if codec == "sparse" and room >= bits.nbytes:
        return bits.view(np.uint8).copy(), True
    values = np.full((room - head_of(bits.size)) // bits.itemsize * bits.itemsize, FILL, np.uint8).view(bits.dtype)
    fits = before + counts <= values.size
    for block in np.flatnonzero(fits):
        own = bits[block * BLOCK : (block + 1) * BLOCK]
        values[int(before[block]) : int(before[block] + counts[block])] = own[own != 0]
    payload = np.full(room, FILL, np.uint8)
    written = np.concatenate([bitmap_of(nonzero), before.view(np.uint8), values.view(np.uint8)])
    payload[: written.size] = written
    return payload, bool(fits.all())


def decode_sparse(codec, payload, numel, dtype):
    word = np.dtype(np.uint32 if dtype == "float32" else np.uint16)
    if payload.size >= numel * word.itemsize:
        return payload[: numel * word.itemsize].copy().view(word)
    head, groups = head_of(numel), -(-numel // GROUP)
    nonzero = np.unpackbits(payload[: 16 * groups], bitorder="little").astype(bool)
    before = payload[16 * groups : head].copy().view("<u8")
    values = payload[head : head + (payload.size - head) // word.itemsize * word.itemsize].copy().view(word)
    out = np.zeros(nonzero.size, word)
    for block in range(blocks_of(numel)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        first, count = int(before[block]), int(nonzero[own].sum())
        out[own][nonzero[own]] = values[first : first + count] if first + count <= values.size else NAN[dtype]
    return out[:numel]


# ---- A second opinion on the payload of `sparse_int8`, in numpy, written from docs/codecs.md.

F32 = np.float32


def place_of(before, block):
    """Where the values of a block begin, in bytes behind the head."""
    return before + 2 * (before // GROUP + block)


def nbytes_of(count, numel):
    return head_of(numel) + count + 2 * (-(-count // GROUP) + blocks_of(numel))


def capacity_of(room, numel):
    """The most values of which a payload has at most so many bytes."""
    count = max(room - head_of(numel), 0)
    while nbytes_of(count, numel) > room:
        count -= 1
    return count


def nonzeros(bits):
    return (bits << bits.dtype.type(1)) != 0


def encode_group(x, dtype):
    """The scale and the codes of up to 128 values."""
    size = np.abs(x)
    escape = ~(size <= oracle_values.LIMIT[dtype])
    amax = F32(np.where(escape, F32(0), size).max())
    tiny = amax < F32(2.0**-80)
    scale = F32(2.0**64) if tiny else F32(1)
    stored = 0
    if amax > 0:
        stored = int(F32(F32(amax * scale) * F32(2.0**32 / (125 if escape.any() else 127))).view(np.uint32))
        stored = (stored + 0xFFFF) >> 16  # up
    codes = np.zeros(x.size, np.int64)
    for i, v in enumerate(x):
        if np.isnan(v):
            codes[i] = -128
        elif escape[i]:
            codes[i] = (127 if np.isinf(v) else 126) * (-1 if v < 0 else 1)
        else:
            inverse = F32(1) / F32(np.uint32(stored << 16).view(F32) * F32(2.0**-32))
            codes[i] = np.rint(float(F32(v * scale)) * float(inverse))
            codes[i] = codes[i] or (-1 if np.signbit(v) else 1)
    side = stored - 64 * 128 if tiny and amax > 0 else stored
    return side | (0x8000 if escape.any() else 0), codes.astype(np.int8).view(np.uint8)


def decode_group(side, codes, dtype):
    step = np.uint32((side & 0x7FFF) << 16).view(F32)
    signed = codes.view(np.int8)
    with np.errstate(all="ignore"):
        out = (signed.astype(F32) * F32(step * F32(2.0**-16))) * F32(2.0**-16)
    limit = oracle_values.LIMIT[dtype]
    out = np.clip(out, -limit, limit) if dtype == "float16" else out
    special = {-128: np.nan, 127: np.inf, -127: -np.inf, 126: oracle_values.MAX[dtype], -126: -oracle_values.MAX[dtype]}
    for code, value in special.items():
        out = np.where((signed == code) & (side >= 0x8000), F32(value), out)
    bits = oracle_values.to_bits(out.astype(F32), dtype)
    lost = ~nonzeros(bits) & (codes != 0)
    sign = np.where(signed < 0, 1 << (8 * bits.itemsize - 1), 0).astype(bits.dtype)
    return np.where(lost, sign | bits.dtype.type(1), bits)


def encode_sparse_int8(codec, bits, dtype, room=None):
    """The payload, with FILL where nothing is written, and whether the values fit."""
    nonzero, numel = nonzeros(bits), bits.size
    counts = counts_of(nonzero)
    before = np.cumsum(counts, dtype=np.uint64) - counts
    total, blocks = int(counts.sum()), blocks_of(numel)
    room = nbytes_of(total, numel) if room is None else room
    fits = before + counts <= capacity_of(room, numel)
    payload = np.full(room, FILL, np.uint8)
    payload[: head_of(numel)] = np.concatenate([bitmap_of(nonzero), before.view(np.uint8)])
    x = oracle_values.to_float(bits, dtype)
    for block in np.flatnonzero(fits):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        packed = x[own][nonzero[own]]
        first, after = int(before[block]), int(before[block] + counts[block])
        at = head_of(numel) + place_of(first, block)
        end = head_of(numel) + place_of(after, block + 1) if block + 1 < blocks else nbytes_of(total, numel)
        payload[at:end] = 0
        for i in range(0, packed.size, GROUP):
            side, codes = encode_group(packed[i : i + GROUP], dtype)
            payload[at : at + 2 + codes.size] = np.append(np.frombuffer(side.to_bytes(2, "little"), np.uint8), codes)
            at += 2 + codes.size
    return payload, bool(fits.all())


def decode_sparse_int8(codec, payload, numel, dtype):
    word = np.dtype(np.uint32 if dtype == "float32" else np.uint16)
    head, groups, room = head_of(numel), -(-numel // GROUP), capacity_of(payload.size, numel)
    nonzero = np.unpackbits(payload[: 16 * groups], bitorder="little").astype(bool)
    before = payload[16 * groups : head].copy().view("<u8")
    out = np.zeros(nonzero.size, word)
    for block in range(blocks_of(numel)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        first, count = int(before[block]), int(nonzero[own].sum())
        packed = np.full(count, NAN[dtype], word)
        at = head + place_of(first, block)
        for i in range(0, count if first + count <= room else 0, GROUP):
            n = min(count - i, GROUP)
            side = int.from_bytes(payload[at : at + 2].tobytes(), "little")
            packed[i : i + n] = decode_group(0x8000 if side == 0xFF80 else side, payload[at + 2 : at + 2 + n], dtype)
            at += 2 + n
        out[own][nonzero[own]] = packed
    return out[:numel]
