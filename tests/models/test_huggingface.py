"""gradckpt.enable: the flag, the precedence, how it is undone, and what it survives."""

import functools
import gc
import importlib.util
import inspect
import os
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint
from small_models import config_of

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import model_families  # noqa: E402
from model_families import (  # noqa: E402
    NAME,
    NEW,
)

import gradckpt  # noqa: E402
from gradckpt._models.inactivity_hooks import is_on  # noqa: E402

LAYERS = 4

#: Of older transformers: what cannot be there.
needs_layers = pytest.mark.skipif(
    importlib.util.find_spec("transformers.modeling_layers") is None,
    reason="this transformers checkpoints in its stacks, not in its layers",
)
needs_explicit_reentrant = pytest.mark.skipif(
    '"use_reentrant": True' in inspect.getsource(transformers.PreTrainedModel.gradient_checkpointing_enable),
    reason="this transformers passes use_reentrant=True by itself, so that it does not count as the user's choice",
)
ADAPTER = "_set_gradient_checkpointing"


def build():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def step(model, ids=IDS):
    """One training step; how many tensors it compressed."""
    before = gradckpt.stats()["compressed"]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return gradckpt.stats()["compressed"] - before


def functions(model):
    layers = (vars(m) for m in model.modules() if hasattr(m, "gradient_checkpointing"))
    return {layer.get("_gradient_checkpointing_func") for layer in layers}


def is_stock(model):
    return all(getattr(f, "func", f) is torch.utils.checkpoint.checkpoint for f in functions(model))


#: What came with 5.17.
METHOD = getattr(transformers.PreTrainedModel, f"{NAME}_enable")
HAS_EVERY_AND_OFFLOAD = {"every_n_layers", "offload"} <= set(inspect.signature(METHOD).parameters)
with_every_and_offload = pytest.mark.skipif(
    not HAS_EVERY_AND_OFFLOAD, reason="this transformers has no every_n_layers= and offload="
)
SPELLINGS = ["gradient_checkpointing", "activation_checkpointing"][: 1 + NEW]


def on(model, *given, **own):
    """Checkpointing is turned on by other code."""
    model_families.turn_on(model, *given, **own)


def off(model):
    model_families.turn_off(model)


def foreign(function, *args, **kwargs):
    return function(*args)


class TestEnable:
    def test_compresses_one_tensor_per_layer(self):
        model = build()
        handle = gradckpt.enable(model)
        assert is_on(model)
        assert len(handle.modules) == LAYERS
        assert config_of(handle).codec == "int8"
        assert step(model) == LAYERS

    def test_adapter_has_the_signature_that_transformers_inspects(self):
        model = build()
        names = list(inspect.signature(model._set_gradient_checkpointing).parameters)
        gradckpt.enable(model)
        ours = list(inspect.signature(model._set_gradient_checkpointing).parameters)
        assert ours[: len(names)] == names, "older transformers have no every_n_layers"

    def test_wrapped_models_reach_the_transformers_model(self):
        class Adapter(torch.nn.Module):  # the shape of peft.PeftModel
            def __init__(self, model):
                super().__init__()
                self.base_model = torch.nn.Module()
                self.base_model.model = model

            def get_base_model(self):
                return self.base_model.model

            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.get_base_model(), name)

            def forward(self, **inputs):
                return self.get_base_model()(**inputs)

        model = build()
        wrapped = torch.nn.DataParallel(Adapter(model))
        handle = gradckpt.enable(wrapped)
        assert ADAPTER in vars(model)
        assert step(wrapped) == LAYERS
        gradckpt.disable(wrapped.module)
        assert len(handle.modules) == 0
        assert ADAPTER not in vars(model)


class TestRemove:
    def test_turned_on_by_enable_is_turned_off(self):
        model, fresh = build(), build()
        with gradckpt.enable(model) as handle:
            assert step(model) == LAYERS
        assert not is_on(model)
        assert step(model) == 0
        assert ADAPTER not in vars(model)
        assert is_stock(model)
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == [
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in fresh.modules()
        ]
        handle.remove()
        assert "is not enabled" in repr(handle)
        assert handle.modules == {}

    @pytest.mark.parametrize("before", [True, False], ids=["on before", "on again since"])
    def test_turned_on_by_others_stays_on_with_stock(self, before):
        model = build()
        if before:
            on(model, {"use_reentrant": False, "preserve_rng_state": False})
            handle = gradckpt.enable(model)
        else:
            handle = gradckpt.enable(model)
            on(model, {"use_reentrant": False})
        handle.remove()
        assert is_on(model)
        assert is_stock(model)
        assert step(model) == 0

    def test_leaves_a_later_wrapper_alone(self):
        model = build()
        handle = gradckpt.enable(model)
        ours = vars(model)[ADAPTER]
        theirs = functools.partial(ours)
        setattr(model, ADAPTER, theirs)
        handle.remove()
        assert vars(model)[ADAPTER] is theirs
        on(model, {"use_reentrant": False})
        assert step(model) == 0

    def test_handle_keeps_no_model_alive(self):
        model = build()
        handle = gradckpt.enable(model)
        step(model)
        gone = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            del model
            assert gone() is None, "a reference cycle through the adapter"
        finally:
            gc.enable()
        handle.remove()
        assert len(handle.modules) == 0


# ---- the Trainer's flag


DATA = [{"input_ids": IDS[i % 2], "labels": IDS[i % 2]} for i in range(4)]


def trainer(model, tmp_path, **arguments):
    """A Trainer of two steps."""
    own = {key: arguments.pop(key) for key in ("model_init", "callbacks", "eval_dataset") if key in arguments}
    data = arguments.pop("train_dataset", DATA)
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    settings = {**quiet, "max_steps": 2, "per_device_train_batch_size": 2, **arguments}
    args = transformers.TrainingArguments(str(tmp_path), **settings)
    return transformers.Trainer(model=model, args=args, train_dataset=data, **own)


def compressed_by(call):
    before = gradckpt.stats()["compressed"]
    call()
    return gradckpt.stats()["compressed"] - before


def train(model, tmp_path, **arguments):
    """Two steps of the Trainer; how many tensors were compressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return compressed_by(trainer(model, tmp_path, **arguments).train)


class TestPrecedence:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            ({"compress": "fp8"}, {"codec": "fp8", "fake_quantize": True, "min_numel": 7}),  # a name: the codec alone
            ({"compress": {"codec": "fp8"}}, {"codec": "fp8"}),
        ],
        ids=str,
    )
    def test_kwargs_win_over_enable_in_their_call(self, given, wanted):
        model = build()
        before = gradckpt.CompressionConfig("int8", fake_quantize=True, min_numel=7)
        handle = gradckpt.enable(model, compress=before)
        on(model, given)
        assert config_of(handle) == gradckpt.CompressionConfig(**wanted)
        on(model)
        assert config_of(handle) == before


def replicate(network):
    """torch.nn.parallel.replicate without devices: the same steps, one replica on the CPU."""
    modules = list(network.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for key, child in module._modules.items():
            if child is not None:
                setattr(replica, key, replicas[child])
        for key, parameter in module._parameters.items():
            setattr(replica, key, None if parameter is None else parameter.clone())
    return replicas[network]
