"""The second payload of a tensor is dropped when the device has compared it with the first, also
while it is read."""

import contextlib
import sys
import threading

import pytest
import torch
import virtual_device

import gradckpt


class OnAStream(torch.autograd.Function):
    """sin(x) by kernels on a stream of their own, which the current one waits for: the device's own
    operators would run all that is queued on the current one."""

    @staticmethod
    def forward(ctx, x, side, before):
        ctx.save_for_backward(x)
        ctx.side = side
        here = torch.virtual.current_stream()
        if before is None:
            side.wait_stream(here)
        else:
            side.wait_event(before)
        return OnAStream.on(side, here, torch.sin, x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        here = torch.virtual.current_stream()
        ctx.side.wait_stream(here)
        return OnAStream.on(ctx.side, here, lambda x, g: g * x.cos(), x, gradient), None, None

    @staticmethod
    def on(side, here, function, *tensors):
        with side:
            y = function(*tensors)
        for x in tensors:
            x.record_stream(side)
        y.record_stream(here)
        here.wait_stream(side)
        return y


def gradients(region):
    torch.manual_seed(0)
    leaves = [torch.randn(64, 128).to("virtual").requires_grad_() for _ in range(2)]
    (h, k), side, here = [x * 1 for x in leaves], torch.Stream(device="virtual"), torch.virtual.current_stream()
    g = torch.ones_like(h)
    torch.virtual.synchronize()
    before = here.record_event()
    first = region(lambda t: OnAStream.apply(t, side, before), h)
    second, third = region(lambda s, t: tuple(OnAStream.apply(x, side, before) for x in (s, t)), h, k)
    before = None
    torch.autograd.backward([first, second, third], [g, g, g])
    torch.virtual.synchronize()
    return [x.grad.cpu() for x in leaves]


@pytest.mark.usefixtures("host_codecs")
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_an_answer_between_two_arguments_of_a_recompute(codec):
    want = gradients(lambda f, *args: f(*args))
    for seed in range(40):
        virtual_device.random(seed)
        config = {"codec": codec, "min_numel": 0}
        got = gradients(lambda f, *args, config=config: gradckpt.checkpoint(f, *args, compress=config))
        assert all(torch.allclose(a, b, atol=0.1 if codec == "int8" else 0) for a, b in zip(got, want, strict=True))


@contextlib.contextmanager
def another_thread(work):
    """It works each time that the event, which is given, is set."""
    begin, ended = threading.Event(), []

    def run():
        while not ended:
            begin.wait()
            begin.clear()
            work()

    interval, thread = sys.getswitchinterval(), threading.Thread(target=run)
    sys.setswitchinterval(5)  # a thread runs until it lets go of the lock by itself
    thread.start()
    try:
        with virtual_device.ordered_threads():
            yield begin
    finally:
        ended.append(True)
        begin.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_another_thread_settles_while_a_restore_is_launched():
    def settle():
        gradckpt.stats()
        torch.full((8320,), 7, dtype=torch.uint8, device="virtual")  # where the second payload was

    with another_thread(settle) as begin:
        for _ in range(60):
            h = torch.randn(64, 128).to("virtual").requires_grad_() * 1
            powers = []

            @gradckpt.compress_saved({"codec": "int8", "min_numel": 0})
            def run(h=h, powers=powers):
                powers.extend((h**3, h**4))
                return sum(y.sum() for y in powers)

            y = run()
            torch.virtual.synchronize()
            begin.set()
            sum(range(30_000))
            restored = powers[1].grad_fn._saved_self
            assert torch.allclose(restored.cpu(), h.detach().cpu(), atol=0.2)
            del y
