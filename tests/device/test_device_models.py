"""Models of transformers on a device: regions compress there, and exact formats change no bit."""

import pytest
import torch
import virtual_device

import gradckpt

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    config = transformers.LlamaConfig(**TINY, vocab_size=128, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def mixture():
    config = transformers.MixtralConfig(
        **TINY,
        vocab_size=128,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def t5():
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 128}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def bart():
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 2), ("ffn_dim", 128))}  # fmt: skip
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, d_model=64, vocab_size=128))


def vit():
    config = transformers.ViTConfig(**TINY, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


MODELS = {f.__name__: f for f in (llama, mixture, t5, bart, vit)}


def batch(name):
    torch.manual_seed(3)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 4])}
    ids = torch.randint(5, 128, (2, 24))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(autouse=True)
def _host_codecs():
    virtual_device.use_host_codecs(True)
    yield
    virtual_device.use_host_codecs(False)


def step(name, codec="none", **options):
    """Loss, gradients on the host, and what stats() says."""
    torch.manual_seed(0)
    model = MODELS[name]().to("virtual").train()
    inputs = {key: x.to("virtual") for key, x in batch(name).items()}
    torch.manual_seed(1)
    torch.virtual.manual_seed_all(1)
    if codec != "none":
        gradckpt.enable(model, codec, **options)
    for _ in range(2):  # a second step: what the first left behind
        model.zero_grad()
        torch.virtual.manual_seed_all(1)
        gradckpt.stats.reset()
        loss = model(**inputs).loss
        loss.backward()
    torch.virtual.synchronize()
    stats = gradckpt.stats()
    found = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
    return loss.detach().cpu(), found, stats


@pytest.mark.parametrize("name", MODELS)
def test_exact_formats_change_no_bit(name):
    loss, want, _ = step(name)
    for codec in (None, "lossless"):
        found = step(name, codec)
        assert torch.equal(found[0], loss), codec
        assert torch.equal(found[1], want), codec
    saved = step(name, "lossless", recompute=False)
    assert torch.equal(saved[1], want)


@pytest.mark.parametrize("name", MODELS)
def test_int8(name):
    loss, want, _ = step(name)
    found, gradients, stats = step(name, "int8")
    assert torch.equal(found, loss)
    assert stats["compressed"] > 0
    assert stats["recomputes"] > 0
    assert (gradients - want).norm() / want.norm() < 0.1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_all_decoder_layers_read_has_one_payload(name):
    """The encoder's output is an argument of each decoder layer."""
    stats = step(name, "int8")[2]
    assert stats["shared"] >= 1
