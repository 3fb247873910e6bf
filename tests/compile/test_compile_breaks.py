"""Regions in which the graph of torch.compile breaks: they run without it,
in the forward and in the recompute."""

import contextlib
import functools

import pytest
import torch
from compile_cases import IDS, LAYERS, Graphs, Net, assert_same, fresh_dynamo, int8, step  # noqa: F401 (a fixture of every test here)
from torch import nn

import gradckpt
from gradckpt import SelectiveRecompute

CHECKPOINT = {
    "none": gradckpt.checkpoint,
    "int8": int8,
    "fake_quantize": functools.partial(gradckpt.checkpoint, compress={"codec": "int8", "fake_quantize": True}),
    "reentrant": functools.partial(gradckpt.checkpoint, use_reentrant=True),
    "compat": functools.partial(gradckpt.compat.checkpoint, use_reentrant=False),
    "decorator": lambda layer, x: gradckpt.checkpoint(compress="int8")(lambda h: layer(h))(x),
    "sequential": lambda layer, x: gradckpt.checkpoint_sequential([layer, nn.Identity()], 2, x, compress="int8"),
    "function": lambda layer, x: SelectiveRecompute.apply(layer, [torch.ops.aten.sin.default], x),
    "function int8": lambda layer, x: SelectiveRecompute.apply(layer, None, x, compress="int8"),
}


class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x.sin() * x


def broken(checkpoint, dropout=0.0):
    model = Net(checkpoint, dropout)
    for layer in model.layers:
        layer.insert(1, Breaks())
    return model


def wrapped(compress):
    model = broken(lambda layer, x: layer(x))
    assert (
        gradckpt.compat.apply_activation_checkpointing(model, compress, check_fn=lambda m: m in [*model.layers])
        == LAYERS
    )
    return model


def applied(compress):
    model = broken(lambda layer, x: layer(x))
    gradckpt.enable(model, None, modules={"layers.?": compress})
    return model


def seeded(model, function=None):
    torch.manual_seed(3)
    return step(model, function)


def assert_compiled_as_eager(model):
    want, compressed = seeded(model), gradckpt.stats()["compressed"]
    gradckpt.stats.reset()
    graphs = Graphs()
    compiled = graphs.compile(model, fullgraph=False)
    for _ in range(2):
        got = seeded(model, compiled)
        assert torch.equal(got[0], want[0])
        assert_same(got[1], want[1])
    assert gradckpt.stats()["compressed"] == 2 * compressed
    # Neither the forward of a region nor its recompute.
    assert graphs.calls_of("sin", [*graphs.forward, *graphs.backward]) == []
    return compressed


@pytest.mark.parametrize("how", CHECKPOINT)
def test_region(how):
    compressed = assert_compiled_as_eager(broken(CHECKPOINT[how], dropout=0.1))
    assert compressed == (LAYERS if how in ("int8", "fake_quantize", "decorator", "sequential", "function int8") else 0)


@pytest.mark.parametrize("compiled", [False, True], ids=["model", "compiled model"])
@pytest.mark.parametrize("how", ["reentrant", "function", "function int8"])
def test_compiled_autograd(how, compiled):
    """What traces the backward finds Python functions in the
    classes derived from autograd's Function."""
    model = Net(CHECKPOINT[how])
    want, seen = step(model), []
    model.zero_grad()

    def compiler(graph):
        seen.append(graph)
        return torch.compile(graph, backend="aot_eager")

    loss = (torch.compile(model, backend="aot_eager") if compiled else model)(IDS)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    assert seen
    assert torch.equal(loss, want[0])
    assert_same([p.grad for p in model.parameters()], want[1])


@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize("how", [wrapped, applied])
def test_module(how, compress):
    assert assert_compiled_as_eager(how(compress)) == (LAYERS if compress else 0)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_backward_in_compiled_code(compress):
    """The recompute runs where Dynamo looks at every frame; the forward did not."""
    model = broken(functools.partial(gradckpt.checkpoint, compress=compress))
    want = step(model)
    model.zero_grad()

    def backward(loss):
        torch._dynamo.graph_break()
        loss.backward()
        return loss.detach()

    loss = model(IDS)
    got = torch.compile(backward, backend="aot_eager")(loss), [p.grad.clone() for p in model.parameters()]
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])


def test_compiled_layers_stay_compiled():
    """What is compiled by itself is compiled in both runs."""

    class Smooth(nn.Module):
        def forward(self, x):
            return x.cos().exp()

    model, graphs = broken(int8), Graphs()
    for layer in model.layers:
        layer.append(Smooth())
    want = step(model)
    for layer in model.layers:
        layer[-1].compile(backend=graphs.backend)
    got = step(model, torch.compile(model, backend="aot_eager"))
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])
    assert graphs.forward


def test_dynamo_goes_on_after_a_region_that_raises():
    graphs = Graphs()

    def fails(x):
        torch._dynamo.graph_break()
        raise KeyError("here")

    def after(x):
        return x.sin() + 1

    def function(x):
        with contextlib.suppress(KeyError):
            int8(fails, x * 2)
        return after(x)

    function = graphs.compile(function, fullgraph=False)
    function(torch.ones(4, requires_grad=True))
    made = len(graphs.forward)
    function(torch.ones(4, requires_grad=True))
    assert made == len(graphs.forward) > 0
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
