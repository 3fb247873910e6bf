"""A budget of a model that two ranks train: one plan for both."""

import pytest
import torch
import torch.distributed as dist
import worlds
from small_models import NET_WIDTH, ROWS, fixed_costs, net
from torch.nn.parallel import DistributedDataParallel

import gradckpt
from gradckpt._planning.region_plan import NoPlan

# ---- Two ranks that plan for a budget; the ranks of test_budget_ranks.py.


def train(ddp, rows, steps=2):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        ddp(torch.randn(rows, NET_WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


def larger_on_one_rank():
    """In the second call rank 1 alone has more rows, and plans alone."""
    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        ddp = DistributedDataParallel(net())
        gradckpt.enable(ddp, budget="activations:64MiB")
        for rows in (ROWS // 2, ROWS // 2 * (1 + dist.get_rank()), ROWS // 2):
            train(ddp, rows, steps=1)
        return torch.cat([p.detach().flatten() for p in ddp.parameters()]).sum().item()


def planned():
    """Rank 0 has more rows, rank 1 the smaller budget."""
    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        ddp = DistributedDataParallel(net(12))
        rank = dist.get_rank()
        gradckpt.enable(ddp, budget=f"activations:{13 - 2 * rank}MiB")
        train(ddp, ROWS // (1 + rank))
        live = vars(ddp)["_gradckpt_budget"]
        options, peak = [region.option.name for region in live.plan.regions], live.plan.peak
        held = sum(live.plan.fixed.values())
        equal = torch.cat([p.detach().flatten() for p in ddp.parameters()]).sum().item()
        gradckpt.enable(ddp, budget="activations:1MiB")
        try:
            train(ddp, ROWS)
        except NoPlan as error:
            return options, peak - held, equal, str(error)


def test_ranks_have_one_plan(tmp_path):
    first, second = worlds.run(planned, tmp_path)
    assert first == second
    options, peak, _, refused = first
    assert len(set(options)) > 1
    assert peak <= 11 * 2**20, "the smallest budget, with the most rows"
    assert refused.startswith("gradckpt: no plan stays within activations:1MiB; the smallest budget is ")


def test_a_rank_may_plan_again_alone(tmp_path):
    first, second = worlds.run(larger_on_one_rank, tmp_path)
    assert first == second
