"""Kept outputs are what the operator returned, whatever is written into their memory later."""

import itertools
import json

import kept_parts as sweep
import pytest
import torch
import torch.nn.functional as F
from checkout import HELPERS
from processes import printed_by
from selective_ways import _nothing_left_behind as _nothing_left_behind

import gradckpt

pytestmark = [
    pytest.mark.usefixtures("_nothing_left_behind"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", sweep.PROGRAMS)
def test_a_write_after_the_operator_does_not_reach_what_is_kept(name):
    leaves, call = sweep.input_of_programs(), sweep.program(name)
    wrong = []
    for layout in sweep.LAYOUTS:
        want = sweep.gradients(call, sweep.PLAIN, None, leaves, layout)[0]
        for policy, entry_point in itertools.product(sweep.POLICIES, sweep.ENTRY_POINTS):
            found = sweep.check(call, leaves, layout, policy, entry_point, want=want)
            wrong += [(layout, policy, entry_point, found)] if found else []
    assert wrong == []


def diagonal(*axes):
    """Each value of each axis with each of the longest."""
    longest = max(map(len, axes))
    for shift in range(longest):
        for i in range(longest):
            yield tuple(list(axis)[(i + shift * k) % len(axis)] for k, axis in enumerate(axes))


@pytest.mark.parametrize("combinations", [diagonal, pytest.param(itertools.product, marks=pytest.mark.soak)])
def test_modules_whose_kernels_write(combinations):
    assert sweep.sweep_of_modules(combinations) == []


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_that_products_are_part_of(part):
    """Those of torch's table, in a process of their own."""
    wrong, reached = json.loads(printed_by(HELPERS / "kept_parts.py", "kept_then_written", part, PARTS))
    assert wrong == []
    assert reached > 0


@pytest.mark.soak
def test_operators_that_products_are_part_of_in_every_combination():
    wrong, _ = json.loads(printed_by(HELPERS / "kept_parts.py", "kept_then_written", 0, 1, "all"))
    assert wrong == []


def test_an_output_is_copied_only_before_a_write():
    aten = torch.ops.aten
    for write, copied in ((None, False), (torch.Tensor.relu_, True), (torch.Tensor.sigmoid_, True)):
        pair = gradckpt.compat.create_selective_checkpoint_contexts([aten.mm.default])
        with pair[0]:
            y = torch.ones(2, 3, 4) @ torch.ones(4, 4)
            if write is not None:
                write(y)
        assert (pair[0].storage[aten.mm.default][0].val.data_ptr() != y.data_ptr()) == copied


def test_what_was_written_into_unseen_runs_again():
    """As by ``copy_``, before which nothing is copied."""
    aten = torch.ops.aten
    pair = gradckpt.compat.create_selective_checkpoint_contexts([aten.mm.default])
    with pair[0]:
        y = torch.ones(2, 3, 4) @ torch.ones(4, 4)
        y.copy_(torch.zeros(2, 3, 4))
    assert not hasattr(pair[0].storage[aten.mm.default][0], "val")
    with pair[1]:
        assert (torch.ones(2, 3, 4) @ torch.ones(4, 4) == 4).all()


def test_a_write_after_the_region_is_seen():
    x, w = torch.randn(2, 16, 16, requires_grad=True), torch.randn(16, 16)
    want = torch.autograd.grad((x @ w).sin().sum(), x)[0]
    y, kept = gradckpt.checkpoint(lambda t: (lambda h: (h.sin(), h.detach()))(t @ w), x, policy="save_matmuls")
    kept.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


@pytest.mark.parametrize("write", [lambda y: F.linear(y, sweep.W, sweep.B), lambda y: (y @ sweep.W).mul_(2)])
def test_inference_tensors_are_kept_as_they_were(write):
    """They have no versions."""

    def function(t):
        with torch.inference_mode():
            scale = write(t.detach().mT)
        return (t * scale.clone()).sin()

    x = torch.randn(2, 16, 16, requires_grad=True)
    (want,) = torch.autograd.grad(function(x).sum(), x)
    y = gradckpt.checkpoint(function, x, policy="save_matmuls")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
