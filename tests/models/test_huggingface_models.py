"""Stock transformers models: gradients under gradckpt.enable beside torch's own checkpointing.

All families, eager and SDPA attention, padded rows, dropout. Eager attention puts float masks full
of -3.4e38 among the region inputs, T5 a position bias that requires grad, encoders the same states
into every layer of their decoder; mixtures of experts must take the same routes twice; hidden
states that a model gives its layers by keyword are bound to the layer's function.
"""

import contextlib
import inspect
import os
import sys

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import model_families  # noqa: E402
from model_families import ATTENTIONS, FAMILIES, LENGTH, MIXTURES, VOCAB, WIDTH, assert_same, errors, nonzero, stock  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

import gradckpt  # noqa: E402

#: transformers refuses SDPA where it would leave the soft caps of the scores out.
EAGER_ONLY = {"gemma2"}
CASES = [(f, a) for f in FAMILIES for a in ATTENTIONS if a == "eager" or f not in EAGER_ONLY]
#: Names the methods of transformers >= 5.23, whose families are complete.
RECENT = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
#: Values of a padded batch of hidden states, and what int8 makes of them: codes,
#: and a scale per 128.
HIDDEN = 4 * LENGTH * WIDTH
PAYLOAD = HIDDEN + HIDDEN // 128 * 2 + HIDDEN // 64


@pytest.fixture(scope="module")
def build():
    """Makes a family's model, always with the same weights;
    skips what this transformers does not have."""
    reasons = {}

    def make(family, attention="eager", **fields):
        key = family, attention
        if key not in reasons:
            reasons[key] = model_families.missing(*key)
        if reasons[key]:
            pytest.skip(reasons[key])
        return model_families.build(family, attention, **fields)

    return make


@pytest.fixture
def gradients():
    gradckpt.stats.reset()
    return model_families.gradients


def compressed_all(family):
    """Whether every input of every layer that a codec takes was compressed."""
    stats = gradckpt.stats()
    inputs = FAMILIES[family].inputs or FAMILIES[family].layers
    # Some older transformers hand the encoder's states over by keyword,
    # where they stay as they are.
    least = inputs if RECENT else FAMILIES[family].layers
    return stats["eligible"] == stats["compressed"] and least <= stats["compressed"] <= inputs


@pytest.mark.skipif(not RECENT, reason="older transformers have fewer families")
def test_every_family_is_here():
    assert [pair for pair in CASES if model_families.missing(*pair)] == []


@pytest.mark.parametrize(("family", "attention"), CASES)
class TestGradients:
    def test_none_equals_stock_checkpointing(self, family, attention, build, gradients):
        theirs = stock(build(family, attention))
        ours = build(family, attention)
        with gradckpt.enable(ours, compress=None) as handle:
            if RECENT:  # before, whole stacks hold the function
                assert len(handle.modules) == FAMILIES[family].layers
            assert_same(gradients(family, ours), gradients(family, theirs))

    def test_int8(self, family, attention, build, gradients):
        loss, exact, rng = gradients(family, stock(build(family, attention)))
        model = build(family, attention)
        with gradckpt.enable(model, compress="int8"):
            loss2, grads, rng2 = gradients(family, model)
        assert torch.equal(loss, loss2), "exact mode leaves the forward alone"
        assert torch.equal(rng, rng2)
        stats = gradckpt.stats()
        assert compressed_all(family)
        assert 0 < stats["bytes_out"] < 0.26 * stats["bytes_in"]
        assert grads.keys() == exact.keys()
        assert nonzero(grads) == nonzero(exact), "a parameter lost its gradient"
        found = errors(grads, exact)
        assert found.relative <= FAMILIES[family].error
        assert found.cosine >= FAMILIES[family].cosine, found.parameter


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {"attention_dropout": 0.0}), ("bert", {"attention_probs_dropout_prob": 0.0})],
    ids=["llama", "bert"],
)
def test_fused_attention(family, fields, build, gradients):
    """Without dropout in it, SDPA on the CPU is one fused operator."""
    ours, theirs = build(family, "sdpa", **fields), stock(build(family, "sdpa", **fields))
    with gradckpt.enable(ours, compress=None):
        assert_same(gradients(family, ours), gradients(family, theirs))
    _, exact, _ = gradients(family, theirs)
    with gradckpt.enable(ours, compress="int8"), torch.profiler.profile() as profile:
        _, grads, _ = gradients(family, ours)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in profile.key_averages()}
    assert nonzero(grads) == nonzero(exact)
    assert errors(grads, exact).relative <= FAMILIES[family].error


