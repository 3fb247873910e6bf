"""Other code reads, binds, wraps and replaces the forward that enable() put on a module."""

import copy
import functools
import inspect
import types
import warnings

import pytest
import torch
from small_models import Chain
from torch import nn

import gradckpt
from gradckpt import GradckptInactiveWarning
from gradckpt._models.regions import region_of
from gradckpt._stats import compiled

WIDTH = 64


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    gradckpt.stats.reset()
    monkeypatch.setattr(compiled, "ever", False)  # by another test of this process


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale: float = 1.0, *, shift=0.0):
        return x + torch.relu(self.linear(x)) * scale + shift


def x():
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model, steps=1):
    """Train, and return how many tensors were compressed in a step."""
    before = gradckpt.stats()["compressed"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x()).square().mean().backward()
        optimizer.step()
    return (gradckpt.stats()["compressed"] - before) / steps


# ---- a region is read as the forward that it replaces ----


def test_attributes_are_those_of_the_forward():
    model = Chain(Block, 3)
    gradckpt.enable(model, modules=Block)
    block = model.blocks[0]
    forward = block.forward
    assert forward.__code__ is Block.forward.__code__
    assert forward.__globals__ is Block.forward.__globals__
    assert forward.__defaults__ == (1.0,)
    assert forward.__kwdefaults__ == {"shift": 0.0}
    assert forward.__annotations__ == {"scale": float}
    assert forward.__name__ == "forward"
    assert forward.__qualname__ == "Block.forward"
    assert forward.__self__ is block
    assert forward.__wrapped__ == types.MethodType(Block.forward, block)
    assert inspect.signature(forward) == inspect.signature(Chain(Block, 3).blocks[0].forward)
    assert not hasattr(forward, "no_such_attribute")


def test_attributes_are_those_of_an_earlier_replacement():
    model = Chain(Block, 3)
    block = model.blocks[0]
    block.forward = functools.partial(block.forward, shift=1.0)
    gradckpt.enable(model, modules=Block)
    assert block.forward.keywords == {"shift": 1.0}


@pytest.mark.parametrize("recompute", [True, False])
def test_binding_it_again_keeps_the_region(recompute):
    model = Chain(Block, 3)
    gradckpt.enable(model, "int8", modules=Block, recompute=recompute)
    expected = train(copy.deepcopy(model))
    assert expected
    for i, block in enumerate(model.blocks):
        forward = block.forward
        again = (types.MethodType(forward, block), types.MethodType(forward.__func__, block), forward.__get__(block))
        block.forward = again[i]
    assert train(model) == expected


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recompute", [True, False])
def test_export(recompute, strict):
    model = Chain(Block, 3)
    expected = model(x())
    gradckpt.enable(model, recompute=recompute)
    for training in (False, True) if not (recompute and strict) else (False,):  # torch's own checkpoint fails there
        exported = torch.export.export(model.train(training), (x(),), strict=strict)
        assert torch.equal(exported.module()(x()), expected)


# ---- other code takes it away ----


def put_back_the_method(block, before):
    block.forward = types.MethodType(Block.forward, block)


def delete_it(block, before):
    del block.forward


def put_back_the_hook(block, before):
    block.forward = before


def wrap_another(block, before):
    block.forward = functools.wraps(Block.forward)(functools.partial(Block.forward, block))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loses", [put_back_the_method, delete_it, put_back_the_hook, wrap_another])
def test_a_lost_forward_is_said_and_an_equal_enable_installs_it_again(loses, trained):
    model = Chain(Block, 3)
    if loses is put_back_the_hook:
        for block in model.blocks:
            block.forward = functools.partial(block.forward, shift=0.0)
    before = [vars(block).get("forward") for block in model.blocks]
    gradckpt.enable(model, "int8", modules=Block)
    if trained:
        assert train(model, 3) == 3
    for block, old in zip(model.blocks, before, strict=True):
        loses(block, old)
    with pytest.warns(GradckptInactiveWarning, match="none of the 3 chosen modules of Chain ran as enabled: other"):
        assert train(model, 3) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradckpt.enable(model, "int8", modules=Block)
        assert train(model, 3) == 3
    gradckpt.disable(model)
    assert train(model) == 0


def wrapped_by_a_function(block):
    inner = block.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    block.forward = forward


def wrapped_by_an_attribute(block):
    """As accelerate does."""
    block._old_forward = block.forward
    block.forward = functools.partial(lambda block, *args, **kwargs: block._old_forward(*args, **kwargs), block)


class Opaque:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args):
        return self.inner(*args)


def wrapped_by_an_object(block):
    block.forward = Opaque(block.forward)


@pytest.mark.parametrize("wrap", [wrapped_by_a_function, wrapped_by_an_attribute, wrapped_by_an_object])
def test_a_wrapped_forward_is_not_lost(wrap):
    model = Chain(Block, 3)
    gradckpt.enable(model, "int8", modules=Block)
    region = region_of(model.blocks[0])
    for block in model.blocks:
        wrap(block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(model, 3) == 3
        gradckpt.enable(model, "int8", modules=Block)
        assert train(model, 3) == 3
    if wrap is not wrapped_by_an_object:  # nothing tells what that calls
        assert region_of(model.blocks[0]) is region


def test_another_models_steps_say_nothing():
    model, other = Chain(Block, 3), Chain(Block, 3)
    gradckpt.enable(model, "int8", modules=Block)
    for block in model.blocks:
        delete_it(block, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other, 3)


def test_accelerates_hooks():
    hooks = pytest.importorskip("accelerate.hooks")
    model = Chain(Block, 3)
    for block in model.blocks:
        hooks.add_hook_to_module(block, hooks.ModelHook())
    gradckpt.enable(model, "int8", modules=Block)
    assert train(model, 3) == 3
    hooks.remove_hook_from_submodules(model)
    with pytest.warns(GradckptInactiveWarning, match="other code has replaced their forward since"):
        assert train(model, 3) == 0
    gradckpt.enable(model, "int8", modules=Block)
    assert train(model) == 3


@pytest.mark.parametrize("keep", [False, True])
def test_accelerates_wrappers_of_the_model(keep):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test may have made one
    model = Chain(Block, 3)
    gradckpt.enable(model, "int8", recompute=False)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert train(prepared) > 0
    assert train(accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)) > 0
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
