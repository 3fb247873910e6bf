"""Stock transformers models: gradients under gradckpt.enable beside torch's own checkpointing.

Padded batches with eager attention put float masks full of -3.4e38 among the region inputs, T5 a
position bias that requires grad, BERT and GPT-2 dropout into the regions.
"""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import gradckpt  # noqa: E402

VOCAB, WIDTH, LENGTH = 96, 64, 32

# A parameter whose exact gradient is below this share of the whole gradient's norm is rounding
# noise (a key's bias: softmax does not see it), so its direction means nothing.
NOISE = 1e-5


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    )


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            attn_implementation="eager",
        )
    )


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=3,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )


def t5(activation="gated-gelu"):
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            feed_forward_proj=activation,
            decoder_start_token_id=0,
            pad_token_id=0,
            attn_implementation="eager",
        )
    )


FAMILIES = {"llama": llama, "bert": bert, "gpt2": gpt2, "t5": t5}


def batch():
    ids = torch.randint(1, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((LENGTH, 20, 9, 27)):
        mask[row, length:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build(family):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def gradients(model):
    """Loss, gradients and the RNG state that a training step leaves behind."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, torch.get_rng_state()


def errors(grads, exact):
    """Global relative L2 error and the worst parameter's cosine."""
    norm = torch.cat([g.flatten() for g in exact.values()]).norm()
    gap = torch.cat([(grads[name] - exact[name]).flatten() for name in exact]).norm()
    cosines = [
        torch.cosine_similarity(grads[name].flatten().double(), g.flatten().double(), dim=0).item()
        for name, g in exact.items()
        if g.norm() > NOISE * norm
    ]
    return (gap / norm).item(), min(cosines)


def nonzero(grads):
    return {name for name, g in grads.items() if g.any()}


@pytest.mark.parametrize("family", FAMILIES)
class TestGradients:
    def test_none_equals_stock_checkpointing(self, family):
        stock = build(family)
        stock.activation_checkpointing_enable({"use_reentrant": False})
        loss, grads, rng = gradients(stock)
        ours = build(family)
        with gradckpt.enable(ours, compress=None) as handle:
            assert handle.layers == (4 if family == "t5" else 3)
            loss2, grads2, rng2 = gradients(ours)
        assert torch.equal(loss, loss2)
        assert torch.equal(rng, rng2)
        assert grads.keys() == grads2.keys()
        assert all(torch.equal(grads[name], grads2[name]) for name in grads)

    @pytest.mark.parametrize("replay", [False, True])
    def test_int8(self, family, replay):
        loss, exact, _ = gradients(build(family))
        _, again, _ = gradients(build(family))
        assert errors(again, exact)[0] == 0, "the floor: a repeated run gives the same gradients"

        model = build(family)
        gradckpt.reset_stats()
        with gradckpt.enable(model, compress="int8", replay=replay):
            loss2, grads, _ = gradients(model)
        if not replay:
            assert torch.equal(loss, loss2), "exact mode leaves the forward alone"
        stats = gradckpt.stats()
        assert stats["compressed"] >= (4 if family == "t5" else 3)
        assert stats["bytes_out"] / stats["bytes_in"] < 0.26
        assert nonzero(grads) == nonzero(exact), "a parameter lost its gradient"
        error, cosine = errors(grads, exact)
        # Replay differentiates a slightly different forward: its error grows with depth.
        assert error <= (0.04 if replay else 0.02)
        assert cosine >= (0.995 if replay else 0.998)

    def test_fp8(self, family):
        _, exact, _ = gradients(build(family))
        model = build(family)
        with gradckpt.enable(model, compress="fp8"):
            _, grads, _ = gradients(model)
        assert nonzero(grads) == nonzero(exact)
        error, cosine = errors(grads, exact)
        assert error <= 0.08
        assert cosine >= 0.98

    def test_raw_is_exact(self, family):
        """The control: everything of ours except the loss of bits."""
        _, exact, _ = gradients(build(family))
        model = build(family)
        with gradckpt.enable(model, compress="raw"):
            _, grads, _ = gradients(model)
        assert all(torch.equal(grads[name], exact[name]) for name in exact)


def test_ill_conditioned_t5():
    """The ReLU of the first T5 turns small changes of its input into large ones of the gradient, at
    random weights: the measure is what bf16 does to the same gradients."""
    grads = {}
    for name, dtype, compress in (
        ("exact", torch.float32, None),
        ("bf16", torch.bfloat16, None),
        ("int8", None, "int8"),
    ):
        torch.manual_seed(0)
        model = t5("relu").train().to(dtype or torch.float32)
        if compress:
            gradckpt.enable(model, compress=compress)
        grads[name] = {key: g.float() for key, g in gradients(model)[1].items()}
    assert nonzero(grads["int8"]) == nonzero(grads["exact"])
    assert errors(grads["int8"], grads["exact"])[0] <= 1.5 * errors(grads["bf16"], grads["exact"])[0]


def test_masks_are_kept_by_reference():
    """A float mask full of -3.4e38 never reaches a codec: only hidden states were compressed."""
    model = build("bert")
    gradckpt.reset_stats()
    with gradckpt.enable(model, compress="int8"):
        gradients(model)
    stats = gradckpt.stats()
    assert stats["compressed"] == 3
    assert stats["bytes_in"] == 3 * 4 * LENGTH * WIDTH * 4


def test_frozen_base_trains_its_head():
    """As with adapters: only what enable_input_require_grads marks flows into the layers."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    _, exact, _ = gradients(model)
    gradckpt.reset_stats()
    with gradckpt.enable(model, compress="int8"):
        _, grads, _ = gradients(model)
    assert gradckpt.stats()["compressed"] == 3
    assert nonzero(grads) == nonzero(exact)
    assert errors(grads, exact)[0] <= 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    """Beside the floor of the dtype itself: int8 adds less than half precision already costs."""
    _, exact, _ = gradients(build("llama"))
    _, floor, _ = gradients(build("llama").to(dtype))
    model = build("llama").to(dtype)
    with gradckpt.enable(model, compress="int8"):
        _, grads, _ = gradients(model)
    wide = {name: g.float() for name, g in grads.items()}
    base = {name: g.float() for name, g in floor.items()}
    assert errors(wide, exact)[0] <= 2 * errors(base, exact)[0] + 0.02


def test_autocast():
    """The recompute runs under the autocast of the forward."""
    with torch.autocast("cpu", torch.bfloat16):
        _, exact, _ = gradients(build("llama"))
        model = build("llama")
        with gradckpt.enable(model, compress="raw"):
            _, grads, _ = gradients(model)
    assert all(torch.equal(grads[name], exact[name]) for name in exact)


def test_gradient_accumulation_and_two_forwards_before_backward():
    model = build("llama")
    _, once, _ = gradients(model)
    with gradckpt.enable(model, compress="raw"):
        model.zero_grad()
        first, second = model(**batch()).loss, model(**batch()).loss
        (first + second).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], msg=name)


def test_generate_between_steps():
    model = build("llama")
    with gradckpt.enable(model, compress="int8") as handle:
        _, before, _ = gradients(model)
        model.eval()
        with torch.no_grad():
            model.generate(batch()["input_ids"][:1, :8], max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        _, after, _ = gradients(model)
        assert handle.layers == 3
    assert all(torch.equal(before[name], after[name]) for name in before)
