"""A region that writes in place: to an argument that shares memory with another, and to what it has
saved before."""

import random
import weakref

import pytest
import torch

import gradckpt
from gradckpt._engine.argument_state import overlap

# ---- arguments that share memory ----


REFUSED = r"^gradckpt: a compressed region writes in place to an argument that shares memory with another, of shapes"


def hidden():
    torch.manual_seed(0)
    return torch.randn(64, 48, requires_grad=True)


def gradient(region, x, **options):
    """Of what ``region(run)`` returns, where ``run`` calls a function as a region,
    or plainly without options."""
    x.grad = None

    def run(function, *args, **kwargs):
        return gradckpt.checkpoint(function, *args, **options, **kwargs) if options else function(*args, **kwargs)

    region(run, x * 1.5).sin().sum().backward()
    return x.grad


def write_first(x, other):
    x.mul_(2.0)
    return x.sin().sum() + other.cos().sum() * 3


def write_view(x, other):
    x.view(-1)[7:100].zero_()
    return x.sin().sum() + other.cos().sum() * 3


def write_second(x, other):
    return write_first(other, x)


ALIASES = {
    "a view": lambda run, h: run(write_first, h, h.view(-1)),
    "a part": lambda run, h: run(write_second, h, h[:32]),
    "transposed": lambda run, h: run(write_view, h, h.t()),
    "detached, so kept": lambda run, h: run(write_first, h, h.detach()),
    "by keyword": lambda run, h: run(write_first, h, other=h.view(32, 96)),
    "detached by keyword": lambda run, h: run(write_first, h, other=h.detach()),
    "in a container": lambda run, h: run(lambda x, others: write_first(x, others["a"][0]), h, {"a": [h.view(-1)]}),
    "both in one": lambda run, h: run(lambda pair: write_first(*pair), (h, h.view(-1))),
    "the third": lambda run, h: run(lambda x, _, other: write_first(x, other), h, h.sin(), h.view(-1)),
}


@pytest.mark.parametrize("fake_quantize", [False, True], ids=["exact", "fake_quantize"])
@pytest.mark.parametrize("name", ALIASES)
def test_a_write_that_the_recompute_would_not_see_is_refused(name, fake_quantize):
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient(ALIASES[name], hidden(), compress={"codec": "raw", "fake_quantize": fake_quantize})


def test_the_next_call_is_unharmed():
    x = hidden()
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient(ALIASES["a view"], x, compress="raw")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # no hook of ours is left
    region = lambda run, h: run(lambda a: a.mul_(2.0).cos(), h)  # noqa: E731
    assert torch.equal(gradient(region, x, compress="raw"), gradient(region, x))


APART = {
    "chunks, the first written": lambda run, h: run(
        lambda q, k, v: q.mul_(2).sin() * k + v.cos(), h[:, :16], h[:, 16:32], h[:, 32:]
    ),
    "rows": lambda run, h: run(lambda a, b: a.mul_(2).sin() * b, h[:32], h[32:]),
    "heads": lambda run, h: run(
        lambda q, k, v: k.mul_(2).sin() * q + v.cos(),
        *(h.view(4, 16, 3, 4, 4).permute(2, 0, 3, 1, 4)[i] for i in range(3)),
    ),
    "every other": lambda run, h: run(lambda a, b: a.mul_(2).sin() * b, h[:, ::2], h[:, 1::2]),
    "another tensor": lambda run, h: run(lambda a, b: a.mul_(2).sin() * b, h, h + 1),
    "itself": lambda run, h: run(write_first, h, h),
    "read alone": lambda run, h: run(lambda a, b: a.sin().sum() * b.cos().sum(), h, h.view(-1)),
}


@pytest.mark.parametrize("name", APART)
def test_what_does_not_overlap_or_is_read_alone_stays_compressed(name):
    x = hidden()
    exact = gradient(APART[name], x).clone()
    gradckpt.stats.reset()
    found = gradient(APART[name], x, compress={"codec": "raw", "min_numel": 1})
    assert gradckpt.stats()["compressed"] >= 2
    assert torch.equal(found, exact)


def test_a_tensor_alone_is_not_held_for_the_check():
    def takes(items):
        x = items.pop()
        ref = weakref.ref(x)
        y = x * 2
        del x
        gone.append(ref() is None)
        return y

    gone = []
    gradckpt.checkpoint(takes, [hidden() * 1.5], compress="raw")
    assert gone == [True]


def test_selective_recompute_too():
    h = hidden() * 1.5
    with pytest.raises(RuntimeError, match=REFUSED):
        gradckpt.SelectiveRecompute.apply(write_first, None, h, h.view(-1), compress="raw")


