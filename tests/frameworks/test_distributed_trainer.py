"""The Trainer with fsdp_config, two ranks on gloo:
compression by activation_checkpointing_kwargs alone."""

import pytest
import worlds

pytest.importorskip("transformers", minversion="5.17", reason="the Trainer before 5.17 reads fsdp_config otherwise")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    import world_trainer

    return worlds.run(world_trainer.trainers, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("compress", ["None", "int8"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_flag(found, version, compress):
    for rank in found:
        r = rank[f"fsdp{version} {compress}"]
        assert r["engine"] == ["FullyShardedDataParallel", "FSDPLlamaForCausalLM"][version - 1]
        assert r["regions"] == 9  # 3 layers, 3 steps
        mine, stock = r["losses"]
        assert mine[0] == stock[0]
        if compress == "None":
            assert mine == stock
            assert r["equal"], "a parameter differs from that of transformers' own checkpointing"
            assert r["compressed"] == 0
        else:
            assert not r["equal"]
            assert r["error"] < 1e-4
            assert r["compressed"] == r["eligible"] == 9
            assert 0 < r["bytes_out"] < 0.26 * r["bytes_in"]


@pytest.mark.parametrize("version", [1, 2])
def test_fsdps_own_flag_beside_ours_is_an_error(found, version):
    for rank in found:
        assert "can't both be set to True" in rank[f"fsdp{version} flag"]
