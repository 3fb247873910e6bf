"""Captures on the virtual device."""

import pytest
import torch
import virtual_device


def capture(function, stream=None):
    graph = virtual_device.Graph()
    torch.virtual.synchronize()
    with virtual_device.graph(graph, stream):
        out = function()
    return graph, out


def test_replay_computes_again():
    x, w = torch.ones(3, 4, device="virtual"), torch.ones(4, 5, device="virtual")
    graph, out = capture(lambda: ((x @ w).relu() + 1).sum(0))
    torch.virtual.synchronize()
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [27] * 5
    x.copy_(torch.full((3, 4), 3.0))
    graph.replay()
    assert out.tolist() == [39] * 5
    graph.reset()


def test_its_memory_is_kept():
    x = torch.ones(1000, device="virtual")
    side = torch.Stream(device="virtual")
    graph, out = capture(lambda: (x * 2).add_(1) * 3, side)
    with side:
        others = [torch.zeros(1000, device="virtual") for _ in range(20)]
    assert len({t.data_ptr() for t in [*others, out]}) == 21
    torch.virtual.synchronize()
    x.fill_(5)
    graph.replay()
    assert out.eq(33).all()
    assert not any(other.any() for other in others)
    for other in others:
        other.fill_(0)
    graph.replay()
    assert out.eq(33).all()


def test_backward_is_captured():
    w = torch.ones(3, device="virtual", requires_grad=True)
    w.grad = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    graph, _ = capture(lambda: (w * w).sum().backward())
    torch.virtual.synchronize()
    w.grad.zero_()
    for _ in range(3):
        graph.replay()
    assert w.grad.tolist() == [6, 6, 6]


def test_copies_are_captured():
    host, x = torch.ones(3).pin_memory(), torch.zeros(3, device="virtual")
    graph, _ = capture(lambda: x.copy_(host, non_blocking=True))
    torch.virtual.synchronize()
    host.fill_(4)
    graph.replay()
    assert x.tolist() == [4, 4, 4]


def test_random_numbers_go_on():
    graph, out = capture(lambda: torch.rand(5, device="virtual"))
    torch.virtual.synchronize()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x, event: x.sum().item(),
        lambda x, event: x.cpu(),
        lambda x, event: x.nonzero(),
        lambda x, event: torch.virtual.synchronize(),
        lambda x, event: torch.accelerator.current_stream().synchronize(),
        lambda x, event: event.query(),
        lambda x, event: event.synchronize(),
        lambda x, event: x.copy_(torch.ones(3)),
    ],
    ids=["item", "cpu", "nonzero", "device", "stream", "query", "event", "pageable"],
)
def test_refused(refused):
    x = torch.ones(3, device="virtual")
    event = torch.accelerator.current_stream().record_event()
    torch.virtual.synchronize()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        capture(lambda: refused(x, event))
    refused(x, event)


def test_streams_that_join():
    side = torch.Stream(device="virtual")
    x = torch.ones(3, device="virtual")

    def forked(joins):
        now = torch.accelerator.current_stream()
        side.wait_stream(now)
        with side:
            y = x * 2
        if joins:
            now.wait_stream(side)
            y = y + 1
        return y

    graph, out = capture(lambda: forked(True))
    torch.virtual.synchronize()
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [9, 9, 9]
    with pytest.raises(RuntimeError, match="unjoined work"):
        capture(lambda: forked(False))
    torch.virtual.synchronize()


def test_an_order_that_a_capture_lacks():
    first, second = torch.Stream(device="virtual"), torch.Stream(device="virtual")
    x = torch.ones(3, device="virtual")

    def both():
        now = torch.accelerator.current_stream()
        for side in (first, second):
            side.wait_stream(now)
            with side:
                x.add_(1)
        for side in (first, second):
            now.wait_stream(side)

    capture(both)
    assert [r["kind"] for r in virtual_device.reports()] == ["race"]
