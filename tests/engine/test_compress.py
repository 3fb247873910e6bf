"""gradckpt.checkpoint(compress=...): what is kept, what comes back, what it costs in exactness; its
config, proof of activity, and odd trees."""

import dataclasses
import gc
import json
import logging
import weakref
from collections import UserDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import gradckpt
from gradckpt import CompressionConfig

#: sparse leaves dense tensors as they are: test_sparse.py.
CODECS = [c for c in gradckpt.codecs.names() if "float32" in gradckpt.codecs.info(c)["dtypes"] and c != "sparse"]
ALL = {"codec": "int8", "min_numel": 0}
Pair = namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    gradckpt.stats.reset()
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.is_grad_enabled()


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def activation(*shape, dtype=torch.float32):
    return leaf(*shape, dtype=dtype) * 1


def checkpoint(function, *args, compress=None, **kwargs):
    return gradckpt.checkpoint(function, *args, compress=ALL if compress is None else compress, **kwargs)


def kept(**options):
    return gradckpt.stats()["uncompressed"] | options


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# ---- exactness ----

# Measured over the 24 layers below: int8 0.018-0.025, e4m3 0.071-0.089, e5m2 0.14-0.18.
BOUND = {"int8": 0.035, "int8_plain": 0.035, "fp8_e4m3": 0.12, "fp8_e5m2": 0.24}


def smooth_net(run, x, weights):
    for w in weights:
        x = run(lambda h, w=w: h + F.gelu(F.layer_norm(h, h.shape[-1:]) @ w).tanh(), x)
    return (x * x).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS)
