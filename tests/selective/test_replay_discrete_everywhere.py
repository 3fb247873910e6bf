"""Routers choose in every recompute as in the forward, with every way to run the regions,
and however deep they are nested."""

import contextlib
import functools
import inspect
import itertools
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

import gradckpt
from gradckpt import SelectiveRecompute
from gradckpt._models import regions, rules

# ---- Programs whose regions route tokens to experts, at every level of regions in regions; and
# who runs the regions.

TOKENS, WIDTH, EXPERTS = 96, 64, 16


class Router(torch.nn.Module):
    """A residual layer and a layer of experts. ``runs``: what each run chose; ``fixed``:
    what is chosen always."""

    def __init__(self, choice="tokens"):
        super().__init__()
        scale = WIDTH**-0.5
        self.mix = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * scale)
        self.gate = torch.nn.Parameter(torch.randn(WIDTH, EXPERTS) * scale)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * scale)
        self.choice, self.fixed, self.runs, self.inner = choice, None, [], None

    def choose(self, logits):
        k, dim = (2, -1) if self.choice == "tokens" else (TOKENS // EXPERTS, 0)
        if self.fixed is None:
            value, index = logits.topk(k, dim)
        else:
            value, index = logits.gather(dim, self.fixed), self.fixed
        self.runs.append(index.detach().clone())
        return value, index

    def forward(self, h):
        h = h + (h @ self.mix).tanh()
        value, index = self.choose(h @ self.gate)
        if self.choice == "tokens":
            chosen = torch.einsum("td,tkde->tke", h, self.experts[index])
            out = (chosen * value.softmax(-1).unsqueeze(-1)).sum(1)
        else:  # every expert takes the tokens that it likes best
            chosen = torch.einsum("ked,edf->kef", h[index], self.experts)
            out = torch.zeros_like(h).index_add(
                0, index.flatten(), (chosen * value.sigmoid().unsqueeze(-1)).flatten(0, 1)
            )
        h = h + out.tanh()
        return h if self.inner is None else self.inner(h)


# ---- ways to run a region: (what is around the program, a region, a region that may run again on
# restored values) ----


def _contexts(codec):
    return functools.partial(
        gradckpt.compat.create_selective_checkpoint_contexts, gradckpt.policies.save_matmuls.compressed(codec)
    )


def _asked(codec):
    def policy(ctx, op, *args, **kwargs):
        return gradckpt.policies.save(codec) if op in gradckpt.policies.save_matmuls.rules else False

    return functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)


def ours(codec):
    return lambda f: lambda h: gradckpt.checkpoint(f, h, compress=codec, early_stop=False)


def _exact(checkpoint, **options):
    return lambda codec: lambda f: lambda h: checkpoint(f, h, **options)


def _policy(checkpoint, make):
    def way(codec):
        contexts = make(codec)
        return lambda f: lambda h: checkpoint(f, h, use_reentrant=False, context_fn=contexts, early_stop=False)

    return way


def _in_one_node(h, f, policy, **options):
    """A module's parameters are inputs of the node, unless it calls more than its own."""
    called = f if getattr(f, "inner", None) is None else functools.partial(lambda f, h: f(h), f)
    return gradckpt.SelectiveRecompute.apply(called, policy, h, **options)


def _function(codec):
    return lambda f: lambda h: _in_one_node(h, f, None, compress=codec)


def _function_plain(codec):
    return lambda f: lambda h: _in_one_node(h, f, None)


def _function_policy(codec):
    return lambda f: lambda h: _in_one_node(h, f, f"save_matmuls:{codec}")


def _wrapped(codec):
    return lambda f: gradckpt.compat.checkpoint_wrapper(f, compress=codec, nested=True)


def _sequential(codec):
    last = torch.nn.Identity()  # which is never checkpointed
    return lambda f: lambda h: torch.utils.checkpoint.checkpoint_sequential([f, last], 2, h, use_reentrant=False)


@contextlib.contextmanager
def _applied(codec, model):
    """Regions inside each other, which enable() itself does not make."""
    for router in [m for m in model.modules() if isinstance(m, Router)]:
        regions.choose(router, "", rules.parse_options({"compress": codec}, {}), 1, None).install()
    yield
    gradckpt.disable(model)


def _saved(codec, model):
    return gradckpt.compress_saved(codec)


def _patched_policy(codec, model):
    return gradckpt.patched(None, policy=f"save_matmuls:{codec}")


_plain = _exact(gradckpt.checkpoint, early_stop=False)
_torchs = functools.partial(_exact, torchs_checkpoint)
_not_reentrant = _torchs(use_reentrant=False, early_stop=False)
_torchs_policy = functools.partial(torchs_contexts, [torch.ops.aten.mm.default])

