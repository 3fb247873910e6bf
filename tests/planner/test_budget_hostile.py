"""plan(budget=) of models that call regions never or often, share, freeze, draw or write."""

import itertools
import math
import random

import pytest
import torch
import transformers
from small_models import fixed_costs, peak_of, short_measurements, smallest_of  # noqa: F401 (a fixture of every test here)
from torch import nn

import gradckpt
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.options import Cost
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import NoPlan
from gradckpt._training_step import step_of_batch

WIDTH = 32


X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("short_measurements")


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.dropout = norm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Calls its layers in an order in which some may be missing or repeated."""

    def __init__(self, layers=6, order=None, **block):
        super().__init__()
        self.layers = nn.ModuleList(Block(**block) for _ in range(layers))
        self.order = list(range(layers)) if order is None else order
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x)
        return self.head(x).square().mean()


class Entries(Block):
    def forward(self, x):
        return {"x": super().forward(x), "n": 3, "text": "a"}


class OfEntries(Model):
    def __init__(self):
        super().__init__(0, [])
        self.layers = nn.ModuleList(Entries() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)["x"]
        return self.head(x).square().mean()


class AllInLoss(Model):
    def forward(self, x):
        found = [x := layer(x) for layer in self.layers]
        return sum(y.mean() for y in found) + self.head(x).mean()


class FrozenByBlock(Model):
    def forward(self, x):
        with torch.no_grad():
            x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x).mean()


class InPlace(Model):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).mul_(1.0)
        return self.head(x).mean()


class Skips(Model):
    def forward(self, x):
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[2:4]:
            x = layer(x + kept.pop())
        return self.head(x).mean()


def frozen_prefix():
    model = Model()
    model.layers[:3].requires_grad_(False)
    return model


def adapters():
    model = Model().requires_grad_(False)
    for layer in model.layers[1:]:
        layer.down.weight.requires_grad_()
    return model


def tied(layers=6):
    model = Model(layers)
    for layer in model.layers[1:]:
        layer.up.weight = model.layers[0].up.weight
    return model


MODELS = {
    "plain": Model,
    "a region never called": lambda: Model(order=[0, 1, 2, 4, 5]),
    "a region called twice": lambda: Model(order=[0, 1, 2, 2, 4, 5, 3]),
    "one block": lambda: Model(1, [0] * 8),
    "dropout": lambda: Model(dropout=0.1),
    "batch norm": lambda: Model(norm=nn.BatchNorm1d),
    "frozen prefix": frozen_prefix,
    "adapters": adapters,
    "tied": tied,
    "dict outputs": OfEntries,
    "outputs in the loss": AllInLoss,
    "region without grad": FrozenByBlock,
    "in place": InPlace,
    "skips": Skips,
}


def peak(model):
    model.zero_grad()
    found = peak_of(lambda: model(X).backward())
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_within_budgets_and_nothing_changes(name, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    plain = peak(model)
    generator = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    smallest = smallest_of(lambda: gradckpt.plan(model, (X,), budget="activations:1KiB", modules=Block))
    for budget in (smallest, (smallest + plain) // 2):
        if budget != smallest:
            fixed_costs(monkeypatch)  # the plan that takes more is faster, whatever this machine measures
        plan = gradckpt.plan(model, (X,), budget=f"activations:{budget}", modules=Block)
        assert torch.equal(generator, torch.get_rng_state())
        assert all(map(torch.equal, buffers, model.buffers()))
        assert all(p.grad is None for p in model.parameters())
        with plan.apply(model):
            measured = peak(model)
        torch.set_rng_state(generator)
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        assert measured <= budget
        assert plan.smallest_budget - sum(plan.fixed.values()) == smallest
    assert name == "one block" or measured > smallest  # a block has one option in all calls


def accumulation_in_a_function():
    model = Model()

    def step():
        for part in X.split(32):
            model(part).backward()

    return model, step, step, Block


def a_cache():
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=64, use_cache=True)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 64, (2, 64))
    batch = {"input_ids": ids, "labels": ids}

    def step():
        model(**batch).loss.backward()

    step()
    model.zero_grad()
    return model, batch, step, None


@pytest.mark.parametrize("make", [accumulation_in_a_function, a_cache])
def test_the_smallest_budget_is_kept(make):
    model, batch, step, modules = make()
    smallest = smallest_of(lambda: gradckpt.plan(model, batch, budget="activations:1KiB", modules=modules))
    plan = gradckpt.plan(model, batch, budget=f"activations:{smallest}", modules=modules)
    with plan.apply(model):
        assert peak_of(step) <= smallest


def test_the_optimizer_is_the_peak(monkeypatch):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    weights = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(Profile, "measure", None)  # it is found before real steps
    for budget in (2**10, 4 * weights + 2**17):
        with pytest.raises(NoPlan, match=r"The optimizer's step alone needs .*; take one with smaller states") as error:
            gradckpt.plan(model, (X[:1],), budget=budget, modules=Block, optimizer=optimizer)
        assert not optimizer.state
    monkeypatch.undo()
    smallest = error.value.smallest_budget
    plan = gradckpt.plan(model, (X[:1],), budget=smallest, modules=Block, optimizer=optimizer)
    assert plan.smallest_budget == pytest.approx(smallest, abs=2**16)
    with pytest.raises(NoPlan):
        gradckpt.plan(model, (X[:1],), budget=smallest - 2**17, modules=Block, optimizer=optimizer)
    plan = gradckpt.plan(model, (X[:1],), budget=16 * weights, modules=Block, optimizer=optimizer)
    assert plan.fixed["optimizer states"] >= 2 * weights


def test_a_step_that_needs_more_than_its_optimizer():
    """A budget that is too small for both: the error has the smallest one for both."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = X.repeat(64, 1)
    with pytest.raises(NoPlan, match=r"Backward of .* binds") as error:
        gradckpt.plan(model, (batch,), budget="100KiB", modules=Block, optimizer=optimizer)
    smallest = error.value.smallest_budget
    plan = gradckpt.plan(model, (batch,), budget=smallest + 2**16, modules=Block, optimizer=optimizer)
    assert plan.smallest_budget == pytest.approx(smallest, abs=2**16)
    with pytest.raises(NoPlan, match="no plan stays within"):
        gradckpt.plan(model, (batch,), budget=smallest - 2**17, modules=Block, optimizer=optimizer)


