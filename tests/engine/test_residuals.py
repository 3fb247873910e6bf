"""residuals(): what a forward would keep for its backward, tensor by tensor."""

import inspect
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from behaviours import saves_inputs_alone
from torch import nn

import gradckpt
from gradckpt import residuals
from gradckpt._engine.selective import contexts_of
from gradckpt._residuals import _SHOWS_DATA


def rows_of(report):
    return [(r.operator, r.argument, r.shape, r.dtype, r.bytes, r.shared) for r in report]


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


MLP = [
    ("Addmm", "mat1", (3, 8), "float32", 0, "input"),
    ("Relu", "result", (3, 16), "float32", 192, ""),
    ("Addmm", "mat1", (3, 16), "float32", 0, "residual"),
    ("Addmm", "mat2", (16, 4), "float32", 0, "parameter"),
]


@pytest.mark.parametrize("shows_data", [True, False])
def test_a_module(monkeypatch, shows_data):
    monkeypatch.setattr(sys.modules["gradckpt._residuals"], "_SHOWS_DATA", shows_data and _SHOWS_DATA)
    model = mlp()
    report = residuals(model, torch.randn(3, 8))
    assert rows_of(report) == MLP
    assert report.total_bytes == 192
    assert len(report) == 4
    assert report[1].device == "cpu"


def test_a_closure_knows_its_parameters_too():
    model, x = mlp(), torch.randn(3, 8)
    shared = [r.shared for r in residuals(lambda t: model(t), x)]
    assert shared == ["input", "", "residual", "parameter"]
    assert residuals(model.forward, x).rows == residuals(model, x).rows


def test_source_lines_are_the_users():
    def function(x):
        y = x.sin()
        return F.gelu(y)

    x = torch.randn(4, 4, requires_grad=True)
    _, first = inspect.getsourcelines(function)
    assert [r.source for r in residuals(function, x)] == [f"{__file__}:{first + 1}", f"{__file__}:{first + 2}"]


def test_views_share_and_count_their_whole_storage():
    def function(x):
        y = x * 2
        return y[:1].sin() + y.t()[:, :1].t().cos() + (y[2:] * y[:2]).sum()

    x = torch.randn(4, 4, requires_grad=True)
    assert rows_of(residuals(function, x)) == [
        ("Sin", "self", (1, 4), "float32", 64, ""),
        ("Cos", "self", (1, 4), "float32", 0, "residual"),
        ("Mul", "other", (2, 4), "float32", 0, "residual"),
        ("Mul", "self", (2, 4), "float32", 0, "residual"),
    ]


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[1]


@pytest.mark.parametrize("shows_data", [True, False])
def test_custom_functions_nested_outputs_masks_and_indices(monkeypatch, shows_data):
    monkeypatch.setattr(sys.modules["gradckpt._residuals"], "_SHOWS_DATA", shows_data and _SHOWS_DATA)

    def function(x, index):
        y = Exp.apply(x * 2)
        return {"y": y, "more": [torch.where(y > 1, y, -y), y.gather(0, index)], "none": None}

    x, index = torch.randn(4, 4, requires_grad=True), torch.zeros(2, 4, dtype=torch.long)
    shows = shows_data and _SHOWS_DATA
    assert rows_of(residuals(function, x, index=index)) == [
        ("Exp", "0" if shows else "tensors", (4, 4), "float32", 64, ""),
        ("Exp", "1" if shows else "tensors", (4, 4), "float32", 64, ""),
        ("Where", "condition", (4, 4), "bool", 16, ""),
        ("Gather", "index", (2, 4), "int64", 0, "input"),
        ("Gather", "self", (4, 4), "float32", 0, "residual"),
    ]


REGIONS = [
    (gradckpt.checkpoint, {}, [("float32", 96)]),
    (gradckpt.checkpoint, {"compress": {"codec": "int8", "min_numel": 1}}, [("uint8", 128), ("uint8", 2)]),
    pytest.param(
        torch.utils.checkpoint.checkpoint, {"use_reentrant": False}, [("float32", 96)], marks=saves_inputs_alone
    ),
]


@pytest.mark.parametrize(("checkpoint", "options", "kept"), REGIONS)
@pytest.mark.skipif(not _SHOWS_DATA, reason="this torch would have to recompute the region to look")
def test_of_a_region_only_what_it_keeps(checkpoint, options, kept):
    model, calls = mlp(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 8, requires_grad=True)
    report = residuals(lambda t: checkpoint(model, t * 2, **options).sin(), x)
    assert [(r.operator, r.dtype, r.bytes) for r in report] == [
        *(("(no node)", *row) for row in kept),
        ("Sin", "float32", 48),
    ]
    assert calls == [1]  # looking recomputes nothing


