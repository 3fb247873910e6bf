"""The virtual device's streams: what is queued runs later, and what has no order is reported."""

import threading

import pytest
import torch
import virtual_device


def streams(*devices):
    return [torch.Stream(device=f"virtual:{i}") for i in devices]


def pinned(*values):
    return torch.tensor(values).pin_memory()


def copied_on_the_side(ordered):
    """A copy from the host that another stream makes, and what this stream reads."""
    (side,) = streams(0)
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    side.wait_stream(torch.virtual.current_stream())
    with side:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
        event = side.record_event()
    if ordered:
        torch.virtual.current_stream().wait_event(event)
    values = (x + 0).tolist()
    torch.virtual.synchronize()
    return values


def test_with_an_event():
    assert copied_on_the_side(ordered=True) == [1, 2, 3]
    assert virtual_device.reports() == []


def test_without_an_event():
    assert copied_on_the_side(ordered=False) == [0, 0, 0]
    reports = virtual_device.reports()
    assert [(r["kind"], r["first"]["name"], r["first"]["writes"], r["second"]["writes"]) for r in reports] == [
        ("race", "copy to device", True, False)
    ]
    assert reports[0]["second"]["stream"] == 0 != reports[0]["first"]["stream"]
    assert reports[0]["nbytes"] == 12


def test_a_report_names_lines():
    virtual_device.places(True)
    try:
        copied_on_the_side(ordered=False)
    finally:
        virtual_device.places(False)
    (report,) = virtual_device.reports()
    assert report["first"]["place"].startswith("test_virtual_streams.py:")
    assert report["second"]["place"].startswith("test_virtual_streams.py:")
    assert report["first"]["place"] != report["second"]["place"]


def test_a_read_before_a_write():
    """The other stream overwrites what this one's copy has yet to read."""
    (side,) = streams(0)
    x, host = torch.ones(3, device="virtual"), torch.empty(3).pin_memory()
    torch.virtual.synchronize()
    with side:
        host.copy_(x, non_blocking=True)
    x.fill_(7)
    torch.virtual.synchronize()
    assert host.tolist() == [7, 7, 7]
    (report,) = virtual_device.reports()
    assert (report["first"]["writes"], report["second"]["writes"]) == (False, True)
    with side:
        host.copy_(x, non_blocking=True)
    torch.virtual.current_stream().wait_stream(side)
    x.fill_(8)
    torch.virtual.synchronize()
    assert host.tolist() == [7, 7, 7]


def test_parts_without_overlap():
    (side,) = streams(0)
    x = torch.zeros(4, 6, device="virtual")
    torch.virtual.synchronize()
    with side:
        x[:2].fill_(1)
        x[2:, ::2].fill_(1)
    x[2:, 1::2].fill_(2)
    assert virtual_device.reports() == []
    x[1:3].fill_(3)
    assert {r["kind"] for r in virtual_device.reports()} == {"race"}
    torch.virtual.synchronize()


@pytest.mark.parametrize("how", ["event", "stream", "device", "query"])
def test_the_host_waits(how):
    (side,) = streams(0)
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
        event = side.record_event()
    assert virtual_device.pending(side) == 1
    if how == "event":
        event.synchronize()
    elif how == "stream":
        side.synchronize()
    elif how == "device":
        torch.virtual.synchronize()
    else:
        assert not event.query()
        while not event.query():
            pass
    assert virtual_device.pending(side) == 0
    assert (x + 0).tolist() == [1, 2, 3]
    assert virtual_device.reports() == []


