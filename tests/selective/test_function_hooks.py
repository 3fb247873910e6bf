"""SelectiveRecompute: hooks of parameters are called once, with the sum,
whatever happens during the inner backward."""

import collections
import copy
import pickle
import threading
import weakref

import pytest
import torch
from selective_ways import _nothing_left_behind as _nothing_left_behind
from selective_ways import leaf, same

import gradckpt
from gradckpt._engine import parameter_hooks

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
apply = gradckpt.SelectiveRecompute.apply


class During(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


class Region(torch.nn.Linear):
    """`during` runs in the inner backward, before the gradients of weight and bias are known."""

    def __init__(self, during=lambda: None):
        super().__init__(4, 4)
        self.during = during

    def forward(self, x):
        return During.apply(super().forward(x), self.during)


def train(module, x, times=1):
    for _ in range(times):
        apply(module, None, x).sum().backward()


def test_hooks_that_come_and_go_during_the_inner_backward():
    calls, handles = [], []

    def during():
        handles[0].remove()
        handles.append(module.weight.register_hook(lambda g: calls.append("late") or g * 2))

    module, x = Region(during), leaf(3, 4)
    handles.append(module.weight.register_hook(lambda g: calls.append("early")))
    module.weight.register_hook(lambda g: calls.append("stays"))
    train(module, x)
    plain = Region()
    plain.load_state_dict(module.state_dict())
    plain(x).sum().backward()
    assert calls == ["stays", "late"]
    assert torch.equal(module.weight.grad, plain.weight.grad * 2)


def test_a_hook_of_another_thread_during_the_inner_backward():
    calls = []

    def during():
        thread = threading.Thread(target=module.weight.register_hook, args=(lambda g: calls.append(g.clone()),))
        thread.start()
        thread.join()

    module, x = Region(during), leaf(3, 4)
    module.weight.register_hook(lambda g: None)
    train(module, x)
    assert len(calls) == 1
    assert torch.equal(calls[0], module.weight.grad)


def test_hooks_are_called_in_order_with_what_the_one_before_returned():
    module, x, seen = Region(), leaf(3, 4), []
    module.weight.register_hook(lambda g: g * 2)
    module.weight.register_hook(lambda g: seen.append(g.clone()))
    module.weight.register_hook(lambda g: g + 1)
    train(module, x)
    (want,) = torch.autograd.grad(module(x).sum(), module.weight)  # two hooks change it here, too
    assert same([want], [module.weight.grad])
    assert torch.equal(seen[0] + 1, module.weight.grad)


def test_one_region_in_several_and_several_backwards():
    module, x, calls = Region(), leaf(3, 4), []
    module.weight.register_hook(lambda g: calls.append(g.clone()))
    outer = torch.nn.Sequential(module, torch.nn.Tanh(), module)
    for region in (lambda t: apply(module, None, apply(module, None, t)), lambda t: apply(outer, None, t)):
        calls.clear()
        module.weight.grad = None
        region(x).sum().backward()
        assert len(calls) == 1
        assert torch.equal(calls[0], module.weight.grad)
    nested = torch.nn.Module()
    nested.inner = module
    nested.forward = lambda t: apply(module, None, t).sin()
    calls.clear()
    apply(nested, None, x).sum().backward()
    assert len(calls) == 1


def test_a_backward_of_the_users_inside_the_inner_backward_calls_them():
    def during():
        with torch.enable_grad():
            torch.autograd.grad(other.weight.square().sum(), other.weight)

    calls, x = [], leaf(3, 4)
    module = Region(during)
    other = torch.nn.Linear(4, 4)
    module.other = other
    other.weight.register_hook(lambda g: calls.append("user's"))
    forward = module.forward
    module.forward = lambda t: forward(t) + 0 * other.weight.sum()
    apply(module, None, x).sum().backward()
    assert calls == ["user's", "user's"]  # the user's own, and the one that accumulates


def test_a_module_that_returns_a_parameter():
    class Gives(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    module, x, calls = Gives(4, 4), leaf(3, 4), []
    module.weight.register_hook(lambda g: calls.append(g.clone()))
    y, w = apply(module, None, x)
    (y.sum() + w.sum()).backward()
    assert len(calls) == 1
    assert torch.equal(module.weight.grad, x.detach().sum(0).expand(4, 4) + 1)


def test_what_a_user_sees_of_the_hooks():
    def named(g):
        return "no tensor"

    module, x = Region(), leaf(3, 4)
    first = module.weight.register_hook(lambda g: None)
    second = module.weight.register_hook(torch.utils.hooks.unserializable_hook(lambda g: None))
    train(module, x)
    assert isinstance(module.weight._backward_hooks, collections.OrderedDict)
    assert type(module.weight._backward_hooks) is parameter_hooks.GuardedHooks
    assert list(module.weight._backward_hooks) == [first.id, second.id]
    assert [hasattr(h, "__torch_unserializable__") for h in module.weight._backward_hooks.values()] == [False, True]
    assert "<lambda>" in repr(next(iter(module.weight._backward_hooks.values())))
    copied = copy.deepcopy(module)
    assert not copied.weight._backward_hooks
    first.remove()
    second.remove()
    second.remove()
    assert not module.weight._backward_hooks
    handle = module.weight.register_hook(named)
    with pytest.raises(TypeError, match="expected Variable, but hook returned 'str'"):
        train(module, x)
    handle.remove()
    handle = module.weight.register_hook(torch.sin)
    again = pickle.loads(pickle.dumps(handle))
    assert [h.hook for h in again.hooks_dict_ref().values()] == [torch.sin] if again.hooks_dict_ref() else True
    assert copy.copy(parameter_hooks.GuardedHook(named)).hook is named
    pickle.loads(pickle.dumps(module.weight))


def test_an_exception_leaves_nothing_behind():
    def during():
        raise KeyboardInterrupt

    module, x, calls = Region(during), leaf(3, 4), []
    module.weight.register_hook(lambda g: calls.append(1))
    with pytest.raises(KeyboardInterrupt):
        train(module, x)
    assert not parameter_hooks._inner
    module.during = lambda: None
    train(module, x, times=2)
    assert calls == [1, 1]
    assert not parameter_hooks._inner


def test_a_hook_that_raises_is_heard_of_once():
    module, x, calls = Region(), leaf(3, 4), []
    module.weight.register_hook(lambda g: calls.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(module, x)
    assert calls == [1]


# ---- what a module may be ----


def test_parameters_frozen_between_forward_and_backward():
    module, x = torch.nn.Linear(4, 4), leaf(3, 4)
    out = apply(module, None, x)
    module.weight.requires_grad_(False)
    out.sum().backward()
    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, torch.full((4,), 3.0))
    assert torch.equal(x.grad, module.weight.sum(0).expand(3, 4))
    module = torch.nn.Linear(4, 4)
    out = apply(module, None, x.detach())
    module.requires_grad_(False)
    out.sum().backward()
    assert module.weight.grad is None


def test_a_parameter_that_began_to_require_grad_after_the_forward():
    module, x = torch.nn.Linear(4, 4), leaf(3, 4)
    module.weight.requires_grad_(False)
    out = apply(module, None, x)
    module.weight.requires_grad_(True)
    out.sum().backward()
    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, torch.full((4,), 3.0))


def test_modules_that_cannot_be_hashed():
    class Unhashable(torch.nn.Linear):
        def __eq__(self, other):
            raise TypeError("not compared")

        __hash__ = None

        def method(self, x):
            return self(x)

    module = torch.nn.Module()
    module.inner = Unhashable(4, 4)
    module.forward = lambda x: module.inner(x)
    x = leaf(3, 4)
    for function in (module, module.inner.method):
        module.inner.weight.grad = None
        train_by = apply(function, None, x)
        train_by.sum().backward()
        assert torch.equal(module.inner.weight.grad, x.detach().sum(0).expand(4, 4))


def test_a_self_that_is_made_at_each_look():
    class Owner:
        @property
        def __self__(self):
            return torch.nn.Linear(4, 4)

        def __call__(self, x):
            return x * 2

    x = leaf(3, 4)
    for _ in range(50):
        apply(Owner(), None, x * 1).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 100.0))


