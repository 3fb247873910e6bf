"""`sparse_int8`: zeros are exact, what is not zero keeps its sign and errs by less than a step."""

import itertools

import direct_oracle as oracle
import numpy as np
import oracle_values
import pytest
import torch
from codec_inputs import DTYPES, bits_of, tensor
from codec_kernels import OVERFLOW_FOUND, OVERFLOW_NONE, STRIDED, Layout, assert_same
from codec_libraries import ISAS, forced
from processes import case
from test_sparse import OnDevice, values

import gradckpt

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
LENGTHS = (0, 1, 2, 7, 127, 128, 129, 300, 4095, 4096, 4097, 9000)
ZEROS = (0.0, 0.5, 0.9, 0.99, 1.0)


def ordinary(n, zeros, dtype, seed=0, scale=1.0):
    rng = np.random.default_rng([43, n, seed])
    x = rng.standard_normal(n).astype(np.float32) * np.float32(scale)
    bits = bits_of(torch.from_numpy(x).to(DTYPES[dtype])).copy()
    bits[rng.random(n) < zeros] = 0
    return bits


def payload_of(bits, dtype):
    return gradckpt.codecs.encode(tensor(bits, dtype), "sparse_int8")


def check(bits, dtype, what):
    payload = payload_of(bits, dtype)
    want, _ = oracle.encode_sparse_int8("sparse_int8", bits, dtype)
    assert payload.nbytes == want.size
    assert_same(payload.codes.numpy(), want, f"{what} payload")
    restored = bits_of(payload.decode())
    assert_same(restored, oracle.decode_sparse_int8("sparse_int8", want, bits.size, dtype), f"{what} decoded")
    return restored


@every_dtype
@pytest.mark.parametrize("make", [values, ordinary])
def test_bytes_equal_oracle(dtype, make):
    for isa in ISAS:
        with forced(isa):
            for n, zeros in itertools.product(LENGTHS, ZEROS):
                with case(isa, n, zeros):
                    check(make(n, zeros, dtype), dtype, isa)


@every_dtype
def test_zeros_and_signs_survive(dtype):
    """The mask of a ReLU, and the sign of everything that is not zero; -0 is zero."""
    for scale in (1.0, 1e-6, 1e4):
        bits = ordinary(50000, 0.5, dtype, scale=scale)
        bits[::17] = np.array([1], bits.dtype)  # the smallest of all, beside others
        bits[5::31] = 1 << (8 * bits.itemsize - 1)
        restored, signs = check(bits, dtype, scale), 1 << (8 * bits.itemsize - 1)
        nonzero = oracle.nonzeros(bits)
        assert_same(oracle.nonzeros(restored), nonzero, "zeros")
        assert_same(restored[nonzero] & signs, bits[nonzero] & signs, "signs")
        assert (restored[~nonzero] == 0).all()


@every_dtype
def test_special_values_stay(dtype):
    """NaN, infinities and the largest; between 1e30 and that one they become it."""
    most = oracle_values.MAX[dtype]
    special = [np.nan, np.inf, -np.inf, most, -most, *([] if dtype == "float16" else [2e30, -3e35])]
    x = np.concatenate([np.float32(special), np.linspace(-2, 2, 500, dtype=np.float32)])
    bits = oracle_values.to_bits(x, dtype)
    restored = oracle_values.to_float(check(bits, dtype, "special"), dtype)
    want = [np.nan, np.inf, -np.inf, most, -most, *([] if dtype == "float16" else [most, -most])]
    np.testing.assert_array_equal(restored[: len(want)], np.float32(want))


@every_dtype
def test_error_bound(dtype):
    """Of the largest of its 128 packed values."""
    x = tensor(ordinary(100000, 0.6, dtype), dtype)
    error = (gradckpt.codecs.encode(x, "sparse_int8").decode().double() - x.double()).abs()
    unit = torch.finfo(x.dtype).eps
    assert error.max() <= gradckpt.codecs.info("sparse_int8")["max_error"] * x.abs().max().double() * (1 + unit)


@pytest.mark.parametrize(("zeros", "most"), [(0.5, 5.2), (0.85, 2.3), (0.95, 1.5), (0.99, 1.2)])
def test_bits_per_value(zeros, most):
    payload = payload_of(ordinary(2**20, zeros, "bfloat16"), "bfloat16")
    assert payload.nbytes * 8 / 2**20 <= most


def test_threads():
    bits = np.concatenate([ordinary(300000, zeros, "bfloat16") for zeros in (0.9, 0.1, 1.0, 0.5)])
    want = payload_of(bits, "bfloat16").codes.clone()
    before = torch.get_num_threads()
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(payload_of(bits, "bfloat16").codes, want)
    finally:
        torch.set_num_threads(before)


# ---- the device ----


@pytest.fixture
def same(device_kernels):
    def run(bits, dtype, room, fits=True, layout=None):
        device = OnDevice(device_kernels, bits, dtype, room, layout, "sparse_int8")
        want, wanted_fits = oracle.encode_sparse_int8("sparse_int8", bits, dtype, room)
        payload, (answer, part) = device.encode()
        written = (
            slice(None) if not fits else slice(oracle.nbytes_of(np.count_nonzero(oracle.nonzeros(bits)), bits.size))
        )
        assert_same(payload[written], want[written], "payload")
        assert (answer, wanted_fits) == (OVERFLOW_NONE if fits else OVERFLOW_FOUND, fits)
        assert part == -(-np.count_nonzero(oracle.nonzeros(bits)) * 65536 // bits.size)
        device.decode()

    return run


@every_dtype
@pytest.mark.parametrize("make", [values, ordinary])
def test_device(same, dtype, make):
    for n, zeros in itertools.product((1, 200, 4096, 4097, 20000), (0.0, 0.6, 0.95, 1.0)):
        bits = make(n, zeros, dtype)
        least = oracle.nbytes_of(np.count_nonzero(oracle.nonzeros(bits)), n)
        for room in (least, least + 77):
            with case(n, zeros, room):
                same(bits, dtype, room)


@every_dtype
def test_device_without_enough_room(same, dtype):
    bits = ordinary(30000, 0.6, dtype)
    count = np.count_nonzero(oracle.nonzeros(bits))
    for that_fit in (count - 1, count // 2, 100, 0):
        same(bits, dtype, oracle.nbytes_of(that_fit, 30000), fits=False)


@every_dtype
def test_device_strides(same, dtype):
    for sizes, strides in STRIDED.values():
        bits = ordinary(int(np.prod(sizes)), 0.8, dtype)
        layout = Layout(bits.size, dtype, 1, sizes, strides)
        same(bits, dtype, oracle.nbytes_of(np.count_nonzero(oracle.nonzeros(bits)), bits.size), layout=layout)


# ---- regions ----


def test_gradients_of_a_relu_keep_their_mask():
    x = torch.randn(400, 300, requires_grad=True)
    h = (x * 1).relu()
    gradckpt.stats.reset()
    y = gradckpt.checkpoint(lambda h: h.relu() * h.sign(), h, compress={"codec": "sparse_int8", "min_numel": 0})
    assert gradckpt.stats()["codecs"] == {"sparse_int8": 1}
    (g,) = torch.autograd.grad(y.sum(), h)
    (want,) = torch.autograd.grad((h.relu() * h.sign()).sum(), h)
    assert torch.equal(g, want)
