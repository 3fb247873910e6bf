"""transformers models that were enabled, under torch.compile."""

import pytest
import torch
from compile_cases import Graphs
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import gradckpt
from gradckpt._engine import op_mixing

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
LAYERS = 2
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": LAYERS}
IDS = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
PADDING = torch.ones_like(IDS)
PADDING[1, 40:] = 0
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "bert": (BertForMaskedLM, BertConfig)}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    gradckpt.stats.reset()
    yield
    torch._dynamo.reset()


def build(family="llama"):
    torch.manual_seed(0)
    kind, config = MODELS[family]
    # use_cache=True with checkpointing makes transformers log while it is traced,
    # which Dynamo refuses
    return kind(config(**SMALL, num_attention_heads=4, use_cache=False)).train()


def step(model, function=None):
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    loss = (model if function is None else function)(input_ids=IDS, attention_mask=PADDING, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[pytest.mark.soak] if family != "llama" and way != "in place" else [])
        for family in MODELS
        for way in ("enable first", "compile first", "in place")
    ],
)
def test_an_enabled_model_is_one_graph(family, way):
    model, graphs = build(family), Graphs()
    exact = step(build(family))
    if way == "compile first":
        function = graphs.compile(model)
        handle = gradckpt.enable(function, "int8")
    else:
        handle = gradckpt.enable(model, "int8")
        if way == "in place":
            model.compile(backend=graphs.backend, fullgraph=True)
        function = model if way == "in place" else graphs.compile(model)
    for _ in range(2):
        loss, grads = step(model, function)
    assert torch.equal(loss, exact[0])
    assert len(graphs.forward) == 1
    nbytes = gradckpt.codecs.encode(torch.zeros(IDS.numel(), 64), "int8").nbytes
    assert [x.numel() for x in graphs.payloads if x.dim() == 1 and x.numel() == nbytes] == [nbytes] * LAYERS
    for name, grad in grads.items():
        want = exact[1][name]
        if want.norm() > 1e-5:  # a key's bias has none
            assert torch.cosine_similarity(grad.flatten(), want.flatten(), 0) > 0.999, name
    handle.remove()
    assert step(model)[1].keys() == grads.keys()


def step_in_graphs(compress, policy=None):
    torch._dynamo.reset()
    model, graphs = build(), Graphs()
    gradckpt.enable(model, compress, policy=policy)
    loss, _ = step(model, graphs.compile(model))
    assert torch.equal(loss, step(build())[0])
    return graphs


def runs(name, modules):
    """Counts an operator in graphs, also where a graph stores or sets random states around it."""
    packet = getattr(torch.ops.aten, name)
    called = [x for m in modules for node in m.graph.nodes for x in (node.target, *node.args)]
    return sum(getattr(x, "overloadpacket", None) is packet for x in called)


def test_a_policy_of_enable():
    """Products that a policy keeps beside compressed inputs do not run again."""
    config = gradckpt.CompressionConfig("int8", min_numel=64)
    full, kept = (step_in_graphs(config, p) for p in (None, gradckpt.policies.save_matmuls.compressed(config)))
    products = runs("mm", kept.forward)
    assert products == runs("mm", full.forward) == 7 * LAYERS + 1
    assert runs("mm", kept.backward) == 2 * products, "the gradients' alone"
    again = runs("mm", full.backward) - 2 * products
    assert again == 6 * LAYERS, "the last product of a layer is in its output, which is kept"
    decoded = [node.meta["val"].dim() for node in kept.calls("decode", kept.backward)]
    assert sorted(decoded) == [2] * again + [3] * LAYERS  # products, hidden states
    assert runs(ATTENTION, kept.backward) == LAYERS


def test_a_policy_of_enable_keeps_attention_beside_exact_inputs_alone():
    policy = gradckpt.policies.save_attention
    for each in (policy, policy.compressed("int8")):
        exact = step_in_graphs(None, each)
        assert runs(ATTENTION, exact.forward) == LAYERS
        assert runs(ATTENTION, exact.backward) == 0
        assert not exact.payloads, "the log-sum-exp is of the exact result"
        op_mixing.ran_again.clear()
        with pytest.warns(gradckpt.GradckptInactiveWarning, match=f"{ATTENTION}.default runs again"):
            rounded = step_in_graphs("int8", each)
        assert runs(ATTENTION, rounded.forward) == runs(ATTENTION, rounded.backward) == LAYERS
