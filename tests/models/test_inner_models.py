"""Transformers models inside an enabled one:
turning checkpointing on or off in one of them means the whole.

As sentence-transformers does, which goes through all modules and
calls the method of each that has it.
"""

import copy
import os
import pickle

import pytest
import torch
import transformers
import transformers_names
from handles import config_of

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

import model_families
from model_families import FAMILIES

import gradckpt

ADAPTER = "_set_gradient_checkpointing"


def inner(model):
    return [module for module in model.modules() if module is not model and hasattr(type(module), ADAPTER)]


def turn_on_each(model, kwargs=None):
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            transformers_names.turn_on(module, kwargs)


def compressed(family, model):
    before = gradckpt.stats()
    model_families.gradients(family, model)
    after = gradckpt.stats()
    return after["compressed"] - before["compressed"], after["bytes_out"] - before["bytes_out"]


def holders(model):
    """Of each layer: the function that it is checkpointed with."""
    functions = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    return {function.func for function in functions if function is not None}


@pytest.mark.parametrize("family", ["llama", "clip", "t5"])
class TestInner:
    def make(self, family):
        model = model_families.build(family, "eager")
        if not inner(model):
            pytest.skip(f"{family} of this transformers has no model inside")
        return model, gradckpt.enable(model)

    def test_on_in_each(self, family):
        model, handle = self.make(family)
        layers, wanted = len(handle.modules), compressed(family, model)
        for kwargs in (None, {"use_reentrant": False}, {"compress": "int8"}, {"policy": "save_attention:int8"}):
            turn_on_each(model, kwargs)
            assert len(handle.modules) == layers
            assert compressed(family, model) == wanted
        turn_on_each(model, {"compress": "fp8"})
        assert config_of(handle).codec == "fp8_e4m3"
        assert compressed(family, model)[0] == wanted[0]
        handle.remove()
        assert holders(model) == {torch.utils.checkpoint.checkpoint}
        assert compressed(family, model) == (0, 0)

    def test_another_codec_in_one(self, family):
        model, handle = self.make(family)
        count, full = compressed(family, model)
        transformers_names.turn_on(inner(model)[-1], {"compress": "int4"})
        count2, less = compressed(family, model)
        assert count2 == count
        assert less < full
        assert len(handle.modules) == FAMILIES[family].layers
        handle.remove()
        assert holders(model) == {torch.utils.checkpoint.checkpoint}, "those of the first call, too"

    def test_off_in_each(self, family):
        model, _ = self.make(family)
        wanted = compressed(family, model)
        for module in inner(model):
            transformers_names.turn_off(module)
        assert compressed(family, model) == (0, 0)
        turn_on_each(model)
        assert compressed(family, model) == wanted

    def test_nothing_is_left_behind(self, family):
        model, handle = self.make(family)
        assert all(ADAPTER in vars(module) for module in inner(model))
        handle.remove()
        assert not any(ADAPTER in vars(module) for module in model.modules())
        for module in inner(model)[:1]:
            with gradckpt.enable(module):
                assert ADAPTER not in vars(model)

    @pytest.mark.parametrize(
        "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
    )
    def test_copies(self, family, way):
        model, _ = self.make(family)
        wanted = compressed(family, model)
        twin = way(model)
        gradckpt.disable(model)
        turn_on_each(twin)
        assert compressed(family, twin) == wanted
        assert compressed(family, model) == (0, 0)
        assert not transformers_names.is_on(model)
        gradckpt.disable(twin)
        assert not any(ADAPTER in vars(module) for module in twin.modules())
        assert compressed(family, twin) == (0, 0)


def test_a_refused_call_changes_nothing():
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    wanted = compressed("llama", model)
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        transformers_names.turn_on(model.model, {"compress": "zip"})
    assert compressed("llama", model) == wanted


def test_an_inner_model_outlives_its_enabled_one():
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    backbone = model.model
    del model
    transformers_names.turn_on(backbone)
    before = gradckpt.stats()["compressed"]
    backbone(input_ids=torch.arange(64).view(2, 32)).last_hidden_state.sum().backward()
    assert gradckpt.stats()["compressed"] - before == FAMILIES["llama"].layers


@pytest.mark.parametrize("gone", ["dead", "replaced", "disabled"])
def test_what_is_no_longer_inside_can_be_enabled(gone):
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    backbone = model.model
    with pytest.raises(ValueError, match="already enabled, as part of another model"):
        gradckpt.enable(backbone)
    if gone == "dead":
        del model
    elif gone == "replaced":
        model.model = model_families.build("llama", "sdpa").model
    else:
        gradckpt.disable(model)
    with gradckpt.enable(backbone, compress="fp8") as handle:
        assert config_of(handle).codec == "fp8_e4m3"
        transformers_names.turn_on(backbone)
        before = gradckpt.stats()["compressed"]
        backbone(input_ids=torch.arange(64).view(2, 32)).last_hidden_state.sum().backward()
        assert gradckpt.stats()["compressed"] - before == FAMILIES["llama"].layers
    assert ADAPTER not in vars(backbone)
    assert holders(backbone) == {torch.utils.checkpoint.checkpoint}
