"""Codec ids and payload bytes never change: checkpoints on disk and
ranks of another version hold them.

The oracle of test_codecs.py says what the bytes mean. It may be changed together with a codec by
mistake; these may not. A new codec adds its lines. A line that has been released is never edited.
"""

import hashlib

import numpy as np
import pytest
import torch
from codec_libraries import whole

from gradckpt import codecs
from gradckpt._codec_names import RETIRED

IDS = {
    "raw": 0,
    "fp8_e4m3": 1,
    "fp8_e5m2": 2,
    "int8": 13,
    "int8_plain": 14,
    "int6": 15,
    "int4": 16,
    "bf16": 7,
    "fp16": 8,
    "lossless": 9,
    "mask": 10,
    "sparse": 11,
    "sparse_int8": 12,
}

#: Codec, dtype: bytes of the payload; first digits of SHA-256 of the payload,
#: and of what it decodes to.
FROZEN = {
    ("raw", "float32"): (3732, "6ecd686c6cc07d81", "6ecd686c6cc07d81"),
    ("raw", "float16"): (1866, "6341c013cfbde5e3", "6341c013cfbde5e3"),
    ("raw", "bfloat16"): (1866, "3e3f133a4d15cd9d", "3e3f133a4d15cd9d"),
    ("fp8_e4m3", "float32"): (1040, "993c54a8b47f30d4", "6787a71090259fdb"),
    ("fp8_e4m3", "float16"): (1040, "ae443d55960e1d72", "d3154bfdd49d70a7"),
    ("fp8_e4m3", "bfloat16"): (1040, "e6dacf173b583181", "147a2f85c1f9d72d"),
    ("fp8_e5m2", "float32"): (1040, "a7534af88a47d40c", "7243bbcf59aecdcd"),
    ("fp8_e5m2", "float16"): (1040, "a7534af88a47d40c", "601d6e1f39389955"),
    ("fp8_e5m2", "bfloat16"): (1040, "166cf8747164b355", "44b9fe8110933855"),
    ("int8", "float32"): (1040, "7ac24ab2a0039e56", "ec663a5b499537b9"),
    ("int8", "float16"): (1040, "2242cbed1888cdec", "898a1fdd7ec21586"),
    ("int8", "bfloat16"): (1040, "c61cbe5aacbc9ab2", "2e61190ea77037f9"),
    ("int8_plain", "float32"): (1040, "6b7863a214a3b748", "c5ab9ab5b7a85528"),
    ("int8_plain", "float16"): (1040, "639ab0811448d3cf", "83baeb25523c8104"),
    ("int8_plain", "bfloat16"): (1040, "3f0f752e280fd80c", "40b5b1716389d9b7"),
    ("int6", "float32"): (784, "c7d0f50e38acea9b", "9e859477e5903c4a"),
    ("int6", "float16"): (784, "87465fa71c747680", "fd991490ebf3eede"),
    ("int6", "bfloat16"): (784, "f6c51c273bf5b649", "29d145bf28c41c8a"),
    ("int4", "float32"): (544, "0e8b92839d6b9658", "4778112944fb4e8c"),
    ("int4", "float16"): (544, "25b3f83e12c0a12e", "0929ddf639a3bb71"),
    ("int4", "bfloat16"): (544, "99cbe48e7acd6577", "62aa65ce686fd4eb"),
    ("bf16", "float32"): (1866, "3e3f133a4d15cd9d", "ebd1635914e3ed88"),
    ("fp16", "float32"): (1866, "6341c013cfbde5e3", "4bd54a8f6e51b9e4"),
    ("lossless", "float32"): (3656, "0f281372a4a1e072", "6ecd686c6cc07d81"),
    ("lossless", "float16"): (1992, "ed2e7a2feff2d395", "6341c013cfbde5e3"),
    ("lossless", "bfloat16"): (1608, "d52cbf53a9652ebd", "3e3f133a4d15cd9d"),
    ("mask", "bool"): (128, "61d79a711dd569f8", "41ce64c1f072a694"),
    ("sparse", "float32"): (3732, "6ecd686c6cc07d81", "6ecd686c6cc07d81"),
    ("sparse", "float16"): (1866, "6341c013cfbde5e3", "6341c013cfbde5e3"),
    ("sparse", "bfloat16"): (1866, "3e3f133a4d15cd9d", "3e3f133a4d15cd9d"),
    ("sparse_int8", "float32"): (1077, "ad4bbf7e00f980d5", "e3003316dcb4d177"),
    ("sparse_int8", "float16"): (1077, "ddb4b4565e55a18c", "d4e5f6f7bd168201"),
    ("sparse_int8", "bfloat16"): (1077, "3c595d4c129f4ecb", "7af961d2d74107d4"),
}

