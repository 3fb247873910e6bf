"""Python code that runs in the middle of the engine: attributes that it asks for, hooks, checks and
unpack functions, which raise, drop references, collect garbage, switch threads and come back to
it."""

import functools
import gc
import json
import os
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from behaviours import BUILT_FOR_A_DEVICE
from checkout import HELPERS, ROOT
from processes import alone
from test_processes import grad_of, leaf
from test_threads import _nothing_left_behind  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

import gradckpt

WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
SMALL = {"codec": "int8", "min_numel": 0}


def hidden(rows=8):
    return torch.randn(rows, 16).requires_grad_() * 1


class Dropping(TorchFunctionMode):
    """Lets go of what it holds at the first question for an attribute of that name."""

    def __init__(self, name, held):
        super().__init__()
        self.name, self.held = name, held

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(getattr(func, "__self__", None), "__name__", getattr(func, "__name__", ""))
        if name == self.name and self.held:
            self.held.clear()
            gc.collect()
        return func(*args, **(kwargs or {}))


FACTS = ["requires_grad", "is_leaf", "_version", "layout", "is_neg"]
KEPT = ["is_leaf", "_version"]
#: The options of a region, what the forward asks, and what the recompute.
ASKED = {
    "by reference": ({}, KEPT, KEPT),
    "encoded": ({"compress": SMALL}, [*FACTS, "_version"], ["empty", "requires_grad_"]),
    "too small": ({"compress": "int8"}, [*FACTS, "nbytes", "_version"], KEPT),
}


