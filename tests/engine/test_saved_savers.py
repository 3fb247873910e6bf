"""compress_saved() knows the operator that saves: what is encoded is a printed table, and the page
has it; all else is exact. What waits is found, or stays."""

import gc
import re

import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from small_models import (
    EXACT,
    SMALL,
    activation,
    fresh,  # noqa: F401 (a fixture of every test here)
    int8_bytes,
    payload_of,
    watch,
)
from torch import nn

import gradckpt
from gradckpt import _C, compress_saved

UNKNOWN = "not known which operator saves it"


def kept():
    return {reason: n for reason, n in gradckpt.stats()["uncompressed"].items() if reason in (EXACT, UNKNOWN)}


def both(function, x, config=SMALL):
    """Gradients of `function` on a non-leaf, without and with compress_saved()."""
    leaf = x.detach().clone().requires_grad_()
    results = function(leaf * 1)
    if any("NotImplemented" in t.grad_fn.name() for t in (results if isinstance(results, tuple) else (results,))):
        pytest.skip("this torch has no derivative of it")
    weights = None
    grads = []
    for compress in (None, config):
        torch.manual_seed(3)
        y = compress_saved(compress)(function)(leaf * 1)
        y = y if isinstance(y, tuple) else (y,)
        weights = [torch.randn_like(t) for t in y] if weights is None else weights
        grads += torch.autograd.grad(y, leaf, weights)
    return grads


def weighed(y):
    """A scalar of y: what uses a result is known, and amplifies nothing."""
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(4))).sum() * 1


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "saved.md").read_text().split("<!-- savers -->")[1].split("<!-- /savers -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `?(\w+)`? \| (.+) \|$", page, re.M)
    lines = compress_saved.table().partition("\n\n")[0].splitlines()
    assert [tuple(re.split(r"\s{2,}", line)) for line in lines] == rows


# ---- what compares, divides or subtracts ----


INDEX = torch.arange(64).repeat(64, 1) % 8
TARGET = torch.arange(64 * 64).view(64, 64) % 2 * 1.0

#: More of single operators: test_saved_operators.py, test_one_truth.py.
COMPOSITIONS = {
    "norm(inf)": lambda x: x.norm(float("inf"), dim=-1),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=-1)),
    "dist(inf)": lambda x: torch.dist(x, x.flip(0) * 1, p=float("inf")),
    "logsumexp": lambda x: x.logsumexp(-1),
    "amax": lambda x: x.amax(-1),
    "scatter_reduce": lambda x: torch.zeros(8, 64).scatter_reduce(0, INDEX, x, "amax", include_self=False),
    "cdist(inf)": lambda x: torch.cdist(x, x.flip(0) * 1, p=float("inf")),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.full((8,), 8)),
    "normalize(p=inf)": lambda x: F.normalize(x, p=float("inf")) ** 2,
    "relu_": lambda x: (x * 1).relu_(),
    "relu_ of a view": lambda x: (x * 1).view(-1, 32).relu_() * 2,
    "bce of a sigmoid": lambda x: F.binary_cross_entropy((3 * x).sigmoid(), TARGET),
    "bce of a clamped sigmoid": lambda x: F.binary_cross_entropy((3 * x).sigmoid().clamp(1e-6, 1 - 1e-6), TARGET),
    "softmax.log": lambda x: x.repeat(1, 16)[:, :1000].softmax(-1).log()[:, 0],
    "softmax.log with epsilon": lambda x: (x.repeat(1, 16)[:, :1000].softmax(-1) + 1e-9).log()[:, 0],
    "pairwise sqrt": lambda x: ((x[:, None, :8] - x[None, :, :8]).pow(2).sum(-1) + 1e-6).sqrt(),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "x / (norm + eps)": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
    "x / clamp(norm)": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6),
    "x / std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "x / amax": lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=1e-6),
    "atanh of tanh": lambda x: ((2 * x).tanh() * 0.999).atanh(),
    "log of 1 - tanh ** 2": lambda x: (1 - (2 * x).tanh().square() + 1e-6).log(),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("codec", ["int8", pytest.param("int4", marks=pytest.mark.soak)])
