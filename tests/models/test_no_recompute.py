"""enable(model, recompute=False): saves compressed, nothing run again."""

import collections
import copy
import gc
import pickle

import model_families
import pytest
import torch
from model_families import FAMILIES, MIXTURES, build, errors, gradients, missing
from small_models import Block as Residual
from small_models import config_of
from torch import nn

import gradckpt
from gradckpt import GradckptInactiveWarning

transformers = pytest.importorskip("transformers")

LAYERS, WIDTH, VOCAB, LENGTH = 8, 256, 512, 256


@pytest.fixture(autouse=True)
def fresh():
    gc.collect()
    gradckpt.stats.reset()


def llama(layers=LAYERS, **fields):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
        **fields,
    )
    return transformers.LlamaForCausalLM(config)


def ids(rows=1):
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def step(model, **more):
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids(), **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(ours, exact):
    return errors(ours, exact).relative


# ---- what it is ----

#: What payloads need: memory, copies, and whether values of attention and softmax are small.
PAYLOADS = {
    "empty",
    "empty_strided",
    "detach",
    "as_strided",
    "as_strided_",
    "resize_",
    "view",
    "set_",
    "to",
    "_to_copy",
}
PAYLOADS |= {"copy_", "fill_", "all", "lt", "abs", "clamp", "item", "is_nonzero", "_local_scalar_dense"}


def operators(model):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step(model)
    names = (event.name for event in profile.events())
    return collections.Counter(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_every_operator_runs_once_but_attention_beside_a_codec_that_rounds(codec):
    model = llama(2)
    step(model)
    plain = operators(model)
    assert plain["mm"] == 3 * (7 * 2 + 1)  # forward, and twice in the backward
    with gradckpt.enable(model, codec, recompute=False):
        ours = operators(model)
    print(f"beside plain autograd's {plain.total()} operators: {dict(ours - plain)}")
    again = ours - plain
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert again[attention] == (len(model.model.layers) if codec == "int8" else 0)
    assert set(again) <= PAYLOADS | ({attention, "transpose", "empty_like"} if codec == "int8" else set())
    assert set(plain - ours) <= PAYLOADS


@pytest.mark.parametrize(
    ("compress", "most"), [("int8", 0.015), ("int6", 0.03), ("lossless", 0), ("raw", 0), ({"linear": "int8"}, 0.015)]
)
def test_the_loss_is_exact_and_gradients_have_the_codecs_error(compress, most):
    model = llama()
    loss, exact = step(model)
    with gradckpt.enable(model, compress, recompute=False) as handle:
        ours, found = step(model)
        assert list(handle.modules) == [""]
    assert torch.equal(ours, loss)
    assert gradckpt.stats()["regions"] == gradckpt.stats()["recomputes"] == 0
    print(f"{compress}: gradient error {error(found, exact):.4%}")
    if most:
        assert 0 < error(found, exact) <= most
    else:
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    again, found = step(model)
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], exact[name]) for name in exact), "removed"


def backward_transient(memory):
    """The most that a backward allocates beside what was saved, in bytes."""
    points = memory.timeline
    top = max(range(len(points)), key=lambda i: points[i].saves)
    return max(point.transient for point in points[top:])


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_peak(codec):
    """The payloads, what stays exact, plain autograd's transient, and one product's two factors."""
    model = llama(16)

    def track():
        model.zero_grad(set_to_none=False)  # gradients exist: they are no part of the peak
        gc.collect()
        with gradckpt.track_memory() as memory:
            model(input_ids=ids(), labels=ids()).loss.backward()
        return memory

    step(model)
    transient = backward_transient(track())
    with gradckpt.enable(model, codec, recompute=False):
        measured = track().peak
        gradckpt.stats.reset()
        loss = model(input_ids=ids(), labels=ids()).loss
        payloads = gradckpt.stats()["live_bytes"]
        del loss
    factors = 2 * LENGTH * 688 * 4
    expected = payloads + transient + factors
    print(
        f"peak {measured / 2**20:.2f} MiB, {measured / expected - 1:+.2%} of the arithmetic; "
        f"{measured / (expected - factors) - 1:+.2%} without the factors"
    )
    assert 0.9 < measured / expected <= 1, "the head's payloads are released before the peak"


