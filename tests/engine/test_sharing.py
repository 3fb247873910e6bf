"""One payload for several uses of a tensor: only when the bytes are equal,
and one payload more at most meanwhile."""

import pytest
import torch
from forms import in_regions, saved

import gradckpt

CODECS = ("raw", "int8", "int4", "lossless")


@pytest.fixture(autouse=True)
def _reset():
    gradckpt.stats.reset()


def hidden(*shape, seed=0):
    return torch.randn(*(shape or (32, 64)), generator=torch.Generator().manual_seed(seed)).requires_grad_() * 1


def stats(*names):
    s = gradckpt.stats()
    return tuple(s[name] for name in names)


def by_numpy(x):
    x.detach().numpy()[:] *= 3


def by_dlpack(x):
    torch.from_dlpack(x.detach()).mul_(3)


WRITES = {
    "data": lambda x: x.data.mul_(3),
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "one value": lambda x: x.data[0, 0].fill_(100),
    "other memory": lambda x: setattr(x, "data", x.data * 3),
    "in place": lambda x: x.detach().mul_(3),  # which counts a version
}


#: By .data the same object gets other memory, at the same version: here the same bytes,
#: seen otherwise.
VIEWS = {
    "sizes": lambda d: d.view(64, 32),
    "ndim": lambda d: d.view(-1),
    "dtype": lambda d: d.view(torch.bfloat16),
    "layout": lambda d: d.view(16, 4, 32).transpose(0, 1),
    "strides": lambda d: d.view(16, 4, 32).permute(2, 1, 0),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", [in_regions, saved])
def test_a_write_is_seen_with_and_without_a_version(codec, write, use):
    """Autograd, and torch's checkpoint, read the new values."""
    config = {"codec": codec, "min_numel": 0}
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    x = hidden()
    first = use(lambda t: (t @ weight).sin(), x, config)
    version = x._version
    WRITES[write](x)
    assert (x._version == version) == (write != "in place")
    second = use(lambda t: (t @ weight).cos(), x, config)
    fresh = x.detach().clone().requires_grad_() * 1
    want = torch.autograd.grad(use(lambda t: (t @ weight).cos(), fresh, config).sum(), weight)[0]
    assert torch.equal(torch.autograd.grad(second.sum(), weight)[0], want)
    del first


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("use", [in_regions, saved])
def test_the_same_bytes_seen_otherwise(view, use):
    config, x = {"codec": "raw", "min_numel": 0}, hidden()
    x.data = {"dtype": x.data.half(), "strides": x.data.view(16, 4, 32).permute(1, 2, 0)}.get(view, x.data)
    version = x._version
    first = use(torch.sin, x, config)
    x.data = VIEWS[view](x.data.as_strided((32, 64), (64, 1)))
    assert x._version == version
    weight = torch.ones_like(x.detach()).requires_grad_()
    second = use(lambda t: (t * weight).sum(), x, config)
    assert torch.equal(torch.autograd.grad(second, weight)[0], x)
    del first


def test_shared_bytes_that_a_user_resized():
    x = hidden()
    with gradckpt.compress_saved("raw"):
        first = x.sin()
        first.grad_fn._raw_saved_self.data.value.codes.resize_(1)
        with pytest.raises(RuntimeError, match=r"for a payload of \d+ uint8 bytes"):
            x.cos()
    del first


@pytest.mark.parametrize("codec", CODECS)
def test_equal_bytes_are_kept_once(codec):
    x = hidden()
    config = {"codec": codec, "min_numel": 0}
    ys = [gradckpt.checkpoint(torch.sin, x, compress=config) for _ in range(5)]
    assert stats("encoded", "shared") == (1, 4)
    live, peak = stats("live_bytes", "peak_live_bytes")
    assert peak <= 2 * live  # the second use is encoded, and compared
    gradckpt.checkpoint(torch.sin, x, compress="bf16")
    assert stats("encoded") == (2,)  # another codec has its own
    for y in ys:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    del ys, y
    assert stats("live_bytes") == (0,)


def test_uses_of_one_tensor_do_not_push_out_another():
    x, y, config = hidden(), hidden(seed=1), {"codec": "raw", "min_numel": 0}
    kept = [gradckpt.checkpoint(torch.sin, t, compress=config) for t in (y, *[x] * 20, y)]
    assert stats("encoded", "shared") == (2, 20)
    del kept


def test_encoder_states_of_a_decoder():
    """T5: twelve layers attend to one tensor."""
    states, h = hidden(4, 128, 64), hidden(4, 8, 64, seed=1)
    gradckpt.stats.reset()
    whole = gradckpt.codecs.encode(states).nbytes
    small = gradckpt.codecs.encode(h).nbytes
    for _ in range(12):
        h = gradckpt.checkpoint(
            lambda a, e: a + (a @ e.transpose(1, 2)).softmax(-1) @ e,
            h,
            states,
            compress={"codec": "int8", "min_numel": 0},
        )
    assert stats("encoded", "shared") == (13, 11)
    assert stats("live_bytes") == (whole + 12 * small,)
    assert gradckpt.stats()["peak_live_bytes"] <= 2 * whole + 12 * small
    h.sum().backward()


def test_stochastic_rounding_uses_the_noise_of_the_first():
    x = hidden()
    config = {"codec": "int8", "min_numel": 0, "stochastic": True}
    seen = []
    ys = [
        gradckpt.checkpoint(lambda t: seen.append(t.detach().clone()) or t.exp(), x, compress=config) for _ in range(2)
    ]
    assert stats("encoded", "shared") == (1, 1)
    other = gradckpt.checkpoint(torch.exp, x * 1, compress=config)
    assert stats("encoded") == (2,)
    seen.clear()
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in ys]
    assert torch.equal(*grads)
    del other


def test_what_outer_hooks_took_is_not_counted():
    """Bytes in the hands of an enclosing region's hooks are freed, or theirs."""
    x = hidden()

    def outer(h):
        for _ in range(6):
            h = gradckpt.checkpoint(torch.sin, h.sin(), compress={"codec": "int8", "min_numel": 0})
        return h.sin()

    y = gradckpt.checkpoint(outer, x)
    assert stats("encoded", "live_bytes") == (6, 0)
    assert gradckpt.stats()["peak_live_bytes"] == gradckpt.codecs.encode(x).nbytes
    y.sum().backward()
    assert stats("live_bytes") == (0,)