def test_what_compares_or_divides_gets_exact_values(name, codec):
    """Also when the input is in eight places, encoded or not; with rows of different size."""
    rows = torch.logspace(-2, 2, 64)[torch.randperm(64)][:, None]
    hostile = [torch.randn(64, 64) * rows, torch.randn(64, 64).round()]
    for x in [torch.randn(64, 64), *([] if name == "pairwise sqrt" else hostile)]:  # of which it is a square's root
        exact, got = both(COMPOSITIONS[name], x, {"codec": codec, "min_numel": 1})
        finite = exact.isfinite()
        assert got[finite].isfinite().all()
        error = (got[finite] - exact[finite]).norm() / exact[finite].norm().clamp_min(1e-30)
        assert error < (0.05 if codec == "int8" else 0.4), float(error)


ROUNDED = {
    "linear": lambda x: F.linear(x, torch.ones(64, 128).requires_grad_() * 0.1),
    "mul": lambda x: x * x.flip(0),
    "conv": lambda x: F.conv1d(x.view(4, 16, 128), torch.ones(16, 16, 3).requires_grad_() * 0.1),
    "layer_norm": lambda x: F.layer_norm(x, (128,)),
    "layer_norm, narrow": lambda x: F.layer_norm(x.view(256, 32), (32,)),
    "layer_norm, 2.5 groups": lambda x: F.layer_norm(x.view(-1)[:8000].view(25, 320), (320,)),
    "group_norm": lambda x: F.group_norm(x.view(4, 16, 128), 4),
    "group_norm, narrow": lambda x: F.group_norm(x.view(8, 16, 64), 16),
    "batch_norm": lambda x: F.batch_norm(x.view(4, 16, 128), None, None, training=True),
    "rms_norm": lambda x: F.rms_norm(x, (128,)),
    "rms_norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "silu": F.silu,
    "gelu": F.gelu,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(64)),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 32, 128) * s for s in (1.0, 0.9, 0.8))),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(
        *(x.view(1, 2, 32, 128) * s for s in (1.0, 0.9, 0.8)), dropout_p=0.1
    ),
    "relu": F.relu,
    "max_pool": lambda x: F.max_pool1d(x.view(4, 16, 128), 2),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_listed_is_encoded_and_close(name):
    x = torch.randn(64, 128)
    for scale in (0.1, 1.0, 3.0):
        if name == "attention" and scale > 1:
            scale = 1.5
        gradckpt.stats.reset()
        exact, got = both(lambda t: weighed(ROUNDED[name](t)), x * scale)
        assert gradckpt.stats()["compressed"] > 0
        assert UNKNOWN not in kept()
        assert (got - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("width", [32, 96, 192, 320])
def test_narrow_rows_of_norms_are_exact_beside_larger_ones(width):
    function, x = (lambda x: F.layer_norm(x, (width,))), torch.randn(64, width)
    for k in (0, 31, 63):
        for change in (
            x.clone().index_fill_(0, torch.tensor([k]), 0.0),
            x.clone().index_copy_(0, torch.tensor([k]), 10 * x[k : k + 1]),
        ):
            exact, got = both(function, change)
            assert torch.equal(got, exact)


def test_attention_with_dropout_keeps_nothing_exact():
    """On the CPU torch makes it of products and a softmax of its own."""
    x = torch.randn(64, 128).requires_grad_() * 1
    y = compress_saved(SMALL)(ROUNDED["attention with dropout"])(x)
    assert EXACT not in kept()
    y.sum().backward()


def attend(x, **options):
    return F.scaled_dot_product_attention(*(x.view(1, 2, 32, 128) * 1 for _ in range(3)), **options)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(32, 32)}], ids=["plain", "causal", "mask"]
)
def test_attention_reads_what_fits_together(options):
    """However sharp its softmax is: the result and the log-sum-exp are made again, from
    what is restored of the others."""
    x = torch.randn(64, 128) * 30
    made = attend(x.clone().requires_grad_() * 1, **options).grad_fn
    assert type(made).__name__ in {row[0] for row in _C.saved_roles()}
    exact, got = both(lambda x: attend(x, **options), x)
    assert kept() == {}
    assert (got - exact).norm() <= 0.05 * exact.norm()


