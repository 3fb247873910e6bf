"""plan() and enable() with a budget: what fits, and what is done for it."""

import dataclasses
import gc
import json
import logging
import pickle
import re
import sys

import pytest
import torch
from small_models import (  # noqa: F401 (a fixture of every test here)
    LAYERS,
    NET_WIDTH,
    ROWS,
    Net,
    PlannedBlock,
    Untouched,
    fixed_costs,
    net,
    peak_of,
    short_measurements,
    smallest_of,
)
from torch import nn

import gradckpt
from gradckpt import _trial_process
from gradckpt._models import inactivity_warning
from gradckpt._planning import options, profile
from gradckpt._planning.device_memory import parse_budget
from gradckpt._planning.options import allowed

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("short_measurements")


def between(plain, part):
    """A budget between the smallest and what the step takes without checkpointing."""
    held = sum(plain.fixed.values())
    least = plain.smallest_budget - held
    return f"activations:{int(least + part * (plain.peak - held - least))}"


def gradients(model, batch):
    model.zero_grad()
    model(batch).backward()
    return [p.grad.clone() for p in model.parameters()]


BATCH = torch.randn(ROWS, NET_WIDTH)


# ---- budgets


@pytest.mark.parametrize(
    ("budget", "size", "step_only"),
    [
        ("60GiB", 60 * 2**30, False),
        ("60GB", 60 * 10**9, False),
        (5_000_000, 5_000_000, False),
        ("activations:6GiB", 6 * 2**30, True),
        ("Activations: 6 GB", 6 * 10**9, True),
    ],
)
def test_forms_of_a_budget(budget, size, step_only):
    found = parse_budget(budget, CPU)
    assert (found.size, found.step_only) == (size, step_only)


def test_a_part_of_the_device_and_what_is_free():
    whole = parse_budget("100%", CPU).size
    assert parse_budget("50%", CPU).size == pytest.approx(whole / 2, rel=1e-6)
    kept = torch.zeros(2**24)
    free = parse_budget(None, CPU)
    assert kept.nbytes < free.size <= whole + kept.nbytes


#: Of the message about other values.
LISTED = (
    r'budget=BUDGET is (not a size|less than one byte); write it as "60GiB", "60GB", "90%", "activations:6GiB" or a '
    "number of bytes"
)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (0.5, 'budget=0.5 is a fraction, and of what is unknown; write "50%"'),
        (1, "is a fraction"),
        ("0.5", 'is a fraction, and of what is unknown; write "50%"'),
        ("120%", "is no part of a device"),
        ("0%", "is no part of a device"),
        ("512", "budget='512' is 512 bytes; give a unit"),
        ("24.5", "budget='24.5' is 24 bytes; give a unit"),
        ("many", LISTED),
        ("activations:30MiBB", LISTED),
        ("activations:50%", LISTED),
        (True, LISTED),
        (3.5, LISTED),
        (-1, LISTED),
    ],
)
def test_what_is_no_budget(budget, said):
    said = said.replace("BUDGET", re.escape(repr(budget)))
    with pytest.raises(ValueError, match=rf"^gradckpt: .*({said})"):
        gradckpt.enable(net(2), budget=budget)
    with pytest.raises(ValueError, match=rf"^gradckpt: .*({said})"):
        gradckpt.plan(net(2), BATCH, budget=budget)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        *(({name: "int8"}, f"^gradckpt: {name}= needs budget=") for name in ("compress", "error", "optimizer")),
        ({"budget": "1GiB", "memory": "1GiB"}, "^gradckpt: budget= and memory= exclude each other"),
        ({"budget": "1GiB", "measure": True}, "^gradckpt: budget= and measure= exclude each other"),
        *(({"budget": "1GiB", "error": error}, "is no relative error") for error in ("1", "110%", 0, 1.5, True, "x")),
    ],
)
def test_wrong_keywords(keywords, said):
    with pytest.raises(ValueError, match=said):
        gradckpt.plan(net(2), BATCH, **keywords)


# ---- plans


