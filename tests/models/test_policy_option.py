"""policy= in gradckpt.enable, with and without modules=, and in the kwargs of transformers."""

import copy
import os
import pickle

import pytest
import torch
import transformers_names

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import gradckpt  # noqa: E402
from gradckpt import policies  # noqa: E402
from gradckpt._engine.selective import ForwardContext  # noqa: E402

aten = torch.ops.aten
EVERY = [
    "save_attention",
    "save_matmuls",
    "every_other_matmul",
    "save_attention|save_matmuls",
    policies.save_attention | policies.discrete,
    [aten.mm.default],
    {aten.mm.default: True},
]


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).train()


def step(model):
    model.zero_grad()
    ids = torch.arange(32).view(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def assert_equal(got, want):
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def kept(monkeypatch):
    """What the regions of a step have kept when their forwards end."""
    storages = []
    leave = ForwardContext.__exit__
    monkeypatch.setattr(
        ForwardContext, "__exit__", lambda self, *error: (storages.append(dict(self.storage)), leave(self, *error))[1]
    )
    return storages


@pytest.mark.parametrize("policy", EVERY, ids=str)
def test_enable(policy, kept):
    want = step(llama())
    model = llama()
    with gradckpt.enable(model, compress=None, policy=policy):
        assert_equal(step(model), want)
        assert len(kept) == 2
        assert all(storage for storage in kept)
    kept.clear()
    assert_equal(step(model), want)
    assert not kept


def test_compressed_saves_and_inputs():
    want, model = step(llama()), llama()
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress={"codec": "int8", "min_numel": 1}, policy={aten.mm.default: "int8"}):
        loss, grads = step(model)
    assert loss == want[0]
    assert gradckpt.stats()["compressed"] >= 2 + 2 * 4  # inputs of two layers, and products of at least 1024 values
    for a, b in zip(grads, want[1], strict=True):
        assert 0 < (a - b).norm() < 0.05 * b.norm() or torch.equal(a, b)


def test_kwargs_of_transformers(kept):
    want, model = step(llama()), llama()
    gradckpt.enable(model, compress=None, policy="save_attention")
    transformers_names.turn_on(model, {"policy": "save_matmuls"})
    assert_equal(step(model), want)
    assert all(aten.mm.default in storage for storage in kept)
    kept.clear()
    transformers_names.turn_on(model, {"policy": None})
    assert_equal(step(model), want)
    assert not kept


def test_copies_carry_it(kept):
    want, model = step(llama()), llama()
    gradckpt.enable(model, compress=None, policy="save_matmuls")
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        kept.clear()
        assert_equal(step(other), want)
        assert len(kept) == 2


def test_apply(kept):
    want, model = step(llama()), llama()
    with gradckpt.enable(
        model, None, modules={"mlp": {"policy": "save_matmuls"}, "attention": {"policy": None}}, policy="discrete"
    ):
        assert_equal(step(model), want)
        assert [list(storage) for storage in kept if aten.mm.default in storage] == [[aten.mm.default]] * 2


def test_errors():
    model = llama()
    with pytest.raises(ValueError, match=r"unknown policy 'save_all'; choose one of: save_matmuls, save_attention"):
        gradckpt.enable(model, policy="save_all")
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        gradckpt.enable(model, policy="save_matmuls:zip")
    with pytest.raises(TypeError, match=r"a policy is .*; not int"):
        gradckpt.enable(model, policy=3)
    with pytest.raises(ValueError, match=r"aten\.mm\.default"):
        gradckpt.enable(model, policy=[aten.mm])
    assert "_set_gradient_checkpointing" not in vars(model)
    gradckpt.enable(model, compress=None, policy="save_matmuls")
    for kwargs, said in (
        ({"context_fn": lambda: None}, "exclude each other"),
        ({"use_reentrant": True}, "policy= needs"),
    ):
        with pytest.raises(ValueError, match=said):
            transformers_names.turn_on(model, kwargs)
    with pytest.raises(ValueError, match="exclude each other"):
        gradckpt.enable(llama(), None, modules={"mlp": {"policy": "save_matmuls", "context_fn": lambda: None}})
