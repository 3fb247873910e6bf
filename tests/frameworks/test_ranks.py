"""Two ranks on gloo that disagree about the codec, and DTensors as inputs of regions."""

import pytest
import world_ranks
import worlds

WAYS = {
    "by_wrapper": "{}by_wrapperBlock in gradckpt.compat.checkpoint_wrapper",
    "by_many": "'0' of {}by_many",
    "by_apply": "'0' of {}by_apply",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(world_ranks.quarrels, tmp_path_factory.mktemp("ranks"))


def says(message, where, first, second):
    assert message is not None, "this rank trained"
    assert message.startswith(f"gradckpt: the ranks disagree about {where}: rank ")
    assert f"rank 0 has {first}" in message
    assert f"rank 1 has {second}" in message
    assert "give all the same compress=" in message


@pytest.mark.parametrize("way", WAYS)
def test_both_ranks_name_both_ranks_and_both_codecs(found, way):
    for rank in found:
        says(rank[way], WAYS[way].format("Codec"), "int8", "int4")
        says(rank[f"{way} None"], WAYS[way].format("Nothing"), "int8", "no compression")
        assert rank[f"{way} agreed"] is None


def test_configs_are_compared_and_not_codecs_alone(found):
    for rank in found:
        says(rank["a field"], "FieldBlock in gradckpt.compat.checkpoint_wrapper", "int8", "int8 (fake_quantize=True)")
        says(rank["one layer"], "'1' of One", "int8", "int4")


def test_what_differs_by_layer_or_model_and_not_by_rank_is_no_disagreement(found):
    for rank in found:
        assert rank["per layer"] is None
        assert rank["two models"] is None


def test_later_models_of_a_class_are_compared_too(found):
    for rank in found:
        agreed, differs, agreed_again, llama, other_llama, llama_again = rank["the second model"]
        assert agreed is agreed_again is llama is llama_again is None
        says(differs, "'0' of Second (number 2 that trained)", "int8", "int4")
        says(other_llama, "SecondLlama in gradckpt.enable (number 2 that trained)", "int8", "int6")


def test_the_earlier_rank_hears_it_in_its_next_call(found):
    for rank in found:
        says(rank["the first is late"], "'0' of Late", "int8", "int4")


def test_a_rank_that_trains_alone_waits_once(found):
    patience, looks, looks_again = found[0]["alone"]
    assert patience <= 0
    assert 0 < looks < world_ranks.ranks.LOOKS
    assert looks == looks_again


def test_another_process_group_begins_anew(found):
    for rank in found:
        agreed, then = rank["made again"]
        assert agreed is None
        says(then, "'0' of Codecby_apply", "fp8_e4m3", "int8")


def test_no_step_is_trained(tmp_path):
    errors = worlds.run(world_ranks.training, tmp_path, fails=True)
    assert any("the ranks disagree about 'layers.0' of Model" in error for error in errors if error)
    assert None not in errors
    assert not list(tmp_path.glob("found*"))


def test_after_all_notes_are_written_none_is_read(found):
    assert [rank["settled"] for rank in found] == ["settled", "settled"]


def test_the_switch(found):
    assert [rank["switched off"] for rank in found] == [None, None]


# ---- DTensors


@pytest.fixture(scope="module")
def tensors(found):
    return [rank["tensors"] for rank in found]


@pytest.mark.parametrize("how", ["None", "lossless"])
def test_dtensors_are_exact(tensors, how):
    for rank in tensors:
        assert rank[how]["equal"], "a gradient differs from that of torch's checkpointing"
        assert rank[how]["same loss"]
        assert rank[how]["compressed"] == (3 if how == "lossless" else 0)


@pytest.mark.parametrize("how", ["int8", "fake_quantize", "apply int8"])
def test_shards_are_compressed(tensors, how):
    for number, rank in enumerate(tensors):
        r = rank[how]
        rows = 2 * (32, 31)[number]
        assert r["same loss"] == (how != "fake_quantize")
        assert r["regions"] == r["compressed"] == 3
        assert r["bytes_in"] == 3 * rows * 64 * 4
        assert r["bytes_out"] < 0.26 * r["bytes_in"]
        assert r["uncompressed"] == {}
        assert r["placements"] == "(Shard(dim=1),)"
        assert 0 < r["error"] < (0.02 if how == "fake_quantize" else 0.01)
        assert r["cosine"] > 0.9998


def test_partial_sums_are_kept(tensors):
    for rank in tensors:
        assert rank["partial"]["compressed"] == 0
        assert rank["partial"]["uncompressed"] == {"tensor subclass": 1}


def test_dtensors_as_keywords(tensors):
    for rank in tensors:
        assert rank["keyword"]["compressed"] == 2


def test_leaves_are_taken_as_those_that_are_no_dtensors(tensors):
    """``include="floating"`` takes them, but not where the forward would run on the restored."""
    for rank in tensors:
        assert rank["leaves"] == [1, 0]


def test_what_a_collective_has_yet_to_bring_is_waited_for(tensors):
    for rank in tensors:
        assert rank["late"] == [[True, 1, {}]] * 4
