"""Stochastic rounding: the noise, the bytes, no bias, and what the engine keys it by."""

from itertools import pairwise

import codec_inputs
import codec_oracle as oracle
import numpy as np
import pytest
import torch
from codec_inputs import DTYPES, tensor
from codec_kernels import check_bytes
from codec_libraries import whole
from oracle_values import INT6_LEVELS

import gradckpt
from gradckpt import CompressionConfig

CODECS = [c for c in gradckpt.codecs.names() if gradckpt.codecs.info(c)["stochastic"]]
KEY = (0xFEDCBA9876543210, 12, 345)

every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def test_which_codecs_round():
    assert [c for c in gradckpt.codecs.names() if c in oracle.FORMATS] == CODECS


def test_oracle_is_philox():
    """Known answers of the authors' Random123 distribution."""
    ones = 0xFFFFFFFF
    assert oracle.philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert oracle.philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert oracle.philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@every_codec
@every_dtype
def test_bytes_equal_oracle(codec, dtype, host_kernels):
    hostile = [*(codec_inputs.hostile(dtype, s) for s in range(3)), codec_inputs.unusual(dtype)]
    bits = np.concatenate([codec_inputs.inputs(dtype)[: 128 * 900], *hostile, codec_inputs.gaussian(dtype, 128 * 99)])
    check_bytes(codec, tensor(bits, dtype), host_kernels, KEY)


@every_codec
def test_same_key_same_bytes(codec):
    """Whatever the strides and the threads, in parts of a task, too; another key, other bytes."""
    x = torch.randn(700, 300, generator=torch.Generator().manual_seed(1))
    before, threads = torch.get_rng_state(), torch.get_num_threads()

    def encoded(x, key=KEY):
        return whole(gradckpt.codecs.encode(x, codec, dither=key))

    want = encoded(x)
    assert torch.equal(encoded(x.t().contiguous().t()), want)
    try:
        torch.set_num_threads(2)
        assert torch.equal(encoded(x), want)
    finally:
        torch.set_num_threads(threads)
    seed, step, number = KEY
    for other in ((seed ^ 1 << 63, step, number), (seed, step + 1, number), (seed, step, number + 1), None):
        assert not torch.equal(encoded(x, other), want)
    assert torch.equal(torch.get_rng_state(), before)


def neighbours(codec):
    """The values that a code can have, from zero on, in steps;
    of the rotated formats those of y."""
    f = oracle.FORMATS[codec]
    if codec.startswith("fp8"):
        return f.values[f.values <= f.top]
    if codec == "int6":
        return np.array([0.0, *INT6_LEVELS])
    return np.arange(128.0)


def sigmas(errors):
    """How far the mean is from zero, in its standard deviations."""
    return abs(errors.mean()) / (errors.std() / np.sqrt(errors.size) + 1e-9)


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "int4"])
def test_no_bias(codec):
    """Values spread over one interval between two neighbours: the mean error is within 5 sigma,
    for every interval."""
    rng = np.random.default_rng(5)
    grid, rotated = neighbours(codec), codec in ("int8", "int6")
    for k, (low, high) in enumerate(pairwise(grid)):
        y = rng.uniform(low, high, (24, 128)) * rng.choice([-1.0, 1.0], (24, 128))
        y[:, 0] = grid[-1]  # fixes the step at 1
        signs = oracle.signs_of(24)
        x = (y @ oracle.HADAMARD * signs / 128 if rotated else y).astype(np.float32)
        restored = gradckpt.codecs.encode(torch.from_numpy(x), codec, dither=(99, k, 0)).decode().double().numpy()
        got = restored * signs @ oracle.HADAMARD if rotated else restored
        errors = (got - y)[:, 1:]
        assert sigmas(errors) < 5, (k, low, high)
        assert sigmas(errors * np.sign(y[:, 1:])) < 5, (k, low, high)  # no shrinking either
        assert np.abs(errors).max() > 0