def test_attention_with_other_hooks_around_stays_exact():
    def within(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), gradckpt.compress_saved(SMALL):
            y = attend(x)
            return y.sin()

    exact, got = both(within, torch.randn(64, 128))
    assert torch.equal(exact, got)


def test_attention_gives_its_gradient_twice():
    x = torch.randn(64, 128, requires_grad=True)
    y = gradckpt.compress_saved(SMALL)(attend)(x * 1)
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(y.grad_fn._saved_output, y.grad_fn._saved_output)
    assert (y.grad_fn._saved_output - y).norm() < 0.02 * y.norm()


# ---- what would be amplified ----


EPS = 1e-3


class OwnPole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t.rsqrt()

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad * ctx.saved_tensors[0] ** -1.5


def pairs(t):
    return (t * t).view(64, 64, 2)


#: From a tensor, by a product, to something that is steep where the product is small.
AMPLIFIED = {
    "rsqrt": lambda t: (t * t + EPS).rsqrt(),
    "rsqrt, in place": lambda t: (t * t + EPS).rsqrt_(),
    "one over": lambda t: 1 / (t * t + EPS),
    "a quotient of tensors": lambda t: torch.ones(()) / (t * t + EPS),
    "log": lambda t: (t.pow(2) + EPS).log(),
    "sqrt of a view": lambda t: ((t * t).view(-1) * 2).clamp(min=EPS).sqrt(),
    "negative power": lambda t: (t * t + EPS) ** -1.5,
    "power by a tensor": lambda t: (t * t + EPS) ** torch.full((64, 128), -0.5),
    "addcdiv": lambda t: torch.addcdiv(t, torch.ones_like(t), t * t + EPS),
    "xlogy": lambda t: torch.xlogy(torch.ones_like(t), t * t + EPS),
    "atan2": lambda t: torch.atan2(t * t, torch.full_like(t, EPS)),
    "gaussian": lambda t: (-t * t).exp(),
    "functions on the way": lambda t: (t * t).tanh().sinh().add(EPS).rsqrt(),
    "fifteen sums on the way": lambda t: sum([t * t, *[0.0] * 13], EPS).rsqrt(),
    "masked_fill": lambda t: (t * t + EPS).masked_fill(t > 30, 1.0).rsqrt(),
    "where": lambda t: torch.where(t > 0, (t * t + EPS).rsqrt(), t),
    "relu": lambda t: F.relu(t * t - 1e-5).add(EPS).rsqrt(),
    "lerp": lambda t: torch.lerp(t * t, t * t, 0.5).add(EPS).rsqrt(),
    "nan_to_num": lambda t: (t * t + EPS).nan_to_num().rsqrt(),
    "addcmul": lambda t: torch.addcmul(torch.tensor(EPS), t, t).rsqrt(),
    "float64": lambda t: ((t * t).double() + EPS).rsqrt(),
    "cat": lambda t: torch.cat([t * t + EPS, t.new_ones(1, 128)]).rsqrt()[:64],
    "stack": lambda t: torch.stack([t * t + EPS, t * t + 1]).rsqrt()[0],
    "chunk": lambda t: (t * t + EPS).chunk(2, -1)[0].rsqrt(),
    "index": lambda t: (t * t + EPS)[torch.arange(64)].rsqrt(),
    "half of it": lambda t: (t * t + EPS)[:, :64].rsqrt(),
    "sum of one": lambda t: (t * t).view(64, 128, 1).sum(-1).add(EPS).rsqrt(),
    "sum of two": lambda t: pairs(t).sum(-1).add(EPS).rsqrt(),
    "mean of two by two": lambda t: F.avg_pool2d((t * t)[None], 2).add(EPS).rsqrt(),
    "norm of two": lambda t: torch.linalg.vector_norm(pairs(t), dim=-1),
    "matrices of one": lambda t: torch.bmm(t.view(-1, 1, 1), t.view(-1, 1, 1)).add(EPS).rsqrt(),
    "matrices of two": lambda t: torch.bmm(t.view(-1, 1, 2), t.view(-1, 2, 1)).add(EPS).rsqrt(),
    "a norm's weight": lambda t: (F.rms_norm(t, (128,), SCALE * t.mean()).square() + EPS).rsqrt(),
    "added to a product of matrices": lambda t: torch.addmm(t * t + EPS, SQUARE, WIDE.t().abs()).rsqrt(),
    "saturated": lambda t: (t * F.silu(t)).tanh(),
    "a quotient": lambda t: (y := t * t) / (y.abs() + EPS),
    "a quotient, steep first": lambda t: (y := t * t, (y.abs() + EPS).reciprocal() * y)[1],
    "a fraction and its logarithm": lambda t: (y := t.square() + EPS) * y.log(),
    "times something steep": lambda t: (t * t) * (t.abs() + EPS).reciprocal(),
    "times a root": lambda t: t**3 * (t.abs() + EPS).rsqrt(),
    "a mask that is gone": lambda t: (t * (t > 0) + 1).log(),
    "a Function of the user": lambda t: OwnPole.apply(t * t + EPS),
    "after a product of matrices": lambda t: (y := t * t, y @ WIDE, (y + EPS).rsqrt())[-1],
    "after a sine": lambda t: (y := t * t, y.sin() @ WIDE, (y + EPS).rsqrt())[-1],
    "before a sine": lambda t: (y := t * t, (y + EPS).rsqrt(), y.sin() @ WIDE)[1],
    "beside a sum": lambda t: (y := t * t, (y.sum() * 1e-9).exp() + (y + EPS).rsqrt())[-1],
}
WIDE, SCALE, SQUARE = nn.Parameter(torch.randn(128, 64)), torch.randn(128), torch.randn(64, 128)[:, :64].abs()


