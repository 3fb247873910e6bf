"""The compress= argument, its config, proof of activity, and disorder: odd trees, interrupts."""

import dataclasses
import json
import logging
import warnings
from collections import UserDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compress import ALL, CODECS, Pair, _fresh, activation, checkpoint, leaf  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map

import gradckpt
from gradckpt import CompressionConfig, GradckptInactiveWarning

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


@pytest.mark.filterwarnings("always::gradckpt.GradckptInactiveWarning")
def test_warns_when_nothing_was_compressed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, leaf(2000).double(), compress="int8").sum().backward()
    with pytest.warns(GradckptInactiveWarning, match="float64, which no codec takes"):
        checkpoint(torch.sin, leaf(2000).double(), compress="int8").sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, leaf(2000).double(), compress="int8").sum().backward()


# ---- disorder ----

tensors = st.builds(lambda n, kind: (n, kind), st.integers(0, 300), st.sampled_from(["act", "leaf", "none", "f64"]))
trees = st.recursive(
    tensors | st.none() | st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.tuples(inner, inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")
@settings(max_examples=60, deadline=None)
@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("pqr"), trees, max_size=2), st.booleans())
def test_any_tree_of_arguments(args, kwargs, fake_quantize):
    leaves = []

    def is_leaf(t):
        return isinstance(t, tuple) and len(t) == 2 and not isinstance(t, Pair) and isinstance(t[1], str)

    def make(t):
        if not is_leaf(t):
            return t
        x = torch.randn(t[0], dtype=torch.float64 if t[1] == "f64" else torch.float32, requires_grad=t[1] != "none")
        leaves.append(x)
        return x * 1 if t[1] in ("act", "f64") else x

    args, kwargs = tree_map(make, (args, kwargs), is_leaf=is_leaf)

    def fn(*a, **k):
        return sum(
            (t.sin().sum().double() for t in tree_leaves((a, k)) if isinstance(t, torch.Tensor)), torch.zeros(())
        )

    y, plain = (
        checkpoint(fn, *args, **kwargs, compress={"codec": "raw", "fake_quantize": fake_quantize, "min_numel": 2}),
        fn(*args, **kwargs),
    )
    assert torch.equal(y, plain)
    if y.requires_grad:
        wanted = [x for x in leaves if x.requires_grad]
        for a, b in zip(
            torch.autograd.grad(y, wanted, retain_graph=True), torch.autograd.grad(plain, wanted), strict=True
        ):
            assert torch.equal(a, b)