def test_exact_mode_loss_is_equal_and_gradients_are_near(codec, dtype):
    x = leaf(32, 64, dtype=dtype)
    weights = [(torch.randn(64, 64) / 8).to(dtype).requires_grad_() for _ in range(24)]
    plain = smooth_net(lambda f, h: f(h), x * 1, weights)
    mine = smooth_net(lambda f, h: checkpoint(f, h, compress={"codec": codec, "min_numel": 1}), x * 1, weights)
    assert torch.equal(plain, mine)
    s = gradckpt.stats()
    assert (s["compressed"], s["encoded"], s["shared"]) == (24, 24, 0)
    want, got = torch.autograd.grad(plain, [x, *weights]), torch.autograd.grad(mine, [x, *weights])
    for a, b in zip(got, want, strict=True):
        exact = gradckpt.codecs.info(codec)["max_error"] == 0
        assert torch.equal(a, b) if exact else 0 < relative(a.float(), b.float()) < BOUND.get(codec, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_replay_recomputes_the_forward(codec, dtype):
    seen = []

    def fn(h, d):
        seen.append([h.detach().clone(), d["h"].detach().clone()])
        return F.dropout(h.sin() * d["h"]).topk(3).values

    x = leaf(40, 33, dtype=dtype)
    y = checkpoint(fn, x * 1, {"h": x * 2, "k": 1}, compress={"codec": codec, "fake_quantize": True})
    y.float().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    h = [gradckpt.codecs.encode(x * k, codec).decode() for k in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(seen[0], h, strict=True))
    torch.manual_seed(0)
    leaf(40, 33, dtype=dtype)
    a, b = h[0].requires_grad_(), h[1].requires_grad_()
    want = fn(a, {"h": b})
    assert torch.equal(want, y)
    want.float().sum().backward()
    assert torch.allclose(x.grad, a.grad + 2 * b.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


# ---- lifetimes ----


def test_original_and_restored_input_die():
    gc.disable()
    try:
        seen = []
        x = activation(64, 64)
        original = weakref.ref(x)
        y = checkpoint(lambda h: seen.append(weakref.ref(h)) or h + h.sin(), x, compress="int8")
        del x
        assert original() is None  # while the region waits for its backward
        assert gradckpt.stats()["live_bytes"] == 64 * 64 * 130 // 128 + 64
        y.sum().backward()
        assert [r() for r in seen] == [None, None]
        del y
        assert gradckpt.stats()["live_bytes"] == 0
        assert gradckpt.stats()["originals_alive"] == 0
    finally:
        gc.enable()


def test_original_that_stays_is_reported():
    x = activation(64, 64)
    checkpoint(torch.sin, x).sum().backward()
    assert gradckpt.stats()["originals_alive_bytes"] == 64 * 64 * 4


def test_deep_chain_is_freed_without_backward():
    y = activation(4)
    for _ in range(2000):
        y = checkpoint(torch.sin, y)
    assert gradckpt.stats()["compressed"] == 2000
    del y
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


def test_a_tensor_with_another_flag_is_not_shared():
    config = {"codec": "raw", "min_numel": 0, "include": "floating"}
    x, w = torch.randn(8, 16), leaf(8, 16)
    checkpoint(torch.mul, x, w, compress=config)
    x.requires_grad_()
    checkpoint(torch.mul, x, w, compress=config).sum().backward()
    assert torch.equal(x.grad, w)


def test_payload_of_the_user_is_not_shared():
    x = activation(32, 32)
    mine = gradckpt.codecs.encode(x)
    weakref.finalize(mine, lambda: ys.append(checkpoint(torch.sin, x)))
    ys = [checkpoint(torch.sin, x)]
    mine.codes.zero_()
    del mine
    assert gradckpt.stats()["encoded"] == 1
    (g,) = torch.autograd.grad(ys[0].sum() + ys[1].sum(), x)
    assert relative(g, 2 * x.detach().cos()) < 0.02


# ---- what is compressed ----


def test_container_without_activations_is_the_same_object():
    seen, mask, config = [], torch.full((8, 8), -3.4e38), {"n": 1, "w": leaf(2000)}

    def fn(h, config, mask):
        seen.append((config, mask.data_ptr()))
        return h.sin() + mask * 0

    checkpoint(fn, activation(8, 8), config, mask, compress={"codec": "int8", "include": "activations", "min_numel": 0})
    y = checkpoint(fn, activation(8, 8), config, mask)
    y.sum().backward()
    assert all(c is config and p == mask.data_ptr() for c, p in seen)
    assert len(seen) == 3
    assert kept() == {"does not require grad": 2, "leaf": 2}


class Sub(torch.Tensor):
    pass


REASONS = {
    "leaf": lambda: leaf(4),
    "does not require grad": lambda: torch.randn(4),
    "float64, which no codec takes": lambda: activation(4, dtype=torch.float64),
    "dtype the codec does not take": lambda: activation(4, dtype=torch.complex64),
    "smaller than min_numel": lambda: activation(4),
    "tensor subclass": lambda: activation(4).as_subclass(Sub),
    "not a plain strided tensor with data": lambda: leaf(4, 4).to_sparse() * 1,
}


@pytest.mark.parametrize("reason", [*REASONS, "meta", "int", "parameter", "negated"])
def test_what_is_kept_and_why(reason):
    other = {
        "meta": lambda: torch.empty(4, device="meta", requires_grad=True) * 1,
        "int": lambda: torch.arange(4),
        "negated": lambda: torch.conj(activation(8, dtype=torch.complex64)).imag,
    }
    x = (REASONS | other | {"parameter": lambda: torch.nn.Parameter(torch.randn(4))})[reason]()
    seen = []
    config = CompressionConfig(min_numel=5, include="floating" if reason == "parameter" else "activations")
    y = checkpoint(lambda t: seen.append(t) or t * 2, x, compress=config)
    plain = "not a plain strided tensor with data"
    names = {"meta": plain, "negated": plain, "int": "does not require grad", "parameter": "leaf"}
    assert kept() == {names.get(reason, reason): 1}
    assert gradckpt.stats()["compressed"] == 0
    assert seen[0] is x
    assert y.shape == x.shape


def test_fake_mode_is_left_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = leaf(64, 64) * 1
        checkpoint(lambda h: h.sin().exp(), x).sum().backward()
    assert gradckpt.stats()["compressed"] == 0
    assert "tracing, fake or functional mode active" in kept()


def test_inference_tensors():
    with torch.inference_mode():
        t = torch.randn(2000)
        assert gradckpt.codecs.encode(t).decode().shape == t.shape
    assert gradckpt.codecs.encode(t).nbytes > 0
    y = checkpoint(
        lambda h, t: h.sin() + t.clone(), activation(2000), t=t, compress={"codec": "int8", "include": "floating"}
    )
    y.sum().backward()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_min_numel(shape):
    n = torch.Size(shape).numel()
    for limit in {n, n + 1, 0}:
        gradckpt.stats.reset()
        checkpoint(torch.sin, activation(*shape), compress=CompressionConfig(min_numel=limit)).sum().backward()
        assert gradckpt.stats()["compressed"] == (n >= limit)


# ---- outer hooks ----


def test_outer_hooks_see_the_payload():
    x, seen = leaf(64, 64), []
    with save_on_cpu(), saved_tensors_hooks(lambda t: seen.append((t.dtype, t.numel())) or t, lambda t: t):
        y = checkpoint(torch.sin, x * 1)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert seen == [(torch.uint8, 64 * 64), (torch.uint8, 64 * 64 // 64 + 64)]  # codes, scales
    assert relative(g, x.detach().cos()) < 0.02


# ---- compress= ----


@pytest.mark.parametrize(
    "form", [True, *CODECS, "fp8", CompressionConfig("raw"), {"codec": "int8"}, {}, UserDict(codec="raw")]
)
def test_forms(form):
    checkpoint(torch.sin, activation(64, 64), compress=form)
    assert gradckpt.stats()["compressed"] == 1
    gradckpt.checkpoint(torch.sin, activation(64, 64), compress=False)
    gradckpt.checkpoint(torch.sin, activation(64, 64))
    assert (gradckpt.stats()["compressed"], gradckpt.stats()["regions_eligible"], gradckpt.stats()["regions"]) == (
        1,
        1,
        3,
    )


@pytest.mark.parametrize("form", ["int9", {"codec": "int9"}, {"codex": "int8"}, {"min_numel": -1}, {"include": "all"}])
def test_unknown_names(form):
    with pytest.raises(
        ValueError, match=r"int8.*fp8_e4m3|did you mean .codec.|cannot be -1|activations, floating|fp8_e4m3"
    ):
        checkpoint(torch.sin, activation(4), compress=form)


@pytest.mark.parametrize(
    "form", [1, 2.0, ["int8"], ("int8",), (), b"int8", {"codec": 3}, {"fake_quantize": 1}, {"min_numel": 1.0}]
)
def test_wrong_types(form):
    with pytest.raises(TypeError, match="gradckpt: "):
        checkpoint(torch.sin, activation(4), compress=form)


def test_a_mapping_is_read_every_time():
    for mapping in (dict(ALL), UserDict(ALL)):
        gradckpt.stats.reset()
        checkpoint(torch.sin, activation(64), compress=mapping)
        mapping["min_numel"] = 10**6
        checkpoint(torch.sin, activation(64), compress=mapping)
        assert gradckpt.stats()["compressed"] == 1


@pytest.mark.parametrize("reentrant", [True, None])
def test_not_with_reentrant(reentrant):
    with pytest.raises(ValueError, match="use_reentrant=False"):
        checkpoint(torch.sin, leaf(4), use_reentrant=reentrant)


def test_config_travels_as_json():
    config = CompressionConfig("fp8", fake_quantize=True, min_numel=7, include="floating")
    assert CompressionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.codec == "fp8_e4m3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.codec = "raw"


# ---- proof of activity ----


def test_says_once_what_it_does(caplog):
    with caplog.at_level(logging.INFO, "gradckpt"):
        for _ in range(3):
            checkpoint(torch.sin, activation(128, 128)).sum().backward()
    (record,) = caplog.records
    assert record.getMessage() == "gradckpt: checkpoints at the peak: 64.0 -> 21.2 KiB, 1 of 1 layers"


# ---- disorder ----
