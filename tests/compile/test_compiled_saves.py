"""compress_saved(), and enable(recompute=False), in code that torch.compile compiles."""

import functools

import pytest
import torch
from compile_cases import (  # noqa: F401 (a fixture of every test here)
    PARTITIONS,
    Graphs,
    fresh_dynamo,
)
from torch import nn

import gradckpt
from gradckpt._engine import torch_private

transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    BLOCKS,
    Attention,
    Gated,
    Residual,
    block_gradients,
    error,
)

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

#: Of their activation function, eager compress_saved() keeps exactly what it saves, too.
EXACT_IN_PART = ("GPT2",)

#: With a codec that loses nothing they are tried in long runs only.
SLOW = ("mixture", "Llama", "GPT2", "Bert", "T5", "ViT")

EXACT, SMALL, LEAF = "backward needs it exactly", "smaller than min_numel", "leaf"


@pytest.fixture(autouse=True)
def _no_graphs_of_other_runs(monkeypatch, tmp_path):
    """A graph that comes from a cache is not counted."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def check(name, backend, dtype=torch.float32, bound=0.30, raw=True):
    want, _, _ = block_gradients(name, dtype=dtype)
    uncompiled, _, _ = block_gradients(name, "int8", dtype=dtype)
    plain, plain_bytes, plain_loss = block_gradients(name, backend=backend, dtype=dtype)
    own = error(plain, want)  # of the compiler, whose sums have another order
    if raw:  # it loses nothing; what is left is Inductor's order of sums
        same, _, _ = block_gradients(name, "raw", backend, dtype)
        assert gradckpt.stats()["compiled_tensors"]
        assert same.keys() == plain.keys()
        assert error(same, plain) <= (own / 10 + 1e-5 if backend == "inductor" else 0)
    got, nbytes, loss = block_gradients(name, "int8", backend, dtype)
    # the forward is untouched, but for what Inductor fuses
    assert torch.allclose(loss, plain_loss, rtol=1e-5 if backend == "inductor" else 0, atol=0)
    assert error(got, want) <= 1.5 * error(uncompiled, want) + own + 1e-5
    counted = gradckpt.stats()
    assert counted["compiled_graphs"] == 1
    if name in EXACT_IN_PART:
        assert counted["compiled_uncompressed"][EXACT]
        assert counted["compiled_bytes_out"] <= bound * counted["compiled_bytes_in"]
        assert nbytes < 0.75 * plain_bytes
    else:
        assert nbytes <= bound * plain_bytes


@pytest.mark.parametrize("name", BLOCKS)
def test_ten_blocks(name):
    check(name, "aot_eager", raw=name not in SLOW)


def test_a_block_of_inductor():
    check("gated MLP", "inductor")


@pytest.mark.parametrize("name", ["gated MLP", "attention"])
def test_sixteen_bits(name):
    check(name, "aot_eager", torch.bfloat16, 0.55)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", BLOCKS)
def test_all(name, backend, dtype):
    check(name, backend, dtype, 0.30 if dtype is torch.float32 else 0.55)


# ---- one block ----


class Layers(nn.Sequential):
    """Dynamo skips the forward of torch's own."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def mlp(width=128, inner=256):
    torch.manual_seed(0)
    return Layers(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, inner), nn.LayerNorm(inner))


def inputs(*shape):
    return torch.randn(*(shape or (64, 128)), generator=torch.Generator().manual_seed(1))


def loss_of(y):
    return (y * torch.linspace(-1, 2, y.shape[-1])).mean()


def step(model, function, x=None, loss=loss_of):
    model.zero_grad(set_to_none=True)
    found = loss(function(inputs() if x is None else x))
    found.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def in_graphs(model, compress="int8", function=None, loss=loss_of, partition="min cut", x=None, **options):
    """Return the graphs of a model whose forward runs in a block, and its gradients."""
    graphs = Graphs(partition)
    saved = gradckpt.compress_saved(compress)(model.forward if function is None else function)
    compiled = graphs.compile(lambda x: loss(saved(x)), **options)
    return graphs, step(model, compiled, x, lambda y: y)


def uncompressed():
    return gradckpt.stats()["compiled_uncompressed"]


def with_statement(x, model, compress):
    with gradckpt.compress_saved(compress):
        return model(x)


