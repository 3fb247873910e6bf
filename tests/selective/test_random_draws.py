"""Every draw of a recompute equals the forward's, whatever is replayed before it;
generators end where they should."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt
from gradckpt._engine.selective import contexts_of

# ---- Random programs of operators that draw random numbers, and what each run of a region drew.

aten = torch.ops.aten
ROWS, WIDTH = 24, 64


def noted(draw, use=torch.mul):
    """A step: what is drawn, and what becomes of h and that."""

    def step(h, w, log):
        log.append(draw(h))
        return use(h, log[-1])

    return step


def own_generator(h, w, log):
    generator = torch.Generator().manual_seed(7)
    mask = torch.bernoulli(h.sigmoid(), generator=generator)
    after = torch.rand(h.shape, generator=generator)
    log.extend((mask, after, generator.get_state()))
    return h * mask * after


def attend(h, dropout_p):
    q = h.view(1, 4, ROWS // 4, WIDTH)
    return h + F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=dropout_p).reshape(h.shape)


#: Those whose results depend on values: a recompute on restored values gets them from the forward.
DISCRETE = {
    "bernoulli": noted(lambda h: torch.bernoulli(h.sigmoid()), lambda h, mask: h * mask + h.sin()),
    "bernoulli_in_place": noted(
        lambda h: torch.empty_like(h).bernoulli_(h.detach().sigmoid()), lambda h, mask: h * mask + h.cos()
    ),
    "multinomial": noted(
        lambda h: h.softmax(-1).multinomial(3), lambda h, index: h + h.gather(-1, index).sum(-1, keepdim=True)
    ),
    "multinomial_with_replacement": noted(
        lambda h: h.softmax(-1).multinomial(70, replacement=True),
        lambda h, index: h + h.gather(-1, index).mean(-1, keepdim=True),
    ),
    "poisson": noted(lambda h: torch.poisson(h.tanh().exp()), lambda h, counts: h * counts / (counts + 1)),
    "binomial": noted(
        lambda h: torch.binomial(torch.full_like(h, 50.0), h.detach().sigmoid()), lambda h, counts: h * (counts / 50)
    ),
    "gamma": noted(lambda h: torch._standard_gamma(h.sigmoid() + 0.3), torch.add),
    "dirichlet": noted(lambda h: torch._sample_dirichlet(h.detach().sigmoid() + 0.3), torch.add),
    "rrelu": lambda h, w, log: F.rrelu(h, training=True),
    "own_generator": own_generator,
}
#: Those that draw the same numbers whatever the values.
DRAWING = {
    "dropout": noted(lambda h: F.dropout(torch.ones_like(h), 0.4), lambda h, mask: F.dropout(h, 0.3) * mask),
    "rand_like": noted(torch.rand_like),
    "normal": noted(
        lambda h: torch.normal(torch.zeros_like(h), 1.0),
        lambda h, noise: torch.normal(h.detach(), 0.1) * h + noise * h,
    ),
    "exponential": noted(lambda h: torch.empty_like(h).exponential_(), lambda h, noise: h * noise.tanh()),
    "gumbel": lambda h, w, log: h + F.gumbel_softmax(h, hard=True),
    "attention_with_dropout": lambda h, w, log: attend(h, 0.3),
}
#: Those that draw nothing.
OTHERS = {
    "linear": lambda h, w, log: (h @ w).tanh() + h,
    "attention": lambda h, w, log: attend(h, 0.0),
    "compare": lambda h, w, log: h * (h > 0.1),
}
STEPS = {**DISCRETE, **DRAWING, **OTHERS}
CODECS = ("int8", "int4", "fp8", "int6")
POLICIES = (
    *(None, None, "save_matmuls", "save_attention", "every_other_matmul", "discrete"),
    *("save_matmuls:int4", "save_attention|save_matmuls:int8"),
    "random operators",
    "function",
)
SAVED = [aten.bernoulli.default, aten.rand_like.default, aten.native_dropout.default, aten.multinomial.default]


def _function(ctx, op, *args, **kwargs):
    return op in SAVED or (gradckpt.policies.save("int8") if op is aten.mm.default else False)


def contexts_for(policy):
    what = {"random operators": SAVED, "function": _function}.get(policy, policy)
    return contexts_of(what)


def program(seed):
    """(steps, codec or None, policy, who runs the region, nested)."""
    choose = random.Random(seed)
    names = [*DISCRETE, *DRAWING, *DISCRETE, *DRAWING, *OTHERS]
    steps = [choose.choice(names) for _ in range(choose.randint(2, 6))]
    codec, policy = choose.choice(CODECS), choose.choice(POLICIES)
    way = choose.choice(("ours", "ours", "ours", "one node", "torch's", "reentrant inside"))
    if way == "torch's" and policy is not None:
        codec = None
    return steps, codec, policy, way


def follows_a_kept_draw(drawn):
    """A draw comes after one that the recompute does not make again."""
    steps = drawn[0]
    first = next((i for i, name in enumerate(steps) if name in DISCRETE and name != "own_generator"), len(steps))
    return any(name in DISCRETE or name in DRAWING for name in steps[first + 1 :])


def run(drawn, seed, compress=True):
    """What each run of the region drew, with the state of the generator after every step;
    the state at the end."""
    steps, codec, policy, way = drawn if compress else (drawn[0], None, None, drawn[3])
    torch.manual_seed(seed)
    w = torch.randn(WIDTH, WIDTH) * WIDTH**-0.5
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    runs = []

    def region(h):
        log = []
        runs.append(log)
        for name in steps:
            h = STEPS[name](h, w, log)
            log.append(torch.get_rng_state())
        return h.sin()

    def call(h):
        options = {} if policy is None else {"context_fn": contexts_for(policy)}
        if way == "one node":
            named = {"random operators": SAVED, "function": _function}.get(policy, policy)
            return gradckpt.SelectiveRecompute.apply(region, named, h, compress=codec)
        if way == "torch's" and policy is not None:
            return torchs_checkpoint(region, h, use_reentrant=False, early_stop=False, **options)
        if way == "reentrant inside":
            inner = functools.partial(gradckpt.checkpoint, region, use_reentrant=True)
            return gradckpt.checkpoint(lambda t: inner(t.sin()), h, compress=codec, early_stop=False)
        return gradckpt.checkpoint(region, h, compress=codec, early_stop=False, **options)

    call(x * 1).square().sum().backward()
    return runs, torch.get_rng_state(), x.grad


QUIET = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(seed):
    drawn = program(seed)
    runs, state, grad = run(drawn, seed)
    assert len(runs) > 1, drawn
    assert all(equal(runs[0], again) for again in runs[1:]), (seed, drawn)
    assert torch.equal(state, run(drawn, seed, compress=False)[1]), (seed, drawn)
    assert grad.isfinite().all(), (seed, drawn)
    return follows_a_kept_draw(drawn)


@QUIET
@pytest.mark.filterwarnings("ignore:.*runs again. a backward could mix")
@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 21))])
def test_random_programs_draw_the_same_twice(chunk):
    assert sum(check(seed) for seed in range(250 * chunk, 250 * chunk + 250)) > 80


def test_a_generator_that_is_not_restored_is_left_alone():
    """preserve_rng_state=False: the recompute draws other numbers, as in torch;
    what follows does not repeat."""
    h = torch.randn(64, 64, requires_grad=True)

    def region(t):
        return t * torch.bernoulli(t.sigmoid())

    torch.manual_seed(0)
    gradckpt.checkpoint(region, h * 1, compress="int8", preserve_rng_state=False).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    region(h)
    assert torch.equal(after, torch.get_rng_state())

    own = torch.Generator().manual_seed(3)

    def with_own(t):
        return t * torch.bernoulli(t.sigmoid(), generator=own)

    out = gradckpt.checkpoint(with_own, h * 1, compress="int8")
    torch.rand(5, generator=own)
    before = own.get_state()
    out.sum().backward()
    assert torch.equal(before, own.get_state())


@pytest.mark.parametrize("checkpoint", [torchs_checkpoint, gradckpt.checkpoint], ids=["torch's", "ours"])
@pytest.mark.parametrize("function", [False, True], ids=["list", "function"])
def test_a_policy_that_keeps_a_random_operator(checkpoint, function):
    """torch's contexts keep the operator and not its generator:
    what the region draws next differs. Ours keep both."""
    masks = []

    def region(t):
        noise = torch.rand_like(t)
        masks.append(torch.nn.functional.dropout(torch.ones_like(t), 0.5))
        return t * noise * masks[-1]

    op = torch.ops.aten.rand_like.default
    policy = (lambda ctx, each, *args, **kwargs: each is op) if function else [op]
    contexts = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)
    h = torch.randn(64, 64, requires_grad=True)
    checkpoint(region, h * 1, use_reentrant=False, context_fn=contexts, early_stop=False).sum().backward()
    assert equal(*([mask] for mask in masks))


def test_states_are_counted():
    h = torch.randn(64, 64, requires_grad=True)
    gradckpt.stats.reset()
    out = gradckpt.checkpoint(lambda t: t * t.softmax(-1).multinomial(1), h * 1, compress="int8")
    stats = gradckpt.stats()
    assert stats["discrete_outputs"] == 1
    assert stats["discrete_bytes"] == 64 + 2 * torch.get_rng_state().nbytes
    out.sum().backward()


@torch.library.custom_op("gradckpt_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Nothing tells that it draws."""
    return torch.rand_like(x)


def cond_noise(x):
    return torch.cond(torch.tensor(True), torch.rand_like, torch.zeros_like, (x,))


def called_noise(x):
    return gradckpt.policies.region(torch.rand_like, "noise", recompute=False)(x)


UNTAGGED = {
    "an operator of the user's": (noise, torch.ops.gradckpt_tests.noise.default),
    "cond": (cond_noise, torch.ops.higher_order.cond),
    "a kept call": (called_noise, torch.ops.aten.mm.default),
}


@pytest.mark.parametrize("form", ["list", "function"])
@pytest.mark.parametrize("compress", [None, "lossless"])
@pytest.mark.parametrize("name", UNTAGGED)
def test_what_is_kept_of_an_operator_without_a_tag(name, compress, form):
    draw, op = UNTAGGED[name]
    policy = [op] if form == "list" else lambda ctx, called, *args, **kwargs: called is op
    x = torch.ones(64, 64, requires_grad=True)
    out = gradckpt.checkpoint(
        lambda x: torch.nn.functional.dropout(x * draw(x.detach())), x * 1, policy=policy, compress=compress
    )
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(out, x.grad), "the mask of the recompute is the forward's"
    assert torch.equal(torch.get_rng_state(), after)
