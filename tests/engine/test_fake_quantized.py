"""``fake_quantize=True``: the forward runs on restored values,
and what runs again repeats it to the bit, however deep.

A tree of regions is drawn; each notes the bits of its inputs and outputs and whether they are
leaves, whenever it runs. The k-th run of a region in one run of its parent must see what the
forward saw.
"""

import functools
import itertools
import random
import threading
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from processes import in_threads

import gradckpt
from gradckpt import CompressionConfig

SIZE = (8, 64)


@pytest.fixture(autouse=True)
def _rounding_state_is_put_back():
    before = gradckpt.config.get_rounding_state()
    yield
    gradckpt.config.set_rounding_state(before)


def config(codec, **options):
    return CompressionConfig(codec, fake_quantize=True, min_numel=0, **options)


def bits(x):
    return bytes(x.detach().contiguous().view(-1).view(torch.uint8).numpy())


class Tree:
    """Nested regions, drawn from `seed`: what each of them got and gave, by its path,
    run for run."""

    def __init__(self, seed, configs, depth=3):
        self.draw = random.Random(seed)
        self.configs, self.depth = configs, depth
        generator = torch.Generator().manual_seed(seed)
        self.w = torch.randn(64, 64, generator=generator).div_(8).requires_grad_()
        self.x = torch.randn(SIZE, generator=generator).requires_grad_()
        self.seen = {}
        self.runs = Counter()
        self.plan = self.drawn(depth)

    def drawn(self, depth):
        """(operator, or (region's config, early stop, statements)), ..."""
        regions = self.draw.randint(1, 2) if depth else 0
        body = [self.draw.choice(["sin", "matmul", "tanh", "topk", "write"]) for _ in range(self.draw.randint(1, 3))]
        for _ in range(regions):
            region = (self.draw.choice(self.configs), self.draw.random() < 0.7, self.drawn(depth - 1))
            body.insert(self.draw.randint(0, len(body)), region)
        return tuple(body)

    def note(self, path, what, x):
        row = (bits(x), x.is_leaf, x.stride(), x.dtype)
        seen = self.seen.setdefault((path, what), row)
        assert seen == row, f"{path}: another {what} in the {self.runs[path]}. run"

    def body(self, plan, path, x):
        self.runs[path] += 1
        self.note(path, "input", x)
        for i, step in enumerate(plan):
            if isinstance(step, tuple):
                options, early_stop, inner = step
                while options is None and inner[:1] == ("write",):
                    inner = inner[1:]  # nested in a region, torch's gives wrong gradients then, and says nothing
                function = functools.partial(self.body, inner, (*path, i))
                h = x * 1
                x = gradckpt.checkpoint(function, h, compress=options, early_stop=early_stop) + h
            elif step == "matmul":
                x = x @ self.w
            elif step == "topk":
                x = x * (x >= x.topk(32).values[:, -1:])
            elif step == "write":
                x = x if path and i == 0 else x * 1
                x.mul_(0.75)
            else:
                x = getattr(x, step)()
            self.note(path, f"value {i}", x)
        return x

    def forward(self):
        y = self.body(self.plan, (), self.x * 1)
        assert set(self.runs.values()) == {1}, f"a function ran again in the forward: {self.runs}"
        return y


WAYS = {
    "int8": [config("int8")],
    "mixed": [config("int8"), config("int4"), config("fp8"), config("bf16"), config("int6", include="floating")],
    "stochastic": [config("int4", stochastic=True), config("int8", stochastic=True, seed=3)],
    "some exact": [config("int4", stochastic=True), None, CompressionConfig("lossless", min_numel=0), config("raw")],
}


def backward(tree, kind):
    y = tree.forward()
    if kind == "backward":
        y.square().sum().backward()
    elif kind == "twice":
        y.square().sum().backward(retain_graph=True)
        y.sin().sum().backward()
    elif kind == "grad":
        torch.autograd.grad(y.square().sum(), [tree.x, tree.w], allow_unused=True)
    else:
        (first,) = torch.autograd.grad(y.square().sum(), tree.x, create_graph=True)
        first.square().sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_again_repeats_the_forward(way):
    for seed, kind in itertools.product(range(8), ("backward", "twice", "grad", "create_graph")):
        tree = Tree(seed, WAYS[way])
        backward(tree, kind)
        assert max(tree.runs.values()) > 1


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_what_runs_again_repeats_the_forward_in_many_trees(way):
    for seed in range(1000, 1600):
        backward(Tree(seed, WAYS[way]), ("backward", "twice", "grad", "create_graph")[seed % 4])


def test_the_noise_of_a_region_is_its_own_whatever_other_threads_round():
    """The counter is the process's; between forward and backward
    of one thread others take numbers."""
    meet = threading.Barrier(4, timeout=30)

    def work(first):
        for seed in range(first, first + 6):
            tree = Tree(seed, WAYS["stochastic"])
            meet.wait()
            y = tree.forward()
            meet.wait()
            y.square().sum().backward()

    in_threads(*(functools.partial(work, 100 * i) for i in range(4)))


