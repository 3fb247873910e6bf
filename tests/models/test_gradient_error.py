"""gradckpt.gradient_error: its figures are those of a plain script, it leaves nothing behind, and
never reports an error of what was not compressed."""

import contextlib
import json
import os
import warnings

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

import model_families
from model_families import FAMILIES
from processes import SharedCount
from small_models import Untouched

import gradckpt
from gradckpt import _trial_process
from gradckpt._stats import compiled

CODECS = ("int8", "fp8", "int6", "int4")


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.norm(self.up(x).tanh()))


class Net(nn.Module):
    """BatchNorm and dropout; ``call``: how its forward calls a block."""

    def __init__(self, call=lambda block, x: block(x), reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.call, self.reduction = nn.Linear(128, 4), call, reduction

    def forward(self, x, y):
        for block in self.blocks:
            x = self.call(block, x)
        return nn.functional.cross_entropy(self.head(x), y, reduction=self.reduction)


def batch(size=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 128, generator=generator), torch.randint(0, 4, (size,), generator=generator)


# ---- the figures ----


def by_hand(model, given, codec, autocast=False):
    """A plain script: all gradients in one float64 vector."""
    torch.manual_seed(2)
    model.zero_grad()
    with gradckpt.enable(model, codec), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**given).loss.backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def error_by_hand(exact, found, scale=1.0):
    exact, found = (torch.cat([g.flatten() for g in grads.values()]) for grads in (exact, found))
    return ((scale * found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "t5"])
def test_figures_are_those_of_a_plain_script(family):
    model, given = model_families.build(family, "eager"), FAMILIES[family].batch()
    exact = by_hand(model, given, None)
    torch.manual_seed(2)
    result = gradckpt.gradient_error(model, given)
    assert [each.name for each in result] == list(CODECS)
    for codec in CODECS:
        found = by_hand(model, given, codec)
        assert result[codec].total == pytest.approx(error_by_hand(exact, found), rel=5e-4)
        both = [torch.cat([g.flatten() for g in grads.values()]) for grads in (exact, found)]
        assert result[codec].cosine == pytest.approx(torch.cosine_similarity(*both, dim=0).item(), abs=1e-9)
        alone = {
            n: error_by_hand({n: exact[n]}, {n: found[n]}) for n in exact if exact[n].norm() > 1e-6 * both[0].norm()
        }
        (name, worst), *_ = result[codec].worst
        assert worst == pytest.approx(max(alone.values()), rel=5e-4)
        assert alone[name] == pytest.approx(worst, rel=5e-4)
        assert result[codec].loss_difference == 0
    bf16, samples = (floor.total for floor in result.floors)
    assert bf16 == pytest.approx(error_by_hand(exact, by_hand(model, given, None, autocast=True)), rel=0.05)
    halves = [{key: x[half] for key, x in given.items()} for half in (slice(None, 2), slice(2, None))]
    assert samples == pytest.approx(
        sum(error_by_hand(exact, by_hand(model, half, None)) for half in halves) / 2, rel=5e-4
    )


def test_a_sum_over_the_batch_is_scaled():
    mean, total = (
        gradckpt.gradient_error(Net(reduction=reduction).train(), batch(), "int8") for reduction in ("mean", "sum")
    )
    assert total.floors[1].total == pytest.approx(mean.floors[1].total, rel=1e-3)


def test_one_sample_is_halved_by_its_tokens():
    model = model_families.build("llama", "eager")
    ids = torch.randint(0, 96, (1, 32), generator=torch.Generator().manual_seed(1))
    floor = gradckpt.gradient_error(model, {"input_ids": ids, "labels": ids}, "int8").floors[1]
    assert floor.name == "tokens"
    assert 0.1 < floor.total < 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_floor_of_bf16_for_other_dtypes(dtype):
    model = Net().to(dtype)
    x, y = batch()
    floor = gradckpt.gradient_error(model, (x.to(dtype), y), "lossless").floors[0]
    assert (floor.total, floor.note) == (None, f"the parameters are {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alone", [True, False])