def test_getters_that_change_the_module():
    """Reading `requires_grad` runs the code of a mode."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "__get__" and len(module._parameters) < 60:
                module._parameters[f"p{len(module._parameters)}"] = torch.nn.Parameter(torch.zeros(2))
                module._modules.pop("child", None)
            return function(*args, **(kwargs or {}))

    module, x = torch.nn.Linear(4, 4), leaf(3, 4)
    module.child = torch.nn.Linear(4, 4)
    with Mode():
        out = apply(module, None, x)
    out.sum().backward()
    assert torch.equal(module.bias.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_of_a_getter_arrives(error):
    class Owner:
        @property
        def __self__(self):
            raise error

        def __call__(self, x):
            return x * 2

    with pytest.raises(error):
        apply(Owner(), None, leaf(3, 4))


# ---- memory ----


def test_a_retained_graph_keeps_them():
    module, x = torch.nn.Linear(64, 64), leaf(64, 64)
    loss = apply(module, None, x * 1, compress="int8").sum()
    live = gradckpt.stats()["live_bytes"]
    loss.backward(retain_graph=True)
    assert gradckpt.stats()["live_bytes"] == live > 0
    loss.backward()
    assert gradckpt.stats()["live_bytes"] == 0
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("compress", [None, "int8"])
def test_outer_hooks_see_what_is_kept(compress):
    module, x, seen = torch.nn.Linear(64, 64), leaf(64, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t.clone(), lambda t: t):
        h = x * torch.ones(64, 64)
        seen.clear()
        out = apply(module, None, h, compress=compress)
    assert seen == ([torch.uint8] * 2 if compress else [torch.float32])  # codes, scales
    out.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        loss = apply(module, None, x * 1, compress=compress).sum()
    loss.backward()
    assert torch.allclose(x.grad, module.weight.sum(0).expand(64, 64) * 2)


def test_an_outer_region_keeps_none_of_them():
    """They are tensors saved inside it, made again by its recompute."""
    module, x, alive = torch.nn.Linear(64, 64), leaf(64, 64), []

    class Bytes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.uint8 and out.numel() == 64 * 64:
                alive.append(weakref.ref(out))
            return out

    def outer(h):
        for _ in range(4):
            h = apply(module, None, h.sin(), compress="int8")
        return h.sin()

    with Bytes():
        y = gradckpt.checkpoint(outer, x * 1, preserve_rng_state=False)
    assert len(alive) == 4
    assert [ref() for ref in alive] == [None] * 4
    y.sum().backward()