@pytest.mark.parametrize("name", AMPLIFIED)
def test_what_a_pole_would_amplify_stays_exact(name):
    exact, got = both(lambda t: weighed(AMPLIFIED[name](t)), torch.randn(64, 128) * 16)
    assert torch.equal(exact, got)


@pytest.mark.parametrize("form", ["with", "enable"])
def test_a_pole_that_nothing_follows_is_refused_in_the_backward(form):
    """Nothing leads to its node in the forward. The backward runs it before the product."""

    class Net(nn.Module):
        def forward(self, t):
            y = (factor := t * 2) * factor
            del factor
            z = (y @ WIDE) @ WIDE.t() @ WIDE
            return z.sum() * 1e-3 + (y + EPS).log().sum()

    x, net = activation(64, 128), Net().train()
    if form == "enable":
        gradckpt.enable(net, SMALL, recompute=False, modules=net)
        loss = net(x)
    else:
        with compress_saved(SMALL):
            loss = net(x)
    with pytest.raises(RuntimeError, match="LogBackward0 amplifies the error of what MulBackward0"):
        loss.backward()
    del loss
    torch.ones((), requires_grad=True).exp().backward()  # until then torch's engine keeps what did not run
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_a_product_that_a_pole_uses_later_is_taken_back_or_refused(codec):
    """Its factors are payloads by then, as a product of matrices that uses it was seen."""
    config, seen = {**SMALL, "operators": {"product": codec}}, []

    def function(t, keep):
        factor = t * 2
        y = factor * factor
        kept = factor if keep else None
        factor = None
        (y @ WIDE) @ WIDE.t() @ WIDE
        seen.append(gradckpt.stats()["compressed"])
        return (y + EPS).rsqrt().sum() + (kept is not None)

    x = torch.randn(64, 128) * 16
    exact, got = both(lambda t: function(t, True), x, config)
    assert torch.equal(exact, got)
    if codec == "lossless":
        exact, got = both(lambda t: function(t, False), x, config)
        assert torch.equal(exact, got)
    else:
        said = "RsqrtBackward0 amplifies the error of what MulBackward0 has stored in int8"
        with pytest.raises(RuntimeError, match=said):
            both(lambda t: function(t, False), x, config)
        with compress_saved(config):  # also of who tries once more
            y = (factor := x.clone().requires_grad_() * 2) * factor
            del factor
            (y @ WIDE) @ WIDE.t() @ WIDE
            for _ in range(2):
                with pytest.raises(RuntimeError, match=said):
                    (y + EPS).rsqrt()
    assert seen[2] > 0  # behind two runs of the plain function