# ---- all plans


def random_costs(profile, seed):
    """Costs among which those of keeping are least."""
    draw = random.Random(seed)
    every = itertools.product(profile.blocks, profile.options)
    return {(id(block), o): Cost(draw.random() + (o.name != "keep"), 0.0) for block, o in every}


SMALL = {
    "plain": lambda: Model(3),
    "tied": lambda: tied(3),
    "skips": lambda: Skips(4),
    "one called twice": lambda: Model(3, [0, 1, 1, 2]),
    "two shared blocks": lambda: Model(2, [0, 1] * 3),
    "three shared blocks": lambda: Model(3, [0, 1, 2] * 2),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_plan_is_faster(name):
    """Beside traces of all plans; with three shared blocks not all are tried, and the bound says
    so.
    """
    model = SMALL[name]().train()
    profile = Profile(model, lambda batch: step_of_batch(model, batch)(), (X,), modules=Block)
    if name != "three shared blocks":
        profile.options = [each for each in profile.options if "lossless" not in each.name][:4]
    profile.largest = {option: profile.largest[option] for option in profile.options}
    peaks = {}
    for options in itertools.product(range(len(profile.options)), repeat=len(profile.blocks)):
        choice = tuple(options[block] for block in profile.calls)
        peaks[choice] = profile.trace(profile.of_choice(choice)).peak().size
    least, most = min(peaks.values()), max(peaks.values())
    for seed in range(3):
        profile.costs = random_costs(profile, seed)
        seconds = {
            choice: sum(profile.cost(b, profile.options[o]).seconds for b, o in zip(profile.calls, choice, strict=True))
            for choice in peaks
        }
        for part in (0, 0.2, 0.5, 0.9):
            limit = least + int(part * (most - least))
            best = min(seconds[choice] for choice, size in peaks.items() if size <= limit)
            chosen = profile.fastest(profile.chain(), Budget(limit, True, ""), {})
            assert peaks[chosen.choice] <= limit
            assert chosen.bound <= best + 1e-9
            assert chosen.smallest[0] == least
            if name != "three shared blocks":
                assert seconds[chosen.choice] == pytest.approx(best)


# ---- errors


def too_large(option):
    """Compressing is fast, and its region's errors say far too much."""
    compress = option.name == "compress int8"
    return Cost(*((0.1, 0.5) if compress else (1.0, 0.5 if option.codec else 0.0)))


def test_errors_of_regions_are_scaled_to_what_is_measured():
    torch.manual_seed(0)
    model = Model().train()

    def run(batch):
        step_of_batch(model, batch)()

    profile = Profile(model, run, (X,), modules=Block, compress="int8", limits_error=True)
    every = itertools.product(profile.blocks, profile.options)
    profile.costs = {(id(block), option): too_large(option) for block, option in every}
    budget = Budget(2**30, True, "")
    most = profile.plan(budget, error=0.5, batch=(X,))
    assert {region.option.name for region in most.regions} == {"compress int8"}
    half = profile.plan(budget, error=most.error / 2, batch=(X,))
    assert 0.3 * most.error / 2 <= half.error <= most.error / 2
    assert most.seconds < half.seconds < 6
    none = profile.plan(budget, error=1e-9, batch=(X,))
    assert none.error == 0


class Narrow(Block):
    """Another kind of block, which repeats as often."""


def test_an_error_budget_of_modules_that_one_has_to_name():
    torch.manual_seed(0)
    model = Model()
    model.layers.extend(Narrow() for _ in range(len(model.layers)))
    model.order = list(range(len(model.layers)))
    with pytest.raises(ValueError, match="repeats several blocks"):
        gradckpt.plan(model, X, budget="1TiB", error="5%")
    plan = gradckpt.plan(model, X, modules=Narrow, budget="activations:800KiB", error="5%")
    assert plan.error is not None
    assert plan.error <= 0.05


@pytest.mark.parametrize("error", [math.nan, math.inf, 1e200])
def test_a_region_whose_error_is_no_number_is_never_chosen(error):
    """However fast it is: a comparison with NaN is false, whichever way it is written."""
    model = Model(3).train()
    profile = Profile(
        model, lambda batch: step_of_batch(model, batch)(), (X,), modules=Block, compress="int8", limits_error=True
    )
    every = itertools.product(profile.blocks, profile.options)
    profile.costs = {(id(block), o): Cost(0.1 if o.codec else 1.0, 0.01 if o.codec else 0.0) for block, o in every}
    lossy = {option for option in profile.options if option.codec}
    profile.costs |= {(id(profile.blocks[1]), option): Cost(0.1, error) for option in lossy}
    chosen = profile.fastest(profile.chain(), Budget(2**30, True, ""), {}, error=0.5)
    assert [option in lossy for option in profile.of_choice(chosen.choice)] == [True, False, True]


def test_what_torch_compile_returned_is_refused():
    compiled = torch.compile(Model(), backend="eager")
    with pytest.raises(ValueError, match=r"cannot be planned in torch.compile; .* compile then"):
        gradckpt.plan(compiled, X, budget="1GiB")
    with pytest.raises(ValueError, match=r"cannot be planned in torch.compile; .* compile then"):
        gradckpt.enable(compiled, budget="1GiB")


def test_a_refusal_says_what_its_bytes_are():
    """Those of activations, which the step adds, are a budget as they stand."""
    with pytest.raises(ValueError, match=r"the smallest budget is .* \(\d+ bytes\) of activations\. ") as refused:
        gradckpt.plan(Model(), X, modules=Block, budget="activations:1KiB")
    plan = gradckpt.plan(Model(), X, modules=Block, budget=f"activations:{refused.value.smallest_budget}")
    assert "of which the step adds" in str(plan)
    with pytest.raises(ValueError, match=r"the smallest budget is .* \(\d+ bytes\)\. "):
        gradckpt.plan(Model(), X, modules=Block, budget="1KiB")