def test_within_autocast_all_steps_run_under_it(dtype, alone, monkeypatch):
    """Beside what the training does: the floor is what its autocast changes of float32."""
    if not alone:
        monkeypatch.setattr(_trial_process, "can_fork", lambda: False)

    def exactly(codec, enabled=True):
        model = Net().train()
        torch.manual_seed(2)
        with gradckpt.enable(model, codec, modules=Block):
            with torch.autocast("cpu", dtype, enabled=enabled):
                loss = model(*batch())
            loss.backward()
        return {name: p.grad.double().clone() for name, p in model.named_parameters()}

    model = Net().train()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype):
        found = gradckpt.gradient_error(model, batch(), ["int8", "lossless"], modules=Block)
        assert torch.is_autocast_enabled("cpu")
    exact = exactly(None)
    assert found["lossless"].total == 0
    assert found["int8"].total == pytest.approx(error_by_hand(exact, exactly("int8")), rel=5e-4)
    name = str(dtype).removeprefix("torch.")
    assert str(found).splitlines()[1] == f"parameters in float32, autocast to {name}"
    floor, samples = found.floors
    assert floor.total == pytest.approx(error_by_hand(exact, exactly(None, enabled=False)), rel=5e-3)
    assert floor.what == f"computing in {'bf16' if dtype is torch.bfloat16 else 'fp16'}"
    assert samples.total
    assert found.to_dict()["precision"] == found.precision


def test_the_precision_of_a_function_and_of_mixed_parameters():
    model = Net()
    assert gradckpt.gradient_error(model, lambda: autocast_inside(model), "lossless").precision.endswith(
        "autocast to bfloat16"
    )
    model.head.to(torch.bfloat16)
    model.head.forward = lambda x: nn.functional.linear(x, model.head.weight.float(), model.head.bias.float())
    assert gradckpt.gradient_error(model, batch(), "lossless").precision == (
        "parameters in bfloat16 and float32, no autocast"
    )


def autocast_inside(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch())


@pytest.mark.parametrize("inside", [True, False])
def test_no_floor_of_bf16_for_a_step_in_16_bits(inside):
    model = Net()
    with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        result = gradckpt.gradient_error(model, lambda: autocast_inside(model), "int8")
    assert (result.floors[0].total, result.floors[0].note) == (None, "the step computes in 16 bits already")
    assert result["int8"].total > 0


# ---- nothing is left behind ----


def prepared(enabled):
    """A model in the middle of training: with gradients, running statistics, some random draws."""
    model = Net()
    gradckpt.config.set_rounding_state((0, 0))
    if enabled:
        gradckpt.enable(model, {"codec": "int4", "stochastic": True}, modules=model.blocks[1:])
    model(*batch()).backward()
    model.head.bias.grad = None
    model.blocks[0].up.bias.requires_grad_(False)
    model.blocks[1].drop.eval()
    return model


STOCHASTIC = gradckpt.CompressionConfig("int4", stochastic=True)


@pytest.mark.parametrize("enabled", [False, True])
def test_nothing_is_left_behind(enabled):
    model = prepared(enabled)
    candidates = ["int8", STOCHASTIC, "selective int8", "compress_saved int8", "torch", "none"]
    with Untouched(model):
        result = gradckpt.gradient_error(model, batch(), candidates)
    assert len(result) == len(candidates)
    assert result["torch"].total == result["none"].total == 0


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("forks", [True, False])
def test_nothing_is_left_behind_by_an_error(call, forks, monkeypatch):
    """In the reference, and in a candidate; in between, an error of a floor is only noted. A step
    that fails in a child runs here, too."""
    monkeypatch.setattr(_trial_process, "can_fork", lambda: forks)
    model, calls = prepared(True), SharedCount()

    def step():
        calls.add()
        model(*batch()).backward()
        if calls.value >= call:
            model.blocks[0].norm.running_mean = torch.zeros(128)
            raise ZeroDivisionError("on purpose")

    with Untouched(model), pytest.raises(ZeroDivisionError) if call != 5 else contextlib.nullcontext():
        gradckpt.gradient_error(model, step, ["int8", "int4"])
    assert calls.value == (3 if call == 2 else min(call, 4)) + (forks and call != 5)


def test_an_input_that_requires_grad_keeps_its_gradient():
    x, y = batch()
    x.requires_grad_()
    gradckpt.gradient_error(Net(), (x, y), "int8")
    assert x.grad is None


def test_what_compressed_nothing_has_no_error_and_is_no_step_of_the_training():
    """No GradckptInactiveWarning either, which pytest would raise."""
    gradckpt.stats.reset()
    model, small = Net(), batch(4)
    result = gradckpt.gradient_error(model, lambda: [model(*small).backward() for _ in range(3)], "int8")
    assert result["int8"].total is None
    assert "smaller than min_numel" in result.verdict
    assert gradckpt.stats()["steps"] == 0


