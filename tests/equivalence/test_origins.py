"""A recompute proves itself: each tensor that it saves is the one that the forward saved in its
place, as far as both runs know where it comes from. All tensors here have one shape, so that no
shape tells.
"""

import logging
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

import gradckpt
from gradckpt._engine import region_callbacks

N = 48


class TwoRuns:
    """A function that does one thing in the forward and another in each recompute."""

    def __init__(self, forward, recompute):
        self.functions = iter([forward])
        self.recompute = recompute

    def __call__(self, *args, **kwargs):
        return next(self.functions, self.recompute)(*args, **kwargs)


def inputs(n):
    torch.manual_seed(n)
    leaves = [torch.randn(N, N, requires_grad=True) for _ in range(n)]
    return leaves, [x * 1 for x in leaves]


def gradients(forward, recompute, n, **options):
    leaves, args = inputs(n)
    y = gradckpt.checkpoint(TwoRuns(forward, recompute), *args, **options)
    return torch.autograd.grad(y.sum(), leaves, allow_unused=True, materialize_grads=True)


A, B = nn.Linear(N, N), nn.Linear(N, N)
MASKS = [torch.rand(N, N) for _ in range(2)]
WIDE = nn.Parameter(torch.randn(2 * N, N))

#: What the forward does, what the recompute does, how many inputs, and what the error names.
DIFFERENT = {
    "two arguments change places": (
        lambda x, y: x.sin() * y.cos(),
        lambda x, y: y.sin() * x.cos(),
        2,
        "tensor 0 of the arguments.*\n.*tensor 1 of the arguments",
    ),
    "an argument in place of a result": (
        lambda x: (x * 2).sin(),
        lambda x: x.sin(),
        1,
        "made by MulBackward0.*\n.*tensor 0 of the arguments",
    ),
    "two parameters change places": (
        lambda x: A(B(x).tanh()).tanh(),
        lambda x: B(A(x).tanh()).tanh(),
        1,
        "made by TBackward0 from parameter",
    ),
    "two parts of a parameter change places": (
        lambda x: (x @ WIDE[:N]).sin() @ WIDE[N:],
        lambda x: (x @ WIDE[N:]).sin() @ WIDE[:N],
        1,
        "made by SliceBackward0 from parameter",
    ),
    "two masks change places": (
        lambda x: (x * MASKS[0]).sin() * MASKS[1],
        lambda x: (x * MASKS[1]).sin() * MASKS[0],
        1,
        "a tensor that no operator of the region made",
    ),
    "two branches change places": (
        lambda x: x.exp() * x.tanh(),
        lambda x: x.tanh() * x.exp(),
        1,
        "made by ExpBackward0.*\n.*made by TanhBackward0",
    ),
    "another layout": (
        lambda x: torch.mm(x.exp().t(), x),
        lambda x: torch.mm(x.exp().t().contiguous(), x),
        1,
        r"made by TBackward0.*strides \(1, 48\)\n.*strides \(48, 1\)",
    ),
}


