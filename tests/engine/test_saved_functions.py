"""compress_saved() and autograd Functions: those of libraries by a table, others by a rule."""

import functools
import gc
import re
from fractions import Fraction

import fused_functions
import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from fused_functions import (
    TWINS,
    error,
    function,
    inputs,
    norm,
    norm_block,
    saves_inputs,
    step,
    swiglu,
    within,
)
from small_models import fresh  # noqa: F401 (a fixture of every test here)

import gradckpt
from gradckpt import _C, CompressionConfig, compress_saved

DTYPES = [torch.float32, torch.bfloat16]


# ---- the table ----


def test_every_function_of_the_table_has_a_twin():
    table = {(package, node.removesuffix("Backward")) for package, node, places, _ in _C.saved_functions() if places}
    assert table == {(twin.package, twin.name) for twin in TWINS}
    assert len([1 for _, _, places, _ in _C.saved_functions() if places]) == len(TWINS)


@pytest.mark.parametrize("twin", TWINS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_function_of_the_table(twin, dtype):
    """As small and as close as the block that does without the Function."""
    single = inputs(twin)
    exact, _ = step(twin.plain, single, None)
    exact_fused, _ = step(twin.fused, single, None)
    assert error(exact_fused, exact) < 1e-5  # the formula is right
    leaves = inputs(twin, dtype)
    reference, bytes_plain = step(twin.fused, leaves, None)
    grads, bytes_fused = step(twin.fused, leaves, "int8")
    unfused, _ = step(twin.plain, leaves, None)
    of_plain, _ = step(twin.plain, leaves, "int8")
    assert bytes_fused <= bytes_plain * (0.30 if dtype == torch.float32 else 0.56)
    assert 0 < error(grads, reference) <= 1.5 * error(of_plain, unfused)


HOSTILE = {
    "uneven rows": lambda x: x * torch.logspace(-2, 2, x.shape[1])[None, :, None],
    "outlier channels": lambda x: torch.where(torch.arange(x.shape[-1]) % 64 == 5, x * 100, x),
    "half zero": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) % 2 == 0, x, 0.0),
    "offset": lambda x: x + 30,
}


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_values(change):
    for twin in TWINS:
        leaves = inputs(twin)
        with torch.no_grad():
            leaves[0].copy_(HOSTILE[change](leaves[0]))
        reference, _ = step(twin.fused, leaves, None)
        grads, _ = step(twin.fused, leaves, "int8")
        unfused, _ = step(twin.plain, leaves, None)
        of_plain, _ = step(twin.plain, leaves, "int8")
        assert error(grads, reference) <= 1.5 * error(of_plain, unfused), twin


@pytest.mark.parametrize("twin", [twin for twin in TWINS if twin.overwrites], ids=str)
def test_a_backward_that_overwrites_what_it_saved(twin):
    """It gets values of its own: a second backward is right, and so is another user of them."""
    x, *weights = inputs(twin)
    with compress_saved("int8"):
        h = x * 2.0
        y = twin.fused(h, *weights)
        other = (h * h).sum() * 1
        end = y.square().mean() * 1 + other * 0
        end = end * 1
    first = torch.autograd.grad(end, (x, *weights), retain_graph=True)
    second = torch.autograd.grad(end, (x, *weights))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_exact_codecs_change_no_bit(twin, codec):
    leaves = inputs(twin)
    exact, _ = step(twin.fused, leaves, None)
    by_operator = {"codec": codec, "operators": {"norm": codec}}  # so that tensors wait for their nodes
    for config in (codec, by_operator):
        grads, _ = step(twin.fused, leaves, config)
        assert all(torch.equal(a, b) for a, b in zip(grads, exact, strict=True))


def test_names_of_other_packages_are_not_known():
    for package in ("mine", "liger_kernel_2", "my.liger_kernel"):
        divide = saves_inputs(package, "LigerSiLUMulFunction", torch.div, (0, 1))
        x = torch.rand(64, 64).requires_grad_()
        gradckpt.stats.reset()
        end = within("int8", lambda x, divide=divide: divide.apply(x + 1, x + 2).sum(), x)
        (grad,) = torch.autograd.grad(end, x)
        a = x.detach().requires_grad_()
        assert torch.equal(grad, torch.autograd.grad(divide.apply(a + 1, a + 2).sum(), a)[0])
        assert gradckpt.stats()["exact_functions"] == {"LigerSiLUMulFunctionBackward": (2, 2 * 64 * 64 * 4)}