@pytest.mark.parametrize("family", FAMILIES)
class TestCodecs:
    def test_replay(self, family, build, gradients):
        """Differentiates a slightly different forward: its error grows with depth,
        and it may route otherwise."""
        _, exact, rng = gradients(family, stock(build(family)))
        model = build(family)
        with gradckpt.enable(model, compress={"codec": "int8", "fake_quantize": True}):
            _, grads, rng2 = gradients(family, model)
        assert torch.equal(rng, rng2)
        assert nonzero(grads) == nonzero(exact)
        found = errors(grads, exact)
        assert found.relative <= (0.12 if family == "opt" else 0.06)
        if family not in MIXTURES:
            assert found.cosine >= (0.96 if family == "opt" else 0.993), found.parameter


# ---- what is particular to some


def test_encoder_states_are_kept_once(build):
    """Every decoder layer is given them; the layers share one payload."""
    model = build("whisper", decoder_layers=3)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress="int8"):
        loss = model(**FAMILIES["whisper"].batch()).loss
        stats = gradckpt.stats()
        if not RECENT and stats["eligible"] == 2 + 3:
            pytest.skip("this transformers hands the encoder's states over by keyword")
        assert stats["shared"] == 2
        assert stats["live_bytes"] == (2 + 3 + 1) * PAYLOAD
        loss.backward()
        assert gradckpt.stats()["live_bytes"] == 0


@pytest.mark.parametrize(
    ("family", "fields"),
    [("whisper", {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}), ("opt", {"layerdrop": 0.5})],
    ids=["whisper", "opt"],
)
def test_layerdrop(family, fields, build, gradients):
    """Layers that a draw leaves out have no region in that step,
    with torch's checkpointing as with ours."""
    theirs = gradients(family, stock(build(family, **fields)))
    model = build(family, **fields)
    with gradckpt.enable(model, compress=None):
        assert_same(gradients(family, model), theirs)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress="int8"):
        _, grads, _ = gradients(family, model)
    assert 0 < gradckpt.stats()["compressed"] < (FAMILIES[family].inputs or FAMILIES[family].layers)
    assert grads.keys() == theirs[1].keys()
    assert nonzero(grads) == nonzero(theirs[1])


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("whisper", 2), ("vit", 2)])
def test_every_second_layer(family, layers, build, gradients):
    """Of three the first and the third; Whisper's are counted through encoder and decoder."""
    model = build(family)
    if "every_n_layers" not in inspect.signature(model._set_gradient_checkpointing).parameters:
        pytest.skip("this transformers has no every_n_layers")
    theirs = gradients(family, stock(build(family), every_n_layers=2))
    with gradckpt.enable(model, compress=None, every_n_layers=2) as handle:
        assert len(handle.modules) == layers
        assert_same(gradients(family, model), theirs)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress="int8", every_n_layers=2):
        _, grads, _ = gradients(family, model)
    assert gradckpt.stats()["compressed"] == (3 if family == "whisper" else 2)
    assert nonzero(grads) == nonzero(theirs[1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "t5", "whisper", "mixtral"])
def test_use_cache(family, build, gradients):
    """transformers turns the cache off where it checkpoints; nothing else changes."""
    theirs = gradients(family, stock(build(family)), use_cache=True)
    model = build(family)
    with gradckpt.enable(model, compress=None):
        assert_same(gradients(family, model, use_cache=True), theirs)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress="int8"):
        _, grads, _ = gradients(family, model, use_cache=True)
    assert compressed_all(family)
    assert nonzero(grads) == nonzero(theirs[1])


# ---- mixtures of experts