#: name -> (a region, around the program, all regions inside one of ours that compresses)
WAYS = {
    "checkpoint": (ours, None, False),
    "reentrant": (_exact(gradckpt.checkpoint, use_reentrant=True), None, True),
    "plain": (_plain, None, True),
    "SelectiveRecompute": (_function, None, False),
    "SelectiveRecompute inside": (_function_plain, None, True),
    "SelectiveRecompute policy": (_function_policy, None, False),
    "torch's": (_not_reentrant, None, True),
    "torch's reentrant": (_torchs(use_reentrant=True), None, True),
    "torch's with torch's contexts": (
        _torchs(use_reentrant=False, early_stop=False, context_fn=_torchs_policy),
        None,
        True,
    ),
    "torch's sequential": (_sequential, None, True),
    "contexts in torch's": (_policy(torchs_checkpoint, _contexts), None, False),
    "contexts in ours": (_policy(gradckpt.checkpoint, _contexts), None, False),
    "function policy in torch's": (_policy(torchs_checkpoint, _asked), None, False),
    "function policy in ours": (_policy(gradckpt.checkpoint, _asked), None, False),
    "compress_saved": (_plain, _saved, False),
    "compress_saved, torch's": (_not_reentrant, _saved, False),
    "patched": (_not_reentrant, lambda codec, model: gradckpt.patched(codec), False),
    "patched policy": (
        _not_reentrant,
        lambda codec, model: gradckpt.patched(None, policy=f"save_matmuls:{codec}"),
        False,
    ),
    "apply": (lambda codec: lambda f: f, _applied, False),
    "wrapper": (_wrapped, None, False),
}


def build(depth, choice, seed=0):
    """A tower of routers, each inside the one before, and what they get."""
    torch.manual_seed(seed)
    first = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    tower = [Router(choice) for _ in range(depth)]
    return tower, first, torch.randn(TOKENS, WIDTH) * 2


def _put_inside(router, inner):
    """A module as a child, so that who walks through modules finds it;
    any other callable as it is."""
    router._modules.pop("inner", None)
    vars(router).pop("inner", None)
    router.inner = inner


def gradients(built, region=lambda f: f, nested=True, around=None, within=lambda f: f):
    """The gradients of all parameters; the runs of each router are in it afterwards."""
    tower, first, x = built
    for router in tower:
        _put_inside(router, None)
        router.runs.clear()
    if nested:
        for outer, inner in itertools.pairwise(tower):
            _put_inside(outer, region(inner))
        call = region(tower[0])
    else:
        regions = [region(router) for router in tower]

        def call(h):
            for each in regions:
                h = each(h)
            return h

    parameters = [first.weight, *(p for router in tower for p in (router.mix, router.gate, router.experts))]
    for parameter in parameters:
        parameter.grad = None
    with contextlib.nullcontext() if around is None else around(tower[0] if nested else torch.nn.ModuleList(tower)):
        loss = within(call)(first(x)).square().mean()
        if around is None or around.func is not _saved:
            loss.backward()
    if around is not None and around.func is _saved:
        loss.backward()
    for router in tower:
        _put_inside(router, None)
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def of_way(built, name, codec, nested=True):
    """The gradients when that one runs the regions; nested=False: one after the other."""
    region, around, within = WAYS[name]
    return gradients(
        built,
        region(codec),
        nested,
        functools.partial(around, codec) if around else None,
        ours(codec) if within else (lambda f: f),
    )


def error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def fix(built):
    """From now on the routers choose as they did in their latest runs."""
    for router in built[0]:
        router.fixed = router.runs[0]


def rerouted(tower):
    """Tokens that a later run of a router sent elsewhere than its first one."""
    return sum(int(run.ne(router.runs[0]).any(-1).sum()) for router in tower for run in router.runs[1:])


CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])
#: float32's own, where nothing was rounded by a codec.
ROUNDING = 1e-6


def check(name, codec, depth, choice, seed=0):
    exact = gradients(build(depth, choice, seed))
    apart = error(of_way(build(depth, choice, seed), name, codec, nested=False), exact)
    built = build(depth, choice, seed)
    nested = error(of_way(built, name, codec), exact)
    assert all(len(router.runs) > 1 for router in built[0]), "every region ran again"
    assert rerouted(built[0]) == 0
    assert nested <= 1.1 * math.sqrt(depth) * apart + ROUNDING
    fix(built)
    assert nested <= 1.05 * error(of_way(built, name, codec), exact) + ROUNDING


#: A reentrant region calls what is inside it without grad.
QUIET = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@QUIET
@CODECS
@pytest.mark.parametrize("name", sorted(WAYS))
def test_routers_choose_as_in_the_forward(name, codec):
    for depth in (1, 3) if codec == "int4" else (2,):
        check(name, codec, depth, "tokens" if depth < 3 else "experts")


@QUIET
@pytest.mark.soak
@CODECS
@pytest.mark.parametrize("name", sorted(WAYS))
def test_routers_choose_as_in_the_forward_many(name, codec):
    for seed in range(1, 6):
        for depth in (1, 2, 3):
            for choice in ("tokens", "experts"):
                check(name, codec, depth, choice, seed)


