"""PEFT: adapters under gradckpt.enable, in both orders, beside torch's checkpointing; and
examples/lora_trainer.py."""

import json
import os
import sys

import model_families
import pytest
import torch
from checkout import EXAMPLES
from packaging.version import Version
from small_models import config_of

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
from model_families import FAMILIES, assert_same, equal, errors, nonzero, stock
from transformers.integrations.peft import MIN_PEFT_VERSION

import gradckpt

sys.path.insert(0, str(EXAMPLES))
import lora_trainer

# Of transformers, for the names that PEFT still uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS = FAMILIES["llama"].layers
#: Of a frozen base: the first layer's input is a leaf that PEFT makes, which autograd keeps anyway.
COMPRESSED = LAYERS - 1
TARGETS = ["q_proj", "v_proj"]
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
}


def build():
    return model_families.build("llama", "sdpa")


def adapt(model, **fields):
    """Adapters that are not zero, with dropout; always the same."""
    torch.manual_seed(5)
    given = {"r": 4, "lora_dropout": 0.1, "target_modules": TARGETS, "init_lora_weights": False, **fields}
    return peft.get_peft_model(model, peft.LoraConfig(**given)).train()


def gradients(model):
    return model_families.gradients("llama", model)


def compressed(model):
    """Tensors that a training step compresses."""
    before = gradckpt.stats()["compressed"]
    gradients(model)
    return gradckpt.stats()["compressed"] - before


def within_bound(ours, exact):
    """The loss to the last bit; all gradients with int8's error."""
    assert torch.equal(ours[0], exact[0])
    assert nonzero(ours[1]) == nonzero(exact[1])
    found = errors(ours[1], exact[1])
    assert 0 < found.relative <= 0.02
    assert found.cosine >= 0.999, found.parameter


@pytest.fixture(params=["enable first", "adapters first"])
def made(request):
    """Makes an adapted, enabled model in one of the two orders; its handle, too."""

    def make(compress="int8", **fields):
        model = build()
        if request.param == "enable first":
            handle = gradckpt.enable(model, compress=compress)
            return adapt(model, **fields), handle
        model = adapt(model, **fields)
        return model, gradckpt.enable(model, compress=compress)

    return make


# ---- gradients


@pytest.mark.parametrize("kind", KINDS)
class TestGradients:
    def test_none_equals_stock_checkpointing(self, made, kind):
        exact = gradients(stock(adapt(build(), **KINDS[kind])))
        model, handle = made(None, **KINDS[kind])
        assert_same(gradients(model), exact)
        handle.remove()
        assert_same(gradients(model), exact)

    def test_int8(self, made, kind):
        exact = gradients(stock(adapt(build(), **KINDS[kind])))
        model, handle = made(**KINDS[kind])
        gradckpt.stats.reset()
        within_bound(gradients(model), exact)
        stats = gradckpt.stats()
        count = LAYERS if kind == "embedding" else COMPRESSED
        assert stats["compressed"] == stats["eligible"] == count
        assert stats["uncompressed"].get("leaf", 0) == LAYERS - count
        handle.remove()
        assert_same(gradients(model), exact)
        assert gradckpt.stats()["compressed"] == count


# ---- what PEFT does with its models


def test_disable_adapter(made):
    """Frozen base and no adapters: nothing trains, and the step afterwards is as before."""
    model, _ = made()
    loss, grads, _ = gradients(model)
    with model.disable_adapter():
        base = model(**FAMILIES["llama"].batch()).loss
    assert not torch.equal(base, loss)
    assert compressed(model) == COMPRESSED
    assert equal(gradients(model)[1], grads)


def test_two_adapters(made):
    model, _ = made()
    torch.manual_seed(6)
    second = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["k_proj", "o_proj"], init_lora_weights=False)
    model.add_adapter("second", second)
    twin = adapt(build())
    torch.manual_seed(6)
    twin.add_adapter("second", second)
    stock(twin)
    for name in ("second", "default"):
        model.set_adapter(name)
        twin.set_adapter(name)
        assert compressed(model) == COMPRESSED
        ours, theirs = gradients(model), gradients(twin)
        assert all(f".{name}." in parameter for parameter in nonzero(ours[1]))
        within_bound(ours, theirs)