def test_options_change_no_gradient_unless_permitted():
    assert not any(option.codec for option in allowed(None, False))
    assert {option.codec for option in allowed("int4", False)} == {None, "int4"}
    assert {option.codec for option in allowed(["fp8", "int4"], True)} == {None, "fp8_e4m3", "int4"}
    assert {option.codec for option in allowed(None, True)} == {None, "int8", "int6", "int4"}
    with pytest.raises(ValueError, match="names the permitted codecs alone"):
        allowed({"codec": "int8", "min_numel": 1}, False)
    with pytest.raises(ValueError, match="holds booleans"):
        allowed("mask", False)


def test_an_error_budget(monkeypatch):
    fixed_costs(monkeypatch)
    model = net()
    model(BATCH).backward()
    plain = gradckpt.plan(model, BATCH, budget="1GiB")
    found = [gradckpt.plan(model, BATCH, budget=between(plain, 0.2), error=error) for error in ("0.01%", "0.3%", "3%")]
    for plan, error in zip(found, (1e-4, 3e-3, 3e-2), strict=True):
        assert plan.error <= error
        plan.apply(model)
        measured = gradckpt.gradient_error(model, BATCH, {"plan": {"modules": plan.rules_for(model), "compress": None}})
        assert measured.errors[0].total == pytest.approx(plan.error, rel=0.05, abs=1e-6)
        gradckpt.disable(model)
    assert found[0].seconds >= found[1].seconds >= found[2].seconds
    assert found[0].seconds > found[2].seconds
    assert "Gradients differ by" in str(found[2])


def test_the_optimizer_counts(monkeypatch):
    fixed_costs(monkeypatch)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    without = gradckpt.plan(model, BATCH, budget="1GiB")
    counted = gradckpt.plan(model, BATCH, budget="1GiB", optimizer=optimizer)
    assert counted.fixed["optimizer states"] == pytest.approx(2 * weights, rel=0.01)
    assert counted.peak - without.peak == pytest.approx(2 * weights, rel=0.05)
    assert not optimizer.state
    with pytest.raises(ValueError, match="no plan stays within"):
        gradckpt.plan(model, BATCH, budget=weights, optimizer=optimizer)
    with pytest.raises(ValueError, match="has no parameter of this model"):
        gradckpt.plan(model, BATCH, budget="1GiB", optimizer=torch.optim.SGD(net(1).parameters(), lr=1))
    with pytest.raises(TypeError, match="takes a torch optimizer"):
        gradckpt.plan(model, BATCH, budget="1GiB", optimizer="adamw")


@pytest.mark.parametrize("entry_point", ["plan", "enable"])
def test_a_plan_counts_once(entry_point, monkeypatch):
    """The optimizer's step is simulated, and Python's objects are searched, once for a plan."""
    fixed_costs(monkeypatch)
    counts = []
    for name in ("optimizer_memory", "other_tensors"):
        found = getattr(profile, name)
        monkeypatch.setattr(profile, name, lambda *args, found=found: counts.append(found) or found(*args))
    model = net(2)
    optimizer = torch.optim.AdamW(model.parameters())
    if entry_point == "plan":
        gradckpt.plan(model, BATCH, budget="1GiB", optimizer=optimizer)
    else:
        gradckpt.enable(model, budget="1GiB", optimizer=optimizer)
        model(BATCH).backward()
        assert vars(model)["_gradckpt_budget"]._pending.fixed["optimizer states"]
    assert len(counts) == 2


def test_other_tensors_count():
    model = net(2)
    alone_ = gradckpt.plan(model, BATCH, budget="1GiB")
    second = torch.zeros(2**22)  # 16 MiB
    beside = gradckpt.plan(model, BATCH, budget="1GiB")
    assert beside.fixed["other tensors"] - alone_.fixed["other tensors"] == pytest.approx(second.nbytes, rel=0.1)
    assert "other tensors, 16.0" in refusal(model)
    assert "they are of this process: pass optimizer= if they are its states, delete other models" in refusal(model)


def refusal(model, **options):
    with pytest.raises(ValueError, match="no plan stays within") as said:
        gradckpt.plan(model, BATCH, budget="1MiB", **options)
    return str(said.value)


