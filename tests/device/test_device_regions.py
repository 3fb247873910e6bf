"""Regions and saved tensors on a device: what the CPU does, on the streams of the tensors, without
Python code."""

import contextlib
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
import virtual_device
from torch import nn

import gradckpt

CODECS = [c for c in gradckpt.codecs.names() if "float32" in gradckpt.codecs.info(c)["dtypes"]]


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_have_the_bytes_of_the_cpu(codec):
    for dtype in gradckpt.codecs.info(codec)["dtypes"]:
        if dtype == "bool":
            continue
        for shape in ((5, 100), (3, 128), (700,)):
            host = torch.randn(shape).to(getattr(torch, dtype))
            host = host.relu() * (torch.rand(shape) < 0.2) if "sparse" in codec else host
            ours, theirs = gradckpt.codecs.encode(host.to("virtual"), codec), gradckpt.codecs.encode(host, codec)
            torch.virtual.synchronize()
            gradckpt.stats()  # looks at the answers: until then decode() returns the original
            assert torch.equal(ours.decode().cpu(), theirs.decode()), (dtype, shape)
            if ours.nbytes == theirs.nbytes and ours.codec == theirs.codec:  # on the CPU, others have a smaller form
                assert torch.equal(ours.codes.cpu(), theirs.codes), (dtype, shape)
                assert torch.equal(ours.scales.cpu(), theirs.scales), (dtype, shape)


def test_two_devices():
    """A region on one, its input from the other; each generator stands where it stood."""
    first, second = (
        nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)).to(f"virtual:{n}") for n in range(2)
    )

    def both(x):
        return second(first(x).to("virtual:1"))

    def run(call):
        torch.virtual.manual_seed_all(5)
        for p in (*first.parameters(), *second.parameters()):
            p.grad = None
        call(both, torch.ones(8, 128, device="virtual:0", requires_grad=True) * 1).square().sum().backward()
        return [p.grad.cpu() for p in (*first.parameters(), *second.parameters())]

    want = run(lambda f, x: f(x))
    have = run(lambda f, x: gradckpt.checkpoint(lambda t, u: f(t), x, torch.ones(4, device="virtual:1")))
    assert all(map(torch.equal, have, want))


# ---- Python frames


@contextlib.contextmanager
def frames(seen):
    """Names of functions of ours and of torch's that threads call which were profiled here."""

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and ("/gradckpt/" in file.replace("\\", "/") or "/torch/" in file) and "/tests/" not in file:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield note
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_plain_regions_run_no_python(codec, autocast):
    """The recompute runs on autograd's thread for the device, profiled from the first one on."""
    inside, profile = [], []

    def function(t):
        if threading.current_thread() is not threading.main_thread():
            sys.setprofile(profile[0])
        return t.sin().exp()

    cast = torch.autocast("virtual", torch.bfloat16) if autocast else contextlib.nullcontext()
    seen = []
    for _ in range(3):  # of the first backward the activity note, and of the first regions samples
        x = torch.randn(64, 128, device="virtual", requires_grad=True) * 1
        inside.clear()
        with cast, frames(inside) as note:
            profile[:] = [note]
            y = gradckpt.checkpoint(function, x, compress=codec)
        forward = [*inside]
        inside.clear()
        loss = y.sum()
        torch.autograd.backward(loss)
        seen = [forward, [name for name in inside if "step" not in name and "_now" not in name]]
    assert seen == [[], []]


# ---- sharing


def used_again(n=6, write=None, codec="int8", device="virtual"):
    """A tensor that is an argument of n regions: (payloads, shared, gradients)."""
    torch.manual_seed(0)
    gradckpt.stats.reset()
    weights = [torch.randn(128, 128).to(device).requires_grad_() for _ in range(n)]
    shared = torch.randn(64, 128).to(device).requires_grad_() * 1
    h = shared
    for i, weight in enumerate(weights):
        if write is not None and i == n // 2:
            write(shared)
        h = gradckpt.checkpoint(lambda h, e, w=weight: torch.tanh(h @ w) + e, h, shared, compress=codec)
    loss = h.square().mean()
    torch.virtual.synchronize()
    stats = gradckpt.stats()
    loss.backward()
    return stats["encoded"], stats["shared"], torch.cat([w.grad.flatten() for w in weights]).cpu()


@pytest.mark.parametrize("host", [False, True])
def test_a_tensor_that_is_used_again_has_one_payload(host):
    with virtual_device.host_codecs() if host else contextlib.nullcontext():
        encoded, shared, _ = used_again()
    assert (encoded, shared) == (6, 6)  # the layers' own inputs, of which the first is the shared one


def test_writes_that_no_version_tells_end_the_sharing():
    """The answer is "different": both payloads stay, and later uses share the second."""
    want, have = (used_again(write=lambda x: x.data.mul_(1.5), device=d) for d in ("cpu", "virtual"))
    assert have[:2] == want[:2] == (7, 5)
    assert torch.allclose(have[2], want[2], atol=1e-6)


