"""transformers models that were enabled, under torch.compile."""

import pytest
import torch
from compiled_graphs import Graphs
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import gradckpt

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


@pytest.mark.parametrize("way", ["enable first", "compile first", "in place"])
@pytest.mark.parametrize("family", MODELS)
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
    nbytes = gradckpt.codecs.encode(torch.zeros(IDS.numel() * 64), "int8").nbytes
    assert [x.numel() for x in graphs.payloads if x.dim() == 1 and x.numel() == nbytes] == [nbytes] * LAYERS
    for name, grad in grads.items():
        want = exact[1][name]
        if want.norm() > 1e-5:  # a key's bias has none
            assert torch.cosine_similarity(grad.flatten(), want.flatten(), 0) > 0.999, name
    handle.remove()
    assert step(model)[1].keys() == grads.keys()


def test_a_policy_of_enable():
    model, graphs = build(), Graphs()
    config = gradckpt.CompressionConfig("int8", min_numel=64)
    gradckpt.enable(model, config, policy=gradckpt.policies.save_attention.compressed(config))
    step(model, graphs.compile(model))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert len([n for n in graphs.forward[0].graph.nodes if n.target is attention]) == LAYERS
    assert not [n for n in graphs.backward[0].graph.nodes if n.target is attention]
    decoded = [node.meta["val"].dim() for node in graphs.calls("decode", graphs.backward)]
    assert sorted(decoded) == [3] * LAYERS + [4] * LAYERS  # hidden states; attention, and not its log-sum-exp


def test_replay():
    model, graphs = build(), Graphs()
    gradckpt.enable(model, {"codec": "int4", "fake_quantize": True})
    want = step(model)
    got = step(model, graphs.compile(model))
    assert torch.equal(got[0], want[0])
    for name, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][name], rtol=1e-4, atol=1e-6)
    assert len(graphs.calls("decode", graphs.backward)) == LAYERS
