"""The device of benchmarks/gpu.py's stages, and what its story does with memory: limits, the
longest sequence."""

import sys
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT
from gpu_jobs import Card, job_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_device
import gpu_llama
import gpu_story
import gpu_ways
from gpu_job import Skip, difference


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path)


def test_a_device_says_what_it_has_not():
    cpu = gpu_device.Device("cpu")
    assert cpu.missing("graphs") == "the CPU has no graphs"
    assert cpu.missing("a limit of its memory") == "the CPU has no limit of its memory"
    card = Card("cpu")
    card.kind, card.module = "other", SimpleNamespace(_sleep=1)
    with pytest.raises(RuntimeError, match="has no CUDAGraph"):
        card.missing("graphs")
    assert card.missing("a delay on a stream") is None
    with pytest.raises(SystemExit, match="--device nothing: "):
        gpu_device.Device("nothing")


def test_the_device_of_the_tests_is_named_where_it_is_absent(monkeypatch):
    monkeypatch.setattr(gpu_device, "REGISTERS", "no_such_device")
    monkeypatch.delattr(torch, "virtual", raising=False)
    with pytest.raises(SystemExit, match=r"--device virtual needs tests/helpers/no_such_device.py"):
        gpu_device.Device("virtual")


def test_memory_of_a_run():
    cpu = gpu_device.Device("cpu")
    found = cpu.memory_of(lambda: torch.empty(1 << 20).fill_(1))
    assert (1 << 22) <= found.allocated < (1 << 23)
    assert found.needed is None
    assert cpu.fits(lambda: torch.empty(1 << 20).fill_(1), 1 << 23)
    assert not cpu.fits(lambda: torch.empty(1 << 20).fill_(1), 1 << 21)


class Pool:
    """An allocator with a limit and figures, for what a device with them does."""

    def __init__(self):
        self.share = 1.0

    memory_allocated = staticmethod(lambda: 5)
    max_memory_allocated = staticmethod(lambda: 30)
    memory_reserved = max_memory_reserved = staticmethod(lambda: 40)
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)

    def mem_get_info(self):
        return 60, 100

    def set_per_process_memory_fraction(self, share):
        self.share = share

    def synchronize(self):
        pass


def test_a_limit_is_taken_back():
    """After a step that ends, one that runs out of memory, and another error."""
    device = gpu_device.Device("cpu")
    device.kind, device.module = "pool", Pool()

    def step(needs):
        if needs > device.module.share * 100:
            raise torch.OutOfMemoryError("out of memory")

    assert device.fits(lambda: step(30), 40)
    assert not device.fits(lambda: step(50), 40)
    with pytest.raises(RuntimeError, match="something else"):
        device.fits(lambda: (_ for _ in ()).throw(RuntimeError("something else")), 40)
    assert device.module.share == 1.0
    assert device.memory_of(lambda: None) == (30, 40, 5)


def test_the_least_limit_is_bisected(job):
    """Between what a step has allocated and what was taken for it."""
    story = gpu_story.Story(job, gpu_llama.Sizes(1, 128), 16)
    story.device.kind, story.device.module = "pool", Pool()

    def step():
        if story.device.module.share * 100 < 33.3:
            raise torch.OutOfMemoryError("out of memory")

    story.step = step
    scale = 1000
    story.device.module.mem_get_info = lambda: (0, 100 * scale)
    found = story.least_limit({"needed": 40 * scale, "peak": 30 * scale})
    assert 33.3 * scale <= found <= 33.3 * scale + 10 * scale / 2**gpu_story.BISECTIONS + 1
    assert story.least_limit({"needed": None, "peak": 30}) is None


@pytest.mark.parametrize("each", [70, 90])
def test_the_longest_sequence_is_found(each, job, monkeypatch):
    """The first guess is below or above what fits."""
    story = gpu_story.Story(job, gpu_llama.Sizes(2, 128), 64)
    story.limit, job.small = 100_000, False
    lengths = []

    def noted(count, kind):
        lengths.append(count)
        return torch.zeros(1, 8, dtype=torch.long)

    monkeypatch.setattr(gpu_llama, "batch", noted)
    monkeypatch.setattr(story.device, "fits", lambda run, limit: lengths[-1] * 80 <= limit, raising=False)
    monkeypatch.setattr(gpu_story, "GRAIN", 1)
    found = story.longest({"needed": None, "peak": each * 64, "before": 0})
    assert found in lengths
    assert 1250 / gpu_story.STEP - 1 <= found <= 1250


def test_gradients_that_are_zero_compare_with_nothing():
    with pytest.raises(RuntimeError, match="zero"):
        difference([torch.ones(2)], [torch.zeros(2)])
    assert difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 1.0])]) == pytest.approx(0.5**0.5)


def test_ways_that_are_absent_say_why(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_remat", None)
    model = gpu_llama.build(gpu_llama.Sizes(1, 128), "cpu")
    setting = gpu_ways.Setting(job, model, gpu_llama.batch(16, "cpu"), {})
    with pytest.raises(Skip, match="torch_remat is not installed"):
        gpu_ways.by_remat(setting)
    with pytest.raises(Skip, match="not measured"):
        gpu_ways.by_plan(setting).__enter__()