def decorated_inside(x, model, compress):
    return gradckpt.compress_saved(compress)(model)(x)


@pytest.mark.parametrize("compress", ["int8", {"codec": "int8", "min_numel": 4096}, gradckpt.CompressionConfig("int8")])
@pytest.mark.parametrize("way", [with_statement, decorated_inside])
def test_a_block_that_begins_in_compiled_code(way, compress):
    model = mlp()
    want = step(model, model)
    graphs = Graphs()
    got = step(model, graphs.compile(lambda x: loss_of(way(x, model, compress))), loss=lambda y: y)
    assert len(graphs.payloads) == 3  # the inputs of GELU, the second product and the norm; the first one's is a leaf
    assert 0 < error(got, want) < 0.01
    assert not graphs.calls("saved_begin")
    assert not graphs.calls("saved_results")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_crosses(partition):
    graphs, _ = in_graphs(mlp(), partition=partition)
    nbytes = {gradckpt.codecs.encode(torch.zeros(64, 256), "int8").nbytes}
    assert {x.numel() for x in graphs.payloads} == nbytes
    assert len(graphs.payloads) == len(graphs.calls("decode", graphs.backward)) == 3
    assert set(uncompressed()) <= {SMALL, LEAF}  # means and scales, the loss's numbers; of a partitioner, weights
    assert gradckpt.stats()["compiled_bytes_out"] == sum(x.nbytes for x in graphs.payloads)
    assert gradckpt.stats()["compiled_tensors"] == 3


def test_code_outside_the_block_is_exact():
    graphs, got = in_graphs(mlp(), loss=lambda y: y.square().sin().mean())
    assert len(graphs.payloads) == 3
    exact, want = in_graphs(mlp(), None, loss=lambda y: y.square().sin().mean())
    assert not exact.payloads
    assert torch.equal(got["3.bias"], want["3.bias"])  # of what only the loss reads


@pytest.mark.parametrize("way", ["enable first", "compile first", "in place"])
def test_an_enabled_model(way):
    model, graphs = mlp(), Graphs()
    want = step(model, model)
    if way == "compile first":
        function = graphs.compile(model)
        handle = gradckpt.enable(function, "int8", recompute=False, modules=[model])
    else:
        handle = gradckpt.enable(model, "int8", recompute=False, modules=[model])
        if way == "in place":
            model.compile(backend=graphs.backend, fullgraph=True)
        function = model if way == "in place" else graphs.compile(model)
    got = step(model, function)
    assert len(graphs.payloads) >= 2
    assert 0 < error(got, want) < 0.01
    handle.remove()
    assert error(step(model, function), want) == 0
    assert not graphs.payloads
    handle = gradckpt.enable(model, "int4", recompute=False, modules=[model])
    assert error(step(model, function), want) > 0.01
    handle.remove()


def test_modules_that_are_compiled_one_by_one():
    """Their inputs are activations of the module before, and become payloads as well."""
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(128, 128), Residual(Gated()), Residual(Gated()))
    graphs = Graphs()
    want = step(blocks, blocks)
    handle = gradckpt.enable(blocks, "int8", recompute=False, modules=list(blocks)[1:])
    for block in list(blocks)[1:]:
        block.compile(backend=graphs.backend, fullgraph=True)
    got = step(blocks, blocks)
    assert len(graphs.forward) == 1  # both have one
    assert 0 < error(got, want) < 0.01
    inputs_of = [node for node in graphs.calls("encode", graphs.forward) if node.args[0].op == "placeholder"]
    assert len(inputs_of) == 1
    handle.remove()
    assert error(step(blocks, blocks), want) == 0


def test_leaves_are_exact():
    x = inputs(64, 128).requires_grad_()
    graphs, _ = in_graphs(mlp(), x=x)
    assert len(graphs.payloads) == 3
    assert not any(node.args[0].op == "placeholder" for node in graphs.calls("encode"))


# ---- settings ----


def test_a_codec_for_an_operator():
    graphs, _ = in_graphs(mlp(), {"codec": "int8", "operators": {"norm": None, "activation": "int4"}})
    sizes = sorted(x.numel() for x in graphs.payloads)
    assert sizes == sorted(gradckpt.codecs.encode(torch.zeros(64, 256), codec).nbytes for codec in ("int8", "int4"))
    assert uncompressed()[EXACT] == 1