#: The same for a sample whose negative values are zeros.
FROZEN_SPARSE = {
    ("lossless", "float32"): (11048, "755736fa90cb708c", "4c7f8d59b5c4e5c0"),
    ("lossless", "float16"): (5828, "60f8f84946464dc5", "862ff7759aa8492d"),
    ("lossless", "bfloat16"): (5828, "c3daf154f8c71ce1", "ddcb32d2ff05edcb"),
    ("sparse", "float32"): (11048, "755736fa90cb708c", "4c7f8d59b5c4e5c0"),
    ("sparse", "float16"): (5828, "60f8f84946464dc5", "862ff7759aa8492d"),
    ("sparse", "bfloat16"): (5828, "c3daf154f8c71ce1", "ddcb32d2ff05edcb"),
    ("sparse_int8", "float32"): (3264, "ca5d2c96d48bb7eb", "bcd80fb605649d74"),
    ("sparse_int8", "float16"): (3264, "340e8c047141fe91", "dcf6d818d494bef6"),
    ("sparse_int8", "bfloat16"): (3264, "5aa38092ace6366f", "6f5f1afaff4ac709"),
}


def sample(dtype):
    """Eight groups, the last one short: uniform values; smaller and
    smaller ones with an outlier and zeros; an offset; four outliers;
    a mask, filled and added; two clusters; escapes.

    From integers and powers of two alone, so that neither torch's
    generators nor a mathematics library matter.
    """
    x = (np.arange(7 * 128 + 37, dtype=np.int64) * 2654435761 % 2**32 - 2.0**31) * 2.0**-30
    if dtype == "bool":
        return torch.from_numpy(x > 0)
    x[128:256] *= 2.0 ** -(np.arange(128) % 5)
    x[131], x[140:150] = 40.0, 0.0
    x[256:384] += 9.0
    x[[400, 401, 470, 500]] = 60.0, -90.0, 500.0, 1000.0
    x[512:640:3] = -10000.0
    x[640:768:5] -= 200.0
    x[768:832] = x[768:832] * 2.0**-6 + 3.0
    x[[900, 910]] = np.inf, -np.inf
    return torch.from_numpy(x).to(getattr(torch, dtype))  # without NaN, whose bits depend on torch and on the CPU


def digest(x):
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_ids_are_frozen():
    assert {name: codecs.info(name)["id"] for name in codecs.names()} == IDS


def test_an_id_names_its_codec():
    assert [codecs.info(number)["name"] for number in IDS.values()] == [*IDS]
    assert not set(RETIRED) & set(IDS.values())


@pytest.mark.parametrize(
    ("number", "words"),
    [*((n, f"id {n} is '{name}' of an") for n, name in RETIRED.items()), (99, "no codec has the id 99")],
)
def test_other_ids_are_refused_by_name(number, words):
    with pytest.raises(ValueError, match=words):
        codecs.info(number)


def test_every_codec_has_a_frozen_sample():
    assert set(FROZEN) == {(name, dtype) for name in codecs.names() for dtype in codecs.info(name)["dtypes"]}


def form_of(x, codec):
    payload = codecs.encode(x, codec)
    return whole(payload).numel(), digest(whole(payload)), digest(payload.decode())


@pytest.mark.parametrize(("codec", "dtype"), FROZEN_SPARSE)
def test_bytes_beside_zeros_are_frozen(codec, dtype):
    x = torch.cat([sample(dtype).clamp(min=0)] * 5)
    assert form_of(x, codec) == FROZEN_SPARSE[codec, dtype]


@pytest.mark.parametrize(("codec", "dtype"), FROZEN)
def test_bytes_are_frozen(codec, dtype):
    assert form_of(sample(dtype), codec) == FROZEN[codec, dtype]