@pytest.mark.parametrize("compress", [None, "lossless", "int8"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_another_tensor_of_the_same_shape_raises_and_both_are_named(name, compress):
    forward, recompute, n, said = DIFFERENT[name]
    before = gradckpt.stats()["differing_saves"]
    with pytest.raises(CheckpointError, match=f"saved other tensors than its forward(.*\n)*.*{said}"):
        gradients(forward, recompute, n, compress=compress)
    assert gradckpt.stats()["differing_saves"] > before


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_same_raises_where_torchs_names_are_used(name):
    forward, recompute, n, _ = DIFFERENT[name]
    leaves, args = inputs(n)
    y = gradckpt.compat.checkpoint(TwoRuns(forward, recompute), *args, use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward(inputs=leaves)


@pytest.mark.parametrize("compress", [None, "lossless"])
def test_arguments_in_a_tuple_are_known_too(compress):
    leaves, args = inputs(2)
    function = TwoRuns(lambda t: t[0].sin() * t[1].cos(), lambda t: t[1].sin() * t[0].cos())
    y = gradckpt.checkpoint(function, tuple(args), compress=compress)
    with pytest.raises(CheckpointError, match="tensor 0 of the arguments"):
        y.sum().backward(inputs=leaves)


def test_a_parameter_is_named_by_its_module():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.runs = nn.Parameter(torch.rand(N, N)), nn.Parameter(torch.rand(N, N)), 0

        def forward(self, x):
            self.runs += 1
            w, v = (self.first, self.second)[:: 1 if self.runs == 1 else -1]
            return (x * w).sin() * v

    leaves, args = inputs(1)
    y = gradckpt.checkpoint(Block(), *args)
    with pytest.raises(CheckpointError, match=r"buffer 'first'(.*\n)*.*buffer 'second'"):
        y.sum().backward(inputs=leaves)


def test_warn_warns_goes_on_and_counts():
    forward, recompute, n, _ = DIFFERENT["two masks change places"]
    before = gradckpt.stats()["differing_saves"]
    with pytest.warns(UserWarning, match="saved other tensors than its forward"):
        gradients(forward, recompute, n, determinism_check="warn")
    assert gradckpt.stats()["differing_saves"] == before + 2


def test_warn_takes_torchs_differences_too():
    with pytest.warns(UserWarning, match="different metadata"):
        gradients(lambda x: x.sin(), lambda x: x[:1].sin(), 1, determinism_check="warn")


def test_none_compares_nothing():
    forward, recompute, n, _ = DIFFERENT["two masks change places"]
    before = gradckpt.stats()["differing_saves"]
    gradients(forward, recompute, n, determinism_check="none")
    assert gradckpt.stats()["differing_saves"] == before


def test_only_gradckpts_own_checkpoint_knows_warn():
    with pytest.raises(ValueError, match="determinism_check should be one of") as caught:
        gradckpt.checkpoint(torch.sin, inputs(1)[1][0], determinism_check="hash")
    assert caught.value.__notes__ == ["gradckpt also takes determinism_check='warn'"]
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        gradckpt.compat.checkpoint(torch.sin, inputs(1)[1][0], use_reentrant=False, determinism_check="warn")


# ---- what is no difference ----


@pytest.mark.parametrize("compress", [None, "lossless", "int8"])
def test_an_empty_argument_is_no_difference(compress):
    leaf = torch.ones(0, N, requires_grad=True)
    h = (leaf * 1).t()
    y = gradckpt.checkpoint(lambda t: t.t().sin(), h, compress=compress and {"codec": compress, "min_numel": 0})
    assert torch.autograd.grad(y.sum(), leaf)[0].shape == (0, N)


def test_equal_constants_may_change_places():
    masks = [torch.full((N, N), 0.5), torch.full((N, N), 0.5)]

    def alternates(x):
        masks.reverse()
        return (x * masks[0]).sin() * masks[1]

    leaves, args = inputs(1)
    expected = torch.autograd.grad(alternates(*args).sum(), leaves, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(gradckpt.checkpoint(alternates, *args).sum(), leaves)[0], expected)
    masks[0] = masks[0] * 3
    with pytest.raises(CheckpointError, match="saved other tensors"):
        gradckpt.checkpoint(alternates, *args).sum().backward()


def test_the_forward_holds_no_constant_alive():
    seen = []

    def masked(x):
        mask = torch.rand(N, N)
        seen.append(weakref.ref(mask))
        return x * mask

    y = gradckpt.checkpoint(masked, *inputs(1)[1])
    assert seen[0]() is None
    del y


# ---- a backward inside a forward ----


SMALL = {"codec": "int4", "min_numel": 1}


def test_originals_of_inner_regions_live_until_the_outermost_ends():
    alive = []

    def inner(x):
        h = x * 2
        alive.append(weakref.ref(h))
        y = gradckpt.checkpoint(torch.sin, h, compress=SMALL)
        del h
        assert alive[-1]() is not None
        return y

    gradckpt.stats.reset()
    leaves, args = inputs(1)
    y = gradckpt.checkpoint(lambda x: inner(inner(x)), *args, compress=SMALL)
    assert [ref() for ref in alive] == [None, None]
    assert gradckpt.stats()["held_bytes"] == 2 * args[0].nbytes
    y.sum().backward(inputs=leaves)


def test_a_policys_lossy_outputs_are_not_read_inside_the_forward():
    weight = torch.randn(N, N, requires_grad=True)

    def block(x):
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((z @ weight).tanh().square().sum(), z)
        return x * force

    leaves, (h,) = inputs(1)
    got = gradckpt.checkpoint(block, h, policy=gradckpt.policies.save_matmuls.compressed(SMALL))
    assert torch.equal(got, block(h))
    got.sum().backward(inputs=leaves)


def test_create_graph_through_a_lossy_region_is_logged_once(caplog):
    def second(compress):
        leaves, args = inputs(1)
        y = gradckpt.checkpoint(torch.tanh, *args, compress=compress)
        (g,) = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        g.square().sum().backward()

    region_callbacks.note_create_graph.cache_clear()
    with caplog.at_level(logging.WARNING, "gradckpt"), warnings.catch_warnings():
        second("lossless")
        assert not caplog.records
        second(SMALL)
        second(SMALL)
    assert [r.message for r in caplog.records if "create_graph=True" in r.message and "compress=None" in r.message]
    assert len(caplog.records) == 1


def test_what_the_first_thousand_tensors_hide_is_seen_of_parameters():
    """Behind them only nodes are not looked at."""

    def behind(function):
        def deep(x):
            for _ in range(1100):
                x = x.sin()
            return function(x)

        return deep

    forward, recompute, n, _ = DIFFERENT["two parts of a parameter change places"]
    with pytest.raises(CheckpointError, match="at position 1100:"):
        gradients(behind(forward), behind(recompute), n)