class Questions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(resolve_name(func).removesuffix(".__get__").split(".")[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(BUILT_FOR_A_DEVICE, reason="torch is built for a device, which each region looks for")
@pytest.mark.parametrize("name", ASKED)
def test_what_a_region_asks(name):
    """A plain tensor is asked only for what is needed."""
    options, forward, recompute = ASKED[name]

    def region(x):
        return gradckpt.checkpoint(lambda x: (x @ WEIGHT).sin(), x, **options)

    region(hidden()).sum().backward()  # the first region of a process asks more
    x = hidden()
    with Questions() as asked:
        node = region(x).grad_fn
    assert asked.names == [*forward, "matmul", "sin", "grad_fn"]
    with Questions() as asked:
        assert node._saved_self is not None  # runs the region again
    # At the end, of what was saved: was it written to?
    assert asked.names == [*recompute, "matmul", "sin", *["_version"] * 3]


@pytest.mark.parametrize("name", ["requires_grad", "is_leaf", "_version", "layout", "is_neg", "empty"])
def test_a_question_may_drop_the_payload_that_would_be_shared(name):
    x = hidden(20_000) if name == "empty" else hidden()  # torch.empty makes large payloads alone
    held = [gradckpt.checkpoint(lambda h: h @ WEIGHT, x, compress=SMALL)]
    mode = Dropping(name, held)
    with mode:
        y = gradckpt.checkpoint(lambda h: h @ WEIGHT, x, compress=SMALL)
    assert not held
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(g, WEIGHT.sum(1).expand(x.shape), atol=1e-5)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_a_question_may_change_the_tensor(codec, late):
    """Its memory is looked at when nothing runs any more: an error,
    or the values that are there."""

    class Changing(TorchFunctionMode):
        armed = True

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.empty and self.armed:
                self.armed = False
                x.data = torch.ones(3, 16)
            return func(*args, **(kwargs or {}))

    x = hidden(20_000)  # torch.empty, which asks, makes large payloads alone
    gradckpt._C.late_overflow(late)
    with (
        Changing(),
        pytest.raises(RuntimeError, match=r"^gradckpt: a tensor was resized or moved while gradckpt read it"),
    ):
        gradckpt.checkpoint(torch.sin, x, compress={"codec": codec, "min_numel": 0})
    gradckpt._C.late_overflow(False)
    assert gradckpt.stats()["live_bytes"] == 0


WITHOUT_CALLBACKS = """
import torch
class Engine:
    def __init__(self, engine): self.engine = engine
    def __getattr__(self, name): return getattr(self.engine, name)
    def queue_callback(self, callback): raise RuntimeError("no callbacks here")
torch.autograd.Variable._execution_engine = Engine(torch.autograd.Variable._execution_engine)
import gradckpt
w = torch.randn(64, 64, requires_grad=True)
for _ in range(20):
    x = torch.randn(64, 64, requires_grad=True)
    inner = lambda h: gradckpt.checkpoint(lambda t: torch.relu(t @ w).sin(), h.sin())
    (a,) = torch.autograd.grad(gradckpt.checkpoint(inner, x * 1).sum(), x)
    (b,) = torch.autograd.grad(torch.relu(x.sin() @ w).sin().sum(), x)
    assert torch.equal(a, b)
print("right")
"""


def test_an_engine_that_takes_no_callback():
    out = subprocess.run([sys.executable, "-c", WITHOUT_CALLBACKS], capture_output=True, text=True, env=os.environ)
    assert out.stdout == "right\n", (out.returncode, out.stderr[-2000:])


def test_one_callback_for_all_regions_of_a_backward():
    x, callbacks = hidden(), []

    def count(g):
        names = (o.__name__ for o in gc.get_objects() if type(o) is type(len))
        callbacks.append(sum(name == "end_of_graph_task" for name in names))

    h = x * 1
    h.register_hook(count)
    for _ in range(3):
        h = gradckpt.checkpoint(lambda t: t.sin().exp(), h)
    torch.autograd.grad(h.sum(), x)
    assert callbacks == [1]


# ---- tracebacks ----


def lines_of(error):
    return [f.name for f in traceback.extract_tb(error.__traceback__)]


def ends_early(h):
    return next(iter([])) * h


@pytest.mark.parametrize("grad", [True, False])
def test_the_line_that_raised_stop_iteration_is_shown(grad):
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="generator raised StopIteration") as raised:
        gradckpt.checkpoint(ends_early, torch.ones(3, requires_grad=True))
    assert "ends_early" in lines_of(raised.value.__cause__)


def test_debug_shows_where_the_check_failed():
    runs = [lambda h: (h @ WEIGHT).sin(), lambda h: (h @ WEIGHT[:, :2]).sin()]
    y = gradckpt.checkpoint(lambda h: runs.pop(0)(h), hidden(), debug=True)
    with pytest.raises(torch_checkpoint.CheckpointError) as raised:
        y.sum().backward()
    assert raised.value.__cause__ is not None
    assert lines_of(raised.value.__cause__)


# ---- cycles ----


def frames():
    return [o for o in gc.get_objects() if type(o).__name__ == "Frame"]


def test_unpack_of_a_region_that_the_collector_took_apart():
    """Code that runs in the middle of a collection finds its hook."""
    said = []

    def last_words():
        for o in gc.get_objects():
            if type(o) is tuple and len(o) == 2 and type(o[1]).__name__ == "Holder":
                with pytest.raises(RuntimeError, match="was already collected as garbage") as raised:
                    o[0](o[1])
                said.append(raised)

    def region(t):
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        payload = gradckpt.codecs.encode(t)  # of which the collector does not know
        weakref.finalize(payload, last_words)
        cycle = [(unpack, pack(t)), payload]
        cycle.append(cycle)
        return t.sin()

    gradckpt.checkpoint(region, hidden())
    gc.collect()
    assert len(said) == 1


def test_what_was_recomputed_goes_with_its_part_of_the_graph():
    x, before = hidden(), frames()
    y, z = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().tanh()), x)
    (frame,) = (f for f in frames() if not any(f is old for old in before))

    def kept():
        return sum(isinstance(o, torch.Tensor) for o in gc.get_referents(frame))

    with torch_checkpoint.GraphExecGroup():  # others may still need it
        at_first = kept()
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert kept() == at_first + 2
        del z
        assert kept() == at_first