def test_merge_and_unload(made):
    model, handle = made()
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=FAMILIES["llama"].batch()["input_ids"]).logits
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=FAMILIES["llama"].batch()["input_ids"]).logits, wanted)
    merged.train().requires_grad_(True)
    assert compressed(merged) == LAYERS, "it is the model that was enabled, and without its frozen base"
    handle.remove()
    assert compressed(merged) == 0
    gradckpt.enable(merged)
    assert compressed(merged) == LAYERS


def test_save_and_load(made, tmp_path):
    model, _ = made()
    gradients(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(), tmp_path, is_trainable=True).train()
    assert compressed(loaded) == 0, "what is saved knows nothing of checkpointing"
    gradckpt.enable(loaded)
    assert_same(gradients(loaded), gradients(model))


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)
def test_adapter_of_transformers_itself():
    """``model.add_adapter``: no wrapper, and transformers marks the embeddings."""
    model = build()
    gradckpt.enable(model)
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
    model.train()
    assert compressed(model) == COMPRESSED
    gradckpt.disable(model)
    assert compressed(model) == 0
    gradckpt.enable(model)
    assert compressed(model) == COMPRESSED


# ---- prepare_model_for_kbit_training


@pytest.mark.parametrize(
    "kwargs", [None, {"use_reentrant": False}, {"compress": "int8"}, {"compress": "int6"}], ids=str
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_prepare_model_for_kbit_training(order, kwargs):
    """It reads the signature of gradient_checkpointing_enable and calls it,
    for a quantized base."""
    model = build()
    model.is_loaded_in_8bit = True  # all that it asks; the weights themselves are not of its concern
    if order == "before":
        handle = gradckpt.enable(model)
    model = peft.prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs
    )
    del model.is_loaded_in_8bit
    if order == "after":
        handle = gradckpt.enable(model)
    asked = (kwargs or {}).get("compress", "int8") if order == "before" else "int8"
    assert config_of(handle).codec == asked
    model = adapt(model)
    exact = gradients(stock(adapt(build())))
    ours = gradients(model)
    assert torch.equal(ours[0], exact[0])
    assert nonzero(ours[1]) == nonzero(exact[1])
    assert 0 < errors(ours[1], exact[1]).relative <= (0.02 if asked == "int8" else 0.1)
    assert compressed(model) == COMPRESSED
    handle.remove()
    assert compressed(model) == 0


# ---- through the Trainer


def test_example(capsys):
    """It checks by itself what it says, and exits with 0."""
    arguments = "--steps 4 --base-steps 3 --layers 2 --hidden 64 --seq 64 --batch 4 --json"
    assert lora_trainer.main(arguments.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours = found["gradckpt"]
    assert ours["losses"] == pytest.approx(found["torch"]["losses"], rel=1e-2)
    assert ours["compressed"] == (2 - 1) * 4, "the first layer's input is a leaf"
    assert 0 < ours["error"] <= lora_trainer.BOUNDS["int8"]


def test_an_example_that_moves_the_base_fails(monkeypatch, capsys):
    adapted = lora_trainer.adapted

    def thawed(base, args):
        model = adapted(base, args)
        model.get_base_model().model.embed_tokens.register_forward_pre_hook(move)
        return model

    def move(module, args):
        with torch.no_grad():
            module.weight.add_(1e-3)

    monkeypatch.setattr(lora_trainer, "adapted", thawed)
    arguments = "--steps 1 --base-steps 1 --layers 2 --hidden 32 --seq 64 --batch 2"
    assert lora_trainer.main(arguments.split()) == 1
    assert "FAILED the frozen base is untouched" in capsys.readouterr().out


def test_gradient_error_measures_the_adapters_and_leaves_them():
    model = adapt(build())
    batch = FAMILIES["llama"].batch()
    torch.manual_seed(2)
    error = gradckpt.gradient_error(model, batch, "int8")["int8"]
    assert not gradckpt._models.switch.is_enabled(model)
    with gradckpt.enable(model, None):
        _, exact, _ = gradients(model)
    with gradckpt.enable(model, "int8"):
        _, found, _ = gradients(model)
    assert error.total == pytest.approx(errors(found, exact).relative, rel=5e-4)
    assert all("lora" in name for name, _ in error.worst)
