"""What goes into a region and what comes out of it: torch's function and ours, side by side."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf

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


#: What is passed in odd ways: function of (run, x, w).
PASSED = {
    "a dropout": lambda run, x, w: run.checkpoint(run.watched(lambda t, v: F.dropout(F.gelu(t @ v), 0.3) @ v), x, w),
    "keywords": lambda run, x, w: run.checkpoint(run.watched(lambda t, *, w, k: (t @ w).sin() * k), x, w=w, k=3),
    "a tensor in keywords only": lambda run, x, w: run.checkpoint(run.watched(lambda *, t: t.sin().exp()), t=x * 1),
    "the function by keyword": lambda run, x, w: run.bare(
        function=run.watched(lambda t: t.sin().exp()), t=x, use_reentrant=False
    ),
    "None, text and a function": lambda run, x, w: run.checkpoint(
        run.watched(lambda t, n, s, f: f(t).exp() if n is None and s == "s" else t), x, None, "s", torch.sin
    ),
    "integers": lambda run, x, w: run.checkpoint(
        run.watched(lambda t, i: t[i].sin().exp()), x, torch.tensor([0, 2, 2])
    ),
    "nothing that needs a gradient": lambda run, x, w: run.checkpoint(
        run.watched(lambda t: (t @ w).sin().exp()), x.detach()
    ),
    "nothing": lambda run, x, w: run.checkpoint(run.watched(lambda: (x @ w).sin())),
    "a sparse tensor": lambda run, x, w: run.checkpoint(
        run.watched(lambda t, s: torch.sparse.mm(s, t.t()).sin().exp()), x, torch.eye(4).to_sparse()
    ),
}


@pytest.mark.parametrize("name", PASSED)
@behaviour
def test_what_is_passed(run, name):
    x, w = leaf(4, 4), leaf(4, 4)
    y = PASSED[name](run, x, w)
    torch.rand(5)  # so that a generator left where the recompute put it is noticed
    for retain_graph in (True, False):
        y.sum().backward(retain_graph=retain_graph)
    return y, x.grad, w.grad, torch.rand(2)


# ---- functions ----


class Odd:
    """A result that is no tensor, a callable, and what has a static method."""

    def __init__(self, t=None):
        self.value = t if t is None else t.sin().exp()

    def sum(self):
        return self.value.sum()

    def __call__(self, t):
        return t.sin().exp()

    @staticmethod
    def static(t):
        return t.cos().exp()


@pytest.mark.parametrize(
    "function", [torch.sin, Odd(), Odd.static, Odd], ids=["builtin", "callable", "static", "class"]
)
@behaviour
def test_kinds_of_function(run, function):
    return run.gradients(function, leaf(2, 4))


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
