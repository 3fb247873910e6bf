"""gradckpt.checkpoint in code that torch.compile compiles: no graph break, and region inputs kept as payloads."""

import functools
import logging
import subprocess
import sys

import pytest
import torch
from compiled_graphs import PARTITIONS, Graphs
from torch import nn

import gradckpt
from gradckpt import CompressionConfig, GradckptInactiveWarning, packing, selective
from gradckpt.policies import contexts_of

LAYERS = 3
int8 = functools.partial(gradckpt.checkpoint, compress="int8")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    packing._warn_unpacked.cache_clear()
    gradckpt.reset_stats()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Embeddings, and layers that are regions."""

    def __init__(self, checkpoint, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 64)) for _ in range(LAYERS)
        )
        self.checkpoint = checkpoint

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + self.checkpoint(layer, hidden)
        return hidden.square().mean()


IDS = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))
NUMEL = IDS.numel() * 64


def step(model, function=None, ids=IDS):
    model.zero_grad()
    loss = (model if function is None else function)(ids)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def body(x, w):
    return (x @ w).sin() @ w


def weight(n=64):
    return (torch.randn(n, n, generator=torch.Generator().manual_seed(2)) * 0.1).requires_grad_()


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def gradients(function, *inputs):
    copies = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*copies)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in copies)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def differ(got, want):
    return any(not torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True))


# ---- what it is for ----


@pytest.mark.parametrize("replay", [False, True], ids=["exact", "replay"])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_region_inputs_leave_the_forward_graph_as_payloads(partition, replay):
    model = Net(functools.partial(gradckpt.checkpoint, compress={"codec": "int8", "replay": replay}))
    loss, grads = step(model)
    graphs = Graphs(partition)
    compiled_loss, compiled_grads = step(model, graphs.compile(model))
    assert torch.equal(compiled_loss, loss)
    assert_same(compiled_grads, grads)
    nbytes = gradckpt.encode(torch.zeros(NUMEL), "int8").nbytes
    assert [x.numel() for x in graphs.payloads] == [nbytes] * LAYERS
    assert [x.shape for x in graphs.exact] in ([], [(4, 32, 64)])  # the last layer's output, for the loss
    assert len(graphs.calls("encode", graphs.forward)) == len(graphs.calls("decode", graphs.backward)) == LAYERS
    assert not graphs.calls("region_input")
    assert len(graphs.calls("rounded")) == replay * LAYERS


def test_gradients_are_those_of_restored_inputs():
    """And so differ from the exact ones, by as much as without torch.compile."""
    exact, model = Net(gradckpt.checkpoint), Net(int8)
    want, got = step(exact)[1], step(model, Graphs().compile(model))[1]
    assert differ(got, want)
    for a, b in zip(got, want, strict=True):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.9999


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torchs_own_backends(backend):
    model = Net(int8)
    loss, grads = step(model)
    function = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        got = step(model, function)
        torch.testing.assert_close(got[0], loss)
        assert_same(got[1], grads)
    nbytes = gradckpt.encode(torch.zeros(NUMEL), "int8").nbytes
    found = {key: n for key, n in gradckpt.stats().items() if key.startswith("compiled_")}
    assert found == {
        "compiled_graphs": 1,
        "compiled_tensors": LAYERS,
        "compiled_bytes_in": LAYERS * NUMEL * 4,
        "compiled_bytes_out": LAYERS * nbytes,
    }


def test_without_compression_the_graphs_are_torchs():
    ours, theirs = Graphs(), Graphs()
    torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    results = [step(m := Net(c), g.compile(m)) for c, g in ((gradckpt.checkpoint, ours), (torchs, theirs))]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    for a, b in zip(ours.forward + ours.backward, theirs.forward + theirs.backward, strict=True):
        assert str(a.graph) == str(b.graph)
    assert gradckpt.stats()["compiled_graphs"] == 0


def test_each_input_is_restored_right_before_its_use():
    model, graphs = Net(int8), Graphs()
    step(model, graphs.compile(model))
    nodes = list(graphs.backward[0].graph.nodes)
    late = [d for d in graphs.calls("decode", graphs.backward) if nodes[nodes.index(d) + 1] in d.users]
    assert len(late) >= LAYERS - 1  # AOTAutograd puts one at the head, and says nothing more: of the first region


def test_each_input_is_encoded_where_it_is_made():
    model, graphs = Net(int8), Graphs()
    step(model, graphs.compile(model))
    nodes = list(graphs.forward[0].graph.nodes)
    for encode in graphs.calls("encode", graphs.forward):
        uses = [nodes.index(user) for user in encode.args[0].users]
        assert nodes.index(encode) == min(uses)


# ---- every shape of it ----


def restrided(x, w):
    return int8(lambda t, v: (t.t().view(-1).view(32, 64) @ v).sin(), (x * 2).t(), w)


def expanded(x, w):
    return int8(lambda t, v: (t @ v).sin(), (x[:1] * 2).expand(32, 64), w)


def expanded_and_reshaped(x, w):
    return int8(lambda t, v: (t.reshape(-1).view(32, 64) @ v).sin(), (x[:1] * 2).expand(32, 64), w)


def nested_arguments(x, w):
    def region(tree, v, *, extra):
        return (tree["a"][0] @ v).sin() @ v + extra.sin()

    return int8(region, {"a": [x * 2]}, w, extra=x.cos())


def same_input_twice(x, w):
    hidden = x * 2
    return int8(body, hidden, w) + int8(lambda t, v: (t @ v.cos()).exp(), hidden, w)


def returns_its_input(x, w):
    same, other = int8(lambda t, v: (t, (t @ v).sin()), x * 2, w)
    return same + other


def needs_no_input(x, w):
    return int8(lambda t, v: t + v[:1], x * 2, w)


def in_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return int8(body, x @ w, w).float()


def dropout(x, w):
    return int8(lambda t, v: torch.dropout((t @ v).sin(), 0.5, True) @ v, x * 2, w)


def decorated(x, w):
    return in_decorator(x * 2, w)


in_decorator = gradckpt.checkpoint(compress="int8")(body)


@pytest.mark.parametrize(
    ("function", "payloads"),
    [
        (restrided, 1),
        (expanded, 1),
        (expanded_and_reshaped, 1),
        (nested_arguments, 2),
        (same_input_twice, 1),
        (returns_its_input, 1),
        (needs_no_input, 0),
        (dropout, 1),
        (decorated, 1),
    ],
    ids=lambda f: getattr(f, "__name__", None),
)
def test_shapes_of_code(function, payloads):
    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    torch.manual_seed(4)
    want = gradients(function, *inputs)
    torch.manual_seed(4)
    assert_same(gradients(graphs.compile(function), *inputs), want)
    assert len([x for x in graphs.payloads if x.numel() == 2080]) == payloads
    assert gradckpt.stats()["compiled_tensors"] == payloads


def test_autocast():
    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    want = gradients(in_autocast, *inputs)
    for a, b in zip(gradients(graphs.compile(in_autocast), *inputs), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert len(graphs.payloads) == 1


def test_dropout_draws_the_same_mask_twice():
    graphs, x = Graphs(), leaf(64, 64)

    def function(x):
        return int8(lambda t: torch.dropout(t.exp(), 0.5, True), x * 2)

    copy = x.detach().requires_grad_()
    out = graphs.compile(function)(copy)
    out.sum().backward()
    assert torch.equal(out == 0, copy.grad == 0)
    assert (out == 0).any()
    assert graphs.payloads


OLD = not hasattr(torch.utils.checkpoint, "_CONSUMED")  # before 2.12


@pytest.mark.skipif(OLD, reason="torch 2.11 keeps inner inputs, in its own checkpoint, too")
def test_a_region_in_a_region():
    """The outer input crosses; the inner one is made again, and dropped again, in the backward."""
    graphs, inputs = Graphs(), (leaf(32, 64), weight())

    def function(x, w):
        return int8(lambda t, v: int8(body, t.sin(), v) * 2, x * 2, w)

    def outer_alone(x, w):
        return int8(lambda t, v: body(t.sin(), v) * 2, x * 2, w)

    assert_same(gradients(graphs.compile(function), *inputs), gradients(outer_alone, *inputs))
    assert len(graphs.payloads) == 1
    assert not graphs.calls("region_input")


def test_symbolic_sizes():
    graphs, w = Graphs(), weight()
    function = graphs.compile(lambda x, w: int8(body, x * 2, w), dynamic=True)
    for n in (32, 48, 50):
        want = gradients(lambda x, w: int8(body, x * 2, w), leaf(n, 64), w)
        assert_same(gradients(function, leaf(n, 64), w), want)
    assert len(graphs.forward) == 1
    assert len(graphs.payloads) == 1


def test_what_is_not_compressed_eagerly_is_not_compressed_here():
    graphs, w = Graphs(), weight()

    def function(x, frozen, w):
        a = int8(lambda t, u, v: (t @ v).sin() * u.exp(), x, frozen, w)  # a leaf; requires no grad
        return a + int8(lambda t, v: (t @ v).sum(), w[:4, :4] * 2, w[:4])  # smaller than min_numel

    inputs = leaf(32, 64), torch.randn(32, 64), w
    assert_same(gradients(graphs.compile(function), *inputs)[:2], gradients(function, *inputs)[:2])
    assert not graphs.payloads


def test_leaves_and_floating():
    graphs = Graphs()
    config = CompressionConfig("int8", leaves=True, include="floating")

    def function(x, frozen, w):
        return gradckpt.checkpoint(lambda t, u: (t * 2).sin() * u.exp(), x, frozen, compress=config) @ w

    graphs.compile(function)(leaf(32, 64), torch.randn(32, 64), weight()).sum().backward()
    assert len(graphs.payloads) == 2


def test_without_grad():
    function = (graphs := Graphs()).compile(lambda x, w: int8(body, x * 2, w))
    x, w = leaf(32, 64), weight()
    with torch.no_grad():
        quiet = function(x, w)
    assert not graphs.calls("region_input")
    assert torch.equal(function(x, w), quiet)
    assert len(graphs.payloads) == 1 if graphs.backward else True


def test_several_steps_before_a_backward():
    model = Net(int8)
    function = Graphs().compile(model)
    want = [2 * g for g in step(model)[1]]
    model.zero_grad()
    losses = [function(IDS), function(IDS)]
    for loss in losses:
        loss.backward()
    assert_same([p.grad for p in model.parameters()], want)


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
def test_decisions_inside_other_functions_are_kept(decide):
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
    nbytes = [gradckpt.encode(torch.zeros(32 * 64), codec).nbytes for codec in ("int8", "int4")]
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


@pytest.mark.skipif(OLD, reason="torch 2.11: see test_policies_pass_through")
def test_only_the_first_output_of_an_operator_is_compressed():
    context_fn, graphs = contexts_of("save_attention:int8"), Graphs()

    def region(x):
        return nn.functional.scaled_dot_product_attention(x, x, x).sin()

    function = graphs.compile(lambda x: gradckpt.checkpoint(region, x * 2, context_fn=context_fn))
    function(leaf(2, 8, 128, 32)).sum().backward()
    (encode,) = graphs.calls("encode", graphs.forward)
    assert encode.args[0].meta["val"].shape == (2, 8, 128, 32)
    assert (2, 8, 128) in [x.shape for x in graphs.exact]  # log-sum-exp


# ---- with other parts of the library ----


def test_apply():
    model = Net(lambda layer, x: layer(x))
    gradckpt.apply(model, {"layers.?": "int8"})
    loss, grads = step(model)
    graphs = Graphs()
    got = step(model, graphs.compile(model))
    assert torch.equal(got[0], loss)
    assert_same(got[1], grads)
    assert len(graphs.payloads) == LAYERS


def test_sequential():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]

    def function(x, w):
        return gradckpt.checkpoint_sequential(layers, 2, x @ w, compress="int8")

    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))
    assert len(graphs.payloads) == 1


def test_compat_is_torchs_checkpoint():
    graphs, inputs = Graphs(), (leaf(32, 64), weight())

    def function(x, w):
        return gradckpt.compat.checkpoint(body, x * 2, w, use_reentrant=False)

    assert_same(gradients(graphs.compile(function), *inputs), gradients(lambda x, w: body(x * 2, w), *inputs))
    assert not graphs.payloads


SAVES = {name: contexts_of(name) for name in ("save_matmuls", "save_matmuls:int8")}


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("compress", [None, "int8"])
def test_policies_pass_through(name, compress):
    """What a policy keeps is kept in the graph, too, and compressed if it says so."""
    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    context_fn = SAVES[name]

    def function(x, w):
        return gradckpt.checkpoint(
            lambda t, v: ((t * 2) @ v).sin() * t, x * 2, w, compress=compress, context_fn=context_fn
        )

    if name.endswith("int8") and OLD:
        with pytest.warns(GradckptInactiveWarning, match="what a policy keeps stays uncompressed"):
            gradients(graphs.compile(function), *inputs)
        selective._warn_exact_saves.cache_clear()
        return
    want = gradients(function, *inputs)
    assert_same(gradients(graphs.compile(function), *inputs), want)
    matmuls = graphs.calls_of("mm", graphs.backward)
    assert len(matmuls) == 2  # of the gradients; the forward's is not repeated
    assert len(graphs.payloads) == name.endswith("int8") + (compress is not None)


def test_decisions_are_kept():
    """A router's choice of the forward is the choice of the recompute."""
    graphs, inputs = Graphs(), (leaf(64, 64), weight())

    def route(x, w):
        best = (x @ w).topk(2, -1)
        return x.gather(-1, best.indices).exp() * best.values

    def function(x, w):
        return gradckpt.checkpoint(route, x * 2, w, compress="int4")

    assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))
    nodes = [node for m in graphs.backward for node in m.graph.nodes]
    assert not [node for node in nodes if node.target is torch.ops.aten.topk.default]
    assert len(graphs.payloads) == 1


