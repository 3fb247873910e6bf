"""What enable(budget=) sees of a model that changes between its training calls."""

import contextlib
import copy
import gc
import logging
import pickle
import random
import weakref

import numpy
import pytest
import torch
from small_models import NET_WIDTH, ROWS, PlannedBlock, fixed_costs, measured_briefly, net
from torch import nn

import gradckpt
from gradckpt._planning import options
from gradckpt._planning.device_memory import ParameterWalk, gradient_bytes, state_of

LAYERS = 3


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    gc.collect()  # what earlier tests left would count
    fixed_costs(monkeypatch)
    measured_briefly(monkeypatch)


def measured(monkeypatch):
    """Let regions be measured, briefly."""
    monkeypatch.undo()
    measured_briefly(monkeypatch)


def step(model, context=contextlib.nullcontext):
    weight = next(model.parameters())
    with context():
        loss = model(torch.ones(ROWS, NET_WIDTH, dtype=weight.dtype, device=weight.device))
    loss.backward()


def other_layer_is_trained(model):
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(True)


def larger_parameter(model):
    model.blocks[1].up.bias = nn.Parameter(torch.zeros(ROWS, 4 * NET_WIDTH))


def larger_module(model):
    model.embed = nn.Sequential(nn.Linear(NET_WIDTH, NET_WIDTH), nn.Linear(NET_WIDTH, NET_WIDTH))


def parameter_of_a_leaf(model):
    model.blocks[0].norm.scale = nn.Parameter(torch.ones(()))


def other_dtype(model):
    model.double()


CHANGES = [other_layer_is_trained, larger_parameter, larger_module, parameter_of_a_leaf, other_dtype]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_planned_from_the_start(change, caplog):
    model = net(LAYERS)
    model.blocks[1].requires_grad_(False)
    gradckpt.enable(model, budget="1GiB")
    with caplog.at_level(logging.INFO, "gradckpt"):
        for _ in range(3):
            step(model)
            model.zero_grad()
        assert caplog.text.count("planning Net") == 1
        change(model)
        for _ in range(3):
            step(model)
            model.zero_grad()
        assert caplog.text.count("planning Net") == 2


def test_autocast_is_seen(caplog):
    model = net(LAYERS)
    gradckpt.enable(model, budget="1GiB")
    with caplog.at_level(logging.INFO, "gradckpt"):
        for dtype in (torch.bfloat16, torch.float16):
            for _ in range(2):
                step(model, lambda dtype=dtype: torch.autocast("cpu", dtype=dtype))
                model.zero_grad()
    assert caplog.text.count("planning Net") == 2


