"""Networks in eval mode through which gradients pass: a classifier that guides a sampler, a critic.

Where grad is on and an input requires grad, modules that enable() wraps are regions there, too. The
layers that transformers checkpoints itself are not, which a warning says, with the way out.
"""

import warnings

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

import gradckpt

WIDTH, LAYERS = 64, 3


def clip():
    """A frozen image tower, as of CLIP guidance; its dropout does nothing in eval mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "image_size": 32, "patch_size": 8, "projection_dim": 32}
    config = CLIPVisionConfig(**sizes, num_hidden_layers=LAYERS, num_attention_heads=2, attention_dropout=0.1)
    return CLIPVisionModelWithProjection(config)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale=None):
        return x + self.drop(self.norm(self.conv(x)).sigmoid()) * (1 if scale is None else scale[0])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(Stage() for _ in range(LAYERS))
        for stage in self.stages:
            nn.init.normal_(stage.norm.running_mean)

    def forward(self, pixel_values):
        x = self.first(pixel_values)
        for stage in self.stages:
            x = stage(x)
        return x.mean((1, 2, 3))


MODELS = {"clip": (clip, "layer"), "critic": (Critic, Stage)}


def guidance(model):
    """The loss, and the gradient that a sampler follows."""
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = model(pixel_values=pixels)
    loss = (found if isinstance(found, torch.Tensor) else found.image_embeds).square().sum()
    loss.backward()
    return loss.detach(), pixels.grad


def frozen(name):
    make, modules = MODELS[name]
    return make().eval().requires_grad_(False), modules


@pytest.fixture(autouse=True)
def _no_warnings():
    gradckpt.stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradckpt.GradckptInactiveWarning)
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compress", [None, "lossless", "int8"])
def test_a_frozen_network_is_checkpointed(name, compress):
    reference = guidance(frozen(name)[0])
    model, modules = frozen(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradckpt.enable(model, compress, modules=modules)
    for _ in range(3):
        loss, gradient = guidance(model)
        assert torch.equal(loss, reference[0])
        if compress == "int8":
            assert 0 < (gradient - reference[1]).norm() < 0.02 * reference[1].norm()
        else:
            assert torch.equal(gradient, reference[1])
    s = gradckpt.stats()
    assert s["regions"] == s["recomputes"] == 3 * LAYERS
    assert s["compressed"] == (0 if compress is None else 3 * LAYERS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_what_autograd_saves_is_compressed_too(name):
    reference = guidance(frozen(name)[0])
    model, modules = frozen(name)
    gradckpt.enable(model, "lossless", modules=modules, recompute=False)
    assert all(map(torch.equal, guidance(model), reference))
    assert gradckpt.stats()["encoded"]


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_is_none(name):
    model, modules = frozen(name)
    gradckpt.enable(model, "int8", modules=modules)
    pixels = torch.randn(4, 3, 32, 32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                model(pixel_values=pixels)
    model(pixel_values=pixels)  # with grad on: nothing requires it
    assert gradckpt.stats()["regions"] == 0


def test_tensors_in_containers_and_keywords_count():
    stage = Stage().eval().requires_grad_(False)
    gradckpt.enable(stage, None, modules=stage)
    x, scale = torch.randn(2, 8, 4, 4), torch.ones(1, requires_grad=True)
    stage(x, scale=[scale]).sum().backward()
    assert gradckpt.stats()["recomputes"] == 1
    assert scale.grad is not None


def test_a_trained_model_with_its_statistics_frozen():
    """model.eval() for BatchNorm's sake: parameters get the same gradients."""
    found = []
    for compress in ("off", None):
        critic = Critic().eval()
        if compress is None:
            gradckpt.enable(critic, None, modules=Stage)
        guidance(critic)
        found.append([p.grad for p in critic.parameters()])
    assert all(map(torch.equal, *found))
    assert gradckpt.stats()["recomputes"] == LAYERS


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    reference = guidance(frozen("critic")[0])
    model, modules = frozen("critic")
    gradckpt.enable(model, None, modules=modules)
    assert all(map(torch.equal, guidance(torch.compile(model, backend=backend, fullgraph=True)), reference))


def test_layers_that_transformers_checkpoints_stay_as_they_are_and_a_warning_has_the_way_out():
    model, _ = frozen("clip")
    gradckpt.enable(model, "int8")
    reference = guidance(model)
    way_out = r'is in eval mode, where transformers does not checkpoint; .*gradckpt\.enable\(model, modules="layer"\)'
    with pytest.warns(gradckpt.GradckptInactiveWarning, match=way_out):
        guidance(model)
    gradckpt.enable(model, None, modules="layer")
    assert all(map(torch.equal, guidance(model), reference))
    assert gradckpt.stats()["recomputes"] == LAYERS
