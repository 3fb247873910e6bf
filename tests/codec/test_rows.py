"""Rows that do not end with a group: the shares of a group are scaled apart."""

import codec_oracle
import pytest
import torch
from codec_inputs import tensor, uneven_rows
from codec_kernels import check_bytes
from processes import case

import gradckpt

every_codec = pytest.mark.parametrize("codec", codec_oracle.ROWS)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
#: The least SQNR of a row, in dB.
FLOORS = {"int8": 30, "int8_plain": 28, "int6": 20, "int4": 10}


def decibels(x, y):
    x, y = x.double(), y.double()
    return 10 * torch.log10(x.square().sum(-1) / (x - y).square().sum(-1))


def restored(x, codec):
    return gradckpt.codecs.encode(x, codec).decode()


@every_codec
@every_dtype
@pytest.mark.parametrize("width", [63, 64, 65, 100, 127, 128, 129, 300])
def test_bytes_and_values_are_the_oracles(codec, dtype, width, host_kernels):
    """A byte for each row that counts, and no other."""
    x = tensor(uneven_rows(dtype, 40, width, width), dtype).view(40, width)
    padded = torch.nn.functional.pad(x, (0, 3))[:, :width]
    for of in (x, padded, x.view(4, 10, width), x[:1], x.view(-1)):
        with case(of.shape):
            check_bytes(codec, of, host_kernels if of is x else None)


@every_codec
def test_no_row_is_lost_beside_a_larger_one(codec):
    """Rows of lognormal size: a small one keeps its values whatever stands in its groups."""
    torch.manual_seed(0)
    for width in (64, 65, 72, 96, 100, 127, 160, 192, 320, 1000, 2047):
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(65536 // width, width) * torch.randn(65536 // width, 1).exp()).to(dtype)
            with case(width, dtype):
                assert decibels(x, restored(x, codec)).min() >= FLOORS[codec]


def test_masks_stay_masks():
    """A mask in the end of one row does not raise the next one to its level: the error is that with
    -inf in its place."""
    torch.manual_seed(0)
    for width in (65, 100, 197):
        masked = torch.ones(width, width).triu(1).bool()
        x = torch.randn(width, width)

        def error(of, masked=masked):
            return (restored(of, "int8") - of)[~masked].square().mean().sqrt()

        without = error(x.masked_fill(masked, -torch.inf))
        for mask in (-1e9, -1e4, -100.0):
            for of in (x.masked_fill(masked, mask), x + mask * masked):
                with case(width, mask):
                    assert error(of) <= 1.4 * without


@every_codec
def test_no_value_is_scaled_beyond_the_largest(codec):
    """It would escape: values near 1e30, and of float16 near its end."""
    near = torch.linspace(1.0e30, 1.04e30, 100) / 1024
    x = torch.stack([torch.full((100,), 9.6e29), near])
    assert (restored(x, codec)[1] - near).abs().max() < 0.2 * near.max()
    end = torch.linspace(1, 1.99, 100)
    end[7] = 65504 * 2.0**-15
    half = torch.stack([torch.linspace(-65000, 65472, 100), end]).half()
    check_bytes(codec, half)


def test_the_bound_of_int8_plain_holds_for_shares():
    torch.manual_seed(0)
    x = torch.rand(2, 64) * 2 - 1
    x[0, :20], x[1, :20] = 1, 1.1249
    x[1] *= 2.0**-6
    error = (restored(x, "int8_plain") - x).abs().amax(1)
    assert (error <= gradckpt.codecs.info("int8_plain")["max_error"] * x.abs().amax(1).max()).all()
    assert error[1] <= 2.01 * gradckpt.codecs.info("int8_plain")["max_error"] * x[1].abs().max()


def test_rows_of_quite_different_sizes():
    for ratio in (2.0**-40, 2.0**-80):
        x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
        x[::2] *= ratio
        assert decibels(x, restored(x, "int8")).min() >= 30


def test_an_offset_and_outliers_in_rows_of_odd_width():
    torch.manual_seed(0)
    for width in (65, 100, 197, 1000):
        x = torch.randn(64000 // width, width) + 10
        far = torch.zeros(x.numel(), dtype=torch.bool)
        for _ in range(2):
            at = torch.arange(0, x.numel() - 128, 128)
            far[at + torch.randint(0, 128, at.shape)] = True
        far = far.view(x.shape)
        x[far] += 300 * torch.randn(int(far.sum())).sign()
        for dtype in (torch.float32, torch.bfloat16):
            of = x.to(dtype)
            wrong, size = (restored(of, "int8").float() - of.float())[~far], (of.float() - 10)[~far]
            with case(width, dtype):
                assert 10 * torch.log10(size.square().mean() / wrong.square().mean()) >= 34
