"""Autocast: the recompute runs under that of the forward, whatever the backward runs under."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from behaviours import OURS, behaviour, leaf


def autocast_state(run):
    run.log(
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


def matmul(run):
    def fn(t, w):
        autocast_state(run)
        y = (t @ w).sin()
        run.log(y.dtype)
        return (y @ w).float().exp()

    return fn


AUTOCASTS = {
    "none": contextlib.nullcontext,
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "off": lambda: torch.autocast("cpu", enabled=False, dtype=torch.float16),
    "off, no cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
}


@pytest.mark.parametrize("backward", AUTOCASTS)
@pytest.mark.parametrize("forward", AUTOCASTS)
@behaviour
def test_autocast_of_the_forward_counts(run, forward, backward):
    x, w = leaf(4, 4), leaf(4, 4)
    with AUTOCASTS[forward]():
        y = run.checkpoint(matmul(run), x, w)
    with AUTOCASTS[backward]():
        y.sum().backward()
        autocast_state(run)
    autocast_state(run)
    return y, x.grad, w.grad


@pytest.mark.parametrize("cache", [True, False])
@behaviour
def test_autocast_cast_of_a_weight_is_cached_across_regions(run, cache):
    """One region casts the weight, the next finds the cast in the cache; so do the recomputes,
    in the other order."""
    x, w = leaf(4, 4), leaf(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        y = x
        for _ in range(3):
            y = run.checkpoint(run.watched(lambda t, w: (t @ w @ w).sin()), y, w)
        loss = (y @ w).float().sum()
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as e:
            run.log("error", e)
    try:
        loss.backward()
    except RuntimeError as e:
        run.log("error", e)
    return x.grad, w.grad


def test_autocast_of_every_device_type_is_replayed():
    """Torch replays the CPU's, and that of the one device type it finds in the arguments."""

    def seen_by(checkpoint):
        seen = []

        def fn(t):
            seen.append((torch.is_autocast_enabled("xpu"), torch.get_autocast_dtype("xpu")))
            return t.sin().exp()

        with torch.autocast("xpu", dtype=torch.bfloat16):
            y = checkpoint(fn, leaf(4), use_reentrant=False)
        y.sum().backward()
        assert not torch.is_autocast_enabled("xpu")
        return [enabled for enabled, _ in seen], seen[0] == seen[1]

    assert seen_by(torch_checkpoint.checkpoint) == ([True, False], False)
    for checkpoint in OURS.values():
        assert seen_by(checkpoint) == ([True, True], True)