def test_values_of_parameters_are_no_change(caplog):
    model = net(LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradckpt.enable(model, budget="1GiB", optimizer=optimizer)
    with caplog.at_level(logging.INFO, "gradckpt"):
        for _ in range(3):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(net(LAYERS).state_dict(), assign=True)
        step(model)
    assert caplog.text.count("planning Net") == 1
    assert "planned again" not in caplog.text


def test_gradients_of_replaced_parameters_count(caplog):
    model = net(LAYERS)
    gradckpt.enable(model, budget="1GiB")
    for _ in range(2):
        step(model)
        model.zero_grad()
    weight = model.embed.weight = nn.Parameter(torch.ones(NET_WIDTH, NET_WIDTH))
    weight.grad = torch.ones(NET_WIDTH, NET_WIDTH)
    with caplog.at_level(logging.INFO, "gradckpt"):
        step(model)
    assert caplog.text.count("planned again, since gradients exist") == 1
    assert vars(model)["_gradckpt_budget"].plan.fixed["gradients"] == weight.nbytes


class Remembering(torch.optim.SGD):
    """Has a list of all gradients, as LBFGS has some."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("gradients", []).append(p.grad.clone())


def test_states_in_a_list_that_grows_count():
    model = net(LAYERS)
    optimizer = Remembering(model.parameters())
    gradckpt.enable(model, budget="1GiB")
    counted = []
    for _ in range(4):
        step(model)
        counted.append(vars(model)["_gradckpt_budget"]._known["states"])
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(p.nbytes for p in model.parameters())
    assert counted == [0, weights, 2 * weights, 3 * weights]


# ---- the walk itself


def test_a_walk_finds_what_parameters_have():
    model, walk = net(LAYERS), ParameterWalk()

    def check():
        by_torch = (
            [(p.nbytes, p.requires_grad) for p in model.parameters()],
            gradient_bytes(model.parameters(), state_of(model)),
        )
        assert walk.read(model)[:2] == by_torch

    check()
    step(model)
    check()
    for change in CHANGES:
        model.zero_grad()
        change(model)
        check()
    model.blocks[0], model.blocks[1] = model.blocks[1], nn.Identity()
    check()
    model.blocks.append(PlannedBlock())
    check()
    del model.blocks[0]
    check()
    model.blocks[0].weight = None
    check()


def test_shared_parameters_count_once():
    model, walk = net(LAYERS), ParameterWalk()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    step(model)
    assert (
        walk.read(model).gradients
        == gradient_bytes(model.parameters(), state_of(model))
        == sum(p.grad.nbytes for p in model.parameters())
    )


def test_parts_that_are_replaced_are_freed():
    model = net(LAYERS)
    gradckpt.enable(model, budget="1GiB")
    step(model)
    model.zero_grad()
    part = weakref.ref(model.embed.weight)
    model.embed = nn.Linear(NET_WIDTH, NET_WIDTH)
    gc.collect()
    assert part() is None


def test_a_copy_reads_its_own_parameters():
    model = net(LAYERS)
    gradckpt.enable(model, budget="1GiB")
    step(model)
    twin = copy.deepcopy(model)
    assert vars(twin)["_gradckpt_budget"]._parameters.read(twin).gradients == gradient_bytes(
        twin.parameters(), state_of(twin)
    )


# ---- what the measuring call leaves


def test_generators_move_as_with_checkpoints(monkeypatch):
    """Recomputing draws from Python's and numpy's again, and measuring does not."""
    measured(monkeypatch)

    class Drawing(PlannedBlock):
        def forward(self, x):
            return super().forward(x) * (numpy.random.rand() + random.random() + torch.rand(()))

    def draws(run):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        run()
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    model = net(1)
    model.blocks[0] = Drawing()
    gradckpt.enable(model, None, modules=Drawing)
    expected = draws(lambda: step(model))
    gradckpt.enable(model, budget="1GiB", modules=Drawing)
    assert draws(lambda: step(model)) == expected
    planned = draws(lambda: gradckpt.plan(model, torch.ones(ROWS, NET_WIDTH), budget="1GiB", modules=Drawing))
    assert planned == draws(lambda: None), "a plan for later leaves them where they are"


def test_hooks_of_parameters_are_called_once_for_each_backward(monkeypatch):
    measured(monkeypatch)
    model, calls = net(LAYERS), []
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: calls.append(name))
    gradckpt.enable(model, budget="1GiB")
    for _ in range(2):
        calls.clear()
        step(model)
        assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


# ---- the meta device


def test_a_model_without_values(caplog):
    """It is planned, and planned from the start once it has values."""
    model = net(LAYERS).to("meta")
    gradckpt.enable(model, budget="1GiB")
    added = set()
    with caplog.at_level(logging.INFO, "gradckpt"):
        for calls in (1, 2):
            for _ in range(2):
                step(model)
                model.zero_grad()
            assert caplog.text.count("planning Net") == calls
            plan = vars(model)["_gradckpt_budget"].plan
            added.add(plan.peak - sum(plan.fixed.values()))
            model.to_empty(device="cpu")
    assert len(added) == 1


def test_regions_without_values_are_measured(monkeypatch):
    measured(monkeypatch)
    model = net(1).to("meta")
    with options.measure_regions(model.blocks, [options.KEEP, options.RECOMPUTE]) as costs:
        step(model)
    assert costs[id(model.blocks[0]), options.RECOMPUTE].seconds > 0


# ---- nothing to do


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


ROOMY = "<gradckpt handle: Stack has nothing to do within the budget>"


def test_a_budget_that_needs_nothing_says_so(caplog, recwarn):
    gradckpt.stats.reset()
    caplog.set_level(logging.INFO, "gradckpt")
    model, batch = Stack(), torch.randn(64, 64)
    handle = gradckpt.enable(model, budget="1GiB")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        model(batch).backward()
        optimizer.step()
    assert repr(handle) == ROOMY
    assert "without checkpointing: " in caplog.text
    assert "Nothing to do within the budget." in caplog.text
    assert "not enabled" not in caplog.text
    assert not [each for each in recwarn if isinstance(each.message, gradckpt.GradckptInactiveWarning)]
    assert str(gradckpt.stats()).startswith("checkpoints: none so far")  # those of the call that measured do not count
    handle.remove()
    assert repr(handle) == "<gradckpt handle: Stack is not enabled>"


def test_a_plan_that_needs_nothing_says_so(caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    batch = torch.randn(64, 64)
    plan = gradckpt.plan(Stack(), batch, budget="1GiB")
    assert "Nothing to do within the budget." in plan.verdict
    model = Stack()
    gradckpt.enable(model, "int8")
    handle = gradckpt.enable(model, plan=plan)
    copied = pickle.loads(pickle.dumps((model, handle)))
    assert repr(handle) == repr(copied[1]) == ROOMY
    assert ROOMY in caplog.text
    assert "Sequential" in repr(gradckpt.enable(model, "int8"))
    gradckpt.enable(model, plan=plan)
    gradckpt.disable(model)
    assert repr(handle) == "<gradckpt handle: Stack is not enabled>"


@pytest.mark.parametrize(
    "plan",
    [
        lambda model, batch: gradckpt.plan(model, batch),
        lambda model, batch: gradckpt.plan(model, batch, budget="activations:1MiB", error=0.5, compress="int8"),
        lambda model, batch: gradckpt.plan(model, batch, budget="activations:130KiB", compress="int8"),
        lambda model, batch: gradckpt.gradient_error(model, batch),
    ],
    ids=["table", "error", "budget", "gradient_error"],
)
def test_settings_that_are_only_tried_are_not_logged(plan, caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    plan(Stack(), torch.randn(64, 64))
    assert "handle" not in caplog.text
