"""gradckpt._planning.config_model: a training step from a config, without weights."""

import contextlib
import json
import re
import resource

import model_families
import pytest
import torch
import transformers
from small_models import SHAPE_8B, SHAPE_70B, TINY
from transformers.utils import logging

import gradckpt
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.kernels import cuda_autocast
from gradckpt._planning.segments import GRADIENTS
from gradckpt._planning.simulation import SimulationMode
from gradckpt._planning.step_trace import simulated, trace_step

logging.set_verbosity_error()
# Of transformers, for the names that PEFT still uses.

BLOCK = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}

#: Name -> class, config, and arguments of a real step.
FAMILIES = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**TINY)),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=96)),
    "bert": ("BertForMaskedLM", transformers.BertConfig(**BLOCK, vocab_size=96)),
    "classifier": ("BertForSequenceClassification", transformers.BertConfig(**BLOCK, vocab_size=96)),
    "answers": ("BertForQuestionAnswering", transformers.BertConfig(**BLOCK, vocab_size=96)),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(
            d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=96, decoder_start_token_id=0
        ),
    ),
    "vit": ("ViTForImageClassification", transformers.ViTConfig(**BLOCK, image_size=32, patch_size=8)),
    "mixtral": ("MixtralForCausalLM", transformers.MixtralConfig(**TINY, num_local_experts=4)),
    "convnext": (
        "ConvNextForImageClassification",
        transformers.ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1], image_size=32),
    ),
}


@pytest.fixture
def llama(write_config):
    return write_config(*FAMILIES["llama"])


def step(planned, tokens, batch=1):
    """Trace a simulated step."""
    return trace_step(planned.model, lambda _: planned.run(tokens, batch))


def gradients(trace):
    """Bytes of the gradients at the end of the step."""
    return sum(size for segment in trace.segments for size, kind in segment.events if kind == GRADIENTS)


def build(name, config, dtype):
    """A real model."""
    torch.set_default_dtype(dtype)
    try:
        return getattr(transformers, name)(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def saved(planned, tokens, batch=1):
    """Bytes that a forward saves for its backward."""
    mode = SimulationMode()
    with simulated(planned.model, mode), mode:
        return gradckpt.residuals(lambda: planned.loss(tokens, batch)).total_bytes


def peak_of(make_batch, model, dtype=None):
    """The peak of a real step, under CUDA's autocast if a dtype is given. Inputs count."""
    casts = torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()
    with cuda_autocast(), gradckpt.track_memory() as memory:
        batch = make_batch()
        with casts:
            loss = model(**batch).loss
        loss.backward()
    return memory.peak


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "fp32") for family in FAMILIES), *((family, "bf16-mixed") for family in ("llama", "gpt2", "mixtral"))],
)
def test_a_step_takes_what_the_real_one_takes(family, dtype, write_config, monkeypatch):
    # torch's own kernels: those of oneDNN copy images into other layouts.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    name, config = FAMILIES[family]
    planned = ConfigModel(write_config(name, config), dtype=dtype)
    text = planned.takes == "tokens"
    samples = 2 if text else 32
    trace = step(planned, 32 if text else None, samples)
    assert not trace.data_dependent  # Mixtral's experts are one grouped product
    assert not any(p.grad is not None for p in planned.model.parameters())

    config.use_cache = False
    real = build(name, config, planned.model.dtype)
    assert {k: v.shape for k, v in planned.model.state_dict().items()} == {
        k: v.shape for k, v in real.state_dict().items()
    }
    assert planned.fixed["weights"] == sum(x.nbytes for x in [*real.parameters(), *real.buffers()])

    def make_batch():
        if not text:
            pixels = torch.zeros(samples, 3, 32, 32)
            return {"pixel_values": pixels, "labels": torch.zeros(samples, dtype=torch.long)}
        ids = torch.zeros(samples, 32, dtype=torch.long)
        if family == "answers":
            names = ("start_positions", "end_positions")
            return {"input_ids": ids, **{name: torch.zeros(samples, dtype=torch.long) for name in names}}
        labels = torch.zeros(samples, dtype=torch.long) if family == "classifier" else torch.zeros_like(ids)
        return {"input_ids": ids, "labels": labels}

    assert trace.peak().size == pytest.approx(peak_of(make_batch, real, planned.autocast), rel=0.005)
    assert gradients(trace) == sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)


def test_long_sequences_save_no_mask(write_config):
    """transformers asks positions whether sequences are packed: simulated ones have values."""
    tokens = 32768
    planned = ConfigModel(
        write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY, max_position_embeddings=tokens))
    )
    assert saved(planned, tokens) < tokens * tokens // 4


