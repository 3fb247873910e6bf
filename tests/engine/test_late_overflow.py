"""Devices say late whether a codec could hold the values: what is kept until then,
and what comes back.

`_C.late_overflow(True)` makes the CPU codecs do the same; `_C.settle_overflow()` is the moment at
which the device has written its words."""

import _thread
import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import gradckpt
from gradckpt import _C

pytestmark = pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")  # nothing fits here and there

SAID = "values the codec cannot hold"


@pytest.fixture(autouse=True)
def _late():
    gradckpt.stats.reset()
    _C.late_overflow(True)
    yield
    _C.late_overflow(False)
    _C.settle_overflow()
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


def fitting(n=5000, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_() * 1


def hostile(n=5000):
    """`lossless` cannot hold these exponents, `bf16` not the largest of them."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(2))
    x = x * 2.0 ** (torch.arange(n) % 250 - 125)
    x[7] = torch.finfo(torch.float32).max
    return x.requires_grad_() * 1


def run(x, codec="lossless", function=torch.sin, **options):
    return gradckpt.checkpoint(function, x, compress={"codec": codec, "min_numel": 0, **options})


def gradient(y, x):
    return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


def compressed():
    s = gradckpt.stats()
    return s["compressed"], s["encoded"], s["uncompressed"]


# ---- without a flag ----


@pytest.fixture
def flags():
    """All flags are taken, by payloads whose results are still to come."""
    taken = [gradckpt.codecs.encode(torch.ones(8), "lossless") for _ in range(4096)]
    yield taken
    taken.clear()


@pytest.mark.parametrize("make", [fitting, hostile])
def test_without_a_flag_the_original_is_kept_and_counted(flags, make):
    x = make()
    want = gradient(x.sin(), x)
    gradckpt.stats.reset()
    y = run(x)
    assert compressed() == (0, 0, {"no flag left to report overflow": 1})
    assert torch.equal(gradient(y, x), want)
    with pytest.raises(RuntimeError, match=r"'lossless' has no flag left in which a device reports overflow; encode"):
        gradckpt.codecs.encode(x, "lossless")
    _C.settle_overflow()
    gradckpt.stats.reset()
    assert torch.equal(gradient(run(x, "int8"), x).isfinite(), torch.ones(x.shape, dtype=torch.bool))
    run(x)
    assert compressed()[:2] == (2, 2), "results came, so flags are free"


# ---- the original lives until the flag ----


LOOKS = {
    "another payload": lambda y, leaf: run(torch.ones(10, requires_grad=True) * 1),
    "stats": lambda y, leaf: gradckpt.stats(),
    "a restore": lambda y, leaf: gradient(y, leaf),
}


@pytest.mark.parametrize("look", LOOKS)
def test_fitting_original_is_let_go(look):
    x = fitting()
    original, leaf = weakref.ref(x), x.grad_fn.next_functions[0][0].variable
    want = gradient(x.sin(), leaf)
    y = run(x)
    del x
    LOOKS[look](y, leaf)
    assert original() is not None
    _C.settle_overflow()
    assert original() is not None  # the result was not read
    LOOKS[look](y, leaf)
    assert original() is None
    assert gradckpt.stats()["uncompressed"] == {}
    assert torch.equal(gradient(y, leaf), want)
    assert gradckpt.stats()["originals_alive"] == 0


@pytest.mark.parametrize("make", [fitting, hostile])
def test_flag_is_pending_at_backward(make):
    """A fresh copy of the original is made without waiting."""
    x = make()
    seen = []

    def function(h):
        seen.append(h)
        h = h * 1
        return h.mul_(0.5).sin()

    y = run(x, function=function)
    assert torch.equal(gradient(y, x), gradient((x * 0.5).sin(), x))
    assert torch.equal(seen[1], x)
    assert seen[1].data_ptr() != x.data_ptr()
    assert seen[1].requires_grad
    assert not seen[1].is_leaf
    _C.settle_overflow()
    assert compressed()[0] == (make is fitting)


def test_refused_original_is_kept():
    x = hostile()
    y = run(x)
    before = compressed()
    _C.settle_overflow()
    assert before == (1, 1, {})
    assert compressed() == (0, 0, {SAID: 1})
    s = gradckpt.stats()
    assert (s["live_bytes"], s["bytes_in"], s["bytes_out"], s["uncompressed_bytes"]) == (0, 0, 0, 20000)
    assert (s["eligible"], s["originals_alive"]) == (1, 0)
    for _ in range(2):
        assert torch.equal(gradient(y, x), gradient(x.sin(), x))
    assert gradckpt.stats()["originals_alive"] == 0


# ---- a CPU that is far ahead of its device ----


class Ahead:
    """A forward of `count` regions in a thread, that lets go of each input at once."""

    def __init__(self, count, n, codec="lossless"):
        self.begun, self.called, self.originals, self.outputs = 0, 0, [], []
        self.thread = threading.Thread(target=self.forward, args=(count, n, codec))
        self.thread.start()

    def forward(self, count, n, codec):
        leaf = torch.randn(n, requires_grad=True)
        for _ in range(count):
            x = leaf * 1
            self.originals.append(weakref.ref(x))
            self.begun += 1
            y = run(x, codec, self.function)
            del x
            self.outputs.append(y)

    def function(self, h):
        self.called += 1
        return h.sin().sum()

    def wait_until(self, condition):
        for _ in range(6000):
            if condition():
                return
            self.thread.join(0.01)
        raise AssertionError(f"{self.begun} regions begun, {self.called} functions called")

    def alive(self):
        return sum(original() is not None for original in self.originals)


@pytest.mark.parametrize("codec", ["lossless", "bf16"])
def test_open_originals_are_bounded(codec):
    """Of large ones about two; the forward then waits, and other threads run."""
    _C.late_overflow(600)
    ahead = Ahead(7, 2 << 20, codec)
    for begun in (3, 6):
        ahead.wait_until(lambda begun=begun: ahead.begun == begun)
        ahead.thread.join(0.3)
        assert (ahead.begun, ahead.called) == (begun, begun - 1)  # it waits after the encode
        assert ahead.alive() == 3
        _C.settle_overflow()
    ahead.wait_until(lambda: not ahead.thread.is_alive())
    assert (ahead.called, ahead.alive()) == (7, 1)
    _C.settle_overflow()
    assert (gradckpt.stats()["uncompressed"], ahead.alive()) == ({}, 0)
    ahead.outputs.clear()


def test_forward_does_not_wait_for_ever():
    """What the device does may wait for this thread.
    Who was waited for in vain is not waited for again."""
    _C.late_overflow(0.02)
    ahead = Ahead(7, 2 << 20)
    ahead.wait_until(lambda: not ahead.thread.is_alive())
    assert (ahead.called, ahead.alive()) == (7, 7)
    _C.settle_overflow()
    gradckpt.stats()
    assert ahead.alive() == 0
    ahead.outputs.clear()


def test_small_originals_are_not_worth_waiting_for():
    _C.late_overflow(600)
    ahead = Ahead(20, 1000)
    ahead.wait_until(lambda: not ahead.thread.is_alive())
    assert ahead.alive() == 20
    ahead.outputs.clear()


def test_ctrl_c_in_a_forward_that_waits():
    _C.late_overflow(600)
    x = [torch.randn(2 << 20, requires_grad=True) * 1 for _ in range(3)]
    kept = [run(x[0]), run(x[1])]
    with settling_soon(_thread.interrupt_main), pytest.raises(KeyboardInterrupt):
        run(x[2])
    _C.settle_overflow()
    assert torch.equal(gradient(kept[0], x[0]), x[0].cos())


def test_every_restore_looks_at_all_flags():
    """Originals that are kept when a region is recomputed: none, not one less each time."""
    leaf = torch.randn(5000, requires_grad=True)
    for _ in range(3):  # the end of the first two backwards looks, too
        originals, alive = [], []

        def function(h, originals=originals, alive=alive):
            if len(originals) == 6:
                alive.append(sum(original() is not None for original in originals))
            return h.sin()

        x = leaf * 1
        for n in range(6):
            y = run(x, function=function)
            originals.append(weakref.ref(x))
            x = y * 1 if n < 5 else y
            del y
        _C.settle_overflow()
        torch.autograd.grad(x.sum(), leaf)
        assert alive == [0] * 6


# ---- changes in place ----


@contextlib.contextmanager
def settling_soon(what=_C.settle_overflow):
    """Another thread does it while this one waits."""
    timer = threading.Timer(0.1, what)
    timer.start()
    yield
    timer.join()


MODIFIED = r"modified by an inplace operation.*is at version 1; expected version 0"


@pytest.mark.parametrize("codec", ["lossless", "bf16", "fp16"])
@pytest.mark.parametrize("inside", [False, True])
def test_change_while_the_flag_is_pending(codec, inside):
    """A restore waits for it: right values where the payload holds them, else torch's words,
    never anything else."""
    _C.late_overflow(60)

    def change(h):
        return h.mul_(2).sin() if inside else h.sin()

    for make in (fitting, hostile):
        x = make()
        leaf, values = x.grad_fn.next_functions[0][0].variable, x.detach().clone()
        if make is fitting and codec != "lossless":
            values = values.to({"bf16": torch.bfloat16, "fp16": torch.float16}[codec]).float()
        y = run(x, codec, change)
        if not inside:
            with torch.no_grad():
                x.mul_(2)
        with settling_soon():
            if make is hostile:
                with pytest.raises(RuntimeError, match=MODIFIED):
                    gradient(y, leaf)
            else:
                probe = values.requires_grad_()
                want = torch.autograd.grad((probe * 2).sin().sum() if inside else probe.sin().sum(), probe)[0]
                assert torch.equal(gradient(y, leaf), want)


def test_flag_that_never_comes():
    """The payload may hold NaN, and the original has changed: an error after a while,
    not a hang."""
    _C.late_overflow(0.05)
    for make in (fitting, hostile):
        x = make()
        y = run(x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            gradient(y, x)


def test_waiting_hears_ctrl_c():
    _C.late_overflow(60)
    x = fitting()
    y, want = run(x), gradient(x.sin(), x)
    with torch.no_grad():
        x.mul_(2)
    with settling_soon(_thread.interrupt_main), pytest.raises(KeyboardInterrupt):
        gradient(y, x)
    _C.settle_overflow()
    assert torch.equal(gradient(y, x), want)


# ---- codecs that round ----


@pytest.mark.parametrize("settled", [False, True])
def test_rounding_does_not_depend_on_the_moment(settled):
    """What fits is rounded, before the flag and after it,
    and what does not is the original's."""
    x = hostile().detach()
    want = x.to(torch.bfloat16).float()
    want[7] = x[7]
    payload = gradckpt.codecs.encode(x, "bf16")
    if settled:
        _C.settle_overflow()
    for _ in range(2):
        assert torch.equal(payload.decode(), want)
        _C.settle_overflow()
    x = fitting().detach()
    payload = gradckpt.codecs.encode(x, "bf16")
    for _ in range(2):
        assert torch.equal(payload.decode(), x.to(torch.bfloat16).float())
        _C.settle_overflow()


@pytest.mark.parametrize("make", [fitting, hostile])
@pytest.mark.parametrize("codec", ["lossless", "bf16"])
def test_replay_recomputes_the_forward(make, codec):
    seen = []
    y = run(make(), codec, lambda h: seen.append(h.detach().clone()) or h.sin(), fake_quantize=True)
    _C.settle_overflow()
    y.sum().backward()
    assert torch.equal(*seen)


# ---- counting ----


def test_pending_flag_is_not_shared():
    """Its result is not known yet."""
    x = hostile()
    regions = run(x), run(x)
    assert (gradckpt.stats()["shared"], compressed()) == (0, (2, 2, {}))
    _C.settle_overflow()
    assert compressed() == (0, 0, {SAID: 2})
    assert gradckpt.stats()["shared"] == 0
    assert gradckpt.stats()["uncompressed_bytes"] == 40000
    del regions


def test_counters_reset_before_the_flag():
    x = hostile()
    y = run(x)
    gradckpt.stats.reset()
    again = run(x)
    _C.settle_overflow()
    s = gradckpt.stats()
    assert (s["compressed"], s["encoded"], s["shared"], s["bytes_in"], s["uncompressed"]) == (0, 0, 0, 0, {SAID: 1})
    gradckpt.stats.reset()
    y2 = run(hostile())
    gradckpt.stats.reset()
    _C.settle_overflow()
    assert gradckpt.stats()["uncompressed"] == {}
    assert gradckpt.stats()["live_bytes"] == 0
    del y, again, y2


# ---- surroundings ----


@pytest.mark.parametrize("make", [fitting, hostile])
def test_outer_hooks(make):
    x = make()
    with save_on_cpu():
        y = run(x)
    for _ in range(2):
        assert torch.equal(gradient(y, x), gradient(x.sin(), x))
        _C.settle_overflow()


def test_payload_dies_first():
    x = hostile()
    for _ in range(5000):  # more than there are words
        del_me = gradckpt.codecs.encode(x, "lossless")
    original = weakref.ref(x)
    del x, del_me
    assert original() is None
    _C.settle_overflow()
    gradckpt.stats()


def test_encode_for_users():
    x = hostile().detach()
    payload = gradckpt.codecs.encode(x, "lossless")
    assert torch.equal(payload.decode(), x)
    _C.settle_overflow()
    assert torch.equal(payload.decode(), x)
    with pytest.raises(RuntimeError, match="'lossless' cannot hold these values, so the payload keeps the tensor"):
        payload.codes  # noqa: B018
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        payload.decode()
    with torch.inference_mode():
        inference = hostile().detach().clone()
    payload = gradckpt.codecs.encode(inference, "lossless")
    _C.settle_overflow()
    assert torch.equal(payload.decode(), inference)


def test_letting_go_may_run_python():
    """A callback of the dying original makes and kills payloads:
    the list of pending flags changes meanwhile."""
    others = [gradckpt.codecs.encode(fitting(), "lossless") for _ in range(5)]
    callbacks = []

    def died(reference):
        callbacks.append(reference)
        others.clear()
        others.extend(gradckpt.codecs.encode(fitting(), "lossless") for _ in range(3))
        gradckpt.stats()

    x = fitting()
    reference = weakref.ref(x, died)
    payload = gradckpt.codecs.encode(x, "lossless")
    more = [gradckpt.codecs.encode(fitting(), "lossless") for _ in range(5)]
    del x
    _C.settle_overflow()
    gradckpt.stats()
    assert callbacks == [reference]
    assert all(torch.equal(p.decode(), fitting()) for p in (payload, *more, *others))


def test_nothing_leaks():
    def step():
        for make in (fitting, hostile):
            x = make()
            y = run(x)
            with contextlib.suppress(RuntimeError):
                gradient(y, x)
            _C.settle_overflow()
            gradient(y, x)

    step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        step()
    gc.collect()
    assert len(gc.get_objects()) - before < 20