def test_no_bias_of_int4():
    """By position and along x: which y share an interval depends on the value that is taken out."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((20_000, 128)).astype(np.float32)
    x[:, 17] = rng.uniform(20, 40, 20_000)
    restored = gradckpt.codecs.encode(torch.from_numpy(x), "int4", dither=(3, 0, 0)).decode().double().numpy()
    errors = restored - x
    assert max(sigmas(errors[:, i]) for i in range(128)) < 5
    rest = np.arange(128) != 17
    assert sigmas((errors * x)[:, rest].sum(1)) < 5
    assert np.abs(errors[:, 17]).max() < 40 / 128


@every_codec
def test_neighbours_only(codec):
    """Rounding up or down, never further: the error is at most
    twice that of rounding to nearest."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    amax = x.abs().amax(1, keepdim=True)
    limit = 2.3 * gradckpt.codecs.info(codec)["max_error"] * amax
    for step in range(5):
        assert ((gradckpt.codecs.encode(x, codec, dither=(0, step, 0)).decode() - x).abs() <= limit).all()


# ---- the engine ----


def run(config, steps=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(3)))
    found = []
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).requires_grad_() * 1.0
        for block in model:
            x = gradckpt.checkpoint(block, x, compress=config)
        x.square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    return found


@pytest.fixture(autouse=True)
def _state_is_put_back():
    before = gradckpt.config.get_rounding_state()
    yield
    gradckpt.config.set_rounding_state(before)


@pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")  # originals stay alive: it compares with them
def test_engine_rounds_stochastically_and_repeats():
    config = CompressionConfig("int4", stochastic=True, seed=5)
    gradckpt.config.set_rounding_state((0, 0))
    first = run(config)
    after = gradckpt.config.get_rounding_state()
    gradckpt.config.set_rounding_state((0, 0))
    again = run(config)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert gradckpt.config.get_rounding_state() == after == (2, 0)
    other = run(CompressionConfig("int4", stochastic=True, seed=6))
    nearest = run("int4")
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], nearest[0])


def test_rounding_state_resumes():
    config = CompressionConfig("int8", stochastic=True)

    def run_from(state, steps):
        gradckpt.config.set_rounding_state(state)
        return run(config, steps)

    both = run_from((7, 0), 2)
    run_from((7, 0), 1)
    assert gradckpt.config.get_rounding_state() == (8, 0)
    assert torch.equal(run_from((8, 0), 2)[0], run_from((8, 0), 1)[0])
    assert not torch.equal(both[0], both[1])


def seen_in(*regions):
    """What each region's function is given, in the forwards and then in the recomputes."""
    seen = []

    def keep(*args):
        seen.append([a.detach().clone() for a in args])
        return sum(a.sin() for a in args)

    loss = sum(gradckpt.checkpoint(keep, *args, compress=compress).sum() for compress, args in regions)
    loss.backward()
    return seen[len(regions) :]


NOISY = CompressionConfig("int4", stochastic=True)


def test_tensors_of_a_step_get_different_noise():
    x = torch.randn(4096).requires_grad_() * 1.0
    ((first, second),) = seen_in((NOISY, (x, x.detach().clone().requires_grad_() * 1.0)))
    assert not torch.equal(first, second)


def test_a_payload_is_not_shared_across_kinds_of_rounding():
    x = torch.randn(4096).requires_grad_() * 1.0
    nearest, noisy = seen_in(("int4", (x,)), (NOISY, (x,)))
    assert not torch.equal(nearest[0], noisy[0])


# ---- errors ----


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: CompressionConfig("raw", stochastic=True), ValueError, "'raw' has no stochastic rounding"),
        (lambda x: gradckpt.codecs.encode(x, "raw", dither=KEY), ValueError, "'raw' has no stochastic rounding"),
        (lambda x: CompressionConfig(seed=-1), ValueError, r"seed is between 0 and 2\^64 - 1"),
        (lambda x: gradckpt.codecs.encode(x, "int8", dither=5), TypeError, "three ints"),
        (lambda x: gradckpt.codecs.encode(x, "int8", dither=(0, 2**32, 0)), ValueError, r"step .* 2\^32 - 1, not 429"),
        (lambda x: gradckpt.config.set_rounding_state((0, -1)), ValueError, "tensor is between"),
        (lambda x: gradckpt.config.set_rounding_state(3), TypeError, r"\(step, tensor\)"),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says):
        call(torch.randn(300))
