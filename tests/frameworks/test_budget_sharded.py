"""Budgets of a model that fully_shard has sharded, on two ranks."""

import pytest
import world_sharded_budget
import worlds

_REFUSED = "gradckpt: this sharded model cannot be planned: "


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return worlds.run(world_sharded_budget.fully_sharded, tmp_path_factory.mktemp("sharded"))


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
    """Its gradients are halves in float32, and before they are reduced whole ones."""
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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "unreduced",
            "gradckpt: this sharded model does not reduce its gradients now; call set_requires_gradient_sync(",
        ),
        ("error", "gradckpt: error= cannot be measured on a sharded model; call plan() before fully_shard(model)"),
        ("parts", f"{_REFUSED}parts of its Block are sharded alone; choose these parts with modules="),
        ("two dimensions", f"{_REFUSED}it has DTensors that fully_shard() did not make; call plan() before "),
        ("a part", f"{_REFUSED}it is a part of a model that is sharded; pass the whole model"),
    ],
)
def test_refused(ranks, case, message):
    assert ranks[0]["refusals"][case].startswith(message)
