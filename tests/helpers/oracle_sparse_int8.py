"""A second opinion on the payload of `sparse_int8`, in numpy, written from docs/codecs.md."""

import numpy as np
import oracle_values
from oracle_sparse import BLOCK, FILL, GROUP, NAN, bitmap_of, blocks_of, counts_of, head_of

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


def encode(codec, bits, dtype, room=None):
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


def decode(codec, payload, numel, dtype):
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