def test_what_a_policy_keeps_takes_no_number_of_an_inner_region():
    """It is encoded in the forward and given back in the recompute."""
    noisy = CompressionConfig("int4", stochastic=True, min_numel=0, fake_quantize=True)
    seen = []

    def inner(h):
        seen.append(bits(h))
        return h.tanh()

    def outer(x, w):
        return (
            gradckpt.checkpoint(inner, x * 2, compress=noisy)
            * (x @ w)
            * gradckpt.checkpoint(inner, x * 3, compress=noisy)
        )

    x, w = torch.randn(SIZE, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    policy = gradckpt.policies.save_matmuls.compressed(CompressionConfig("int4", stochastic=True, min_numel=0))
    context_fn = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)
    gradckpt.checkpoint(outer, x * 1, w, compress=noisy, context_fn=context_fn).sum().backward()
    assert seen[0] != seen[1]
    assert set(seen[2:]) == set(seen[:2])


def test_regions_of_a_step_have_different_noise():
    """Also where nothing but what is inside them is rounded."""
    noisy = CompressionConfig("int4", stochastic=True, min_numel=0, fake_quantize=True)
    seen = []

    def inner(h):
        seen.append(bits(h))
        return h.sin()

    x = torch.randn(SIZE, requires_grad=True)
    h = x * 1
    for _ in range(3):
        gradckpt.checkpoint(lambda t: gradckpt.checkpoint(inner, t * 1, compress=noisy), h)
    assert len(set(seen)) == 3


# ---- leaves ----


@pytest.mark.parametrize("codec", ["int8", "lossless"])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_leaf_is_one_in_both_runs(codec, leaf):
    seen = []
    x = torch.randn(SIZE, requires_grad=True)

    def fn(h):
        seen.append((h.is_leaf, h.requires_grad, bits(h)))
        return h.sin()

    gradckpt.checkpoint(fn, x if leaf else x * 1, compress=config(codec, include="floating")).sum().backward()
    assert seen[0] == seen[1]
    assert seen[0][0] == leaf


# ---- writes of a region to its input ----


def _views(x):
    return x[:, 8:40]


WRITES = {
    "in place": lambda h: h.mul_(2),
    "a slice": lambda h: h[::2].add_(1),
    "through a view": lambda h: h.t()[1:].unsqueeze(1).add_(1),
    "without grad": torch.no_grad()(lambda h: h.mul_(2)),
    "with a parameter": lambda h: h.mul_(W),
    "twice": lambda h: h.mul_(2).add_(1),
    "in a region": lambda h: gradckpt.checkpoint(lambda t: t.mul_(2) * 1, h, compress=config("bf16")),
}
W = torch.nn.Parameter(torch.tensor(1.5))
INPUTS = {
    "result": lambda x: x * 1,
    "view": lambda x: _views(x * 1),
    "no grad": lambda x: x.detach().clone(),
}


@pytest.mark.parametrize("codec", ["raw", "bf16"])
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("write", WRITES)
def test_what_a_region_writes_to_its_input_reaches_the_caller(write, given, codec):
    """Of values that the codec holds exactly, as without checkpointing: the input, its base,
    all gradients."""

    def step(checkpoint):
        x = torch.arange(512.0).view(SIZE).bfloat16().float().requires_grad_()
        W.grad = None
        h = INPUTS[given](x)
        base = h if h._base is None else h._base

        def region(t):
            WRITES[write](t)
            return t.sin() * t

        y = checkpoint(region, h)
        ((y * h).sum() + base.sum() * W).backward()
        return base.detach().clone(), h.requires_grad, x.grad, W.grad

    want = step(lambda f, h: f(h))
    found = step(functools.partial(gradckpt.checkpoint, compress=config(codec, include="floating")))
    # The replacement is a node more on the way to x: gradients may be added up in another order.
    torch.testing.assert_close(found, want, rtol=0 if codec == "raw" else 1e-6, atol=0)


def test_an_input_in_a_container_is_written_to():
    h = torch.ones(SIZE, requires_grad=True) * 1

    def region(tree):
        tree["a"][0].mul_(3)
        return tree["a"][0].sin()

    gradckpt.checkpoint(region, {"a": [h]}, compress=config("int8"))
    assert torch.allclose(h, torch.full(SIZE, 3.0), rtol=0.05)


def test_another_shape_in_place_is_refused():
    h = torch.randn(8, 64, requires_grad=True) * 1
    with pytest.raises(
        RuntimeError, match=r"changed the shape of its input in place, \[8, 64\] to \[64, 8\]; clone the"
    ):
        gradckpt.checkpoint(lambda t: t.t_().sin(), h, compress=config("int8"))


# ---- which runs ----


@pytest.mark.parametrize(
    "outer", [gradckpt.checkpoint, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)]
)
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("regions", [1, 4])
def test_runs_are_as_many_as_with_torch(outer, early_stop, regions):
    def count(inner):
        runs = Counter()

        def f(t):
            runs["inner"] += 1
            return t.sin().exp().sin()

        def body(t):
            runs["outer"] += 1
            for _ in range(regions):
                t = inner(f, t, early_stop=early_stop)
            return t

        x = torch.randn(SIZE, requires_grad=True)
        y = outer(body, x * 1, early_stop=early_stop)
        after = dict(runs)
        y.sum().backward()
        return after, dict(runs)

    theirs = count(functools.partial(torch_checkpoint.checkpoint, use_reentrant=False))
    assert count(functools.partial(gradckpt.checkpoint, compress=config("int8"))) == theirs
    assert theirs[0] == {"inner": regions, "outer": 1}