def test_a_compiled_block_in_an_eager_region():
    block = Graphs().compile(body)
    inputs = leaf(32, 64), weight()
    want = gradients(lambda x, w: int8(body, x * 2, w), *inputs)
    for _ in range(2):
        assert_same(gradients(lambda x, w: int8(block, x * 2, w), *inputs), want)
    assert gradckpt.stats()["compressed"] > 0


def test_outer_hooks_see_the_payloads():
    """Compress, then offload: also with a graph that was compiled before the hooks came."""
    function = Graphs().compile(lambda x, w: int8(body, x * 2, w))
    inputs = leaf(32, 64), weight()
    want = gradients(function, *inputs)
    seen = []

    def pack(x):
        seen.append(x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert_same(gradients(function, *inputs), want)
    assert seen.count(torch.uint8) == 1
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(function, *inputs), want)


def test_no_hooks_are_left():
    model = Net(int8)
    step(model, Graphs().compile(model))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def broken(module, inputs):
        raise OSError("no compiler here")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no compiler here"):
        torch.compile(model, backend=broken)(IDS)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert packing._compiling.depth == 0


# ---- where it cannot act ----


def test_a_backend_without_aot_autograd_warns_once():
    model = Net(int8)
    want = step(Net(gradckpt.checkpoint))
    function = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(GradckptInactiveWarning, match=r"a backend that does not use AOTAutograd.*aot_eager"):
        got = step(model, function)
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])
    step(model, function)  # a second warning would be an error
    assert gradckpt.stats()["compiled_graphs"] == 0