def test_small_tensors_stay():
    graphs, _ = in_graphs(mlp(), {"codec": "int8", "min_numel": 64 * 256 + 1})
    assert not graphs.payloads
    assert uncompressed()[SMALL] >= 3


@pytest.mark.parametrize("codec", ["lossless", "fp16"])
def test_codecs_that_may_overflow_leave_everything(codec):
    from gradckpt._compile import graph

    graph.may_overflow.cache_clear()
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="may overflow"):
        graphs, got = in_graphs(mlp(), codec)
    _, want = in_graphs(mlp(), None)
    assert not graphs.payloads
    assert error(got, want) == 0
    assert uncompressed()["values the codec cannot hold"] == 3


def test_blocks_in_blocks():
    """The innermost counts."""
    model = mlp()

    @gradckpt.compress_saved("int8")
    def function(x):
        h = model[1](model[0](x))
        with gradckpt.compress_saved("int4"):
            h = model[2](h)
        return model[3](h)

    graphs, _ = in_graphs(model, None, function)
    int8, int4 = (gradckpt.codecs.encode(torch.zeros(64, 256), codec).nbytes for codec in ("int8", "int4"))
    assert sorted(x.numel() for x in graphs.payloads) == [int4, int8, int8]


def test_stochastic_rounding_and_places_are_refused():
    model = mlp()
    for compress in ({"codec": "int8", "stochastic": True},):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="stochastic=True cannot be compiled"):
            in_graphs(model, compress)
    saved = gradckpt.compress_saved("int8", offload="cpu")(model.forward)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        Graphs().compile(saved)(inputs())


def test_wrong_settings_are_named():
    model = mlp()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="unknown codec 'int9'"):
        Graphs().compile(lambda x: with_statement(x, model, "int9"))(inputs())


# ---- what stays exact ----


def test_a_product_beside_a_pole_stays_exact():
    """As without the compiler: the gradient of log(p) is largest where p is smallest."""
    a, b = nn.Linear(128, 128), nn.Linear(128, 128)
    model = nn.ModuleList([a, b])

    def function(x, log):
        p = a(x).sigmoid() * b(x).sigmoid()
        return (p.log() if log else p * 3).square()

    counts = {}
    for log in (False, True):
        graphs, _ = in_graphs(model, "int8", functools.partial(function, log=log))
        counts[log] = len(graphs.payloads)
    assert counts[True] == 0


