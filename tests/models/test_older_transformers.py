"""What transformers 4 lacks, taken out of today's: gradckpt.enable works there, too,
and says what it cannot do."""

import functools
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import gradckpt  # noqa: E402

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