@pytest.mark.skipif(OLD, reason="torch 2.11: it warns of more, see test_policies_pass_through")
def test_a_policy_that_compresses_in_torchs_checkpoint_warns():
    context_fn = SAVES["save_matmuls:int8"]

    def function(x, w):
        return torch.utils.checkpoint.checkpoint(body, x * 2, w, use_reentrant=False, context_fn=context_fn)

    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    with pytest.warns(GradckptInactiveWarning, match="another checkpoint than gradckpt's"):
        got = gradients(graphs.compile(function), *inputs)
    assert_same(got, gradients(lambda x, w: body(x * 2, w), *inputs))
    assert not graphs.payloads


def test_a_torch_that_cannot_warns_once(monkeypatch):
    from torch._functorch._aot_autograd import graph_compile

    from gradckpt import compile

    monkeypatch.delattr(graph_compile, "_get_saved_tensor_hook_context")
    compile._warn_unavailable.cache_clear()
    model, graphs = Net(int8), Graphs()
    with pytest.warns(GradckptInactiveWarning, match=r"does not tell hooks what they save"):
        step(model, graphs.compile(model))
    assert not graphs.payloads
    assert not graphs.calls("region_input")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debug": True}, "debug=True cannot be compiled"),
        ({"use_reentrant": True}, "compress= needs use_reentrant=False"),
        ({"compress": "int9"}, "unknown codec 'int9'; choose one of: raw"),
        ({"compress": {"codec": "int8", "nope": 1}}, "unknown field 'nope'"),
        ({"compress": {"codec": "int8", "stochastic": True}}, "stochastic=True cannot be compiled"),
        ({"compress": 3}, "compress= takes None, True"),
    ],
)
def test_unsupported_options(options, message):
    """One sentence with ``fullgraph=True``; else the call runs uncompiled, where what is wrong is wrong as ever."""

    def function(x, w):
        return gradckpt.checkpoint(body, x * 2, w, **{"compress": "int8", **options})

    inputs = leaf(32, 64), weight()
    with pytest.raises(torch._dynamo.exc.UserError, match=message):
        Graphs().compile(function)(*inputs)
    torch._dynamo.reset()
    uncompiled = Graphs().compile(function, fullgraph=False)
    try:
        want = function(*inputs)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error), match=message):
            uncompiled(*inputs)
    else:
        assert torch.equal(uncompiled(*inputs), want)


