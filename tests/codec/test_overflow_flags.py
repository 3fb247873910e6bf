"""How a device says whether it could hold the values: the kernels and their words, emulated."""

import ctypes

import numpy as np
import pytest
from codec_kernels import E_DEVICE, OVERFLOW_FOUND, OVERFLOW_NONE, OVERFLOW_PENDING, Layout, aligned, nbytes
from codec_libraries import Bytes, Lengths
from test_lossless import with_escapes

NO_MEMORY = 2  # of the emulated cudaHostAlloc


@pytest.fixture
def device(device_kernels):
    device_kernels.integer("emulated_capture").value = 0
    yield device_kernels
    device_kernels.integer("emulated_capture").value = 0


def value_of(word):
    return ctypes.c_uint32.from_address(word)


def values_of(codec, fits):
    if codec == "lossless":
        return with_escapes([3, 64, 64 if fits else 65, 1, 0], "bfloat16"), "bfloat16"
    bits = np.random.default_rng(1).standard_normal(20000).astype(np.float32).view(np.uint32).copy()
    bits[9000] = 0x3F800000 if fits else 0x7F7FFFFF
    return bits, "float32"


def encode(device, codec, fits, word, n=None):
    """n: of so many values."""
    bits, dtype = values_of(codec, fits)
    bits = bits if n is None else bits[9000 : 9000 + n]
    layout = Layout(bits.size, dtype)
    payload = aligned(nbytes(codec, dtype, bits.size))
    source = layout.memory(bits)
    return device.encode(codec, layout.tensor(source, 1), payload, word)


@pytest.mark.parametrize("codec", ["lossless", "bf16", "fp16"])
def test_overflow_flags(device, codec):
    """One launch; the counters are back at 0 after it, for every result."""
    launches = device.integer("emulated_launches")
    word = device.library.gck_overflow_take(1)
    for fits in (True, False, False, True, True, False):
        value_of(word).value = OVERFLOW_PENDING
        before = launches.value
        assert encode(device, codec, fits, word) == 0
        assert value_of(word).value == (OVERFLOW_NONE if fits else OVERFLOW_FOUND)
        assert launches.value == before + 1
    device.library.gck_overflow_give(word)


def test_words(device):
    """Each is pending, and its own; one that was given back
    early is not used before it is written."""
    take, give = device.library.gck_overflow_take, device.library.gck_overflow_give
    words = [take(0) for _ in range(4096)]
    assert len(set(words)) == 4096
    assert all(value_of(w).value == OVERFLOW_PENDING for w in words)
    assert take(0) is None
    give(words[7])
    assert take(1) is None
    assert encode(device, "lossless", True, words[7]) == 0  # the launch that was queued before
    assert take(1) == words[7]
    assert value_of(words[7]).value == OVERFLOW_PENDING
    for w in words:
        value_of(w).value = OVERFLOW_NONE
        give(w)
    assert take(0) in words
    give(words[0] + 4 * 5000)  # no word at all
    give(0)
    assert device.integer("emulated_host_allocs").value == 1


def test_captured_work_keeps_its_word(device):
    """A graph may run again whenever it likes."""
    take, give = device.library.gck_overflow_take, device.library.gck_overflow_give
    word, captured = take(0), device.library.gck_overflow_is_captured
    assert captured(word) == 0  # who wants it may wait
    device.integer("emulated_capture").value = 1
    assert encode(device, "bf16", True, word) == 0
    device.integer("emulated_capture").value = 0
    assert captured(word) == 1
    assert captured(device.library.gck_overflow_take(-1)) == 0
    give(word)
    rest = [take(0) for _ in range(4096)]
    assert None in rest
    assert word not in rest
    for w in filter(None, rest):
        value_of(w).value = OVERFLOW_NONE
        give(w)


def test_captures_take_all_words(fresh_device):
    """4096 captured encodes keep theirs, and right answers; then there are none,
    which the caller counts."""
    device = fresh_device()
    take, give = device.library.gck_overflow_take, device.library.gck_overflow_give
    words = [take(0) for _ in range(4096)]
    device.integer("emulated_capture").value = 1
    for number, word in enumerate(words):
        assert encode(device, "fp16", number % 3 > 0, word, 4) == 0
        give(word)
    assert [take(0) for _ in range(3)] == [None] * 3
    device.integer("emulated_capture").value = 0
    assert take(1) is None
    for again in range(2):  # the graph runs again
        assert [value_of(word).value for word in words[:6]] == [OVERFLOW_FOUND, OVERFLOW_NONE, OVERFLOW_NONE] * 2
        for number, word in enumerate(words[:6]):
            value_of(word).value = OVERFLOW_PENDING
            assert encode(device, "fp16", number % 3 > 0, word, 4) == 0, again
    assert take(-1) is not None, "the host's are others"


def compare(device, codes, other, scales=b"", others=b""):
    """What the kernel says of two payloads, after one launch."""
    arrays = [np.frombuffer(part, np.uint8) for part in (codes, scales, other, others)]
    places = [(Bytes * 1)(Bytes(pointer(arrays[i]), pointer(arrays[i + 1]))) for i in (0, 2)]
    word = device.library.gck_overflow_take(1)
    before = device.integer("emulated_launches").value
    lengths = Lengths(len(codes), len(scales))
    status = device.library.gck_compare_cuda(1, None, places[0][0], places[1][0], lengths, ctypes.c_void_p(word))
    assert (status, device.integer("emulated_launches").value - before) == (0, 1)
    said = value_of(word).value
    device.library.gck_overflow_give(word)
    return said


def pointer(array):
    return array.ctypes.data if array.size else None


@pytest.mark.parametrize("n", [1, 15, 16, 4096, 16383, 16384, 16385, 50001])
def test_compare(device, n):
    """One byte anywhere, of the codes or of the scales."""
    generator = np.random.default_rng(n)
    codes, scales = generator.bytes(n), generator.bytes(1 + n // 64)
    assert compare(device, codes, codes) == OVERFLOW_NONE
    assert compare(device, codes, codes, scales, scales) == OVERFLOW_NONE
    for at in {0, n - 1, n // 2, *map(int, generator.integers(0, n, 4))}:
        other = bytearray(codes)
        other[at] ^= 1 << at % 8
        assert compare(device, codes, bytes(other), scales, scales) == OVERFLOW_FOUND, at
    other = bytearray(scales)
    other[-1] ^= 128
    assert compare(device, codes, codes, scales, bytes(other)) == OVERFLOW_FOUND
    assert compare(device, codes, codes, scales, scales) == OVERFLOW_NONE  # the counters are back at 0


def test_word_of_the_host_is_no_word_of_a_device(device):
    word = device.library.gck_overflow_take(-1)
    assert value_of(word).value == OVERFLOW_PENDING
    assert encode(device, "lossless", True, word) == E_DEVICE
    assert encode(device, "fp16", True, word) == E_DEVICE
    device.library.gck_overflow_give(word)


def test_first_word_while_capturing(fresh_device):
    """Pinned memory may be allocated then; when there is none, there are no words,
    and it is tried again."""
    device = fresh_device()
    allocs = device.integer("emulated_host_allocs")
    allocs.value = -1
    assert device.library.gck_overflow_take(0) is None
    allocs.value = 0
    device.integer("emulated_capture").value = 1
    assert device.library.gck_overflow_take(1) is not None
    assert device.integer("emulated_capture_mode").value == 0
    assert device.integer("emulated_device").value == 0
