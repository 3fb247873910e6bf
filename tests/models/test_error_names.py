"""Errors show neither private names nor a chain of internal ones, nor the values of tensors."""

import pickle
import traceback

import pytest
import torch
from torch import nn

import gradckpt
from gradckpt._planning.region_plan import NoPlan
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._training_step import StepWrites


class Net(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.layers, self.reads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)), reads

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean() * (2 if self.reads and x.sum().item() > 0 else 1)


def batch():
    return torch.randn(32, 64)


def trained_within(budget, reads=False):
    model = Net(reads)
    gradckpt.enable(model, budget=budget)
    model(batch())


def optimizing(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(batch()).backward()
        optimizer.step()

    return step


def tracked_twice():
    with gradckpt.track_memory(), gradckpt.track_memory():
        pass


MODEL = Net()
PARAMETERS = list(MODEL.parameters())

CALLS = {
    "enable, parameters": lambda: gradckpt.enable(MODEL, modules=PARAMETERS),
    "enable, a parameter": lambda: gradckpt.enable(MODEL, modules={PARAMETERS[0]: "int8"}),
    "enable, a tensor as budget": lambda: gradckpt.enable(MODEL, budget=PARAMETERS[0]),
    "enable, a tensor as place": lambda: gradckpt.enable(MODEL, offload=PARAMETERS[0]),
    "enable, a tensor as number": lambda: gradckpt.enable(MODEL, every_n_layers=PARAMETERS[0]),
    "enable, a tensor as switch": lambda: gradckpt.enable(MODEL, recompute=PARAMETERS[0]),
    "enable, a keyword": lambda: gradckpt.enable(MODEL, compres="int8"),
    "enable, no file": lambda: gradckpt.enable(MODEL, plan="missing.json"),
    "budget, too small": lambda: trained_within("activations:2KiB"),
    "budget, values": lambda: trained_within("1GiB", reads=True),
    "plan, too small": lambda: gradckpt.plan(MODEL, batch(), budget="activations:2KiB"),
    "plan, values": lambda: gradckpt.plan(Net(reads=True), batch(), budget="1GiB"),
    "plan, memory": lambda: gradckpt.plan(MODEL, batch(), memory="much"),
    "checkpoint": lambda: gradckpt.checkpoint(torch.sin, batch(), compress=PARAMETERS[0]),
    "gradient_error": lambda: gradckpt.gradient_error(MODEL, batch(), [{"compres": "int8"}]),
    "gradient_error, a step": lambda: gradckpt.gradient_error(MODEL, optimizing(MODEL)),
    "compress_saved": lambda: gradckpt.compress_saved({"linears": "int8"}),
    "track_memory": tracked_twice,
    "Offload": lambda: gradckpt.Offload("disk", min_bytes="much"),
    "CompressionConfig": lambda: gradckpt.CompressionConfig(min_numel=PARAMETERS[0]),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_private_names_no_chain_no_values(call):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        CALLS[call]()
    error = raised.value
    said = "".join(traceback.format_exception_only(error))
    assert said.startswith(("ValueError: gradckpt: ", "TypeError: gradckpt: ", "RuntimeError: gradckpt: ")), said
    assert "gradckpt._" not in said
    assert "tensor([" not in said
    shown = "".join(traceback.format_exception(error))
    assert "During handling of the above" not in shown
    assert "direct cause" not in shown


@pytest.mark.parametrize("error", [NoPlan("gradckpt: no plan", 5, (1, 2)), StepWrites(), NotSimulated("aten::item")])
def test_classes_that_only_gradckpt_catches_have_the_name_of_their_base(error):
    assert type(error).__name__ in ("ValueError", "RuntimeError")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
