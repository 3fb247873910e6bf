"""gradckpt.enable: what it refuses, in one sentence, and the warning when nothing is compressed."""

import functools
import pickle
import warnings

import pytest
import torch
from test_huggingface import (
    ADAPTER,
    IDS,
    LAYERS,
    build,
    foreign,
    functions,
    is_stock,
    needs_explicit_reentrant,
    needs_layers,
    off,
    on,
    step,
    transformers,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradckpt
from gradckpt import GradckptInactiveWarning

CONFIG = transformers.LlamaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1)


class Bare(transformers.PreTrainedModel):
    """Says that it can be checkpointed, and no module of it can."""

    config_class = transformers.LlamaConfig
    supports_gradient_checkpointing = True

    def __init__(self, config, **_):
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)
        self.post_init()


class Unsupported(Bare):
    supports_gradient_checkpointing = False


class Old(Bare):
    def _set_gradient_checkpointing(self, module, value=False):
        pass

    def __init__(self, config):
        super().__init__(config)
        self.linear.gradient_checkpointing = False


class Layers(torch.nn.ModuleList):
    """Layers that are called as one."""

    def forward(self, x, **kwargs):
        for layer in self:
            x = layer(x, **kwargs)
        return x


class TestRefuses:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Unsupported(CONFIG), "cannot checkpoint Unsupported; no block of it repeats"),
            (lambda: Bare(CONFIG), "cannot checkpoint Bare; no block of it repeats"),
            (lambda: Old(CONFIG), r"Old defines _set_gradient_checkpointing in the form of"),
        ],
        ids=["unsupported", "no modules", "before 4.35"],
    )
    def test_model(self, make, message):
        model = make()
        with pytest.raises(ValueError, match=message):
            gradckpt.enable(model)
        assert ADAPTER not in vars(model)
        assert not model._forward_hooks

    def test_a_part_of_what_is_enabled(self):
        model = build()
        gradckpt.enable(model)
        with pytest.raises(ValueError, match=r"layers of this LlamaModel are already enabled, as part of"):
            gradckpt.enable(model.model)
        assert step(model) == LAYERS

    def test_several_models_in_one_module(self):
        pair = torch.nn.ModuleDict({"query": build(), "document": build()})
        with pytest.raises(ValueError, match=r"ModuleDict holds 2 transformers models; call gradckpt\.enable on each"):
            gradckpt.enable(pair)
        gradckpt.enable(torch.nn.ModuleDict({"one": pair["query"], "head": torch.nn.Linear(2, 2)}))
        assert step(pair["query"]) == LAYERS

    @pytest.mark.parametrize("selector", ["layer", "mlp", "*.layers"])
    def test_what_was_chosen_in_the_layers_is_replaced(self, selector):
        model = build()
        if selector == "*.layers":
            model.model.layers = Layers(model.model.layers)
            selector = "model.layers"
        handle = gradckpt.enable(model, None, modules={selector: "int8"})
        gradckpt.enable(model)
        assert list(handle.modules) == [f"model.layers.{i}" for i in range(LAYERS)]
        assert all("forward" not in vars(module) for module in model.modules())
        assert step(model) == LAYERS

    def test_a_layer_enabled_by_itself_since(self):
        model = build()
        gradckpt.enable(model)
        off(model)
        gradckpt.enable(model.model.layers[1], None, modules="mlp")
        on(model)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp is checkpointed already: .*gradckpt\.disable"):
            step(model)

    @pytest.mark.parametrize("what", ["layer", "part of a layer", "all layers"])
    def test_inside_a_checkpoint_wrapper(self, what):
        model = build()
        layers = model.model.layers
        if what == "layer":
            layers[1] = checkpoint_wrapper(layers[1])
        elif what == "part of a layer":
            layers[1].mlp = checkpoint_wrapper(layers[1].mlp)
        else:
            model.model = checkpoint_wrapper(model.model)
        with pytest.raises(ValueError, match=r"model.* is checkpointed already: by torch's CheckpointWrapper; "):
            gradckpt.enable(model)
        assert ADAPTER not in vars(model)

    @needs_layers
    def test_turned_on_after_modules_were_chosen(self):
        """Not by us: said at the first forward, before a step is lost."""
        model = build()
        gradckpt.enable(model, None, modules={"layer": "int8"})
        on(model)
        with pytest.raises(ValueError, match=r"this LlamaDecoderLayer was turned on since gradckpt\.enable, which"):
            step(model)
        off(model)
        assert step(model) == LAYERS

    def test_after_someone_else(self):
        model = build()
        setattr(model, ADAPTER, foreign)
        with pytest.raises(ValueError, match=r"test_huggingface\.foreign already replaces"):
            gradckpt.enable(model)
        assert vars(model)[ADAPTER] is foreign

    def test_a_foreign_function(self):
        model = build()
        gradckpt.enable(model)
        with pytest.raises(ValueError, match=r"turned on with test_huggingface\.foreign and not with torch's"):
            model._set_gradient_checkpointing(True, functools.partial(foreign))
        assert step(model) == LAYERS

    @needs_explicit_reentrant
    def test_none_leaves_others_alone(self):
        model = build()
        handle = gradckpt.enable(model, compress=None)
        function = functools.partial(foreign)
        model._set_gradient_checkpointing(True, function)
        assert functions(model) == {function}
        assert handle.modules == {}
        on(model, {"use_reentrant": True})
        assert is_stock(model)
        on(model, {"compress": None, "use_reentrant": False}, offload=True)
        (function,) = functions(model)
        assert function.keywords == {"use_reentrant": False}, "transformers' own offload, without our keys"


