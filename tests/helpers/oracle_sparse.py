"""A second opinion on the payload of `sparse`, in numpy, written from docs/codecs.md.

`lossless` takes its form, too. Values travel as the bits of their dtype. `room`: bytes of the
payload, as a device is given them; None: what the values need.
"""

import numpy as np

NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
GROUP, BLOCK, FILL = 128, 4096, 0xA5


def blocks_of(numel):
    return -(-numel // BLOCK)


def head_of(numel):
    """Bytes before the values."""
    return 16 * -(-numel // GROUP) + 8 * blocks_of(numel)


def counts_of(nonzero):
    """How many are set in each block."""
    padded = np.append(nonzero, np.zeros(-nonzero.size % BLOCK, bool))
    return padded.reshape(-1, BLOCK).sum(axis=1).astype(np.uint64)


def bitmap_of(nonzero):
    padded = np.append(nonzero, np.zeros(-nonzero.size % GROUP, bool))
    return np.packbits(padded, bitorder="little")


def encode(codec, bits, dtype, room=None):
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


def decode(codec, payload, numel, dtype):
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
