"""torch's own engines, two ranks on gloo: DDP, FSDP,
fully_shard over checkpoint_wrapper and apply, beside torch's."""

import os
import re

import pytest
import world_accelerate
import world_torch
import worlds
from checkout import ROOT

ENGINES = {
    "ddp": ("None", "int8", "apply None", "apply int8"),
    "ddp unused": ("None", "int8"),
    "ddp static": ("None", "int8"),
    "fsdp1": ("None", "int8"),
    "fsdp1 outside": ("None", "int8"),
    "fsdp1 bf16": ("None", "int8"),
    "fsdp2": ("None", "int8", "apply None", "apply int8"),
    "fsdp2 outside": ("None", "int8"),
    "fsdp2 kept": ("None", "int8"),
    "fsdp2 bf16": ("None", "int8"),
    "hsdp": ("None", "int8"),
}


#: Engines that also train with nothing recomputed.
SAVES = ("ddp", "fsdp1", "fsdp2", "fsdp2 bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(world_torch.torch_engines, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("engine", "how"), [(e, how) for e, hows in ENGINES.items() for how in hows])
def test_engine(found, engine, how):
    for rank in found:
        r = rank[engine][how]
        print(f"{engine}, {how}: {r['wrapped']} modules checkpointed, {r['bytes_in']} -> {r['bytes_out']} bytes")
        regions = 2 * world_torch.LAYERS  # micro-batches
        assert r["wrapped"] == world_torch.LAYERS
        assert r["regions"] == r["recomputes"] == regions
        assert r["keys"], "state_dict has other keys than the plain model"
        world_torch.assert_as_torchs(r, how, regions)
        if not how.endswith("None"):
            values = world_torch.ROWS * world_torch.LENGTH * world_torch.WIDTH
            assert r["bytes_in"] == regions * values * (2 if "bf16" in engine else 4)
            assert r["bytes_out"] == regions * values * 8.25 / 8  # a byte for each row of 64


@pytest.mark.parametrize("engine", SAVES)
@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_nothing_recomputed(found, engine, codec):
    for rank in found:
        r = rank[engine][f"saves {codec}"]
        print(
            f"{engine}, {codec}: {r['compressed']} of {r['eligible']} saves, {r['bytes_in']} -> {r['bytes_out']} bytes"
        )
        assert r["wrapped"] == 1
        assert r["regions"] == r["recomputes"] == 0
        assert r["same losses"]
        assert r["keys"]
        assert r["compressed"] > 2 * world_torch.LAYERS
        assert r["bytes_out"] < (0.9 if codec == "lossless" else 0.6) * r["bytes_in"]
        assert r["equal"] == (codec == "lossless")
        assert r["error"] < 0.02


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("how", ["int8", "stochastic"])
def test_replicas_encode_to_identical_bytes(found, engine, how):
    first, second = (rank["hashes"][f"{engine} {how}"] for rank in found)
    assert first == second
    assert first[0] == 4 * world_torch.LAYERS  # codes and scales


def test_rounding_is_seen_in_the_bytes(found):
    hashes = found[0]["hashes"]
    assert hashes["ddp int8"] != hashes["ddp stochastic"]


# ---- offload


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory):
    return worlds.run(world_torch.offloaded_engines, worlds.with_disk(tmp_path_factory.mktemp("offload")))


def same_as_without(r):
    assert r["same losses"]
    assert r["equal"], "a gradient differs from that without offload"
    assert r["live_bytes"] == r["figures"]["memory_used"] == r["figures"]["file_used"] == 0


@pytest.mark.parametrize(
    ("engine", "how"), [(e, how) for e, (_, hows) in world_torch.OFFLOADED.items() for how in hows]
)
def test_offloaded(offloaded, engine, how):
    """Each backward reads from the file all that memory had no room for."""
    way, _ = how.split()
    inputs = 4 * world_torch.LAYERS  # micro-batches
    for rank in offloaded:
        r = rank[f"{engine} {how}"]
        same_as_without(r)
        figures = r["figures"]
        print(f"{engine}, {how}: {figures['puts']} payloads, {figures['written']} bytes to the file")
        assert figures["kept"] == 0
        assert figures["puts"] == inputs * (4 if way == "policy" else 1) or way == "saves"
        assert figures["gets"] >= figures["puts"] >= inputs * (8 if way == "saves" else 1)
        assert figures["memory_peak"] <= r["budget"]
        assert min(figures["written"], figures["read"]) >= 4 * r["budget"]


