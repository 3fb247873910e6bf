"""What a step allocates is gone after it, with Python's garbage collector off.

A few hundred steps of each kind; in soak 100,000 of the two main kinds and 20,000 of each other.
"""

import contextlib
import functools
import gc
import os
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, GraphExecGroup
from torchs_own import BUILT_FOR_A_DEVICE

import gradckpt
import gradckpt.compat

PAGE = os.sysconf("SC_PAGE_SIZE")
linear = torch.nn.Linear(32, 32)
layer = torch.nn.Sequential(linear, torch.nn.GELU(), torch.nn.Dropout(0.1))
norm = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(32), torch.nn.Tanh())


def hidden():
    return torch.randn(40, 32, requires_grad=True) * 1


def one(function, *args, **options):
    gradckpt.checkpoint(function, *(args or [hidden()]), **options).sum().backward()


def chain(checkpoint=gradckpt.checkpoint, **options):
    h = hidden()
    for _ in range(3):
        h = checkpoint(layer, h, **options)
    h.sum().backward()


def nested():
    inner = functools.partial(gradckpt.checkpoint, layer)
    one(lambda t: gradckpt.checkpoint(lambda u: inner(u.sin()) * u, t) + inner(t))


def raises(error, t):
    t.sin().exp()
    raise error


def fails_in_forward():
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with contextlib.suppress(error):
            one(functools.partial(raises, error), compress="int8")


def fails_in_recompute():
    functions = iter([layer, functools.partial(raises, ZeroDivisionError), torch.sin])
    y = gradckpt.checkpoint(lambda t: next(functions)(t), hidden())
    for _ in range(2):  # an exception of the user's, then the error about another number of tensors
        with contextlib.suppress(ZeroDivisionError, CheckpointError):
            y.sum().backward(retain_graph=True)


def two_outputs(t):
    return t.sin().exp(), t.cos().tanh()


def abandoned():
    """Backwards that leave recomputed tensors behind in the region,
    and the rest of the graph is never used."""
    x = hidden()
    y, z = gradckpt.checkpoint(two_outputs, x, compress="int8")
    for _ in range(3):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(z.sum(), x)


def grouped():
    for used in (2, 1):  # with one of the two outputs recomputed tensors stay in the region
        x = hidden()
        outputs = gradckpt.checkpoint(two_outputs, x)
        with GraphExecGroup():
            for y in outputs[:used]:
                torch.autograd.grad(y.sum(), x)


def twice_differentiated():
    x = hidden()
    (g,) = torch.autograd.grad(gradckpt.checkpoint(lambda t: t.sin().exp(), x).sum(), x, create_graph=True)
    g.exp().sum().backward()


def read_outside_of_backward():
    y = gradckpt.checkpoint(lambda t: t.exp().sin(), hidden())
    assert y.grad_fn._saved_self is not None
    assert y.grad_fn._saved_self is not None


def overtaken():
    x, depth = hidden(), [0]
    y = gradckpt.checkpoint(lambda t: t.sin().exp().sin(), x)
    loss = y.sum()

    def hook(*_):
        depth[0] += 1
        if depth[0] < 8:
            torch.autograd.grad(loss, x, retain_graph=True)

    handle = y.grad_fn.register_hook(hook)
    loss.backward()
    handle.remove()  # it holds the graph that holds it


class Context:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def in_a_thread():
    thread = threading.Thread(target=chain)
    thread.start()
    thread.join()


def containers():
    one(lambda d, *, k: d["a"][0].sin() @ linear.weight * k[1], {"a": [hidden(), 3]}, k=(None, hidden()))


def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        y = gradckpt.checkpoint(linear, hidden())
    y.sum().backward()


# name: a step. Not here, because torch itself makes cycles: debug=True (its logs) and compressed
# containers (tree_flatten).
STEPS = {
    "plain": chain,
    "int8": functools.partial(chain, compress="int8"),
    "fake_quantize": functools.partial(chain, compress={"codec": "fp8", "fake_quantize": True}),
    "nested": nested,
    "early stop off": functools.partial(chain, early_stop=False),
    "fails in forward": fails_in_forward,
    "fails in recompute": fails_in_recompute,
    "abandoned graph": abandoned,
    "graph exec group": grouped,
    "twice differentiated": twice_differentiated,
    "read outside of backward": read_outside_of_backward,
    "overtaken by other backwards": overtaken,
    "context_fn": functools.partial(one, layer, context_fn=lambda: (Context(), Context())),
    "containers": containers,
    "autocast and device": autocast,
    "batch norm": functools.partial(one, norm),
    "reentrant": functools.partial(chain, use_reentrant=True),
    "compat": functools.partial(chain, gradckpt.compat.checkpoint, use_reentrant=False),
    "thread": in_a_thread,
}


@functools.cache
def engine_types():
    """Frame, Holder, Recompute: seen where the engine shows one.
    Each living object holds a reference to its type."""
    seen = []

    def function(t):
        seen.append(type(torch._C._autograd._top_saved_tensors_default_hooks(True)[0]))
        return t.exp()

    y = gradckpt.checkpoint(function, hidden())
    holder = getattr(y.grad_fn._raw_saved_result, "data", None)
    y.sum().backward()
    frame, recompute = seen
    assert frame.__name__ == "Frame"
    assert recompute.__name__ == "Recompute"
    return [frame, recompute, gradckpt.codecs.Payload] + ([type(holder)] if holder is not None else [])


def living():
    """A number for each of the engine's types that changes with its living objects."""
    return [sys.getrefcount(t) for t in engine_types()]


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def run(step, times):
    for _ in range(times):
        step()
        linear.weight.grad = linear.bias.grad = None


@pytest.fixture
def collector_off(name):
    if name == "compat" and BUILT_FOR_A_DEVICE:
        pytest.skip("torch's own search for a device makes a cycle each time (tree_flatten)")
    gc.collect()
    gc.freeze()  # what lives already need not be looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    norm.zero_grad()


@pytest.mark.parametrize("name", STEPS)
def test_nothing_stays_of_a_step(name, collector_off):
    step = STEPS[name]
    run(step, 20)
    for _ in range(50):  # caches of Python's get warm; a leak would show every time
        gc.collect()  # empties Python's free lists, too: with them it would take thousands of steps until all is even
        blocks, alive = sys.getallocatedblocks(), living()
        run(step, 60)
        assert living() == alive
        assert gc.collect() == 0
        grown = sys.getallocatedblocks() - blocks
        if abs(grown) <= 25:
            return
    pytest.fail(f"60 steps leave {grown} blocks")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", STEPS)
def test_memory_is_flat_over_many_steps(name, collector_off):
    step, steps = STEPS[name], 100_000 if name in ("plain", "int8") else 20_000
    run(step, 6_000)  # fills Python's free lists
    blocks, alive, memory = sys.getallocatedblocks(), living(), resident()
    run(step, steps)
    grown = sys.getallocatedblocks() - blocks, resident() - memory
    assert living() == alive
    assert abs(grown[0]) <= 64, grown
    if name != "thread":  # the C library's memory of threads comes and goes by more, also without any region
        assert grown[1] < 1 << 20, grown