def test_reading_a_value_waits_for_its_own_stream_alone():
    (side,) = streams(0)
    x, y = torch.zeros(3, device="virtual"), torch.zeros(1, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
    assert y.item() == 0
    assert virtual_device.pending(side) == 1
    with side:
        assert x[1].item() == 2
    x.add_(1)  # the host knows now that the copy is done
    assert virtual_device.reports() == []


def test_what_one_thread_waited_for_another_does_not_know():
    (side,) = streams(0)
    x = torch.zeros(3, device="virtual")
    torch.virtual.synchronize()
    with side:
        x.add_(1)

    def wait():
        side.synchronize()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    x.add_(1)
    assert len(virtual_device.reports()) == 1
    side.synchronize()
    x.add_(1)
    assert virtual_device.reports() == []
    side.wait_stream(torch.virtual.current_stream())
    with side:
        x.add_(1)
    virtual_device.order_threads(True)
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    x.add_(1)
    virtual_device.order_threads(False)
    assert virtual_device.reports() == []


def test_threads_have_streams_of_their_own():
    (side,) = streams(0)
    found = []
    with side:
        assert torch.virtual.current_stream() == side
        thread = threading.Thread(target=lambda: found.append(torch.virtual.current_stream()))
        thread.start()
        thread.join()
    assert found == [torch.virtual.default_stream()] == [torch.virtual.current_stream()]


def test_copies_from_pageable_memory_take_a_copy_first():
    x, here = torch.zeros(3, device="virtual"), torch.tensor([1.0, 2.0, 3.0])
    x.copy_(here, non_blocking=True)
    here.fill_(9)
    assert x.tolist() == [1, 2, 3]
    here = here.pin_memory()
    x.copy_(here, non_blocking=True)
    here.fill_(4)
    assert x.tolist() == [4, 4, 4]  # read when the copy ran: too late


def test_copies_to_pinned_memory_come_later():
    x, host = torch.ones(3, device="virtual"), torch.zeros(3).pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [0, 0, 0]
    torch.virtual.synchronize()
    assert host.tolist() == [1, 1, 1]
    assert torch.zeros(3).copy_(x, non_blocking=True).tolist() == [1, 1, 1]  # pageable: it blocks
    assert x.to("cpu", non_blocking=True).is_pinned()


def test_copies_between_devices_wait_for_both():
    first, second = streams(0, 1)
    x, y = torch.zeros(3, device="virtual:0"), torch.zeros(3, device="virtual:1")
    for i in range(2):
        torch.virtual.synchronize(i)
    with first, second:
        x.copy_(pinned(1.0, 2.0, 3.0), non_blocking=True)
        y.add_(1)
        y.copy_(x, non_blocking=True)
        y.add_(1)
        assert y.tolist() == [2, 3, 4]
    assert virtual_device.reports() == []
    for i in range(2):
        torch.virtual.synchronize(i)


@pytest.mark.parametrize("seed", range(5))
def test_at_random(seed):
    """Whatever runs when: with events the values are those."""
    virtual_device.random(seed)
    left, right = streams(0, 0)
    x = torch.zeros(3, device="virtual")
    left.wait_stream(torch.virtual.current_stream())
    for i in range(10):
        with left:
            x.copy_(pinned(*[float(i)] * 3), non_blocking=True)
        right.wait_stream(left)
        with right:
            x.add_(1)
        left.wait_stream(right)
    torch.virtual.current_stream().wait_stream(left)
    assert x.tolist() == [10, 10, 10]
    virtual_device.late()


def test_at_random_without_an_event():
    seen = set()
    for seed in range(20):
        virtual_device.random(seed)
        seen.add(copied_on_the_side(ordered=False)[0])
        torch.virtual.synchronize()
    assert seen == {0, 1}
    assert len(virtual_device.reports()) >= 1


def test_backward_on_the_stream_of_its_forward():
    (side,) = streams(0)
    x = torch.ones(100, device="virtual", requires_grad=True)
    side.wait_stream(torch.virtual.current_stream())
    with side:
        y = (x * 2).exp().sum()
    torch.virtual.current_stream().wait_stream(side)
    y.backward()
    assert x.grad.isfinite().all()
    assert virtual_device.reports() == []


def test_events_have_times():
    first, second = torch.Event(device="virtual", enable_timing=True), torch.Event(device="virtual", enable_timing=True)
    first.record()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 0
