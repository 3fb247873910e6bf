"""timm: families of its models under gradckpt.patched and gradckpt.enable,
beside their own checkpointing.

timm needs torchvision, which may not be in the tests' own site-packages (processes.py): what is
looked at here was measured by one program in a process of its own.
"""

import json

import processes
import pytest
import worlds
from checkout import PROGRAMS

#: family -> (regions of a step, the largest error of the gradients with int8). A ResNet is all ReLU
#: and batch norm, and at random weights every small change of its inputs is a large one of its
#: gradients: fp16 makes 2 % there.
FAMILIES = {
    "vit_tiny_patch16_224": (3, 0.03),
    "convnext_atto": (5, 0.01),
    "swin_tiny_patch4_window7_224": (4, 0.01),
    "test_resnet": (4, 0.2),
    "test_efficientnet": (5, 0.03),
    "gmixer_12_224": (12, 0.02),
}


@pytest.fixture(scope="module")
def measured():
    env = {**processes.environment(), "OMP_NUM_THREADS": "1"}
    done = worlds.call(PROGRAMS / "torchvision_operators.py", PROGRAMS / "timm_families.py", env=env)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(measured, family):
    found = measured[family]
    regions, bound = FAMILIES[family]
    assert found["stock is plain"]
    assert found["None is stock"]
    assert found["losses are plain"]
    assert found["calls"] == found["modules under apply"] == found["compressed"] == regions
    assert found["ratio"] < 0.26
    assert 0 < found["error"] < bound
    assert found["apply as patched"] == 0


def test_running_statistics(measured):
    """Under patched as under torch's checkpointing, twice; under apply once."""
    for family in FAMILIES:
        assert measured[family]["buffers under None are those of stock"]
        assert measured[family]["buffers under apply are those of plain"]


def test_enable_chooses_the_blocks(measured):
    assert measured["enable"] == [f"blocks.{i}" for i in range(len(measured["enable"]))]
    assert len(measured["enable"]) > 1
