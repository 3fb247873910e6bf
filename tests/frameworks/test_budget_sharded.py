"""Budgets of models that fully_shard has sharded, on two ranks."""

import pytest
import world_sharded_budget
import worlds


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return worlds.run(world_sharded_budget.fsdp2, tmp_path_factory.mktemp("fsdp2"))


def test_x(ranks):
    import json
    print(json.dumps(ranks[0], indent=0))
    print(json.dumps(ranks[1]))
