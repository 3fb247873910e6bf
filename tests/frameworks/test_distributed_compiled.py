"""torch's engines under torch.compile, two ranks on gloo: the model or its blocks compiled,
beside torch's wrapper."""

import functools

import pytest
import torch
import worlds
from world_torch import LAYERS, Block, assert_as_torchs, beside, ddp, fsdp1, fsdp2, train

# ---- torch's engines under torch.compile: what each rank does.

#: The engine, what is compiled, and whether that holds the regions:
#: then their payloads are the graphs'.
CASES = {
    "ddp": (ddp, "model", True),
    "fsdp1": (fsdp1, "model", True),
    "fsdp1 outside": (functools.partial(fsdp1, inside=False), "model", False),  # the graph breaks in each region
    "fsdp2": (fsdp2, "model", True),
    "fsdp2 blocks": (fsdp2, "blocks", False),
}


def compiled(make, where, how):
    model = make(how)
    for module in [model] if where == "model" else [m for m in model.modules() if isinstance(m, Block)]:
        module.compile(backend="aot_eager")
    return model


def run(make, where, how):
    torch._dynamo.reset()
    return train(functools.partial(compiled, make, where), how)


def examine(make, where):
    stock, found = run(make, where, "torch"), {}
    for how in ("None", "int8"):
        mine = run(make, where, how)
        found[how] = {
            **beside(mine, stock),
            "bits": 8 * mine["stats"]["compiled_bytes_out"] / max(1, mine["stats"]["compiled_bytes_in"] / 4),
        }
    return found


def compiled_engines():
    return {name: examine(make, where) for name, (make, where, _) in CASES.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run(compiled_engines, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("how", ["None", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_engine(found, case, how):
    *_, in_graphs = CASES[case]
    for rank in found:
        r = rank[case][how]
        regions = 0 if in_graphs else 2 * LAYERS  # micro-batches
        assert r["regions"] == regions
        assert_as_torchs(r, how, regions)
        assert (r["compiled_tensors"] > 0) == (in_graphs and how == "int8")
        assert r["bits"] == (8.25 if in_graphs and how == "int8" else 0)
