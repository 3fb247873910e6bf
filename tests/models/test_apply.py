"""enable(model, modules=...): what a chosen module does, and that it can be undone. And networks in
eval mode through which gradients pass: a classifier that guides a sampler, a critic.

Where grad is on and an input requires grad, modules that enable() wraps are regions there, too. The
layers that transformers checkpoints itself are not, which a warning says, with the way out."""

import copy
import gc
import inspect
import warnings
import weakref

import pytest
import torch
from tiny_models import Net, build, regions_of
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

import gradckpt
from gradckpt._models.caches import WithCaches


def test_what_no_gradient_passes_through_is_not_checkpointed():
    model = Net()
    gradckpt.enable(model, None, modules="layers.*.0")
    assert regions_of(model) == 4
    model.eval()
    assert regions_of(model, torch.randn(2, 8, requires_grad=True)) == 4
    model.requires_grad_(False)
    assert regions_of(model) == 0
    assert regions_of(model, torch.randn(2, 8, requires_grad=True)) == 4
    model.layers[0].train()
    assert regions_of(model) == 1
    model.requires_grad_(True)
    gradckpt.stats.reset()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(torch.randn(2, 8))
    assert gradckpt.stats()["regions"] == 0


def test_hooks_of_the_module_run_once_and_those_inside_twice():
    model = Net(1)
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.layers[0].register_forward_hook(lambda *_: calls.append("after"))
    model.layers[0][0].register_forward_hook(lambda *_: calls.append("inside"))
    gradckpt.enable(model, None, modules="layers.0")
    model(torch.randn(2, 8)).sum().backward()
    assert calls == ["before", "inside", "after", "inside"]


def test_a_copy_runs_its_own_forward():
    model = Net()
    gradckpt.enable(model, None, modules="layers.*.0")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(2, 8)
    assert not twin(x).any()
    assert model(x).any()
    assert regions_of(twin) == 4
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    gradckpt.disable(twin)
    assert (regions_of(twin), regions_of(model)) == (0, 4)


