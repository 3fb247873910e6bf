"""gradckpt._planning.simulation: operators without values."""

import gc
import itertools
import json
import os
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from small_models import SHAPE_8B
from torch.nn import functional as F

import gradckpt
from gradckpt._planning import simulated_tensors
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._planning.simulation import SimulationMode
from gradckpt._planning.step_trace import trace_step

# ---- no memory is touched

#: Runs steps of families in all settings with addresses that neither can be read nor written:
#: those of a process that may not map as many.
UNTOUCHABLE = """
import sys
import torch
from gradckpt._planning import simulated_tensors, simulation

def refuse(*_):
    raise OSError

simulated_tensors._Mapped = refuse

if "touch" in sys.argv:
    simulation.SimulationMode().empty((4,), (1,), torch.float32).tolist()

import model_families
from model_families import FAMILIES
from gradckpt._planning.plan import plan
torch.manual_seed(0)
for name in ("llama", "gpt2", "bert", "t5", "vit", "mixtral"):
    family = FAMILIES[name]
    model = model_families.build(name, "sdpa").train()
    batch = family.batch()
    found = plan(model, batch)
    assert not any("measured" in text for text in found.about), (name, found.about)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    plan(model, batch)

print("untouched")
"""


def run_untouchable(*arguments):
    return subprocess.run([sys.executable, "-c", UNTOUCHABLE, *arguments], capture_output=True, text=True)


def test_no_memory_is_touched(monkeypatch, pytestconfig):
    helpers = str(pytestconfig.rootpath / "tests" / "helpers")
    monkeypatch.setenv("PYTHONPATH", f"{pytestconfig.rootpath}:{helpers}")
    out = run_untouchable()
    assert (out.returncode, out.stdout) == (0, "untouched\n"), out.stderr[-3000:]
    assert run_untouchable("touch").returncode < 0, "reads do not crash: the test proves nothing"


# ---- values


@pytest.fixture
def mode():
    return SimulationMode()


def simulated(mode, *shape, dtype=torch.float32):
    return mode.like(torch.empty(shape, dtype=dtype, device="meta"))


def test_small_tensors_of_the_step_keep_their_values(mode):
    with mode:
        ids = torch.arange(6).view(2, 3)
        mask = ids > 2
        assert mask.any()
        assert ids.sum().item() == 15
        assert mask.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
        ids[0, 0] = 7
        ids += 1
        assert ids.tolist() == [[8, 2, 3], [4, 5, 6]]
        out = torch.empty(2, 3, dtype=torch.long)
        torch.add(ids, ids, out=out)
        assert out[0].tolist() == [16, 4, 6]
        assert torch.where(mask, 1.0, 0.0).sum().item() == 3
    assert mode.data_dependent  # nonzero


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: numpy.asarray(x),
        lambda x: numpy.from_dlpack(x),
        lambda x: bool(x[0]),
        lambda x: float(x[0]),
        lambda x: repr(x),
        lambda x: x.nonzero(),
        lambda x: torch.ones(2)[x > 0],
        lambda x: torch.unique(x),
    ],
    ids=["item", "tolist", "numpy", "asarray", "dlpack", "bool", "float", "repr", "nonzero", "mask", "unique"],
)
def test_what_has_no_values_is_asked_in_vain(ask):
    with pytest.raises(NotSimulated):
        trace_step(torch.nn.Identity(), lambda x: ask(2 * x), torch.ones(2))


def test_methods_that_read_are_torchs_again(mode):
    with pytest.raises(ZeroDivisionError):
        trace_step(torch.nn.Identity(), lambda x: 1 / 0, torch.ones(2))
    assert not {"tolist", "numpy"} & vars(torch.Tensor).keys()
    assert torch.arange(3).tolist() == [0, 1, 2]


def test_values_are_lost_to_what_has_none(mode):
    """A tensor with values that is written with one without has none, either."""
    x = simulated(mode, 3)
    with mode:
        y = torch.ones(3)
        assert mode.has_values(y)
        y += x
        assert not mode.has_values(y)
        with pytest.raises(NotSimulated):
            y.sum().item()


