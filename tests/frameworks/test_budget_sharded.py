"""Budgets of a model that fully_shard or FullyShardedDataParallel has sharded, on two ranks."""

import contextlib
import gc
import re

import pytest
import torch
import torch.distributed as dist
import worlds
from small_models import NET_WIDTH, ROWS, Net, PlannedBlock, fixed_costs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import gradckpt
from gradckpt._planning import fsdp
from gradckpt._planning.device_memory import ParameterWalk

# ---- Two ranks with a sharded model that plan for budgets; the ranks of test_budget_sharded.py.

LAYERS = 4
X = torch.randn(ROWS, NET_WIDTH, generator=torch.Generator().manual_seed(3))


def whole():
    gc.collect()  # models that are gone count as other tensors until then
    torch.manual_seed(0)
    return Net(LAYERS)


def sharded(net=None, **options):
    net = net or whole()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def wrapped(net=None, **options):
    """A model in FSDP1, each block of it in one of its own."""
    policy = ModuleWrapPolicy({PlannedBlock})
    return FullyShardedDataParallel(net or whole(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def without_reducing(net):
    if isinstance(net, FullyShardedDataParallel):
        return net.no_sync()
    net.set_requires_gradient_sync(False)
    return contextlib.closing(type("", (), {"close": lambda self: net.set_requires_gradient_sync(True)})())


def local_gradients(net):
    return {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in net.named_parameters()}


def gradients(net, end):
    net.zero_grad()
    net(X).backward()
    end()
    found = local_gradients(net)
    net.zero_grad()
    return found


def equal(some, others):
    """Whether gradients are equal; FSDP1 has none of what lies on the other rank."""
    return some.keys() == others.keys() and all(
        others[name] is None if x is None else torch.equal(x, others[name]) for name, x in some.items()
    )


def peak(step):
    """The least of several steps: gloo's threads let go of tensors late, and sometimes unseen."""
    peaks = []
    for _ in range(8):
        with gradckpt.track_memory() as memory:
            step()
        peaks.append(memory.peak)
    return min(peaks)


def planned(net, *budgets, end=lambda: None):
    """The plans of a model: options, budget and bytes, and whether gradients stay as they are.
    ``end``: what a backward's caller calls after it.
    """
    exact = gradients(net, end)

    def step():
        net.zero_grad()
        net(X).backward()
        end()

    found = []
    for budget in budgets:
        plan = gradckpt.plan(net, (X,), budget=f"activations:{budget}")  # models of FSDP1 live on as other tensors
        with plan.apply(net):
            total = sum(plan.fixed.values()) + peak(step)
            same = equal(exact, gradients(net, end))
        found.append([[region.option.name for region in plan.regions], plan.budget, plan.peak, total, same])
    return found


def trained(net, budget):
    """A budget that is planned while a model trains with AdamW, with two batches for each step, of
    which the second reduces gradients.
    """
    optimizer = torch.optim.AdamW(net.parameters())

    def step():
        with without_reducing(net):
            net(X).backward()
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
    return [[each.gradients, each.reduces, each.parameters == found[1].parameters] for each in found]


def walked_in_fsdp1():
    """The same; weights stay gathered while gradients are not reduced."""
    net, walk = whole(), ParameterWalk()
    found = [walk.read(net)]
    net = wrapped(net, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    for context in (contextlib.nullcontext(), net.no_sync()):
        net.zero_grad()
        with context:
            net(X).backward()
            found.append(walk.read(net))
    return [[each.gradients, each.reduces, each.parameters == found[1].parameters] for each in found]


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
    calls = {
        "unreduced": lambda: gradckpt.plan(unreduced, (X,), budget="1GiB"),
        "parts": lambda: gradckpt.plan(parts_sharded(), (X,), budget="1GiB"),
        "two dimensions": lambda: gradckpt.plan(in_two_dimensions(), (X,), budget="1GiB"),
        "a part": lambda: (unreduced(X), gradckpt.plan(unreduced.blocks, (X,), budget="1GiB", modules="*")),
        **refusals_of(sharded),
    }
    return {name: refusal(call) for name, call in calls.items()}


def refusals_of_fsdp1():
    net, prefetching, hooked = wrapped(), wrapped(forward_prefetch=True), wrapped()
    hooked.register_comm_hook(None, lambda state, whole, shard: None)
    mixed = whole()
    fully_shard(mixed.embed)
    blocks = net.module.blocks

    def unreduced():
        with net.no_sync():
            gradckpt.plan(net, (X,), budget="1GiB")

    calls = {
        "unreduced": unreduced,
        "wrappers": lambda: gradckpt.plan(net, (X,), budget="1GiB", modules=list(blocks)),
        "a part": lambda: (net(X), gradckpt.plan(blocks, (X,), budget="1GiB", modules="*")),
        "offloaded": lambda: gradckpt.plan(wrapped(cpu_offload=CPUOffload(True)), (X,), budget="1GiB"),
        "prefetching": lambda: gradckpt.plan(prefetching, (X,), budget="1GiB"),
        "a hook": lambda: gradckpt.plan(hooked, (X,), budget="1GiB"),
        "both": lambda: gradckpt.plan(nn.Sequential(wrapped(), mixed), (X,), budget="1GiB", modules=PlannedBlock),
        **refusals_of(wrapped),
    }
    return {name: refusal(call) for name, call in calls.items()}


def refusals_of(make):
    live = make()
    gradckpt.enable(live, budget="1MiB")
    return {
        "too small": lambda: gradckpt.plan(make(), (X,), budget="1MiB"),
        "too small, live": lambda: live(X),
        "error": lambda: gradckpt.plan(make(), (X,), budget="1GiB", error="1%"),
    }


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)


def before_and_after(make):
    """Apply a plan of the whole model to the sharded one, and the reverse: modules."""
    net = make()
    here = gradckpt.plan(net, (X,), budget="activations:5MiB")
    there = gradckpt.plan(whole(), (X,), budget="activations:5MiB")
    found = []
    for plan, model in ((there, net), (here, whole())):
        plan.apply(model)
        expected = [region.name for region in plan.regions if region.option.name != "keep"]
        modules = gradckpt.enable(model, plan=plan).modules
        before = [re.sub(r"\.?_fsdp_wrapped_module", "", name).removeprefix(".") for name in modules]
        found.append([expected, before])
    return found


def accumulated(make, plans):
    """Gradients of three batches, of which the first and the last are reduced; with plans between
    these, one of which fails.
    """
    net = make()
    net(X).backward()
    with without_reducing(net):
        net(X).backward()
    if plans:
        gradckpt.plan(net, (X,), budget="1GiB")
        with pytest.raises(ValueError, match="the step cannot be simulated"):
            gradckpt.plan(net, (X[:, 1:],), budget="1GiB")
    net(X).backward()
    return local_gradients(net)


def keeps_gradients(make):
    return equal(accumulated(make, False), accumulated(make, True))


def states_of(net):
    """What FSDP and modules have: the attributes of each, with the content of lists."""
    owners = [*net.modules()]
    for unit in FullyShardedDataParallel.fsdp_modules(net):
        owners += [unit._handle, unit._handle.flat_param, unit._exec_order_data]
    second = fsdp.FSDP2State(net)
    owners += [*second.states, *second.groups, *second.parameters, *second._contexts()]
    owners += [x for p in second.parameters for x in (p.sharded_param, p._unsharded_param)]
    tables = [vars(owner) for owner in owners] + [module._parameters for module in net.modules()]
    listed = [[(key, *(x if isinstance(x, list) else [x])) for key, x in table.items()] for table in tables]
    return [*listed, [(p, p.grad, p.data_ptr(), p._version) for p in owners if isinstance(p, nn.Parameter)]]


def leaves_states(make):
    """Whether all is the same object as before where a simulated step fails in the middle."""
    net = make()
    net(X).backward()
    before = states_of(net)
    with pytest.raises(ValueError, match="the step cannot be simulated"):
        gradckpt.plan(net, (X[:, 1:],), budget="1GiB")
    after = states_of(net)

    def is_same(x, y):
        if isinstance(x, (list, tuple)):
            return len(x) == len(y) and all(map(is_same, x, y))
        return x is y or (not isinstance(x, torch.Tensor) and x == y)

    return is_same(before, after)


def gathered(reshards):
    """Whether a model has its weights after a plan that found some of them gathered."""
    net = sharded()
    before = {name: x._local_tensor.clone() for name, x in net.state_dict().items()}
    net.set_reshard_after_backward(reshards)
    with torch.no_grad():
        net(X)
    gradckpt.plan(net, (X,), budget="1GiB")
    return equal(before, {name: x._local_tensor for name, x in net.state_dict().items()})


def finalized_by_the_caller():
    """Plans of a model whose caller ends the backward, where torch (2.15) has that."""
    net = sharded()
    if not hasattr(net, "set_manual_backward_finalization"):
        return []
    net.set_manual_backward_finalization(True)
    return planned(net, "6MiB", end=net.finalize_backward)


def fully_sharded():
    def mixed():
        return sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def replicated():
        return sharded(mesh=mesh)

    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return {
            "trained": trained(sharded(), "12MiB"),
            "plans": [
                *planned(sharded(), "4.4MiB", "6MiB", "7.3MiB"),
                *planned(sharded(reshard_after_forward=False), "6MiB"),
                *planned(replicated(), "5.5MiB"),
                *finalized_by_the_caller(),
            ],
            "another model": len(gradckpt.plan(sharded(Net(2)), (X,), budget="1GiB").regions),
            "walked": walked(),
            "before and after": before_and_after(sharded),
            "keeps": [keeps_gradients(make) for make in (sharded, mixed, replicated)],
            "leaves": [leaves_states(make) for make in (sharded, mixed)],
            "gathered": [gathered(reshards) for reshards in (True, False)],
            "refusals": refusals(),
        }


def in_fsdp1():
    def other(net=None, **options):
        return wrapped(net, use_orig_params=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        return {
            "trained": trained(other(), "11MiB"),
            "plans": [
                *planned(wrapped(), "4MiB", "5MiB", "7MiB"),
                *planned(other(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), "6MiB"),
                *planned(wrapped(sharding_strategy=ShardingStrategy.NO_SHARD), "5MiB"),
            ],
            "walked": walked_in_fsdp1(),
            "before and after": before_and_after(wrapped),
            "keeps": [keeps_gradients(make) for make in (wrapped, other)],
            "leaves": [leaves_states(make) for make in (wrapped, other)],
            "refusals": refusals_of_fsdp1(),
        }


_REFUSED = "gradckpt: this sharded model cannot be planned: "


PROGRAMS = {"fsdp1": in_fsdp1, "fsdp2": fully_sharded}


@pytest.fixture(scope="module", params=PROGRAMS)
def ranks(request, tmp_path_factory):
    return worlds.run(PROGRAMS[request.param], tmp_path_factory.mktemp(request.param))


of_fsdp2 = pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)


def test_the_peak_of_each_rank_stays_within_the_budget(ranks):
    for rank in ranks:
        for _, budget, peak, measured, _ in rank["plans"]:
            assert measured <= peak <= budget
        assert rank["plans"][0][0] != rank["plans"][1][0] != rank["plans"][2][0], "a larger budget is used"


def test_gradients_stay_as_they_are(ranks):
    assert all(equal for rank in ranks for *_, equal in rank["plans"])


def test_ranks_have_one_plan(ranks):
    first, second = ranks
    assert [plan[:2] for plan in first["plans"]] == [plan[:2] for plan in second["plans"]]


@of_fsdp2
def test_a_second_model_has_a_plan_of_its_own(ranks):
    assert [rank["another model"] for rank in ranks] == [2, 2]


def test_a_budget_while_training(ranks):
    """Whole gradients of the first batch of each step, and shards of the states, count."""
    for rank in ranks:
        options, budget, measured, states, gradients = rank["trained"]
        assert measured <= budget
        assert set(options) != {"keep"}, "the budget is too small for that"
        assert gradients == 4 * 544384
        assert 4 * 544384 <= states < 4 * 545000, "two numbers for each of half of the weights"


def test_a_walk_sees_that_a_model_is_sharded(ranks):
    """Gradients are halves, and before they are reduced whole ones; parameters have not changed."""
    for rank in ranks:
        whole, reduced, unreduced = rank["walked"]
        assert whole == [0, True, False]
        assert reduced == [2 * 544384, True, True]
        assert unreduced == [4 * 544384, False, True]


def test_plans_apply_before_sharding_and_after(ranks):
    for planned, checkpointed in ranks[0]["before and after"]:
        assert planned
        assert checkpointed == planned


def test_all_ranks_refuse_a_budget_that_is_too_small(ranks):
    for rank in ranks:
        for case in ("too small", "too small, live"):
            assert rank["refusals"][case].startswith("gradckpt: no plan stays within 1MiB; the smallest budget is ")


def test_planning_leaves_what_fsdp_has(ranks):
    for rank in ranks:
        assert all(rank["keeps"]), "gradients, reduced and not, of earlier batches"
        assert all(rank["leaves"]), "its states where a plan fails"


@of_fsdp2
def test_planning_leaves_weights_that_lie_gathered(ranks):
    assert [rank["gathered"] for rank in ranks] == [[True, True]] * 2


_NOT_REDUCED = "gradckpt: this sharded model does not reduce its gradients now; "
_NO_ERROR = "gradckpt: error= cannot be measured on a sharded model; call plan() before FSDP shards it"
_PART = f"{_REFUSED}it is a part of a model that is sharded; pass the whole model"
SAID = {
    ("fsdp2", "unreduced"): f"{_NOT_REDUCED}call set_requires_gradient_sync(",
    ("fsdp2", "error"): _NO_ERROR,
    ("fsdp2", "parts"): f"{_REFUSED}parts of its PlannedBlock are sharded alone; choose these parts with modules=",
    ("fsdp2", "two dimensions"): f"{_REFUSED}it has DTensors that fully_shard() did not make; call plan() before ",
    ("fsdp2", "a part"): _PART,
    ("fsdp1", "unreduced"): _NOT_REDUCED,
    ("fsdp1", "error"): _NO_ERROR,
    ("fsdp1", "wrappers"): f"{_REFUSED}a region is FullyShardedDataParallel; choose PlannedBlock in it with modules=",
    ("fsdp1", "a part"): _PART,
    ("fsdp1", "offloaded"): f"{_REFUSED}its weights are offloaded to the host; call plan() before ",
    ("fsdp1", "prefetching"): f"{_REFUSED}it gathers weights in the order of its first step; call plan() after that",
    ("fsdp1", "a hook"): f"{_REFUSED}it reduces gradients in a way of its own; call plan() before ",
    ("fsdp1", "both"): f"{_REFUSED}fully_shard() has parts of it, too; call plan() before ",
}


@pytest.mark.parametrize(("ranks", "case"), SAID, indirect=["ranks"])
def test_refused(ranks, case, request):
    program = request.node.callspec.params["ranks"]
    assert ranks[0]["refusals"][case].startswith(SAID[program, case])
