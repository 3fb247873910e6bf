"""offload="disk": the same values, less memory, no file that stays."""

import dataclasses
import functools
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import in_threads
from torch import nn

import gradckpt
from gradckpt._compression import set_rounding_state
from gradckpt._engine import places
from gradckpt._engine.places import REGIONS, SAVED, place_of

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
        place_of(gradckpt.Offload("disk", directory=tmp_path))
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


def figures_of(place, payloads=REGIONS):
    return place_of(place, payloads).figures()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("codec", [*(c for c in gradckpt.codecs.names() if c != "mask"), None])
def test_values_are_those_without(place, codec, recompute):
    want = gradients(compress=codec, recompute=recompute or codec is None)
    got = gradients(compress=codec, recompute=recompute, offload=place)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    figures = figures_of(place, REGIONS if recompute else SAVED)
    assert figures["puts"] >= (0 if codec in ("sparse", "sparse_int8") else 7)
    assert figures["memory_used"] == figures["file_used"] == 0
    if codec is None:  # more than the memory holds
        assert figures["written"] > 256 << 10 >= figures["memory_peak"]
        assert figures["read"] > 0


def test_noise_does_not_depend_on_where_the_first_payload_is(place):
    """A tensor that many operators save has one noise, also when its payload is on the disk."""
    config = gradckpt.CompressionConfig("int8", stochastic=True, seed=1)
    linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def step(offload):
        set_rounding_state((7, 0))
        linears.zero_grad()
        x = torch.linspace(-1, 1, 512 * 64).view(512, 64).requires_grad_()
        with gradckpt.compress_saved(config, offload=offload):
            shared = x * 1
            loss = sum(linear(linear(linear(shared) * 1) * 1).square().mean() for linear in linears)
        loss.backward()
        return [x.grad, *(p.grad.clone() for p in linears.parameters())]

    small = dataclasses.replace(place, host_budget="72KiB")  # two payloads
    want, got = step(False), step(small)
    assert figures_of(small, SAVED)["written"] > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_is_counted_begins_again(place):
    """At a moment, and at reset(), which leaves what is in use; an unused place has no row."""
    gradckpt.stats.reset()
    gradients(compress=None, offload=place)
    first = gradckpt.stats()
    gradients(compress=None, offload=place)
    second = gradckpt.stats().since(first)["offload"]
    assert second["puts"] == first["offload"]["puts"] > 0
    assert second["memory_peak"] == first["offload"]["memory_peak"] > 0
    assert "  written to the disk" in str(first)
    gradckpt.stats.reset()
    figures = gradckpt.stats()["offload"]
    assert not any(figures[key] for key in ("puts", "gets", "written", "read", "write_ns", "kept", "file_peak"))
    assert figures["memory_taken"] == first["offload"]["memory_taken"] > 0
    assert str(gradckpt.stats()).partition("\n")[0] == "checkpoints: none so far"


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
    assert figures_of(place)["memory_used"] == 0


