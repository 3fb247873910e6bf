"""torch.compile with the other parts of the library, and where it cannot act."""

import functools
import logging
import subprocess
import sys

import pytest
import torch
import worlds
from checkout import HELPERS
from compile_cases import (
    ASKS_POLICIES_BEFORE,
    IDS,
    Graphs,
    Net,
    assert_same,
    body,
    fresh_dynamo,  # noqa: F401 (a fixture of every test here)
    gradients,
    int8,
    leaf,
    needs_outputs,
    step,
    weight,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import gradckpt
from gradckpt import CompressionConfig, GradckptInactiveWarning
from gradckpt._compile import graph
from gradckpt._engine import selective
from gradckpt._engine.selective import contexts_of

# ---- with other parts of the library ----


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


def answering(answer):
    return contexts_of(lambda ctx, op, *args, **kwargs: answer if op is torch.ops.aten.mm.default else False)


SAVES = {
    **{name: contexts_of(name) for name in ("save_matmuls", "save_matmuls:int8")},
    "a function": answering(True),
    "a function, CheckpointPolicy": answering(CheckpointPolicy.MUST_SAVE),
    "a function, save()": answering(gradckpt.policies.save()),
    "a function, save:int8": answering(gradckpt.policies.save("int8")),
    "a function, codec:int8": answering("int8"),
    "a function, config:int8": answering(CompressionConfig("int8")),
}


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

    if name.endswith("int8") and ASKS_POLICIES_BEFORE:
        selective._warn_exact_saves.cache_clear()
        with pytest.warns(GradckptInactiveWarning, match="what a policy keeps stays uncompressed"):
            gradients(graphs.compile(function), *inputs)
        selective._warn_exact_saves.cache_clear()
        return
    want = gradients(function, *inputs)
    assert_same(gradients(graphs.compile(function), *inputs), want)
    matmuls = graphs.calls_of("mm", graphs.backward)
    assert len(matmuls) == 2  # of the gradients; the forward's is not repeated
    assert len(graphs.payloads) == name.endswith("int8") + (compress is not None)


def test_the_default_context_fn_is_as_none():
    """A caller that fills in torch's default may pass a policy beside it, as in eager code."""
    noop, torchs = torch.utils.checkpoint.noop_context_fn, torch.utils.checkpoint.checkpoint
    ways = {
        "policy=": lambda x, w: gradckpt.checkpoint(body, x * 2, w, policy="save_matmuls", context_fn=noop),
        "patched": lambda x, w: torchs(body, x * 2, w, use_reentrant=False, context_fn=noop),
    }
    inputs = leaf(32, 64), weight()
    for name, function in ways.items():
        graphs = Graphs()
        with gradckpt.patched(None, policy="save_matmuls"):
            assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))
        assert len(graphs.calls_of("mm", graphs.backward)) == 4, name  # those of the gradients


MADE_INSIDE = {
    "compressed": lambda: gradckpt.policies.save_matmuls.compressed("int8"),
    "|": lambda: gradckpt.policies.save_matmuls | gradckpt.policies.save_attention,
}


@pytest.mark.parametrize("how", [pytest.param("compressed", marks=needs_outputs), "|"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_policy_made_in_compiled_code_breaks_the_graph_and_one_made_outside_does_not(how):
    graphs, make, inputs = Graphs(), MADE_INSIDE[how], (leaf(32, 64), weight())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        graphs.compile(lambda x, w: gradckpt.checkpoint(body, x * 2, w, policy=make()))(*inputs)
    made = make()

    def function(x, w):
        return gradckpt.checkpoint(body, x * 2, w, policy=made)

    assert_same(gradients(graphs.compile(function), *inputs), gradients(function, *inputs))


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
    assert graph._compiling.depth == 0


# ---- where it cannot act ----


def test_a_backend_without_aot_autograd_warns_once():
    model = Net(int8)
    want = step(Net(gradckpt.checkpoint))
    function = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(GradckptInactiveWarning, match=r"a backend with AOTAutograd.*aot_eager"):
        got = step(model, function)
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])
    step(model, function)  # a second warning would be an error
    assert gradckpt.stats()["compiled_graphs"] == 0


@needs_outputs
def test_a_policy_that_compresses_in_torchs_checkpoint_warns():
    context_fn = SAVES["save_matmuls:int8"]

    def function(x, w):
        return torch.utils.checkpoint.checkpoint(body, x * 2, w, use_reentrant=False, context_fn=context_fn)

    graphs, inputs = Graphs(), (leaf(32, 64), weight())
    with pytest.warns(GradckptInactiveWarning, match="nothing is compressed in this graph; call gradckpt.checkpoint"):
        got = gradients(graphs.compile(function), *inputs)
    assert_same(got, gradients(lambda x, w: body(x * 2, w), *inputs))
    assert not graphs.payloads