def test_views_of_the_same_values_share_a_payload_of_the_saved():
    """Also those that wait to be encoded together; the CPU shares smaller views, too."""
    x = torch.randn(4, 32, 64, device="virtual", requires_grad=True) * 1
    weight = torch.randn(64, 64, device="virtual", requires_grad=True)
    gradckpt.stats.reset()

    @gradckpt.compress_saved({"codec": "int8", "min_numel": 0})
    def run():
        rows = (
            F.linear(x, weight),
            x.view(-1, 64) @ weight,
            x.transpose(1, 2) ** 2,
            x[:, None].expand(4, 3, 32, 64) ** 2,
        )
        return sum(row.sum() for row in (*rows, x[1:] ** 2, x[1:, ::2] ** 2))

    y = run()
    torch.virtual.synchronize()
    stats = gradckpt.stats()
    assert (stats["encoded"], stats["shared"]) == (3, 3)
    y.backward()


def test_nothing_is_shared_across_streams():
    gradckpt.stats.reset()
    x = torch.randn(64, 128, device="virtual", requires_grad=True) * 1
    side = torch.Stream(device="virtual")
    side.wait_stream(torch.virtual.current_stream())
    first = gradckpt.checkpoint(torch.sin, x, compress="int8")
    with side:
        second = gradckpt.checkpoint(torch.cos, x, compress="int8")
    torch.virtual.current_stream().wait_stream(side)
    torch.virtual.synchronize()
    assert gradckpt.stats()["shared"] == 0
    (first + second).sum().backward()


@pytest.mark.usefixtures("host_codecs")
def test_forward_waits_for_twins():
    """A CPU that is far ahead holds one payload more, not one for each use."""
    weights = [torch.randn(8, 8).to("virtual").requires_grad_() for _ in range(6)]
    x = torch.randn(2 << 20, 8).to("virtual").requires_grad_() * 1  # int8: 16 MiB
    torch.virtual.synchronize()
    before = torch.virtual.memory_allocated()
    done = threading.Event()

    def drain():
        while not done.wait(0.05):
            torch.virtual.synchronize()

    thread = threading.Thread(target=drain)
    thread.start()
    kept = [gradckpt.checkpoint(lambda e, w=w: (e[:4] @ w).sum(), x, compress="int8") for w in weights]
    held = torch.virtual.memory_allocated() - before
    done.set()
    thread.join()
    assert len(kept) == 6
    assert held < 3.2 * (17 << 20)


# ---- streams


def test_an_input_from_another_stream_outlives_its_encode():
    """It dies right after the region's forward, on the stream where its memory came from."""
    side = torch.Stream(device="virtual")
    weight = torch.randn(512, 512).to("virtual").requires_grad_()
    with side:
        base = torch.ones(512, 512, device="virtual", requires_grad=True)
        x = base * 3
    torch.virtual.current_stream().wait_stream(side)
    y = gradckpt.checkpoint(lambda t: t @ weight, x, compress="int8")
    del x
    with side:
        junk = [torch.full((512, 512), 7.0, device="virtual") for _ in range(4)]
    y.sum().backward()
    torch.virtual.synchronize()
    assert virtual_device.reports() == []
    want = 3.0 * 512
    assert torch.allclose(weight.grad.cpu(), torch.full((512, 512), want), rtol=0.01)
    assert len(junk) == 4


def test_a_payload_outlives_its_decode_on_another_stream():
    """The region's operators run on a stream of their own, and so does its recompute; the memory of
    the payload goes back to the stream of its input."""
    here, side = torch.virtual.current_stream(), torch.Stream(device="virtual")
    weight = (torch.randn(256, 256) / 16).to("virtual").requires_grad_()
    x = torch.randn(256, 256).to("virtual").requires_grad_() * 1
    torch.virtual.synchronize()

    def function(t):
        side.wait_stream(torch.virtual.current_stream())
        t.record_stream(side)
        with side:
            return (t @ weight).sin()

    y = gradckpt.checkpoint(function, x, compress="int8")
    here.wait_stream(side)
    junk = []

    def take_memory(gradient):
        with here:  # which has not waited for the recompute
            junk.extend(torch.empty(n, dtype=torch.uint8, device="virtual") for n in (256 * 256, 1024) * 3)

    weight.register_hook(take_memory)
    y.sum().backward()
    del y
    with here:
        junk.extend(torch.empty(n, dtype=torch.uint8, device="virtual") for n in (256 * 256, 1024) * 3)
    torch.virtual.synchronize()
    assert virtual_device.reports() == []


class Cast(torch.autograd.Function):
    """A product in the dtype that autocast has for the device, which is off around it."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        with torch.autocast("virtual"):
            return (a @ w).float()

    @staticmethod
    def backward(ctx, g):
        a, w = ctx.saved_tensors
        return g @ w.t(), a.t() @ g


@pytest.mark.parametrize("inside", [True, False])
def test_autocasts_dtype_is_that_of_the_forward_also_while_it_is_off(inside):
    a = torch.randn(64, 128).to("virtual").requires_grad_()
    w = torch.randn(128, 128).to("virtual").requires_grad_()

    def run(call):
        a.grad = w.grad = None
        with contextlib.ExitStack() as stack:
            if inside:
                stack.enter_context(torch.autocast("virtual", torch.bfloat16))
                stack.enter_context(torch.autocast("virtual", enabled=False))
            y = call(lambda t, u: Cast.apply(t, u).sin(), a * 1, w)
        with contextlib.nullcontext() if inside else torch.autocast("virtual", torch.bfloat16):
            y.sum().backward()
        return torch.cat([a.grad.flatten(), w.grad.flatten()]).cpu()

    want = run(lambda f, *xs: f(*xs))
    for compress in (None, "raw"):
        found = run(lambda f, *xs, c=compress: gradckpt.checkpoint(f, *xs, compress=c))
        assert torch.equal(found, want), compress
