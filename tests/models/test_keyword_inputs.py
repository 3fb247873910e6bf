"""Hidden states that a model gives its layers by keyword:
transformers binds them to the layer's function."""

import contextlib
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
if "GradientCheckpointingLayer" not in vars(pytest.importorskip("transformers.modeling_layers")):
    pytest.skip("layers do not checkpoint themselves", allow_module_level=True)

from transformers.models.llama import modeling_llama  # noqa: E402

import gradckpt  # noqa: E402

LAYERS = 2
IDS = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))


class ByKeyword(modeling_llama.LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        h = self.embed_tokens(input_ids)
        positions = torch.arange(h.shape[1])[None]
        rotary = self.rotary_emb(h, position_ids=positions)
        for layer in self.layers:
            h = layer(hidden_states=h, position_embeddings=rotary, position_ids=positions)
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(h))


def build():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **shape)).train()
    model.model.__class__ = ByKeyword
    return model


def step(model):
    before = gradckpt.stats()["compressed"]
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradckpt.stats()["compressed"] - before, loss.detach(), gradients


def said(offload):
    """It is said once, with whichever codec comes first."""
    if not offload:
        return contextlib.nullcontext()
    return pytest.warns(gradckpt.GradckptInactiveWarning, match="it is in host memory already")


@pytest.mark.parametrize("offload", [False, True])
def test_enable_compresses_them(offload):
    model = build()
    _, loss, exact = step(model)
    with gradckpt.enable(model, "int8", offload=offload), said(offload):
        compressed, again, approximate = step(model)
    assert compressed == LAYERS
    assert torch.equal(again, loss)
    assert any(not torch.equal(approximate[name], exact[name]) for name in exact), "the recompute saw restored values"
    for name in exact:
        assert torch.allclose(approximate[name], exact[name], atol=0.02 * exact[name].abs().max().item()), name
    with gradckpt.enable(model, "raw", offload=offload):
        compressed, _, same = step(model)
    assert compressed == (0 if offload else LAYERS)  # raw, it has nothing to do where it is
    assert all(torch.equal(same[name], exact[name]) for name in exact)


def test_patched_compresses_them():
    model = build()
    model._set_gradient_checkpointing(True)
    with gradckpt.patched("int8"):
        assert step(model)[0] == LAYERS


def test_compiled_layers_compress_them():
    model = build()
    before = gradckpt.stats()["compiled_tensors"]
    gradckpt.enable(model, "int8")
    torch.compile(model, backend="aot_eager")(input_ids=IDS, labels=IDS).loss.backward()
    assert gradckpt.stats()["compiled_tensors"] - before == LAYERS


def test_a_layer_of_a_vision_encoder():
    """Llama 4 calls its vision layers so."""
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    shape = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 256}
    image = {"image_size": 56, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
    dims = {f"{name}_dim": 64 for name in ("projector_input", "projector_output", "vision_output")}
    model = modeling.Llama4VisionModel(transformers.Llama4VisionConfig(**shape, **image, **dims)).train()
    gradckpt.enable(model, {"codec": "int8", "min_numel": 1})
    before = gradckpt.stats()["compressed"]
    model(torch.randn(4, 3, 56, 56)).last_hidden_state.square().mean().backward()
    assert gradckpt.stats()["compressed"] - before == LAYERS
