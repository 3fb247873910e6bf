"""respect_saved_tensors_hooks: whether the user's saved-tensor hooks see what a policy keeps."""

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import gradckpt
from gradckpt import compat
from gradckpt._engine.torch_private import hooks_see_kept

MM = torch.ops.aten.mm.default
torch_has_it = pytest.mark.skipif(not hooks_see_kept, reason="this torch has no respect_saved_tensors_hooks")


def function(x, w):
    return ((x @ w).sin() @ w).tanh().exp()


OURS = {
    "names": {"policy": [MM]},
    "function": {"policy": lambda ctx, op, *args, **kwargs: op is MM},
    "compat's contexts": {"context_fn": functools.partial(compat.create_selective_checkpoint_contexts, [MM])},
    "int8": {"policy": "save_matmuls:int8"},
}


def operands():
    return ((torch.randn(32, 32, generator=torch.Generator().manual_seed(i)) / 4).requires_grad_() for i in (0, 1))


class Hooks:
    """Count what they pack and unpack; ``make`` is what they keep of a tensor."""

    def __init__(self, make=torch.clone):
        self.packed, self.unpacked, self.make = [], 0, make

    def pack(self, x):
        self.packed.append(x.dtype)
        return self.make(x)

    def unpack(self, x):
        self.unpacked += 1
        return x


def step(checkpoint, hooks, **options):
    x, w = operands()
    with warnings.catch_warnings(record=True) as caught, saved_tensors_hooks(hooks.pack, hooks.unpack):
        warnings.simplefilter("always")
        y = checkpoint(function, x * 1, w, use_reentrant=False, **options).sum()
    said = [each for each in caught if each.category is FutureWarning]
    seen = len(hooks.packed)
    y.backward()
    return seen, said, x.grad


def plain():
    x, w = operands()
    function(x, w).sum().backward()
    return x.grad


@pytest.mark.parametrize("kept", OURS)
@pytest.mark.parametrize("make", [torch.clone, lambda x: x], ids=["copies", "the tensor itself"])
@pytest.mark.parametrize("respect", [None, False, True])
def test_the_hooks_see_it_when_asked_for(kept, make, respect):
    hooks = Hooks(make)
    seen, said, grad = step(gradckpt.checkpoint, hooks, respect_saved_tensors_hooks=respect, **OURS[kept])
    outputs = 0 if not respect else 4 if kept == "int8" else 2  # of a payload codes and scales
    inputs, _, _ = step(gradckpt.checkpoint, Hooks(make))
    assert seen == hooks.unpacked == inputs + outputs
    assert bool(said) == (respect is None and hooks_see_kept)
    if kept == "int8":
        assert hooks.packed.count(torch.uint8) == outputs, "the hooks get the payload"
        assert (grad - plain()).norm() < 0.05 * plain().norm()
    else:
        assert torch.equal(grad, plain())
    assert gradckpt.stats()["live_bytes"] == 0


@torch_has_it
@pytest.mark.parametrize("respect", [None, False, True])
def test_contexts_of_torch_in_our_region_see_the_hooks_of_the_user(respect):
    """Not those of the region, which lie on top."""
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [MM])
    options = {"context_fn": contexts, "respect_saved_tensors_hooks": respect}
    theirs, ours = Hooks(), Hooks()
    expected = step(torch_checkpoint.checkpoint, theirs, **options)
    for checkpoint in (gradckpt.checkpoint, compat.checkpoint):
        ours = Hooks()
        seen, said, grad = step(checkpoint, ours, **options)
        assert (seen, len(said)) == (expected[0], len(expected[1]))
        assert (len(ours.packed), ours.unpacked) == (len(theirs.packed), theirs.unpacked)
        assert torch.equal(grad, expected[2])
        assert {str(each.message) for each in said} == {str(each.message) for each in expected[1]}


@torch_has_it
def test_regions_around_and_inside_are_nobodys_hooks():
    """Without hooks of the user's there is no warning, however regions nest."""
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [MM])
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    both = (torch_checkpoint.checkpoint, gradckpt.checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outer in both:
            for inner in both:
                within = functools.partial(inner, function, use_reentrant=False, context_fn=contexts)
                outer(within, x * 1, w, use_reentrant=False).sum().backward()


def test_contexts_of_a_torch_that_shows_nothing_say_so():
    if hooks_see_kept:
        pytest.skip("this torch shows what its contexts keep")
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [MM])
    with pytest.raises(
        ValueError, match=r"selective contexts of torch .* show saved-tensor hooks nothing; pass policy="
    ):
        step(gradckpt.checkpoint, Hooks(), context_fn=contexts, respect_saved_tensors_hooks=True)


def test_kept_outputs_lie_in_host_memory_as_payloads():
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with save_on_cpu():
        y = gradckpt.checkpoint(
            function, x * 1, w, policy="save_matmuls:int8", compress="int8", respect_saved_tensors_hooks=True
        )
        assert gradckpt.stats()["live_bytes"] == 0, "the hooks have the bytes"
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_what_a_hook_keeps_is_the_value_before_a_write():
    """Also where it keeps the tensor itself, which the region then writes into."""

    def writes(x, w):
        y = x @ w
        z = y.sin()
        y.mul_(0)
        return z

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        result = gradckpt.checkpoint(writes, x * 1, w, policy=[MM], respect_saved_tensors_hooks=True)
    with pytest.raises(RuntimeError):
        result.sum().backward()


def test_enable_with_offload_says_nothing():
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    gradckpt.enable(net, modules=torch.nn.Linear, policy="save_matmuls", offload=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        net(torch.randn(4, 8, requires_grad=True)).sum().backward()
    gradckpt.disable(net)


def test_a_hook_that_packs_the_tensor_itself_among_others_gets_a_copy():
    """As save_on_cpu() does on the CPU: the region writes into its product afterwards."""

    def writes(x, w):
        return ((x @ w).sigmoid_() @ w).exp()

    x, w = operands()
    with save_on_cpu():
        y = gradckpt.checkpoint(writes, x, w, policy=[MM], respect_saved_tensors_hooks=True)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, *torch.autograd.grad(writes(x, w).sum(), x))


@pytest.mark.parametrize("respect", [None, True])
def test_hooks_that_are_disabled_inside_see_nothing(respect):
    """As where AOTAutograd runs a graph; the region's own are back afterwards."""

    def region(x):
        torch._C._autograd._saved_tensors_hooks_disable("off", False)
        try:
            y = x.detach() @ x.detach()
        finally:
            torch._C._autograd._saved_tensors_hooks_enable()
        return (x * y).sin()

    x = torch.randn(4, 4, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        gradckpt.checkpoint(region, x, policy=[MM], respect_saved_tensors_hooks=respect).sum().backward()
    assert torch.equal(x.grad, *torch.autograd.grad(region(x).sum(), x))
