"""Bad calls, exceptions of the function, recomputes that differ: classes and texts."""

import itertools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from behaviours import behaviour, leaf, raises_in, tells_contexts
from torch.utils.checkpoint import CheckpointError

# ---- bad calls ----


#: debug and context_fn are looked at before determinism_check, that before context_fn is called.
BAD_OPTIONS = [
    *(({"determinism_check": bad}, ValueError, "determinism_check should be") for bad in ("hash", "", None, 0, ("a",))),
    ({"determinism_check": ["default"]}, TypeError, ""),
    ({"debug": True, "context_fn": list}, ValueError, "debug=True is incompatible"),
    ({"debug": True, "context_fn": list, "determinism_check": "hash"}, ValueError, "debug=True is incompatible"),
    ({"context_fn": list, "determinism_check": "hash"}, ValueError, "determinism_check should be"),
]


@pytest.mark.parametrize("grad", [True, False])
@behaviour
def test_bad_options(run, grad):
    with torch.set_grad_enabled(grad):
        for options, kind, text in BAD_OPTIONS:
            with run.error(kind, text):
                run.checkpoint(run.watched(torch.sin), leaf(4), **options)
        with torch_checkpoint.set_checkpoint_debug_enabled(True), run.error(ValueError, "debug=True is incompatible"):
            run.checkpoint(torch.sin, leaf(4), context_fn=list)


@pytest.mark.parametrize("bad", [3, None, "text"])
@behaviour
def test_function_that_is_not_callable(run, bad):
    with run.error(TypeError, "not callable"):
        run.checkpoint(bad, leaf(4))


# ---- exceptions of the function ----


#: A StopIteration of the forward becomes another error.
THROWN = [
    *itertools.product(
        ["forward", "recompute"],
        [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, CheckpointError],
    ),
    ("forward", torch_checkpoint._StopRecomputationError),
    ("recompute", StopIteration),
]


@pytest.mark.parametrize(("when", "kind"), THROWN)
@behaviour
def test_exception_arrives_as_it_is(run, when, kind):
    thrown = kind("from the function")
    with run.error(kind):
        try:
            y = run.checkpoint(run.watched(raises_in(1 if when == "forward" else 2, lambda: thrown)), leaf(4))
            y.sum().backward()
        except BaseException as e:
            run.log(e is thrown, e.__context__, e.args)
            raise
    thrown.__traceback__ = None  # from fn to a tensor of its graph, which holds fn: a cycle that no collector sees


@tells_contexts
@pytest.mark.parametrize("grad", [True, False])
@behaviour
def test_stop_iteration_becomes_another_error(run, grad):
    """Torch runs the function while a generator of its own waits."""

    def fn(t):
        raise StopIteration("mine")

    with torch.set_grad_enabled(grad), run.error(RuntimeError, "generator raised StopIteration"):
        run.checkpoint(run.watched(fn), leaf(4))


@behaviour
def test_stop_exception_thrown_too_early_in_the_recompute(run):
    y = run.checkpoint(run.watched(raises_in(2, torch_checkpoint._StopRecomputationError)), leaf(4))
    with run.error(CheckpointError, "different number of tensors"):
        y.sum().backward()


@behaviour
def test_failed_forward_leaves_a_graph_that_can_be_used(run):
    kept = []

    def fn(t):
        kept.append(t.sin().cos())
        if len(kept) == 1:
            raise LookupError
        return kept[-1]

    x = leaf(4)
    with run.error(LookupError):
        run.checkpoint(run.watched(fn), x)
    kept[0].sum().backward()
    return x.grad


# ---- recomputes that differ ----

DIFFERENT = {
    "fewer": (lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1),
    "none": (lambda t: t.sin().exp(), lambda t: t + 1),
    "more": (lambda t: t.sin().exp(), lambda t: t.sin().exp().tanh()),
    "shape": (lambda t: t.exp().sin(), lambda t: t[:2].exp().sin()),
    "dimensions": (lambda t: t.exp().sin(), lambda t: t[None].exp().sin()),
    "dtype": (lambda t: t.exp().sin(), lambda t: t.double().exp().sin()),
    "two of three": (lambda t: t.exp() * t.sin() * 2, lambda t: t[1:].exp() * t[1:].sin() * 2),
    "bool": (lambda t: t.masked_fill(t > 0, 1.0).exp(), lambda t: t[1:].masked_fill(t[1:] > 0, 1.0).exp()),
    "integer": (lambda t: t[torch.tensor([0, 1])].exp(), lambda t: t[torch.tensor([0, 1, 2])].exp()),
    "complex": (lambda t: (t + 0j).exp(), lambda t: (t.double() + 0j).exp()),
    "device": (lambda t: t.exp().sin(), lambda t: t.to("meta").exp().sin()),
    "empty": (lambda t: t.exp().sin(), lambda t: t[:0].exp().sin()),
    "scalar": (lambda t: t.sum().exp().sin(), lambda t: t.exp().sin()),
}


def changing(run, name):
    functions = iter([DIFFERENT[name][0]] + [DIFFERENT[name][1]] * 5)
    return run.watched(lambda t: next(functions)(t))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("name", DIFFERENT)
@behaviour
def test_recompute_that_differs(run, name, check, early_stop):
    x = leaf(4, 4)
    y = run.checkpoint(changing(run, name), x, determinism_check=check, early_stop=early_stop)
    try:
        y.sum().backward()
    except Exception as e:
        run.log("error", e)
    else:
        run.log("no error")
    return x.grad


@behaviour
def test_mismatch_in_what_was_freed_is_not_looked_at(run):
    first, x = [True], leaf(4)

    def fn(t):
        n = 4 if first else 2
        return t[:n].sin(), t.cos().tanh()

    a, b = run.checkpoint(run.watched(fn), x)
    first.clear()
    del a
    b.sum().backward()
    return x.grad


class Saver(torch.autograd.Function):
    """Saves a tensor and does not care what it is."""

    @staticmethod
    def forward(ctx, t, what):
        ctx.save_for_backward(what)
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].dim(), None


OTHER_FORMS = {
    "detached": lambda t: t.detach(),
    "sparse": lambda t: t.detach().to_sparse(),
    "parameter": lambda t: torch.nn.Parameter(t.detach()),
    "subclass": lambda t: t.as_subclass(Tagged),
    "conjugate": lambda t: t.conj(),
}


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("form", OTHER_FORMS)
@pytest.mark.parametrize("first", [True, False])
@behaviour
def test_only_shape_dtype_and_device_are_compared(run, first, form):
    """One of the two passes saves the same numbers in another form."""
    forms = iter([OTHER_FORMS[form], lambda t: t] if first else [lambda t: t, OTHER_FORMS[form]])
    return run.gradients(run.watched(lambda t: Saver.apply(t, next(forms)(t))), leaf(4, 4))