@CODECS
def test_replay_discrete_false_counts_for_what_is_inside(codec):
    """And nothing is kept where nothing is approximate."""
    config = gradckpt.CompressionConfig(codec, replay_discrete=False)
    for compress in (config, "raw", None):
        gradckpt.stats.reset()
        built = build(2, "tokens")
        outer = functools.partial(gradckpt.checkpoint, compress=compress)
        plain = functools.partial(functools.partial, gradckpt.checkpoint)
        gradients(built, plain, within=functools.partial(functools.partial, outer))
        assert gradckpt.stats()["discrete_outputs"] == 0
        assert (rerouted(built[0]) > 0) == (compress is config)


# ---- a node, whose forward runs without grad ----


INT8 = gradckpt.CompressionConfig("int8", min_numel=0)
EYE = torch.eye(16)


def _keeps_products(context, op, *args, **kwargs):
    return gradckpt.policies.save(INT8) if op == torch.ops.aten.mm.default else False


NODES = {
    "SelectiveRecompute": lambda f, x: SelectiveRecompute.apply(f, None, x, compress=INT8),
    "SelectiveRecompute by a function": lambda f, x: SelectiveRecompute.apply(
        lambda x: f((x.view(-1, 16) @ EYE).view(x.shape)), _keeps_products, x
    ),
    "reentrant": lambda f, x: gradckpt.checkpoint(
        lambda x: gradckpt.checkpoint(f, x, use_reentrant=True), x, compress=INT8
    ),
    "torch's reentrant": lambda f, x: gradckpt.checkpoint(
        lambda x: torchs_checkpoint(f, x, use_reentrant=True), x, compress=INT8
    ),
}
#: Without grad max_pool1d asks for no indices, and the others for no vectors.
MADE_OF_OTHERS = {
    "pools": lambda x: F.max_pool2d(F.max_pool1d(x, 2).unsqueeze(1), 2).square().sum(),
    "pools, the other way": lambda x: F.max_pool1d(F.max_pool2d(x.unsqueeze(1), 2).squeeze(1), 2).square().sum(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT).square().sum(),
    "svdvals": lambda x: torch.linalg.svdvals(x).square().sum() + torch.linalg.matrix_norm(x, "nuc").sum(),
}


@QUIET
@pytest.mark.parametrize("function", MADE_OF_OTHERS)
@pytest.mark.parametrize("name", NODES)
def test_a_forward_without_grad_may_call_other_operators(name, function):
    """What it did not decide is decided by the recompute."""
    start = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    plain, region = (start.clone().requires_grad_() for _ in range(2))
    MADE_OF_OTHERS[function](plain).backward()
    NODES[name](MADE_OF_OTHERS[function], region * 1).backward()
    assert torch.dist(plain.grad, region.grad) < 0.05 * plain.grad.norm()


def test_a_forward_without_grad_decides_the_other_calls():
    """The pool that has no indices in the forward takes none of those of the next."""
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []

    def region(x):
        values, index = F.max_pool2d(F.max_pool1d(x, 2).unsqueeze(1), 2, return_indices=True)
        found.append(index)
        return values.sum()

    int4 = gradckpt.CompressionConfig("int4", min_numel=0)
    SelectiveRecompute.apply(region, None, x * 1, compress=int4).backward()
    assert torch.equal(*found)


# ---- torch's checkpoint inside ours ----


def test_nothing_of_torchs_function_is_left_changed():
    stock = inspect.unwrap(getattr(torch.utils.checkpoint, "_checkpoint_impl", torchs_checkpoint))
    code, seen = stock.__code__, []

    def region(h):
        seen.append(stock.__code__ is code)
        return torchs_checkpoint(torch.sin, h, use_reentrant=False)

    h = torch.randn(64, 64, requires_grad=True)
    gradckpt.checkpoint(region, h * 1, compress="int8", early_stop=False).sum().backward()
    assert seen == [False, False]
    assert stock.__code__ is code
    with pytest.raises(ZeroDivisionError):
        gradckpt.checkpoint(lambda h: 1 / 0, h * 1, compress="int8")
    assert stock.__code__ is code
    with gradckpt.patched("int8"):
        torchs_checkpoint(region, h * 1, use_reentrant=False).sum().backward()
        assert stock.__code__ is not code
    assert stock.__code__ is code
    gradckpt.checkpoint(region, h * 1).sum().backward()
    assert seen[-1]


def test_another_thread_calls_torchs_own():
    """While a region of ours runs elsewhere,
    what a thread gets from torch's function is torch's."""
    inside, done, ours = threading.Event(), threading.Event(), []

    def region(h):
        inside.set()
        assert done.wait(20)
        return h.sin()

    def other():
        assert inside.wait(20)
        gradckpt.stats.reset()
        x = torch.randn(8, 8, requires_grad=True)
        torchs_checkpoint(torch.exp, x * 1, use_reentrant=False).sum().backward()
        ours.append(gradckpt.stats()["regions"])
        assert torch.equal(x.grad, x.exp())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    h = torch.randn(64, 64, requires_grad=True)
    out = gradckpt.checkpoint(region, h * 1, compress="int8")
    thread.join()
    out.sum().backward()
    assert ours == [0]