LAYOUTS = {
    "slice of rows": lambda h: h[:, :200],
    "every other value": lambda h: h[:, ::2],
    "transposed": lambda h: h.t(),
    "expanded": lambda h: h[:1].expand(256, 256),
    "negated": lambda h: torch._neg_view(h),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recompute_sees_the_layout_of_the_forward(place, layout):
    """Sums over other strides have other last bits, and a branch on them another result."""

    class Sums(nn.Module):
        def forward(self, x):
            x = x if x.is_contiguous() else 2 * x
            return (x / x.norm()) * x.mean() * x.sum()

    def run(offload):
        torch.manual_seed(0)
        leaf = torch.randn(256, 256, requires_grad=True)
        net = nn.Sequential(Sums(), Sums())
        with gradckpt.enable(net, None, modules=Sums, offload=offload):
            (gradient,) = torch.autograd.grad(net(LAYOUTS[layout](leaf * 1)).sum(), leaf)
        return gradient

    assert torch.equal(run(place), run(False))


@pytest.mark.parametrize("options", [{"compress": None}, {"compress": "int8", "recompute": False}])
def test_a_write_in_place_is_refused_as_without(place, options):
    net = nn.Sequential(Block(), Block())
    x = torch.randn(512, 64, requires_grad=True)
    with gradckpt.enable(net, modules=Block, offload=place, **options):
        loss = net(x).sum()
        with torch.no_grad():
            x.mul_(0)
            net[0].up.weight.mul_(0)
            net[1].up.weight.mul_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_and_masks_stay(place):
    """Also where nothing is recomputed: autograd saves the weights, too."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x, mask):
            return self.linear(x).masked_fill(mask, 0)

    net = nn.ModuleList(Masked() for _ in range(3))
    for recompute in (True, False):
        with gradckpt.enable(net, modules=Masked, offload=place, recompute=recompute):
            h, mask = torch.randn(2, 512, requires_grad=True) * 1, torch.rand(64, 2, 512) > 0.5
            for layer in net:
                h = layer(h, mask).mean(0)
            h.sum().backward()
        # Saved masks are payloads of 8 KiB; a weight has 1 MiB, and the mask as it is 64 KiB.
        peak = figures_of(place, REGIONS if recompute else SAVED)["memory_peak"]
        assert peak <= (0 if recompute else 3 * 8 << 10)


def test_threads_share_a_store_and_its_little_memory(place):
    """Of as many bytes as one of them needs at a time."""
    tight = dataclasses.replace(place, host_budget=64 << 10)
    found, want = {}, {}

    def train(seed, offload, into):
        net = nn.Sequential(*(Block() for _ in range(4)))
        x = torch.full((256, 64), seed / 8).requires_grad_()
        for p in net.parameters():
            nn.init.constant_(p, 0.01 * seed)
        for block in net:
            gradckpt.enable(block, None, modules=block, offload=offload)
        (into[seed],) = torch.autograd.grad(net(x * 1).sum(), x)

    for offload, into in ((False, want), (tight, found)):
        in_threads(*(functools.partial(train, seed, offload, into) for seed in range(6)))
    assert all(torch.equal(found[seed], want[seed]) for seed in range(6))
    figures = figures_of(tight)
    assert figures["gets"] >= 6 * 3
    assert figures["read"] <= 4 * figures["gets"] * (64 << 10)


def test_ranks_on_one_machine_share_a_percentage(monkeypatch):
    monkeypatch.setattr("gradckpt._offload.free_host_memory", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert gradckpt.Offload(host_budget="80%").host_bytes() == 200
    assert gradckpt.Offload(host_budget="2MiB").host_bytes() == 2 << 20


@pytest.mark.parametrize(
    ("offload", "error", "words"),
    [
        ("tape", ValueError, "offload='tape' is no place; pass 'cpu' or 'disk'"),
        (3, TypeError, "offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not 3"),
        ({"place": "disk", "budget": 1}, ValueError, r"unknown key 'budget' in offload=; did you mean 'host_budget'\?"),
        (
            {"place": "disk", "min_bytes": "2MiB", "host_budget": "1MiB"},
            ValueError,
            "so nothing could move; lower min_bytes",
        ),
        ({"place": "disk", "host_budget": "big"}, ValueError, "host_budget='big' is not a size"),
        ({"place": "disk", "prefetch": -1}, ValueError, "prefetch=-1 is no count"),
        ({"place": "disk", "ring": "wide"}, ValueError, "ring='wide' is not a size"),
        ({"place": "cpu", "directory": "/tmp"}, ValueError, r"only Offload\('disk'\) has a directory"),
        ({"place": "cpu", "host_budget": "0%"}, ValueError, "'0%' is no part of the memory"),
        ({"place": "cpu", "fallback": "never"}, ValueError, "fallback='never' is unknown"),
        ({"place": "disk", "directory": "/proc"}, ValueError, "cannot use the directory /proc"),
    ],
)
def test_what_is_none(offload, error, words):
    with pytest.raises(error, match=f"^gradckpt: .*{words}"):
        gradckpt.enable(nn.Sequential(Block(), Block()), modules=Block, offload=offload)


def test_what_is_too_large_stays_and_is_said_once(tmp_path, place):
    small = gradckpt.Offload("disk", directory=tmp_path, min_bytes=1024, host_budget=8192)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="larger than host_budget"):
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


def test_what_an_ended_place_has_counted_stays(tmp_path, place):
    gradckpt.stats.reset()
    for size in ("4MiB", "5MiB", "6MiB"):  # each ends where the next begins
        gradients(compress=None, offload=gradckpt.Offload("disk", directory=tmp_path, min_bytes=1024, host_budget=size))
        gc.collect()
    found = gradckpt.stats()["offload"]
    assert found["puts"] == found["gets"] > 0
    assert found["puts"] % 3 == 0
    assert places.figures(restart=True)["puts"] == found["puts"]
    assert places.figures()["puts"] == 0
