"""Payloads of captured graphs at a place: each launch writes and reads them anew, in memory that
nothing else has."""

import contextlib
import gc
import os
import threading

import pytest
import torch
import virtual_device
import worlds

import gradckpt

LAYERS, ROWS, WIDTH = 6, 16, 128
PAYLOAD = ROWS * WIDTH * 4
#: Small rings that hold less than all payloads, and what is held in them and comes back ahead.
SIZES = [("auto", "auto", 1), ("auto", 0, 0), ("20KiB", 0, 3), ("30KiB", "10KiB", 1)]


pytestmark = pytest.mark.usefixtures("host_codecs")


def place_of(tmp_path, place="cpu", sizes=SIZES[0], **more):
    ring, keep_last, prefetch = sizes
    more |= {"directory": worlds.with_disk(tmp_path)} if place == "disk" else {}
    return gradckpt.Offload(
        place,
        **{"host_budget": "256KiB", "min_bytes": "1B", "ring": ring, "keep_last": keep_last, "prefetch": prefetch}
        | more,
    )


class Work:
    """A chain of layers on a stream of its own, captured as one graph or as two."""

    def __init__(self, codec="raw", offload=None, saved=False, layers=LAYERS):
        torch.manual_seed(0)
        self.weights = [(torch.randn(WIDTH, WIDTH) / 11).to("virtual").requires_grad_() for _ in range(layers)]
        self.x = torch.randn(ROWS, WIDTH).to("virtual").requires_grad_()
        self.side = torch.Stream(device="virtual")
        self.codec, self.offload, self.saved = codec, offload, saved
        self.graphs = []
        torch.virtual.synchronize()

    def forward(self, offload):
        h = self.x * 1
        with gradckpt.compress_saved(self.codec, offload=offload) if self.saved else contextlib.nullcontext():
            for w in self.weights:
                h = self.layer(lambda t, w=w: torch.tanh(t @ w), h, offload)
        return h.square().mean()

    def layer(self, function, h, offload):
        if self.saved:
            return function(h)
        return gradckpt.checkpoint(function, h, compress=self.codec, preserve_rng_state=False, offload=offload)

    def captured(self):
        self.graphs.append(virtual_device.Graph())
        return virtual_device.graph(self.graphs[-1], self.side)

    def gradients(self, loss):
        return torch.autograd.grad(loss, [self.x, *self.weights], retain_graph=True)

    def warm(self):
        with self.side:
            self.gradients(self.forward(self.offload))
        torch.virtual.synchronize()

    def capture_step(self):
        """The gradients of a step, which is one graph."""
        with self.captured():
            return self.gradients(self.forward(self.offload))

    def other_input(self, seed):
        torch.virtual.synchronize()
        with torch.no_grad():
            self.x.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))
        torch.virtual.synchronize()

    def expected(self):
        """Gradients without a graph and without a place."""
        with self.side:
            found = self.gradients(self.forward(None))
        torch.virtual.synchronize()
        return [g.cpu() for g in found]

    def launch(self):
        with self.side:
            for graph in self.graphs:
                graph.replay()
        torch.virtual.synchronize()

    def check(self, *found, seeds=(1,)):
        """The graphs give the gradients of each of these inputs, in each of ``found``."""
        for seed in seeds:
            self.other_input(seed)
            self.launch()
            want = self.expected()
            assert all(same(each, want) for each in found)

    def end(self):
        for graph in self.graphs:
            graph.reset()
        gc.collect()


@pytest.fixture(autouse=True)
def _graphs_end(monkeypatch):
    """Those of all works of a test."""
    works, make = [], Work.__init__

    def made(work, *args, **options):
        works.append(work)
        make(work, *args, **options)

    monkeypatch.setattr(Work, "__init__", made)
    yield
    for work in works:
        work.end()
    assert virtual_device.kernel_errors() == 0


def same(found, want):
    torch.virtual.synchronize()
    return all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))


def let_python_free():
    """What ended graphs had: the main thread does it when it is next at leisure."""
    sum(range(10_000))


