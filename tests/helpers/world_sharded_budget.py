"""Two ranks with a sharded model that plan for budgets; the ranks of test_budget_sharded.py."""

import gc

import pytest
import torch
import torch.distributed as dist
from planned_nets import ROWS, WIDTH, Net, fixed_costs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradckpt
from gradckpt._planning.parameter_walk import ParameterWalk

LAYERS = 4
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def whole():
    gc.collect()  # models that are gone count as other tensors until then
    torch.manual_seed(0)
    return Net(LAYERS)


def sharded(net=None, **options):
    net = net or whole()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def gradients(net):
    net.zero_grad()
    net(X).backward()
    found = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def peak(step):
    """The least of several steps: gloo's threads let go of tensors late, and sometimes unseen."""
    peaks = []
    for _ in range(4):
        with gradckpt.track_memory() as memory:
            step()
        peaks.append(memory.peak)
    return min(peaks)


def planned(budgets, **options):
    """The plans of a model: options, budget and bytes, and whether gradients stay as they are."""
    net = sharded(**options)
    exact = gradients(net)
    found = []
    for budget in budgets:
        plan = gradckpt.plan(net, (X,), budget=budget)

        def step():
            net.zero_grad()
            net(X).backward()

        with plan.apply(net):
            total = sum(plan.fixed.values()) + peak(step)
            equal = all(torch.equal(exact[name], g) for name, g in gradients(net).items())
        found.append([[region.option.name for region in plan.regions], plan.budget, plan.peak, total, equal])
    return found


def trained(budget):
    """A budget that is planned while a model trains with AdamW, with two batches for each step, of
    which the second reduces gradients.
    """
    net = sharded()
    optimizer = torch.optim.AdamW(net.parameters())

    def step():
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            net(X).backward()
        optimizer.step()
        optimizer.zero_grad()

    gradckpt.enable(net, budget=budget)
    for _ in range(2):
        step()
    plan = vars(net)["_gradckpt_budget"].plan
    held = sum(size for name, size in plan.fixed.items() if name != "gradients")  # the step makes them
    names = [region.option.name for region in plan.regions]
    return [names, plan.budget, held + peak(step), plan.fixed["optimizer states"], plan.fixed["gradients"]]


def walked():
    """What a walk finds of a model that is sharded after it was read: gradients, whether they are
    reduced, and whether the trained parameters are the same; with reduced gradients and without.
    """
    net, walk = whole(), ParameterWalk()
    found = [walk.read(net)]
    sharded(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    for reduces in (True, False):
        net.set_requires_gradient_sync(reduces)
        net.set_reshard_after_backward(reduces)
        net.zero_grad()
        net(X).backward()
        found.append(walk.read(net))
    return [[each.gradients, each.reduces, each.trained == found[1].trained] for each in found]


def parts_sharded():
    net = whole()
    for block in net.blocks:
        fully_shard(block.up)
    return fully_shard(net)


def in_two_dimensions():
    net = whole()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net.embed.weight = nn.Parameter(distribute_tensor(net.embed.weight.detach(), mesh, [Shard(0)]))
    return net


def refusals():
    unreduced = sharded()
    unreduced.set_requires_gradient_sync(False)
    live = sharded()
    gradckpt.enable(live, budget="1MiB")
    calls = {
        "too small": lambda: gradckpt.plan(sharded(), (X,), budget="1MiB"),
        "too small, live": lambda: live(X),
        "unreduced": lambda: gradckpt.plan(unreduced, (X,), budget="1GiB"),
        "error": lambda: gradckpt.plan(sharded(), (X,), budget="1GiB", error="1%"),
        "parts": lambda: gradckpt.plan(parts_sharded(), (X,), budget="1GiB"),
        "two dimensions": lambda: gradckpt.plan(in_two_dimensions(), (X,), budget="1GiB"),
        "a part": lambda: (unreduced(X), gradckpt.plan(unreduced.blocks, (X,), budget="1GiB", modules="*")),
    }
    return {name: refusal(call) for name, call in calls.items()}


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)


def before_and_after():
    """Apply a plan of the whole model to the sharded one, and the reverse: modules."""
    net = sharded()
    here = gradckpt.plan(net, (X,), budget="activations:5MiB")
    there = gradckpt.plan(whole(), (X,), budget="activations:5MiB")
    found = []
    for plan, model in ((there, net), (here, whole())):
        plan.apply(model)
        expected = [region.name for region in plan.regions if region.option.name != "keep"]
        found.append([expected, list(gradckpt.enable(model, plan=plan).modules)])
    return found


def fully_sharded():
    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return {
            "plans": [
                *planned(("7.8MiB", "9MiB", "11MiB")),
                *planned(("10MiB",), reshard_after_forward=False),
                *planned(("11MiB",), mesh=mesh),
            ],
            "trained": trained("12MiB"),
            "another model": len(gradckpt.plan(sharded(Net(2)), (X,), budget="1GiB").regions),
            "walked": walked(),
            "before and after": before_and_after(),
            "refusals": refusals(),
        }