def random_view(base, rng):
    """Of ``base`` by slices, selections, reshaping, permutation and expansion."""
    x = base
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(6)
        dim = rng.randrange(x.dim()) if x.dim() else None
        if kind == 0 and dim is not None:
            begin = rng.randrange(x.shape[dim] + 1)
            x = x.narrow(dim, begin, rng.randrange(x.shape[dim] - begin + 1))
        elif kind == 1 and dim is not None:
            x = x[(slice(None),) * dim + (slice(rng.randrange(3), None, rng.randrange(1, 4)),)]
        elif kind == 2 and dim is not None and x.shape[dim]:
            x = x.select(dim, rng.randrange(x.shape[dim]))
        elif kind == 3 and x.dim() > 1:
            x = x.permute(*rng.sample(range(x.dim()), x.dim()))
        elif kind == 4:
            x = x.unsqueeze(0).expand(2, *x.shape)
        elif x.is_contiguous() and x.numel() % 2 == 0:
            x = x.view(2, -1) if x.numel() else x
    return x


def test_overlap_is_that_of_the_elements():
    """Never missed; and, of views that slicing makes, hardly ever claimed in vain."""
    rng = random.Random(0)
    vain = apart = 0
    for _ in range(4000):
        base = torch.arange(2 * 4 * 6 * 3).view(rng.choice([(2, 4, 6, 3), (8, 18), (144,), (4, 12, 3)]))
        a, b = random_view(base, rng), random_view(base, rng)
        shared = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
        claimed = overlap(a, b)
        assert claimed or not shared, (a.shape, a.stride(), a.storage_offset(), b.shape, b.stride(), b.storage_offset())
        apart += not shared
        vain += claimed and not shared
    assert apart > 500
    assert vain < 0.1 * apart


# ---- one tensor, twice ----


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("config", ["raw", "int8", gradckpt.CompressionConfig("int8", fake_quantize=True)], ids=str)
def test_an_argument_given_twice_is_one_object_in_both_runs(config, nested):
    """torch's MultiheadAttention asks ``key is query`` and takes another path when it is."""
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    seen = []

    def region(q, k, rest, v=None):
        seen.append((q is k, k is v, rest["other"][0] is q))
        return attention(q, k, v)[0]

    def run(function, *args, **kwargs):
        return gradckpt.checkpoint(function, *args, **kwargs, compress=config)

    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    h = x * 1
    function = (lambda *args, **kwargs: run(region, *args, **kwargs)) if nested else region
    gradckpt.stats.reset()
    y = run(function, h, h, {"other": [h]}, v=h)
    counts = gradckpt.stats()
    # The hooks of an enclosing region see each argument, one object or not.
    assert (counts["compressed"], counts["encoded"]) == ((8, 5) if nested else (4, 1))
    (g,) = torch.autograd.grad(y.sum(), x)
    assert len(seen) > 1
    assert set(seen) == {(True, True, True)}
    (want,) = torch.autograd.grad(attention(x, x, x)[0].sum(), x)
    assert torch.allclose(g, want, atol=0 if config == "raw" else 0.1 * want.abs().max())


# ---- what was saved before ----


TEXT = r"^gradckpt: a tensor of shape \(4, 8\) was changed in place after this region had saved it; write x = x \+ y$"


def saved(x):
    x = x * 1
    y = x.sin()
    x.add_(1)
    return y * x


def scaled(x):
    return torch.tanh(x * 2)  # does not save x


def of_inner_region(x):
    x = x * 1
    h = gradckpt.checkpoint(scaled, x)
    x += h
    return x * torch.sigmoid(x.clone())


def unused(x):
    """The backward does not need it."""
    x = x * 1
    y = x.sin()
    x.add_(1)
    return y, x * 2


def harmless(x):
    x = x * 1
    x.add_(1)
    y = x.sin()
    y.mul_(2)
    return y.exp_()


def draw():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [saved, of_inner_region])
def test_it_raises(function, early_stop):
    loss = gradckpt.checkpoint(function, draw(), early_stop=early_stop).sum()
    with pytest.raises(RuntimeError, match=TEXT):
        loss.backward()


def test_what_the_backward_does_not_need_may_change():
    x = draw()
    gradckpt.checkpoint(unused, x)[1].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_writes_before_the_save_and_into_results():
    x, y = draw(), draw()
    harmless(x).sum().backward()
    gradckpt.checkpoint(harmless, y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_statistics_that_are_put_back_are_no_write():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)).train()
    x, y = draw(), draw()
    model(x).sum().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gradckpt.checkpoint(model, y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), exact, strict=True))