def test_a_model_of_70_billion_parameters_takes_no_memory(write_config):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = ConfigModel(write_config("LlamaForCausalLM", transformers.LlamaConfig(**SHAPE_70B)))
    step(planned, 8192)
    assert sum(p.numel() for p in planned.model.parameters()) == 70_553_706_496
    assert planned.fixed["weights"] == pytest.approx(2 * 70_553_706_496)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("bf16-mixed", torch.float32)],
)
def test_dtypes(llama, dtype, stored):
    planned = ConfigModel(llama, dtype=dtype)
    assert {p.dtype for p in planned.model.parameters()} == {stored}
    assert planned.fixed["optimizer states"] == sum(2 * p.nbytes for p in planned.model.parameters())
    seen = []
    planned.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    step(planned, 16)
    assert seen == [torch.bfloat16 if dtype == "bf16-mixed" else stored]
    assert torch.get_default_dtype() is torch.float32


def test_autocast_is_that_of_cuda(write_config):
    """Norms and powers return float32, also when a checkpoint computes them again in backward."""
    planned = ConfigModel(write_config(*FAMILIES["gpt2"]), dtype="bf16-mixed")
    seen = {}
    for name, module in planned.model.transformer.h[0].named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: seen.setdefault(name, []).append(output))
    model_families.turn_on(planned.model, {"use_reentrant": False})
    step(planned, 16)
    dtypes = {
        name: [x.dtype for x in outputs] for name, outputs in seen.items() if name in {"ln_1", "mlp.act", "mlp.c_fc"}
    }
    full, half = [torch.float32] * 2, [torch.bfloat16] * 2
    assert dtypes == {"ln_1": full, "mlp.c_fc": half, "mlp.act": full}

    norm = torch.nn.LayerNorm(8)
    with cuda_autocast(), torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 8, dtype=torch.bfloat16)).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_sources(llama, tmp_path, monkeypatch):
    assert ConfigModel(f"{llama}/config.json").fixed == ConfigModel(llama).fixed
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        assert [x.item() for x in torch.linspace(0, 2, 3)] == [0, 1, 2]\n"  # of stochastic depth
        "        self.table, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)\n"
        "    def forward(self, ids):\n"
        "        return torch.nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())\n"
        "def by_length():\n"
        "    return Net(), lambda tokens, batch: (torch.zeros(batch, tokens, dtype=torch.long),)\n"
        "def fixed():\n"
        "    return Net(), {'ids': torch.zeros(2, 8, dtype=torch.long)}\n"
    )
    monkeypatch.chdir(tmp_path)
    by_length, fixed = ConfigModel("own_model:by_length", dtype="fp32"), ConfigModel("own_model:fixed", dtype="fp32")
    assert (by_length.takes, fixed.takes) == ("tokens", "batch")
    assert by_length.fixed == fixed.fixed == {"weights": 4 * 90, "optimizer states": 8 * 90}
    step(by_length, 8, 2)
    step(fixed, None)
    assert saved(by_length, 8, 2) == saved(fixed, None)
    with pytest.raises(ValueError, match=r"returned no \(model, batch\)"):
        ConfigModel("own_model:Net")
    with pytest.raises(ValueError, match="cannot import 'own_model:nothing'"):
        ConfigModel("own_model:nothing")


def test_tied_weights_count_once(write_config):
    tied = ConfigModel(write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY, tie_word_embeddings=True)))
    untied = ConfigModel(write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY)))
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    assert untied.fixed["weights"] - tied.fixed["weights"] == 2 * 96 * 64


# ---- LoRA


PEFT_CASES = {
    "all linear": ("r=4", {"target_modules": "all-linear"}),
    "dropout": (
        "r=4,alpha=16,dropout=0.1,targets=q_proj+v_proj",
        {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 16, "lora_dropout": 0.1},
    ),
}


@pytest.mark.parametrize("weights", [None, "nf4"])
def test_routers_with_several_outputs_are_no_linear_layers(weights, write_config):
    """transformers quantizes no subclass of nn.Linear, and PEFT fails at such a one."""
    config = transformers.PhimoeConfig(**TINY, num_local_experts=4)
    folder = write_config("PhimoeForCausalLM", config)
    planned = ConfigModel(folder, lora="r=4", weights=weights)
    with pytest.raises(ValueError, match="PhimoeTopKRouter returns several values, so PEFT cannot adapt it"):
        step(planned, 32)
    step(ConfigModel(folder, lora="r=4,targets=q_proj+v_proj", weights=weights), 32)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "bf16-mixed"])
