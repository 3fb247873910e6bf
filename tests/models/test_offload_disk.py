"""offload="disk": the same values, less memory, no file that stays."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import gradckpt
from gradckpt._models.offload import store_of

SMALL = {"min_bytes": 4096, "host_budget": "256KiB"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture
def place(tmp_path):
    try:
        gradckpt._C.ByteStore(str(tmp_path), 1 << 20)
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return gradckpt.Offload("disk", directory=tmp_path, **SMALL)


def gradients(**options):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(8)))
    x = torch.randn(512, 64, requires_grad=True)
    with gradckpt.enable(net, modules=Block, **options):
        loss = net(x).square().mean()
        loss.backward()
    return [loss, x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("codec", [*(c for c in gradckpt.codecs.names() if c != "mask"), None])
def test_values_are_those_without(place, codec, recompute):
    if codec is None and not recompute:
        pytest.skip("nothing is recomputed and nothing compressed: nothing to do")
    want, got = (gradients(compress=codec, recompute=recompute, offload=where) for where in (False, place))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    if recompute:
        assert store_of(place).figures()["puts"] >= (0 if codec in ("sparse", "sparse_int8") else 7)


def test_it_is_written_and_read(place):
    want, got = gradients(compress=None), gradients(compress=None, offload=place)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    figures = store_of(place).figures()
    assert figures["written"] > 256 << 10
    assert figures["read"] > 0
    assert figures["memory_peak"] <= 256 << 10
    assert figures["memory_used"] == figures["file_used"] == 0


def test_a_second_backward_and_another_order(place):
    """The order in which bytes are asked for is a guess: any other gives the same."""
    x = torch.randn(4, 512, 64, requires_grad=True)
    net = nn.ModuleList(Block() for _ in range(6))
    expected = [torch.autograd.grad(layer(h * 1).square().sum(), x)[0] for layer in net for h in x]
    with gradckpt.enable(net, None, modules=Block, offload=place):
        losses = [layer(h * 1).square().sum() for layer in net for h in x]
    order = [*range(0, len(losses), 2), *range(1, len(losses), 2)]
    for i in order:
        assert torch.equal(torch.autograd.grad(losses[i], x, retain_graph=True)[0], expected[i])
    for i in reversed(order):
        assert torch.equal(torch.autograd.grad(losses[i], x)[0], expected[i])
    del losses
    assert store_of(place).figures()["memory_used"] == 0


def test_the_settings_of_a_model_name_it(place):
    net = nn.Sequential(Block(), Block())
    handle = gradckpt.enable(net, modules=Block, offload=place)
    assert [options["offload"] for options in handle.modules.values()] == [place, place]
    same = {"place": "disk", "directory": place.directory, "min_bytes": "4KiB", "host_budget": "256KiB"}
    assert gradckpt.enable(net, modules=Block, offload=same).modules == handle.modules


@pytest.mark.parametrize(
    ("offload", "error", "words"),
    [
        ("tape", ValueError, "offload='tape' is no place; pass 'cpu' or 'disk'"),
        (3, TypeError, "offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not 3"),
        ({"place": "disk", "budget": 1}, ValueError, "offload= has no budget"),
        ({"place": "disk", "host_budget": "big"}, ValueError, "'big' is not a size"),
        ({"place": "disk", "prefetch": -1}, ValueError, "prefetch=-1 is no number"),
        ({"place": "cpu", "prefetch": 1}, ValueError, r"only Offload\('disk'\) has a budget"),
        ({"place": "disk", "directory": "/proc"}, ValueError, "cannot use the directory /proc"),
    ],
)
def test_what_is_none(offload, error, words):
    with pytest.raises(error, match=f"^gradckpt: .*{words}"):
        gradckpt.enable(nn.Sequential(Block(), Block()), modules=Block, offload=offload)


def test_what_is_too_large_stays_and_is_said_once(tmp_path, place):
    small = gradckpt.Offload("disk", directory=tmp_path, min_bytes=1024, host_budget=8192)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="larger than the memory of the store"):
        got = gradients(compress=None, offload=small)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(compress=None), strict=True))


KILLED = """
import sys, time, torch, gradckpt
from torch import nn
net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
place = gradckpt.Offload("disk", directory=sys.argv[1], host_budget="1MiB", min_bytes=4096)
with gradckpt.enable(net, None, modules=nn.Linear, offload=place):
    y = net(torch.randn(1024, 256, requires_grad=True))
print("kept", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_killed_process(tmp_path, place):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "kept\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.1)
    assert os.listdir(tmp_path) == []