def test_a_warning_about_the_training_itself_comes_once(monkeypatch):
    monkeypatch.setattr(compiled, "ever", False)  # by another test of this process
    gradckpt.stats.reset()
    model = Net()
    gradckpt.enable(model, "int8")
    gradckpt.gradient_error(model, batch(), ["int8", "int4"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
    assert ["never called" in str(each.message) for each in given] == [True]


# ---- cost ----


def test_number_of_samples_computed():
    """Three steps (exact, bf16, two halves) and one for each candidate."""
    model, seen = Net(), SharedCount()
    model.register_forward_pre_hook(lambda _, args: seen.add(len(args[0])))
    gradckpt.gradient_error(model, batch(), CODECS)
    assert seen.value == (3 + len(CODECS)) * 64
    seen.clear()
    gradckpt.gradient_error(model, lambda: model(*batch()), "int8")
    assert seen.value == 3 * 64


def test_memory_is_that_of_a_step_and_one_copy_of_the_gradients():
    model = model_families.build("llama", "sdpa", hidden_size=256, intermediate_size=512)
    given = {key: torch.cat(4 * [x]) for key, x in FAMILIES["llama"].batch().items()}
    gradients = sum(4 * p.numel() for p in model.parameters())
    with gradckpt.track_memory() as step, gradckpt.enable(model, None):
        model(**given).loss.backward()
    model.zero_grad()
    with gradckpt.track_memory() as whole:
        gradckpt.gradient_error(model, given)
    assert whole.peak - step.peak <= 1.05 * gradients


# ---- what is shown ----


def test_table_and_dict():
    result = gradckpt.gradient_error(Net(), batch(), {"mine": "int8", "theirs": "torch"})
    text = str(result).splitlines()
    assert text[0] == "gradients of one step of Net, beside exact recomputing"
    assert text[1] == result.precision == "parameters in float32, no autocast"
    assert text[2].split() == ["setting", "error", "cosine", "loss", "worst", "parameter"]
    assert [line.split()[0] for line in text[3:7]] == ["mine", "theirs", "computing", "choosing"]
    assert text[-1] == result.verdict
    assert result.verdict.startswith("mine changes the gradients by ")
    assert json.loads(json.dumps(result.to_dict()))["errors"][0]["total"] == result[0].total
    assert result["theirs"].total == 0
    with pytest.raises(KeyError, match="int8"):
        result["int8"]


# ---- wrong calls ----


class Detached(Net):
    def forward(self, x, y):
        return super().forward(x, y).detach()


MODEL = Net()


def trains(model, given):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(*given).backward()
        optimizer.step()

    return step


#: (model, what it is measured on, candidates and keywords), the error, what is said.
WRONG = {
    "no module": (Net().forward, batch(), {}, TypeError, "takes a torch.nn.Module, not method"),
    "no batch": (Net(), 3, {}, TypeError, r"takes a batch \(dict, tuple or tensor\) or a function .* not int"),
    "eval": (Net().eval(), batch(), {}, ValueError, r"Net is in eval mode, where .*; call model.train\(\)"),
    "frozen": (Net().requires_grad_(False), batch(), {}, ValueError, "no parameter of Net requires grad"),
    "lazy": (nn.LazyLinear(3), batch()[0], {}, ValueError, "have no values yet; run the model once"),
    "not scalar": (Block(), batch()[0], {"candidates": "compress_saved int8"}, ValueError, "without a scalar loss"),
    "no gradients": (Net(), lambda: None, {}, ValueError, "the step left no gradients"),
    "detached": (Detached(), batch(), {}, ValueError, "the loss does not require grad"),
    "zero": (MODEL, lambda: MODEL(*batch()) * 0, {}, ValueError, "all exact gradients are zero"),
    "optimizer": (MODEL, trains(MODEL, batch()), {}, ValueError, r"leave optimizer.step\(\) out"),
    "no candidates": (Net(), batch(), {"candidates": []}, ValueError, "got no candidates"),
    "modules": (Net(), batch(), {"modules": "*.nothing"}, ValueError, "no module matches"),
}


@pytest.mark.parametrize(("model", "given", "options", "error", "said"), WRONG.values(), ids=WRONG)
def test_wrong_calls(model, given, options, error, said):
    """Wrong candidates: test_settings.py."""
    with pytest.raises(error, match=said):
        gradckpt.gradient_error(model, given, **options)
