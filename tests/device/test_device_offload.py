"""Payloads of the virtual device in host memory and on a disk: the same values, in order, device
memory to the byte, and a link whose calls fail."""

import contextlib
import gc
import time

import pytest
import torch
import virtual_device
from torch import nn

import gradckpt
from gradckpt._engine import places
from gradckpt._engine.places import REGIONS, SAVED, place_of

WIDTH, ROWS, BLOCKS = 64, 256, 8
PAYLOAD = ROWS * WIDTH * 4
SMALL = {"min_bytes": "1KiB"}
CODECS = [None, "int8", "int4", "lossless", "fp8", "bf16", "sparse"]


pytestmark = pytest.mark.usefixtures("host_codecs")


@pytest.fixture(params=["cpu", "disk"])
def offload(request, tmp_path):
    more = {"directory": tmp_path, "host_budget": "256KiB"} if request.param == "disk" else {"host_budget": "64MiB"}
    try:
        made = gradckpt.Offload(request.param, **SMALL, **more)
        place_of(made)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return made


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def net_of(blocks=BLOCKS):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).to("virtual")


def train(net, x, steps=2, **options):
    """Gradients after each step, on the host."""
    found = []
    with gradckpt.enable(net, modules=Block, **options):
        for _ in range(steps):
            net.zero_grad()
            net(x).square().mean().backward()
            found.append([p.grad.cpu() for p in net.parameters()])
    return found


