"""Budgets of a model that fully_shard or FullyShardedDataParallel has sharded, on two ranks."""

import pytest
import world_sharded_budget
import worlds

_REFUSED = "gradckpt: this sharded model cannot be planned: "


PROGRAMS = {"fsdp1": world_sharded_budget.in_fsdp1, "fsdp2": world_sharded_budget.fully_sharded}


@pytest.fixture(scope="module", params=PROGRAMS)
def ranks(request, tmp_path_factory):
    return worlds.run(PROGRAMS[request.param], tmp_path_factory.mktemp(request.param))


of_fsdp1, of_fsdp2 = (pytest.mark.parametrize("ranks", [name], indirect=True) for name in PROGRAMS)


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


@of_fsdp2
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "unreduced",
            "gradckpt: this sharded model does not reduce its gradients now; call set_requires_gradient_sync(",
        ),
        ("error", "gradckpt: error= cannot be measured on a sharded model; call plan() before FSDP shards it"),
        ("parts", f"{_REFUSED}parts of its Block are sharded alone; choose these parts with modules="),
        ("two dimensions", f"{_REFUSED}it has DTensors that fully_shard() did not make; call plan() before "),
        ("a part", f"{_REFUSED}it is a part of a model that is sharded; pass the whole model"),
    ],
)
def test_refused(ranks, case, message):
    assert ranks[0]["refusals"][case].startswith(message)


@of_fsdp1
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unreduced", "gradckpt: this sharded model does not reduce its gradients now; "),
        ("error", "gradckpt: error= cannot be measured on a sharded model; call plan() before FSDP shards it"),
        ("wrappers", f"{_REFUSED}a region is FullyShardedDataParallel; choose Block in it with modules="),
        ("a part", f"{_REFUSED}it is a part of a model that is sharded; pass the whole model"),
        ("offloaded", f"{_REFUSED}its weights are offloaded to the host; call plan() before "),
        ("prefetching", f"{_REFUSED}it gathers weights in the order of its first step; call plan() after that"),
        ("a hook", f"{_REFUSED}it reduces gradients in a way of its own; call plan() before "),
        ("both", f"{_REFUSED}fully_shard() has parts of it, too; call plan() before "),
    ],
)
def test_refused_of_fsdp1(ranks, case, message):
    assert ranks[0]["refusals"][case].startswith(message)
