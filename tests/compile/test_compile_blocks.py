"""Layers of transformers and diffusers under torch.compile: they compile, and gradients are as far
off as without the compiler."""

import pytest
import torch

pytest.importorskip("transformers")

from compile_cases import ASKS_POLICIES_BEFORE, fresh_dynamo  # noqa: F401
from compiled_blocks import BACKENDS, BLOCKS, SETTINGS, errors, gradients, is_in_bounds, turn_torchs_on

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradckpt"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: One of each kind: norms, attention with a bias, experts, a scan, windows, convolutions.
EVERYDAY = {
    "Llama": ("int8", "save_matmuls:int8"),
    "Gemma2": ("int8",),
    "Qwen3Moe": ("int8",),
    "GPT2": ("save_matmuls:int8",),
    "DebertaV2": ("int8",),
    "T5": ("int8",),
    "ViT": ("int8", "recompute=False"),
    "UNet2DCondition": ("int8",),
}


def check(name, setting, backend):
    uncompiled, compiled, payloads = errors(name, setting, backend)
    assert is_in_bounds(uncompiled, compiled)
    return payloads


@pytest.mark.parametrize(
    ("name", "setting"), [(name, each) for name, settings in EVERYDAY.items() for each in settings]
)
def test_everyday(name, setting):
    if name not in BLOCKS:
        pytest.skip("diffusers is not installed")
    payloads = check(name, setting, "passes")
    none = setting.startswith("save") and ASKS_POLICIES_BEFORE
    assert (payloads > 0) == (not none)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", BLOCKS)
def test_all(name, setting, backend):
    try:
        check(name, setting, backend)
    except torch._dynamo.exc.TorchDynamoException:
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):  # then torch's own fails as well
            gradients(name, turn_torchs_on, backend)
