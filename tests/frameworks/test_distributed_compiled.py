"""torch's engines under torch.compile, two ranks on gloo: the model or its blocks compiled,
beside torch's wrapper."""

import pytest
import world_compiled
import worlds
from world_torch import LAYERS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(world_compiled.compiled_engines, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("how", ["None", "int8"])
@pytest.mark.parametrize("case", world_compiled.CASES)
def test_engine(found, case, how):
    *_, in_graphs = world_compiled.CASES[case]
    for rank in found:
        r = rank[case][how]
        regions = 0 if in_graphs else 2 * LAYERS  # micro-batches
        assert r["same losses"]
        assert r["regions"] == regions
        if how == "None":
            assert r["equal"], "a gradient differs from that of torch's checkpointing, compiled alike"
            assert r["compressed"] == r["compiled_tensors"] == 0
        else:
            assert 0 < r["error"] < 0.01
            assert r["cosine"] > 0.9998
            assert r["compressed"] == r["eligible"] == regions
            assert (r["compiled_tensors"] > 0) == in_graphs
            assert r["bits"] == (8.25 if in_graphs else 0)
