"""What each rank does in the tests of torch's pipeline schedules."""

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from world_torch import COMPRESS, WIDTH, Block, compare, is_block, wrap
from worlds import RANK

import gradckpt

BLOCKS, MICRO = 3, 4

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
    if how == "torch":
        return wrap(blocks, how)
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


def step(schedule, how):
    """Gradients by name, losses and calls of the stages of this rank, and what gradckpt counted."""
    gradckpt.stats.reset()
    mine = SCHEDULES[schedule][RANK]
    total = sum(map(len, SCHEDULES[schedule]))
    modules = [stage(index, how) for index in mine]
    calls = Calls(modules)
    stages = [PipelineStage(m, i, total, torch.device("cpu")) for m, i in zip(modules, mine, strict=True)]
    run = schedule(
        stages if total > 2 else stages[0], n_microbatches=MICRO, loss_fn=lambda out, to: (out - to).square().mean()
    )
    x = torch.randn(2 * MICRO, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    last = {"target": torch.zeros_like(x), "losses": losses} if total - 1 in mine else {}
    run.step(*([x] if 0 in mine else []), **last)
    parameters = [p.grad for m in modules for p in m.parameters()]
    return dict(enumerate(parameters)), [loss.item() for loss in losses], calls.n, gradckpt.stats()


def pipelines():
    found = {}
    for schedule in SCHEDULES:
        gradients, losses, calls, _ = step(schedule, "torch")
        for how in ("None", "int8"):
            mine, its_losses, its_calls, stats = step(schedule, how)
            found[f"{schedule.__name__} {how}"] = {
                **compare(mine, gradients),
                "same losses": its_losses == losses,
                "calls": [its_calls, calls],
                **{key: stats[key] for key in ("compressed", "eligible", "live_bytes")},
            }
    return found
