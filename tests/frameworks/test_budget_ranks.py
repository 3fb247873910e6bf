"""A budget of a model that two ranks train: one plan for both."""

import world_budget
import worlds


def test_ranks_have_one_plan(tmp_path):
    first, second = worlds.run(world_budget.planned, tmp_path)
    assert first == second
    options, peak, _, refused = first
    assert len(set(options)) > 1
    assert peak <= 11 * 2**20, "the smallest budget, with the most rows"
    assert refused.startswith("gradckpt: no plan stays within activations:1MiB; the smallest budget is ")


def test_a_rank_may_plan_again_alone(tmp_path):
    first, second = worlds.run(world_budget.larger_on_one_rank, tmp_path)
    assert first == second
