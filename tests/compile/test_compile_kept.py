"""Calls that do not run again in compiled regions: gradckpt.policies.region and torch_remat's."""

import sys
import warnings

import pytest
import torch
from compile_cases import Graphs, fresh_dynamo, needs_outputs  # noqa: F401
from selective_ways import torch_remat

import gradckpt
from gradckpt import policies

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
W, V = (torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(i))) for i in (2, 3))
INT8 = {"codec": "int8", "min_numel": 1}
BOTH_RUNS = {**INT8, "fake_quantize": True}  # the forward, too, computes with restored values
NAMED = policies.save_named("ag*")


def block(region):
    def function(x):
        h = region(lambda x: (x @ W).sin(), "kept", recompute=False)(x)
        return region(lambda x: (x @ V).exp(), "again", recompute=True)(h).cos()

    return function


def region_of(library, monkeypatch):
    if library == "gradckpt":
        return policies.region
    remat = torch_remat()
    monkeypatch.setitem(sys.modules, "torch_remat", remat)
    return remat.region


def counts(function):
    """Operators of the backward graph, which has those of the recompute too."""
    graphs = Graphs()
    x = X.clone().requires_grad_()
    graphs.compile(function)(x * 1).sum().backward()
    return {name: len(graphs.calls_of(name, graphs.backward)) for name in ("sin", "exp")}, x.grad


@pytest.mark.parametrize("library", ["gradckpt", "torch_remat"])
@pytest.mark.parametrize("form", ["checkpoint", "fake_quantize", "compat", "patched"])
def test_kept_calls_are_not_in_the_backward_graph(library, form, monkeypatch):
    function = block(region_of(library, monkeypatch))
    compress = BOTH_RUNS if form in ("fake_quantize", "patched") else None
    plain, expected = counts(lambda x: gradckpt.checkpoint(block(lambda f, name, recompute: f), x, compress=compress))
    assert plain == {"sin": 2, "exp": 1}  # of which one sin is cos's derivative
    if form == "patched":
        with gradckpt.patched(BOTH_RUNS):
            found, grad = counts(lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False))
    elif form == "compat":
        found, grad = counts(lambda x: gradckpt.compat.checkpoint(function, x, use_reentrant=False))
    else:
        found, grad = counts(lambda x: gradckpt.checkpoint(function, x, compress=compress))
    assert found == {"sin": 1, "exp": 1}
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("library", ["gradckpt", "torch_remat"])
def test_beside_restored_values_kept_calls_run_again(library, monkeypatch):
    function, region = block(region_of(library, monkeypatch)), block(lambda f, name, recompute: f)
    _, expected = counts(lambda x: gradckpt.checkpoint(region, x, compress=INT8))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found, grad = counts(lambda x: gradckpt.checkpoint(function, x, compress=INT8))
    if library == "gradckpt":
        assert any("runs again in a compiled region whose inputs a codec rounds" in str(w.message) for w in seen)
    assert found == {"sin": 2, "exp": 1}
    assert torch.equal(grad, expected)


def test_save_named():
    function = block(policies.region)
    found, _ = counts(lambda x: gradckpt.checkpoint(function, x, policy=NAMED))
    assert found == {"sin": 1, "exp": 0}


def test_outside_of_regions_nothing_is_marked():
    graphs = Graphs()
    graphs.compile(block(policies.region))(X.clone().requires_grad_() * 1).sum().backward()
    assert not [node for m in graphs.forward for node in m.graph.nodes if "recompute" in node.meta]


def test_code_compiled_within_the_region_warns():
    compiled = torch.compile(block(policies.region), backend="aot_eager")
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="is compiled within its region"):
        gradckpt.checkpoint(compiled, X.clone().requires_grad_()).sum().backward()


@needs_outputs
@pytest.mark.parametrize("shown", [None, False, True])
@pytest.mark.parametrize(
    "policy", ["save_matmuls", "save_matmuls:int8", lambda ctx, op, *args, **kwargs: "mm" in str(op)]
)
@pytest.mark.parametrize("compress", [None, "int8"])
def test_tracing_warns_of_no_hooks(policy, shown, compress):
    """The compiler's own hooks are not the user's."""

    def function(x):
        options = {"compress": compress, "policy": policy, "respect_saved_tensors_hooks": shown}
        return gradckpt.checkpoint(lambda x: (x @ W).sin() @ V, x * 1, **options)

    gradckpt.stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(function, backend="aot_eager", fullgraph=True)(X.clone().requires_grad_()).sum().backward()
    assert gradckpt.stats()["policy_outputs"] == 0, "what is traced is in the counters of the graph"
    assert not gradckpt.stats()["uncompressed"]
