"""torch.compile: what a region writes to, returns or decides stays right;
graphs serve only what they were made for."""

import functools

import pytest
import torch
from compile_cases import (
    Graphs,
    assert_same,
    body,
    fresh_dynamo,  # noqa: F401 (a fixture of every test here)
    gradients,
    int8,
    leaf,
    needs_outputs,
    weight,
)
from torch import nn

import gradckpt
from gradckpt._engine.selective import contexts_of

# ---- what a mark must not change ----


def writes_inside(x, w, c):
    h = x * 2
    return c(lambda t, v: (t.add_(1) @ v).sin(), h, w) + h.cos()


def writes_through_another_argument(x, w, c):
    h = x * 2
    return c(lambda t, u, v: (t.mul_(2) @ v).sin() * u.view(32, 64).cos(), h, h.view(-1), w)


def writes_through_a_closure(x, w, c):
    h = x * 2
    return c(lambda t, v: (h.detach().mul_(2) @ v).sin() + t.view(32, 64).cos(), h.view(-1), w)


def writes_inside_twice(x, w, c):
    h = x * 2
    return c(lambda t, v: c(lambda a, b: (a.add_(1) @ b).sin(), t, v) + t.cos(), h, w) + h.cos()


def writes_to_the_input_of_what_it_returns(x, w, c):
    h = x * 2
    same, other = c(lambda t, v: (t.view(-1), t.sum() * v.sum()), h, w)
    with torch.no_grad():
        h.mul_(3)
    return same.detach() + other


def returns_its_input_to_the_caller(x, w, c):
    h = x * 2
    return (h, *c(lambda t, v: (t.view(-1), (t @ v).sin()), h, w))


WRITING = [
    writes_inside,
    writes_through_another_argument,
    writes_through_a_closure,
    writes_inside_twice,
    writes_to_the_input_of_what_it_returns,
]


@pytest.mark.parametrize("function", WRITING, ids=lambda f: f.__name__)
def test_an_input_that_the_region_writes_to(function):
    """It is the caller's tensor that is written to, so that it is not compressed."""
    torchs, inputs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False), (leaf(32, 64), weight())
    graphs = Graphs()
    want = gradients(Graphs().compile(functools.partial(function, c=torchs)), *inputs)
    got = gradients(graphs.compile(functools.partial(function, c=int8)), *inputs)
    assert torch.equal(got[0], function(*inputs, c=lambda f, *args: f(*args)))
    assert_same(got, want)
    assert not graphs.calls("region_input")


def test_an_input_that_is_returned_is_the_callers_tensor():
    function = functools.partial(returns_its_input_to_the_caller, c=int8)
    h, same, _ = Graphs().compile(function)(leaf(32, 64), weight())
    assert same.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()


def test_an_input_written_to_before_and_after_is_compressed():
    def function(x, w):
        h = x * 2
        h += 1
        y = int8(body, h, w)
        h += y
        return h + y

    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))
    assert len(graphs.payloads) == 1


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: torch.where(torch.greater(x, 0), x * 3, x),
        lambda x: torch.where(x.less_equal(0), x * 3, x),
        torch.msort,
        lambda x: torch.where(torch.ops.aten.gt.Scalar(x, 0), x * 3, x),
    ],
    ids=["greater", "less_equal", "msort", "overload"],
)
def test_discrete_results_inside_other_functions_are_kept(decide):
    graphs, inputs = Graphs(), (leaf(64, 64), weight())

    def function(x, w):
        return gradckpt.checkpoint(lambda t, v: decide(t @ v) * t, x * 2, w, compress="int4")

    assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))
    assert len(graphs.payloads) == 1


# ---- what graphs are made for ----


def test_leaves_and_others_have_graphs_of_their_own():
    for first, second in ((leaf(32, 64), leaf(32, 64) * 2), (leaf(32, 64) * 2, leaf(32, 64))):
        torch._dynamo.reset()
        graphs = Graphs()
        function = graphs.compile(int8)
        for x in (first, second, first):
            function(body, x, weight()).sum().backward(retain_graph=True)
        assert len(graphs.forward) == 2
        assert len(graphs.calls("encode", graphs.forward)) == 1


def test_a_changed_dict_makes_another_graph():
    config, graphs = {"codec": "int8"}, Graphs()
    function = graphs.compile(lambda x, w: gradckpt.checkpoint(body, x * 2, w, compress=config))
    payloads = []
    for change in ({}, {"min_numel": 1 << 30}, {"min_numel": 5}, {"codec": "int4"}):
        config.update(change)
        function(leaf(32, 64), weight()).sum().backward()
        payloads.append([x.numel() for x in graphs.payloads])
    nbytes = [gradckpt.codecs.encode(torch.zeros(32, 64), codec).nbytes for codec in ("int8", "int4")]
    assert payloads == [nbytes[:1], [], nbytes[:1], nbytes[1:]]


@pytest.mark.parametrize("min_numel", [0, 1024])
def test_sizes_that_only_the_run_knows(min_numel):
    def function(x, w, chosen):
        return gradckpt.checkpoint(
            body, (x * 2)[chosen.nonzero().squeeze(1)], w, compress={"codec": "int8", "min_numel": min_numel}
        )

    graphs, chosen = Graphs(), torch.arange(64) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = graphs.compile(function)
        for each in (chosen, chosen | (torch.arange(64) > 40), ~chosen & chosen):
            inputs = leaf(64, 64), weight()
            want = gradients(functools.partial(function, chosen=each), *inputs)
            assert_same(gradients(functools.partial(compiled, chosen=each), *inputs), want)
    assert len(graphs.forward) == len(graphs.payloads) == 1


@needs_outputs
def test_only_the_first_output_of_an_operator_is_compressed():
    context_fn, graphs = contexts_of("save_attention:raw"), Graphs()

    def region(x):
        return nn.functional.scaled_dot_product_attention(x, x, x).sin()

    function = graphs.compile(lambda x: gradckpt.checkpoint(region, x * 2, context_fn=context_fn))
    function(leaf(2, 8, 128, 32)).sum().backward()
    (encode,) = graphs.calls("encode", graphs.forward)
    assert encode.args[0].meta["val"].shape == (2, 8, 128, 32)
    assert (2, 8, 128) in [x.shape for x in graphs.exact]  # log-sum-exp
