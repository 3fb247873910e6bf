"""KeyboardInterrupt at random moments of random programs: nothing stays behind,
and the next step is right.

What a program may use: only what cannot stay half done by itself. Python context managers of torch
(``no_grad``, ``autocast``, ``saved_tensors_hooks``) do when the interrupt lands between their
lines, and so do functions such as ``F.dropout`` under a default device (``handle_torch_function``).
So programs call builtins, and states are set by the builtins beneath the context managers, outside
the time in which interrupts arrive. Forward and backward are interrupted apart: only so does the
state around the backward differ from that of the forward.
"""

import gc
import itertools
import random
import sys
import threading
from collections import Counter

import pytest
import torch
from processes import Alarm, forget_handled_exception
from torch.utils import _device

import gradckpt
from gradckpt._engine import buffers


@pytest.fixture(autouse=True)
def _lock_of_its_own(monkeypatch):
    """A trace function, unlike a signal, can raise between the end
    of a with statement and the release of its lock."""
    monkeypatch.setattr(buffers, "_lock", threading.RLock())


AUTOGRAD = torch._C._autograd


class Context:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def contexts():
    return Context(), Context()


# ---- programs ----

PIECES = [
    lambda t, w: torch._C._nn.gelu(t @ w),
    lambda t, w: torch.dropout(t, 0.3, True) * t.sin(),
    lambda t, w: t.sin().exp().tanh() + torch.rand(t.shape[0], 1),
    lambda t, w: torch.cat([c.sin() * c for c in t.chunk(2)]),
    lambda t, w: torch.layer_norm(t, t.shape[-1:]).cos() @ w,
    lambda t, w: (t * torch.ones(t.shape[-1])).sigmoid(),
]
OPTIONS = [
    {},
    {"early_stop": False},
    {"preserve_rng_state": True, "determinism_check": "none"},
    {"compress": "int8"},
    {"compress": {"codec": "raw", "min_numel": 1}},
    {"compress": {"codec": "fp8", "fake_quantize": True}},
    {"context_fn": contexts},
    {"context_fn": contexts, "compress": "int8"},
]


class Program:
    """A chain of regions, some with regions inside;
    the state of the world in its forward and in its backward."""

    def __init__(self, rng):
        self.seed = rng.getrandbits(30)
        self.regions = [self.region(rng, rng.choice([0, 0, 1, 2])) for _ in range(rng.randint(1, 3))]
        self.autocast = [rng.random() < 0.3, rng.random() < 0.2]
        self.device = rng.random() < 0.2

    def region(self, rng, depth):
        inner = self.region(rng, depth - 1) if depth else None
        return rng.choices(PIECES, k=rng.randint(1, 2)), inner, rng.choice(OPTIONS)

    def run(self, region, x, w):
        pieces, inner, options = region

        def function(t, w):
            for piece in pieces:
                t = piece(t, w).float()
            return self.run(inner, t, w) * t if inner else t

        return gradckpt.checkpoint(function, x, w, **options)

    def forward(self, x, w):
        h = x * 1
        for region in self.regions:
            h = self.run(region, h, w)
        return (h @ w).sum()


def backward(loss, x, w):
    return torch.autograd.grad(loss, (x, w), retain_graph=True)


# ---- the world around ----


