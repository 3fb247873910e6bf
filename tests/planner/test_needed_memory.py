"""What a step needs of a device: its simulated allocations, in the model of torch's allocator."""

import functools

import pytest
import torch
from torch import nn

import gradckpt
from gradckpt._planning import profile as profiles
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.config_profile import ConfigProfile, shortened, unrolled
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.devices import find, rates_of
from gradckpt._planning.options import RECOMPUTE, find_blocks
from gradckpt._planning.segments import StepTrace, held_blocks, memory_use, pairs
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import READY

transformers = pytest.importorskip("transformers")
import bench_needed  # noqa: E402

WORDS = 512


# ---- Llama-like models in bfloat16 beside torch's checkpoint


@functools.cache
def uses(name):
    return bench_needed.row_of(name, bench_needed.ROWS[name])


@pytest.mark.parametrize("name", ["24 x 1024, 4 x 4k", "28 x 3072, 16k", "32 x 4096, 4k"])
def test_int8_needs_less_than_torch_as_it_allocates_less(name):
    """Codes of a payload have half the bytes of a bf16 input, so its block holds two."""
    torchs, int8 = uses(name)["torch"], uses(name)["int8"]
    assert int8["needed"] <= 0.77 * torchs["needed"]
    assert int8["needed"] / int8["allocated"] <= 1.02 * torchs["needed"] / torchs["allocated"]
    joined = uses(name)["int8, codes and scales in one"]
    assert joined["allocated"] <= 1.001 * int8["allocated"]
    assert joined["needed"] > 1.15 * int8["needed"]


# ---- a shorter step that stands for a whole one


SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 10, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def gpt2():
    shape = {"n_embd": 128, "n_layer": 10, "n_head": 4, "n_positions": 512, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, use_cache=False))


