"""What goes into a region and what comes out of it: torch's function and ours, side by side."""

import functools
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf

Pair = namedtuple("Pair", "a b")


# ---- arguments ----


@behaviour
def test_a_list_changed_after_the_forward_is_seen_by_the_recompute(run):
    x, y = leaf(4), leaf(4)
    items = [x]
    out = run.checkpoint(run.watched(lambda ts: run.log(len(ts)) or ts[0].sin().exp()), items)
    items[0] = y
    items.append(None)
    out.sum().backward()
    return x.grad, y.grad


@behaviour
def test_keywords_are_the_same_objects_in_the_recompute(run):
    items, box, seen = [1], SimpleNamespace(t=leaf(4)), []

    def fn(*, items, box):
        seen.append((items, box))
        return box.t.sin().exp()

    run.checkpoint(fn, items=items, box=box).sum().backward()
    run.log([[a is items, b is box] for a, b in seen])
    return box.t.grad


@pytest.mark.parametrize("kind", ["leaf", "non-leaf", "no grad", "view", "parameter", "detached"])
@behaviour
def test_identity_and_metadata_of_an_argument(run, kind):
    make = {
        "leaf": lambda x: x,
        "non-leaf": lambda x: x * 2,
        "no grad": lambda x: x.detach() * 1,
        "view": lambda x: x.view(2, 2),
        "parameter": lambda x: torch.nn.Parameter(x.detach()),
        "detached": lambda x: x.detach(),
    }
    argument = make[kind](leaf(4))

    def fn(t):
        run.log(
            t is argument, type(t), t._version, t._is_view(), t.data_ptr() == argument.data_ptr(), t.grad_fn is None
        )
        run.log(t)
        return t.sin().exp()

    y = run.checkpoint(fn, argument)
    if y.requires_grad:
        y.sum().backward()
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@behaviour
def test_dtypes(run, dtype):
    x = leaf(4, 4, dtype=dtype)
    y = run.checkpoint(lambda t: (t @ t).sin().exp() * t, x)
    y.abs().sum().backward()
    return y, x.grad


# ---- functions ----


class Block(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = torch.nn.Linear(4, 4), run

    def forward(self, t, scale=1):
        self.run.log("forward", self.training, scale)
        return F.gelu(self.linear(t)).sin() * scale

    def method(self, t):
        return self.forward(t, scale=2)


@pytest.mark.parametrize("kind", ["module", "bound method", "partial", "builtin", "callable", "staticmethod", "class"])
@behaviour
def test_kinds_of_function(run, kind):
    class Callable:
        def __call__(self, t):
            return t.sin().exp()

        @staticmethod
        def static(t):
            return t.cos().exp()

    class Result:
        def __init__(self, t):
            self.value = t.sin().exp()

        def sum(self):
            return self.value.sum()

    block = Block(run)
    functions = {
        "module": block,
        "bound method": block.method,
        "partial": functools.partial(block, scale=3),
        "builtin": torch.sin,
        "callable": Callable(),
        "staticmethod": Callable.static,
        "class": Result,
    }
    x = leaf(2, 4)
    run.checkpoint(functions[kind], x).sum().backward()
    return x.grad, [p.grad for p in block.parameters()]


@behaviour
def test_module_hooks_run_in_both_passes(run):
    block, x = Block(run), leaf(2, 4)
    block.register_forward_pre_hook(lambda m, args: run.log("before"))
    block.register_forward_hook(lambda m, args, out: run.log("after"))
    block.linear.register_forward_hook(lambda m, args, out: run.log("linear"))
    block.register_full_backward_hook(lambda m, gi, go: run.log("backward", gi, go))
    run.checkpoint(block, x).sum().backward()
    return x.grad


@behaviour
def test_training_flag_at_the_recompute(run):
    """Nothing remembers train() and eval(): the recompute sees what is set then."""
    block, x = Block(run), leaf(2, 4)
    y = run.checkpoint(block, x)
    block.eval()
    y.sum().backward()
    return x.grad


# ---- results ----


@pytest.mark.parametrize(
    "kind", ["none", "number", "dict", "nested", "input", "view of the input", "no gradient", "mixed"]
)
@behaviour
def test_results_pass_unchanged(run, kind):
    made = []

    def fn(t):
        y = t.sin().exp()
        made.append(
            {
                "none": None,
                "number": 7,
                "dict": {"y": y, 3: "three"},
                "nested": [Pair(y, (y.cos(), None)), {"z": [y.tanh()]}],
                "input": t,
                "view of the input": t[1:],
                "no gradient": (t > 0, t.detach()),
                "mixed": (y, y.detach(), y.argmax(), "text"),
            }[kind]
        )
        return made[-1]

    x = leaf(4)
    y = run.checkpoint(run.watched(fn), x * 1)
    run.log(y is made[0])
    loss = sum((t.sum() for t in torch.utils._pytree.tree_leaves(y) if getattr(t, "requires_grad", False)), 0 * x.sum())
    loss.backward()
    return y, x.grad


# ---- keywords ----


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("use_reentrant", (0, "", ())),
        ("early_stop", (0, 1, None, "yes")),
        ("preserve_rng_state", (True, False, 1, 0, None)),
    ],
)
@behaviour
def test_options_are_asked_for_their_truth(run, option, values):
    x = leaf(8, 8)
    for value in values:
        y = run.checkpoint(
            run.watched(lambda t, *, k: F.dropout(t.sin() * k, 0.5).exp() + 1), x, k=2, **{option: value}
        )
        y.sum().backward()
        run.log(y, torch.rand(2))
    return x.grad


@behaviour(ours=("compat",))
def test_unknown_keywords_go_to_the_function(run):
    """``compress``, ``policy``, ``buffers`` are gradckpt.checkpoint's own;
    in torch's place they are the function's."""

    def fn(t, *, compress, policy, buffers, other):
        run.log(compress, policy, buffers, other)
        return t.sin().exp()

    return run.gradients(fn, leaf(4), compress="int8", policy="greedy", buffers="all", other=1)