def test_parameters_in_place_and_views(mode):
    x = simulated(mode, 4, 6)
    address = x.data_ptr()
    with mode:
        before = len(mode.events)
        x.mul_(2).add_(1)
        x.view(24).zero_()
        x.t()[0].fill_(3)
        x[1:].transpose(0, 1)
        torch.mul(x, 2, out=x)
        assert x.data_ptr() == address
        assert sum(event.size for event in mode.events[before:]) == 0
        assert max(event.size for event in mode.events[before:]) == 8  # of a number
        out = torch.empty(0)
        torch.mul(x, 2, out=out)
        assert out.shape == x.shape


# ---- allocations and releases


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_allocate_what_the_profiler_reports(form, channels, bias):
    model = torch.nn.Conv2d(channels, 16, 3, bias=bias).to(memory_format=form)
    x = torch.randn(2, channels, 20, 20).to(memory_format=form)

    def run(x):
        model(x).square().mean().backward()

    def peak():
        with gradckpt.track_memory() as memory:
            run(x)
        return memory

    run(x)
    trace = trace_step(model, run, x)
    assert sum(size for segment in trace.segments for size, _ in segment.events) == 0
    assert trace.peak().size == pytest.approx(peak().peak, rel=1e-3)


@pytest.mark.parametrize("tokens", [16, 128, 256, 800])
@pytest.mark.parametrize("is_view", [True, False], ids=["of a product", "contiguous"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_attention_allocates_what_the_profiler_reports(is_view, tokens, threads, dtype):
    if dtype is torch.float64 and torch.__version__ < "2.13":
        pytest.skip("simulated, this torch's log-sum-exp of float64 is float32")
    linear = torch.nn.Linear(64, 64, dtype=dtype)
    x = torch.randn(2, tokens, 64, requires_grad=True, dtype=dtype)

    def run(x):
        heads = linear(x).view(2, tokens, 2, 32).transpose(1, 2)
        heads = heads if is_view else heads.contiguous()
        found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        (found.transpose(1, 2).reshape(2, tokens, 64) if is_view else found).square().mean().backward()

    present = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(x)
        linear.zero_grad()
        with gradckpt.track_memory() as memory:
            run(x)
        linear.zero_grad()
        scratch = 24_000 if dtype is torch.bfloat16 else 0  # of one of oneDNN's products
        error = 0.1 if scratch else 0
        assert trace_step(linear, run, x).peak().size == pytest.approx(memory.peak, rel=error, abs=scratch)
    finally:
        torch.set_num_threads(present)


def test_attention_without_dropout_draws_nothing():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)

    def states(dropout):
        model = torch.nn.Sequential(*(Block() for _ in range(4)))
        for block in model:
            block.dropout = dropout
        x = torch.randn(1, 1, 16, 32, requires_grad=True)
        gradckpt.enable(model, None, modules=Block)
        trace = trace_step(model, lambda x: model(x).square().mean().backward(), x)
        sizes = [size for segment in trace.segments for size, _ in segment.events]
        return sizes.count(torch.get_rng_state().nbytes)

    assert states(0.0) == 1
    assert states(0.1) >= 4


def test_gradients_of_several_uses_are_summed_in_place(mode):
    """As without a mode: the same tensors are allocated, in the same order."""

    def backward(x):
        y = x * 2
        z = y + y.sin()  # the first gradient of y is that of z, too
        loss = (z.cos() + z.exp() + y.tanh() + y.view(10, 100).t().sin().t().reshape(1000)).sum()
        del y, z
        return loss.backward

    run = backward(torch.ones(1000, requires_grad=True))
    with gradckpt.track_memory() as memory:
        run()
    totals = [0, *(point.total for point in memory.timeline)]
    expected = [b - a for a, b in itertools.pairwise(totals) if b - a >= 4000]
    with mode:
        run = backward(simulated(mode, 1000).requires_grad_())
        before = len(mode.events)
        run()
    assert [event.size for event in mode.events[before:] if event.size >= 4000] == expected


def test_a_sum_of_a_function_is_not_in_place(mode):
    class Plus(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            total = gradient + gradient.clone()
            seen.append(total.data_ptr() == gradient.data_ptr())
            return total

    seen = []
    with mode:
        x = simulated(mode, 8).requires_grad_()
        Plus.apply(x * 2).sin().sum().backward()
    assert seen == [False]


def test_nothing_is_left_when_the_mode_is_gone():
    def run():
        mode = SimulationMode()
        model = torch.nn.Linear(8, 8)
        trace_step(model, lambda x: model(x).sum().backward(), torch.ones(2, 8))
        with mode:
            kept = simulated(mode, 4).requires_grad_() * 2
        return kept

    run()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(5):
        kept = run()
        del kept
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert not [x for x in gc.get_objects() if type(x) is SimulationMode]


def test_addresses_are_free_again():
    """Each mode maps them anew; none is left mapped."""
    for _ in range(40):  # of 2**44 bytes, of which a process has 2**47
        SimulationMode()


def test_addresses_begin_again(monkeypatch):
    monkeypatch.setattr(simulated_tensors, "_ADDRESSES", 2**20)
    mode = SimulationMode()
    for _ in range(5):
        assert simulated(mode, 100_000).numel() == 100_000


#: A process that may have 8 GiB of addresses more than torch takes.
LIMITED = """
import resource
import torch, transformers
from transformers.utils import logging
import gradckpt
logging.set_verbosity_error()
from model_families import FAMILIES, build
from gradckpt._planning.command import main
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, 2 * (pages * resource.getpagesize() + 8 * 2**30,))
model, batch = build("llama", "sdpa").train(), FAMILIES["llama"].batch()
assert not any("measured" in text for text in gradckpt.plan(model, batch).about)
handle = gradckpt.enable(model, budget="activations:1.2MiB")
model(**batch).loss.backward()
print("planned", handle)
sys_exit = main([CONFIG, "--tokens", "131072", "--memory", "80GiB"])
assert sys_exit in (0, 1), sys_exit
"""


def test_a_process_with_few_addresses(tmp_path):
    """As under ``ulimit -v``: a simulated step maps nothing that is larger."""
    shape = {**SHAPE_8B, "num_hidden_layers": 2, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "architectures": ["LlamaForCausalLM"]}))
    code = LIMITED.replace("CONFIG", repr(str(tmp_path)))
    helpers = os.path.join(os.path.dirname(__file__), "..", "helpers")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), helpers])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "planned <gradckpt handle" in done.stdout
    assert "The least that is needed" in done.stdout or "fit" in done.stdout