def recurrence(t, end=lambda h: h.sum()):
    h, gate = t, torch.rand(64, 128, generator=torch.Generator().manual_seed(1))
    for _ in range(40):
        h = h * t + gate * h
    return end(h) * 1


def test_a_long_chain_of_products_does_not_wait_for_its_end():
    both(recurrence, torch.rand(64, 128) / 2)
    assert gradckpt.stats()["compressed"] >= 2 * 40 - 24


def test_what_a_pole_at_the_far_end_of_a_chain_would_amplify_is_refused():
    x = torch.rand(64, 128) / 2
    said = "LogBackward0 amplifies the error of what MulBackward0 has stored in int8; pass compress="
    with pytest.raises(RuntimeError, match=said):
        both(lambda t: recurrence(t * 1, lambda h: (h + EPS).log().sum()), x)
    exactly = {**SMALL, "operators": {"product": None}}
    exact, got = both(lambda t: recurrence(t * 1, lambda h: (h + EPS).log().sum()), x, exactly)
    assert torch.equal(exact, got)


def test_a_product_that_only_feeds_harmless_operators_is_encoded():
    for function in (lambda t: (t * t + 1).sin(), lambda t: (t * t).sum(-1).sqrt(), lambda t: (t * t) / 3):
        gradckpt.stats.reset()
        both(lambda t, f=function: f(t).sum() * 1, torch.randn(64, 128))
        assert gradckpt.stats()["compressed"] == 2  # the same tensor twice


# ---- what waits ----


def test_what_the_last_operator_of_a_block_saves_stays_until_another_block_finds_it():
    x, w = activation(64, 64), nn.Parameter(torch.randn(64, 64))
    with compress_saved(SMALL):
        y = x @ w
    assert kept() == {UNKNOWN: 1}
    assert gradckpt.stats()["live_bytes"] == x.nbytes
    with compress_saved(SMALL):
        z = y @ w
    assert kept() == {UNKNOWN: 1}
    assert gradckpt.stats()["live_bytes"] == int8_bytes(x.shape) + y.nbytes
    assert payload_of(y.grad_fn._raw_saved_self.data).codec == "int8"
    assert isinstance(z.grad_fn._raw_saved_self.data.value, torch.Tensor)
    del y, z
    assert gradckpt.stats()["live_bytes"] == 0


def test_what_is_written_to_while_it_waits_raises_as_in_plain_autograd():
    x, w = activation(64, 64), nn.Parameter(torch.randn(64, 64))
    with compress_saved(SMALL):
        y = x @ w
        x.add_(1)
        y.square()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_at_most_64_tensors_wait():
    xs, w = [activation(16, 32) for _ in range(70)], nn.Parameter(torch.randn(32, 16))

    @compress_saved(SMALL)
    def run():
        return [x @ w for x in xs]

    ys = run()
    assert kept() == {UNKNOWN: 6}
    assert gradckpt.stats()["compressed"] == 64
    sum(y.sum() for y in ys).backward()


def test_nothing_waits_for_a_node_that_1024_others_have_followed():
    x, w = activation(64, 64), nn.Parameter(torch.randn(64, 64))

    @compress_saved(SMALL)
    def run():
        first, z = x @ w, activation(2, 2)
        for _ in range(1100):
            z = z + 1
        return first + (x * 1 @ w)  # its save sends the first one away

    run().sum().backward()
    assert kept() == {UNKNOWN: 1}


