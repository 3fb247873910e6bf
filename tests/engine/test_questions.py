"""The engine asks tensors for attributes, and the answer may run Python:
what that code raises or drops."""

import gc
import os
import subprocess
import sys
import traceback
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.overrides import TorchFunctionMode

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


def test_the_collector_sees_what_a_frame_keeps_of_tensors(monkeypatch):
    """The metadata of its check, and recomputed values that were not fetched."""
    made = []
    checks = torch_checkpoint._allowed_determinism_checks_to_fns
    monkeypatch.setitem(checks, "remembers", lambda x: made.append(("of", x.shape)) or made[-1])
    x, before = hidden(), frames()
    ys = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().tanh()), x, determinism_check="remembers")
    metadata = {id(m) for m in made}
    torch.autograd.grad(ys[0].sum(), x, retain_graph=True)  # what the other needs stays in the frame
    (frame,) = (f for f in frames() if not any(f is old for old in before))
    kept = gc.get_referents(frame)
    assert {id(t[0]) for t in kept if isinstance(t, tuple) and len(t) == 1} >= metadata


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
