"""Bytes for payloads whose size depends on the values: counted on the CPU, learned on a device.

`_C.late_overflow(True)` makes CPU codecs answer late, as a device does, when `_C.settle_overflow()`
writes the words (test_late_overflow.py)."""

import gc
import itertools

import pytest
import torch

import gradckpt
from gradckpt import _C

pytestmark = pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")

NUMBERS = itertools.count(1 << 16, 128)
DENSE = "too few zeros for the codec"


@pytest.fixture
def n():
    """A number of values of which nothing was learned yet."""
    return next(NUMBERS)


@pytest.fixture
def late():
    gradckpt.stats.reset()
    _C.late_overflow(True)
    yield
    _C.late_overflow(False)
    _C.settle_overflow()
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


def with_zeros(share, n=1 << 16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, generator=generator, dtype=torch.float32).bfloat16() + 1
    x[torch.rand(n, generator=generator) < share] = 0
    return x.requires_grad_() * 1


def run(x, codec="sparse", function=lambda h: h * h):
    return gradckpt.checkpoint(function, x, compress={"codec": codec, "min_numel": 0})


def step(n, shares, codec="sparse"):
    """A forward of a region for each share of zeros, the answers, and the backward;
    bytes of all payloads, and how many overflowed."""
    gradckpt.stats.reset()
    xs = [with_zeros(share, n, seed) for seed, share in enumerate(shares)]
    ys = [run(x, codec) for x in xs]
    _C.settle_overflow()
    s = gradckpt.stats()
    for x, y in zip(xs, ys, strict=True):
        (g,) = torch.autograd.grad(y.float().sum(), x)
        assert torch.equal(g, 2 * x)
    return s["bytes_out"], s["uncompressed"].get(DENSE, 0)


def bits(nbytes, n):
    return nbytes * 8 / n


def test_the_cpu_counts():
    gradckpt.stats.reset()
    for zeros, least, most in [(0.5, 9.0, 9.1), (0.85, 3.3, 3.5), (0.95, 1.7, 1.9), (0.99, 1.1, 1.3)]:
        payload = gradckpt.codecs.encode(with_zeros(zeros).detach(), "sparse")
        assert least <= bits(payload.nbytes, 1 << 16) <= most


def test_a_device_begins_with_room_for_all(late, n):
    assert step(n, [0.85]) == (2 * n - 1, 0)


@pytest.mark.parametrize(("zeros", "most"), [(0.5, 9.6), (0.85, 3.7), (0.95, 2.0), (0.99, 1.4)])
def test_bits_per_value_from_the_second_step_on(late, n, zeros, most):
    step(n, [zeros])
    for _ in range(3):
        nbytes, overflowed = step(n, [zeros])
        assert overflowed == 0
        assert bits(nbytes, n) <= most


def test_what_the_user_encodes_on_a_device_is_held_as_a_whole(late, n):
    """And teaches nothing."""
    step(n, [0.9])
    small, _ = step(n, [0.9])
    payload = gradckpt.codecs.encode(torch.ones(n, dtype=torch.bfloat16), "sparse")
    _C.settle_overflow()
    assert payload.nbytes == payload.codes.numel() == 2 * n
    assert step(n, [0.9])[0] <= small


def test_layers_share_what_the_densest_needs(late, n):
    shares = [0.99, 0.6, 0.9]
    step(n, shares)
    for _ in range(4):
        nbytes, overflowed = step(n, shares)
        assert overflowed == 0
        assert bits(nbytes, n) <= 3 * (1.1 + 0.4 * 16 * 1.07)


def test_up_at_once_and_down_slowly(late, n):
    step(n, [0.9])
    small, _ = step(n, [0.9])
    nbytes, overflowed = step(n, [0.5])
    assert (nbytes, overflowed) == (0, 1)  # the original is kept, and was right (step() looks)
    assert step(n, [0.5])[1] == 0
    sizes = [step(n, [0.9])[0] for _ in range(20)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * small
    assert sizes[1] > 1.5 * small
    assert sizes[-1] < 1.1 * small


def test_each_number_of_values_has_its_own(late, n):
    step(n, [0.95])
    other = next(NUMBERS)
    assert step(other, [0.95])[0] == 2 * other - 1
    assert bits(step(n, [0.95])[0], n) < 2


def test_more_numbers_than_are_remembered(late, n):
    """The one that was not used for longest is forgotten, and begins again."""
    step(n, [0.95])
    for other in itertools.islice(NUMBERS, 64):
        step(other, [0.95])
    assert step(n, [0.95])[0] == 2 * n - 1


def test_lossless_is_as_large_as_ever_on_a_device(late, n):
    nbytes, _ = step(n, [0.95], "lossless")
    assert bits(nbytes, n) < 12.2
    assert nbytes == gradckpt.codecs.encode(torch.ones(n, dtype=torch.bfloat16), "lossless").nbytes
    _C.late_overflow(False)
    nbytes, _ = step(n, [0.95], "lossless")
    assert bits(nbytes, n) < 1.9


def test_values_that_change_between_two_uses():
    """The second use is another payload, of another size."""
    x = with_zeros(0.9)
    gradckpt.stats.reset()
    regions = [run(x)]
    x.data.fill_(0)
    regions.append(run(x))
    x.data.uniform_(1, 2)[::2] = 0
    regions.append(run(x))
    assert gradckpt.stats()["shared"] == 0
    assert torch.equal(torch.autograd.grad(regions[2].float().sum(), x)[0], 2 * x)
    assert torch.equal(torch.autograd.grad(regions[1].float().sum(), x)[0], torch.zeros_like(x))


def test_after_an_overflow_the_original_is_restored(late):
    """Also of a codec that rounds: what does not fit was never written."""
    for step, density in enumerate((0.05, 0.05, 0.95, 0.95)):
        x = torch.randn(70, 100, generator=torch.Generator().manual_seed(step))
        x = (x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) < density)).requires_grad_()
        y = gradckpt.checkpoint(torch.square, x * 1, compress={"codec": "sparse_int8", "min_numel": 0})
        _C.settle_overflow()
        (g,) = torch.autograd.grad(y.sum(), x)
        assert (g - 2 * x).abs().max() < 0.1