@pytest.mark.parametrize(("engine", "how"), [(e, how) for e, hows in world_torch.WITHOUT_ROOM.items() for how in hows])
def test_one_rank_has_no_room(offloaded, engine, how):
    """Its payloads stay, which is counted; the other rank's move."""
    without, other = (rank[f"{engine} {how} without room"] for rank in offloaded)
    same_as_without(without)
    same_as_without(other)
    assert without["figures"]["kept"] >= 4 * world_torch.LAYERS
    assert without["figures"]["written"] == other["figures"]["kept"] == 0
    assert other["figures"]["read"] >= 4 * other["budget"]


# ---- accelerate


ACCELERATE = {
    "plain": ("wrap None", "wrap int8", "enable None", "enable int8", "apply int8"),
    "fsdp1": ("wrap None", "wrap int8", "enable None", "enable int8", "apply int8"),
    "fsdp1 late": ("wrap None", "wrap int8"),
    "fsdp2": ("wrap None", "wrap int8", "enable None", "enable int8", "apply int8"),
}


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory):
    return worlds.run(world_accelerate.accelerate_engines, tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize(("engine", "how"), [(e, how) for e, hows in ACCELERATE.items() for how in hows])
def test_accelerate(accelerated, engine, how):
    prefix = {"plain": "DistributedDataParallel", "fsdp1": "FullySharded", "fsdp2": "FSDPLlama"}[engine.split()[0]]
    for rank in accelerated:
        r = rank[engine][how]
        assert r["engine"].startswith(prefix)
        assert r["wrapped"] == 3
        assert r["regions"] == r["recomputes"] == 6
        assert r["keys"]
        world_torch.assert_as_torchs(r, how, 6)
        assert how.endswith("None") or 0 < r["bytes_out"] < 0.26 * r["bytes_in"]


@pytest.mark.parametrize("version", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        (
            "wrap",
            "LlamaDecoderLayer is checkpointed already: by torch's CheckpointWrapper; leave out apply_activation_",
        ),
        ("enable", "is checkpointed already: by torch's CheckpointWrapper"),
        (
            "apply",
            "would run three times, checkpointed by gradckpt.enable and again by torch's CheckpointWrapper",
        ),
    ],
)
def test_fsdps_own_flag_beside_ours_is_an_error(accelerated, version, way, says):
    for rank in accelerated:
        message = rank["flags"][f"{version} {way}"]
        assert message is not None
        assert says in message
        assert message.startswith("gradckpt: ")
        assert "activation_checkpointing flag" in message


def test_ranks_disagree_about_enable(accelerated):
    for rank in accelerated:
        ranks = rank["ranks"]
        assert "the ranks disagree about Codecby_enable in gradckpt.enable: " in ranks["by_enable"]
        assert "rank 0 has int8" in ranks["by_enable"]
        assert "rank 1 has int4" in ranks["by_enable"]
        assert "rank 1 has no compression" in ranks["by_enable None"]
        assert ranks["by_enable agreed"] is None


@pytest.mark.parametrize("version", ["fsdp1", "fsdp2"])
def test_a_wrapped_model_and_the_flag_are_an_error_when_the_model_is_prepared(accelerated, version):
    assert [rank["flags"][f"{version} prepare"] for rank in accelerated] == ["refused", "refused"]


# ---- the example


@pytest.mark.parametrize(("engine", "compress"), [("fsdp2", "int8"), ("fsdp1", "none")])
def test_example(engine, compress):
    """As a user runs it."""
    command = ["examples/fsdp.py", "--engine", engine, "--compress", compress, "--steps", "3", "--layers", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = worlds.torchrun(*command, cwd=ROOT, env=env, timeout=worlds.LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{engine} on 2 ranks, 3 steps: 3 blocks wrapped" in done.stdout
    if compress == "none":
        assert "losses equal to the last bit: 3 of 3" in done.stdout
    else:
        assert "compressed on this rank: 9 of 9 inputs" in done.stdout
        # The later ones may be.
        assert re.search(r"losses equal to the last bit: [12] of 3, the first too", done.stdout)
