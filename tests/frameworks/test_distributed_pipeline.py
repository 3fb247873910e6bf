"""torch's pipeline schedules, two ranks on gloo: several micro-batches alive,
backwards split in two."""

import pytest
import world_pipeline
import worlds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(world_pipeline.pipelines, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("how", ["None", "int8"])
@pytest.mark.parametrize("schedule", [schedule.__name__ for schedule in world_pipeline.SCHEDULES])
def test_schedule(found, schedule, how):
    for rank in found:
        r = rank[f"{schedule} {how}"]
        assert r["same losses"]
        mine, torchs = r["calls"]
        assert mine == torchs > 0  # as often as torch's checkpoint, where a backward is split, too
        assert r["live_bytes"] == 0
        if how == "None":
            assert r["equal"], "a gradient differs from that of torch's checkpointing"
            assert r["compressed"] == 0
        else:
            # A stage's own input is a leaf, which the schedule keeps anyway.
            assert r["compressed"] == r["eligible"] > 0
            assert 0 < r["error"] < 0.01
            assert r["cosine"] > 0.9998