@pytest.mark.parametrize("case", PEFT_CASES)
def test_lora_is_pefts(case, dtype, llama):
    peft = pytest.importorskip("peft")
    text, fields = PEFT_CASES[case]
    planned = ConfigModel(llama, dtype=dtype, lora=text)
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, use_cache=False))
    real = real.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    real = peft.get_peft_model(real, peft.LoraConfig(r=4, **fields)).train()
    real.enable_input_require_grads()

    def sizes(model):
        return sorted((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)

    assert sizes(planned.model) == sizes(real)
    assert planned.fixed["optimizer states"] == sum(2 * p.nbytes for p in real.parameters() if p.requires_grad)
    trace = step(planned, 32, 2)

    def make_batch():
        ids = torch.zeros(2, 32, dtype=torch.long)
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}

    assert trace.peak().size == pytest.approx(peak_of(make_batch, real, planned.autocast), rel=0.005)
    assert gradients(trace) == sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)


@pytest.mark.parametrize("bits", ["nf4", "nf4-nested", "int8"])
def test_frozen_weights_take_the_bytes_of_bitsandbytes(write_config, bits):
    path = write_config("LlamaForCausalLM", transformers.LlamaConfig(**SHAPE_8B))
    plain, packed = ConfigModel(path, lora="r=16"), ConfigModel(path, lora="r=16", weights=bits, prepare="none")
    n = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    tables = 4 * 16 * 32 * 7  # of the 16 values of nf4
    sizes = {
        "nf4": n // 2 + 4 * n // 64 + tables,
        "nf4-nested": n // 2 + n // 64 + 4 * n // (64 * 256) + tables,
        "int8": n + 4 * rows,
    }
    assert plain.fixed["weights"] - packed.fixed["weights"] == 2 * n - sizes[bits]
    assert plain.fixed["optimizer states"] == packed.fixed["optimizer states"]
    assert sizes["nf4"] * 8 / n == pytest.approx(4.5, abs=0.001)
    assert sizes["nf4-nested"] * 8 / n == pytest.approx(4.127, abs=0.001)


def test_what_is_not_quantized_is_float32_as_peft_prepares_it(llama):
    peft = pytest.importorskip("peft")
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).to(torch.bfloat16)
    real = peft.prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    planned = ConfigModel(llama, lora="r=4", weights="nf4")
    found = {name: p.dtype for name, p in planned.model.named_parameters() if "lora" not in name}
    assert found == {name: p.dtype for name, p in real.named_parameters() if name in found}
    assert {torch.float32} == {*found.values()}
    assert "in float32, as PEFT's prepare_model_for_kbit_training casts them" in " ".join(planned.about)
    planned = ConfigModel(llama, lora="r=4", weights="nf4", prepare="none")
    assert all(p.dtype is torch.bfloat16 for name, p in planned.model.named_parameters() if "lora" not in name)


def test_adapters_of_another_dtype(llama):
    planned = ConfigModel(llama, lora="r=4,dtype=bf16", weights="nf4", prepare="none")
    assert {torch.bfloat16} == {p.dtype for p in planned.model.parameters() if p.requires_grad}
    step(planned, 32)


def test_nf4_saves_no_weight(llama):
    """Dequantized weights are temporary, in forward and backward."""
    plain, packed = (ConfigModel(llama, dtype="fp32", lora="r=4", weights=bits) for bits in (None, "nf4"))
    assert saved(plain, 32) == saved(packed, 32)
    step(packed, 32)


def test_int8_layers_hold_their_inputs(llama):
    planned = ConfigModel(llama, lora="r=4", weights="int8", prepare="none")
    mode = SimulationMode()
    with simulated(planned.model, mode), mode:
        loss = planned.loss(32)
    nodes, seen, inputs = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs += [node.input] if type(node).__name__ == "_Matmul8BitBackward" else []
        nodes += [each for each, _ in node.next_functions]
    assert len(inputs) == 7 * 3
    assert all(x.dtype is torch.bfloat16 for x in inputs)
    step(planned, 32)


# ---- optimizers and shards


