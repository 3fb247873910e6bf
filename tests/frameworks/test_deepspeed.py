"""DeepSpeed: ZeRO 1, 2 and 3 on two ranks with several ways of checkpointing; and what
deepspeed_checks.py checks."""

import processes
import pytest
import torch
import worlds
from checkout import HELPERS

LAYERS, STEPS = 3, 3


def environment():
    return {**processes.environment(processes.ENGINES), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def test_the_names_of_its_checkpointing():
    worlds.tests_pass(HELPERS / "deepspeed_checks.py", environment())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "runs"
    done = worlds.torchrun(HELPERS / "deepspeed_checks.py", out, env=environment(), timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("model", ["llama", "frozen", "stack"])
@pytest.mark.parametrize("stage", [1, 2, 3])
class TestZero:
    def test_as_stock_checkpointing_without_compression(self, runs, stage, model):
        exact = runs[stage, model, "stock"]
        for way in ("None", "theirs") if model == "stack" else ("None",):
            found = runs[stage, model, way]
            assert found["losses"] == exact["losses"]
            assert found["moved"].keys() == exact["moved"].keys()
            assert all(torch.equal(found["moved"][name], exact["moved"][name]) for name in exact["moved"])
            assert found["regions"] == (0 if way == "theirs" else LAYERS * STEPS)

    def test_within_the_bound_of_int8(self, runs, stage, model):
        exact = runs[stage, model, "stock"]
        for way in ("int8", "in host memory") if model == "stack" else ("int8",):
            found = runs[stage, model, way]
            assert found["compressed"] == LAYERS * STEPS
            assert found["losses"][0] == exact["losses"][0]
            a, b = (torch.cat([m.flatten() for m in each["moved"].values()]) for each in (found, exact))
            assert 0 < (a - b).norm() < 0.02 * b.norm()
            assert found["same keys"]


@pytest.mark.parametrize("options", [["--zero", "3", "--compress", "none"], ["--zero", "2", "--checkpoint-in-cpu"]])
def test_example(options):
    worlds.example_passes("deepspeed_zero", *options, env=environment())
