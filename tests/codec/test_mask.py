"""`mask`: one bit for each bool."""

import itertools

import direct_oracle as oracle
import numpy as np
import pytest
import torch
from cases import case
from direct_kernels import (
    Layout,
    assert_same,
    check_everywhere,
    check_last_values_of_a_huge_tensor,
    every_layout,
    everywhere,
)

import gradckpt


@pytest.fixture
def same(host_kernels, device_kernels):
    def run(values, **layout):
        check_everywhere(host_kernels, device_kernels, "mask", "bool", np.asarray(values, np.uint8), **layout)

    return run


def random_bools(n, seed=0):
    return np.random.default_rng([31, seed]).integers(0, 2, n, np.uint8)


def test_order_of_the_bits():
    """Value i is bit i % 8 of byte i / 8; 16 bytes for 128 values, what is left over is 0."""
    for i in (0, 1, 7, 8, 127, 128, 130):
        x = torch.zeros(131, dtype=torch.bool)
        x[i] = True
        payload = gradckpt.codecs.encode(x, "mask")
        assert payload.nbytes == 32
        assert int.from_bytes(payload.codes.numpy().tobytes(), "little") == 1 << i
        assert torch.equal(payload.decode(), x)
    assert gradckpt.codecs.encode(torch.ones(5, dtype=torch.bool), "mask").codes.tolist() == [31] + [0] * 15
    assert gradckpt.codecs.info("mask")["bits_per_value"] == 1


def test_every_byte_but_0_is_true(same):
    every = np.arange(256, dtype=np.uint8)
    same(every)
    same(np.tile(every, 40))
    x = torch.from_numpy(np.tile(every, 3)).view(torch.bool)
    restored = gradckpt.codecs.encode(x, "mask").decode()
    assert torch.equal(restored.view(torch.uint8), (x.view(torch.uint8) != 0).to(torch.uint8))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_masks(same, share):
    same(np.random.default_rng(1).random(20000) < share)


def test_tails_and_alignment(same):
    lengths = (0, 1, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 16385)
    for n, offset in itertools.product(lengths, (0, 1, 15)):
        with case(n, offset):
            same(random_bools(n, n), offset=offset)


@every_layout
def test_strides(same, sizes, strides):
    same(random_bools(int(np.prod(sizes))), offset=1, sizes=sizes, strides=strides)


def test_stores_of_large_tensors(host_kernels):
    values = random_bools(8 * 4096)
    for isa in host_kernels.isas:
        payload, restored, _ = host_kernels.choose(isa).stream("mask", "bool", values)
        assert_same(payload, oracle.encode("mask", values, "bool")[0], f"{isa} payload")
        assert_same(restored, values, f"{isa} decoded")


def test_large_tensor():
    x = torch.from_numpy(random_bools(33 << 20)).view(torch.bool)
    payload = gradckpt.codecs.encode(x, "mask")
    assert (payload.codes.numpy() == np.packbits(x.numpy(), bitorder="little")).all()
    assert torch.equal(payload.decode(), x)


def test_index_arithmetic(host_kernels):
    check_last_values_of_a_huge_tensor(host_kernels, "mask", "bool", 1)


def test_any_payload_decodes(host_kernels, device_kernels):
    payload = np.tile(np.arange(256, dtype=np.uint8), 4)
    for name, kernels in everywhere(host_kernels, device_kernels):
        layout = Layout(8192, "bool")
        out = layout.memory()
        kernels.decode("mask", payload, layout.tensor(out, kernels.device))
        assert_same(layout.values(out), oracle.decode("mask", payload, 8192, "bool"), name)


def test_other_dtypes_are_refused():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        with pytest.raises(TypeError, match="takes plain strided bool tensors"):
            gradckpt.codecs.encode(torch.zeros(3, dtype=dtype), "mask")


def test_layouts_of_tensors():
    base = torch.from_numpy(random_bools(9000)).view(torch.bool)
    for x in (base[:4200].view(60, 70).t(), base[1:3001], base[3].expand(7, 50), base[:0], base[17], base[5::3]):
        payload = gradckpt.codecs.encode(x, "mask")
        assert torch.equal(payload.codes, gradckpt.codecs.encode(x.contiguous(), "mask").codes)
        assert torch.equal(payload.decode(), x)
        data = torch.ops.gradckpt.encode(x, "mask")
        assert torch.equal(torch.ops.gradckpt.decode(data, "mask", list(x.shape), torch.bool), x)
