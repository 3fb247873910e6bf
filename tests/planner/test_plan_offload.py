"""Plans that may offload: the budget holds, and gradients are those without."""

import dataclasses
import functools
import json
import warnings

import pytest
import torch
from small_models import (  # noqa: F401 (a fixture of every test here)
    NET_WIDTH,
    ROWS,
    TINY,
    fixed_costs,
    net,
    short_measurements,
)
from torch import nn

import gradckpt
from gradckpt._engine.places import place_of
from gradckpt._planning import options
from gradckpt._planning.command import main
from gradckpt._planning.region_plan import Plan

BATCH = torch.randn(ROWS, NET_WIDTH)
FAST = 1000  # GB/s


pytestmark = pytest.mark.usefixtures("short_measurements")


@pytest.fixture(autouse=True)
def _few_options(monkeypatch):
    fixed_costs(monkeypatch)
    monkeypatch.setattr(options, "_POLICIES", ("save_matmuls",))


@pytest.fixture
def place(tmp_path):
    found = gradckpt.Offload("disk", directory=tmp_path, host_budget="512KiB", min_bytes=4096)
    try:
        place_of(found)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return found


class Attention(nn.Module):
    """A block with dropout and attention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Chain(nn.Module):
    def __init__(self, stem, block, n):
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(block() for _ in range(n))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def cases():
    torch.manual_seed(0)
    return {
        "mlp": (net(8), BATCH),
        "attention": (Chain(nn.Linear(64, 64), Attention, 6), torch.randn(4, 64, 64)),
    }


def step(model, batch):
    torch.manual_seed(1)
    model.zero_grad(set_to_none=False)
    with gradckpt.track_memory() as memory:
        model(batch).backward()
    return memory.peak, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_a_step_stays_within_the_budget(name, place):
    """By the allocator, and with the memory that the store has; with the gradients of no plan."""
    model, batch = cases()[name]
    model(batch).backward()
    exact = step(model, batch)[1]
    plain = gradckpt.plan(model, batch, budget="4GiB", offload=place, link=FAST)
    assert plain.is_plain
    assert plain.offloaded.bytes == 0
    held = sum(plain.fixed.values())
    offloads = 0
    for part in (0.0, 0.2, 0.5):
        least = plain.smallest_budget - held
        budget = f"activations:{int(least + part * (plain.peak - held - least))}"
        plan = gradckpt.plan(model, batch, budget=budget, offload=place, link=FAST)
        with plan.apply(model):
            before = place_of(place).figures()
            peak, gradients = step(model, batch)
        held = sum(plan.fixed.values())
        assert plan.peak <= plan.budget
        assert peak + plan.offloaded.room <= plan.budget - held
        assert plan.peak - held - plan.offloaded.room == pytest.approx(peak, rel=0.01)
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
        assert before["kept"] == place_of(place).figures()["kept"]
        assert plan.bound <= plan.seconds
        offloads += plan.offloaded.bytes > 0
    assert offloads


def test_less_is_needed_than_without_a_place(place):
    model, batch = net(12), torch.randn(8 * ROWS, NET_WIDTH)
    small = dataclasses.replace(place, host_budget="1MiB")
    plans = [gradckpt.plan(model, batch, budget="4GiB", offload=each) for each in (None, small)]
    assert plans[1].smallest_budget < plans[0].smallest_budget
    plan = gradckpt.plan(model, batch, budget=plans[1].smallest_budget, offload=small, link=FAST)
    assert any(region.option.place == small for region in plan.regions)


def test_plans_in_files(place, tmp_path):
    model = net(8)
    exact = step(model, BATCH)[1]
    tight = gradckpt.plan(model, BATCH, budget="4GiB", offload=place, link=FAST).smallest_budget
    plan = gradckpt.plan(model, BATCH, budget=tight + (1 << 18), offload=place, link=FAST)
    assert plan.offloaded.bytes
    assert plan.offloaded.link.rate_out == FAST * 10**9
    path = tmp_path / "plan.json"
    plan.save(path)
    read = Plan.load(path)
    assert read == plan
    handle = gradckpt.enable(model, plan=path)
    assert place in [settings.get("offload") for settings in handle.modules.values()]
    assert all(torch.equal(a, b) for a, b in zip(step(model, BATCH)[1], exact, strict=True))
    handle.remove()
    again = gradckpt.plan(model, BATCH, budget=tight + (1 << 18), offload=place, profile=path)
    assert again.offloaded.link == plan.offloaded.link
    assert again.seconds <= plan.seconds
    with pytest.raises(ValueError, match="profile= was measured with the option 'keep, offload'"):
        gradckpt.plan(model, BATCH, budget="1GiB", profile=path)


def test_files_of_before_are_read(place):
    """They have no word about offload."""
    data = json.loads(json.dumps(gradckpt.plan(net(3), BATCH, budget="1GiB").to_dict()))
    assert data.pop("offloaded") is None
    assert Plan.from_dict(data).offloaded is None


def test_a_budget_of_a_model_that_trains(place):
    model = net(8)
    exact = step(model, BATCH)[1]
    tight = gradckpt.plan(model, BATCH, budget="4GiB", offload=place, link=FAST).smallest_budget
    gradckpt.enable(model, budget=tight + (1 << 20), offload=place)
    for _ in range(4):
        gradients = step(model, BATCH)[1]
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    plan = vars(model)["_gradckpt_budget"].plan
    assert plan.offloaded.place == "disk"
    assert "measured in" in plan.offloaded.link.source
    gradckpt.disable(model)


# ---- what a plan says


def test_the_verdict(place):
    model = net(8)
    plain = gradckpt.plan(model, BATCH, budget="4GiB", offload=place, link=FAST)
    tight = plain.smallest_budget + (1 << 18)
    fast = gradckpt.plan(model, BATCH, budget=tight, offload=place, link=FAST)
    assert "Offloaded to 'disk'" in str(fast)
    assert "as given" in str(fast)
    assert "waits 0 ms" in str(fast)
    assert "so fast" not in str(plain)
    assert "The link is fast enough that no codec is needed" in fast.verdict
    slow = gradckpt.plan(model, BATCH, budget=tight, offload=place, link=0.001)
    assert "no codec is needed" not in slow.verdict
    assert slow.seconds >= fast.seconds


def test_nothing_goes_to_host_memory_from_there():
    model = net(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        least = gradckpt.plan(model, BATCH, budget="4GiB", offload="cpu").smallest_budget
        plan = gradckpt.plan(model, BATCH, budget=least, offload="cpu")
    assert plan.offloaded.bytes == 0
    assert "Nothing can be offloaded to 'cpu'" in plan.verdict


# ---- errors


PLAN = functools.partial(gradckpt.plan, batch=BATCH)


@pytest.mark.parametrize(
    ("call", "keywords", "said"),
    [
        (PLAN, {"offload": "disk"}, "offload= needs budget="),
        (PLAN, {"link": 25}, "link= needs budget="),
        (PLAN, {"budget": "1GiB", "link": 25}, "link= needs offload="),
        (PLAN, {"budget": "1GiB", "offload": "disk", "link": "fast"}, "link='fast' is no link"),
        (PLAN, {"budget": "1GiB", "offload": "tape"}, "offload='tape' is no place"),
        (gradckpt.enable, {"budget": "1GiB", "offload": "tape"}, "offload='tape' is no place"),
        (gradckpt.enable, {"plan": "plan.json", "offload": "cpu"}, "plan= and offload= exclude each other, since the"),
        (
            gradckpt.enable,
            {"budget": "1GiB", "offload": gradckpt.Offload("disk", directory="/proc")},
            "cannot use the directory /proc",
        ),
    ],
)
def test_keywords(call, keywords, said):
    model = net(2)
    with pytest.raises(ValueError, match=rf"^gradckpt: .*{said}"):
        call(model, **keywords)
    assert not any("forward" in vars(module) for module in model.modules())


# ---- the command


@pytest.fixture
def llama(write_config):
    transformers = pytest.importorskip("transformers")
    return write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY))


@pytest.mark.parametrize(("where", "source"), [("cpu", "as pcie4 of A100-80GB reaches"), ("disk", "as nvme reaches")])
def test_the_command(llama, where, source, capsys):
    sizes = ["--tokens", "4096", "--batch", "4", "--loss", "liger"]
    assert main([llama, *sizes, "--budget", "8GiB", "--offload", where, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["offloaded"]["place"] == where
    assert plain["offloaded"]["link"]["source"] == source
    budget = ["--budget", str(plain["smallest_budget"] + 1)]
    assert main([llama, *sizes, *budget, "--offload", where, "--link", "pcie5", "--json"]) == 0
    tight = json.loads(capsys.readouterr().out)
    assert tight["offloaded"]["link"]["rate_in"] == 50 * 10**9
    assert tight["peak"] <= tight["needed"] <= plain["smallest_budget"] + 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--offload", "cpu"], "--offload needs a budget; add one"),
        (["--budget", "8GiB", "--link", "pcie4"], "--link needs a place; add one, as in --offload cpu"),
        (["--budget", "8GiB", "--host-budget", "8GiB"], "--host-budget needs a place"),
        (["--budget", "8GiB", "--offload", "cpu", "--link", "slow"], "link='slow' is no link"),
        (["--budget", "8GiB", "--offload", "tape"], "invalid choice: 'tape'"),
    ],
)
def test_wrong_usage(llama, flags, said, capsys):
    with pytest.raises(SystemExit) as status:
        main([llama, "--tokens", "32", *flags])
    assert status.value.code == 2
    assert said in capsys.readouterr().err
