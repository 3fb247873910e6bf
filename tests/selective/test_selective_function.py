"""SelectiveRecompute: a region as one graph node, with the gradients of no checkpointing."""

import functools
import gc

import pytest
import torch
from selective_ways import SQUARE, Watch, aten, calls, leaf, same, square
from selective_ways import _nothing_left_behind as _nothing_left_behind

import gradckpt

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
apply = gradckpt.SelectiveRecompute.apply


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scale = torch.nn.Parameter(torch.full((8,), 0.5))
        self.gates = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def forward(self, x, *, shift=0.0):
        return square(self.down(self.up(x).sin())) * self.scale + self.gates[0](x) + shift

    def other(self, x):
        return self.up(x).tanh()


class Of(torch.nn.Module):
    """A function as a module: then all that it uses is known,
    and some of the gradients may be asked for."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def plain(function, _, *args, **kwargs):
    return function(*args, **kwargs)


def run(how, function, policy, args, over, kwargs=None):
    """Outputs, and the gradients by `over`, of the weighted sum of all that requires grad."""
    out = how(function, policy, *args, **(kwargs or {}))
    tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in tensors)
    return out, torch.autograd.grad(loss, over, allow_unused=True)


def agrees(function, policy, *args, over, kwargs=None):
    torch.manual_seed(1)
    want_out, want = run(plain, function, policy, args, over, kwargs)
    torch.manual_seed(1)
    out, got = run(apply, function, policy, args, over, kwargs)
    flat, spec = torch.utils._pytree.tree_flatten(out)
    want_flat, want_spec = torch.utils._pytree.tree_flatten(want_out)
    assert spec == want_spec
    assert same([t for t in flat if isinstance(t, torch.Tensor)], [t for t in want_flat if isinstance(t, torch.Tensor)])
    assert [t for t in flat if not isinstance(t, torch.Tensor)] == [
        t for t in want_flat if not isinstance(t, torch.Tensor)
    ]
    assert same(got, want)
    return out


POLICIES = {
    "nothing": None,
    "a list": [aten.addmm.default, SQUARE],
    "a mapping": {aten.addmm.default: True, SQUARE: gradckpt.policies.save()},
    "a policy": gradckpt.policies.save_matmuls,
    "a name": "save_matmuls",
    "a function": lambda ctx, op, *args, **kwargs: op in (aten.addmm.default, SQUARE),
    "half": gradckpt.policies.every_other_matmul,
}


# ---- what may be a region ----


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_module(policy):
    block, x = Block(), leaf(4, 8)
    out = agrees(block, policy, x, over=[x, *block.parameters()])
    assert out.grad_fn.name() == "SelectiveRecomputeBackward"
    calls.clear()
    block(x)
    run(apply, block, policy, (x,), [x])
    assert calls["square"] == 1 + (
        1 if policy in (POLICIES["a list"], POLICIES["a mapping"], POLICIES["a function"]) else 2
    )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_methods_and_partials(policy):
    block, x = Block(), leaf(4, 8)
    used = [x, *block.up.parameters()]
    agrees(block.other, policy, x, over=used)
    agrees(functools.partial(block.other), policy, x, over=used)
    agrees(functools.partial(functools.partial(block), shift=2.0), policy, x, over=[x, *block.parameters()])
    agrees(block.forward, policy, x, over=[x, block.scale], kwargs={"shift": 1.0})


def accumulated(how, function, policy, args, parameters):
    for p in parameters:
        p.grad = None
    how(function, policy, *args).square().sum().backward()
    return [p.grad.clone() for p in parameters]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_closure_accumulates_into_what_it_uses(policy):
    block, x = Block(), leaf(4, 8)
    parameters = [x, *block.parameters()]
    want = accumulated(plain, lambda t: block(t) * 2, policy, (x,), parameters)
    assert same(accumulated(apply, lambda t: block(t) * 2, policy, (x,), parameters), want)


@pytest.mark.parametrize("policy", [None, [SQUARE]], ids=["nothing", "square"])
def test_containers_go_in_and_come_out(policy):
    x, y = leaf(4), leaf(4)

    def region(pair, *, more, factor):
        a, (b, note) = pair
        return {"sum": square(a + b), "rest": [more["c"] * factor, note, None], "index": b.argmax()}

    out = apply(region, policy, (x * 1, [y * 1, "note"]), more={"c": x.exp()}, factor=3)
    want = region((x * 1, [y * 1, "note"]), more={"c": x.exp()}, factor=3)
    assert out["rest"][1:] == ["note", None]
    assert out["index"].dtype == torch.int64
    assert not out["index"].requires_grad
    for each in (out, want):
        x.grad = y.grad = None
        (each["sum"].sum() + each["rest"][0].sum()).backward()
        each["grads"] = x.grad, y.grad
    assert same(out["grads"], want["grads"])


def test_unused_outputs_and_inputs_without_gradient():
    x, y, z = leaf(4), leaf(4), leaf(4)

    def region(a, b, c):
        return a.exp(), b.sin(), c.detach() * 2

    out = apply(Of(region), None, x, y, z)
    got = torch.autograd.grad(out[0].sum(), (x, y, z), allow_unused=True)
    assert torch.equal(got[0], x.exp())
    assert all(g is None or not g.any() for g in got[1:])


@pytest.mark.parametrize("policy", [None, [SQUARE]], ids=["nothing", "square"])
def test_odd_outputs(policy):
    x = leaf(4)

    def twice(t):
        y = square(t)
        return y, y

    a, b = apply(Of(twice), policy, x)
    assert same(torch.autograd.grad((a * 2 + b).sum(), x), torch.autograd.grad((3 * square(x)).sum(), x))
    h = x * 1
    out = apply(Of(lambda t: (t, square(t))), policy, h)
    assert torch.equal(out[0], h)
    assert same(torch.autograd.grad(out[0].sum() + out[1].sum(), x), [1 + 2 * x])
    assert apply(lambda t: None, policy, x) is None
    assert apply(lambda t: (), policy, x) == ()
    assert apply(lambda t: ["text", 3], policy, x) == ["text", 3]
    assert not apply(lambda t: t.argmax(), policy, x).requires_grad


def test_the_same_tensor_twice():
    x = leaf(4)
    agrees(Of(lambda a, b: square(a) * b.sin()), [SQUARE], x, x, over=[x])


def test_more_arguments_than_fit_on_the_stack():
    xs = [leaf(2) for _ in range(100)]
    agrees(Of(lambda *all_of: torch.stack(all_of).sin()), [aten.sin.default], *xs, over=xs)


# ---- parameters ----


def test_a_parameter_that_is_passed_too():
    block, x = Block(), leaf(4, 8)

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block

        def forward(self, t, scale):
            return self.inner(t) * scale

    module = Scaled()
    agrees(module, None, x, block.scale, over=[x, *block.parameters()])


def test_shared_and_frozen_parameters():
    block, x = Block(), leaf(4, 8)
    block.tied = block.up
    block.again = torch.nn.Linear(8, 8)
    block.again.weight = block.gates[0].weight
    block.down.weight.requires_grad_(False)
    agrees(block, [aten.addmm.default], x, over=[x, *(p for p in block.parameters() if p.requires_grad)])
    assert apply(block, None, torch.randn(4, 8)).requires_grad  # of its parameters alone


def test_gradients_of_parameters_alone_and_of_inputs_alone():
    block, x = Block(), leaf(4, 8)
    agrees(block, None, x, over=[block.scale])
    agrees(block, None, torch.randn(4, 8), over=[block.up.weight])
    for p in block.parameters():
        p.requires_grad_(False)
    agrees(block, None, x, over=[x])


@pytest.mark.parametrize("function", ["module", "closure"])
def test_hooks_of_parameters_fire_once(function):
    block, x, fired = Block(), leaf(4, 8), []
    want = torch.autograd.grad(block(x).sum(), block.scale)[0]
    block.scale.register_hook(lambda g: fired.append(("tensor", g.clone())) or g * 3)
    block.scale.register_post_accumulate_grad_hook(lambda p: fired.append(("accumulated", p.grad.clone())))
    node = block.scale.view_as(block.scale).grad_fn.next_functions[0][0]  # AccumulateGrad: where DDP listens
    node.register_hook(lambda *_: fired.append(("node", None)))
    apply(block if function == "module" else lambda t: block(t), None, x).sum().backward()
    assert [name for name, _ in fired] == ["tensor", "accumulated", "node"]
    assert torch.equal(fired[0][1], want)
    assert torch.equal(block.scale.grad, want * 3)


def test_a_tensor_that_a_module_hides_is_noticed():
    block = Block()
    hidden = leaf(8)
    block.forward = lambda x: Block.forward(block, x) * hidden
    with pytest.raises(RuntimeError, match=r"a tensor that Block uses, of shape \(8,\)"):
        apply(block, None, leaf(4, 8)).sum().backward()


# ---- where it is called ----


def test_grad_mode_off_and_nothing_that_requires_grad():
    x = leaf(4)
    with torch.no_grad():
        assert not apply(square, [SQUARE], x).requires_grad
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = apply(square, [SQUARE], x.detach())
    assert not out.requires_grad


def test_some_of_the_gradients():
    block, x = Block(), leaf(4, 8)
    out = apply(lambda t: block(t), None, x)
    for backward in (
        lambda: torch.autograd.grad(out.sum(), x, retain_graph=True),
        lambda: out.sum().backward(inputs=[x], retain_graph=True),
    ):
        with pytest.raises(RuntimeError, match=r"allows no \.grad\(\) or backward\(inputs=\.\.\.\)"):
            backward()
    out.sum().backward()


@pytest.mark.parametrize("policy", [None, [SQUARE]], ids=["nothing", "square"])
def test_create_graph_raises_only_when_it_is_differentiated(policy):
    block, x = Block(), leaf(4, 8)
    out = apply(block, policy, x)
    (got,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(got, torch.autograd.grad(block(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="has no gradient of its gradient"):
        got.sum().backward()


def test_create_graph_leaves_the_gradient_that_came_in_alone():
    x, grad = leaf(4), torch.ones(4)
    module = torch.nn.Identity()
    torch.autograd.grad(apply(module, None, x), x, grad, create_graph=True)
    assert not grad.requires_grad


def test_a_second_backward():
    block, x = Block(), leaf(4, 8)
    out = apply(block, None, x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert same(torch.autograd.grad(out.sum(), x), first)
    out = apply(block, [SQUARE], x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        torch.autograd.grad(out.sum(), x)


def test_without_saved_tensor_hooks_and_with_others_of_them():
    block, x = Block(), leaf(4, 8)
    with torch.autograd.graph.disable_saved_tensors_hooks("none"):
        agrees(block, [SQUARE], x, over=[x, *block.parameters()])
    with torch.autograd.graph.save_on_cpu():
        agrees(block, [SQUARE], x, over=[x, *block.parameters()])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        out = apply(block, [SQUARE], x)
    assert packed == [x.shape]
    assert same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(block(x).sum(), x))


def test_random_numbers_and_autocast():
    x = leaf(16, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    for policy in (None, [aten.addmm.default], [aten.native_dropout.default]):
        agrees(module, policy, x, over=[x, *module.parameters()])
        with torch.autocast("cpu"):
            agrees(module, policy, x, over=[x, *module.parameters()])
    with torch.autocast("cpu"):
        out = apply(module, None, x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()


def test_running_statistics_once():
    module, other, x = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8), leaf(16, 8)
    apply(module, None, x).sum().backward()
    other(x)
    assert torch.equal(module.running_mean, other.running_mean)
    assert module.num_batches_tracked == 1


def test_inputs_kept_compressed():
    gradckpt.stats.reset()
    module, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), leaf(64, 64)
    h = x * 1
    (got,) = torch.autograd.grad(apply(module, [aten.addmm.default], h, compress="int8").sum(), x)
    (want,) = torch.autograd.grad(module(x).sum(), x)
    assert gradckpt.stats()["compressed"] == 1
    assert torch.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.999
    (raw,) = torch.autograd.grad(apply(module, None, x * 1, compress="raw").sum(), x)
    assert torch.equal(raw, want)
    with pytest.raises(ValueError, match=r"takes no fake_quantize=; use gradckpt\.checkpoint"):
        apply(module, None, h, compress={"codec": "int8", "fake_quantize": True})


def test_an_input_that_is_changed_later():
    h = leaf(4) * 1
    out = apply(square, None, h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_refused_under_torch_func():
    with pytest.raises(RuntimeError, match=r"does not work under torch\.func"):
        torch.func.grad(lambda t: apply(square, None, t).sum())(torch.ones(4))


def test_bad_calls():
    with pytest.raises(TypeError, match="takes a function and a policy"):
        apply(square)
    with pytest.raises(TypeError, match="call SelectiveRecompute"):
        gradckpt.SelectiveRecompute.forward(None, 3)


def test_another_number_of_outputs_in_the_recompute():
    counts = iter([2, 3])
    out = apply(lambda t: [t.sin()] * next(counts), None, leaf(4))
    with pytest.raises(RuntimeError, match="got 2 tensors from the forward and 3 from the recompute"):
        out[0].sum().backward()


def test_a_mode_around_sees_what_runs():
    block, x = Block(), leaf(4, 8)
    with Watch() as watch:
        out = apply(block, [SQUARE], x)
        assert watch.seen[SQUARE] == 1
        (got,) = torch.autograd.grad(out.sum(), x)
    assert watch.seen[SQUARE] == 1
    assert torch.equal(got, torch.autograd.grad(block(x).sum(), x)[0])


# ---- leaks ----


def steps(n, policy, containers):
    block, h = Block(), leaf(4, 8)
    options = {"shift": 1.0} if containers else {}
    for i in range(n):
        out = apply(block, policy, h * 1, **options)
        if i % 3:
            out.sum().backward()
        apply((lambda t: {"a": t.sin(), "b": [t.cos()]}) if containers else torch.sin, policy, h)


@pytest.mark.parametrize("containers", [False, True])
@pytest.mark.parametrize(
    "policy",
    [None, [SQUARE], {aten.sin.default: "int8"}, lambda ctx, op, *a, **k: op is SQUARE],
    ids=["none", "list", "int8", "function"],
)
@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.soak)])
def test_no_object_is_left(policy, containers, count):
    def alive():  # torch's tree_flatten leaves a function that refers to itself
        kinds = (torch.Tensor, gradckpt.codecs.Payload)
        found = [o for o in gc.get_objects() if not containers or issubclass(type(o), kinds)]
        return len(found)

    steps(40, policy, containers)
    gc.disable()
    try:
        before = alive()
        steps(count, policy, containers)
        assert alive() - before < 20
    finally:
        gc.enable()
