"""Outputs that a policy keeps compressed, and policies that are refused."""

import pytest
import torch
from selective_ways import DOUBLE, PAIR, SQUARE, aten, calls, chain, gradients, kept, leaf, pair, same, square
from selective_ways import _nothing_left_behind as _nothing_left_behind
from torch.utils.checkpoint import CheckpointPolicy

import gradckpt

pytestmark = pytest.mark.usefixtures("_nothing_left_behind")
checkpoint, contexts = gradckpt.checkpoint, gradckpt.compat.create_selective_checkpoint_contexts
save = gradckpt.policies.save


# ---- what is kept, compressed ----


def stored(policy, region, *inputs):
    """{operator: what is kept of its calls} and the gradients."""
    pair_of = contexts(policy)
    out = checkpoint(region, *inputs, context_fn=lambda: pair_of)
    storage = {op: list(found.values()) for op, found in pair_of[0].storage.items()}
    return storage, torch.autograd.grad(out.sum(), inputs)


ANSWERS = [
    ("int8", "int8"),
    (save("int8"), "int8"),
    (gradckpt.CompressionConfig(codec="fp8"), "fp8_e4m3"),
    (save({"codec": "int8", "stochastic": True, "seed": 3}), "int8"),
    (save(), None),
    (CheckpointPolicy.MUST_SAVE, None),
    (True, None),
]


@pytest.mark.parametrize("as_function", [False, True], ids=["mapping", "function"])
@pytest.mark.parametrize(("answer", "codec"), ANSWERS, ids=lambda a: str(a)[:40])
def test_how_a_policy_says_that_an_output_is_kept_compressed(answer, codec, as_function):
    policy = (lambda ctx, op, *args, **kwargs: answer if op is SQUARE else False) if as_function else {SQUARE: answer}
    x = leaf(64, 64)

    def region(t):
        return square(t.sin()).exp()

    gradckpt.stats.reset()
    storage, got = stored(policy, region, x)
    (want,) = torch.autograd.grad(region(x).sum(), x)
    assert calls["square"] == 2  # one of them for `want`
    assert gradckpt.stats()["compressed"] == (codec is not None)
    kept_value = storage[SQUARE][0].val
    if codec is None:
        assert torch.equal(got[0], want)
    else:
        assert kept_value.codec == codec
        assert kept_value.nbytes < 64 * 64 * 1.2
        assert not torch.equal(got[0], want)
        assert torch.cosine_similarity(got[0].flatten(), want.flatten(), 0) > 0.999


@pytest.mark.parametrize("answer", [False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_mapping_may_say_recompute(answer):
    stored({SQUARE: answer, DOUBLE: True}, chain, leaf(8))
    assert calls == {"square": 4, "double": 2}


def test_small_outputs_and_integers_stay_as_they_are():
    gradckpt.stats.reset()
    policy = {aten.sin.default: "int8", aten.argmax.default: save({"codec": "int8", "min_numel": 1})}
    x = leaf(8, 8)
    storage, got = stored(policy, lambda t: t.sin().exp()[t.argmax(1)], x)
    assert torch.equal(got[0], torch.autograd.grad(x.sin().exp()[x.argmax(1)].sum(), x)[0])
    assert all(isinstance(each[0].val, torch.Tensor) for each in storage.values())
    assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": 1, "dtype the codec does not take": 1}


def test_values_that_the_codec_refuses_stay_as_they_are():
    gradckpt.stats.reset()
    x = leaf(64, 64)
    storage, got = stored({SQUARE: "fp16"}, lambda t: square(t * 1e4).sin(), x)
    assert isinstance(storage[SQUARE][0].val, torch.Tensor)
    assert torch.equal(got[0], torch.autograd.grad(square(x * 1e4).sin().sum(), x)[0])
    assert gradckpt.stats()["uncompressed"] == {"values the codec cannot hold": 1}


def test_of_several_outputs_only_the_first_is_compressed():
    x = leaf(64, 64)
    storage, _ = stored({PAIR: "int8"}, lambda t: sum(pair(t)), x)
    first, second = storage[PAIR][0]
    assert first.val.codec == "int8"
    assert torch.equal(second.val, x.cos())


def test_the_version_of_a_compressed_output_does_not_matter():
    x = leaf(64, 64)
    _, got = stored({SQUARE: "raw"}, lambda t: square(t).add_(1).exp(), x)
    assert torch.equal(got[0], torch.autograd.grad((square(x) + 1).exp().sum(), x)[0])


# ---- bad input ----


BAD = [
    (lambda: contexts([aten.mm]), ValueError, "change it to `torch.ops.aten.mm.default`"),
    (lambda: contexts([torch.mm]), ValueError, "to be an OpOverload but got"),
    (lambda: contexts([["mm"]]), ValueError, "to be an OpOverload but got"),
    (lambda: contexts([aten.add_.Tensor]), ValueError, r"aten.add_.Tensor writes to its arguments"),
    (lambda: contexts({aten.mm.out: True}), ValueError, "aten.mm.out writes to its arguments"),
    (lambda: contexts({aten.mm.default: 3}), TypeError, r"returned 3 for aten\.mm\.default"),
    (lambda: contexts({aten.mm.default: "int9"}), ValueError, "unknown codec 'int9'"),
    (lambda: contexts(3), TypeError, r"a policy is a function or a list of ops .*; not int"),
    (lambda: contexts(aten.mm.default), TypeError, "or one of gradckpt.policies; not OpOverload"),
    (lambda: save({"codec": "int8", "fake_quantize": True}), ValueError, "apply to the inputs of a region"),
    (lambda: save({"codec": "int8", "include": "floating"}), ValueError, "apply to the inputs of a region"),
]


@pytest.mark.parametrize(("make", "error", "text"), BAD)
def test_bad_policies_are_refused_in_words(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("answer", [None, 1, "int9", 2.5, object()])
def test_a_policy_that_answers_nonsense(answer):
    def policy(ctx, op, *args, **kwargs):
        return answer

    said = "aten.sin.default" if answer != "int9" else "int9"
    with pytest.raises((TypeError, ValueError), match=said):
        checkpoint(torch.sin, leaf(4), **kept(policy))
    with pytest.raises((TypeError, ValueError), match=said):
        gradckpt.SelectiveRecompute.apply(torch.sin, policy, leaf(4))


def test_what_writes_into_its_arguments_runs_again_whatever_a_policy_says():
    x = leaf(8)

    def region(t):
        return (t.sin().mul_(2)).exp()

    everything = kept(lambda ctx, op, *args, **kwargs: op is aten.mul_.Tensor)
    assert same(gradients(lambda t: checkpoint(region, t, **everything), (x,))[1], gradients(region, (x,))[1])


def test_what_is_written_into_the_storage_counts_for_nothing():
    pair_of, x = contexts([aten.mm.default]), leaf(4, 4)
    y = checkpoint(lambda t: t.mm(t).sin(), x, context_fn=lambda: pair_of)
    pair_of[0].storage[aten.mm.default][0] = torch.ones(4, 4)
    (want,) = torch.autograd.grad(x.mm(x).sin().sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
