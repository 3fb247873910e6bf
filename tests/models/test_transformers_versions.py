"""What transformers 4 lacks, taken out of today's: gradckpt.enable works there, too, and says what
it cannot do. And of the names that transformers deprecates from release to release gradckpt calls
none."""

import copy
import functools
import os
import pickle

import model_families
import pytest
import torch
from test_huggingface import trainer

import gradckpt

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")


# ---- transformers 4 ----


LAYERS = 3


class Older(transformers.LlamaForCausalLM):
    """No every_n_layers; a hook on the embeddings only where PEFT is in use,
    and an error where there is none."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=torch.utils.checkpoint.checkpoint):
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs=None):
        given = activation_checkpointing_kwargs or {"use_reentrant": False}
        function = functools.partial(torch.utils.checkpoint.checkpoint, **given)
        self._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)

    def disable_input_require_grads(self):
        self._require_grads_hook.remove()


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    return Older(config).train()


def step(model):
    """How many tensors a training step compressed."""
    ids = torch.arange(64).view(2, 32)
    before = gradckpt.stats()["compressed"]
    model(input_ids=ids, labels=ids).loss.backward()
    return gradckpt.stats()["compressed"] - before


def test_enable_and_remove(model):
    handle = gradckpt.enable(model)
    assert step(model) == LAYERS
    handle.remove()
    assert step(model) == 0
    gradckpt.enable(model)
    gradckpt.disable(model)
    assert step(model) == 0


def test_remove_takes_away_the_hook_of_peft(model):
    handle = gradckpt.enable(model)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    model._require_grads_hook = hook
    handle.remove()
    assert not model.get_input_embeddings()._forward_hooks


def test_every_n_layers_is_refused_wherever_it_is_said(model):
    with pytest.raises(ValueError, match=r"every_n_layers above 1 needs transformers >= 5\.17"):
        gradckpt.enable(model, every_n_layers=2)
    gradckpt.enable(model)
    with pytest.raises(ValueError, match=r"every_n_layers above 1 needs transformers >= 5\.17"):
        model.activation_checkpointing_enable({"every_n_layers": 2})
    assert step(model) == LAYERS, "a refused call changes nothing"


# ---- deprecated names ----


deprecated_is_an_error = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

FLAGS = [
    {"compress": "int8"},
    {"compress": None, "policy": "save_matmuls"},
    {"compress": "int8", "recompute": False},
    {"budget": "1GiB"},
]


def build():
    return model_families.build("llama", "sdpa")


def run_step(model):
    model(**model_families.FAMILIES["llama"].batch()).loss.backward()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compress": None, "every_n_layers": 2},
        {"compress": "int8", "recompute": False},
        {"modules": "layer"},
        {"budget": "1GiB"},
    ],
    ids=str,
)
@deprecated_is_an_error
def test_enable(settings):
    model = build()
    handle = gradckpt.enable(model, **settings)
    run_step(model)
    run_step(copy.deepcopy(model))
    run_step(pickle.loads(pickle.dumps(model)))
    model_families.turn_off(model)
    run_step(model)
    repr(handle)
    handle.remove()
    gradckpt.disable(model)


@deprecated_is_an_error
def test_before_a_step():
    model, batch = build(), model_families.FAMILIES["llama"].batch()
    gradckpt.plan(model, batch, memory="1GiB")
    gradckpt.plan(model, batch, budget="1GiB").apply(model)
    gradckpt.disable(model)
    gradckpt.gradient_error(model, batch, "int8")


@pytest.mark.parametrize("kwargs", FLAGS, ids=str)
@deprecated_is_an_error
def test_the_flag(kwargs, tmp_path):
    trainer(build(), tmp_path, **model_families.flag(kwargs)).train()
