"""Inductor's passes over the joint graph replace and erase nodes, in regions and around them.

The graph still compiles, its inputs leave as payloads, and gradients are as far off as
without the compiler.
"""

import pytest
import torch
from compile_cases import (  # noqa: F401
    AROUND,
    ASKS_POLICIES_BEFORE,
    FUNCTION_WIDTH,
    FUNCTIONS,
    fresh_dynamo,
    passes,
)
from torch.utils.checkpoint import checkpoint

import gradckpt

pytestmark = pytest.mark.filterwarnings("ignore:gradckpt. torch.compile. codec 'lossless' may overflow")

INT8 = {"codec": "int8", "min_numel": 1}
SETTINGS = {
    "int8": {"compress": INT8},
    "lossless": {"compress": "lossless"},
    "save_matmuls:int8": {"policy": "save_matmuls:int8"},
    "both": {"compress": INT8, "policy": "save_matmuls:int8"},
    "fake-quantized": {"compress": {**INT8, "fake_quantize": True}},
}
BACKENDS = {"aot_eager": "aot_eager", "passes": passes(), "inductor": "inductor"}


def drawn(seed):
    return torch.randn(FUNCTION_WIDTH, FUNCTION_WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(function, around, regions, call, backend=None):
    before, after = AROUND[around]
    x, w = drawn(1).requires_grad_(), (drawn(0) / 8).requires_grad_()

    def net(x, w):
        for _ in range(regions):
            x = after(call(function, before(x), w))
        return x

    torch._dynamo.reset()
    torch.manual_seed(3)
    run = net if backend is None else torch.compile(net, backend=BACKENDS[backend], fullgraph=True)
    (run(x, w) * drawn(5)).sum().backward()
    return x.grad, w.grad


def error(got, want):
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(got, want, strict=True))


def check(name, around, regions, setting, backend, factor=1.3):
    if ASKS_POLICIES_BEFORE and "policy" in SETTINGS[setting]:
        pytest.skip("torch before 2.12 keeps nothing compressed by a policy in a graph")
    function = FUNCTIONS[name]
    exact = gradients(function, around, regions, lambda f, *args: f(*args))

    def call(f, *args):
        return gradckpt.checkpoint(f, *args, **SETTINGS[setting])

    uncompiled = error(gradients(function, around, regions, call), exact)
    gradckpt.stats.reset()
    compiled = error(gradients(function, around, regions, call, backend), exact)
    assert compiled <= factor * uncompiled + 2e-5
    if setting == "int8":
        assert gradckpt.stats()["compiled_tensors"] >= 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_between_residuals(name):
    check(name, "residual", 2, "int8", "passes")


@pytest.mark.parametrize("name", ["times ones", "output plus zeros", "scaled softmax", "attention", "chained"])
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "int8"])
def test_each_setting(name, setting):
    check(name, "norm", 2, setting, "passes")


@pytest.mark.parametrize("around", AROUND)
def test_without_passes_the_outputs_are_exact_too(around):
    check("gelu", around, 1, "int8", "aot_eager")


def test_inductor_itself():
    check("chained", "residual", 2, "int8", "inductor")


def test_passes_of_the_users_own_run_as_well(monkeypatch):
    ran = []
    for name in ("joint_custom_pre_pass", "joint_custom_post_pass"):
        monkeypatch.setattr(torch._inductor.config, name, lambda graph, name=name: ran.append(name))
    monkeypatch.setattr(
        torch._functorch.config, "joint_custom_pass", lambda module, inputs: ran.append("joint_custom_pass") or module
    )
    check("times ones", "residual", 1, "int8", "passes")
    assert ran == ["joint_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass"]


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("regions", [1, 2])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_everything(name, around, regions, setting, backend):
    try:
        check(name, around, regions, setting, backend, 2)
    except torch._dynamo.exc.BackendCompilerFailed:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):  # then torch's own fails as well
            gradients(
                FUNCTIONS[name], around, regions, lambda f, *args: checkpoint(f, *args, use_reentrant=False), backend
            )