def test_another_number_of_tensors_is_not_known():
    """A version of a library may save other tensors."""
    mul = saves_inputs("liger_kernel", "LigerSiLUMulFunction", swiglu, (1, 0), 3)
    x = torch.randn(64, 64).requires_grad_()
    within("int8", lambda: mul.apply(x + 1, x + 2).sum())
    assert "LigerSiLUMulFunctionBackward" in gradckpt.stats()["exact_functions"]


@pytest.mark.parametrize("name", ["apex rms", "apex layer", "torch rms", "torch layer", "apex rms, no weight"])
def test_a_norm_that_saves_its_result_stays_exact(name):
    """With memory_efficient=True the backward divides the result by the weight."""
    package, name, saved, centred = fused_functions.LAYOUTS[name]
    cls = norm(package, name, saved, centred, result=True)
    twin = next(t for t in TWINS if t.name == name and t.saved == saved)
    leaves = inputs(twin)

    def block(x, *w):
        return norm_block(cls.apply, x, *w)

    exact, _ = step(twin.plain, leaves, None)
    fused, _ = step(block, leaves, None)
    assert error(fused, exact) < 1e-4
    x, *weights = leaves

    @compress_saved("int8")
    def whole():
        h = x * 1.0
        y = cls.apply(h, *weights[2:])
        return y, y.sum()

    y, _end = whole()
    saved_tensors = y.grad_fn._raw_saved_tensors
    assert isinstance(saved_tensors[0].data.value, torch.Tensor)


@pytest.mark.parametrize("change", [lambda y: y.view(-1, 128), lambda y: y.detach(), lambda y: y.clone()])
def test_a_norm_that_saves_its_result_as_something_else(change):
    def forward(ctx, x, w):
        r = x.square().mean(-1).rsqrt()
        y = x * r[:, None] * w
        ctx.save_for_backward(change(y), w, r)
        return y

    def backward(ctx, g):
        y, w, r = ctx.saved_tensors
        m, n = g * w, y / w
        return r[:, None] * (m - n * (m * n).mean(-1, keepdim=True)), (g * n).sum(0)

    cls = function("apex", "FusedRMSNormAffineFunction", forward, backward)
    x, w = torch.randn(512, 128).requires_grad_(), torch.linspace(-1, 1, 128).pow(3).requires_grad_()
    up = torch.randn(128, 128)

    def gradients(config):
        return torch.autograd.grad(within(config, lambda: (cls.apply(x * 1, w) @ up).square().sum()), (x, w))

    assert error(gradients("int8"), gradients(None)) < 0.02


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
def test_a_product_beside_a_pole_stays_exact(views):
    a, b = (torch.randn(64, 256).mul_(0.1).requires_grad_() for _ in range(2))
    cls = saves_inputs("liger_kernel", "LigerSiLUMulFunction", swiglu, (0, 1), flat=views)

    def gradients(config):
        _y, end = within(config, lambda: (y := cls.apply(a * 1, b * 1), (y.abs() + 1e-3).log().sum()))
        return torch.autograd.grad(end, (a, b))

    for g, e in zip(gradients("int8"), gradients(None), strict=True):
        assert torch.equal(g, e)


def test_weights_stay_as_they_are():
    """A leaf, frozen or not, and views of one, at a place that the table has."""
    mul = viewing()

    def step(x, weight):
        y = mul.apply(x * 1, weight)
        return y, y.sum()

    for frozen in (True, False):
        weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=not frozen)
        y, end = within("int8", step, torch.randn(64, 64).requires_grad_(), weight)
        first, second = (one.data.value for one in y.grad_fn._raw_saved_tensors)
        assert isinstance(first, _C.Payload)
        assert second.data_ptr() == weight.data_ptr()
        end.backward()


def viewing():
    """A gated product that saves views of its arguments, as Liger's."""
    return next(twin for twin in TWINS if twin.name == "LigerSiLUMulFunction").function


