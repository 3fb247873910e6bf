"""What each codec may do to the gradients of trained Llamas,
with and without outlier channels (see bench_fidelity.py).

Bounds: relative L2 error over all parameters, and the worst parameter's cosine; None: not promised.
"""

import pytest
import torch

import gradckpt

pytest.importorskip("transformers")
import trained_models

PLAIN, OUTLIERS = ("llama", "llama-wide"), ("llama-outliers", "llama-wide-outliers")
#: codec -> bounds without outlier channels, bounds with them
BOUNDS = {
    "int8": ((0.01, 0.9998), (0.015, 0.999)),
    "fp8_e4m3": ((0.025, None), (0.04, None)),
    "int6": ((0.025, 0.997), None),
    "int4": ((0.07, None), (0.18, None)),
}
CASES = [(c, m, BOUNDS[c][m in OUTLIERS]) for c in BOUNDS for m in PLAIN + OUTLIERS if BOUNDS[c][m in OUTLIERS]]


def error_of(codec, model):
    return trained_models.gradient_error(model, lambda x: gradckpt.codecs.encode(x, codec).decode())


class Rounded(torch.autograd.Function):
    """To bf16 and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_what_is_compared_with_is_plain_autograd(name):
    """A layer that runs again from its own input gives autograd's gradients:
    no state is left over from the forward."""
    model = trained_models.MODELS[name].make().train()
    layers, batch = trained_models.layers_of(name, model), trained_models.held_out(name, 0)
    with trained_models.rebuilt(layers, lambda layer, x: x):
        again = trained_models.gradients(model, batch)
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: (Rounded.apply(args[0]), *args[1:]))
    assert trained_models.compare([(again, trained_models.gradients(model, batch))]).relative <= 1e-6


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("codec", "model", "bounds"), CASES)
def test_gradients_are_near(codec, model, bounds):
    relative, cosine = bounds
    error = error_of(codec, model)
    assert error.relative <= relative
    assert cosine is None or error.worst >= cosine, error.parameter


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_outlier_channels_need_the_rotation():
    """The control: a codec that outlier channels harm is seen to harm gradients."""
    assert error_of("int8_plain", "llama-wide-outliers").relative > 2 * error_of("int8", "llama-wide-outliers").relative