def world():
    """Everything that a checkpoint changes for a while."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autocast_increment_nesting(),
        torch.autocast_decrement_nesting(),
        _device.CURRENT_DEVICE,
        torch.empty(0).device.type,
        torch._C._len_torch_function_stack(),
    )


def pop_hooks():
    """How many saved-tensor hooks are on the stack; none is after."""
    count = 0
    while AUTOGRAD._top_saved_tensors_default_hooks(True) is not None:
        AUTOGRAD._pop_saved_tensors_default_hooks()
        count += 1
    return count


def plain_world():
    AUTOGRAD._saved_tensors_hooks_enable()
    torch.set_grad_enabled(True)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    set_autocast(False)
    _device.CURRENT_DEVICE = None
    forget_handled_exception()


def set_autocast(on):
    nesting = torch.autocast_increment_nesting()
    while nesting > on:
        nesting = torch.autocast_decrement_nesting()
    while nesting < on:
        nesting = torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", on)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(True)


def live_frames():
    def count():
        return sum(type(o).__name__ == "Frame" for o in gc.get_objects() if type(o).__module__ == "gradckpt._C")

    if count():  # a traceback makes cycles
        gc.collect()
    return count()


def reference(program, x, w):
    torch.manual_seed(program.seed)
    with torch.device("cpu") if program.device else torch.enable_grad():
        set_autocast(program.autocast[0])
        loss = program.forward(x, w)
    set_autocast(program.autocast[1])
    return backward(loss, x, w)


def interrupted(program, alarm, delays, x, w, tally):
    """Forward and backward, each interrupted after its delay unless it was faster; None:
    not interrupted."""
    torch.manual_seed(program.seed)
    device = torch.device("cpu") if program.device else None
    if device is not None:
        device.__enter__()
    set_autocast(program.autocast[0])
    before = world()
    loss = alarm.during(delays[0], program.forward, x, w)
    tally["hooks"] += pop_hooks()
    changed = world() != before
    tally["states"] += changed
    tally["forward"] += loss is None
    if changed:
        plain_world()
    elif device is not None:
        device.__exit__(None, None, None)
    if loss is None:
        return
    generator = torch.get_rng_state()
    for delay in (*delays[1:], None):  # on the same graph: each finds what the one before left
        set_autocast(program.autocast[1])
        before = world()
        grads = alarm.during(delay, backward, loss, x, w)
        tally["hooks"] += pop_hooks()
        changed, drawn = world() != before, not torch.equal(torch.get_rng_state(), generator)
        tally["states"] += changed
        tally["generators"] += drawn
        tally["backward"] += grads is None
        tally["wrong"] += grads is not None and not equal(grads, program.want)
        if changed or drawn:
            plain_world()
            torch.set_rng_state(generator)


def equal(a, b):
    """To the last bit; some programs end in NaN."""
    return all(torch.equal(p.view(torch.int32), q.view(torch.int32)) for p, q in zip(a, b, strict=True))


def delay(rng):
    return rng.uniform(5e-6, 300e-6)


def storm(seed, interrupts, runs=12):
    """Random programs under random alarms until `interrupts` of them rang."""
    rng, tally = random.Random(seed), Counter()
    torch.manual_seed(seed)
    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    gc.collect()
    gc.freeze()
    try:
        with Alarm() as alarm:
            while tally["forward"] + tally["backward"] < interrupts:
                program = Program(rng)
                program.want = reference(program, x, w)
                for _ in range(runs):
                    plain_world()
                    interrupted(program, alarm, [rng.choice([None, delay(rng)]), delay(rng), delay(rng)], x, w, tally)
                    tally["frames"] += live_frames()
                plain_world()
                tally["wrong"] += not equal(reference(program, x, w), program.want)
    finally:
        gc.unfreeze()
        plain_world()
    return tally


def assert_clean(tally):
    assert {name for name, count in tally.items() if count} <= {"forward", "backward"}, tally


def test_random_interrupts():
    tally = storm(seed=0, interrupts=800)
    assert_clean(tally)
    assert min(tally["forward"], tally["backward"]) > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_thousand_random_interrupts(seed):
    assert_clean(storm(seed, interrupts=20_000))


# ---- not at random: at every line, call and return of Python code, one after the other ----


class At:
    """Raises KeyboardInterrupt at the n-th event of the Python code, or that of a file, that runs
    inside."""

    def __init__(self, n, file=None):
        self.n, self.file, self.fired = n, file, None

    def trace(self, frame, event, arg):
        if self.file is not None and frame.f_code.co_filename != self.file:
            return None
        self.n -= 1
        if self.n == 0:
            sys.settrace(None)
            self.fired = f"{event} at line {frame.f_lineno} of {frame.f_code.co_qualname}"
            raise KeyboardInterrupt
        return self.trace

    def during(self, function):
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        forget_handled_exception()


def interrupted_at_every_event(function):
    """How many events its Python code has; each time nothing is left behind."""
    before = world()
    for n in itertools.count(1):
        generator, at = torch.get_rng_state(), At(n)
        at.during(function)
        if at.fired is None:
            return n
        assert pop_hooks() == 0, at.fired
        assert world() == before, at.fired
        assert torch.equal(torch.get_rng_state(), generator), at.fired
        torch.rand(1)


def saved(loss):
    """Reads a saved tensor of the region outside backward,
    where the engine of autograd puts nothing back."""
    return loss.grad_fn.next_functions[0][0]._saved_result


def differentiate(loss):
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), True, False, (), allow_unreachable=True, accumulate_grad=True
    )


@pytest.mark.parametrize("use", [differentiate, saved])
@pytest.mark.parametrize("device", [False, True], ids=["", "device"])
@pytest.mark.parametrize("autocast", [(False, False), (True, False), (False, True), (True, True)])
def test_interrupt_at_every_line_of_a_recompute(use, device, autocast):
    x, options = (
        torch.randn(8, 8, requires_grad=True),
        {"context_fn": contexts, "compress": {"codec": "int8", "min_numel": 1}},
    )
    try:
        with torch.device("cpu") if device else torch.enable_grad():
            set_autocast(autocast[0])
            loss = gradckpt.checkpoint(lambda t: (t @ t).sin().exp(), x * 1, **options).sum()
        set_autocast(autocast[1])
        use(loss)
        assert interrupted_at_every_event(lambda: use(loss)) > 5
    finally:
        pop_hooks()
        plain_world()


def test_interrupt_at_every_line_of_a_forward():
    x = torch.randn(8, 8, requires_grad=True)
    for options in OPTIONS:

        def forward(options=options):
            gradckpt.checkpoint(
                lambda t: gradckpt.checkpoint(lambda u: u.sin().exp(), t.cos(), **options), x, **options
            )

        interrupted_at_every_event(forward)