def test_views_that_are_written_to_before_their_node_is_found():
    x = torch.randn(64, 64).requires_grad_()
    with compress_saved("int8"):
        a = x * 1.0
        y = viewing().apply(a, x * 2)
        with torch.no_grad():
            a.add_(1)
        y = y @ torch.ones(64, 64, requires_grad=True)
        y = y @ torch.ones(64, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
        y.sum().backward()


@pytest.mark.parametrize(("width", "kind"), [(256, "Payload"), (200, "Tensor")])
def test_rows_that_share_groups_stay_exact(width, kind):
    cls = norm("liger_kernel", "LigerRMSNormFunction", 3, False)
    x, w = torch.randn(64, width).requires_grad_(), torch.ones(width).requires_grad_()
    y = within("int8", lambda: (y := cls.apply(x * 1, w), y @ torch.ones(width, 64)))[0]
    assert type(y.grad_fn._raw_saved_tensors[0].data.value).__name__ == kind


def test_found_although_nothing_waits():
    """Of a leaf and weights alone, so that no search is due."""
    cls = mine()
    x = torch.randn(2048, 64).requires_grad_()
    up, side = (torch.nn.Parameter(torch.randn(64, 128) / 8) for _ in range(2))
    with compress_saved({"codec": "int8", "operators": {"MySwiGLUBackward": "int8"}}):
        y = cls.apply(x, up, side)
        y.sigmoid()
    assert [type(one.data.value).__name__ for one in y.grad_fn._raw_saved_tensors] == [
        T,
        "Parameter",
        "Parameter",
        P,
        P,
        T,
    ]


def test_no_cycle_while_a_result_waits():
    """A Function's result that waits does not hold its own node."""
    import weakref

    cls = norm("apex", "FusedRMSNormAffineFunction", 3, False, result=True)
    x, w = torch.randn(64, 128).requires_grad_(), torch.ones(128).requires_grad_()
    with compress_saved("int8"):
        y = cls.apply(x * 1, w)
        alive = weakref.ref(y)
        gc.disable()
        try:
            del y
            assert alive() is None
        finally:
            gc.enable()


def test_few_rows_are_no_narrow_product():
    """The input of LoRA_W is its third saved tensor, and no second matrix of a product."""
    cls = next(twin for twin in TWINS if twin.name == "LoRA_W").function
    x = torch.randn(16, 256).requires_grad_()
    a, b = torch.randn(16, 256).requires_grad_(), torch.randn(256, 16).requires_grad_()
    y = within("int8", lambda: (y := cls.apply(x * 1, a, b), y.tanh().sum()))[0]
    assert isinstance(y.grad_fn._raw_saved_tensors[2].data.value, _C.Payload)


# ---- rules ----


def mine(name="MySwiGLU", package="mine"):
    def forward(ctx, x, up, side):
        a, b = x @ up, x @ side
        scale = a.square().mean(-1).rsqrt()
        ctx.save_for_backward(x, up, side, a, b, scale)
        return a * scale[..., None] * b

    def backward(ctx, g):
        x, up, side, a, b, scale = ctx.saved_tensors
        normal = a * scale[..., None]
        m = g * b
        da = scale[..., None] * (m - normal * (m * normal).mean(-1, keepdim=True))
        db = g * normal
        return da @ up.t() + db @ side.t(), x.t() @ da, x.t() @ db

    return function(package, name, forward, backward)


def run_mine(config, name="MySwiGLU"):
    torch.manual_seed(0)
    x = torch.randn(2048, 64).requires_grad_()
    up, side = (torch.nn.Parameter(torch.randn(64, 128) / 8) for _ in range(2))
    cls = mine(name)
    gradckpt.stats.reset()

    @compress_saved(config)
    def whole():
        y = cls.apply(x * 1, up, side)
        return y, y.square().mean()

    y, end = whole()
    kinds = [type(getattr(one.data, "value", None)).__name__ for one in y.grad_fn._raw_saved_tensors]
    return torch.autograd.grad(end, (x, up, side)), kinds


P, T = "Payload", "Tensor"


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        ({}, [T, "Parameter", "Parameter", T, T, T]),
        ({"MySwiGLUBackward": "int8"}, [P, "Parameter", "Parameter", P, P, T]),  # a scale per row is no activation
        ({"MySwiGLUBackward.3": "int8"}, [T, "Parameter", "Parameter", P, T, T]),
        ({"MySwiGLUBackward": "int8", "MySwiGLUBackward.4": None}, [P, "Parameter", "Parameter", P, T, T]),
        ({"MySwiGLUBackward.5": "fp16"}, [T, "Parameter", "Parameter", T, T, P]),
        ({"MySwiGLUBackward": None}, [T, "Parameter", "Parameter", T, T, T]),
    ],
    ids=str,
)
def test_rules(rules, kinds):
    exact, _ = run_mine(None)
    grads, found = run_mine({"codec": "int8", "operators": rules} if rules else "int8")
    assert found == kinds
    assert error(grads, exact) < 0.02
    assert ("MySwiGLUBackward" in gradckpt.stats()["exact_functions"]) == ("MySwiGLUBackward" not in rules)


