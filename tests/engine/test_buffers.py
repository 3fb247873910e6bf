"""buffers=: after a step, running statistics are those of a step without checkpointing, bit for
bit; which modules and which buffers."""

import copy
import functools
import gc
import weakref

import pytest
import small_models
import torch
from _pytest.logging import LogCaptureHandler
from behaviours import Operators
from small_models import FORMS, OPAQUE, RAW_NORMS, Norms, both, different, plainly, step
from torch import nn

import gradckpt
import gradckpt.compat
from gradckpt._engine import buffers

_clean = small_models.nothing_left_behind


# ---- once ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [{}, {"buffers": None}, {"buffers": "once"}], ids=["unset", "None", "once"])
def test_step_updates_once(form, given):
    plain, ours = both(FORMS[form], functools.partial(gradckpt.checkpoint, **given))
    assert different(plain, ours) == []
    assert ours["flat.0.num_batches_tracked"] == 1


@pytest.mark.parametrize("form", OPAQUE)
def test_another_function_says_whose_they_are(form):
    """Unset it runs again as torch does, "once" is refused, and the module may be passed."""
    net = Norms()
    function = OPAQUE[form](net)
    with pytest.raises(ValueError, match=r"needs a module or its method, and .* is neither; pass buffers=MODULE"):
        gradckpt.checkpoint(function, torch.randn(4, 6), buffers="once")
    once_more = form != "partial of a region"  # an early stop leaves the outer one before the inner one runs
    assert step(net, function, gradckpt.checkpoint)["flat.0.num_batches_tracked"] == 1 + once_more
    plain, ours = both(OPAQUE[form], gradckpt.checkpoint, passed=True)
    assert different(plain, ours) == []


def test_several_modules_are_passed_as_a_list():
    nets = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6)])
    first, second = nets
    step(nets, lambda x: second(first(x)), functools.partial(gradckpt.checkpoint, buffers=[first, second]))
    assert (first.num_batches_tracked, second.num_batches_tracked) == (1, 1)


def test_a_module_that_comes_later_is_found():
    """No list of children is kept, however they come."""
    net = nn.Sequential(nn.Linear(6, 6))
    step(net, net, gradckpt.checkpoint)
    net.insert(0, nn.BatchNorm1d(6))
    step(net, net, gradckpt.checkpoint)
    assert net[0].num_batches_tracked == 1


OPTIONS = {
    "compressed": {"compress": RAW_NORMS},
    "whole recompute": {"early_stop": False},
    "reentrant": {"use_reentrant": True},
    "debug": {"debug": True},
}


@pytest.mark.parametrize("form", ["module", "lambda"])
@pytest.mark.parametrize("options", OPTIONS)
def test_step_updates_once_with(options, form, monkeypatch):
    monkeypatch.setattr(LogCaptureHandler, "handleError", lambda self, record: None)  # debug's log confuses pytest's
    call = functools.partial(gradckpt.checkpoint, **OPTIONS[options])
    plain, ours = both({**FORMS, **OPAQUE}[form], call, passed=form == "lambda")
    assert different(plain, ours) == []


def test_each_of_two_backwards_puts_back():
    plain, ours = both(FORMS["module"], gradckpt.checkpoint, backwards=2)
    assert different(plain, ours) == []


@pytest.mark.parametrize("form", ["method", "lambda"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_in_the_recompute_puts_back(error, form):
    class Raising(Norms):
        calls = 0

        def method(self, x):
            y = self(x)
            self.calls += 1
            if self.calls == 2:
                raise error("second")
            return y

    net = Raising()
    x = torch.randn(4, 6, requires_grad=True)
    if form == "method":
        y = gradckpt.checkpoint(net.method, x, early_stop=False)
    else:
        y = gradckpt.checkpoint(lambda t: net.method(t), x, early_stop=False, buffers=net)
    after = {name: b.clone() for name, b in net.named_buffers()}
    with pytest.raises(error, match="second"):
        y.sum().backward()
    assert different(after, dict(net.named_buffers())) == []


class Super(Norms):
    """As Hugging Face's layers: the region is the parent's __call__."""

    region = staticmethod(gradckpt.checkpoint)

    def __call__(self, x):
        return self.region(functools.partial(super().__call__, scale=2.0), x)


def test_super_call_updates_once():
    net = Super()
    plain = copy.deepcopy(net)
    plain.region = lambda function, x: function(x)
    assert different(step(plain, plain, plainly), step(net, net, plainly)) == []


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_nested_regions_update_once(regions):
    """The outer one runs the forward of the inner ones again, so it has to know the module."""

    def call(function, x):
        for _ in range(regions - 1):
            function = functools.partial(gradckpt.checkpoint, function)
        return gradckpt.checkpoint(lambda h: function(h.sin()).exp(), x, buffers=net)

    net = Norms()
    other = copy.deepcopy(net)
    plain = step(other, other, lambda function, x: function(x.sin()).exp())
    ours = step(net, net, call)
    assert different(plain, ours) == []


def test_a_backward_inside_the_region_puts_back_at_each_level():
    """The recompute of an inner region, within the recompute of the outer, within its forward."""

    def call(function, x, region):
        def outer(h):
            y = region(function, h)
            (g,) = torch.autograd.grad(y.sum(), h, create_graph=False, retain_graph=True)
            return region(function, h + g) * g

        return region(outer, x)

    def run(region):
        torch.manual_seed(0)
        net = Norms()
        return step(net, net, functools.partial(call, region=functools.partial(region, net)))

    plain = run(lambda net, function, x: function(x))
    ours = run(lambda net, function, x: gradckpt.checkpoint(function, x, buffers=net))
    assert [name for name in different(plain, ours) if "running" in name or "num" in name] == []
    assert ours["flat.0.num_batches_tracked"] == 2


def test_eval_and_training_may_alternate():
    """Nothing to do in eval mode is no lasting fact about a module."""
    net = Norms().eval()
    other = copy.deepcopy(net)
    for training in (False, True, False, True):
        plain = step(net.train(training), net, plainly)
        assert different(plain, step(other.train(training), other, gradckpt.checkpoint)) == []
    assert net.flat[0].num_batches_tracked == 2


def test_instance_norm_whose_flag_was_switched_off_still_writes():
    net = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True))
    net[2].track_running_stats = False
    plain, ours = both(lambda net: net, functools.partial(gradckpt.checkpoint, early_stop=False), net.eval())
    assert plain["2.running_mean"].abs().sum() > 0
    assert different(plain, ours) == []


# ---- torch ----


def test_what_means_nothing_is_refused():
    with pytest.raises(ValueError, match="must be 'once', 'torch' or a module, not 'never'"):
        gradckpt.checkpoint(nn.BatchNorm1d(6), torch.randn(4, 6), buffers="never")
    with pytest.raises(TypeError, match=r"a module, a list of modules, or a word, not \[3\]"):
        gradckpt.checkpoint(nn.BatchNorm1d(6), torch.randn(4, 6), buffers=[3])


# ---- modes of the recompute ----


def test_modes_of_the_recompute_do_not_see_the_copies():
    """Selective checkpointing counts operators."""

    def run(how):
        log = Operators()
        net = Norms()
        call = functools.partial(gradckpt.checkpoint, buffers=how, context_fn=lambda: (Operators(), log))
        step(net, net, call)
        return log.names

    assert run("once") == run("torch")


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