@pytest.mark.parametrize(
    ("optimizer", "build"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", lambda params: torch.optim.SGD(params, 0.1)),
        ("sgd-momentum", lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)),
        ("adafactor", lambda params: transformers.Adafactor(params)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_the_optimizer(llama, optimizer, build, dtype):
    planned = ConfigModel(llama, optimizer=optimizer, dtype="fp32" if dtype is torch.float32 else "bf16")
    params = [torch.nn.Parameter(torch.ones(p.shape, dtype=dtype)) for p in planned.model.parameters()]
    for p in params:
        p.grad = torch.ones_like(p)
    stepped = build(params)
    stepped.step()
    states = [x for state in stepped.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.dim()]
    assert planned.fixed["optimizer states"] == sum(x.nbytes for x in states)


def test_states_of_8_bits(llama):
    params = list(ConfigModel(llama).model.parameters())
    large, small = [p.numel() for p in params if p.numel() >= 4096], [p.numel() for p in params if p.numel() < 4096]
    assert large
    assert small
    expected = sum(2 * (n + 4 * -(-n // 256)) for n in large) + sum(8 * n for n in small)
    assert ConfigModel(llama, optimizer="adamw-8bit").fixed["optimizer states"] == expected


def test_shards(write_config):
    path = write_config("LlamaForCausalLM", transformers.LlamaConfig(**SHAPE_8B))
    one = ConfigModel(path)
    params = sum(p.numel() for p in one.model.parameters())
    block = sum(p.numel() for p in one.model.model.layers[0].parameters())
    outside = params - 32 * block
    buffers = one.fixed["weights"] - 2 * params
    assert (one.extra, one.gradient_scale) == ({}, 1)

    def of(shard, **given):
        planned = ConfigModel(path, gpus=8, shard=shard, **given)
        return planned.fixed, planned.extra, planned.gradient_scale

    assert of("ddp") == (one.fixed, {"gradient buckets": 2 * params}, 1)
    states = {"optimizer states": 8 * params // 8, "master weights": 4 * params // 8}
    assert of("zero1") == ({"weights": one.fixed["weights"], **states}, {}, 1)
    assert of("zero2") == ({"weights": one.fixed["weights"], **states}, {}, 1 / 8)
    gathered = {
        "gathered blocks": 2 * 2 * block,
        "gathered outside of blocks": 2 * outside,
        "whole gradients": 2 * (2 * block + outside),
    }
    weights = 2 * params // 8 + buffers
    assert of("zero3") == ({"weights": weights, **states}, gathered, 1 / 8)
    assert of("fsdp") == ({"weights": weights, "optimizer states": 4 * params // 8}, gathered, 1 / 8)
    # The shards are float32, what is gathered and multiplied is bfloat16.
    mixed = {"weights": 4 * params // 8 + buffers, "optimizer states": 8 * params // 8}
    assert of("fsdp", dtype="bf16-mixed") == (mixed, gathered, 2 / 8)


# ---- the loss


@pytest.mark.parametrize("loss", ["trl", "liger", "torch"])
def test_a_loss_without_logits_saves_hidden_states_instead(write_config, loss):
    path = write_config("LlamaForCausalLM", transformers.LlamaConfig(**{**TINY, "vocab_size": 5000}))
    tokens = 3000
    plain, chunked = ConfigModel(path), ConfigModel(path, loss=loss)
    logits = tokens * 5000
    assert saved(plain, tokens) - saved(chunked, tokens) > 3.9 * logits
    assert gradients(step(chunked, tokens)) == 2 * sum(p.numel() for p in chunked.model.parameters())
    if loss != "trl":  # whose tile is larger than the logits of so few words
        assert step(plain, tokens).peak().size - step(chunked, tokens).peak().size > 3.9 * logits


@pytest.mark.parametrize("loss", ["trl", "liger", "torch"])
def test_a_loss_without_logits_is_the_models(llama, loss):
    """With real numbers in place of simulated ones."""
    planned = ConfigModel(llama, loss=loss, dtype="fp32")
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).train()
    planned.model, planned._head = real, real.lm_head
    ids = torch.randint(0, 96, (2, 700))
    torch.testing.assert_close(planned._without_logits(ids, ids), real(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("setting", "word", "ours"),
    [
        ("dtype", "float32", "fp32"),
        ("dtype", "torch.float16", "fp16"),
        ("dtype", "half", "fp16"),
        ("optimizer", "adamw_torch_fused", "adamw"),
        ("optimizer", "paged_adamw_8bit", "adamw-8bit"),
    ],
)
def test_words_of_torch_and_transformers(llama, setting, word, ours):
    theirs, found = (ConfigModel(llama, **{setting: each}) for each in (word, ours))
    assert (theirs.about[0], theirs.fixed) == (found.about[0], found.fixed)


# ---- errors


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"dtype": "bfloat"},
            "unknown dtype 'bfloat'; choose one of: bf16, fp16, fp32, bf16-mixed, fp16-mixed",
        ),
        ({"optimizer": "adamz"}, "unknown optimizer 'adamz'; did you mean 'adamw'?"),
        ({"loss": "chunked"}, "unknown loss 'chunked'; choose one of: model, trl, liger, torch"),
        ({"weights": "nf4"}, "weights in nf4 cannot be trained; add --lora, as in --lora r=16"),
        ({"prepare": "peft"}, "--prepare is for quantized weights; add them, as in --weights nf4"),
        ({"weights": "nf4", "lora": "r=4", "prepare": "trl"}, "unknown prepare 'trl'; choose one of: peft, none"),
        ({"lora": "r=4,dtype=int8"}, "LoRA setting dtype is no dtype: 'int8'; write r=16,"),
        ({"weights": "fp4", "lora": "r=4"}, "unknown weights 'fp4'; did you mean 'nf4'?"),
        ({"gpus": 8}, "8 devices, and nothing says what they share; add --shard with one of: ddp"),
        ({"shard": "fsdp"}, "fsdp needs more than one device; add their number, as in --gpus 8"),
        ({"gpus": 8, "shard": "zero"}, "unknown shard 'zero'; did you mean"),
        ({"lora": "rank=4"}, "unknown LoRA setting 'rank=4'; write r=16,"),
        ({"lora": "r=four"}, "LoRA setting r is not a number: 'four'; write r=16,"),
        ({"lora": "alpha=4"}, "a LoRA rank of None; write r=16,"),
        ({"lora": "r=4,dropout=1"}, "a LoRA dropout of 1.0; give a probability below 1"),
        (
            {"lora": "r=4,targets=query"},
            "no linear layer is named 'query'; choose one of: down_proj, gate_proj, k_proj, lm_head,",
        ),
    ],
)
def test_wrong_settings(llama, given, text):
    with pytest.raises(ValueError, match="^gradckpt: " + re.escape(text)):
        ConfigModel(llama, **given)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": None}, "the config has no 'architectures'; add the class to train"),
        ({"num_hidden_layers": -3}, "the config's 'num_hidden_layers' is -3; give 1 or more"),
        ({"num_hidden_layers": 0}, "the config's 'num_hidden_layers' is 0; give 1 or more"),
        ({"architectures": [None]}, "the config has no 'architectures'; add the class to train"),
        ({"architectures": "LlamaForCausalLM"}, "the config has no 'architectures'; add the class to train"),
        ({"architectures": ["LlamaForNothing"]}, "has no class 'LlamaForNothing'"),
        ({"architectures": ["OwnModel"], "auto_map": {}}, "has no class 'OwnModel' without remote code"),
        (
            {"architectures": ["LlamaModel"]},
            "the loss of LlamaModel is unknown; name LlamaForCausalLM or LlamaForQuestionAnswering in 'architectures', "
            "or give package.module:function that returns (model, batch)",
        ),
        ({"model_type": "gpt9"}, "knows no model_type 'gpt9'"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ],
)
def test_wrong_configs(write_config, change, text):
    with pytest.raises(ValueError, match="^gradckpt: .*" + re.escape(text)):
        ConfigModel(write_config(*FAMILIES["llama"], **change))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(tmp_path, field):
    """transformers would take its default, and plan another model."""
    config = {**transformers.LlamaConfig(**TINY).to_dict(), "architectures": ["LlamaForCausalLM"]}
    del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^gradckpt: the config has no '{field}'; add it$"):
        ConfigModel(str(tmp_path))


def test_wrong_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        ConfigModel(str(tmp_path))
    (tmp_path / "llama.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"is a GGUF file; give the config\.json of the model that it was made from"):
        ConfigModel(str(tmp_path / "llama.gguf"))
    for missing in ("nothing/config.json", "./nothing", "nothing.json", str(tmp_path / "nothing")):
        with pytest.raises(ValueError, match="there is no file"):
            ConfigModel(missing)
    with pytest.raises(ValueError, match=r"no config\.json of 'org/no-such-model' on the hub"):
        ConfigModel("org/no-such-model")


def test_wrong_steps(write_config, llama):
    planned = ConfigModel(write_config(*FAMILIES["gpt2"]))
    assert planned.positions == 1024
    with pytest.raises(ValueError, match="2,000 tokens, and the model has 1,024 positions; give fewer"):
        step(planned, 2000)
    with pytest.raises(ValueError, match="the length of a sequence is missing"):
        step(planned, None)
    images = ConfigModel(write_config(*FAMILIES["vit"]))
    with pytest.raises(ValueError, match="tokens follow from the image size; leave out the number of tokens"):
        step(images, 64)
    with pytest.raises(ValueError, match="BertForMaskedLM has no causal language model's head"):
        ConfigModel(write_config(*FAMILIES["bert"]), loss="trl")