def test_tensors_of_garbage_do_not_count():
    model = net(2)
    before = gradckpt.plan(model, BATCH, budget="1GiB").fixed["other tensors"]
    gc.disable()
    try:
        cycle = [torch.zeros(2**22)]
        cycle.append(cycle)
        del cycle
        assert gradckpt.plan(model, BATCH, budget="1GiB").fixed["other tensors"] == pytest.approx(before, abs=2**20)
    finally:
        gc.enable()


# ---- files


def test_a_plan_in_a_file(tmp_path, monkeypatch):
    fixed_costs(monkeypatch)
    model = net()
    plan = gradckpt.plan(model, BATCH, budget="1GiB", compress="int8")
    plan = gradckpt.plan(model, BATCH, budget=between(plan, 0.5), compress="int8")
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = gradckpt.Plan.load(path)
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert json.loads(path.read_text())["version"] == 1
    other = net()
    first, second = gradckpt.enable(model, plan=plan), gradckpt.enable(other, plan=str(path))
    assert first.modules.keys() == second.modules.keys()
    budgets = [point["budget"] for point in plan.pareto()]
    assert budgets == sorted(budgets)
    assert budgets[0] == plan.smallest_budget
    assert {"budget": plan.peak, "seconds": plan.seconds} in plan.pareto()


def test_a_plan_for_another_model(tmp_path):
    plan = gradckpt.plan(net(3), BATCH, budget="1GiB")
    with pytest.raises(ValueError, match=r"another model: Net has no module 'blocks\.2'"):
        plan.apply(net(2))
    wide = net(3)
    wide.blocks[1] = PlannedBlock(2 * NET_WIDTH)
    with pytest.raises(ValueError, match=r"another model: 'blocks\.1' has other parameters"):
        gradckpt.enable(wide, plan=plan)
    wide.blocks[1] = nn.Linear(NET_WIDTH, NET_WIDTH)
    with pytest.raises(ValueError, match=r"another model: 'blocks\.1' is Linear, not PlannedBlock"):
        gradckpt.enable(wide, plan=plan)
    with pytest.raises(ValueError, match=r"another model: 'blocks\.3\.norm\.weight', 128, is not in it"):
        gradckpt.enable(net(4), plan=plan)
    other = net(3)
    other.embed = nn.Linear(NET_WIDTH, NET_WIDTH, bias=False)
    other.embed.weight = nn.Parameter(torch.zeros(NET_WIDTH, 64))
    with pytest.raises(ValueError, match=r"another model: 'embed\.weight', 128 x 64, was 128 x 128; make a new plan"):
        gradckpt.enable(other, plan=plan)
    (tmp_path / "x.json").write_text('{"version": 9}')
    with pytest.raises(ValueError, match="version 9"):
        gradckpt.enable(net(3), plan=tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"^gradckpt: plan='.*/no\.json' cannot be read .*; write it with plan\.save"):
        gradckpt.enable(net(2), plan=str(tmp_path / "no.json"))
    with pytest.raises(TypeError, match=r"^gradckpt: plan= takes a Plan or the path of its file, not .*plan\.save"):
        gradckpt.enable(net(2), plan={"version": 1})


def test_a_budget_in_the_verdict():
    plan = gradckpt.plan(net(2), BATCH, budget="1GiB")
    for budget, text, said in [
        (30 * 2**20, "30MiB", "30.00 MiB"),
        (60 * 10**9, "60GB", "55.88 GiB (60GB)"),
        (2**30, "90%", "1.00 GiB (90%)"),
        (2**30, "1,073,741,824 bytes", "1.00 GiB (1,073,741,824 bytes)"),
    ]:
        shown = dataclasses.replace(plan, budget=budget, budget_text=text)
        assert shown.verdict.startswith(f"It fits {said} without")


# ---- a model that trains