def test_one_line_says_what_is_kept(caplog):
    model = Net(int8)
    with caplog.at_level(logging.INFO, logger="gradckpt"):
        step(model, Graphs().compile(model))
    (record,) = [r for r in caplog.records if "torch.compile" in r.message]
    assert record.message == "torch.compile: a graph keeps 3 tensors compressed, 96.00 KiB -> 24.38 KiB"


def test_graphs_that_ddp_cuts_at_every_region_warn():
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in "ab"
            )

        def forward(self, x):
            for layer in self.layers:
                x = int8(layer, x)
            return x.sum()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Wide(), bucket_cap_mb=1.5)
        with pytest.warns(GradckptInactiveWarning, match="optimize_ddp = False"):
            torch.compile(model, backend="aot_eager")(torch.randn(64, 512)).backward()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=False):
            torch.compile(model, backend="aot_eager")(torch.randn(64, 512)).backward()
        assert gradckpt.stats()["compiled_tensors"] == 1
    finally:
        dist.destroy_process_group()


CACHED = """
import sys; sys.path.insert(0, {tests!r})
import torch, gradckpt
from test_compile import IDS, Net, int8, step
model = Net(int8)
seen = []
function = torch.compile(model, fullgraph=True)
with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.dtype), x)[1], lambda x: x):
    step(model, function)
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print(hits, gradckpt.stats()["compiled_tensors"], seen.count(torch.uint8))
"""


