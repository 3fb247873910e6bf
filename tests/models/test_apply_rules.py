"""enable(model, modules=...): which modules a selector chooses, and what is refused."""

import re

import pytest
import transformers_names
from apply_models import Net, build, names_of, regions_of
from torch import nn

import gradckpt

# ---- selectors ----


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (nn.Linear, "0.0 1.0 2.0 3.0 4.0 5.0"),
        ((nn.Linear, nn.Tanh), "0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0 5.1"),
        ("layers.?", "0 1 2 3 4 5"),
        ("*.[12].1", "1.1 2.1"),
        (re.compile(r"layers\.[0-4]\.0"), "0.0 1.0 2.0 3.0 4.0"),
        (lambda name, module: name.endswith("5"), "5"),
        (["layers.1", "layers.0"], "0 1"),
        (gradckpt.selectors.every(2, "layers.?"), "0 2 4"),
        (gradckpt.selectors.every(3, nn.Linear, offset=1), "1.0 4.0"),
        (gradckpt.selectors.m_of_n(2, 3, "layers.?"), "0 1 3 4"),
        (gradckpt.selectors.m_of_n(1, 2, gradckpt.selectors.every(2, "layers.?")), "0 4"),
        ({"layers.0": "skip", "layers.?": "int8"}, "1 2 3 4 5"),
        ({gradckpt.selectors.every(2, "layers.?"): "int8", "layers.?": None}, "0 1 2 3 4 5"),
    ],
)
def test_selectors(rules, expected):
    assert names_of(Net(6), rules) == [f"layers.{place}" for place in expected.split()]


def test_the_first_rule_wins():
    rules = {"layers.0": "int4", gradckpt.selectors.every(2, "layers.?"): "fp8", "layers.?": True}
    model = Net()
    found = gradckpt.enable(model, None, modules=rules).modules
    assert [settings["compress"].codec for settings in found.values()] == ["int4", "int8", "fp8_e4m3", "int8"]


def test_a_module_and_the_model_itself():
    model = Net(2)
    assert names_of(model, model.layers[1]) == ["layers.1"]
    assert names_of(model.layers[1], "") == [""]
    assert names_of(model.layers[1], nn.Sequential) == [""]
    assert names_of(model.layers[1], "*") == ["0", "1"]
    assert names_of(model, "*.0.*") == ["layers.0.0", "layers.0.1"]


def test_skip_is_for_the_module_and_not_for_those_inside():
    assert names_of(Net(2), {"layers.0": "skip", nn.Linear: None}) == ["layers.0.0", "layers.1.0"]


# ---- shared modules ----


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.third = nn.Linear(8, 8)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_a_shared_module_is_wrapped_once():
    model = Twice()
    handle = gradckpt.enable(model, None, modules=nn.Linear)
    assert list(handle.modules) == ["first", "third"]
    assert regions_of(model) == 3
    handle.remove()
    assert list(gradckpt.enable(model, None, modules="second").modules) == ["first"]


def test_places_count_a_shared_module_once():
    assert names_of(Twice(), gradckpt.selectors.every(2, nn.Linear, offset=1)) == ["third"]


# ---- errors ----


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("attention", ValueError, "'attention'; kinds in this Net: none; choose by class instead, one of "),
        ("int8", ValueError, "no module matches 'int8'; it is a codec: pass compress='int8'"),
        ("fp8", ValueError, "no module matches 'fp8'; it is a codec"),
        ("nothing.*", ValueError, r"no module matches 'nothing\.\*'; .*names: 'layers', 'layers\.0', 'layers\.0\.0'"),
        ("?.0", ValueError, r"a pattern is for the whole name, so write '\*\.\?\.0'"),
        (nn.Conv2d, ValueError, "no module matches Conv2d"),
        (re.compile("layer"), ValueError, r"no module matches re\.compile\('layer'\)"),
        (
            gradckpt.selectors.every(2, "layers.?", offset=9),
            ValueError,
            r"every\(2, 'layers\.\?', offset=9\).* matches 4",
        ),
        ("moe", ValueError, "no module matches 'moe'; it has no mixture of experts"),
        ({}, ValueError, "modules= is empty"),
        ([], ValueError, "modules= is empty"),
        ({"layers.0": "skip"}, ValueError, 'every rule says "skip"'),
        ({"layers.?": "int8", "layers.0": "skip"}, ValueError, r"every module that 'layers\.0' matches is taken"),
        ({"layers.?": "int9"}, ValueError, r"unknown codec 'int9'; did you mean 'int8'\? choose one of"),
        ({"layers.?": {"compres": "int8"}}, ValueError, r"unknown option 'compres'; did you mean 'compress'\?"),
        (
            {"layers.?": {"early_stop": True, "fake_quantize": True}},
            ValueError,
            "'fake_quantize' is a field of compress=",
        ),
        ({"layers.?": {"use_reentrant": True}}, ValueError, "unknown option 'use_reentrant'"),
        ({"layers.?": {"early_stop": 1}}, TypeError, "early_stop is True or False, not 1"),
        ({"layers.?": {"buffers": "twice"}}, ValueError, 'buffers is "once" or "torch", not \'twice\''),
        ({"layers.?": {"determinism_check": "some"}}, ValueError, 'determinism_check is "default", "warn" or "none"'),
        ({"layers.?": {"context_fn": 1}}, TypeError, "context_fn is a function"),
        ({"layers.?": 8}, TypeError, "compress= takes"),
        ({3: "int8"}, TypeError, "modules are selected by .* not by 3"),
        (("layers.?", "layers.0"), TypeError, "or a list of selectors"),
        (dict, TypeError, "pass a subclass of torch.nn.Module"),
        (
            nn.ModuleList,
            ValueError,
            r"'layers' \(ModuleList\) has no forward.*select the modules in it by class, modules=",
        ),
        (
            ["layers.0", nn.Linear],
            ValueError,
            r"'layers\.0\.0' \(Linear\) is inside 'layers\.0' \(Sequential\), and bo",
        ),
    ],
    ids=str,
)
def test_errors_leave_the_model_as_it_was(rules, error, message):
    model = Net()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(error, match=message):
        gradckpt.enable(model, None, modules=rules)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_errors_of_arguments():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not list"):
        gradckpt.enable([Net()], None, modules="layers.?")
    with pytest.raises(ValueError, match="did you mean compress='int8'"):
        gradckpt.enable(Net(), None, modules="layers.?", codec="int8")
    with pytest.raises(ValueError, match="k is 1 or more"):
        gradckpt.selectors.every(0, "layer")
    with pytest.raises(ValueError, match="offset is 0 or more"):
        gradckpt.selectors.every(1, "layer", offset=-1)
    with pytest.raises(TypeError, match="k is an int"):
        gradckpt.selectors.every(1.5, "layer")
    with pytest.raises(ValueError, match="3 is more than 2"):
        gradckpt.selectors.m_of_n(3, 2, "layer")