def test_a_torch_that_cannot_warns_once(monkeypatch):
    from gradckpt._engine import torch_private

    monkeypatch.setattr(torch_private, "load_cut", lambda: None)
    graph.warn_unavailable.cache_clear()
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
        ({"compress": "int9"}, r"unknown codec 'int9'; did you mean 'int8'\? choose one of: raw"),
        ({"compress": {"codec": "int8", "nope": 1}}, "unknown field 'nope'"),
        ({"compress": {"codec": "int8", "stochastic": True}}, "stochastic=True cannot be compiled"),
        ({"compress": 3}, "compress= takes None, True"),
    ],
)
def test_unsupported_options(options, message):
    """One sentence with ``fullgraph=True``; else the call runs uncompiled,
    where what is wrong is wrong as ever."""

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
    assert record.message == "gradckpt: torch.compile: a graph keeps 3 tensors compressed, 96.00 KiB -> 24.75 KiB"


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in "ab")

    def forward(self, x):
        for layer in self.layers:
            x = int8(layer, x)
        return x.sum()


def in_small_buckets():
    model = torch.nn.parallel.DistributedDataParallel(Wide(), bucket_cap_mb=1.5)
    with pytest.warns(GradckptInactiveWarning, match="optimize_ddp = False"):
        torch.compile(model, backend="aot_eager")(torch.randn(64, 512)).backward()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False):
        torch.compile(model, backend="aot_eager")(torch.randn(64, 512)).backward()
    torch._dynamo.reset()  # what is cached may hold the model, which goes before the group


def test_graphs_that_ddp_cuts_at_every_region_warn():
    worlds.of_one(in_small_buckets)
    assert gradckpt.stats()["compiled_tensors"] == 1


CACHED = """
import sys; sys.path.insert(0, {helpers!r})
import torch, gradckpt
from compile_cases import IDS, Net, int8, step
model = Net(int8)
seen = []
function = torch.compile(model, fullgraph=True)
with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.dtype), x)[1], lambda x: x):
    step(model, function)
counters = torch._dynamo.utils.counters["aot_autograd"]
print(counters["autograd_cache_hit"], gradckpt.stats()["compiled_tensors"], seen.count(torch.uint8))
"""

CACHED_POLICY = """
import sys; sys.path.insert(0, {helpers!r})
import functools, torch, gradckpt
from compile_cases import Net, step
model = Net(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
with gradckpt.patched(None, policy="save_matmuls:int8") as handle:
    step(model, torch.compile(model, fullgraph=True))
counters = torch._dynamo.utils.counters["aot_autograd"]
counted = handle.stats()
print(counters["autograd_cache_hit"], counted["calls"], counted["traced"], handle.inactive_reason)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(CACHED, "3 3", id="marked", marks=pytest.mark.soak),
        pytest.param(CACHED_POLICY, "3 3 None", id="policy"),  # its regions count as those of a graph made here
    ],
)
def test_a_graph_from_inductors_cache(tmp_path, code, printed):
    """A second process finds the graphs of the first, rewritten as they are."""
    import os

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    code = code.format(helpers=str(HELPERS))
    outputs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for _ in range(2)]
    assert [o.stdout.strip() for o in outputs] == [f"0 {printed}", f"1 {printed}"], outputs[1].stderr


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_leaf_stays_exact_in_a_fake_quantized_region_as_without_compile(backend):
    config = CompressionConfig("int8", fake_quantize=True, include="floating", min_numel=1)
    x = torch.randn(64, 64, requires_grad=True)
    call = torch.compile(lambda x: gradckpt.checkpoint(torch.sin, x, compress=config), fullgraph=True, backend=backend)
    torch.testing.assert_close(call(x), gradckpt.checkpoint(torch.sin, x, compress=config), rtol=0, atol=1e-6)


def test_a_mark_says_whose_it_is():
    """Caches on disk know graphs by their text: another gradckpt makes its own."""
    seen = []

    def backend(module, inputs):
        seen.extend(
            node.args[2] for mark in graph.MARKS for node in module.graph.find_nodes(op="call_function", target=mark)
        )
        return module.forward

    for fake_quantize in (False, True):
        torch._dynamo.reset()
        graph._warn_unpacked.cache_clear()
        checkpoint = functools.partial(
            gradckpt.checkpoint, compress=CompressionConfig("int8", fake_quantize=fake_quantize)
        )
        function = torch.compile(lambda x, w, c: c(body, x * 2, w), backend=backend)
        with pytest.warns(GradckptInactiveWarning):
            function(leaf(32, 64), weight(), checkpoint)
    assert seen == [graph.version()] * 2


def test_a_policys_graphs_are_those_of_this_version(monkeypatch):
    here = contexts_of("save_matmuls:int8").cache_hash
    monkeypatch.setattr(selective, "version", lambda: "another")
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