def offloaded():
    return gradckpt.stats()["offload"]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("codec", [None, "int8", "raw"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_whole_step(tmp_path, sizes, codec, warm):
    gradckpt.stats.reset()
    work = Work(codec, place_of(tmp_path, sizes=sizes))
    if warm:
        work.warm()
    work.check(work.capture_step(), seeds=range(3))
    assert offloaded()["copies_in"] > 0


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("saved", "codec"), [(False, "int8"), (True, "raw")])
def test_forward_and_backward_apart(tmp_path, place, sizes, saved, codec):
    """As torch.cuda.make_graphed_callables() does."""
    work = Work(codec, place_of(tmp_path, place, sizes), saved)
    work.warm()
    with work.captured():
        loss = work.forward(work.offload)
    with work.captured():
        found = work.gradients(loss)
    work.check(found, seeds=range(3))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_captured_forward_and_plain_backwards(tmp_path, sizes):
    """What a backward brought into the ring is not there any more after the next launch."""
    work = Work("raw", place_of(tmp_path, sizes=sizes))
    work.warm()
    with work.captured():
        loss = work.forward(work.offload)
    gradckpt.stats.reset()
    for seed in range(4):
        work.other_input(seed)
        work.launch()
        with work.side:
            found = [work.gradients(loss) for _ in range(2)]
        want = work.expected()
        assert same(found[0], want)
        assert same(found[1], want)
    assert offloaded()["copies_in"] <= 4 * 2 * LAYERS  # none comes ahead of another launch


def test_steps_between_launches_use_other_memory(tmp_path):
    """On the same place, with payloads that wait across a launch."""
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1)))
    work.warm()
    found = work.capture_step()
    for seed in range(3):
        work.other_input(seed)
        want = work.expected()
        with work.side:
            waiting = work.forward(work.offload)
        work.launch()
        with work.side:
            plain = work.gradients(waiting)
        assert same(found, want)
        assert same(plain, want)


def test_two_graphs_in_turn(tmp_path):
    place = place_of(tmp_path, sizes=("20KiB", 0, 1))
    works = [Work("raw", place), Work("int8", place)]
    found = []
    for work in works:
        work.warm()
        found.append(work.capture_step())
    for seed in range(3):
        for work, gradients in zip(works, found, strict=True):
            work.check(gradients, seeds=[seed])


def test_several_batches_in_one_capture_share_host_memory(tmp_path):
    gradckpt.stats.reset()
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1), host_budget="1MiB"))
    with work.captured():
        found = [work.gradients(work.forward(work.offload)) for _ in range(3)]
    assert offloaded()["memory_peak"] == LAYERS * PAYLOAD
    work.check(*found, seeds=range(2))


@pytest.mark.parametrize("ring", ["20KiB", "1MiB"])
def test_forwards_without_a_backward_in_one_capture(tmp_path, ring):
    """Copies out of two of them into the same memory, which nothing was read from between."""
    work = Work("raw", place_of(tmp_path, sizes=(ring, 0, 1), host_budget="1MiB"))
    with work.captured():
        for _ in range(3):
            loss = work.forward(work.offload)
        found = work.gradients(loss)
    work.check(found)


@pytest.mark.parametrize("first", ["graph", "payloads"])
def test_memory_comes_back_when_the_graph_is_gone(tmp_path, first):
    """And not before; on whatever thread that is."""
    work = Work("raw", place_of(tmp_path, sizes=("auto", 0, 1)))
    before = offloaded()
    with work.captured():
        loss = work.forward(work.offload)
    used = offloaded()["memory_used"]
    assert used >= before["memory_used"] + (LAYERS - 1) * PAYLOAD
    if first == "payloads":
        del loss
        gc.collect()
        assert offloaded()["memory_used"] == used
    thread = threading.Thread(target=work.end)
    thread.start()
    thread.join()
    if first == "graph":
        assert offloaded()["memory_used"] == used
        del loss
        gc.collect()
    let_python_free()
    assert [offloaded()[name] for name in ("memory_used", "ring")] == [before[name] for name in ("memory_used", "ring")]


def test_a_graph_that_reads_holds_the_memory_too(tmp_path):
    """A backward graph may outlive that of its forward."""
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1)))
    before = offloaded()["memory_used"]
    with work.captured():
        loss = work.forward(work.offload)
    with work.captured():
        found = work.gradients(loss)
    del loss
    work.launch()
    want = [g.cpu() for g in found]
    used = offloaded()["memory_used"]
    work.graphs.pop(0).reset()
    let_python_free()
    assert offloaded()["memory_used"] == used
    work.warm()  # other steps use what is free
    work.launch()
    assert same(found, want)
    work.end()
    let_python_free()
    assert offloaded()["memory_used"] == before


