"""compress_saved() in compiled code where rounding would be far from harmless: errors stay as small
as without the compiler."""

import pytest
import torch
import torch.nn.functional as F
from compile_cases import fresh_dynamo  # noqa: F401
from torch import nn

import gradckpt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BACKENDS = ("aot_eager", "inductor")
int8, int4 = gradckpt.compress_saved("int8"), gradckpt.compress_saved("int4")


def gradient(function, x, of):
    return torch.autograd.grad(function(x), of)[0]


def apart(found, exact):
    return float((found - exact).norm() / exact.norm())


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def linears(n, **options):
    torch.manual_seed(0)
    return [nn.Linear(128, 128, **options) for _ in range(n)]


def data(rows=64):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "small", [lambda h: h[1:] - h[:-1], lambda h: h - h.mean(0), lambda h: (h[1:] - h[:-1]) * 2 + 1e-3]
)
def test_differences_of_large_values(small, backend):
    """The partitioner would make them again of what a codec has rounded."""
    a, b, c = linears(3, bias=False)
    offsets, x = torch.randn(128, generator=torch.Generator().manual_seed(2)) * 100, data()

    def function(x):
        h = a(x) + offsets
        return b(F.gelu(small(h))).square().mean() + c(h).square().mean() * 1e-9

    exact = gradient(function, x, a.weight)
    eager = apart(gradient(int8(function), x, a.weight), exact)
    assert apart(gradient(compiled(int8(function), backend), x, a.weight), exact) < 3 * eager + 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_masked_as_a_whole(backend):
    torch.manual_seed(0)
    bias, a, x = nn.Parameter(torch.zeros(64, 64)), nn.Linear(64, 64), torch.randn(2, 64, 64)
    masked = torch.zeros(64, 64, dtype=torch.bool)
    masked[3] = True

    def function(x):
        q = a(x).view(2, 64, 1, 64).transpose(1, 2)
        mask = bias.masked_fill(masked, float("-inf"))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()

    exact = gradient(function, x, a.weight)
    assert apart(gradient(compiled(int8(function), backend), x, a.weight), exact) < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_log_softmax(backend):
    """16 bits do not hold its values."""
    (a, b), x, masked = linears(2), data(), torch.arange(128) % 2 == 0

    def entropy(x):
        log = a(x).masked_fill(masked, -1e9).log_softmax(-1)
        return (log.exp() * log).sum(-1).mean()

    def product(x):
        return b(a(x).masked_fill(masked, -1e5).log_softmax(-1)).square().mean()

    for function, of in ((entropy, a.weight), (product, b.weight)):
        exact = gradient(function, x, of)
        assert apart(gradient(compiled(int8(function), backend), x, of), exact) < 0.01


def test_an_exception_in_a_block():
    """The block around it goes on with its own settings."""
    (a, b, c), x = linears(3), data()

    @int4
    def failing(h):
        h = F.gelu(h)
        raise ValueError

    def function(x):
        with gradckpt.compress_saved("int8"):
            h = a(x)
            try:
                h = failing(h)
            except ValueError:
                h = F.gelu(h)
            return b(F.gelu(c(h))).square().mean()

    exact = gradient(lambda x: b(F.gelu(c(F.gelu(a(x))))).square().mean(), x, a.weight)
    eager = apart(gradient(function, x, a.weight), exact)
    assert apart(gradient(compiled(function), x, a.weight), exact) < 2 * eager


def test_steep_factors_across_graphs():
    """Code outside of a graph may have made one factor of the other."""
    (a,), x = linears(1), data()

    def function(x, breaks):
        with gradckpt.compress_saved("int8"):
            h = a(x)
            q = 1 / (h * h + 1e-4)
        if breaks:
            torch._dynamo.graph_break()
        with gradckpt.compress_saved("int8"):
            return (h * q * 1e-2).sum(-1).square().mean()

    exact = gradient(lambda x: (lambda h: (h / (h * h + 1e-4) * 1e-2).sum(-1).square().mean())(a(x)), x, a.weight)
    assert apart(gradient(torch.compile(lambda x: function(x, True), backend="aot_eager"), x, a.weight), exact) < 1e-5


def test_decisions_hold_for_all_sizes():
    """Of few rows a sum may be small because one of them is."""
    torch.manual_seed(0)
    a, b = nn.Linear(128, 1024), nn.Linear(128, 1024)

    def function(x):
        return (a(x) * b(x)).square().sum(0).sqrt().log().mean()

    run = compiled(int8(function), dynamic=True)
    for rows in (64, 2):
        exact = gradient(function, data(rows), a.weight)
        eager = apart(gradient(int8(function), data(rows), a.weight), exact)
        assert apart(gradient(run, data(rows), a.weight), exact) <= eager + 1e-5


def kept(function):
    """Bytes that cross to the backward."""
    sizes = {}

    def pack(x):
        if not isinstance(x, nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    del result
    return sum(sizes.values())


def test_what_a_block_reads_and_has_not_made():
    first, last = linears(2)
    model, x = nn.Sequential(first, last), data()
    whole = kept(lambda: torch.compile(model, backend="aot_eager", fullgraph=True)(x))
    torch._dynamo.reset()
    gradckpt.enable(model, "int8", recompute=False, modules=[last])
    gradckpt.stats.reset()
    found = kept(lambda: torch.compile(model, backend="aot_eager", fullgraph=True)(x))
    assert gradckpt.stats()["compiled_tensors"] == 1
    assert whole - found >= 0.7 * x.nbytes


def test_rules_beside_an_exact_codec():
    (a, b), x = linears(2), data()

    def function(x):
        return b(F.gelu(a(x))).square().mean()

    sizes = {}
    for codec, operators in (("raw", {}), ("raw", {"linear": "int8"})):
        torch._dynamo.reset()
        block = gradckpt.compress_saved({"codec": codec, "operators": operators})
        sizes[bool(operators)] = kept(lambda block=block: compiled(block(function))(x))
    assert sizes[True] < sizes[False] - 0.7 * x.nbytes


def test_views_of_weights_from_outside():
    weight = nn.Parameter(torch.randn(256, 128, generator=torch.Generator().manual_seed(0)) / 11)
    (a,), x = linears(1), data()
    block = compiled(int4(lambda x, w: (x @ w).square().mean()))

    def of(loss):
        return torch.autograd.grad(loss, (x_of,))[0]

    x_of = a(x).detach().requires_grad_()
    exact = of((x_of @ weight[:128].t()).square().mean())
    gradckpt.stats.reset()
    found = of(block(x_of, weight[:128].t()))
    assert gradckpt.stats()["compiled_tensors"] <= 1
    eager = of(int4(lambda x, w: (x @ w).square().mean())(x_of, weight[:128].t()))
    assert apart(found, exact) <= apart(eager, exact) + 1e-6