def test_compressed_saves_are_listed_as_their_bytes():
    def function(x):
        return gradckpt.compress_saved({"codec": "int8", "min_numel": 1})(lambda: (x * 2).square().sum())()

    rows = residuals(function, torch.randn(128, 128, requires_grad=True))
    assert [(row.dtype, row.bytes) for row in rows] == [("uint8", 128 * 128), ("uint8", 128 * 2)]  # codes, scales


def test_random_numbers_grad_mode_and_hooks_are_put_back():
    x = torch.randn(8, 8, requires_grad=True)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert len(residuals(lambda t: F.dropout(t, 0.5).exp(), x)) == 2  # as in training
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)

    def fails(t):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        residuals(fails, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert x.grad is None


def test_meta_tensors_and_empty_ones():
    model = mlp().to("meta")
    assert rows_of(residuals(model, torch.empty(3, 8, device="meta"))) == MLP
    x = torch.randn(0, 4, requires_grad=True)
    assert rows_of(residuals(lambda t: (t * 1).sin() * (t * 1).cos(), x))[0] == (
        "Sin",
        "self",
        (0, 4),
        "float32",
        0,
        "",
    )


def test_what_backward_inside_freed_has_no_node():
    def function(x):
        torch.autograd.grad(x.sin().sum(), x)
        return x.exp()

    x = torch.randn(4, 4, requires_grad=True)
    assert [(r.operator, r.bytes, r.shared) for r in residuals(function, x)] == [
        ("(no node)", 0, "input"),
        ("Exp", 64, ""),
    ]


def test_nothing_saved():
    report = residuals(lambda: torch.ones(3) + 1)
    assert len(report) == report.total_bytes == 0
    assert report.to_dicts() == []
    assert str(report).splitlines()[-1] == "0 tensors saved, 0 bytes (0 B)"


def test_the_table_and_the_data():
    report = residuals(mlp(), torch.randn(3, 8))
    lines = str(report).splitlines()
    assert lines[0].split() == ["operator", "argument", "module", "shape", "dtype", "bytes", "shared", "source"]
    assert lines[2].split()[:6] == ["Relu", "result", "1", "3x16", "float32", "192"]
    assert lines[-1] == "4 tensors saved, 192 bytes (192 B)"
    assert len({line.index("float32") for line in lines[1:-1]}) == 1  # aligned
    data = json.loads(json.dumps(report.to_dicts()))
    assert data[1]["operator"] == "Relu"
    assert data[1]["shape"] == [3, 16]
    assert data[1]["bytes"] == 192


def test_the_total_is_what_a_forward_keeps():
    """As the allocator would say: storages alive through the graph and nothing else."""
    model, x = nn.Sequential(mlp(), nn.LayerNorm(4), nn.GELU()), torch.randn(3, 8)
    seen = {}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t.detach()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    known = {p.untyped_storage()._cdata for p in [x, *model.parameters()]}
    expected = sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in known)
    assert residuals(model, x).total_bytes == expected
    del y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x):
        return self.mlp(x).tanh()


def test_modules_are_named():
    net = nn.Sequential(nn.Linear(8, 8), Block())
    wanted = {"0", "1", "1.mlp.0", "1.mlp.1", "1.mlp.2"}
    assert {r.module for r in residuals(net, torch.randn(3, 8))} == wanted
    assert {r.module for r in residuals(lambda x: net(x).exp(), torch.randn(3, 8))} == wanted | {""}
    assert {r.module for r in residuals(net[1], torch.randn(3, 8))} == {"mlp.0", "mlp.1", "mlp.2", "Block"}
    assert " 1.mlp.0 " in residuals(net, torch.randn(3, 8)).table()


def test_what_a_policy_keeps_is_listed():
    net = nn.Sequential(Block())
    gradckpt.enable(net, None, modules={Block: None}, policy="save_matmuls")
    x = torch.randn(3, 8, requires_grad=True)
    rows = [r for r in residuals(net, x * 2) if r.operator == "aten.addmm.default"]
    assert [(r.argument, r.module, r.shape, r.dtype, r.bytes) for r in rows] == [
        ("output", "0", (3, 16), "float32", 192),
        ("output", "0", (3, 4), "float32", 48),
    ]


def test_what_a_policy_keeps_compressed_is_listed_as_its_bytes():
    layer = nn.Linear(128, 128)
    context_fn = contexts_of("save_matmuls:int8")
    x = torch.randn(64, 128, requires_grad=True)
    report = residuals(lambda t: gradckpt.checkpoint(lambda u: layer(u).sin(), t, context_fn=context_fn), x)
    rows = [r for r in report if r.operator == "aten.addmm.default"]
    assert [(row.dtype, row.bytes) for row in rows] == [("uint8", 64 * 128 + 64 * 2), ("uint8", 0)]  # one memory