# ---- every family ----


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    reason = missing(family, "sdpa")
    attention = "sdpa" if reason is None else "eager"
    model = build(family, attention)
    loss, exact, state = gradients(family, model)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded, _ = gradients(family, build(family, attention))
    with gradckpt.enable(model, {"codec": "int8", "min_numel": 256}, recompute=False):
        ours, found, ours_state = gradients(family, model)
    assert torch.equal(ours, loss)
    assert torch.equal(ours_state, state)
    assert gradckpt.stats()["compressed"] > 0
    assert all(gradient.isfinite().all() for gradient in found.values())
    floor = error(rounded, exact)
    print(f"{family}: error {error(found, exact):.2%}, bf16 autocast {floor:.2%}")
    assert error(found, exact) <= 2 * floor or family in MIXTURES
    with gradckpt.enable(model, {"codec": "lossless", "min_numel": 256}, recompute=False):
        _, found, _ = gradients(family, model)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_a_model_without_repeated_blocks():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(16, 3, 16, 16)
    gradckpt.enable(model, {"codec": "int8", "min_numel": 16}, recompute=False)
    model(x).backward()
    assert gradckpt.stats()["compressed"] > 5


# ---- the model stays a model ----


def test_modes():
    model = llama(2)
    gradckpt.enable(model, recompute=False)
    with torch.no_grad():
        model(input_ids=ids())
    model.eval()
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert gradckpt.stats()["eligible"] == 0
    model.train()
    step(model)
    assert gradckpt.stats()["compressed"] > 0


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_their_own(way):
    model = llama(2)
    keys = list(model.state_dict())
    gradckpt.enable(model, "int4", recompute=False)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    gradckpt.disable(model)
    assert list(model.state_dict()) == list(other.state_dict()) == keys
    step(model)
    assert gradckpt.stats()["compressed"] == 0
    step(other)
    assert gradckpt.stats()["codecs"].keys() >= {"int4"}
    gradckpt.disable(other)
    assert "forward" not in vars(other)


def test_equal_arguments_do_nothing_and_others_change_it():
    model = llama(2)
    handle = gradckpt.enable(model, recompute=False)
    forward = vars(model)["forward"]
    gradckpt.enable(model, "int8", recompute=False)
    assert vars(model)["forward"] is forward
    gradckpt.enable(model, "int4", recompute=False)
    assert config_of(handle).codec == "int4"
    gradckpt.enable(model)
    assert len(handle.modules) == 2
    assert "forward" not in vars(model)
    gradckpt.enable(model, recompute=False)
    assert [settings["recompute"] for settings in handle.modules.values()] == [False]
    assert "int8, recompute=False" in repr(handle)


def test_accumulation_and_two_forwards_before_a_backward():
    model = llama(2)
    exact = 2 * step(model)[1]["lm_head.weight"]
    with gradckpt.enable(model, "lossless", recompute=False):
        model.zero_grad()
        first, second = (model(input_ids=ids(), labels=ids()).loss for _ in range(2))
        first.backward()
        second.backward()
    assert torch.equal(model.lm_head.weight.grad, exact)