class Saves(torch.autograd.Function):
    """Saves its input, its result, or both; and may run operators with grad on before."""

    @staticmethod
    def forward(ctx, x, what, inside):
        if inside:
            with torch.enable_grad():
                (x.detach().requires_grad_() @ torch.eye(64)).square().sum()
        y = x.exp()
        ctx.save_for_backward(*[{"x": x, "y": y}[name] for name in what])
        ctx.what = what
        return y

    @staticmethod
    def backward(ctx, g):
        saved = dict(zip(ctx.what, ctx.saved_tensors, strict=True))
        return g * (saved["y"] if "y" in saved else saved["x"].exp()), None, None


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", ["x", "y", "xy"])
def test_functions_of_the_user_get_exact_values_and_hold_no_cycle(what, inside):
    x = torch.randn(64, 64)
    exact, got = both(lambda t: Saves.apply(t, what, inside), x)
    assert torch.equal(got, exact)
    gc.collect()
    gc.disable()
    try:
        h = activation(64, 64)
        with compress_saved(SMALL):
            y = Saves.apply(h, what, inside)
        node = watch(y.grad_fn)
        del y
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoint", [gradckpt.checkpoint, torch.utils.checkpoint.checkpoint])
def test_inside_a_region_the_forward_runs_once(checkpoint):
    """What backward needs is found out without asking the region for what it saved,
    which would recompute it."""
    calls, width = [], 64

    def region(t):
        calls.append(torch.is_grad_enabled())
        with compress_saved(SMALL):
            t = F.layer_norm(t, (width,)) + t
            t = t * F.group_norm(t.view(8, 8, width), 8).view_as(t)
            t = F.batch_norm(t.view(32, 2, width), None, None, training=True).view_as(t)
            h = t.view(1, 8, 8, width)
            t = F.scaled_dot_product_attention(h, h.cos(), h.sin()).view_as(t)
            return t.amax(-1, keepdim=True) + t

    x = torch.randn(64, width, requires_grad=True)
    exact = torch.autograd.grad(region(x).square().sum(), x)[0]
    calls.clear()
    y = checkpoint(region, x * 1, use_reentrant=False)
    assert len(calls) == 1
    got = torch.autograd.grad(y.square().sum(), x)[0]
    assert len(calls) == 2
    assert (got - exact).norm() < 0.05 * exact.norm()


def test_a_function_whose_number_is_that_of_an_inner_product_is_not_taken_for_it():
    w = torch.eye(64).requires_grad_()
    seen = []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                seen.append(x.detach().requires_grad_() @ w)
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    def run(x):
        y = Inner.apply(x)
        return y + seen[-1].square()

    exact, got = both(run, torch.randn(64, 64))
    assert torch.equal(got, exact)


# ---- a storage is kept once ----


@pytest.mark.parametrize("first", ["exact", "encoded"])
def test_what_one_operator_needs_exactly_is_kept_once(first):
    x, w = activation(64, 64), nn.Parameter(torch.randn(64, 64))

    @compress_saved(SMALL)
    def run():
        if first == "exact":
            return x.sin(), x @ w, x.view(-1).square().sum()
        return x @ w, x.view(-1).square().sum(), x.sin()

    ys = run()
    s = gradckpt.stats()
    assert (s["live_bytes"], s["compressed"], kept()) == (0, 0, {EXACT: 3})
    grads = torch.autograd.grad(sum(y.sum() for y in ys), x)
    expected = torch.autograd.grad(x.sin().sum() + (x @ w).sum() + x.square().sum(), x)
    assert torch.allclose(grads[0], expected[0], atol=1e-5)


def test_a_scale_per_row_is_exact():
    x = activation(64, 128)
    y = compress_saved({"codec": "int8", "min_numel": 1})(lambda: (x * x.sum(-1, keepdim=True).expand(64, 128)).sum())()
    assert kept() == {EXACT: 1}
    assert gradckpt.stats()["compressed"] == 1
    y.backward()


# ---- around and inside ----


def test_hooks_around_get_what_waits_at_the_end_of_the_block():
    seen = []

    def pack(t):
        seen.append(t.dtype)
        return t.clone()

    leaf, w = torch.randn(64, 64, requires_grad=True), nn.Parameter(torch.randn(64, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with compress_saved(SMALL):
            y = (leaf * 1 @ w) @ w
            assert seen == [
                torch.float32,
                torch.float32,
                torch.uint8,
                torch.uint8,
            ]  # w twice, leaf * 1; the product waits
        assert seen[4:] == [torch.float32]
    y.sum().backward()
    assert leaf.grad.isfinite().all()