@pytest.mark.parametrize("change", [lambda w: w.t(), lambda w: w.view(-1).view(128, 64), lambda w: w[None].squeeze(0)])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda w: w.requires_grad_(), lambda w: w])
def test_views_of_weights_under_a_rule(change, kind):
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w.view(w.shape))
        return x @ w.reshape(64, -1)

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.reshape(64, -1).t(), (x.t() @ g).reshape(w.shape)

    cls = function("mine", "Weighted", forward, backward)
    w = kind(torch.randn(128, 64))
    x = torch.randn(256, 64).requires_grad_()
    rules = {"codec": "int8", "operators": {"WeightedBackward": "int8"}}
    y = within(rules, lambda: (y := cls.apply(x * 1, change(w)), y.mean()))[0]
    kinds = [type(one.data.value).__name__ for one in y.grad_fn._raw_saved_tensors]
    assert kinds == [P, T] if w.requires_grad else kinds[0] == P


def test_a_rule_for_one_argument_of_torchs():
    x = torch.randn(64, 256).requires_grad_()
    for rules, kinds in (({}, [P, P]), ({"MulBackward0.other": None}, [P, T]), ({"MulBackward0": None}, [T, T])):

        @compress_saved({"codec": "int8", "operators": rules} if rules else "int8")
        def whole():
            y = (x + 1) * (x + 2)
            return y, F.linear(y, torch.ones(32, 256)).sum()

        y, end = whole()
        held = [getattr(y.grad_fn, f"_raw_saved_{name}").data.value for name in ("self", "other")]
        assert [type(one).__name__ for one in held] == kinds
        end.backward()


def test_rules_alone_keep_everything_else():
    config = CompressionConfig.from_dict({"MySwiGLUBackward": "int8"})
    _, kinds = run_mine(config)
    assert kinds == [P, "Parameter", "Parameter", P, P, T]
    assert gradckpt.stats()["compressed"] == 3
    assert CompressionConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("QxBackward", "no autograd Function Qx exists; import what has it first, or leave it out"),
        ("MySwigluBackward", "did you mean 'MySwiGLUBackward'"),
        ("MySwiGLUBackward.x", "cannot encode 'x' of MySwiGLUBackward; give its place, from 0"),
        ("SigmoidBackward0", "what SigmoidBackward0 saves stays exact; leave it out of operators="),
        ("MySwiGLUBackward.01", "cannot encode '01' of MySwiGLUBackward; give its place, from 0"),
        ("MulBackward0.exponent", "choose one of: self, other"),
        ("LigerCrossEntropyFunctionBackward", "saves a gradient, made in the forward, which stays exact; leave it out"),
        ("LigerRMSNormFunctionBackward.2", "choose one of: 0"),
        ("MySwiGLU", "unknown operator 'MySwiGLU'"),
        (3, "unknown operator 3"),
    ],
)
def test_bad_rules(rule, said):
    keep = mine(), mine("LigerCrossEntropyFunction", "liger_kernel")  # alive
    with pytest.raises(ValueError, match=re.escape(said)):
        run_mine({"codec": "int8", "operators": {rule: "int8"}}, "Another")
    del keep