def routes(monkeypatch, model, steps, tokens=256):
    """Trains; for each step the experts chosen in the forward, and those in the recompute,
    layer by layer."""
    chosen = []
    topk = torch.topk

    def noted(*args, **kwargs):
        found = topk(*args, **kwargs)
        chosen.append(found.indices.clone())
        return found

    monkeypatch.setattr(torch, "topk", noted)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        ids = torch.randint(1, VOCAB, (4, tokens // 4), generator=generator)
        optimizer.zero_grad()
        # Without the auxiliary loss, which chooses once more.
        loss = model(input_ids=ids, labels=ids, output_router_logits=False).loss
        forward = list(chosen)
        chosen.clear()
        loss.backward()
        yield forward, chosen[::-1]
        chosen.clear()
        optimizer.step()


EXPERTS = ("eager", "batched_mm", "grouped_mm")
#: What enable takes, and whether the recompute may run on other values than the forward.
MODES = {
    "int8": {"compress": "int8"},
    "int4": {"compress": "int4"},
    "policy": {"compress": "int8", "policy": "save_matmuls:int8"},
    "fake_quantize": {"compress": {"codec": "int8", "fake_quantize": True}},
}


@pytest.mark.parametrize("family", MIXTURES)
class TestRouting:
    def model(self, build, family, experts):
        model = build(family, "sdpa", **{"num_local_experts" if family == "mixtral" else "num_experts": 8})
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation(experts)
        elif experts != "eager":
            pytest.skip(f"this transformers has no {experts} experts")
        return model

    @pytest.mark.parametrize("experts", EXPERTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_recompute_takes_the_same_routes(self, family, experts, mode, build, monkeypatch):
        model = self.model(build, family, experts)
        with gradckpt.enable(model, **MODES[mode]):
            for forward, recompute in routes(monkeypatch, model, steps=4):
                assert len(forward) == len(recompute) == 3
                assert all(map(torch.equal, forward, recompute))

    def test_without_replay_it_does_not(self, family, build, monkeypatch):
        """The control, in the form of experts that nothing would stop:
        the shapes are the same whatever is chosen."""
        model = self.model(build, family, "batched_mm")
        with gradckpt.enable(model, compress={"codec": "int8", "replay_discrete": False}):
            pairs = [pair for step in routes(monkeypatch, model, steps=4) for pair in zip(*step, strict=True)]
        assert not all(torch.equal(*pair) for pair in pairs)

    def test_without_replay_eager_experts_say_so(self, family, build, monkeypatch):
        model = self.model(build, family, "eager")
        with (
            gradckpt.enable(model, compress={"codec": "int8", "replay_discrete": False}),
            pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"),
        ):
            list(routes(monkeypatch, model, steps=4))


# ---- training as it is done


def test_frozen_base_trains_its_head(build, gradients):
    """As with adapters: only what enable_input_require_grads marks flows into the layers. Autograd
    keeps that leaf, so a payload of it would only cost."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    _, exact, _ = gradients("llama", model)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress="int8"):
        _, grads, _ = gradients("llama", model)
    assert gradckpt.stats()["compressed"] == 2
    assert nonzero(grads) == nonzero(exact)
    assert errors(grads, exact).relative <= 0.02


# ---- hidden states by keyword ----


LAYERS = 2
IDS = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
layers_checkpoint_themselves = pytest.mark.skipif(
    not hasattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer"),
    reason="layers do not checkpoint themselves",
)


class ByKeyword(modeling_llama.LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        h = self.embed_tokens(input_ids)
        positions = torch.arange(h.shape[1])[None]
        rotary = self.rotary_emb(h, position_ids=positions)
        for layer in self.layers:
            h = layer(hidden_states=h, position_embeddings=rotary, position_ids=positions)
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(h))


def build_by_keyword():
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


@layers_checkpoint_themselves
@pytest.mark.parametrize("offload", [False, True])
def test_enable_compresses_them(offload):
    model = build_by_keyword()
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


@layers_checkpoint_themselves
def test_patched_compresses_them():
    model = build_by_keyword()
    model._set_gradient_checkpointing(True)
    with gradckpt.patched("int8"):
        assert step(model)[0] == LAYERS


@layers_checkpoint_themselves
def test_compiled_layers_compress_them():
    model = build_by_keyword()
    before = gradckpt.stats()["compiled_tensors"]
    gradckpt.enable(model, "int8")
    torch.compile(model, backend="aot_eager")(input_ids=IDS, labels=IDS).loss.backward()
    assert gradckpt.stats()["compiled_tensors"] - before == LAYERS
