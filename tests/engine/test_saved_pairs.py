"""The pair of compress_saved(...).hooks, and codecs for single operators."""

import contextlib
import threading

import pytest
import torch
from saved_models import fresh, gradients, llama, resnet  # noqa: F401 (fresh is a fixture of every test here)
from torch.autograd.graph import saved_tensors_hooks

import gradckpt
from gradckpt import CompressionConfig, compress_saved

SMALL = {"codec": "int8", "min_numel": 16}


def pair_block(config):
    return saved_tensors_hooks(*compress_saved(config).hooks)


def counts(*names):
    stats = gradckpt.stats()
    return {name: stats[name] for name in names}


# ---- the pair ----


@pytest.mark.parametrize("make", [llama, resnet])
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_a_pair_keeps_what_the_block_keeps(make, codec):
    model, loss_of = make()
    config = {"codec": codec, "min_numel": 16}
    _, expected = gradients(model, loss_of, compress_saved(config))
    of_block = counts("encoded", "shared", "bytes_out")
    gradckpt.stats.reset()
    _, got = gradients(model, loss_of, pair_block(config))
    assert counts("encoded", "shared", "bytes_out") == of_block
    # The end of the block settles the tensor that waits, and keeps what shares its storage exactly.
    near = 1e-2 if codec == "int8" else 0
    assert all((got[name] - expected[name]).norm() <= near * expected[name].norm() for name in expected)


def test_a_pair_keeps_weights_exactly():
    linear = torch.nn.Linear(128, 128, bias=False)
    x = torch.randn(64, 128, requires_grad=True)
    with pair_block(SMALL):
        linear(x * 1).square().sum().backward()
    exact = torch.autograd.grad((x @ linear.weight.t()).square().sum(), x)[0]
    assert torch.allclose(x.grad, exact, rtol=0.05, atol=0.05 * exact.abs().max())
    with pair_block({"codec": "int4", "min_numel": 0}):
        y = (x * 1) @ linear.weight.t()
        z = y.square().sum()
    assert torch.equal(y.grad_fn._saved_mat2, linear.weight.t())
    z.backward()


def test_a_pair_serves_many_blocks_and_outlives_them():
    pair = compress_saved(SMALL).hooks
    x = torch.randn(64, 64, requires_grad=True)

    def graph():
        with saved_tensors_hooks(*pair):
            return torch.nn.functional.silu((x * 1) @ (x * 2)).mul(x * 3).sum()

    losses = [graph() for _ in range(3)]
    gradients = [torch.autograd.grad(loss, x)[0] for loss in reversed(losses)]
    assert all(torch.equal(gradients[0], other) for other in gradients)
    assert gradckpt.stats()["compressed"] >= 4


def test_threads_share_a_pair():
    pair = compress_saved(SMALL).hooks
    results = {}

    def train(seed):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for _ in range(5):
            with saved_tensors_hooks(*pair):
                h = x * 1
                for _ in range(6):
                    h = torch.nn.functional.silu(h @ (x * 2)) * 0.1
                loss = h.sum()
            results.setdefault(seed, []).append(torch.autograd.grad(loss, x)[0])

    threads = [threading.Thread(target=train, args=(seed % 3,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in results.values():
        assert len(each) == 10
        assert all(torch.equal(each[0], other) for other in each)


def test_of_two_pairs_the_inner_one_counts():
    x = torch.randn(64, 64, requires_grad=True)
    with pair_block("raw"), pair_block(SMALL):
        torch.nn.functional.silu((x * 1) @ (x * 2)).sum()
    assert gradckpt.stats()["codecs"] == {"int8": 2}


def test_no_codec_has_no_pair():
    with pytest.raises(ValueError, match=r"compress_saved\(None\) compresses nothing"):
        compress_saved(None).hooks  # noqa: B018


# ---- codecs for operators ----


def run(config):
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear(128, 128), torch.nn.LayerNorm(128)
    x = torch.randn(64, 128, requires_grad=True)

    @compress_saved(config)
    def forward():
        h = torch.nn.functional.silu(norm(x * 1))
        return torch.softmax(linear(h), -1)[:, 0].sum()

    forward().backward()
    return gradckpt.stats()["codecs"]


def test_only_named_operators_are_compressed():
    assert run({"linear": "int8"}) == {"int8": 1}


def test_each_operator_has_its_codec():
    assert run({"linear": "int4", "norm": "fp8", "activation": "int6"}) == {"int4": 1, "fp8_e4m3": 1, "int6": 1}


def test_operators_override_the_codec_of_the_others():
    everything = run(CompressionConfig("int8"))
    gradckpt.stats.reset()
    changed = run({"codec": "int8", "operators": {"linear": "int4", "norm": None, "softmax": None}})
    assert everything["bf16"] == 1
    assert changed == {"int8": everything["int8"] - 2, "int4": 1}


def test_operators_survive_a_dict():
    config = CompressionConfig("int8", operators={"linear": "fp8", "norm": None})
    assert CompressionConfig.from_dict(config.to_dict()) == config
    assert hash(config) == hash(CompressionConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: compress_saved({"linear": None}), ValueError, "names no codec"),
        (lambda: compress_saved({"codec": "int8", "operators": {"mlp": "int8"}}), ValueError, "unknown operator 'mlp'"),
        (lambda: compress_saved({"linear": "int9"}), ValueError, "unknown codec"),
        (lambda: CompressionConfig(operators="linear"), TypeError, "maps operators to codecs"),
        (lambda: CompressionConfig(operators={"norm": None}, stochastic=True), ValueError, "exclude each other"),
        (
            lambda: gradckpt.checkpoint(torch.sin, torch.ones(8, requires_grad=True), compress={"linear": "int8"}),
            ValueError,
            "not to regions",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(make, error, said):
    with pytest.raises(error, match=said) as caught:
        make()
    assert str(caught.value).startswith("gradckpt: ")


def test_an_empty_block_costs_nothing():
    with contextlib.suppress(ZeroDivisionError), pair_block(SMALL):
        raise ZeroDivisionError
    assert gradckpt.stats()["compressed"] == 0
