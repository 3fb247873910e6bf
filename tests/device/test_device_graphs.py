"""Regions and saved tensors in captured graphs, and answers that come late."""

import collections
import threading
import weakref

import pytest
import torch
import virtual_device

import gradckpt


@pytest.fixture
def capture():
    """A graph, and the stream that it is captured on."""
    graph, side = virtual_device.Graph(), torch.Stream(device="virtual")
    torch.virtual.synchronize()
    yield graph, side
    graph.reset()
    assert virtual_device.kernel_errors() == 0


def weights(n=3):
    torch.manual_seed(0)
    return [(torch.randn(128, 128) / 11).to("virtual").requires_grad_() for _ in range(n)]


def step(ws, x, call):
    h = x * 1
    for w in ws:
        h = call(lambda t, w=w: torch.tanh(t @ w), h)
    h.square().mean().backward()


def gradients(ws):
    return torch.cat([w.grad.flatten() for w in ws]).cpu()


@pytest.mark.parametrize("codec", [None, "int8", "lossless"])
def test_a_captured_step_is_replayed_on_other_values(codec, capture):
    def region(function, x):
        return gradckpt.checkpoint(function, x, compress=codec, preserve_rng_state=False)

    ws = weights()
    x = torch.randn(16, 128).to("virtual").requires_grad_()
    graph, side = capture
    side.wait_stream(torch.virtual.current_stream())
    with side:
        step(ws, x, region)
    torch.virtual.synchronize()
    for w in ws:
        w.grad = None
    with virtual_device.graph(graph, side):
        step(ws, x, region)
    other = torch.randn(16, 128)
    with torch.no_grad():
        x.copy_(other)
        for w in ws:
            w.grad.zero_()
    graph.replay()
    torch.virtual.synchronize()
    found = gradients(ws)
    for w in ws:
        w.grad = None
    step(ws, x, region)
    torch.virtual.synchronize()
    assert torch.equal(found, gradients(ws))


def test_nothing_is_shared_into_or_out_of_a_capture(capture):
    graph, side = capture
    x = torch.randn(64, 128).to("virtual").requires_grad_() * 1
    torch.virtual.synchronize()

    def region(function):
        return gradckpt.checkpoint(function, x, compress="int8", preserve_rng_state=False)

    gradckpt.stats.reset()
    with side:
        before = region(torch.sin)
        with virtual_device.graph(graph, side):
            inside = region(torch.cos)
        after = region(torch.tanh)
    torch.virtual.synchronize()
    assert gradckpt.stats()["encoded"] == 2  # before and after share theirs
    assert gradckpt.stats()["shared"] == 1
    del before, inside, after


def test_a_replay_changes_no_payload_from_outside(capture):
    """The bytes of a captured payload are those of its latest replay."""
    leaf = torch.randn(64, 128).to("virtual").requires_grad_()
    x = leaf * 1
    want = x.detach().cos()
    graph, side = capture
    torch.virtual.synchronize()
    with side:
        with virtual_device.graph(graph, side):
            inside = gradckpt.checkpoint(torch.exp, x, compress="raw", preserve_rng_state=False)
        after = gradckpt.checkpoint(torch.sin, x, compress="raw")
        torch.virtual.synchronize()
        gradckpt.stats()  # looks at what the device has said
        x.data.mul_(2)
        graph.replay()
        (found,) = torch.autograd.grad(after.sum(), leaf)
    torch.virtual.synchronize()
    assert torch.equal(found.cpu(), want.cpu())
    del inside


def test_saved_tensors_do_not_cross_the_border_of_a_capture():
    """What waits for its operator when a capture ends stays as it is: what was captured has no
    values before a replay."""
    ws = weights(2)
    x = torch.randn(64, 128).to("virtual")
    unknown = []
    for captured in (False, True):
        graph, side = virtual_device.Graph(), torch.Stream(device="virtual")
        torch.virtual.synchronize()
        gradckpt.stats.reset()
        with gradckpt.compress_saved("int8"), side:
            if captured:
                graph.capture_begin(side)
            h = x @ ws[0]
            for _ in range(3):
                h = torch.nn.functional.gelu(h)
            if captured:
                graph.capture_end()
            y = h.detach()
            for _ in range(12):  # until all that waited is settled
                y = torch.nn.functional.gelu(y @ ws[1])
        torch.virtual.synchronize()
        unknown.append(gradckpt.stats()["uncompressed"].get("not known which operator saves it", 0))
        del h, y
        graph.reset()
    assert unknown[1] > unknown[0]
    assert virtual_device.kernel_errors() == 0


@pytest.mark.usefixtures("host_codecs")
def test_open_originals_are_bounded_however_slow_the_device_is():
    """A second, the patience of old, is over several times; nothing runs until the test lets it."""
    originals = []

    def forward():
        leaf = torch.randn(2 << 20).to("virtual").requires_grad_()
        outputs = []
        for _ in range(5):
            x = leaf * 1
            originals.append(weakref.ref(x))
            outputs.append(gradckpt.checkpoint(lambda h: h.sin().sum().detach() * 0 + h[0], x, compress="lossless"))
            del x

    def alive():
        return sum(original() is not None for original in originals)

    with virtual_device.ordered_threads():
        thread = threading.Thread(target=forward)
        thread.start()
        most = 0
        while thread.is_alive():
            thread.join(1.2)
            most = max(most, alive())
            torch.virtual.synchronize()
    assert len(originals) == 5
    assert most <= 3  # two, and the one that is being encoded


Pair = collections.namedtuple("Pair", "x")


class Sub(torch.Tensor):
    """A subclass: only Python looks at it."""


def dropped(h):
    return torch.nn.functional.dropout(h.sin(), 0.5)


#: What makes an argument of a tensor, and the region's function.
REFUSED = {
    "tensor": (lambda x: x, dropped),
    "nothing is drawn": (lambda x: x, torch.sin),
    "namedtuple": (Pair, lambda h: dropped(h.x)),
    "mapping": (lambda x: collections.OrderedDict(x=x), lambda h: dropped(h["x"])),
    "subclass": (lambda x: x.as_subclass(Sub), dropped),
}


@pytest.mark.parametrize("form", REFUSED)
def test_random_numbers_in_a_capture_are_refused_wherever_tensors_are(form, capture):
    make, function = REFUSED[form]
    x = torch.randn(16, 128).to("virtual").requires_grad_()
    torch.virtual.synchronize()
    says = "pass preserve_rng_state=False and draw none inside"
    with pytest.raises(RuntimeError, match=says), virtual_device.graph(*capture):
        gradckpt.checkpoint(function, make(x * 1))


def test_random_numbers_of_a_captured_backward_are_refused(capture):
    graph, side = capture
    x = torch.randn(16, 128).to("virtual").requires_grad_()
    torch.virtual.synchronize()
    with side:
        y = gradckpt.checkpoint(dropped, x * 1)
    with pytest.raises(RuntimeError, match="draw none inside"), virtual_device.graph(graph, side):
        y.sum().backward()