def test_a_mask_with_values_that_is_saved_again():
    """A device compares payloads where they lie; a small mask has values, and is the host's."""

    def run(x):
        mask = torch.ones(64, 64, dtype=torch.bool).triu()
        with gradckpt.compress_saved("int8"):
            for _ in range(4):
                x = 2 * x.masked_fill(mask, 0.0) * x
        x.sum().backward()

    x = torch.empty(4, 64, 64, device="meta").requires_grad_()
    assert trace_step(torch.nn.Identity(), run, x, cuda=True).peak().size >= x.nbytes


# ---- other threads


def test_other_threads_compute():
    """Compression in another thread writes real payloads while a step is simulated."""
    inside, done = threading.Event(), threading.Event()
    found = {}

    def work():
        inside.wait(20)
        torch.manual_seed(0)
        x = torch.randn(512, 64, requires_grad=True)
        gradckpt.checkpoint(torch.sin, x * 1, compress="int8").sum().backward()
        found["gradient"] = x.grad
        found["values"] = torch.arange(3).tolist()
        done.set()

    def run(x):
        y = gradckpt.checkpoint(torch.sin, 2 * x, compress="int8")
        inside.set()
        assert done.wait(20)
        y.sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    trace_step(torch.nn.Identity(), run, torch.ones(512, 64, requires_grad=True))
    thread.join()
    torch.manual_seed(0)
    expected = torch.randn(512, 64).cos()
    torch.testing.assert_close(found["gradient"], expected, atol=0.05, rtol=0)
    assert found["values"] == [0, 1, 2]