def test_a_name_that_a_library_uses_too():
    """The advice of stats() can be followed."""
    cls = mine("FocalLoss")
    x = torch.randn(2048, 64).requires_grad_()
    up, side = (torch.nn.Parameter(torch.randn(64, 128) / 8) for _ in range(2))
    within("int8", lambda: cls.apply(x * 1, up, side).mean())
    assert '"FocalLossBackward": "int8"' in str(gradckpt.stats())
    rules = {"codec": "int8", "operators": {"FocalLossBackward": "int8"}}
    y = within(rules, lambda: (y := cls.apply(x * 1, up, side), y.mean()))[0]
    assert [type(one.data.value).__name__ for one in y.grad_fn._raw_saved_tensors][3:] == [P, P, T]


@pytest.mark.parametrize("first", ["none", "scalar"])
def test_the_largest_result_tells_what_a_statistic_is(first):
    def forward(ctx, x):
        r = x.square().mean(-1).rsqrt()
        ctx.save_for_backward(x, r)
        y = x * r[:, None]
        return (None, y) if first == "none" else (y.sum(), y)

    def backward(ctx, _, g):
        x, r = ctx.saved_tensors
        n = x * r[:, None]
        return r[:, None] * (g - n * (g * n).mean(-1, keepdim=True))

    cls = function("mine", "Scaled", forward, backward)
    x = torch.randn(2048, 64).requires_grad_()
    rules = {"codec": "int8", "operators": {"ScaledBackward": "int8"}}
    y = within(rules, lambda: (y := cls.apply(x * 1)[1], y.mean()))[0]
    assert [type(one.data.value).__name__ for one in y.grad_fn._raw_saved_tensors] == [P, T]


def test_residuals_and_stats_name_functions_that_stay_exact():
    cls = mine()
    x = torch.randn(512, 64).requires_grad_()
    up, side = (torch.nn.Parameter(torch.randn(64, 128)) for _ in range(2))
    report = gradckpt.residuals(lambda x: cls.apply(x * 1, up, side), x)
    assert report.exact_functions == ("MySwiGLUBackward",)
    assert [row.argument for row in report if row.operator == "MySwiGLU"] == list("012345")
    line = 'compress={"codec": "int8", "operators": {"MySwiGLUBackward": "int8"}}'
    assert line in str(report)
    run_mine("int8")
    text = str(gradckpt.stats())
    assert line in text
    nbytes = Fraction(2048 * (64 + 128 + 128 + 1) * 4, 2**20)
    assert re.search(rf"saved exactly by MySwiGLUBackward +4 +{float(nbytes):.3g} MiB", text)
    scalars = gradckpt.stats().scalars("")
    assert scalars["exact_functions/MySwiGLUBackward_mib"] == float(nbytes)
    before = gradckpt.stats()
    assert before.since(before)["exact_functions"] == {}


def test_known_functions_are_not_named():
    leaves = inputs(TWINS[0])
    step(TWINS[0].fused, leaves, "int8")
    x = torch.randn(64, 64).requires_grad_()
    reentrant = functools.partial(torch.utils.checkpoint.checkpoint, torch.tanh, use_reentrant=True)
    within("int8", lambda: reentrant(x * 1).sum())  # torch's own Function
    assert gradckpt.stats()["exact_functions"] == {}
    assert gradckpt.residuals(lambda x: TWINS[0].fused(x, *leaves[1:]), leaves[0]).exact_functions == ()


def test_the_page_has_the_functions():
    page = (ROOT / "docs" / "saved.md").read_text().split("<!-- functions -->")[1].split("<!-- /functions -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", page, re.M)
    expected = []
    for package, node, places, why in _C.saved_functions():
        expected.append((package, node.removesuffix("Backward"), f"exact: {why}" if why else ", ".join(places)))
    assert rows == list(dict.fromkeys(expected))


# ---- with other features ----


def test_a_custom_operator():
    """torch makes the Function; a rule has its name."""

    @torch.library.custom_op("gradckpt_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def setup(ctx, inputs, output):
        ctx.save_for_backward(inputs[0] * 2)

    square.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=setup)
    node = "GeneratedBackwardFor_gradckpt_test_square_defaultBackward"
    x = torch.randn(64, 64, requires_grad=True)
    for rules, known in (({}, {node: (1, 64 * 64 * 4)}), ({node: "int8"}, {})):
        gradckpt.stats.reset()
        config = {"codec": "int8", "operators": rules} if rules else "int8"
        within(config, lambda x: square(x * 1).sum(), x).backward()
        assert gradckpt.stats()["exact_functions"] == known
