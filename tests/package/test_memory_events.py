"""track_memory() on events as torch's profiler gives them where a GPU is: several devices, a
backward on a thread of its own. No GPU is needed; what the fields mean was read in torch's sources
(CUDACachingAllocator.cpp)."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

import gradckpt
from gradckpt import _allocations, track_memory
from gradckpt._memory import _result

MAIN, DEVICE = 1, 2


class Feed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tree:
    """Events in the form of ``experimental_event_tree()``; each has a time of its own."""

    def __init__(self):
        self.clock = itertools.count(1_000_000, 1000)
        self.roots = []
        self.to = self.roots
        self.totals = {}
        self.mark("start")

    def add(self, name, fields, thread=MAIN):
        event = SimpleNamespace(name=name, typed=(None, fields), start_tid=thread, children=[])
        event.start_time_ns = event.end_time_ns = next(self.clock)
        self.to.append(event)
        return event

    def mark(self, text, thread=MAIN):
        self.add("gradckpt." + text, SimpleNamespace(), thread)

    def memory(self, size, address, device="cuda:0", thread=MAIN):
        self.totals[device] = self.totals.get(device, 0) + size
        fields = SimpleNamespace(alloc_size=size, ptr=address, device=device, total_allocated=self.totals[device])
        self.add("[memory]", fields, thread)

    def within(self, name, number, do, thread=MAIN):
        event = self.add(name, SimpleNamespace(sequence_number=number), thread)
        outer, self.to = self.to, event.children
        do()
        self.to, event.end_time_ns = outer, next(self.clock)

    def node(self, name, number, do=lambda: None, thread=DEVICE):
        self.within(
            f"autograd::engine::evaluate_function: {name}",
            number,
            lambda: self.within(name, number, do, thread),
            thread,
        )

    def devices(self):
        found = _allocations.analyse(_allocations.read(self.roots))
        return {device: _result(device, *one) for device, one in found.items()}


def test_a_gpu_counts_what_was_there_before():
    tree = Tree()
    tree.totals["cuda:0"] = 10_000  # parameters
    tree.within("aten::mm", 0, lambda: tree.memory(512, 1))
    tree.within("aten::mm", 1, lambda: tree.memory(1024, 2))
    tree.memory(-1024, 2)
    tree.memory(-4096, 77)  # a gradient of the step before
    tree.within("aten::mm", 1, lambda: tree.memory(512, 2))
    found = tree.devices()["cuda:0"]
    assert [point.total for point in found.timeline] == [10_512, 11_536, 10_512, 6_416, 6_928]
    assert [point.saves for point in found.timeline] == [512, 512, 512, 512, 1024]
    assert [point.transient for point in found.timeline] == [0, 1024, 0, 0, 0]
    assert [point.other for point in found.timeline] == [10_000, 10_000, 10_000, 5_904, 5_904]
    assert found.peak == 11_536
    assert str(found).startswith("cuda:0: peak 11.27 KiB, at 0.000 s\n")


def test_each_device_is_by_itself_and_a_gpu_comes_first():
    tree = Tree()
    tree.memory(9_000, 5, "cpu")
    tree.memory(100, 5, "cuda:0")
    tree.memory(300, 5, "cuda:1")
    memory = track_memory()
    memory._devices = tree.devices()
    assert {device: one.peak for device, one in memory.devices.items()} == {"cpu": 9000, "cuda:0": 100, "cuda:1": 300}
    assert (memory.device, memory.peak, memory.timeline[0].total) == ("cuda:1", 300, 300)
    assert [line.split(":")[0] for line in str(memory).splitlines() if "peak" in line] == ["cuda", "cpu", "cuda"]
    assert str(memory).startswith("cuda:1: peak 300 B")


def test_a_backward_on_the_threads_of_its_device():
    tree = Tree()
    tree.mark("enter net")
    tree.within("aten::mm", 5, lambda: tree.memory(100, 1))
    tree.mark("boundaries cuda:0 1,cpu 1")
    tree.within("aten::mm", 6, lambda: tree.memory(200, 2))
    tree.within("aten::relu", 7, lambda: tree.memory(300, 3))
    tree.mark("leave net")
    tree.memory(-300, 3)
    tree.node("MmBackward0", 6, lambda: (tree.memory(40, 4, thread=DEVICE), tree.memory(-200, 2, thread=DEVICE)))
    tree.node("MmBackward0", 5, lambda: tree.memory(50, 5, thread=DEVICE))
    tree.memory(-40, 4, thread=DEVICE)  # after the last node
    tree.node("AccumulateGrad", -1, lambda: tree.memory(-100, 1, thread=DEVICE))
    tree.within("aten::add_", -1, lambda: None)
    found = tree.devices()["cuda:0"]
    top = found.timeline[-3]
    assert [max(getattr(point, kind) for point in found.timeline) for kind in _allocations.KINDS] == [
        100,
        200,
        300,
        50,
        0,
    ]
    assert (top.transient, top.gradients) == (40, 50)
    assert found.by_region == {"net": 600}


def test_numbers_of_a_recompute_are_those_of_its_thread():
    """Autograd counts on each thread from 0:
    the recompute's operators have numbers that the forward's have, too."""
    tree = Tree()
    for name, number in (("first", 0), ("second.last", 1)):
        tree.mark("enter " + name)
        tree.within("aten::mm", number, lambda: None)
        tree.mark("leave " + name)

    def recompute():
        tree.mark("enter second.inner", DEVICE)
        tree.within("aten::mm", 0, lambda: None, DEVICE)
        tree.mark("leave second.inner", DEVICE)
        tree.within("aten::add", 1, lambda: tree.memory(7, 7, thread=DEVICE), DEVICE)  # of the region itself
        tree.memory(1, 1, thread=DEVICE)  # of the node around it

    tree.node("MmBackward0", 1, recompute)
    tree.node("AddBackward0", 1, lambda: tree.memory(10, 10, thread=DEVICE))
    tree.node("MmBackward0", 0, lambda: tree.memory(100, 100, thread=DEVICE))
    tree.node("MmBackward0", 0, lambda: tree.memory(1000, 1000, thread=DEVICE))
    tree.node("AccumulateGrad", -1, lambda: tree.memory(10_000, 10_000, thread=DEVICE))
    assert tree.devices()["cuda:0"].by_region == {"first": 11_000, "second.inner": 100, "second": 17, "second.last": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_another_thread_released_ends_when_its_address_is_used_again(device):
    tree = Tree()
    tree.memory(100, 1, device)
    tree.totals[device] -= 100
    tree.memory(60, 1, device)
    found = tree.devices()[device]
    assert [point.total for point in found.timeline] == [100, 60]
    assert [point.transient for point in found.timeline] == [100, 0]


def test_a_cpu_tells_of_older_memory_only_what_an_earlier_profiler_saw_and_that_does_not_count():
    tree = Tree()
    tree.memory(-500, 9, "cpu")
    assert tree.devices() == {}
    tree.memory(100, 1, "cpu")
    assert [point.total for point in tree.devices()["cpu"].timeline] == [100]


def test_two_backwards_are_told_apart_by_what_is_between():
    tree = Tree()
    tree.node("MmBackward0", 0, lambda: tree.memory(10, 1, thread=DEVICE))
    tree.within("aten::mm", -1, lambda: None)
    tree.node("MmBackward0", 1, lambda: tree.memory(-10, 1, thread=DEVICE))
    tree.node("MmBackward0", 2, lambda: tree.memory(20, 2, thread=DEVICE))
    tree.node("MmBackward0", 3, lambda: tree.memory(-20, 2, thread=DEVICE))
    found = tree.devices()["cuda:0"].timeline
    assert [(point.gradients, point.transient) for point in found] == [(10, 0), (0, 0), (0, 20), (0, 0)]


def test_a_module_that_was_left_by_no_mark_ends_with_the_one_around_it():
    tree = Tree()
    for text in ("enter net", "enter net.inner", "leave net"):
        tree.mark(text)
    tree.memory(10, 1)
    assert tree.devices()["cuda:0"].by_region == {_allocations.OUTSIDE: 10}


def test_a_module_that_no_hook_has_left_ends_with_its_node():
    tree = Tree()
    tree.within("aten::mm", 0, lambda: None)
    tree.node("MmBackward0", 0, lambda: tree.mark("enter net", MAIN), thread=MAIN)
    tree.memory(10, 1)
    assert tree.devices()["cuda:0"].by_region == {_allocations.OUTSIDE: 10}


@pytest.mark.parametrize("budget", ["activations:1800KiB", "activations:1GiB"])
def test_a_simulated_step_is_no_memory(budget):
    """The first call under a budget simulates the step in each option: where the process has
    another thread, in the process itself."""
    net = torch.nn.Sequential(*(Feed() for _ in range(8)))
    batch = torch.randn(512, 32, requires_grad=True)
    gradckpt.enable(net, budget=budget)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with gradckpt.track_memory(net) as memory:
            net(batch).sum().backward()
    finally:
        done.set()
        other.join()
    assert 0 < memory.peak < 2 * 2**20  # without checkpointing 5 MiB
    assert all(size >= 0 for size in memory.by_kind.values())
    assert memory.by_region.keys() <= {"(outside the model)", "Sequential", *dict(net.named_modules())}


def test_what_is_released_while_a_step_is_simulated_is_released():
    tree = Tree()
    tree.memory(100, 1, "cpu")
    tree.mark("simulation")
    tree.memory(1000, 2, "cpu")
    tree.memory(-100, 1, "cpu")
    tree.memory(7, 3, "cpu", DEVICE)  # another thread's
    tree.mark("end of simulation")
    tree.memory(-1000, 2, "cpu")
    tree.memory(10, 2, "cpu")
    (cpu,) = tree.devices().values()
    assert [point.total for point in cpu.timeline] == [100, 0, 7, 17]
