"""Compiled graphs and codecs that may refuse: no graph branches on what a codec says,
so values stay right without."""

import warnings

import pytest
import torch
from compile_cases import Graphs, fresh_dynamo, needs_outputs  # noqa: F401 (a fixture of every test here)

import gradckpt
from gradckpt import CompressionConfig, GradckptInactiveWarning
from gradckpt._compile import graph
from gradckpt._engine.selective import contexts_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PAIRS = [(c, d) for c in gradckpt.codecs.names() for d in DTYPES if d in gradckpt.codecs.info(c)["dtypes"]]
REFUSING = [(c, d) for c, d in PAIRS if gradckpt.codecs.info(c)["may_overflow"]]
EXACT = ("raw", "lossless")


@pytest.fixture(autouse=True)
def _say_again():
    graph.may_overflow.cache_clear()


def values(dtype, fits):
    """What every codec holds, and what each of those that may refuse does not: many magnitudes,
    the dtype's largest."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator)
    if not fits:
        exponents = torch.linspace(-14, 15, 64 * 128) if dtype == "float16" else torch.linspace(-120, 126, 64 * 128)
        x = x.sign() * 2.0 ** exponents[torch.randperm(64 * 128, generator=generator)].view(64, 128)
        x[3, 7] = torch.finfo(DTYPES[dtype]).max
    return x.to(DTYPES[dtype])


def body(h, w):
    return torch.tanh(h) * w


def gradients(function, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    function(x, w).float().sum().backward()
    return x.grad, w.grad


def run(codec, dtype, fake_quantize):
    """Values that fit and values that do not, through one graph; what it warned of."""
    graphs, w = Graphs(), torch.randn(128, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
    config = CompressionConfig(codec, min_numel=0, fake_quantize=fake_quantize)
    compiled = graphs.compile(lambda x, w: gradckpt.checkpoint(body, x * 1, w, compress=config))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GradckptInactiveWarning)
        for fits in (True, False, True):
            x = values(dtype, fits)
            got, want = gradients(compiled, x, w), gradients(lambda x, w: body(x * 1, w), x, w)
            for a, b in zip(got, want, strict=True):
                assert a.isfinite().all()
                if codec in EXACT or gradckpt.codecs.info(codec)["may_overflow"]:
                    assert torch.equal(a, b)
                elif fits:
                    assert (a - b).float().norm() <= 0.5 * b.float().norm()
    messages = [str(w.message) for w in said if "may overflow" in str(w.message)]
    return graphs, messages


@pytest.mark.parametrize("fake_quantize", [False, True])
@pytest.mark.parametrize(("codec", "dtype"), REFUSING)
def test_values_stay_right(codec, dtype, fake_quantize):
    graphs, messages = run(codec, dtype, fake_quantize)
    assert graphs.calls("encode") == []
    assert messages == [
        f"gradckpt: torch.compile: codec {codec!r} may overflow, which compiled graphs cannot detect, so its tensors "
        "stay uncompressed; use 'int8'"
    ]


@pytest.mark.parametrize(("codec", "dtype"), [("raw", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16")])
def test_others_are_packed(codec, dtype):
    graphs, messages = run(codec, dtype, False)
    assert len(graphs.calls("encode")) == len(graphs.calls("decode")) == 1
    assert messages == []


@pytest.mark.soak
@pytest.mark.parametrize("fake_quantize", [False, True])
@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_every_codec_and_dtype(codec, dtype, fake_quantize):
    run(codec, dtype, fake_quantize)


@needs_outputs
def test_what_a_policy_keeps():
    """A policy's codec, too."""
    graphs, w = Graphs(), torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    x = values("float32", False).clamp(-1e30, 1e30)
    keeping = contexts_of("save_matmuls:lossless")
    compiled = graphs.compile(
        lambda x, w: gradckpt.checkpoint(lambda h, w: (h @ w).tanh(), x * 1, w, context_fn=keeping)
    )
    with pytest.warns(GradckptInactiveWarning, match="'lossless' may overflow"):
        got = gradients(compiled, x, w)
    for a, b in zip(got, gradients(lambda x, w: (x * 1 @ w).tanh(), x, w), strict=True):
        assert torch.equal(a, b)
    assert graphs.calls("encode") == []