class Training:
    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, batch=BATCH, parts=1):
        for _ in range(parts):
            self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_enable_plans_in_the_first_step(monkeypatch, caplog):
    fixed_costs(monkeypatch)
    gradckpt.stats.reset()
    model, twin = net(), net()
    trained, plain = Training(model), Training(twin)
    probe = gradckpt.plan(model, BATCH, budget="activations:1GiB")
    size = int(between(probe, 0.5).partition(":")[2])
    with caplog.at_level(logging.INFO, "gradckpt"):
        handle = gradckpt.enable(model, budget=f"activations:{size}")
        assert {str(s["compress"]) for s in handle.modules.values()} == {"None"}
        assert len(handle.modules) == LAYERS
        trained.step()
        plain.step()
        assert len(handle.modules) == LAYERS, "the first step recomputes everything"
        with gradckpt.track_memory() as memory:
            trained.step()
        plain.step()
    assert memory.peak <= size
    assert 0 < len(handle.modules) < LAYERS
    assert "gradckpt: from the next training call on: Peak" in caplog.text
    assert "\nregions " in caplog.text, "the plan's table"
    assert caplog.text.count(f"gradckpt: measured PlannedBlock in {len(probe.profile.options)} options") == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    counted = gradckpt.stats()
    assert counted["steps"] == 1, "the call that measured does not count"
    assert counted["regions"] <= len(handle.modules)
    assert gradckpt.enable(model, budget=f"activations:{size}").modules.keys() == handle.modules.keys()
    trained.step()
    assert caplog.text.count("planning Net") == 1, "again with equal settings: nothing"
    gradckpt.disable(model)
    assert not handle.modules
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("forks", [True, False])
def test_measured_regions_are_no_steps_of_the_user(forks, monkeypatch):
    """That they keep their inputs is not the user's concern, and the next steps are looked at."""
    measure = options._measure
    fixed_costs(monkeypatch)  # else a busy machine may find a region faster, and the user's step has one
    fixed = options._measure
    monkeypatch.setattr(options, "_measure", lambda *given: measure(*given) and fixed(*given))
    monkeypatch.setattr(options, "_LEAST", 3)
    monkeypatch.setattr(inactivity_warning, "_MANY", 1)
    monkeypatch.setattr(_trial_process, "can_fork", lambda: forks and sys.platform == "linux")
    gradckpt.stats.reset()
    model = net(2)
    gradckpt.enable(model, budget="1GiB")
    Training(model).step()
    gradckpt.disable(model)

    def nothing_compressed():
        x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True) * 2
        gradckpt.checkpoint(torch.sin, x, compress="int8").sum().backward()

    nothing_compressed()
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="nothing was compressed by the second backward"):
        nothing_compressed()


def test_a_budget_that_no_plan_keeps_stops_before_the_optimizer(monkeypatch):
    fixed_costs(monkeypatch)
    model = net()
    before = [p.clone() for p in model.parameters()]
    gradckpt.enable(model, budget="activations:100KiB")
    with pytest.raises(ValueError, match="no plan stays within activations:100KiB; the smallest budget is"):
        Training(model).step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_it_is_planned_again_for_more(monkeypatch, caplog):
    """Larger inputs, gradients that exist, states of the optimizer; and never for less."""
    fixed_costs(monkeypatch)
    model = net()
    training = Training(model, torch.optim.AdamW(model.parameters()))
    with caplog.at_level(logging.INFO, "gradckpt"):
        gradckpt.enable(model, budget="200MiB")
        training.step()
        training.step()
        assert "planned again, since the optimizer has states now" in caplog.text
        training.step(parts=2)
        assert "planned again, since gradients exist before the forward" in caplog.text
        training.step(torch.randn(2 * ROWS, NET_WIDTH))
        assert "since the input is larger" in caplog.text
        said = len(caplog.records)
        training.step(parts=2)
        training.step(BATCH[:16])
        with torch.no_grad():
            model(torch.randn(4 * ROWS, NET_WIDTH))
        model.eval()
        model(torch.randn(4 * ROWS, NET_WIDTH))
        model.train()
        assert len(caplog.records) <= said + 1  # of the first call with the larger input


def test_a_copy_plans_by_itself(monkeypatch):
    fixed_costs(monkeypatch)
    model = net(3)
    gradckpt.enable(model, budget="1GiB")
    Training(model).step()
    twin = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        Training(twin).step()
    gradckpt.disable(twin)
    assert not twin._forward_hooks
    Training(model).step()
