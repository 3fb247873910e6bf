"""compress_saved(): payloads shared by views, changes in place, other hooks,
bytes and lifetimes."""

import asyncio
import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from processes import in_threads
from small_models import (
    RAW,
    SMALL,
    Block,
    activation,
    fresh,  # noqa: F401 (a fixture of every test here)
    int8_bytes,
    watch,
)
from torch import nn
from torch.autograd.graph import save_on_cpu

import gradckpt
from gradckpt import compress_saved

# ---- sharing ----


def test_views_share_one_payload():
    x = activation(4, 32, 64)
    w = nn.Parameter(torch.randn(64, 64))

    def run(x):
        rows = F.linear(x, w), x.view(-1, 64) @ w, x.transpose(1, 2) ** 2, x[:, None].expand(4, 3, 32, 64) ** 2
        return sum(y.sum() for y in (*rows, x[1:] ** 2, x[1:, ::2] ** 2))

    y = compress_saved(SMALL)(run)(x)
    s = gradckpt.stats()
    assert (s["encoded"], s["shared"], s["live_bytes"]) == (1, 5, int8_bytes(x.shape))
    x_hat = gradckpt.codecs.encode(x.detach(), "int8").decode().requires_grad_()
    expected = torch.autograd.grad(run(x_hat), [x_hat, w])
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, [x, w]), expected, strict=True))


def test_disjoint_slices_cost_no_more_than_their_base():
    qkv = activation(4, 16, 3 * 64)

    @compress_saved(SMALL)
    def run():
        q, k, v = (t.view(4, 16, 4, 16).transpose(1, 2) for t in qkv.split(64, -1))
        return F.scaled_dot_product_attention(q, k, v)

    y = run()
    assert y.grad_fn is not None
    assert gradckpt.stats()["live_bytes"] <= int8_bytes(qkv.shape, (4 * 16, 64))  # and the output


def test_a_view_smaller_than_its_base_is_encoded_by_itself():
    x = activation(64, 64)
    with compress_saved(RAW):
        y = x[1:, :63].t().sin()
    assert gradckpt.stats()["live_bytes"] == 63 * 63 * 4
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got[1:, :63], x[1:, :63].cos())
    assert got[0].eq(0).all()


class Window(torch.autograd.Function):
    """The first 32 rows, as a tensor of its own in the storage of all."""

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(0).set_(x.untyped_storage(), 0, (32, 64))

    @staticmethod
    def backward(ctx, g):
        return F.pad(g, (0, 0, 0, 32))


def test_a_view_that_leaves_its_base_is_encoded_by_itself():
    x = activation(64, 64)
    base = Window.apply(x)
    with compress_saved(RAW):
        y = base.as_strided((64, 64), (64, 1)).sin()
    assert gradckpt.stats()["live_bytes"] == x.nbytes
    assert torch.equal(y.grad_fn._saved_self, x)


def test_transposed_memory_is_shared_too():
    x = activation(4, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    with compress_saved(RAW):
        y = x.sin(), x.permute(0, 2, 3, 1).sin(), x.flatten(2).sin(), x[:, :4].sin()
    assert gradckpt.stats()["live_bytes"] == x.nbytes
    saved = [one.grad_fn._saved_self for one in y]
    assert [s.stride() for s in saved[:2]] == [x.stride(), x.permute(0, 2, 3, 1).stride()]
    assert all(
        torch.equal(a, b) for a, b in zip(saved, [x, x.permute(0, 2, 3, 1), x.flatten(2), x[:, :4]], strict=True)
    )


def test_a_change_in_place_between_two_saves_ends_the_sharing():
    x = activation(64, 64)
    before = x.detach().clone()
    with compress_saved(RAW):
        y = x.sin()
        x.add_(1)
        z = x.sin()
    assert gradckpt.stats()["encoded"] == 2
    assert torch.equal(y.grad_fn._saved_self, before)
    assert torch.equal(z.grad_fn._saved_self, before + 1)


# ---- changes in place ----


def test_a_payload_is_a_snapshot():
    """Plain autograd refuses this; the payload is from before the change,
    so the gradient is right."""
    leaf = torch.randn(64, 64, requires_grad=True)
    x = leaf * 1
    with compress_saved(RAW):
        y = x.sin().sum()
    expected = x.detach().cos()
    x.zero_()
    assert torch.equal(torch.autograd.grad(y, leaf)[0], expected)


def test_what_is_kept_by_reference_is_checked_as_by_torch():
    def run(context):
        w = nn.Parameter(torch.randn(64, 64))
        x = activation(64, 64)
        with context:
            y = (x @ w.t()).sum()
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError) as error:
            y.backward()
        return str(error.value)

    ours, torchs = run(compress_saved(SMALL)), run(contextlib.nullcontext())
    words = "one of the variables needed for gradient computation has been modified by an inplace operation: "
    assert ours.startswith(words + "[torch.FloatTensor [64, 64]]")
    assert "is at version 1; expected version 0" in ours
    assert torchs.startswith(words)


# ---- composition ----


