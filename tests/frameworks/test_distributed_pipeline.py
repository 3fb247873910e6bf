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


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    return worlds.run(world_pipeline.offloaded_pipelines, worlds.with_disk(tmp_path_factory.mktemp("offload")))


@pytest.mark.parametrize(
    ("schedule", "how"), [(s.__name__, how) for s, hows in world_pipeline.OFFLOADED.items() for how in hows]
)
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
        inputs = 2 * world_pipeline.MICRO * r["stages"] * (world_pipeline.BLOCKS - 1)
        assert figures["puts"] >= inputs * (10 if how.startswith("saves") else 1)
        assert figures["gets"] >= inputs * (3 if "Zero" in schedule and how.startswith("apply") else 1)
        assert figures["memory_peak"] <= r["budget"]
        assert min(figures["written"], figures["read"]) > 0