def test_chosen_modules_and_mixtures():
    model = llama(4)
    _, exact = step(model)
    rules = {gradckpt.selectors.every(2, "layer"): None, "layer": {"recompute": False, "compress": "lossless"}}
    with gradckpt.enable(model, modules=rules) as handle:
        _, found = step(model)
        kinds = [settings.get("recompute", True) for settings in handle.modules.values()]
    assert kinds == [True, False, True, False]
    assert gradckpt.stats()["recomputes"] == 2
    assert gradckpt.stats()["codecs"].keys() == {"lossless"}
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    with gradckpt.enable(model, modules={"mlp": {"linear": "fp8"}}, recompute=False) as handle:
        assert {key for key, codec in config_of(handle).operators if codec} == {"linear"}
    with gradckpt.enable(model, recompute=False, modules="layer", every_n_layers=2) as handle:
        assert list(handle.modules) == ["model.layers.0", "model.layers.2"]
    with gradckpt.enable(model, recompute=False, modules={"mlp": "int4", "attention": {"recompute": True}}) as handle:
        assert {each.get("recompute", True) for each in handle.modules.values()} == {True, False}


# ---- what is said ----


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(2), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    _, exact = step(model)
    handle = gradckpt.enable(model, recompute=False)
    assert list(handle.modules) == ["base_model.model"]
    _, found = step(model)
    assert found.keys() == exact.keys()
    assert 0 <= error(found, exact) < 0.02
    assert gradckpt.stats()["compressed"] > 0
    handle.remove()
    assert all(torch.equal(each, exact[name]) for name, each in step(model)[1].items())


def train(forward, optimizer):
    for _ in range(2):
        forward().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"policy": "save_attention"}, "recompute=False and policy= exclude each other; nothing is recomputed"),
        ({"early_stop": True}, "recompute=False and early_stop= exclude each other"),
        ({"compress": None}, "recompute=False and compress=None exclude each other, since nothing would change"),
        ({"compress": {"fake_quantize": True}}, "fake_quantize=True applies to regions"),
        ({"compress": {"include": "floating"}}, "include='floating' applies to the arguments of regions"),
        ({"every_n_layers": 2}, "recompute=False and every_n_layers= exclude each other without modules="),
        ({"compress": {"attn": "int8"}}, "unknown field 'attn'"),
        ({"compress": {"liner": "int8"}}, "unknown field 'liner' in a compression config; did you mean 'linear'"),
        ({"modules": {"mlp": {"policy": "save_matmuls"}}}, "recompute=False and policy= exclude each other"),
        ({"modules": {"mlp": {"recompute": False}}, "recompute": True, "early_stop": False}, "and early_stop= exclude"),
        ({"modules": {"mlp": None}}, "recompute=False and compress=None exclude each other"),
        ({"modules": ["layer", "mlp"]}, "both are chosen, so the outer one would find payloads"),
    ],
    ids=str,
)
def test_what_excludes_it(keywords, said):
    model = llama(2)
    with pytest.raises(ValueError, match=f"^gradckpt: .*{said}"):
        gradckpt.enable(model, **{"compress": "int8", "recompute": False, **keywords})
    assert "forward" not in vars(model)


def test_a_forward_whose_body_runs_later():
    class Later(nn.Module):
        def forward(self, x):
            yield x

    with pytest.raises(TypeError, match="its body runs after the call"):
        gradckpt.enable(Later(), recompute=False)


def test_operators_are_of_saves_alone():
    with pytest.raises(ValueError, match=r"^gradckpt: operators= applies to what compress_saved\(\) keeps"):
        gradckpt.enable(llama(2), {"linear": "fp8"})


def test_checkpointing_inside_or_around_is_an_error():
    model = llama(2)
    gradckpt.enable(model, recompute=False)
    model_families.turn_on(model, {"use_reentrant": False})
    with pytest.raises(ValueError, match="in this LlamaForCausalLM with recompute=False is checkpointed already"):
        step(model)
    model_families.turn_off(model)
    with pytest.raises(ValueError, match="runs inside torch's own checkpoint"):
        torch.utils.checkpoint.checkpoint(lambda: model(input_ids=ids(), labels=ids()).loss, use_reentrant=False)
    step(model)
    assert gradckpt.stats()["compressed"] > 0


def test_a_loop_that_never_trains_the_model_is_told():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    gradckpt.enable(model, recompute=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(GradckptInactiveWarning, match="they are in eval mode"):
        train(lambda: model(torch.randn(64, 64)), optimizer)