def test_the_innermost_decides():
    x = activation(64, 64)
    with compress_saved(RAW), compress_saved(SMALL):
        y = x.square(), x.view(-1).square()
        z = y[0].relu().sum(), y[1].relu().sum()
        (z[0] + z[1]).exp()  # looks behind both
    # once: its own kind is no outer hook
    assert gradckpt.stats()["bytes_out"] == int8_bytes((64, 64)) + 2 * 64 * 64 // 8
    del y, z
    gradckpt.stats.reset()
    with compress_saved(SMALL):
        with compress_saved(None):
            pass
        with save_on_cpu():
            x.cos()
        assert gradckpt.stats()["encoded"] == 0
        x.relu()
    assert gradckpt.stats()["encoded"] == 1


@pytest.mark.parametrize("checkpoint", [gradckpt.checkpoint, torch.utils.checkpoint.checkpoint])
def test_with_regions(checkpoint):
    """Around regions their inputs are kept compressed; inside, nothing is kept."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), activation(64, 64)
    with compress_saved(RAW):
        around = checkpoint(model, x, use_reentrant=False)
    assert gradckpt.stats()["live_bytes"] == x.nbytes
    gradckpt.stats.reset()
    inside = checkpoint(compress_saved(RAW)(model), x, use_reentrant=False)
    assert gradckpt.stats()["encoded"] == 0
    assert gradckpt.stats()["uncompressed"] == {"inside a region, which runs again": 1}
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    for y in (around, inside):
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_as_decorator():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        @compress_saved(SMALL)
        def forward(self, x, *, scale):
            "Doc."
            return self.forward(F.silu(x), scale=0) @ self.w if scale else F.gelu(x)

    layer = Layer()
    out = layer(activation(64, 64), scale=2)
    assert out.shape == (64, 64)
    assert gradckpt.stats()["encoded"] == 3  # of what the last operator saves, too: the result leads to it
    assert Layer.forward.__doc__ == "Doc."
    assert Layer.forward.__name__ == "forward"
    activation(64, 64).relu()
    assert gradckpt.stats()["encoded"] == 3  # off again


def generator():
    yield 1


async def coroutine():
    await asyncio.sleep(0)


async def stream():
    yield 1


@pytest.mark.parametrize("function", [generator, coroutine, stream, Block, 3])
def test_what_cannot_be_decorated(function):
    with pytest.raises(TypeError, match=r"gradckpt: compress_saved\(\)"):
        compress_saved("int8")(function)


def top():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
def test_exceptions_take_the_hooks_off(error):
    def fails():
        raise error

    with pytest.raises(error), compress_saved("int8"):
        fails()
    assert top() is None
    with pytest.raises(error):
        compress_saved("int8")(fails)()
    assert top() is None


def test_where_hooks_are_disabled_torch_says_so():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here, please"):
        with pytest.raises(RuntimeError, match="not here, please"), compress_saved("int8"):
            pass
        with pytest.raises(RuntimeError, match="not here, please"):
            compress_saved("int8")(torch.sin)(activation(4))
    assert top() is None


def test_threads_have_their_own_hooks():
    x = activation(64, 64)
    with compress_saved(SMALL):
        in_threads(x.relu)
        assert gradckpt.stats()["encoded"] == 0
        x.relu()
    assert gradckpt.stats()["encoded"] == 1


def test_another_hooks_value_is_refused():
    with compress_saved("int8"):
        _, unpack = top()
    with pytest.raises(TypeError, match="not a saved tensor"):
        unpack(3)


def test_stochastic_rounding_begins_a_step_after_a_backward():
    x = activation(64, 64)

    def run():
        y = compress_saved({"codec": "int8", "min_numel": 16, "stochastic": True})(F.silu)(x)
        value = y.grad_fn._saved_self
        return value

    gradckpt.config.set_rounding_state((0, 0))
    first, second = run(), run()
    assert gradckpt.config.get_rounding_state() == (2, 0)
    gradckpt.config.set_rounding_state((0, 0))
    assert not torch.equal(first, second)
    assert torch.equal(run(), first)


# ---- bytes ----


def test_bytes_alive_are_those_of_the_arithmetic():
    """One GELU layer with attention: every activation once, by hand."""
    tokens, width = 64, 128
    w1, w2 = nn.Parameter(torch.randn(width, 256)), nn.Parameter(torch.randn(256, width))
    x = activation(tokens, width)

    @compress_saved("int8")
    def run():
        h = F.layer_norm(x, (width,))  # x
        u = h @ w1  # h
        y = F.gelu(u) @ w2  # u; gelu(u)
        return (y + x).square().sum()  # y + x

    loss = run()
    kept = [tokens * width, tokens * width, tokens * 256, tokens * 256, tokens * width]
    assert gradckpt.stats()["live_bytes"] == int8_bytes(*kept)
    assert gradckpt.stats()["uncompressed"] == {"does not require grad": 2, "leaf": 2}  # mean, rstd; the weights
    loss.backward()
    assert gradckpt.stats()["live_bytes"] == 0


# ---- lifetimes ----


def test_the_graph_dies_without_the_collector():
    gc.disable()
    try:
        x = activation(64, 64)
        for codec in ("int8", "fp16", "lossless"):
            for function in (torch.exp, torch.relu, torch.tanh, lambda t: t.log_softmax(-1), lambda t: t[:1].exp()):
                with compress_saved({"codec": codec, "min_numel": 100}):
                    y = function(x)
                node = watch(y.grad_fn)
                del y
                assert node() is None, codec
    finally:
        gc.enable()
