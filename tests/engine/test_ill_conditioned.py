"""Operators beside a pole or an edge, where the error of a codec decides, are named once."""

import contextlib
import functools
import gc
import re
import warnings
from pathlib import Path
from typing import ClassVar

import pole_functions as poles
import pytest
import torch
from behaviours import Operators
from processes import in_threads

import gradckpt
from gradckpt import _C, CompressionConfig
from gradckpt._engine import ill_conditioned

CODECS = ("int8", "int6", "int4", "fp8")
HARMLESS = poles.harmless()


@contextlib.contextmanager
def anew():
    before = _C.sample_anew(True)
    yield
    _C.sample_anew(before)


@pytest.fixture(autouse=True)
def _anew():
    """Other tests may have run regions of these kinds."""
    with anew():
        yield


def values():
    torch.manual_seed(0)
    return torch.randn(poles.ROWS, poles.WIDTH, requires_grad=True)


def gradient(case, compress, **options):
    """One step; each value of the result counts, so that no gradients cancel."""
    x = values()
    h = case.inputs(x)
    out = case.function(h) if compress is None else gradckpt.checkpoint(case.function, h, compress=compress, **options)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return x.grad


def named(step, steps=1):
    """What was said, and the result of the last step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            out = step()
    return [str(each.message) for each in caught if "gradckpt" in str(each.message)], out


def error_of(found, exact):
    """The relative error; infinite if it is not finite."""
    return ((found - exact).norm() / exact.norm()).nan_to_num(torch.inf).item() if found.isfinite().all() else torch.inf


@pytest.mark.parametrize("name", poles.NEAR_POLES)
def test_a_gradient_is_as_good_as_with_bf16_or_its_operator_is_named_once(name):
    case = poles.NEAR_POLES[name]
    exact = gradient(case, None)
    bf16 = error_of(gradient(case, "bf16"), exact)
    assert exact.isfinite().all()
    for codec in CODECS:
        texts, found = named(lambda codec=codec: gradient(case, codec), steps=2)
        assert len(texts) <= 1
        assert texts or error_of(found, exact) <= 3 * bf16, (codec, error_of(found, exact), bf16)


@pytest.mark.parametrize("name", poles.NEAR_POLES)
def test_the_line_to_write_helps(name):
    case = poles.NEAR_POLES[name]
    exact = gradient(case, None)
    for codec in CODECS:
        said = [codec]
        with anew():
            texts, found = named(lambda codec=codec: gradient(case, codec))
            while texts:  # bf16 may be named, too
                found = re.findall('compress="?([a-zN0-9]+)', texts[0])
                said += [None if each == "None" else each for each in found]
                assert len(set(said)) == len(said), said
                texts, found = named(functools.partial(gradient, case, said[-1]))
        assert error_of(found, exact) < 0.15, said


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_is_not_named(name):
    for codec in (*CODECS, "bf16"):
        assert named(lambda codec=codec: gradient(HARMLESS[name], codec))[0] == []


# ---- the text ----


def log_of(p):
    return p.log()


def test_it_says_what_and_where_and_what_to_write():
    (text,), _ = named(lambda: gradient(poles.Case(poles.softmax, log_of), "int8"), steps=3)
    line = log_of.__code__.co_firstlineno + 1
    assert text == (
        f"gradckpt: log ({__file__}:{line}) in log_of leaves its domain on values of int8, so gradients are not "
        'finite; pass compress="bf16" there, or move it out'
    )


def test_it_says_how_far_the_derivative_is_off():
    (text,), _ = named(lambda: gradient(poles.Case(poles.sigmoid, lambda p: (p + 1e-3).log()), "int8"))
    assert re.search(
        r"log \(.*:\d+\) in .* amplifies the error of int8: its derivative is \d+ % off, with bf16 0\.\d+ %; "
        r'pass compress="bf16" there, or move it out$',
        text,
    )


def test_an_operator_without_a_known_derivative_is_named_by_its_line():
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            ctx.save_for_backward(p.reciprocal())
            return p.log()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    (text,), _ = named(lambda: gradient(poles.Case(poles.softmax, Log.apply), "fp8"))
    assert "an operator (" in text
    assert "pass compress=None there" in text


class Block(torch.nn.Module):
    def forward(self, p):
        return p.log()


def test_a_class_of_modules_is_named_once():
    blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def step(codec):
        for block in blocks:
            gradckpt.checkpoint(block, poles.softmax(values()), compress=codec).sum().backward()

    assert len(named(lambda: step("int8"), steps=3)[0]) == 1
    assert len(named(lambda: step("int4"), steps=3)[0]) == 1  # another codec is another kind
    assert named(lambda: step("int8"))[0] == []


def test_methods_of_one_object_are_kinds_of_their_own():
    class Two:
        def first(self, p):
            return p * 2

        def second(self, p):
            return p.log()

    both = Two()

    def step():
        for method in (both.first, both.second):
            gradckpt.checkpoint(method, poles.softmax(values()), compress="int8").sum().backward()

    assert len(named(step, steps=2)[0]) == 1


def test_none_is_advised_for_dtypes_that_bf16_does_not_take():
    x = poles.softmax(values()).detach().bfloat16().requires_grad_()
    (text,), _ = named(lambda: gradckpt.checkpoint(torch.log, x * 1, compress="int8").sum().backward())
    assert "pass compress=None there" in text


# ---- when it is looked at ----


def test_a_region_without_a_backward_is_not_the_one_that_is_judged():
    case = poles.NEAR_POLES["log of softmax"]

    def forward():
        return gradckpt.checkpoint(case.function, case.inputs(values()), compress="int8")

    assert named(forward, steps=2)[0] == []
    gc.collect()
    assert len(named(lambda: gradient(case, "int8"), steps=2)[0]) == 1


@pytest.mark.parametrize("compress", [None, "lossless", "raw", CompressionConfig("int8", fake_quantize=True)], ids=str)
def test_nothing_is_looked_at_without_a_difference_to_find(compress, monkeypatch):
    monkeypatch.setattr(ill_conditioned.SavedSamples, "note_saved", lambda *args: pytest.fail("a sample was taken"))
    x = values()
    gradckpt.checkpoint(log_of, poles.softmax(x), compress=compress).sum().backward()


def test_the_samples_change_nothing():
    """The first region gives what the second gives, and what it gives without samples."""

    def step():
        torch.manual_seed(5)
        x = values()
        h = poles.softmax(x)
        with torch.autocast("cpu", torch.bfloat16):
            out = gradckpt.checkpoint(lambda p: torch.dropout((p + 1) @ poles.LARGE.T, 0.5, True), h, compress="int8")
        out.float().sum().backward()
        return x.grad, torch.get_rng_state()

    (first, first_rng), (second, second_rng) = step(), step()
    assert torch.equal(first, second)
    assert torch.equal(first_rng, second_rng)


def test_a_backward_inside_a_forward_is_not_the_one_that_is_judged():
    """It reads the originals."""
    case = poles.NEAR_POLES["log of softmax"]

    def outer(s):
        h = case.inputs(s)
        out = gradckpt.checkpoint(case.function, h, compress="int8")
        torch.autograd.grad(out.sum(), h, retain_graph=True)
        return out

    def step():
        gradckpt.checkpoint(outer, values() * 1.0).sum().backward()

    assert len(named(step, steps=2)[0]) == 1


def test_modes_see_no_samples():
    def step():
        with Operators() as seen:
            gradient(HARMLESS["RMSNorm by hand"], "int8")
        return seen.names

    assert step() == step()


class Tagged(torch.Tensor):
    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(str(func))
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def test_no_samples_are_taken_of_subclasses():
    weight = torch.rand(poles.WIDTH).as_subclass(Tagged)

    def step():
        Tagged.asked.clear()
        gradient(poles.Case(poles.same, lambda h: h * weight), "int8")
        return list(Tagged.asked)

    first = step()
    assert first
    assert first == step()


def test_what_an_inner_region_saves_is_not_taken_for_its_own():
    def inner(a):
        return a.log()

    def outer(h):
        return gradckpt.checkpoint(inner, h.sin() + 2)  # saves h first, which has both signs

    assert named(lambda: gradient(poles.Case(poles.same, outer), "int8"))[0] == []


def test_a_second_backward_says_nothing_new():
    case = poles.NEAR_POLES["log of softmax"]

    def step():
        out = gradckpt.checkpoint(case.function, case.inputs(values()), compress="int8").sum()
        out.backward(retain_graph=True)
        out.backward()

    assert len(named(step)[0]) == 1


def test_threads_take_samples_of_their_own():
    case = poles.NEAR_POLES["sqrt of exp"]

    def work():
        for _ in range(5):
            gradient(case, "int8")

    assert len(named(lambda: in_threads(*4 * [work]))[0]) == 1


def test_a_failing_comparison_is_no_error(monkeypatch):
    for name in ("_sample_of", "_compared", "_poles_behind"):
        with monkeypatch.context() as patch, anew():
            patch.setattr(ill_conditioned, name, lambda *args: 1 / 0)
            texts, _ = named(lambda: gradient(poles.NEAR_POLES["log of softmax"], "int8"))
        assert texts == []


def test_a_warning_that_is_an_error_is_raised_in_backward():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"log .* leaves its domain"):
            gradient(poles.NEAR_POLES["log of softmax"], "int8")
        gradient(poles.NEAR_POLES["log of softmax"], "int8")


def test_verdicts_of_devices_are_read_in_the_next_step(monkeypatch):
    monkeypatch.setattr(ill_conditioned, "_is_read_at_once", lambda device: False)
    case = poles.NEAR_POLES["log of softmax"]
    assert named(lambda: gradient(case, "int8"))[0] == []
    assert len(named(lambda: gradient(HARMLESS["gelu"], "int8"))[0]) == 1
    assert named(lambda: gradient(case, "int8"))[0] == []


def test_nothing_is_looked_at_while_a_graph_is_captured(monkeypatch):
    case = poles.NEAR_POLES["log of softmax"]
    with monkeypatch.context() as patch:
        patch.setattr(ill_conditioned, "_is_capturing", lambda device: True)
        assert named(lambda: gradient(case, "int8"))[0] == []


# ---- policies, gradient_error ----


def test_what_a_policy_keeps_is_looked_at():
    weight = torch.randn(poles.WIDTH, poles.WIDTH) / 16

    def step(policy):
        h = values() * 1.0
        gradckpt.checkpoint(lambda h: (h @ weight).abs().log(), h, policy=policy).sum().backward()

    (text,), _ = named(lambda: step("save_matmuls:int8"), steps=2)
    assert text.endswith('keep "bf16" in its policy, or move it out')
    assert named(lambda: step("save_matmuls:bf16"))[0] == []
    assert named(lambda: step("save_matmuls"))[0] == []


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 64)
        self.block = Block()

    def forward(self, x):
        return self.block(self.head(x).softmax(-1)).square().mean()


def test_gradient_error_names_it_in_any_case():
    torch.manual_seed(0)
    net, batch = Net().train(), {"x": 4 * torch.randn(128, 64)}
    for _ in range(2):
        texts, found = named(lambda: gradckpt.gradient_error(net, batch, ["int8", "bf16"], modules=[Block]))
        assert texts == []  # the report has it
        assert len(found["int8"].amplified) == 1
        assert not found["bf16"].amplified
        assert "in Block.forward leaves its domain on values of int8" in str(found)
    gradckpt.enable(net, "int8", modules=[Block])
    assert len(named(lambda: net(**batch).backward(), steps=2)[0]) == 1  # it took nothing away
    gradckpt.gradient_error(net, batch, ["int8"], modules=[Block])
    assert named(lambda: net(**batch).backward())[0] == []  # and forgot nothing


def test_the_tables_of_poles_are_alike():
    """compress_saved() keeps what these nodes save exactly: csrc/engine/saved/saved_node.c."""
    text = (Path(gradckpt.__file__).parent.parent / "csrc/engine/saved/saved_node.c").read_text()
    arrays = re.findall(r"\*const poles\w*\[\] = \{(.*?)\}", text, re.DOTALL)
    there = {name for array in arrays for name in re.findall(r'"(\w+)"', array)}
    only_there = {"AngleBackward0", "SgnBackward0", "Atan2Backward0"}  # of complex values, and of two arguments
    assert there - only_there <= set(ill_conditioned.POLES)
