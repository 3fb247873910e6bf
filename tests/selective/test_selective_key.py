"""The dispatch key that named operators are caught on:
nothing of torch or of other libraries changes by it."""

import contextlib
import functools
import itertools
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from checkout import HELPERS
from processes import printed_by
from selective_ways import Watch, aten, gradients, kept, key_is_on, leaf, same
from selective_ways import _nothing_left_behind as _nothing_left_behind
from torch._subclasses.fake_tensor import FakeTensorMode

import gradckpt
from gradckpt._engine import catching
from gradckpt._engine.catching import WRITING_KERNELS
from gradckpt._engine.selective import contexts_of

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
checkpoint = gradckpt.checkpoint


def stdout_of(script, *arguments):
    """What it prints; no warning, no exception."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    torchs = "terminate called without an active exception\n"  # a thread that waits for the GIL in C++, at exit
    assert done.stderr in ("", torchs)
    return done.stdout


# ---- torch's own key for fake tensors, which others may claim ----

CLAIMED = """
import logging, sys, torch
when = sys.argv[1]
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s: %(message)s")
if when == "no fallback":
    torch._C._dispatch_has_backend_fallback = lambda key: False
libraries = []

def claim(moment):
    if moment == when and not libraries:
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(torch.library.fallthrough_kernel, "Fake")
        one = torch.library.Library("aten", "IMPL")
        one.impl("gt.Tensor", torch.library.fallthrough_kernel, "Fake")
        libraries[:] = [everything, one]

claim("before the import")
import gradckpt
claim("after the import")
for policy in ([], {}, gradckpt.policies.Policy([])):  # what is registered for the first policy is registered once
    gradckpt.compat.create_selective_checkpoint_contexts(policy)
torch.manual_seed(0)
data = torch.randn(64, 64), torch.randn(64, 64)
ops = [torch.ops.aten.mm.default]
regions = (
    lambda t, w: gradckpt.checkpoint(
        lambda u: (u @ w).sin(), t, context_fn=lambda: gradckpt.compat.create_selective_checkpoint_contexts(ops)),
    lambda t, w: gradckpt.SelectiveRecompute.apply(torch.nn.Tanh(), ops, t @ w),
    lambda t, w: gradckpt.checkpoint(
        lambda u: (u @ w) * (u > w) * u.topk(4, -1)[1].sum(), t * 1, compress={"codec": "int8", "min_numel": 1}),
)
for step in range(2):
    for region in regions:
        x, w = (t.clone().requires_grad_() for t in data)
        gradients = torch.autograd.grad(region(x, w).sum(), (x, w))
        print(*(g.double().sum().item().hex() for g in gradients))
    claim("after the first regions")
print(gradckpt.stats()["discrete_outputs"])
if libraries:
    print("claimed", file=sys.stdout)