def test_memory_that_a_step_still_uses_is_waited_for(tmp_path):
    """By the host: a stream that is captured cannot wait for work from before."""
    work = Work("raw", place_of(tmp_path, sizes=("1MiB", 0, 1), host_budget=f"{PAYLOAD}B"), layers=1)
    graph = virtual_device.Graph()
    with work.side:
        work.forward(work.offload)  # nothing waits for its copies
        graph.capture_begin()
        found = work.gradients(work.forward(work.offload))
        graph.capture_end()
    work.graphs.append(graph)
    work.check(found)


def test_a_place_lives_as_long_as_its_graphs(tmp_path):
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1)))
    found = work.capture_step()
    work.offload = None
    for size in ("1MiB", "2MiB"):  # other places take its name
        with work.side:
            work.gradients(work.forward(place_of(tmp_path, host_budget=size)))
    gc.collect()
    work.check(found)


def test_a_captured_backward_of_a_forward_before_it_is_refused(tmp_path):
    work = Work("raw", place_of(tmp_path))
    with work.side:
        loss = work.forward(work.offload)
    torch.virtual.synchronize()
    with pytest.raises(RuntimeError, match="offloaded before the capture; capture the forward, too"), work.captured():
        work.gradients(loss)
    virtual_device.reports()


def test_what_host_memory_does_not_hold_stays_on_the_device(tmp_path):
    gradckpt.stats.reset()
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1), host_budget=f"{3 * PAYLOAD}B"))
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="no room is left"):
        found = work.capture_step()
    assert offloaded()["kept"] == LAYERS - 3
    work.check(found)


@pytest.mark.filterwarnings("ignore:.*leaves payloads", "ignore:.*pins only", "ignore:.*nothing was compressed")
def test_each_call_of_the_link_fails_in_a_capture(tmp_path):
    """The capture raises, or what it captured is right."""
    place = place_of(tmp_path, sizes=("12KiB", 0, 1))
    virtual_device.link_fails()
    calls, call, raised = 1, 0, 0
    while call < calls:
        call += 1
        work = Work("raw", place, layers=3)
        virtual_device.link_fails(call)
        try:
            found = work.capture_step()
        except RuntimeError:
            raised += 1
            virtual_device.link_fails()
            work.end()
            continue
        calls = max(calls, virtual_device.link_fails())
        work.check(found, seeds=[call])
        work.end()
    assert call > 50
    assert raised > 0
    work = Work("raw", place, layers=3)
    work.check(work.capture_step())


def test_graphs_end_while_the_main_thread_waits(tmp_path):
    """Their memory is free when another capture wants it."""
    work, used = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1))), []

    def run():
        for _ in range(4):
            work.capture_step()
            used.append(offloaded()["memory_used"])
            work.end()

    gradckpt.stats.reset()
    before = offloaded()["memory_used"]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert used == [before + LAYERS * PAYLOAD] * 4
    assert offloaded()["copies_in"] == 4 * LAYERS


def test_memory_that_cannot_be_pinned_serves_no_graph(tmp_path):
    work = Work("raw", place_of(tmp_path, sizes=("20KiB", 0, 1), host_budget="128KiB"))
    virtual_device.link_refuses_to_pin(True)
    try:
        with pytest.warns(gradckpt.GradckptInactiveWarning, match="refuses to pin"):
            found = work.capture_step()
    finally:
        virtual_device.link_refuses_to_pin(False)
    work.check(found)


def test_a_child_that_was_forked_reads_nothing_of_its_parents(tmp_path):
    """Also where it has used the place itself."""
    pack, unpack = gradckpt.compress_saved("raw", offload=place_of(tmp_path, sizes=("20KiB", 0, 1))).hooks
    leaf = torch.ones(ROWS, WIDTH).to("virtual").requires_grad_()
    packed = pack(leaf * 1)
    torch.virtual.synchronize()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pack(leaf * 2)
            unpack(packed)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    assert b"this process was forked" in os.read(reader, 4096)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