def test_a_graph_from_inductors_cache(tmp_path):
    """A second process finds the graphs of the first, rewritten as they are."""
    import os
    from pathlib import Path

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    code = CACHED.format(tests=str(Path(__file__).parent))
    outputs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for _ in range(2)]
    assert [o.stdout.split() for o in outputs] == [["0", "3", "3"], ["1", "3", "3"]], outputs[1].stderr


def test_a_mark_says_whose_it_is():
    """Caches on disk know graphs by their text: another gradckpt makes its own."""
    seen = []

    def backend(module, inputs):
        seen.extend(
            node.args[2] for mark in packing.MARKS for node in module.graph.find_nodes(op="call_function", target=mark)
        )
        return module.forward

    for replay in (False, True):
        torch._dynamo.reset()
        packing._warn_unpacked.cache_clear()
        checkpoint = functools.partial(gradckpt.checkpoint, compress=CompressionConfig("int8", replay=replay))
        function = torch.compile(lambda x, w, c: c(body, x * 2, w), backend=backend)
        with pytest.warns(GradckptInactiveWarning):
            function(leaf(32, 64), weight(), checkpoint)
    assert seen == [packing.version()] * 2


def test_importing_gradckpt_imports_no_compiler():
    code = "import sys, gradckpt; assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_policys_graphs_are_those_of_this_version(monkeypatch):
    here = contexts_of("save_matmuls:int8").cache_hash
    monkeypatch.setattr(packing, "version", lambda: "another")
    there = contexts_of("save_matmuls:int8").cache_hash
    assert len({here, there, contexts_of("save_matmuls").cache_hash}) == 3


def test_a_view_of_an_input_that_crosses_crosses_compressed():
    """With the matrix product kept, the backward needs the transposed input alone."""
    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    context_fn = SAVES["save_matmuls"]

    def function(x, w):
        return gradckpt.checkpoint(body, x * 2, w, compress="int8", context_fn=context_fn)

    assert_same(gradients(graphs.compile(function), *inputs)[:2], gradients(function, *inputs)[:2])
    assert len(graphs.payloads) == 1
    assert [tuple(x.shape) for x in graphs.exact if x.shape == (64, 32)] == []


def route(x, w):
    return gradckpt.checkpoint(lambda t: t * t.topk(2, -1).values.sum(), x * 2 @ w, compress="int8")


def test_no_advice_about_a_context_that_nobody_passed():
    torch._logging._internal.warning_once.cache_clear()
    log, records = logging.getLogger("torch._higher_order_ops.wrap"), []
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    try:
        gradients(Graphs().compile(route), leaf(32, 64), weight())
    finally:
        log.removeHandler(handler)
    assert records == []
