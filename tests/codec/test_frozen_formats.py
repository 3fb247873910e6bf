"""Codec ids and payload bytes never change: checkpoints on disk and
ranks of another version hold them.

The oracle of test_codecs.py says what the bytes mean. It may be changed together with a codec by
mistake; these may not. A new codec adds its lines. A line that has been released is never edited.
"""

import hashlib

import numpy as np
import pytest
import torch

from gradckpt import codecs

IDS = {
    "raw": 0,
    "fp8_e4m3": 1,
    "fp8_e5m2": 2,
    "int8": 3,
    "int8_plain": 4,
    "int6": 5,
    "int4": 6,
    "bf16": 7,
    "fp16": 8,
    "lossless": 9,
    "mask": 10,
}

#: Codec, dtype: bytes of the payload; first digits of SHA-256 of the payload,
#: and of what it decodes to.
FROZEN = {
    ("raw", "float32"): (1684, "39f9df3cd8892834", "39f9df3cd8892834"),
    ("raw", "float16"): (842, "dfe46b434ad42df4", "dfe46b434ad42df4"),
    ("raw", "bfloat16"): (842, "28fd974ece947507", "28fd974ece947507"),
    ("fp8_e4m3", "float32"): (520, "c74c0188c43e8ad5", "0a005405ccec131d"),
    ("fp8_e4m3", "float16"): (520, "35de0e22d301588d", "f2389438092380c8"),
    ("fp8_e4m3", "bfloat16"): (520, "9e5f23dd22949476", "3bb38dede3378be8"),
    ("fp8_e5m2", "float32"): (520, "92617b8711bf6540", "f4070ef0a7fe8eda"),
    ("fp8_e5m2", "float16"): (520, "92617b8711bf6540", "2e9202c2e0d4c938"),
    ("fp8_e5m2", "bfloat16"): (520, "c21178d92b0a48e3", "a08994c7fa85d148"),
    ("int8", "float32"): (520, "482c8113c3874d24", "b2ee1ad6b604cf41"),
    ("int8", "float16"): (520, "f700f24119f182b0", "a54a7fb5f15d70eb"),
    ("int8", "bfloat16"): (520, "7bfe1c013ed265a7", "999447b981f276bd"),
    ("int8_plain", "float32"): (520, "1d32866d8e6e1344", "e64fd97516536ab5"),
    ("int8_plain", "float16"): (520, "86421c3df3a09f72", "c7dfd4ec69cc8bbc"),
    ("int8_plain", "bfloat16"): (520, "c43302633f0562ac", "706092152b065e9e"),
    ("int6", "float32"): (392, "8251bfa664656dd6", "64d6a995057c2e64"),
    ("int6", "float16"): (392, "a1977b2744af6cde", "407237166b5c3345"),
    ("int6", "bfloat16"): (392, "2999b383069c2e2f", "f19fc9c1f6f4fae8"),
    ("int4", "float32"): (272, "34605fa2d2c0174a", "34d3be1f47ec0e63"),
    ("int4", "float16"): (272, "34605fa2d2c0174a", "950e651a13c8e376"),
    ("int4", "bfloat16"): (272, "a47b3dab30f9a2e8", "194fb2a6f6f0f465"),
    ("bf16", "float32"): (842, "28fd974ece947507", "4cd7df8adfb2a041"),
    ("fp16", "float32"): (842, "dfe46b434ad42df4", "024347b3ab8c66c4"),
    ("lossless", "float32"): (1860, "35e1dc1a710998dd", "39f9df3cd8892834"),
    ("lossless", "float16"): (1028, "5e0cd3ad443452ab", "dfe46b434ad42df4"),
    ("lossless", "bfloat16"): (836, "56106f64339a6ce7", "28fd974ece947507"),
    ("mask", "bool"): (64, "2664a693c5fcec25", "d46efed79a28107b"),
}


def sample(dtype):
    """Four groups, the last one short: uniform values,
    smaller and smaller ones with an outlier and zeros, escapes.

    From integers and powers of two alone, so that neither torch's
    generators nor a mathematics library matter.
    """
    x = (np.arange(3 * 128 + 37, dtype=np.int64) * 2654435761 % 2**32 - 2.0**31) * 2.0**-30
    if dtype == "bool":
        return torch.from_numpy(x > 0)
    x[128:256] *= 2.0 ** -(np.arange(128) % 5)
    x[131], x[140:150] = 40.0, 0.0
    x[[300, 310]] = np.inf, -np.inf
    return torch.from_numpy(x).to(getattr(torch, dtype))  # without NaN, whose bits depend on torch and on the CPU


def digest(x):
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_ids_are_frozen():
    assert {name: codecs.info(name)["id"] for name in codecs.names()} == IDS


def test_every_codec_has_a_frozen_sample():
    assert set(FROZEN) == {(name, dtype) for name in codecs.names() for dtype in codecs.info(name)["dtypes"]}


@pytest.mark.parametrize(("codec", "dtype"), FROZEN)
def test_bytes_are_frozen(codec, dtype):
    payload = codecs.encode(sample(dtype), codec)
    got = payload.data.numel(), digest(payload.data), digest(payload.decode())
    assert got == FROZEN[codec, dtype]
