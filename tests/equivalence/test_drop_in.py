"""Put in torch's place: signatures, callers of torch's function by name,
and the few documented differences."""

import functools
import inspect
import warnings

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from behaviours import behaviour, leaf

import gradckpt

compat = behaviour(ours=("compat",))


# ---- signatures ----


def kinds(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_signature_is_torchs(name):
    """torch.compile divides keywords by it, and so do wrappers."""
    theirs, mine = getattr(torch_checkpoint, name), getattr(gradckpt.compat, name)
    of_newer_torch = {"preserve_rng_state", "respect_saved_tensors_hooks"} - {*inspect.signature(theirs).parameters}
    assert [each for each in kinds(mine) if each[0] not in of_newer_torch] == kinds(theirs)
    parameters = inspect.signature(mine).parameters
    for parameter in inspect.signature(theirs).parameters.values():
        if parameter.name not in ("context_fn", "function"):  # a text signature cannot hold a function
            assert parameters[parameter.name].default == parameter.default
    assert mine.__name__ == theirs.__name__
    assert callable(mine)
    assert mine.__doc__


def test_every_keyword_of_torch_is_a_keyword_of_ours():
    theirs = inspect.signature(torch_checkpoint.checkpoint).parameters
    mine = inspect.signature(gradckpt.checkpoint).parameters
    assert {*theirs} <= {*mine}
    for name in ("determinism_check", "debug", "early_stop"):
        assert mine[name].default == theirs[name].default


# ---- called by others ----


@compat
def test_torchs_own_sequential_calls_what_is_in_its_place(run):
    original = torch_checkpoint.checkpoint
    torch_checkpoint.checkpoint = run.bare
    try:
        x = leaf(4)
        functions = [run.watched(f, f.__name__) for f in (torch.sin, torch.exp, torch.tanh, torch.cos)]
        torch_checkpoint.checkpoint_sequential(functions, 2, x, use_reentrant=False).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_checkpoint.checkpoint_sequential(functions, 2, x).sum().backward()
    finally:
        torch_checkpoint.checkpoint = original
    return x.grad


@pytest.mark.parametrize("reentrant", [True, False])
@behaviour
def test_checkpoint_wrapper_of_torch(run, reentrant):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    block, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.3), torch.nn.Tanh()), leaf(2, 3)
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    fn = functools.partial(run.bare, use_reentrant=reentrant)
    wrapped = checkpoint_wrapper(block, checkpoint_impl=impl, checkpoint_fn=fn, preserve_rng_state=True)
    wrapped(x).sum().backward()
    return x.grad, {name: p.grad for name, p in wrapped.named_parameters()}


# ---- differences ----


def test_the_differences_are_these():
    """A difference that is added needs a test here."""
    assert [d.name for d in gradckpt.compat.DIFFERENCES] == [
        "use_reentrant",
        "buffers",
        "device RNG",
        "kept draws",
        "compared saves",
        "kept calls",
    ]


def test_difference_use_reentrant():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = gradckpt.checkpoint(torch.sin, leaf(4))
    assert type(y.grad_fn).__name__ == "SinBackward0"
    for checkpoint in (torch_checkpoint.checkpoint, gradckpt.compat.checkpoint):
        with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly"):
            y = checkpoint(torch.sin, leaf(4))
        assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"


def batches_seen(checkpoint, **options):
    """How often a BatchNorm inside a region counted one step."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    checkpoint(block, leaf(8, 4), use_reentrant=False, **options).sum().backward()
    return int(block[1].num_batches_tracked)


def test_difference_buffers():
    assert batches_seen(torch_checkpoint.checkpoint) == 2
    assert batches_seen(gradckpt.compat.checkpoint) == 2
    assert batches_seen(gradckpt.checkpoint, buffers="torch") == 2
    assert batches_seen(gradckpt.checkpoint) == 1
