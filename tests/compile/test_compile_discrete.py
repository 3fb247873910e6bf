"""torch.compile: what is decided in regions that may run again on restored values is kept,
at every level."""

import pytest
import torch
from behaviours import SAVES_INPUTS_BY_A_NODE
from compile_cases import (
    ASKS_POLICIES_BEFORE,
    Graphs,
    assert_same,
    fresh_dynamo,  # noqa: F401 (a fixture of every test here)
    gradients,
    leaf,
    weight,
)
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt
from gradckpt._engine.selective import contexts_of

ck = gradckpt.checkpoint
SAVES = contexts_of("save_matmuls:int4")
OTHER = contexts_of("save_attention")
ASKED = contexts_of(lambda ctx, op, *args, **kwargs: "int4" if op is torch.ops.aten.mm.default else False)


def route(x, w):
    best = (x @ w).topk(2, -1)
    return x.gather(-1, best.indices).exp() * best.values


def after_a_product(x, w):
    return route((x @ w).sin(), w)


def within(checkpoint, **options):
    """A region of ours that compresses, around one of theirs."""

    def outer(x, w):
        return checkpoint(route, x.sin(), w, use_reentrant=False, **options) * x[:, :2]

    return lambda x, w: ck(outer, x * 2, w, compress="int4")


def twice(x, w):
    return ck(lambda x, w: ck(lambda x, w: torchs_checkpoint(route, x.sin(), w, use_reentrant=False), x.cos(), w), x, w)


NESTED = ("ours inside", "torch's inside", "three levels")
PROGRAMS = {
    "a region": lambda x, w: ck(route, x * 2, w, compress="int4"),
    "ours inside": within(ck),
    "torch's inside": within(torchs_checkpoint),
    "three levels": lambda x, w: ck(twice, x * 2, w, compress="int4"),
    "policy": lambda x, w: ck(after_a_product, x * 2, w, context_fn=SAVES),
    "a function as policy": lambda x, w: ck(after_a_product, x * 2, w, context_fn=ASKED),
    "another policy": lambda x, w: ck(after_a_product, x * 2, w, compress="int4", context_fn=OTHER),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_router_chooses_once(name):
    if ASKS_POLICIES_BEFORE and "policy" in name:
        pytest.skip("torch asks a policy before the operator runs, so a graph cannot pack its output")
    if SAVES_INPUTS_BY_A_NODE and name in NESTED:
        pytest.skip("torch keeps the inputs of inner regions in compiled graphs, as they are")
    graphs, inputs = Graphs(), (leaf(64, 64), weight())
    assert_same(gradients(graphs.compile(PROGRAMS[name]), *inputs), gradients(PROGRAMS[name], *inputs))
    nodes = [node for m in graphs.backward for node in m.graph.nodes]
    assert not [node for node in nodes if node.target is torch.ops.aten.topk.default]
    assert graphs.payloads


def test_a_cast_to_integers_is_kept():
    """With replay_discrete="casts", also where torch asks before there is an output."""

    def bins(x, w):
        return (x @ w).to(torch.int32).float() * x.sin()

    config, inputs = {"codec": "int4", "replay_discrete": "casts"}, (leaf(64, 64), weight())
    function = lambda x, w: ck(bins, x * 2, w, compress=config)  # noqa: E731
    graphs = Graphs()
    assert_same(gradients(graphs.compile(function), *inputs)[1:2], gradients(function, *inputs)[1:2])
    assert graphs.payloads


@pytest.mark.parametrize("compress", ["raw", {"codec": "int4", "replay_discrete": False}])
def test_nothing_is_kept_where_nothing_is_approximate_or_wanted(compress):
    graphs = Graphs()
    gradients(graphs.compile(lambda x, w: ck(route, x * 2, w, compress=compress)), leaf(64, 64), weight())
    nodes = [node for m in graphs.backward for node in m.graph.nodes]
    assert [node for node in nodes if node.target is torch.ops.aten.topk.default]


def test_a_result_that_backward_compares_is_computed_again():
    """Kept as it was beside a restored input, it would be found in it nowhere,
    and its gradient be 0 / 0."""

    def largest(x, w):
        return (x @ w).amax(-1) * (x @ w).max()

    graphs, inputs = Graphs(), (leaf(64, 64), weight())
    for grad in gradients(graphs.compile(lambda x, w: ck(largest, x * 2, w, compress="int8")), *inputs):
        assert grad.isfinite().all()
        assert grad.count_nonzero()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_block_in_an_eager_region_routes_as_in_the_forward(backend):
    """What stays a call of torch's there is kept; Inductor has no kernel of its own for topk."""
    inputs = leaf(64, 64), weight()
    exact = gradients(lambda x, w: route(x * 2, w), *inputs)
    block = torch.compile(route, backend=backend)
    for function in (route, block):
        gradckpt.stats.reset()
        found = gradients(lambda x, w, function=function: ck(function, x * 2, w, compress="int8"), *inputs)
        assert gradckpt.stats()["discrete_outputs"] == 1
        for a, b in zip(found, exact, strict=True):
            assert (a - b).norm() <= 0.03 * b.norm()
