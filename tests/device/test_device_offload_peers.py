"""Offload beside transformers' and TRL's, on one timeline: bytes, copies and waits of a step."""

import contextlib
import warnings
from typing import NamedTuple

import pytest
import torch
import virtual_device
from checkout import ROOT
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

BLOCKS, ROWS, WIDTH = 16, 64, 256
MIB, AT_ONCE = 2**20, 1e18
#: A copy of a block's input takes half of its forward; of all that it saves, three halves.
SPANS = {"inputs": 0.5, "saved": 1.5}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Way(NamedTuple):
    name: str
    run: object
    lossy: bool = False


def by_transformers(net):
    """What offload=True does there: each region under torch's save_on_cpu."""

    def run(block, x):
        with save_on_cpu(pin_memory=True, device_type="virtual"):
            return torchs_checkpoint(block, x, use_reentrant=False)

    return blocks_run(net, run)


@contextlib.contextmanager
def blocks_run(net, run):
    for block in net:
        block.forward = lambda x, forward=block.forward: run(forward, x)
    yield contextlib.nullcontext()
    for block in net:
        del block.forward


@contextlib.contextmanager
def by_trl(net):
    trl = pytest.importorskip("trl.models.activation_offloading")
    yield trl.get_act_offloading_ctx_manager(net, warn_if_no_head=False)  # which leaves weights where they are


def by_us(codec, **options):
    @contextlib.contextmanager
    def run(net):
        offload = gradckpt.Offload("cpu", min_bytes="4KiB")
        with gradckpt.enable(net, codec, modules=Block, offload=offload, **options):
            yield contextlib.nullcontext()

    return run


WAYS = {
    "inputs": (
        Way("transformers: `save_on_cpu` around each checkpoint", by_transformers),
        Way("gradckpt, `compress=None`", by_us(None)),
        Way("gradckpt, `int8`", by_us("int8"), True),
    ),
    "saved": (
        Way("TRL: `OffloadActivations`", by_trl),
        Way("gradckpt, `raw`, `recompute=False`", by_us("raw", recompute=False)),
        Way("gradckpt, `int8`, `recompute=False`", by_us("int8", recompute=False), True),
    ),
}


def net_of():
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(BLOCKS))).to("virtual")
    x = torch.randn(ROWS, WIDTH).to("virtual").requires_grad_()
    return net, x


def step(net, x, within=None):
    net.zero_grad(set_to_none=False)
    with within or contextlib.nullcontext():
        loss = net(x * 1).square().mean()
    loss.backward()


def timed(net, x, rate, within=None):
    """The timeline of a step, what of it the link's time adds, and gradients.
    Two steps before get memory, and a third has a link that takes no time."""
    found = []
    for each in (AT_ONCE, AT_ONCE, AT_ONCE, rate):
        torch.virtual.synchronize()
        with virtual_device.timeline(each) as timeline:
            step(net, x, within)
        found.append(timeline)
    torch.virtual.synchronize()
    return timeline, timeline.ends - found[-2].ends, [p.grad.cpu() for p in net.parameters()]


def forward_of_a_block(net, x):
    with virtual_device.timeline(1) as timeline:
        net(x * 1)
    return timeline.ends / BLOCKS


def saved_bytes(net, x):
    """Of one block, without its parameters."""
    sizes = []

    def pack(t):
        sizes.append(0 if isinstance(t, nn.Parameter) or t._base is not None else t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net[0](x * 1)
    return sum(sizes)


def measured(kind):
    """Rows of the table, and what each was measured by."""
    net, x = net_of()
    nbytes = x.nbytes if kind == "inputs" else saved_bytes(net, x)
    rate = nbytes / (SPANS[kind] * forward_of_a_block(net, x))
    plain, _, want = timed(net, x, rate)
    rows, found = [], {}
    if kind == "inputs":
        with blocks_run(net, lambda block, x: torchs_checkpoint(block, x, use_reentrant=False)):
            plain, _, _ = timed(net, x, rate)
    for way in WAYS[kind]:
        with way.run(net) as within, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t, exposed, got = timed(net, x, rate, within)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 if way.lossy else 1e-6)
        (back, out), (bytes_back, bytes_out) = t.copies, (n / MIB for n in t.nbytes)
        cells = f"{bytes_out:.2f}, {bytes_back:.2f} | {out}, {back} | {t.host_waits} | {exposed / plain.ends:.0%}"
        rows.append(f"| {way.name} | {cells} |")
        found[way.name] = t, exposed
    return rows, found


@pytest.mark.usefixtures("host_codecs")
@pytest.mark.parametrize("kind", list(WAYS))
def test_a_step_beside_theirs(kind):
    with virtual_device.ordered_threads():
        rows, found = measured(kind)
    (theirs, exposed), *ours = found.values()
    assert all(t.host_waits == 0 for t, _ in ours)
    assert all(t.copies[0] <= t.copies[1] for t, _ in ours)
    assert all(each == 0 for _, each in ours)
    assert exposed > 0 or theirs.host_waits > 0
    page = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []
    assert "test_device_offload_peers.py" in page