"""


def test_who_claims_the_key_for_fake_tensors_gets_it():
    free = stdout_of(CLAIMED, "never")
    assert "claimed" not in free
    for when in ("before the import", "after the import", "after the first regions"):
        assert stdout_of(CLAIMED, when) == free + "claimed\n", when


def test_a_torch_without_a_fallback_on_our_key_takes_modes_and_says_so_once():
    note, *rest = stdout_of(CLAIMED, "no fallback").splitlines(keepends=True)
    assert note.startswith("INFO: gradckpt: the dispatch key Negative has no fallback in this torch")
    assert "".join(rest) == stdout_of(CLAIMED, "never")


# ---- tensors whose negation is pending ----


def negated(*shape):
    """Its values are the negatives of those in memory."""
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize("within", [contextlib.nullcontext, "region"], ids=["outside", "in a region"])
def test_a_pending_negation_is_done(within):
    """Before and after an operator is named, in a region and outside of one."""
    named = [getattr(aten, name).default for name in ("mm", "sin", "topk", "stack", "nonzero")] + [aten.gt.Tensor]
    x, y = negated(8, 8), negated(8, 8)
    calls = [
        lambda: x @ y,
        lambda: x.sin(),
        lambda: x.topk(3),
        lambda: x > y,
        lambda: torch.stack([x, y]),
        lambda: x.clamp(min=0).nonzero(),
        lambda: torch.func.vmap(lambda row: (row > y.sum()) * row.sin() @ y)(x),
        lambda: torch.func.vmap(lambda row: (row @ y).sin().topk(2)[1])(x),
    ]
    x_done, y_done = x.resolve_neg(), y.resolve_neg()
    forward, _ = gradckpt.compat.create_selective_checkpoint_contexts(named)
    for call in calls:
        with forward if within == "region" else within():
            got = call()
        pending, (x, y) = (x, y), (x_done, y_done)
        want = call()
        x, y = pending
        assert torch.utils._pytree.tree_all(lambda a: a, torch.utils._pytree.tree_map(torch.equal, got, want))


def test_gradients_of_a_region_with_pending_negations():
    shift = negated(8, 8)

    def region(t):
        return ((t - shift) @ shift).sin() * (t > shift) * torch.stack([t, shift]).sum(0)

    x = leaf(8, 8)
    want = gradients(region, (x,))[1]
    ops = [aten.mm.default, aten.gt.Tensor, aten.stack.default]
    assert same(gradients(lambda t: checkpoint(region, t, **kept(ops)), (x,))[1], want)


# ---- what the key sees ----


def test_views_and_what_torch_has_on_the_key_are_kept_by_a_mode():
    on = []

    def region(t):
        on.append(key_is_on())
        return (t.t().clone() @ t).view(2, 8).sin().reshape(4, 4)

    for op in (aten.view.default, aten.clone.default, aten.t.default, aten._reshape_alias.default):
        x = leaf(4, 4)
        got = gradients(lambda t, op=op: checkpoint(region, t, **kept([op, aten.mm.default])), (x,))[1]
        assert same(got, gradients(region, (x,))[1])
    assert not any(on)


def test_discrete_results_inside_torch_func_are_replayed():
    """On whichever level, and once."""

    def region(t):
        rows = torch.func.vmap(lambda row: row * (row > 0) * row.topk(3)[1].sum())(t)
        both = torch.func.vmap(torch.func.vmap(lambda v: v * (v > 0)))(torch.stack([rows, t]))
        return torch.func.functionalize(lambda u: u * (u > 0.2))(both).sum(0)

    noise = torch.randn(64, 64)
    x = leaf(64, 64)
    before = gradckpt.stats()["discrete_outputs"]
    out = checkpoint(region, x * 1 + noise, compress="int4")
    decided = gradckpt.stats()["discrete_outputs"] - before
    (got,) = torch.autograd.grad(out.sum(), x)
    assert decided >= 4
    fixed = torch.autograd.grad(region(x + noise).sum(), x)[0]
    assert torch.equal(got == 0, fixed == 0)


def test_factories_in_a_fake_mode_inside_are_not_counted():
    def region(t):
        with FakeTensorMode():
            torch.ones(8).sin()
            torch.rand(8).bernoulli()
        return t.sin().exp() * t.sigmoid().bernoulli()

    x = leaf(8, 8)
    pair = gradckpt.compat.create_selective_checkpoint_contexts([aten.sin.default, aten.bernoulli.default])
    got = gradients(lambda t: checkpoint(region, t, context_fn=lambda: pair), (x,))[1]
    assert torch.isfinite(got[0]).all()
    assert list(pair[0].storage[aten.sin.default]) == [0]


def test_a_mode_entered_inside_sees_every_call():
    """Also one that is replayed, as under torch's modes:
    the mode may be that of a region inside."""
    seen = []

    def region(t):
        with Watch() as watch:
            out = (t @ t).sin().exp()
        seen.append(watch.seen)
        return out

    x = leaf(8, 8)
    got = gradients(lambda t: checkpoint(region, t, early_stop=False, **kept([aten.mm.default])), (x,))[1]
    assert same(got, gradients(region, (x,))[1])
    assert [counts[aten.mm.default] for counts in seen[:2]] == [1, 1]
    assert [counts[aten.sin.default] for counts in seen[:2]] == [1, 1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_block_with_named_operators_inside(dynamic):
    torch._dynamo.reset()
    ops = [aten.gt.Scalar, aten.sort.default, aten.sin.default]
    block = torch.compile(lambda t: (t * (t > 0)).sin() * t.sort(-1)[0], backend="aot_eager", dynamic=dynamic)
    for n in (8, 12):
        x = leaf(n, 16)
        want = gradients(lambda t: (t * (t > 0)).sin() * t.sort(-1)[0] + (t > 1), (x,))[1]
        for _ in range(2):
            got = gradients(lambda t: checkpoint(lambda u: block(u) + (u > 1), t * 1, **kept(ops)), (x,))[1]
            torch.testing.assert_close(got, want)
    torch._dynamo.reset()


# ---- the end of the process ----

AT_EXIT = """
import functools, sys, threading, torch, gradckpt
w = torch.randn(64, 64, requires_grad=True)
x = torch.randn(64, 64, requires_grad=True)
kept = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
way = {"discrete": {"compress": "int8"}, "contexts": {"context_fn": kept}}[sys.argv[1]]
warm = threading.Event()

def work():
    while True:
        out = gradckpt.checkpoint(lambda h: (h @ w).sin() * (h > 0), x * 1, **way)
        out.sum().backward()
        warm.set()

