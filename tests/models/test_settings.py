"""Sizes, devices and settings as people write them; what a setting does to a model, and that it is
undone."""

import os

import model_families
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from model_families import FAMILIES, stock
from small_models import Chain
from torch import nn

import gradckpt
from gradckpt._offload import parse_bytes
from gradckpt._planning.devices import DEVICES, find
from gradckpt._settings import EXACT, READY, setting_of

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")


NAMES = [setting.name for setting in READY]
LAYERS = FAMILIES["llama"].layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Dropout(0.1)

    def forward(self, x, *, debug=1.0):
        return x + debug * self.drop(self.norm(self.up(x).tanh()))


def with_keyword(block, x):
    return block(x, debug=0.5)


def net():
    return Chain(Block, 4, with_keyword, width=128)


def llama():
    return model_families.build("llama", "sdpa")


def batch_of(model):
    if isinstance(model, Chain):
        return {"x": torch.randn(32, 128, generator=torch.Generator().manual_seed(1))}
    return FAMILIES["llama"].batch()


def step(model):
    torch.manual_seed(2)
    model.zero_grad()
    result = model(**batch_of(model))
    loss = result.square().mean() if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def everything(model):
    """All that a setting may touch: attributes of the modules, their hooks, the handle."""
    modules = [
        (dict(vars(module)), dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in model.modules()
    ]
    return modules, gradckpt.config.Handle(model).modules


#: What a model may be before.
BEFORE = {
    "plain": lambda model: None,
    "enabled": lambda model: gradckpt.enable(model, "int4"),
    "policy": lambda model: gradckpt.enable(model, "int8", policy="save_matmuls"),
    "some": lambda model: gradckpt.enable(
        model, "fp8", modules=model.blocks[1:3] if isinstance(model, Chain) else {"*.layers.1": "int8", "layer": "skip"}
    ),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("make", [net, llama])
@pytest.mark.parametrize("name", NAMES)
def test_all_is_as_before(make, before, name):
    model = make()
    handle = BEFORE[before](model)
    state, expected = everything(model), step(model)
    with setting_of(name).active(model):
        step(model)
    assert everything(model) == state
    with pytest.raises(ZeroDivisionError), setting_of(name).active(model):
        raise ZeroDivisionError
    assert everything(model) == state
    assert all(map(torch.equal, step(model), expected))
    if handle is not None:
        handle.remove()
        assert not gradckpt.config.Handle(model).modules


@pytest.mark.parametrize("make", [net, llama])
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_what_its_line_makes(make, name):
    """The line of the table, run by hand: the same loss, gradients, compressed tensors."""
    setting, counts, results = setting_of(name), [], []
    for by_line in (False, True):
        model = make()
        gradckpt.stats.reset()
        if not by_line:
            with setting.active(model):
                results.append(step(model))
        else:
            exec(setting.line, {"gradckpt": gradckpt, "model": model})
            results.append(step(model))
        counts.append(gradckpt.stats()["codecs"])
    assert all(map(torch.equal, *results))
    assert counts[0] == counts[1]
    assert bool(counts[0]) == setting.compresses == (name not in ("none", "torch"))


@pytest.mark.parametrize("make", [net, llama])
def test_torch_is_torchs_own_function_on_the_modules_of_enable(make, monkeypatch):
    model, called = make(), []
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(torch_checkpoint, f"{name}_impl") else name
    original = getattr(torch_checkpoint, name)

    def noted(*args, **kwargs):
        called.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_checkpoint, name, noted)
    with gradckpt.enable(model) as handle:
        count = len(handle.modules)
    gradckpt.stats.reset()
    with setting_of("torch").active(model):
        step(model)
    assert len(called) == count == (4 if make is net else LAYERS)
    assert gradckpt.stats()["regions"] == 0


@pytest.mark.parametrize("name", ["none", "int8"])
def test_a_flag_of_the_model_itself(name):
    model = stock(llama())
    state = everything(model)
    gradckpt.stats.reset()
    with setting_of(name).active(model):
        assert any(m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")) == (
            name == "int8"
        )
        step(model)
    assert gradckpt.stats()["compressed"] == (LAYERS if name == "int8" else 0)
    assert everything(model) == state


def test_the_modules_that_are_enabled_are_those_of_the_setting():
    model = net()
    gradckpt.enable(model, "int4", modules=model.blocks[1:3])
    with setting_of("fp8").active(model):
        chosen = gradckpt.config.Handle(model).modules
    assert {name: each["compress"].codec for name, each in chosen.items()} == dict.fromkeys(
        ["blocks.1", "blocks.2"], "fp8_e4m3"
    )
    with setting_of("fp8").active(model, modules="*.3"):
        assert list(gradckpt.config.Handle(model).modules) == ["blocks.3"]


def test_a_model_that_is_not_recomputed_is_checkpointed_where_it_would_be():
    model = llama()
    gradckpt.enable(model, "int4", recompute=False)
    for name in ("int8", "torch"):
        with setting_of(name).active(model):
            assert sum(layer.gradient_checkpointing for layer in model.model.layers) == LAYERS
    with setting_of("compress_saved int8").active(model):
        assert list(gradckpt.config.Handle(model).modules) == [""]
    assert gradckpt.config.Handle(model).modules[""]["compress"].codec == "int4"


def test_every_n_layers_of_an_enabled_model():
    model = llama()
    gradckpt.enable(model, "int4", every_n_layers=2)
    for name in ("int8", "torch"):
        with setting_of(name).active(model):
            assert sum(layer.gradient_checkpointing for layer in model.model.layers) == 2


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = net(), torch.empty(32, 128)
        for setting in READY:
            with setting.active(model):
                model(x).sum().backward()


def test_an_error_of_enable_leaves_the_model_as_it_was():
    model = net()
    gradckpt.enable(model, "int4")
    state = everything(model)
    with pytest.raises(ValueError, match="no module matches"), EXACT.active(model, "*.nothing"):
        pass
    assert everything(model) == state


# ---- candidates ----


def test_candidates():
    config = gradckpt.CompressionConfig("int4", stochastic=True, seed=3)
    assert setting_of("int8") is setting_of({"compress": "int8"}) is READY[2]
    assert setting_of(gradckpt.CompressionConfig("int8")) is READY[2]
    assert setting_of({"compress": "int8", "policy": "every_other_matmul:int8"}).name == "selective int8"
    assert setting_of(READY[0]) is READY[0]
    assert setting_of("fp8").line == 'gradckpt.enable(model, "fp8")'
    assert setting_of(config).name == "int4, stochastic=True, seed=3"
    assert setting_of(config).line == 'gradckpt.enable(model, {"codec": "int4", "stochastic": True, "seed": 3})'
    assert setting_of({"compress": "int6", "every_n_layers": 2}).name == "int6, every_n_layers=2"
    assert setting_of({"compress": "int6", "every_n_layers": 2}).line == (
        'gradckpt.enable(model, compress="int6", every_n_layers=2)'
    )
    assert setting_of("compress_saved int6").options == {"compress": "int6", "recompute": False}
    assert not setting_of({"policy": "save_attention"}).compresses
    assert setting_of({"every_n_layers": 2}).compresses


@pytest.mark.parametrize(
    ("candidate", "error", "said"),
    [
        ("itn8", ValueError, "unknown codec 'itn8'; did you mean 'int8'"),
        ("Selective int8", ValueError, "unknown setting 'Selective int8'; did you mean 'selective int8'"),
        ("compress_saved int9", ValueError, "did you mean 'compress_saved int8'"),
        ({"compres": "int8"}, ValueError, "unknown option 'compres'; did you mean 'compress'"),
        ({"compress": "int9"}, ValueError, "unknown codec 'int9'; did you mean"),
        ({"policy": "save_atention"}, ValueError, "unknown policy 'save_atention'; did you mean 'save_attention'"),
        (None, TypeError, "a candidate is a codec name"),
        (8, TypeError, "not int"),
    ],
)
def test_wrong_candidates(candidate, error, said):
    with pytest.raises(error, match=said):
        setting_of(candidate)


# ---- sizes and devices ----


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("80 gb", 80 * 10**9),
        (" 1.5TiB ", 3 * 2**39),
        ("0.1GB", 10**8),
        ("16g", 16 * 10**9),
        ("512 KiB", 2**19),
        ("1 B", 1),
        (25769803776, 25769803776),
        ("25769803776", 25769803776),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["50%", "-1", "-3GiB", "0", "0GiB", "0.2", "GiB", "", "24 GBit", "1e9", 0, -5, True, None, "24iB"]
)
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match=r"^gradckpt: .*; "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("RTX-4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("rtx_pro_6000", "RTX-PRO-6000"),
        ("a100 80gb", "A100-80GB"),
        ("a100-80", "A100-80GB"),
        ("h100 sxm", "H100-SXM"),
        ("mi300x", "MI300X"),
        ("L4", "L4"),
        ("rtx6000ada", "RTX-6000-Ada"),
    ],
)
def test_devices_by_their_names(asked, name):
    assert find(asked).name == name


@pytest.mark.parametrize(
    ("asked", "candidates"), [("A100", ["A100-40GB", "A100-80GB"]), ("h100", ["H100-PCIe", "H100-SXM"])]
)
def test_a_name_of_several_devices_lists_them(asked, candidates):
    with pytest.raises(ValueError, match="several forms; choose one of: " + ", ".join(candidates) + "$"):
        find(asked)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown device 'RTX-4091'; did you mean 'RTX-4090'") as caught:
        find("RTX-4091")
    assert all(device.name in str(caught.value) for device in DEVICES)
    with pytest.raises(ValueError, match="unknown device ''; choose one of"):
        find("")


def test_figures_are_plausible():
    """Memory is a little less than the name says; no rate has a wrong unit."""
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert 14 * 2**30 < device.memory < 256 * 2**30
        assert device.fp32 <= device.bf16 < 5000
        assert 10 < device.link < 500 <= 2 * device.bandwidth
    assert 23 * 2**30 < find("RTX-4090").memory < 24 * 2**30
