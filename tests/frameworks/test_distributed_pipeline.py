"""torch's pipeline schedules, two ranks on gloo: several micro-batches alive,
backwards split in two."""

import pytest
import torch
import worlds
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from world_torch import ALL, COMPRESS, WIDTH, Block, assert_as_torchs, compare, disk, figures, is_block, wrap
from worlds import RANK

import gradckpt

# ---- What each rank does in the tests of torch's pipeline schedules.

BLOCKS, MICRO, LENGTH = 3, 4, 16

#: Of a place on the disk: the payloads of a block's input that its memory holds.
ROOM = {"values": 2 * LENGTH * WIDTH, "payloads": 1 if RANK else 3}

#: The stages of each rank.
SCHEDULES = {
    pipelining.ScheduleGPipe: ([0], [1]),
    pipelining.Schedule1F1B: ([0], [1]),
    pipelining.ScheduleInterleaved1F1B: ([0, 2], [1, 3]),
    pipelining.ScheduleInterleavedZeroBubble: ([0, 2], [1, 3]),
    ScheduleZBVZeroBubble: ([0, 3], [1, 2]),
}


def stage(index, how):
    torch.manual_seed(index)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS))).train()
    for block in blocks:
        block.dropout.p = 0.0  # schedules draw in different orders
    if how in ("torch", "plain") or " " in how:
        return wrap(blocks, how, **ROOM)
    assert gradckpt.compat.apply_activation_checkpointing(blocks, COMPRESS[how], check_fn=is_block) == BLOCKS
    return blocks


class Calls:
    """Of blocks: forwards and recomputes."""

    def __init__(self, modules):
        self.n = 0
        for module in modules:
            for block in filter(is_block, module.modules()):
                block.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.n += 1


def train(schedule, how, steps=1):
    """Gradients of the last step by name, losses and calls of the stages of this rank, and what
    gradckpt counted."""
    gradckpt.stats.reset()
    mine = SCHEDULES[schedule][RANK]
    total = sum(map(len, SCHEDULES[schedule]))
    modules = [stage(index, how) for index in mine]
    calls = Calls(modules)
    stages = [PipelineStage(m, i, total, torch.device("cpu")) for m, i in zip(modules, mine, strict=True)]
    run = schedule(
        stages if total > 2 else stages[0], n_microbatches=MICRO, loss_fn=lambda out, to: (out - to).square().mean()
    )
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for n in range(steps):
        if n:
            optimizer.step()
            optimizer.zero_grad()
        x = torch.randn(2 * MICRO, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1 + n))
        its_losses = []
        last = {"target": torch.zeros_like(x), "losses": its_losses} if total - 1 in mine else {}
        run.step(*([x] if 0 in mine else []), **last)
        losses += [loss.item() for loss in its_losses]
    return dict(enumerate(p.grad for p in parameters)), losses, calls.n, gradckpt.stats()


def pipelines():
    found = {}
    for schedule in SCHEDULES:
        gradients, losses, calls, _ = train(schedule, "torch")
        for how in ("None", "int8"):
            mine, its_losses, its_calls, stats = train(schedule, how)
            found[f"{schedule.__name__} {how}"] = {
                **compare(mine, gradients),
                "same losses": its_losses == losses,
                "calls": [its_calls, calls],
                **{key: stats[key] for key in ("compressed", "eligible", "live_bytes")},
            }
    return found


#: Two steps of each; of backwards that are split in two, a payload is read twice.
OFFLOADED = {
    pipelining.ScheduleGPipe: ALL,
    pipelining.Schedule1F1B: ALL,
    pipelining.ScheduleInterleaved1F1B: ("apply int8",),
    pipelining.ScheduleInterleavedZeroBubble: ("apply None", "saves lossless"),
    ScheduleZBVZeroBubble: ("apply int8", "saves None"),
}


def offloaded_pipelines():
    found = {}
    for schedule, hows in OFFLOADED.items():
        for how in hows:
            gradients, losses, *_ = train(schedule, "plain" if how == "saves None" else how, steps=2)
            mine, its_losses, *_, stats = train(schedule, f"disk {how}", steps=2)
            found[f"{schedule.__name__} {how}"] = {
                **compare(mine, gradients),
                "same losses": its_losses == losses,
                "figures": figures(),
                "live_bytes": stats["live_bytes"],
                "budget": disk(how, **ROOM).host_budget,
                "stages": len(SCHEDULES[schedule][RANK]),
            }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(pipelines, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("how", ["None", "int8"])
@pytest.mark.parametrize("schedule", [schedule.__name__ for schedule in SCHEDULES])
def test_schedule(found, schedule, how):
    for rank in found:
        r = rank[f"{schedule} {how}"]
        mine, torchs = r["calls"]
        assert mine == torchs > 0  # as often as torch's checkpoint, where a backward is split, too
        assert r["live_bytes"] == 0
        # A stage's own input is a leaf, which the schedule keeps anyway.
        assert_as_torchs(r, how, r["eligible"])
        assert r["eligible"] > 0 or how == "None"


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    return worlds.run(offloaded_pipelines, worlds.with_disk(tmp_path_factory.mktemp("offload")))


@pytest.mark.parametrize(("schedule", "how"), [(s.__name__, how) for s, hows in OFFLOADED.items() for how in hows])
def test_offloaded(offloaded, schedule, how):
    """Payloads of several micro-batches come back in the schedule's order, from the file."""
    for rank in offloaded:
        r = rank[f"{schedule} {how}"]
        figures = r["figures"]
        print(
            f"{schedule}, {how}: {figures['puts']} payloads, {figures['waits_get']} of {figures['gets']} reads waited"
        )
        assert r["same losses"]
        assert r["equal"], "a gradient differs from that without offload"
        assert r["live_bytes"] == figures["memory_used"] == figures["file_used"] == figures["kept"] == 0
        # A stage's own input is a leaf.
        inputs = 2 * MICRO * r["stages"] * (BLOCKS - 1)
        assert figures["puts"] >= inputs * (10 if how.startswith("saves") else 1)
        assert figures["gets"] >= inputs * (3 if "Zero" in schedule and how.startswith("apply") else 1)
        assert figures["memory_peak"] <= r["budget"]
        assert min(figures["written"], figures["read"]) > 0