def test_a_product_that_the_graph_returns_stays_exact():
    """What uses it is not known."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(128, 128), nn.Linear(128, 128)])

    def product(x):
        return model[0](x) * model[1](x)

    for inside, payloads in ((False, 0), (True, 2)):
        graphs = Graphs()
        saved = gradckpt.compress_saved("int8")(product)
        function = graphs.compile(lambda x, saved=saved, inside=inside: loss_of(saved(x)) if inside else saved(x))
        step(model, function, loss=lambda y, inside=inside: y if inside else loss_of(y))
        assert len(graphs.payloads) == payloads


def test_rows_that_share_a_group_stay_exact_in_norms():
    model = nn.Sequential(nn.Linear(128, 96), nn.LayerNorm(96), nn.Linear(96, 128))
    graphs, _ = in_graphs(model)
    assert [tuple(x.shape) for x in graphs.exact if x.numel() > 1000] == [(64, 96)]
    assert uncompressed()[EXACT] == 1


def test_batch_norms_with_few_values_a_channel_stay_exact():
    for images, payloads in ((4, True), (1, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1))
        graphs, _ = in_graphs(model, x=inputs(images, 3, 8, 8), loss=lambda y: y.mean())
        before_norm = [node for node in graphs.calls("encode") if "convolution" in str(node.args[0])]
        assert bool(before_norm) is payloads


def test_weights_and_their_casts_stay_exact():
    model = mlp()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    graphs, _ = in_graphs(model, function=function)
    assert graphs.payloads
    assert uncompressed()[LEAF]
    restored = {tuple(node.args[2]) for node in graphs.calls("decode")}
    assert not restored & {(128, 256), (256, 128), (256, 256)}


def test_inputs_that_need_no_gradient_stay_exact():
    model = nn.ModuleList([nn.Linear(128, 128), nn.Linear(128, 128)])

    def function(x):
        h = model[0](x)
        return model[1](h * torch.cos(torch.cumsum(torch.ones_like(x), 0)))

    graphs, _ = in_graphs(model, function=function)
    assert uncompressed()["does not require grad"] == 1
    assert len(graphs.payloads) == 1  # what the second product reads is made again of it


# ---- forms ----


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_relu_keeps_one_bit_a_value(value):
    """And a NaN passes its gradient, as without the compiler."""
    torch.manual_seed(0)
    model = nn.Linear(128, 256)

    def function(x):
        return torch.relu(model(x))

    x = inputs()
    x[0, 0] = value
    graphs, got = in_graphs(model, function=function, x=x)
    assert [x.numel() for x in graphs.payloads] == [64 * 256 // 8]
    _, want = in_graphs(model, None, function, x=x)
    assert all(torch.equal(got[name], want[name]) or torch.isnan(want[name]).any() for name in want)
    assert torch.equal(got["bias"], want["bias"])
    assert len(graphs.calls("signs", graphs.forward)) == 1
    assert not graphs.calls("signs", graphs.backward)


def test_leaky_relu():
    model = nn.Sequential(nn.Linear(128, 256), nn.LeakyReLU(0.1))
    graphs, got = in_graphs(model)
    _, want = in_graphs(model, None)
    assert [x.numel() for x in graphs.payloads] == [64 * 256 // 8]
    assert error(got, want) == 0


def again(modules):
    return [node for m in modules for node in m.graph.nodes if "gradckpt.again" in str(node.target)]


def test_attention_is_made_again():
    """Neither its result nor its log-sum-exp is kept, and sharp softmaxes keep their gradient."""
    torch.manual_seed(0)
    model = Attention()
    with torch.no_grad():
        model.qkv.weight[: 2 * 128] *= 12
    x = inputs(2, 64, 128)
    want = step(model, model, x)
    uncompiled = step(model, gradckpt.compress_saved("int8")(model.forward), x)
    graphs, got = in_graphs(model, x=x)
    assert error(got, want) <= 1.5 * error(uncompiled, want)
    assert len(again(graphs.backward)) == 1
    assert not again(graphs.forward)
    assert set(uncompressed()) <= {SMALL, LEAF}
    assert not any("rng" in str(node.target) for m in graphs.forward for node in m.graph.nodes)


def test_attention_with_dropout_stays_exact():
    torch.manual_seed(0)
    model = nn.Linear(128, 3 * 128)

    def function(x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in model(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    graphs, _ = in_graphs(model, function=function, x=inputs(2, 64, 128))
    assert not again(graphs.backward)


def test_attention_without_a_codec_stays_exact():
    graphs, _ = in_graphs(Attention(), {"codec": "int8", "operators": {"attention": None}}, x=inputs(2, 64, 128))
    assert not again(graphs.backward)
    assert uncompressed()[EXACT] >= 3


def test_softmaxes_cross_in_sixteen_bits():
    torch.manual_seed(0)
    model = nn.Linear(128, 256)

    def function(x):
        scores = model(x)
        return torch.cat([scores.softmax(-1) @ torch.eye(256), scores.log_softmax(-1)], -1)

    graphs, got = in_graphs(model, function=function)
    assert {x.dtype for x in graphs.saved if x.numel() == 64 * 256} == {torch.bfloat16, torch.float16}
    _, want = in_graphs(model, None, function)
    assert 0 < error(got, want) < 0.01


def test_masks_take_one_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Dropout(0.5))
    graphs, _ = in_graphs(model)
    assert [x.numel() for x in graphs.payloads] == [64 * 256 // 8]


def test_activations_are_clamped_where_rows_share_a_group():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 48), nn.SiLU())
    with torch.no_grad():
        model[0].bias[0] = 1e4
    want = step(model, model)
    graphs, got = in_graphs(model)
    assert len(graphs.payloads) == 1
    assert error(got, want) < 0.02


# ---- graphs ----


def test_dynamic_shapes():
    model, graphs = mlp(), Graphs()
    saved = gradckpt.compress_saved("int8")(model.forward)
    compiled = graphs.compile(lambda x: loss_of(saved(x)), dynamic=True)
    for rows in (64, 37, 111):
        x = inputs(rows, 128)
        got, want = step(model, compiled, x, lambda y: y), step(model, model, x)
        assert 0 < error(got, want) < 0.01
    assert len(graphs.forward) == 1
    assert len(graphs.payloads) == 3


def test_two_graphs_of_one_function():
    model, graphs = mlp(), Graphs()

    def function(x):
        h = gradckpt.compress_saved("int8")(lambda x: model[1](model[0](x)))(x)
        torch._dynamo.graph_break()
        return loss_of(gradckpt.compress_saved("int8")(lambda h: model[3](model[2](h)))(h))

    got = step(model, graphs.compile(function, fullgraph=False), loss=lambda y: y)
    assert len(graphs.forward) == 2
    assert len(graphs.calls("encode", graphs.forward)) == 3
    assert 0 < error(got, step(model, model)) < 0.01


def test_a_graph_break_in_a_with_statement():
    """Both of its ends then run uncompiled."""
    model, graphs = mlp(), Graphs()

    def function(x):
        with gradckpt.compress_saved("int8"):
            h = model[1](model[0](x))
            torch._dynamo.graph_break()
            return loss_of(model[3](model[2](h)))

    before = torch_private.top_hooks(True)
    got = step(model, graphs.compile(function, fullgraph=False), loss=lambda y: y)
    assert torch_private.top_hooks(True) == before
    assert not graphs.calls("encode")
    assert error(got, step(model, model)) < 0.01


def test_regions_inside_keep_their_own_rules():
    model = mlp()

    def function(x, compress):
        h = model[0](x)
        return model[3](model[2](gradckpt.checkpoint(model[1], h, compress=compress)))

    for compress, codecs in ((None, ["int8"]), ("int4", ["int4", "int8", "int8"])):
        graphs, _ = in_graphs(model, function=functools.partial(function, compress=compress))
        assert sorted(node.args[1] for node in graphs.calls("encode", graphs.forward)) == codecs
        assert uncompressed().get("read by a region", 0) == (compress is None)
        gradckpt.stats.reset()


def test_a_block_inside_a_region_has_no_effect():
    model = mlp()

    def function(x):
        block = gradckpt.compress_saved("int8")(lambda h: model[3](model[2](model[1](h))))
        return gradckpt.checkpoint(block, model[0](x), compress=None)

    graphs, got = in_graphs(model, None, function)
    assert not graphs.payloads
    assert error(got, step(model, model)) == 0


def test_caches_of_inductor(monkeypatch, tmp_path):
    """A graph that was cached with a block is not taken without one, nor the reverse."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    found = []
    for compress in (None, "int8", "int4", None, "int8", "int4"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        saved = gradckpt.compress_saved(compress)(model.forward)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            loss = torch.compile(lambda x, saved=saved: loss_of(saved(x)), fullgraph=True)(inputs())
        loss.backward()
        hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
        found.append((sum(x.nbytes for x in kept if x.dtype == torch.uint8), hits))
    sizes = [0, *(2 * gradckpt.codecs.encode(torch.zeros(64, 256), codec).nbytes for codec in ("int8", "int4"))]
    assert [size for size, _ in found] == sizes * 2
    assert [hits for _, hits in found] == [0, 0, 0, 1, 1, 1]


def test_no_grad_and_eval():
    model, graphs = mlp(), Graphs()
    compiled = graphs.compile(gradckpt.compress_saved("int8")(model.forward))
    with torch.no_grad():
        assert torch.equal(compiled(inputs()), model(inputs()))
    handle = gradckpt.enable(model.eval(), "int8", recompute=False, modules=[model])
    step(model, graphs.compile(model))
    assert not graphs.payloads
    handle.remove()


def test_a_backend_without_aotautograd_warns():
    from gradckpt._compile import saved_blocks

    saved_blocks._warn_uncompiled.cache_clear()
    model = mlp()
    compiled = torch.compile(gradckpt.compress_saved("int8")(model.forward), backend="eager", fullgraph=True)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="choose a backend with AOTAutograd"):
        assert error(step(model, compiled), step(model, model)) == 0


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_have_no_blocks(strict):
    model = mlp().eval()
    handle = gradckpt.enable(model, "int8", recompute=False, modules=[model])
    program = torch.export.export(model.train(), (inputs(),), strict=strict)
    assert "gradckpt" not in str(program.graph)
    handle.remove()
