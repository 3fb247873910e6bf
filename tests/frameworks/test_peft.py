"""PEFT: adapters under gradckpt.enable, in both orders, beside torch's checkpointing; and
examples/lora_trainer.py."""

import copy
import json
import os
import pickle
import sys

import model_families
import pytest
import torch
from checkout import EXAMPLES
from packaging.version import Version
from small_models import config_of

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
from model_families import FAMILIES, errors, nonzero, stock
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


def same(ours, exact):
    assert torch.equal(ours[0], exact[0])
    assert torch.equal(ours[2], exact[2])
    assert ours[1].keys() == exact[1].keys()
    assert all(torch.equal(ours[1][name], exact[1][name]) for name in exact[1])


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
        same(gradients(model), exact)
        handle.remove()
        same(gradients(model), exact)

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
        same(gradients(model), exact)
        assert gradckpt.stats()["compressed"] == count


def test_the_base_is_untouched_and_the_adapters_learn(made):
    model, _ = made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss, _, _ = gradients(model)
        optimizer.step()
        losses.append(loss.item())
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == trained
    assert losses[-1] < losses[0]


# ---- what PEFT does with its models


def test_disable_adapter(made):
    """Frozen base and no adapters: nothing trains, and the step afterwards is as before."""
    model, _ = made()
    loss, grads, _ = gradients(model)
    with model.disable_adapter():
        base = model(**FAMILIES["llama"].batch()).loss
    assert not torch.equal(base, loss)
    assert compressed(model) == COMPRESSED
    again = gradients(model)
    assert all(torch.equal(again[1][name], grads[name]) for name in grads)


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
    ours, again = gradients(loaded), gradients(model)
    assert torch.equal(ours[0], again[0])
    assert ours[1].keys() == again[1].keys()
    assert all(torch.equal(ours[1][name], again[1][name]) for name in again[1])


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies(way):
    """Enabled after the adapters: before, PEFT leaves a local
    function on the embeddings that no pickle can carry."""
    model = adapt(build())
    handle = gradckpt.enable(model)
    twin = way(model)
    assert compressed(twin) == COMPRESSED
    handle.remove()
    assert compressed(model) == 0
    assert compressed(twin) == COMPRESSED
    gradckpt.disable(twin)
    assert compressed(twin) == 0


def test_off_and_on(made):
    """As TRL does around generation, on PEFT's object."""
    model, _ = made()
    model_families.turn_off(model)
    assert compressed(model) == 0
    model_families.turn_on(model)
    assert compressed(model) == COMPRESSED
    model_families.turn_on(model, {"use_reentrant": False})
    assert compressed(model) == COMPRESSED


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


@pytest.fixture(scope="module")
def example():
    """A short run of examples/lora_trainer.py: its exit status, what it printed, its JSON."""
    lines = []
    capture = pytest.MonkeyPatch()
    capture.setattr(lora_trainer, "print", lambda *words: lines.append(" ".join(words)), raising=False)
    shown = []
    capture.setattr(lora_trainer.Console, "print", lambda self, thing="", **_: shown.append(thing))
    arguments = "--steps 4 --base-steps 3 --layers 2 --hidden 64 --seq 64 --batch 4 --json"
    try:
        status = lora_trainer.main(arguments.split())
    finally:
        capture.undo()
    return status, shown, json.loads(lines[-1])


class TestTrainer:
    def test_succeeds(self, example):
        status, shown, _ = example
        words = [line for line in shown if isinstance(line, str)]
        assert status == 0, words
        assert sum("ok" in line for line in words) == 6

    def test_curves(self, example):
        _, shown, found = example
        torch_run, ours = found["torch"], found["gradckpt"]
        assert len(torch_run["losses"]) == len(ours["losses"]) == 4
        assert ours["losses"] == pytest.approx(torch_run["losses"], rel=1e-2)
        (table,) = [thing for thing in shown if not isinstance(thing, str)]
        assert table.row_count == 4 + 1, "each step and the held-out loss"

    def test_figures(self, example):
        *_, found = example
        ours = found["gradckpt"]
        assert ours["compressed"] == (2 - 1) * 4, "the first layer's input is a leaf"
        assert ours["bytes_in"] == (2 - 1) * 4 * (4 * 64 * 64 * 4)
        assert 0 < ours["error"] <= lora_trainer.BOUNDS["int8"]
        assert found["torch"]["compressed"] == 0

    def test_a_moved_base_fails(self, monkeypatch, capsys):
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