def inputs(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to("virtual").requires_grad_()


def equal(one, other):
    return all(torch.equal(a, b) for u, v in zip(one, other, strict=True) for a, b in zip(u, v, strict=True))


def figures(offload, payloads=REGIONS):
    """Of the place; what a thread writes or a copy is reading is freed a moment later."""
    torch.virtual.synchronize()
    for _ in range(100):
        found = place_of(offload, payloads).figures()
        if nothing_left(found):
            break
        time.sleep(0.005)
    return found


def nothing_left(found):
    return found["memory_used"] == found["file_used"] == found["ring_used"] == 0


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_values_are_those_without(offload, codec, recompute):
    net, x = net_of(), inputs()
    want = train(net, x, compress=codec, recompute=recompute or codec is None)
    got = train(net, x, compress=codec, recompute=recompute, offload=offload)
    assert equal(got, want)
    found = figures(offload, REGIONS if recompute else SAVED)
    assert min(found["copies_out"], found["copies_in"]) > 0 or codec == "sparse"  # dense values need no payload
    assert nothing_left(found)
    assert found["written"] > 0 or codec is not None or offload.place == "cpu"  # payloads take twice the budget


def test_what_a_first_in_last_out_step_does(offload):
    """The newest third of the ring is read where it is; all else was copied in ahead."""
    net, x = net_of(), inputs()
    train(net, x, compress=None, offload=offload)
    found = figures(offload)
    assert found["ring"] == 3 * PAYLOAD
    assert found["read_in_ring"] == 2
    assert found["copies_out"] == found["copies_in"] == 2 * (BLOCKS - 2)  # the first block's input is a leaf
    assert found["misses_out"] == found["misses_in"] == found["kept"] == 0
    if offload.place == "cpu":
        assert found["prefetched"] == found["copies_in"]


def test_device_memory_to_the_byte(offload):
    """Beside what a step without any payload has, it is the ring: in the first step and later."""

    def peak(**options):
        net, x = net_of(), inputs()
        found = []
        with gradckpt.enable(net, None, modules=Block, **options):
            for _ in range(3):
                net.zero_grad(set_to_none=False)
                torch.virtual.synchronize()
                gc.collect()
                torch.virtual.reset_peak_memory_stats()
                before = torch.virtual.memory_allocated()
                net(x).square().mean().backward()
                torch.virtual.synchronize()
                found.append((before, torch.virtual.max_memory_allocated() - before))
        return found

    train(net_of(), inputs(), compress=None)  # gradients and workspaces of the first step
    kept, moved = peak(), peak(offload=offload)
    ring = figures(offload)["ring"]
    away = (BLOCKS - 2) * PAYLOAD  # all but the leaf and what the last block's backward reads at the peak
    assert moved[1][1] < kept[1][1]
    assert kept[1][1] - moved[1][1] >= away - PAYLOAD
    assert moved[1][0] - moved[0][0] == ring + (kept[1][0] - kept[0][0])
    assert moved[2] == moved[1]


def test_pinned_memory_is_taken_once(offload):
    net, x = net_of(), inputs()
    train(net, x, steps=1, compress="int8", offload=offload)
    first = figures(offload)
    train(net, x, steps=3, compress="int8", offload=offload)
    later = figures(offload)
    assert first["pinned"] == first["memory_taken"] == later["pinned"] == later["memory_taken"] > 0
    assert first["pin_calls"] == later["pin_calls"]


def region(n, offload, inputs=1):
    xs = [torch.randn(n, device="virtual").requires_grad_() for _ in range(inputs)]
    function = lambda *a: sum(t.sin() for t in a)  # noqa: E731
    gradckpt.checkpoint(function, *(x * 1 for x in xs), compress=None, offload=offload).sum().backward()


def test_a_ring_that_grew_slowly_has_room_for_the_largest():
    offload = gradckpt.Offload("cpu", host_budget="64MiB", min_bytes="1KiB", keep_last=0)
    for n in range(16, 52, 2):
        region(n * 256, offload)
    found = figures(offload)
    assert found["misses_out"] == 0
    assert found["ring"] < 8 * 50 * 1024
    for _ in range(3):
        region(50 * 256, offload)
    assert figures(offload)["misses_out"] == 0


def test_more_inputs_than_a_ring_holds_all_move():
    offload = gradckpt.Offload("cpu", host_budget="64MiB", min_bytes="1KiB", prefetch=0)
    for step in (1, 2):
        region(4096, offload, inputs=6)
        assert (figures(offload)["puts"], figures(offload)["misses_out"]) == (6 * step, 0)


def test_what_is_in_use_is_counted_when_it_is_asked_for():
    """What is dropped while its copy runs."""
    offload = gradckpt.Offload("cpu", host_budget="2MiB", min_bytes="1KiB", keep_last=0)
    x = torch.randn(4096, device="virtual").requires_grad_()
    loss = gradckpt.checkpoint(torch.sin, x * 1, compress=None, offload=offload).sum()
    assert place_of(offload).figures()["memory_used"] > 0
    del loss
    gc.collect()
    torch.virtual.synchronize()
    assert place_of(offload).figures()["memory_used"] == 0


def test_memory_that_the_cpu_took_is_pinned_for_a_device(tmp_path):
    """One store serves both."""
    offload = gradckpt.Offload("disk", directory=tmp_path, min_bytes="1KiB", host_budget="1MiB")

    def step(device):
        x = torch.randn(64, 64).to(device).requires_grad_()
        gradckpt.checkpoint(torch.sin, x * 1, compress="int8", offload=offload).sum().backward()
        return figures(offload)

    assert step("cpu")["memory_taken"] > step("cpu")["pinned"] == 0
    there = step("virtual")
    assert there["memory_taken"] == there["pinned"] > 0
    assert step("cpu")["pinned"] == there["pinned"]


def test_another_order_and_a_second_backward(offload):
    """The order in which payloads come back is a guess which only costs time."""
    net, x = net_of(4), inputs()
    xs = [x.detach().clone().requires_grad_() for _ in range(4)]
    want = [torch.autograd.grad(layer(h * 1).square().sum(), h)[0].cpu() for layer in net for h in xs]
    with gradckpt.enable(net, None, modules=Block, offload=offload):
        losses = [layer(h * 1).square().sum() for layer in net for h in xs]
    order = [*range(0, len(losses), 2), *range(1, len(losses), 2)]
    for again in (True, False):
        for i in order if again else reversed(order):
            (found,) = torch.autograd.grad(losses[i], xs[i % 4], retain_graph=again)
            assert torch.equal(found.cpu(), want[i])
    del losses
    assert figures(offload)["memory_used"] == 0


@pytest.mark.parametrize("order", ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3"])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_the_order_of_a_pipeline(offload, order, codec):
    """Of each micro-batch but the newest, the payload read first is not copied in ahead."""
    net, batches = net_of(), [inputs().detach() * n for n in range(1, 5)]

    def gradients(**options):
        net.zero_grad()
        losses = {}
        with gradckpt.enable(net, codec, modules=Block, **options):
            for what, n in order.split():
                if what == "F":
                    losses[n] = net(batches[int(n)]).square().mean()
                else:
                    losses.pop(n).backward()
        return [[p.grad.cpu() for p in net.parameters()]]

    place_of(offload).figures(True)  # count from here
    assert equal(gradients(offload=offload), gradients())
    found = figures(offload)
    assert nothing_left(found)
    assert found["puts"] == found["copies_in"] + found["read_in_ring"] == len(batches) * (BLOCKS - 1)
    assert found["misses_out"] == found["misses_in"] == found["kept"] == 0
    missed = found["copies_in"] - found["prefetched"]
    assert missed == len(batches) - 1 or (offload.place == "disk" and missed > 0)  # else not read in time


def test_a_forward_whose_backward_never_comes(offload):
    net, x = net_of(), inputs()
    want = train(net, x, compress="int8")
    with gradckpt.enable(net, "int8", modules=Block, offload=offload):
        for _ in range(3):
            net(x)
        loss = net(x).square().mean()
        torch.autograd.grad(loss, net[-1].down.weight, retain_graph=True)
        del loss
        assert figures(offload)["ring_used"] == 0
    assert equal(train(net, x, compress="int8", offload=offload), want)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(offload):
    net, x = net_of(), inputs()
    want = train(net, x, compress="int8")
    virtual_device.link_refuses_to_pin(True)
    places._say_pinned.cache_clear()
    try:
        with pytest.warns(gradckpt.GradckptInactiveWarning, match="pins only 0 MiB"):
            assert equal(train(net, x, steps=1, compress="int8", offload=offload), want[:1])
        assert equal(train(net, x, compress="int8", offload=offload), want)  # it is said once
    finally:
        virtual_device.link_refuses_to_pin(False)
    found = figures(offload)
    assert found["pinned"] == 0
    assert found["copies_out"] > 0


@pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")
def test_each_call_of_the_link_may_fail(offload):
    """An error, or the payload stays: never a wrong gradient, and the next step is right."""
    net, x = net_of(4), inputs(64)
    names = ("place", "host_budget", "ring", "prefetch", "keep_last", "directory", "fallback")
    same = {name: getattr(offload, name) for name in names}
    want = train(net, x, steps=1, compress="int8")
    virtual_device.link_fails()
    train(net, x, steps=2, compress="int8", offload=gradckpt.Offload(**same, **SMALL))
    calls = virtual_device.link_fails()
    errors = 0
    for call in range(1, calls + 1):
        one = gradckpt.Offload(**same, min_bytes=1024 + call % 512)
        virtual_device.link_fails(call)
        got = want
        with contextlib.suppress(RuntimeError):
            errors += 1
            got = train(net, x, steps=1, compress="int8", offload=one)
            errors -= 1
        virtual_device.link_fails()
        assert equal(got, want), call
        del got
        gc.collect()
        assert place_of(one).figures()["ring_used"] == 0, call
    assert 0 < errors < calls
    virtual_device.reports()  # a call that failed made no order
    assert equal(train(net, x, steps=1, compress="int8", offload=offload), want)
