"""The two contexts as objects: whatever a program writes into them;
traces of the forward or of the backward."""

import contextlib
import functools
import gc

import pytest
import torch
from selective_ways import _nothing_left_behind as _nothing_left_behind
from selective_ways import aten, leaf, theirs, torchs_contexts
from torch.fx.experimental.proxy_tensor import make_fx

import gradckpt
from gradckpt._engine import torch_private as private

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
checkpoint, contexts = gradckpt.checkpoint, gradckpt.compat.create_selective_checkpoint_contexts
POLICIES = {
    "list": [aten.mm.default],
    "function": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
}


# ---- attributes ----


def attributes_of(pair):
    """Of both contexts: (which, name) of what a program can see and of what earlier versions had.

    Not so ``old_...``, in which torch's mode notes global flags to put back:
    without them torch compiles nothing more.
    """
    found = [(i, name) for i in range(2) for name in dir(pair[i]) if not name.startswith(("__", "old_"))]
    return [*found, *((i, name) for i in range(2) for name in ("_store", "_by_key", "_replay", "__dict__"))]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("by_mode", [False, True], ids=["by key", "by mode"])
def test_an_attribute_set_to_anything_is_an_error_or_ignored(policy, by_mode, request):
    request.addfinalizer(lambda: gradckpt._C.catch_by_mode(False))
    gradckpt._C.catch_by_mode(by_mode)
    x, w = leaf(8, 8), leaf(8, 8)
    want = torch.autograd.grad((x @ w).sin().sum(), (x, w))
    refused = set()
    for which, name in attributes_of(contexts(policy)):
        for value in (object(), None, 0, {}, contexts(policy)[which]):
            pair = contexts(policy)
            try:
                setattr(pair[which], name, value)
                out = checkpoint(lambda t: (t @ w).sin(), x * 1, context_fn=lambda p=pair: p)
                got = torch.autograd.grad(out.sum(), (x, w))
            except (TypeError, AttributeError):  # the latter: of torch's own bookkeeping
                refused.add(name)
                while torch._C._len_torch_dispatch_stack():
                    torch._C._pop_torch_dispatch_stack(None)
            else:
                assert all(map(torch.equal, got, want)), (name, value)
    assert "storage" in refused
    gc.collect()


def test_a_foreign_storage_is_refused_with_a_sentence():
    for pair in (contexts([aten.mm.default]), contexts(POLICIES["function"])):
        for context in pair:
            with pytest.raises(TypeError, match=r"has a storage of its own; make new contexts instead"):
                context.storage = {}
            assert context.storage is pair[0].storage


def test_what_is_in_the_storage_may_be_anything():
    x = leaf(8, 8)
    for policy in POLICIES.values():
        for foreign in (object(), None, {0: object()}, {0: torch.ones(8, 8)}, [1]):
            pair = contexts(policy)
            y = checkpoint(lambda t: t.sin().mm(t).exp(), x * 1, context_fn=lambda p=pair: p)
            pair[0].storage[aten.mm.default] = foreign
            with contextlib.suppress(TypeError, RuntimeError):
                y.sum().backward()


def test_a_context_that_was_never_made():
    made = contexts([aten.mm.default])
    for context in made:
        empty = type(context).__new__(type(context))
        for use in (
            empty.__enter__,
            lambda e=empty: e.__exit__(None, None, None),
            lambda e=empty: e.__torch_dispatch__(aten.sin.default, (), (torch.ones(2),)),
        ):
            with pytest.raises(TypeError, match="create_selective_checkpoint_contexts did not make"):
                use()
        assert empty.storage is None
        for args in ((), (1, 2), (aten.sin.default, (), [torch.ones(2)]), (aten.sin.default, (), (), 1)):
            with pytest.raises(TypeError):
                context.__torch_dispatch__(*args)
    with pytest.raises(TypeError, match="a selective context takes an OpStorage, not"):
        gradckpt._C.Context(object(), True, True)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_a_region_decides_is_kept_once(policy):
    """Region and contexts both keep discrete results;
    those of the region go into the store of its contexts."""
    x, w = leaf(256, 64), leaf(64, 64)
    before = gradckpt._C.stats()["discrete_outputs"]
    y = checkpoint(lambda t: (t @ w) * (t > 0), x * 1, context_fn=functools.partial(contexts, policy), compress="int8")
    assert gradckpt._C.stats()["discrete_outputs"] == before + 1
    y.sum().backward()


# ---- traces ----

MAKERS = {"torch": (theirs, torchs_contexts), "ours": (checkpoint, contexts), "ours in torchs": (theirs, contexts)}


def regions(way):
    ck, make = MAKERS[way]
    w = leaf(8, 8)
    for policy in POLICIES.values():
        yield w, lambda x, p=policy: ck(lambda t: (t @ w).sin() @ w, x * 1, context_fn=functools.partial(make, p))


def trace(function, *args):
    with (
        torch.fx.traceback.preserve_node_meta()
    ):  # torch's mode leaves marks there, which a later compilation would meet
        return make_fx(function, tracing_mode="real")(*args)


def forward(region, held, x):
    held.append(region(x))
    return held[0]


def backward(y, x, grad):
    return torch.autograd.grad(y, x, grad)


def step(region, x):
    return torch.autograd.grad(region(x).sum(), x)


@pytest.mark.parametrize("way", MAKERS)
def test_a_traced_backward_of_a_plain_forward(way):
    if way == "torch" and private.consumed is None:
        pytest.skip("torch's own contexts look for every output while a backward is traced")
    for w, region in regions(way):
        x = leaf(8, 8)
        want = torch.autograd.grad(((x @ w).sin() @ w).sum(), x)[0]
        y = region(x)
        graph = trace(functools.partial(backward, y, x), torch.ones(8, 8))
        assert torch.equal(graph(torch.ones(8, 8))[0], want)


@pytest.mark.parametrize("way", MAKERS)
def test_a_plain_backward_of_a_traced_forward(way):
    for w, region in regions(way):
        x = leaf(8, 8)
        want = torch.autograd.grad(((x @ w).sin() @ w).sum(), x)[0]
        held = []
        trace(functools.partial(forward, region, held), x)
        assert torch.equal(torch.autograd.grad(held[0].sum(), x)[0], want)


@pytest.mark.parametrize("way", MAKERS)
def test_forward_and_backward_in_one_trace(way):
    for w, region in regions(way):
        x = leaf(8, 8)
        want = torch.autograd.grad(((x @ w).sin() @ w).sum(), x)[0]
        graph = trace(functools.partial(step, region), x)
        assert torch.equal(graph(x)[0], want)


def test_one_node_regions_in_a_trace():
    x, w = leaf(8, 8), leaf(8, 8)
    layer = torch.nn.Linear(8, 8)

    def region(t):
        return gradckpt.SelectiveRecompute.apply(layer, [aten.addmm.default, aten.mm.default], t @ w)

    want = torch.autograd.grad(layer(x @ w).sum(), x)[0]
    assert torch.equal(trace(functools.partial(step, region), x)(x)[0], want)