def test_a_replica_of_dataparallel_runs_its_own_forward():
    model = nn.Linear(8, 8)
    handle = gradckpt.enable(model, None, modules=model)
    first = model._replicate_for_data_parallel()
    first.mark = "first"
    replica = first._replicate_for_data_parallel()
    assert replica.mark == "first"
    replica.weight, replica.bias = torch.zeros(8, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    assert regions_of(replica) == 1
    assert replica.weight.grad is not None
    assert model.weight.grad is None
    handle.remove()
    assert model._replicate_for_data_parallel().forward.__self__ is not model


def test_parametrized_modules():
    torch.manual_seed(0)
    model = Net()
    before = nn.utils.parametrizations.weight_norm(model.layers[0][0])
    handle = gradckpt.enable(model, None, modules=nn.Linear)
    nn.utils.parametrizations.weight_norm(model.layers[1][0])
    assert list(handle.modules) == [f"layers.{i}.0" for i in range(4)]
    assert regions_of(model) == 4
    assert before.parametrizations.weight.original0.grad is not None
    assert regions_of(copy.deepcopy(model)) == 4
    nn.utils.parametrize.remove_parametrizations(model.layers[0][0], "weight")
    assert regions_of(model) == 4


def test_running_statistics_are_updated_once_unless_as_torch_does():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with gradckpt.enable(model, None, modules=nn.BatchNorm1d):
        regions_of(model)
        assert model[1].num_batches_tracked == 1
    gradckpt.enable(model, None, modules=nn.BatchNorm1d, buffers="torch")
    regions_of(model)
    assert model[1].num_batches_tracked == 3


def test_a_cache_does_not_hide_the_module_from_the_buffers():
    norm = nn.BatchNorm1d(8)
    x = torch.randn(4, 8, requires_grad=True)
    gradckpt.checkpoint(WithCaches(norm.forward), x, buffers="once").sum().backward()
    assert norm.num_batches_tracked == 1


def test_a_forward_of_another_kind_does_not_hide_the_module():
    """Hooks of accelerate put a plain function in its place."""
    norm = nn.BatchNorm1d(8)
    norm.forward = lambda x: type(norm).forward(norm, x)
    model = nn.Sequential(norm)
    gradckpt.enable(model, None, modules=nn.BatchNorm1d)
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1


class Words(nn.Module):
    """Keywords that checkpoint has too."""

    def forward(self, x, *, compress=1.0, function=1.0, buffers=None):
        return x * compress * function + buffers


def test_keywords_of_the_modules_own():
    model = nn.ModuleList([Words()])
    gradckpt.enable(model, None, modules=Words)
    x = torch.randn(8, requires_grad=True)
    scale = torch.full((), 3.0, requires_grad=True)
    out = model[0](x, compress=scale, function=2.0, buffers=1.0)
    out.sum().backward()
    assert torch.equal(out, x * 6 + 1)
    assert torch.equal(x.grad, torch.full((8,), 6.0))
    assert scale.grad is not None
    assert list(inspect.signature(model[0].forward).parameters) == ["x", "compress", "function", "buffers"]


def test_options_reach_checkpoint():
    entered = []

    class Note:
        def __init__(self, what):
            self.what = what

        def __enter__(self):
            entered.append(self.what)

        def __exit__(self, *_):
            pass

    model = Net(2)
    options = {"context_fn": lambda: (Note("forward"), Note("recompute")), "early_stop": False}
    handle = gradckpt.enable(
        model, "int8", modules={"layers.0.0": options, "layers.1.0": None}, determinism_check="none"
    )
    first, second = handle.modules.values()
    assert (first["compress"].codec, first["early_stop"], first["determinism_check"]) == ("int8", False, "none")
    assert second == {"compress": None, "determinism_check": "none"}
    regions_of(model)
    assert entered == ["forward", "recompute"]


def test_remove_leaves_everything_as_it_was():
    model = Net()
    inner = model.layers[1].forward
    model.layers[1].forward = own = lambda x: inner(x) * 2  # on the instance, as accelerate's hooks do
    x = torch.randn(2, 8)
    expected = model(x)
    before = [dict(vars(module)) for module in model.modules()]
    handle = gradckpt.enable(model, None, modules=["layers.?"])
    assert regions_of(model) == 4
    assert model.layers[1].forward is not own
    assert torch.equal(model(x), expected)
    handle.remove()
    handle.remove()
    after = [dict(vars(module)) for module in model.modules()]
    assert [list(each) for each in after] == [list(each) for each in before]
    assert all(new[key] is old[key] for new, old in zip(after, before, strict=True) for key in old)
    assert handle.modules == {}
    assert repr(handle) == "<gradckpt handle: Net is not enabled>"
    with gradckpt.enable(model, None, modules=["layers.?"]) as handle:
        assert regions_of(model) == 4
    assert regions_of(model) == 0


def test_remove_below_a_later_wrapper():
    model = Net(1)
    handle = gradckpt.enable(model, None, modules="layers.0")
    ours = model.layers[0].forward
    model.layers[0].forward = theirs = lambda x: ours(x)
    assert regions_of(model) == 1
    handle.remove()
    assert model.layers[0].forward is theirs
    assert regions_of(model) == 0


def test_neither_handle_nor_region_keeps_the_model_alive():
    model = Net()
    handle = gradckpt.enable(model, None, modules="layers.?")
    forward, seen = model.layers[0].forward, weakref.ref(model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert seen() is None  # without the garbage collector: there is no cycle
    finally:
        gc.enable()
    handle.remove()
    with pytest.raises(ReferenceError, match="Sequential of this checkpointed forward is gone"):
        forward(torch.randn(2, 8))


def test_repr_is_a_table():
    model = build("llama")
    handle = gradckpt.enable(
        model, None, modules={"attention": {"codec": "int4", "fake_quantize": True}, "mlp": {"early_stop": False}}
    )
    assert repr(handle).splitlines() == [
        "<gradckpt handle: 6 modules of LlamaForCausalLM",
        "  model.layers.*.self_attn     3 x LlamaAttention  int4, fake_quantize=True",
        "  model.layers.*.mlp           3 x LlamaMLP        uncompressed, early_stop=False>",
    ]
    assert (
        repr(model.model.layers[0].mlp.forward) == "<checkpointed forward of LlamaMLP: uncompressed, early_stop=False>"
    )


# ---- eval mode ----


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


@pytest.fixture
def _no_warnings():
    gradckpt.stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradckpt.GradckptInactiveWarning)
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compress", [None, "lossless", "int8"])
@pytest.mark.usefixtures("_no_warnings")
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
@pytest.mark.usefixtures("_no_warnings")
def test_what_autograd_saves_is_compressed_too(name):
    reference = guidance(frozen(name)[0])
    model, modules = frozen(name)
    gradckpt.enable(model, "lossless", modules=modules, recompute=False)
    assert all(map(torch.equal, guidance(model), reference))
    assert gradckpt.stats()["encoded"]


@pytest.mark.usefixtures("_no_warnings")
def test_tensors_in_containers_and_keywords_count():
    stage = Stage().eval().requires_grad_(False)
    gradckpt.enable(stage, None, modules=stage)
    x, scale = torch.randn(2, 8, 4, 4), torch.ones(1, requires_grad=True)
    stage(x, scale=[scale]).sum().backward()
    assert gradckpt.stats()["recomputes"] == 1
    assert scale.grad is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("_no_warnings")
def test_compiled(backend):
    reference = guidance(frozen("critic")[0])
    model, modules = frozen("critic")
    gradckpt.enable(model, None, modules=modules)
    assert all(map(torch.equal, guidance(torch.compile(model, backend=backend, fullgraph=True)), reference))


@pytest.mark.usefixtures("_no_warnings")
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