# ---- keys that reach no code of ours


def test_without_use_reentrant_torch_refuses_the_keys_of_a_model_that_is_not_enabled():
    """Why the documentation never writes use_reentrant beside compress."""
    model = build()
    on(model, {"compress": "int8"})
    with pytest.raises(ValueError, match="Unexpected keyword arguments: compress"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model)
    on(model, {"compress": "int8", "use_reentrant": False})
    assert step(model) == 0


# ---- proof of activity


class TestActivity:
    def warned(self, model, message, ids=IDS):
        step(model, ids)
        with pytest.warns(GradckptInactiveWarning, match=message):
            step(model, ids)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, ids)

    @pytest.mark.parametrize("copied", [False, True])
    def test_turned_off_since(self, copied):
        model = build()
        gradckpt.enable(model)
        model = pickle.loads(pickle.dumps(model)) if copied else model
        off(model)
        self.warned(model, "checkpointing was turned off since")

    def test_function_replaced(self):
        model = build()
        gradckpt.enable(model)
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = foreign
        self.warned(model, "the layers call test_huggingface.foreign")

    def test_layers_in_eval_mode(self):
        model = build()
        gradckpt.enable(model)
        model.model.eval()
        self.warned(model, r"layers are in eval mode.*model\.train\(\)")

    def test_eval_mode_once_it_has_compressed(self):
        model = build()
        gradckpt.enable(model)
        step(model)
        model.eval()
        for _ in range(3):
            step(model)

    @needs_layers
    def test_layers_replaced(self):
        model = build()
        gradckpt.enable(model)
        model.model.layers = build().model.layers
        self.warned(
            model, r"never called checkpoint; if they were replaced, .*model\.activation_checkpointing_enable\(\)"
        )
        on(model)
        assert step(model) == LAYERS

    @needs_layers
    def test_layers_of_another_model(self):
        model, other = build(), build()
        gradckpt.enable(model)
        on(other)
        model.model.layers = other.model.layers
        self.warned(
            model, r"the layers call torch\.utils\.checkpoint\.checkpoint, .*activation_checkpointing_enable\(\) again"
        )
        on(model)
        assert step(model) == LAYERS

    def test_frozen_layers_are_one_line_in_the_log(self, caplog):
        """Backward never comes there, so nothing is kept, and nothing can be mended."""
        model = build()
        gradckpt.enable(model)
        if vars(model).get("_require_grads_hooks"):
            model.disable_input_require_grads()
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        with warnings.catch_warnings(), caplog.at_level("INFO", "gradckpt"):
            warnings.simplefilter("error")
            for _ in range(3):
                step(model)
        assert sum("its layers are frozen" in record.getMessage() for record in caplog.records) == 1

    @pytest.mark.filterwarnings("error")
    def test_silent_when_it_should_be(self):
        model = build()
        with gradckpt.enable(model, compress=None):
            for _ in range(3):
                step(model)
        with gradckpt.enable(model):
            model.eval()
            for _ in range(3):
                model(input_ids=IDS)
            model.train()
            with torch.no_grad():
                for _ in range(3):
                    model(input_ids=IDS)
            for _ in range(3):
                assert step(model) == LAYERS

    def test_another_model_does_not_vouch(self):
        idle, busy = build(), build()
        gradckpt.enable(busy)
        gradckpt.enable(idle)
        off(idle)
        step(idle)
        step(busy)
        with pytest.warns(GradckptInactiveWarning):
            step(idle)

    def test_reset_stats_in_between(self):
        model = build()
        gradckpt.enable(model)
        for _ in range(3):
            gradckpt.stats.reset()
            step(model)
