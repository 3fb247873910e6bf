"""``policy=`` of gradckpt.checkpoint, and how the keywords of that function meet each other."""

import functools
import inspect
import itertools
import re

import pytest
import torch
from checkout import ROOT
from compile_cases import needs_outputs
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt import policies

aten = torch.ops.aten
contexts = gradckpt.compat.create_selective_checkpoint_contexts


def products(ctx, op, *args, **kwargs):
    return op is aten.addmm.default


#: How many products of two are kept.
POLICIES = {
    "name": ("save_matmuls", 2),
    "compressed": ("save_matmuls:int8", 2),
    "combined": ("save_attention|every_other_matmul", 1),
    "policy": (policies.save_matmuls, 2),
    "list": ([aten.addmm.default], 2),
    "mapping": ({aten.addmm.default: "int8"}, 2),
    "function": (products, 2),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def run(call, ran=None):
    """Loss and gradients; the input is no leaf. ``ran`` gets an entry for each run of the block."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(32, 64, requires_grad=True)
    if ran is not None:
        block.register_forward_pre_hook(lambda *_: ran.append(1))
    gradckpt.stats.reset()
    loss = call(block, x * 1).square().sum()
    loss.backward()
    return loss.detach(), [x.grad, *(parameter.grad for parameter in block.parameters())]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


def plain(block, x):
    return block(x)


@pytest.mark.parametrize("form", POLICIES)
def test_keeps_what_context_fn_would(form):
    policy, kept = POLICIES[form]
    found = run(functools.partial(gradckpt.checkpoint, policy=policy))
    assert gradckpt.stats()["policy_outputs"] == kept
    keep = functools.partial(contexts, policy)
    assert same(found, run(functools.partial(gradckpt.checkpoint, context_fn=keep)))
    assert same(found, run(plain)) == (form not in ("compressed", "mapping"))


def test_none_is_no_policy():
    assert same(run(functools.partial(gradckpt.checkpoint, policy=None)), run(plain))
    assert gradckpt.stats()["policy_outputs"] == 0
    run(functools.partial(gradckpt.checkpoint, policy=None, debug=True))
    run(functools.partial(gradckpt.checkpoint, policy=None, use_reentrant=True))


def test_the_decorator_and_the_sequence_take_it():
    run(gradckpt.checkpoint(policy="save_matmuls")(plain))
    assert gradckpt.stats()["policy_outputs"] == 2
    run(lambda block, x: gradckpt.checkpoint_sequential([block, block], 2, x, policy="save_matmuls"))
    assert gradckpt.stats()["policy_outputs"] == 2, "the last segment is no region"


@pytest.mark.parametrize("form", ["combined", "list", pytest.param("mapping", marks=needs_outputs)])
def test_compiled(form):
    """Names and functions: test_compile_limits.py."""
    policy, _ = POLICIES[form]
    call = functools.partial(gradckpt.checkpoint, policy=policy)
    compiled = torch.compile(lambda block, x: call(block, x), backend="aot_eager", fullgraph=True)
    found, eager = run(compiled), run(call)
    assert torch.equal(found[0], eager[0])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found[1], eager[1], strict=True))


def test_a_region_of_torchs_has_its_own_keywords_of_these_names():
    """Under patched(), eager and compiled."""

    def region(x, policy, buffers, compress):
        return x.sin() * policy * compress + buffers

    def step(x):
        return torch_checkpoint(region, x, policy=4.0, buffers=1.0, compress=0.5, use_reentrant=False)

    x = torch.randn(32, 64, requires_grad=True)
    with gradckpt.patched("int8"):
        for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            assert torch.allclose(call(x * 1), x.sin() * 2 + 1)


# ---- pairs ----

VALUES = {
    "compress": "int8",
    "policy": "save_matmuls",
    "offload": gradckpt.Offload("disk", min_bytes="1KiB", host_budget="1MiB"),
    "use_reentrant": True,
    "preserve_rng_state": False,
    "context_fn": functools.partial(contexts, "save_matmuls"),
    "determinism_check": "none",
    "debug": True,
    "early_stop": False,
    "respect_saved_tensors_hooks": True,
    "buffers": "torch",
}


def refused():
    """Pairs of keywords that the table in docs/apply.md calls an error."""
    section = (
        (ROOT / "docs" / "apply.md").read_text().split("### Keywords of `checkpoint` together")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` and `(\w+)(?:=True)?` \| `ValueError`", section, re.M)
    return set(map(frozenset, rows))


def test_the_values_are_of_all_keywords():
    parameters = inspect.signature(gradckpt.checkpoint).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    assert VALUES.keys() == named - {"function"}
    assert all(pair <= VALUES.keys() for pair in refused())


@pytest.mark.parametrize("pair", list(itertools.combinations(VALUES, 2)), ids="-".join)
def test_every_pair_of_keywords(pair):
    """Works, or is refused in one sentence: where the docs say so, and nowhere else."""
    call = functools.partial(gradckpt.checkpoint, **{key: VALUES[key] for key in pair})
    if frozenset(pair) in refused():
        sentence = (
            r"exclude each other|needs use_reentrant=False|is only supported when|is incompatible with|Unexpected"
        )
        with pytest.raises(ValueError, match=sentence) as said:
            run(call)
        assert "\n" not in str(said.value)
        return
    exact, ran = run(plain), []
    loss, gradients = run(call, ran)
    assert torch.equal(loss, exact[0])
    assert len(ran) == 2
    for a, b in zip(gradients, exact[1], strict=True):
        assert "compress" in pair or torch.equal(a, b)
        assert (a - b).norm() < 0.02 * b.norm()
    stats = gradckpt.stats()
    assert stats["compressed"] == bool({"compress", "offload"} & {*pair})  # raw is a codec
    assert stats["policy_outputs"] == 2 * bool({"policy", "context_fn"} & {*pair})