threading.Thread(target=work, daemon=True).start()
assert warm.wait(60)
"""


def test_a_daemon_thread_in_a_region_outlives_the_interpreter():
    for way, _ in itertools.product(["discrete", "contexts"], range(2)):
        assert stdout_of(AT_EXIT, way) == ""


# ---- kernels that write into what operators that they call have returned ----

WRITTEN = {
    "_embedding_bag": (lambda x: F.embedding_bag(INDEX, x, STARTS, mode="mean"), [aten.cumsum.default]),
    "_euclidean_dist": (lambda x: torch.cdist(x, x.flip(0), compute_mode="use_mm_for_euclid_dist"), [aten.mm.default]),
    "_linalg_det": (torch.linalg.det, [aten.sum.dim_IntList]),
    "_linalg_slogdet": (lambda x: torch.linalg.slogdet(x)[1], [aten.abs.default, aten.sum.dim_IntList]),
    "allclose": (lambda x: x * torch.allclose(x, x + 1e-9), [aten.eq.Tensor, aten.mul.Tensor]),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x) / 3, pos_weight=torch.full((8,), 2.0)),
        [aten.mul.Tensor, aten.log_sigmoid_forward.default],
    ),
    "logsumexp": (lambda x: x.logsumexp(-1), [aten.sub.Tensor]),
    "mvlgamma": (lambda x: torch.mvlgamma(x.exp() + 3, 2), [aten.add.Tensor, aten.sum.dim_IntList]),
    "renorm": (lambda x: x.renorm(2, 0, 0.5), [aten.linalg_vector_norm.default]),
    "rot90": (lambda x: x.rot90(2).sin(), [aten.flip.default]),
}
INDEX, STARTS = torch.arange(8), torch.tensor([0, 3])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_kernel_calls_is_not_kept(name):
    """Its kernel writes into what a policy would keep, and no version counter moves."""
    function, ops = WRITTEN[name]
    context_fn = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, ops)
    results = []
    for region in (lambda x: function(x), lambda x: checkpoint(function, x, context_fn=context_fn, early_stop=False)):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        out = region(x * 1)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_kernels_that_write_are_listed():
    assert set(WRITTEN) == set(WRITING_KERNELS)


@pytest.mark.soak
def test_no_other_kernel_writes():
    """Of the operators in torch's own table."""
    assert set(json.loads(printed_by(HELPERS / "operator_samples.py"))) == set(WRITING_KERNELS)


# ---- modes inside a region that catches on the key, which is above them ----


def _saves_products(context, op, *args, **kwargs):
    return op == aten.mm.default


INSIDE = {
    "torch's": lambda f, h: torch_checkpoint.checkpoint(
        f,
        h,
        use_reentrant=False,
        context_fn=functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [aten.mm.default]),
    ),
    "a function": lambda f, h: checkpoint(
        f, h, context_fn=lambda: gradckpt.compat.create_selective_checkpoint_contexts(_saves_products)
    ),
    "one node, a function": lambda f, h: gradckpt.SelectiveRecompute.apply(f, _saves_products, h),
    "debug": lambda f, h: checkpoint(f, h, debug=True),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("policy", [None, [aten.mm.default]], ids=["discrete", "products"])
def test_modes_inside_see_what_is_replayed(inside, policy):
    """The recompute of a node runs the forward of what is inside for the first time with grad."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    start = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    chosen, results = [], []

    def function(h):
        chosen.append((h @ weight).topk(4, -1)[1])
        return torch.sin(h.tanh() @ weight).gather(1, chosen[-1]).square().sum()

    for nested in (False, True):
        x = start.clone().requires_grad_()
        if nested:
            compress = {"codec": "int8", "min_numel": 0} if policy is None else None
            apply = gradckpt.SelectiveRecompute.apply
            out = apply(lambda h: INSIDE[inside](function, h.cos()), policy, x * 1, compress=compress)
        else:
            out = function((x * 1).cos())
        out.backward()
        results.append(x.grad)
    assert len(chosen) > 2
    assert all(torch.equal(chosen[0], again) for again in chosen)
    assert torch.dist(*results) < (0.05 if policy is None else 1e-5) * results[0].norm()


def test_an_interrupt_while_an_operator_is_registered(monkeypatch):
    """The next region with that policy registers it again;
    torch refuses a second kernel that does not say so."""

    class Interrupted(set):
        def add(self, op):
            monkeypatch.undo()
            raise KeyboardInterrupt

    @torch.library.custom_op("gradckpt_tests::interrupted", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)
    contexts, x = contexts_of([torch.ops.gradckpt_tests.interrupted.default]), leaf(4)
    monkeypatch.setattr(catching, "_caught", Interrupted(catching._caught))
    with pytest.raises(KeyboardInterrupt):
        gradckpt.checkpoint(lambda t: twice(t).sin(), x, context_fn=contexts)
    gradckpt.checkpoint(lambda t: twice(t).sin(), x, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().sum(), x)[0])
