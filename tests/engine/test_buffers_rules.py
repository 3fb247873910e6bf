"""buffers="once": which modules and which buffers."""

import gc
import weakref

import norm_steps
import pytest
import torch
from norm_steps import Norms, both, different, step
from torch import nn

import gradckpt
from gradckpt._engine import buffers

_clean = norm_steps.nothing_left_behind


# ---- rules ----


class Counter(nn.Module):
    """Counts its calls in each of the ways in which a module can."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tensor", torch.zeros(3))
        self.register_buffer("other", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.number = 0
        self.plain = torch.zeros(())

    def forward(self, x):
        self.tensor.add_(1)
        self.other = self.other + 1
        self.frozen.data.add_(1)
        self.number += 1
        self.plain = self.plain + 1
        return x.sin()

    def counts(self):
        return [int(c) for c in (self.tensor[0], self.other, self.frozen[0], self.number, self.plain)]


ALL = ("tensor", "other", "frozen", "number", "plain")


def count(module):
    x = torch.randn(3, requires_grad=True)
    gradckpt.checkpoint(module, x).sum().backward()
    return module.counts()


def test_rule_keeps_what_it_names():
    assert count(Counter()) == [2, 2, 2, 2, 2]
    with buffers.register(Counter, ALL):
        assert count(Counter()) == [1, 1, 1, 1, 1]
        assert count(type("Sub", (Counter,), {})()) == [1, 1, 1, 1, 1]
    with buffers.register(Counter, ["tensor", "number"]):
        assert count(Counter()) == [1, 2, 2, 1, 2]
    assert count(Counter()) == [2, 2, 2, 2, 2]


def test_rule_given_after_a_first_step_holds():
    module = Counter()
    assert count(module) == [2] * 5
    handle = buffers.register(Counter, ALL)
    assert count(module) == [3] * 5
    handle.remove()
    handle.remove()
    assert count(module) == [5] * 5


def test_rule_may_be_a_function_of_the_module():
    with buffers.register(Counter, lambda module: ALL if module.training else ()):
        assert count(Counter()) == [1] * 5
        assert count(Counter().eval()) == [2] * 5


def test_rules_add_up():
    class Counting(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(6)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    with buffers.register(Counting, ("calls", "running_mean")):
        plain, ours = both(lambda net: net, gradckpt.checkpoint, nn.Sequential(Counting(), nn.Linear(6, 6)))
    assert different(plain, ours) == []


def test_rule_with_a_wrong_name_says_which():
    with (
        buffers.register(Counter, ("tensor", "absent")),
        pytest.raises(AttributeError, match="Counter names 'absent'"),
    ):
        count(Counter())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((int, ("a",)), "subclass of torch.nn.Module"), ((Counter(), ("a",)), "subclass"), ((Counter, "number"), "tuple")],
)
def test_wrong_rules_are_refused(arguments, text):
    with pytest.raises(TypeError, match=text):
        buffers.register(*arguments)


def test_spectral_norm_by_rule():
    """The example of the documentation: one power iteration a step."""
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)))
    kind = nn.utils.parametrizations._SpectralNorm
    with buffers.register(kind, ("_u", "_v")):
        plain, ours = both(lambda net: net, gradckpt.checkpoint, net)
    assert [name for name in different(plain, ours) if name.endswith(("_u", "_v"))] == []


# ---- objects ----


class Replacing(nn.BatchNorm1d):
    def forward(self, x):
        y = super().forward(x)
        self.running_mean = self.running_mean.clone()
        self.num_batches_tracked = None if self.num_batches_tracked is None else self.num_batches_tracked + 1
        return y


def test_replaced_buffer_is_the_old_object_again():
    net = Replacing(6)
    y = gradckpt.checkpoint(net, torch.randn(4, 6, requires_grad=True), early_stop=False)
    objects, values = dict(net._buffers), {name: b.clone() for name, b in net._buffers.items()}
    y.sum().backward()
    assert all(net._buffers[name] is objects[name] for name in objects)
    assert different(values, dict(net._buffers)) == []


def test_putting_back_leaves_the_version_alone():
    """Another part of the graph may have saved the buffer."""
    net = nn.BatchNorm1d(6)
    guard = buffers.enter([net])
    net(torch.randn(4, 6))
    versions = [b._version for b in net.buffers()]
    guard.close()
    assert versions == [b._version for b in net.buffers()]
    assert net.num_batches_tracked == 0


def test_buffers_shared_by_two_modules():
    a, b = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    b._buffers = a._buffers
    plain, ours = both(lambda net: net, gradckpt.checkpoint, nn.Sequential(a, b))
    assert plain["0.num_batches_tracked"] == 2
    assert different(plain, ours) == []


def test_odd_tensors_are_left_or_kept():
    meta, lazy = nn.BatchNorm1d(6, device="meta"), nn.LazyBatchNorm1d()
    counter = Counter()
    with torch.inference_mode():
        counter.tensor = torch.zeros(3)
    with buffers.register(Counter, ALL):
        guard = buffers.enter([meta, lazy, counter])
    with torch.inference_mode():
        counter.tensor.add_(1)
    old = meta.running_mean
    meta.running_mean = torch.zeros(6, device="meta")
    guard.close()
    assert meta.running_mean is old
    assert counter.tensor.tolist() == [0, 0, 0]


# ---- which modules ----


def test_modules_are_not_kept_alive():
    net = Norms()
    step(net, net, gradckpt.checkpoint)
    refs = [weakref.ref(module) for module in net.modules()]
    del net
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


class Equal(nn.Sequential):
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize("kind", ["cannot be hashed", "shared", "within itself", "compiled"])
def test_odd_trees_update_once(kind):
    norm = nn.BatchNorm1d(6)
    net = (Equal if kind == "cannot be hashed" else nn.Sequential)(nn.Linear(6, 6), norm)
    if kind == "shared":
        net[0].again = nn.ModuleDict({"norm": norm})
        net[0].none = None
        net[0].register_module("nothing", None)
    elif kind == "within itself":
        net[0].net = net
    function = torch.compile(net, backend="eager") if kind == "compiled" else net
    gradckpt.checkpoint(function, torch.randn(4, 6, requires_grad=True) * 1).sum().backward()
    assert norm.num_batches_tracked == 1