@pytest.mark.parametrize("pack", [lambda x, held: held, lambda x, held: [x, held], lambda x, held: {1: [held, x]}])
def test_what_holds_an_argument_of_a_region_can_be_found(pack):
    held = frames  # any object that the collector tracks
    y = gradckpt.checkpoint(lambda t, given: t.sin(), hidden(), pack(hidden(), held), compress=SMALL)
    assert [type(o).__name__ for o in gc.get_referrers(held)].count("Frame") == 1
    y.sum().backward()


# ---- random programs (chaos.py) ----


def run(first, count, tree=ROOT, env=None):
    """In a process of its own: torch's own checkpoint leaves cycles behind when it fails,
    and other tests count."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(tree / HELPERS.relative_to(ROOT) / "chaos.py"),
        str(first),
        str(count),
    ]
    out = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=tree, capture_output=True, text=True)
    assert out.returncode == 0, (first, out.stdout[-1000:], out.stderr[-5000:])
    counts = json.loads(out.stdout)
    assert counts["programs"] == count
    assert counts["raised"] > count / 5
    assert counts["changed"] > count / 50


def test_programs_under_a_mode_that_does_anything():
    """Each exception arrives or reaches sys.unraisablehook, nothing is left behind, and what was
    not disturbed is equal to the last bit."""
    run(0, 500)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_thousand_under_sanitizers(sanitized):
    tree, env = sanitized
    for first in range(0, 20000, 1000):
        run(first, 1000, tree, env)


# ---- what comes back to the engine ----


def test_backwards_nested_deeper_than_one_thread_goes():
    """From depth 60 on, torch runs a nested backward on another thread. After that no child of
    its process has a backward, which other tests need."""
    alone(nest_deeply)


def nest_deeply():
    threads = set()

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.save_for_backward(x)
            ctx.depth = depth
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return grad * grad_of(functools.partial(chain, ctx.depth - 1), x), None

    def chain(depth, t):
        return gradckpt.checkpoint(lambda u: Inner.apply(u.cos(), depth).sin() if depth else u.cos().sin(), t)

    x = leaf(2) * 1e-3
    assert torch.isfinite(grad_of(functools.partial(chain, 70), x)).all()
    assert len(threads) > 1


def test_check_of_the_users_own_that_differentiates_through_the_region_it_checks(monkeypatch):
    """The table that is being checked stays, however many others come and go."""
    x, arm = leaf(8), []

    def check(t):
        if arm:
            arm.clear()
            for _ in range(40):
                assert torch.equal(torch.autograd.grad(other, x, retain_graph=True)[0], want[1])
        return tuple(t.shape)

    monkeypatch.setitem(torch_checkpoint._allowed_determinism_checks_to_fns, "own", check)
    want = [grad_of(lambda t: t.sin().exp(), x), grad_of(lambda t: t.cos().exp(), x)]
    y, z = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().exp()), x, determinism_check="own")
    other = z.sum()
    for _ in range(2):
        arm.append(1)
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], want[0])


@pytest.mark.parametrize("when", ["pack", "unpack"])
def test_arguments_that_someone_finds_half_put_together(when):
    """A tuple that gc shows to others cannot be filled any more."""
    kept, armed = [], []

    def look(now, t):
        if now == when and armed:
            kept.append([o for o in gc.get_objects() if type(o) is tuple and len(o) == 3])
        return t

    a, b, c = leaf(4), leaf(4), leaf(4)
    gc.collect()
    gc.freeze()  # only what is made from here on
    try:
        armed.append(1)
        with saved_tensors_hooks(functools.partial(look, "pack"), functools.partial(look, "unpack")):
            y = gradckpt.checkpoint(lambda p, q, r: (p * q).sin() * r, a * 1, b * 1, c * 1)
        y.sum().backward()
    finally:
        gc.unfreeze()
    assert kept
    assert torch.equal(c.grad, (a * b).sin())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    os._exit(0)  # the engine's threads may still be putting objects away
