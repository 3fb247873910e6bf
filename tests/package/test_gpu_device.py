"""What only a device can show; the first thing that `make gpu` runs."""

import sys

import pytest
import torch
from checkout import ROOT
from payload_arrays import whole

import gradckpt

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_inputs
import machine

pytestmark = pytest.mark.skipif(machine.why_no_cuda() is not None, reason=f"needs a GPU: {machine.why_no_cuda()}")
PAIRS = [(c, d) for c in gradckpt.codecs.names() for d in gradckpt.codecs.info(c)["dtypes"]]


def inputs(dtype, seed=0):
    """Ordinary values that every codec holds, of an odd number, on the host."""
    return gpu_inputs.gaussian(dtype, 100_003, seed)


def decode(payload, codec, x):
    return torch.ops.gradckpt.decode(payload, codec, [x.numel()], x.dtype)


def same(payload, restored, host, codec):
    """Are these the host's bytes and values?"""
    wanted = gradckpt.codecs.encode(host, codec)
    word = gpu_inputs.WORDS[host.dtype.itemsize]
    return torch.equal(payload.cpu(), whole(wanted)) and torch.equal(
        restored.cpu().view(word), wanted.decode().view(word)
    )


def test_operators_replay_in_a_graph():
    """Captured once; the bytes are those of whatever the input holds when it is replayed."""
    for codec, dtype in PAIRS:
        x = inputs(dtype).cuda()
        decode(torch.ops.gradckpt.encode(x, codec), codec, x)  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            payload = torch.ops.gradckpt.encode(x, codec)
            restored = decode(payload, codec, x)
        for seed in (1, 2):
            host = inputs(dtype, seed)
            x.copy_(host)
            graph.replay()
            torch.cuda.synchronize()
            assert same(payload, restored, host, codec), (codec, dtype)


def test_work_is_queued_on_the_current_stream():
    """Behind a long wait and a write on a side stream:
    any other stream would see the zeros from before."""
    for codec, dtype in PAIRS:
        host = inputs(dtype)
        filled, x = host.cuda(), torch.zeros_like(host, device="cuda")
        decode(whole(gradckpt.codecs.encode(x, codec)), codec, x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(filled)
            payload = whole(gradckpt.codecs.encode(x, codec))
            restored = decode(payload, codec, x)
        assert not side.query(), (codec, dtype)  # no call has waited
        side.synchronize()
        assert same(payload, restored, host, codec), (codec, dtype)


def region_gradients(call):
    """Loss and gradients of four layers, each called by call(function, input)."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1.0
    for layer in layers:
        x = call(torch.nn.Sequential(layer, torch.nn.Tanh()), x)
    loss = x.float().square().mean()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for layer in layers for p in layer.parameters()]).float()


def test_regions():
    """The loss is that of no checkpointing to the last bit;
    so are the gradients of exact codecs."""
    plain_loss, plain = region_gradients(lambda function, x: function(x))
    for codec in [c for c, dtype in PAIRS if dtype == "bfloat16"]:
        gradckpt.stats.reset()
        loss, gradients = region_gradients(
            lambda function, x, codec=codec: gradckpt.checkpoint(function, x, compress=codec)
        )
        torch.cuda.synchronize()
        assert gradckpt.stats()["compressed"] == 4, codec
        assert torch.equal(loss, plain_loss), codec
        error = ((gradients - plain).norm() / plain.norm()).item()
        exact = gradckpt.codecs.info(codec)["max_error"] == 0
        assert error == 0 if exact else 0 < error < 0.3, codec


def test_refused_inputs_are_kept():
    """Counted as kept; what the codec cannot hold comes from the original,
    with a cast the rest is rounded."""
    for codec in ("fp16", "bf16", "lossless"):
        gradckpt.stats.reset()
        layer = torch.nn.Linear(4096, 16, device="cuda")
        x = torch.randn(8, 4096, device="cuda")
        if codec == "lossless":
            x *= 2.0 ** torch.randint(-60, 60, x.shape, device="cuda")
        else:
            x[0, 0] = torch.finfo(torch.float32).max
        x.requires_grad_(True)
        grads = []
        for compress in (None, codec):
            layer.zero_grad()
            y = gradckpt.checkpoint(layer, x * 1.0, compress=compress)
            torch.cuda.synchronize()
            stats = gradckpt.stats()  # looks at the flag
            y.sum().backward()
            grads.append(layer.weight.grad.clone())
        assert (stats["compressed"], stats["uncompressed"]) == (0, {"values the codec cannot hold": 1}), codec
        assert torch.equal(grads[0][:, 0], grads[1][:, 0]), codec
        torch.testing.assert_close(*grads, rtol=0, atol=0.0 if codec == "lossless" else 0.2)


def test_truncated_payload_is_named():
    x = inputs("bfloat16").cuda()
    payload = whole(gradckpt.codecs.encode(x, "int8"))
    with pytest.raises(RuntimeError, match="bytes, not"):
        decode(payload[:-1], "int8", x)
    assert decode(payload, "int8", x).is_cuda
