"""What a step allocates is gone after it, with Python's garbage collector off, and a step that was
made before runs no Python of the package; graphs of very many nodes are built, run and freed on a
small stack, and freed at once.

A few hundred steps of each kind; in soak 100,000 of the two main kinds and 20,000 of each other."""

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from behaviours import BUILT_FOR_A_DEVICE
from torch.utils.checkpoint import CheckpointError, GraphExecGroup

import gradckpt
import gradckpt.compat

# ---- steps ----


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
    for error in (ZeroDivisionError, KeyboardInterrupt, StopIteration):  # the last one becomes a RuntimeError
        with contextlib.suppress(error, RuntimeError):
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


def kept(t):
    t = layer(t)
    return (t.exp().amax() + t.logsumexp(0)).sum()


def saved(backward=True):
    y = gradckpt.compress_saved({"codec": "int8", "min_numel": 16})(kept)(hidden())
    if backward:
        y.backward()


def fails_in_a_block():
    with contextlib.suppress(ZeroDivisionError), gradckpt.compress_saved({"codec": "int8", "min_numel": 16}):
        kept(hidden()).div_(1 / 0)


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
    "saved": saved,
    "saved, abandoned": functools.partial(saved, backward=False),
    "saved, fails": fails_in_a_block,
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


# ---- long chains ----


PROGRAM = """
import gc, json, os, sys, threading, weakref
import torch, gradckpt
from torch.nn.functional import silu


def on_a_small_stack(step, *arguments):
    print(*arguments, flush=True)  # what crashes is named
    threading.stack_size(256 << 10)
    thread = threading.Thread(target=step, args=arguments)
    thread.start()
    thread.join()
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


def regions(codec, count, saved):
    def function(x):
        for _ in range(saved):
            x = torch.sin(x)
        return x

    config = codec and {"codec": codec, "min_numel": 0}
    h = torch.rand(4, requires_grad=True) * 1
    for _ in range(count):
        h = gradckpt.checkpoint(function, h, compress=config)
    h.sum().backward()


w, b = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
FORMS = {
    "product": lambda h, i, start: torch.tanh(h @ w),
    "own result": lambda h, i, start: h.sigmoid(),
    "factors": lambda h, i, start: h * b + h * h,
    "skips": lambda h, i, start: silu(h) + start,
    "few saves": lambda h, i, start: silu(h) if i % 1000 == 0 else h @ w if i % 1000 == 999 else h + b,
    "towers": lambda h, i, start: torch.stack([h[0].sin(), silu(h[1])]),
}


def saved(form, codec, n, runs):
    start = torch.rand(4, 4, requires_grad=True) * 1

    def steps(h):
        for i in range(n):
            h = FORMS[form](h, i, start)
        return h

    block = gradckpt.compress_saved({"codec": codec, "min_numel": 0})
    if codec == "int8" and form == "product":
        h = block(steps)(start)
    else:
        with block:
            h = steps(start)
    if runs:
        h.sum().backward()


def freed_at_once(runs):
    first = torch.rand(64, 64, requires_grad=True)
    alive = weakref.ref(first)
    with gradckpt.compress_saved("int8"):
        h = first * 1
        for _ in range(3000):
            h = silu(h)
    if runs:
        h.sum().backward()
    del h, first
    for _ in range(10):  # what its oldest nodes hold goes once the interpreter comes round
        pass
    assert alive() is None, runs
    assert gradckpt.stats()["live_bytes"] == 0, runs


for name, *arguments in json.loads(sys.argv[1]):
    if name == "freed_at_once":
        freed_at_once(*arguments)
    else:
        on_a_small_stack({"regions": regions, "saved": saved}[name], *arguments)
print("freed", flush=True)
os._exit(0)  # after a backward in a thread torch 2.12 itself may abort at exit
"""
FORMS = ("product", "own result", "factors", "skips", "few saves", "towers")


def run_chains(*chains):
    """In one process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(chains)], capture_output=True, text=True)
    assert (done.returncode, done.stdout[-6:]) == (0, "freed\n"), done.stdout[-200:] + done.stderr[-2000:]
    assert "Exception in thread" not in done.stderr, done.stderr[-2000:]


def test_a_long_chain_is_freed_on_a_small_stack():
    run_chains(*(("regions", codec, *shape) for codec in (None, "int8") for shape in ((1, 50_000), (500, 100))))


def test_a_long_chain_under_compress_saved():
    for codec in ("int8", "raw"):
        run_chains(*(("saved", form, codec, *how) for form in FORMS for how in ((6_000, False), (3_000, True))))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_two_hundred_thousand_nodes(form):
    run_chains(("saved", form, "int8", 200_000, False), ("saved", form, "int8", 200_000, True))


def test_a_long_graph_is_freed_at_once():
    run_chains(("freed_at_once", False), ("freed_at_once", True))


# ---- Python that runs in a step ----


INT8 = gradckpt.CompressionConfig("int8", min_numel=0)
PACKAGE = os.path.dirname(gradckpt.__file__)


def product(x):
    return (x @ linear.weight).sin()


def python_of(step):
    """The package's functions that it calls."""
    called = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return called


#: Once a step, whatever the number of regions.
NOTED = ["note_step", "_now"]

RUN_IN_PYTHON = {
    "by reference": (lambda x: gradckpt.checkpoint(product, x), NOTED),
    "encoded": (lambda x: gradckpt.checkpoint(product, x, compress=INT8), NOTED),
    "a name": (lambda x: gradckpt.checkpoint(product, x, compress="int8"), NOTED),
    "one node": (
        lambda x: gradckpt.SelectiveRecompute.apply(linear, None, x, compress=INT8),
        ["method", "method", *NOTED],
    ),
}


@pytest.mark.skipif(BUILT_FOR_A_DEVICE, reason="torch is built for a device, which each region looks for")
@pytest.mark.parametrize("name", RUN_IN_PYTHON)
def test_python_that_a_step_runs(name):
    run, calls = RUN_IN_PYTHON[name]
    for _ in range(2):  # after two such steps nothing is checked
        one(product, compress=INT8)
        run(hidden()).sum().backward()
    assert python_of(lambda: run(hidden()).sum().backward()) == calls
