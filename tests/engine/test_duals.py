"""Forward-mode duals: a payload would lose the tangent, so such tensors stay uncompressed
in every way to encode them."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.utils.checkpoint as torch_checkpoint
from behaviours import saves_inputs_alone

import gradckpt
from gradckpt import CompressionConfig, policies

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


def region(x, scale):
    return (x @ W).sin() * x * scale


def plain(f, *args):
    return f(*args)


def saved(config, f, *args):
    with gradckpt.compress_saved(config):
        return f(*args)


def nested(checkpoint, f, *args):
    return checkpoint(functools.partial(checkpoint, f), *args)


def kept_by_policy(config, f, *args):
    policy = policies.save_matmuls.compressed(config)
    context_fn = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, policy)
    return gradckpt.checkpoint(f, *args, context_fn=context_fn, compress=config)


def ways():
    yield "torch", functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
    yield "None", functools.partial(gradckpt.checkpoint, compress=None)
    for codec in ("raw", "lossless", "int8"):
        for fake_quantize in (False, True):
            config = CompressionConfig(codec, min_numel=0, include="floating", fake_quantize=fake_quantize)
            checkpoint = functools.partial(gradckpt.checkpoint, compress=config)
            yield f"{codec} {fake_quantize}", checkpoint
            yield f"nested {codec} {fake_quantize}", functools.partial(nested, checkpoint)
        config = CompressionConfig(codec, min_numel=0)
        if not config.lossy:  # hooks and kernels get the primal; autograd keeps the tangent itself
            yield f"policy {codec}", functools.partial(kept_by_policy, config)
            yield f"saved {codec}", functools.partial(saved, config)


WAYS = dict(ways())
KINDS = {"a leaf": lambda x: x, "a result": lambda x: x * 1, "a slice": lambda x: x[:, ::2].repeat(1, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [pytest.param(w, marks=saves_inputs_alone) if w == "torch" else w for w in WAYS])
def test_forward_over_reverse_and_forward_mode_alone(way, kind):
    """Primal and tangent of the result and of every gradient,
    to the last bit those without a checkpoint."""

    def step(checkpoint):
        generator = torch.Generator().manual_seed(0)
        x, t, scale, ts = (torch.randn(8, 16, generator=generator) for _ in range(4))
        x.requires_grad_()
        with fw.dual_level():
            y = checkpoint(region, KINDS[kind](fw.make_dual(x, t)), fw.make_dual(scale, ts))
            grads = torch.autograd.grad(y.sum(), [x, W])
            return [part for z in (y, *grads) for part in fw.unpack_dual(z)]

    want = step(plain)
    assert all(part is not None for part in want)
    torch.testing.assert_close(step(WAYS[way]), want, rtol=0, atol=0)


@pytest.mark.parametrize("way", [w for w in WAYS if "policy" not in w])
def test_what_is_no_dual_is_compressed_inside_a_level(way):
    with fw.dual_level():
        x = torch.randn(8, 16, requires_grad=True) * 1
        WAYS[way](region, x, torch.ones(8, 16)).sum().backward()
    stats = gradckpt.stats()
    assert (stats["encoded"] > 0) == (way not in ("torch", "None"))
    assert "carries a forward-mode tangent" not in stats["uncompressed"]


def test_it_is_counted():
    with fw.dual_level():
        x = torch.randn(8, 16, requires_grad=True)
        h = fw.make_dual(x, torch.ones(8, 16)) * 1
        gradckpt.checkpoint(torch.sin, h, compress=CompressionConfig("int8", min_numel=0)).sum().backward()
    assert gradckpt.stats()["uncompressed"] == {"carries a forward-mode tangent": 1}


@pytest.fixture(autouse=True)
def _fresh_counters():
    gradckpt.stats.reset()


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Nothing is compressed where everything is a dual,
    and a warning says so at the second backward."""
    return