def test_a_kind_that_has_no_module_says_where_it_is():
    with pytest.raises(ValueError, match=r'feed-forward has no module of its own.*"layer" \(2\), "attention" \(2\)'):
        gradckpt.enable(build("bert"), None, modules="mlp")


def test_again_does_nothing_when_equal_and_changes_what_differs():
    model = Net()
    handle = gradckpt.enable(model, modules="layers.0")
    forward = model.layers[0].forward
    assert gradckpt.enable(model, "int8", modules="layers.0", policy=None).modules == handle.modules
    assert model.layers[0].forward is forward
    gradckpt.enable(model, "int4", modules="layers.[01]")
    assert [settings["compress"].codec for settings in handle.modules.values()] == ["int4", "int4"]
    with pytest.raises(ValueError, match="has no forward of its own"):
        gradckpt.enable(model, modules=nn.ModuleList)
    assert list(handle.modules) == ["layers.0", "layers.1"]
    gradckpt.enable(model, "int4", modules="layers.1", offload=True)
    assert list(handle.modules) == ["layers.1"]
    handle.remove()
    assert handle.modules == {}


def test_two_settings_for_a_shared_module_are_refused():
    for rules in ({"first": "int8", "second": "int4"}, {"first": "skip", nn.Linear: None}):
        with pytest.raises(ValueError, match="'first' and 'second' are one Linear, and the rules give it different"):
            gradckpt.enable(Twice(), None, modules=rules)
    assert names_of(Twice(), {"first": "int8", "second": "int8"}) == ["first"]


@pytest.mark.parametrize("rules", ["layer", "attention", "*.layers.0.mlp"])
def test_a_model_that_is_enabled_gets_other_modules(rules):
    model = build("llama")
    handle = gradckpt.enable(model)
    layers = list(handle.modules)
    gradckpt.enable(model, modules=rules)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    with pytest.raises(ValueError, match="no module matches"):
        gradckpt.enable(model, modules="nothing")
    assert handle.modules
    gradckpt.enable(model)
    assert list(handle.modules) == layers
    transformers_names.turn_off(model)
    transformers_names.turn_on(model)
    gradckpt.disable(model)
    with pytest.raises(ValueError, match=r"gradient_checkpointing is on; .*activation_checkpointing_disable\(\)"):
        gradckpt.enable(model, modules=rules)


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @gradckpt.checkpoint(compress="int8")
    def forward(self, x):
        return self.inner(x)


def test_what_is_checkpointed_otherwise_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with pytest.raises(ValueError, match=r"'0' \(Decorated\) is checkpointed already: its forward is decorated"):
        gradckpt.enable(nn.Sequential(Decorated()), None, modules=Decorated)
    with pytest.raises(ValueError, match=r"'0\.inner' \(Linear\) is inside '0' \(Decorated\), and '0' .*decorated"):
        gradckpt.enable(nn.Sequential(Decorated()), None, modules=nn.Linear)
    with pytest.raises(ValueError, match=r"'0' \(Decorated\) is inside the model itself \(Sequential\), and '0'"):
        gradckpt.enable(nn.Sequential(Decorated()), None, modules="")
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="torch's CheckpointWrapper; leave out apply_activation"):
        gradckpt.enable(wrapped, None, modules=nn.Linear)


def test_models_with_a_flag_of_their_own():
    """timm's and diffusers' flags lie on the module that checkpoints what is inside it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"^gradckpt: '1' .* inside .*model\.set_grad_checkpointing\(False\)"):
        gradckpt.enable(model, None, modules="1")
    model.grad_checkpointing = False
    model.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"in diffusers, model\.disable_gradient_checkpointing\(\)"):
        gradckpt.enable(model, None, modules="1")