def t5():
    shape = {"d_model": 128, "d_ff": 256, "num_layers": 9, "num_decoder_layers": 9, "num_heads": 4, "d_kv": 32}
    config = transformers.T5Config(**shape, vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def gemma3():
    """Of six layers one has no window; 26 end within a pattern."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 26, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": WORDS, "sliding_window": 64}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))


def of_turns():
    """Blocks of which each third needs other memory."""
    config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 19})
    model = transformers.LlamaForCausalLM(config)
    for i in range(2, 19, 3):
        model.model.layers[i].mlp = transformers.models.llama.modeling_llama.LlamaMLP(
            transformers.LlamaConfig(**SHAPE | {"intermediate_size": 1024})
        )
        model.model.layers[i].self_attn.requires_grad_(False)
    return model


def mixtral():
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    model.config._experts_implementation = "eager"
    return model


def vit():
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 10, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, image_size=64, patch_size=4))


@pytest.mark.parametrize("build", [llama, gpt2, t5, vit, mixtral, gemma3, of_turns])
def test_a_shorter_step_needs_what_the_whole_one_does(build):
    """Under autocast, which keeps casts of weights until it ends, too."""
    with torch.device("meta"):
        model = build().train()
    ids = torch.randint(1, WORDS, (2, 256))
    batch = {"input_ids": ids, "labels": ids}
    if build is vit:
        batch = {"pixel_values": torch.zeros(8, 3, 64, 64), "labels": torch.zeros(8, dtype=torch.long)}
    else:
        model.to(torch.bfloat16)
    blocks = find_blocks(model)

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=build is vit):
            loss = model(**batch).loss
        loss.backward()

    for setting in READY:
        with setting.active(model):
            whole = trace_step(model, step, batch, blocks=blocks, cuda=True)
        with shortened(model, blocks) as short, setting.active(model):
            part = trace_step(model, step, batch, blocks=short.modules, cuda=True)
        assert len(part.segments) < len(whole.segments)
        found = unrolled(part.segments, short.copies)
        assert memory_use(found) == memory_use(whole.segments), setting.name
        short_peak, whole_peak = StepTrace(found, False).peak(), whole.peak()
        assert (short_peak.size, short_peak.parts) == (whole_peak.size, whole_peak.parts)
        assert whole_peak.size == memory_use(found)["requested"]


# ---- a device's payloads


class Chain(nn.Module):
    def __init__(self, n=6, width=1024):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(n))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.sin())
        return x.square().mean()


#: Of a tensor between blocks.
INPUT = 8192 * 1024 * 4


def kept(compress, model):
    """The bytes of each storage that is alive between forward and backward."""
    alive = {}
    x = torch.empty(8192, 1024, device="meta", requires_grad=True)
    gradckpt.enable(model, compress, modules=nn.Linear)
    trace = trace_step(model, lambda x: model(x * 1).backward(), x, blocks=list(model.blocks), cuda=True)
    gradckpt.disable(model)
    for segment in trace.segments:
        if segment.phase == "backward":
            break
        for size, storage in pairs(segment.changes):
            if size > 0:
                alive[storage] = size
            else:
                alive.pop(storage, None)
    return list(alive.values())


@pytest.mark.parametrize("n", [4, 8])
def test_two_originals_are_held_for_a_late_answer(n):
    """`lossless` may overflow: its originals stay until a device answers, and at most two."""
    model = Chain(n)
    assert kept("lossless", model).count(INPUT) - kept("int8", model).count(INPUT) == 2


@pytest.mark.parametrize("cuda", [False, True])
def test_payloads_are_shared_where_a_device_shares_them(cuda):
    """Two regions of one tensor. A device shares none yet: the switch is may_share() of
    csrc/engine/payload/sharing.c."""
    model = nn.ModuleList([nn.Linear(1024, 1024), nn.Linear(1024, 1024)])
    x = torch.empty(8192, 1024, device="meta", requires_grad=True)
    found = []

    def step(given):
        y = given * 1
        a, b = (gradckpt.checkpoint(layer, y, compress="int8") for layer in model)
        found.append(gradckpt.stats()["shared"])
        (a + b).sum().backward()

    gradckpt.stats.reset()
    trace_step(model, step, x, cuda=cuda)
    assert found == [0 if cuda else 1]


# ---- plans


def test_a_plan_of_a_config_holds_its_budget_by_what_is_needed(write_config):
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=WORDS, use_cache=False)
    source = ConfigModel(write_config("LlamaForCausalLM", config))
    profile = ConfigProfile(source, 1024, 16, compress=["int8"], rates=rates_of(find("A100-80GB"), True))
    fixed = {**source.fixed, **source.extra}
    held = held_blocks(source.model, fixed)
    assert sum(held) == sum(fixed.values())
    sizes = {option: profile.size_of(trace) for option, trace in profile.traces.items()}
    most, least = max(sizes.values()), min(sizes.values())
    for part in (0.1, 0.5, 0.9):
        budget = Budget(sum(held) + int(least + part * (most - least)), False, "a budget")
        chosen = profile.fastest(profile.chain(), budget, fixed)
        plan = profile.result(chosen, budget, fixed, [])
        assert plan.peak < plan.needed <= plan.budget
        blocks = find_blocks(source.model)
        with profile.setting(profile.of_choice(chosen.choice)).active(source.model):
            whole = trace_step(source.model, lambda _: source.run(1024, 16), blocks=blocks, cuda=True)
        assert memory_use(whole.segments, held)["needed"] == plan.needed
        assert f"{gradckpt._stats.format_bytes(plan.needed)} needed" in str(plan)
        assert gradckpt.Plan.from_dict(plan.to_dict()).needed == plan.needed


def test_a_live_models_budget_on_a_device_is_of_what_is_needed(monkeypatch):
    """Without a card: the model is said to be on one, where nothing runs."""
    monkeypatch.setattr(profiles, "device_of", lambda model: torch.device("cuda"))
    monkeypatch.setattr(profiles, "other_tensors", lambda device, known: 0)
    model = Chain(4)
    x = torch.randn(64, 1024)
    profile = profiles.Profile(model, lambda batch: model(batch).backward(), x, modules=nn.Linear)
    trace = profile.traces[RECOMPUTE]
    needed = memory_use(trace.segments, held_blocks(model, profile.fixed))["needed"]
    assert profile.size_of(trace) == needed - profile.held > trace.peak().size
    exact = Budget(needed, False, "exactly")
    assert profile.size_of(profile.fastest(profile.chain(), exact, profile.fixed).trace) <= needed - profile.held
    least = profile.smallest(profile.chain())
    size = profile.held + profile.size_of(profile.trace_of(least))
    with pytest.raises(ValueError, match=f"the smallest budget is .* {chr(92)}({size} bytes"):
        profile.fastest(profile.chain(), Budget(size - 1, False, "less"), profile.fixed)


def test_what_is_held_is_held_tensor_by_tensor():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    weights = [128, 16, 16, 16]
    buffers = [16, 16, 8]
    fixed = {"parameters and buffers": 216, "gradients": 176, "optimizer states": 352, "other tensors": 5, "none": 0}
    assert held_blocks(model, fixed) == [*weights, *buffers, *weights, *weights, *weights, 5, 0]
