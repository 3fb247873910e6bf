"""stats() for loggers (scalars, TensorBoard) and for people (text, a table)."""

import gc
import json

import pytest
import torch

import gradckpt
from gradckpt import _C


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Without the random states of graphs that tests before left alive, as torch does of a failed
    backward or of a hook that holds its own node."""
    gc.collect()
    gradckpt.stats.reset()
    counted, left = _C.stats, _C.stats()
    sizes = {key: left[key] for key in ("live_bytes", "replay_bytes")}
    sizes |= {"peak_live_bytes": left["live_bytes"], "peak_bytes": sum(sizes.values())}

    def without_them():
        found = counted()
        return found | {key: found[key] - size for key, size in sizes.items()}

    monkeypatch.setattr(_C, "stats", without_them)


def train(regions=1, rows=64):
    """That many regions, each with an input of 64 x rows float32 and one too small."""
    for _ in range(regions):
        x = torch.randn(rows, 64, requires_grad=True) * 1.0
        small = torch.randn(4, requires_grad=True) * 1.0
        gradckpt.checkpoint(lambda a, b: (a.sin() * b.sum()).sum(), x, small, compress="int8").backward()


# ---- scalars ----


def test_scalars_are_the_numbers_of_stats():
    train(3)
    s, scalars = gradckpt.stats(), gradckpt.stats().scalars()
    assert all(type(value) is float for value in scalars.values())
    assert scalars["gradckpt/compressed"] == s["compressed"] == 3
    assert scalars["gradckpt/eligible"] == 6
    assert scalars["gradckpt/bytes_in_mib"] == s["bytes_in"] / 2**20 == 3 * 64 * 64 * 4 / 2**20
    assert scalars["gradckpt/bytes_out_mib"] == s["bytes_out"] / 2**20
    assert scalars["gradckpt/peak_live_mib"] == s["peak_live_bytes"] / 2**20 > 0
    assert scalars["gradckpt/uncompressed_mib"] == s["uncompressed_bytes"] / 2**20 == 3 * 16 / 2**20
    assert scalars["gradckpt/uncompressed/smaller_than_min_numel"] == 3
    assert scalars["gradckpt/ratio"] == s["ratio"]
    numbers = [key for key, value in s.items() if isinstance(value, int)]
    assert len(scalars) == len(numbers) + 1 + len(s["uncompressed"]) + len(s["offload"])


def test_prefix_and_nothing_to_divide():
    scalars = gradckpt.stats().scalars("train/ckpt_")
    assert scalars["train/ckpt_compressed"] == 0.0
    assert not [key for key in scalars if not key.startswith("train/ckpt_") or key.endswith("ratio")]


def test_since():
    train(2, rows=64)
    before = gradckpt.stats()
    train(3, rows=128)
    after = gradckpt.stats().since(before).scalars("")
    assert (after["compressed"], after["uncompressed/smaller_than_min_numel"]) == (3, 3)
    assert after["bytes_in_mib"] == 3 * 128 * 64 * 4 / 2**20
    assert after["ratio"] == (128 * 64 * 130 / 128 + 128) / (128 * 64 * 4)
    assert after["peak_live_mib"] == gradckpt.stats()["peak_live_bytes"] / 2**20
    now = gradckpt.stats()
    idle = now.since(now).scalars("")
    assert idle["compressed"] == 0
    assert "ratio" not in idle


def test_since_before_a_reset():
    train(3)
    before = gradckpt.stats()
    gradckpt.stats.reset()
    train(2)
    scalars = gradckpt.stats().since(before).scalars("")
    assert (scalars["compressed"], scalars["uncompressed/smaller_than_min_numel"]) == (2, 2)


# ---- for people ----


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(x).relu()


def steps(number, compress="int8", **options):
    """Training steps of three layers, each with an input of 16 KiB."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), *(Block() for _ in range(3)))
    with gradckpt.enable(net, modules={Block: compress}, **options):
        for _ in range(number):
            net(torch.randn(64, 64)).sum().backward()


def lines():
    return str(gradckpt.stats()).splitlines()


@pytest.mark.parametrize("number", [1, 4])
def test_text(number):
    """Of one step, however many there were; no row of zeros."""
    steps(number)
    head, span, *rows = lines()
    assert head == "checkpoints at the peak: 48.0 -> 17.3 KiB, 3 of 3 layers"  # 4.94 KiB: a random state
    assert span == ("in one step:" if number == 1 else "a step, of 4 steps:")
    assert rows == [
        "  layers that checkpoint      3",
        "  layers run again            3",
        "  tensors compressed in int8  3  48.0 -> 12.4 KiB",
    ]


def test_a_tensor_that_layers_share_is_one_original():
    x = torch.randn(64, 64, requires_grad=True) * 1
    y = gradckpt.checkpoint(lambda a: a.sin(), x, compress="int8")
    y = gradckpt.checkpoint(lambda a, b: a.sin() * b, y, x, compress="int8")
    gradckpt.checkpoint(lambda a, b: a.sin() * b, y, x, compress="int8").sum().backward()
    assert gradckpt.stats()["shared"] == 2
    assert lines()[0].startswith("checkpoints at the peak: 48.0 -> ")


def test_codecs_are_counted():
    """Those that were used, by any caller's choice; also since another moment."""
    steps(2)
    before = gradckpt.stats()
    steps(1, "int4", policy="save_matmuls:fp8")
    assert before["codecs"] == {"int8": 6}
    assert gradckpt.stats()["codecs"] == {"int8": 6, "int4": 3, "fp8_e4m3": 3}
    assert gradckpt.stats().since(before)["codecs"] == {"int4": 3, "fp8_e4m3": 3}
    assert any("tensors compressed in fp8_e4m3, int8, int4" in line for line in lines())
    assert sum(gradckpt.stats()["codecs"].values()) == gradckpt.stats()["encoded"]


def test_a_refused_tensor_is_taken_back_from_its_codec():
    gradckpt.checkpoint(torch.sin, torch.randn(64, 64, requires_grad=True) * 1e30, compress="fp16").sum().backward()
    assert gradckpt.stats()["codecs"] == {}


def test_text_of_what_stays_uncompressed():
    train(3)
    head, _, *rows = lines()
    assert head == "checkpoints at the peak: 16.0 -> 9.06 KiB, 1 of 1 layers"
    row = {line.strip().partition("  ")[0]: line for line in rows}
    assert row["not compressed: smaller than min_numel"].split()[-1] == "1"
    assert row["not compressed though they could be"].endswith("  16 B")
    assert not [line for line in rows if line != line.rstrip() or "\t" in line]


@pytest.mark.parametrize(("policy", "size"), [("save_matmuls", "48.0 KiB"), ("save_matmuls:int8", "0 B")])
def test_what_a_policy_keeps_is_counted(policy, size):
    steps(2, policy=policy)
    row = next(line for line in lines() if "outputs that a policy keeps" in line)
    assert row.split()[-3:] == ["3", *size.split()]
    assert (gradckpt.stats()["policy_outputs"], gradckpt.stats()["steps"]) == (6, 2)
    assert gradckpt.stats()["policy_bytes"] == (2 * 3 * 64 * 64 * 4 if policy == "save_matmuls" else 0)


def test_layers_that_compress_are_told_from_those_that_do_not():
    steps(2, compress=None)
    assert lines()[0] == "checkpoints: not compressed, 3 layers with compress=None"
    steps(2)
    assert lines()[0].endswith(", about 2 of 3 layers")
    assert gradckpt.stats()["regions_compressed"] == 6


class Noisy(Block):
    """Draws, and compares: a recompute takes both from the forward."""

    def forward(self, x):
        return super().forward(x) * torch.bernoulli(torch.full_like(x, 0.5)) + (x > 0) * x


@pytest.mark.parametrize("block", [Block, Noisy])
def test_the_first_line_has_all_that_is_held(block):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), *(block() for _ in range(3)))
    state, payload = torch.get_rng_state().nbytes, gradckpt.codecs.encode(torch.randn(64, 64)).nbytes
    held = 3 * payload + state
    if block is Noisy:  # two masks of a layer, the drawn one as float32, and a state after each draw
        held += 3 * (64 * 64 * 4 + 64 * 64 // 8) + 3 * state
    with gradckpt.enable(net, modules={block: "int8"}):
        loss = net(torch.randn(64, 64)).sum()
        assert gradckpt.stats()["live_bytes"] + gradckpt.stats()["replay_bytes"] == held
        loss.backward()
    s = gradckpt.stats()
    assert (s["peak_bytes"], s["replay_bytes"], s["live_bytes"]) == (held, 0, 0)
    assert lines()[0] == f"checkpoints at the peak: 48.0 -> {held / 1024:#.3g} KiB, 3 of 3 layers"


def test_what_was_held_before_a_reset_stays_counted():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), Noisy())
    with gradckpt.enable(net, modules={Noisy: "int8"}):
        loss = net(torch.randn(64, 64)).sum()
        held = gradckpt.stats()["replay_bytes"]
        gradckpt.stats.reset()
        assert gradckpt.stats()["replay_bytes"] == held > 0
        loss.backward()
    assert (gradckpt.stats()["replay_bytes"], gradckpt.stats()["regions_met"]) == (0, 0)


@pytest.mark.parametrize("alive", [True, False])
def test_a_forward_without_a_backward_has_no_layers(alive, caplog):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), *(Block() for _ in range(4)))
    caplog.set_level("INFO", "gradckpt")
    with gradckpt.enable(net, "int8", modules=Block):
        kept = net(torch.randn(64, 64))
        if not alive:
            del kept
        net(torch.randn(64, 64)).sum().backward()
        assert lines()[0].endswith(", 4 of 4 layers")
        assert [line.split()[-1] for line in lines()[2:4]] == ["4", "4"]
        if not alive:
            assert caplog.records[-1].getMessage().endswith(", 4 of 4 layers")
        net(torch.randn(64, 64)).sum().backward()
    assert lines()[0].endswith(", 4 of 4 layers")


def test_text_before_anything_was_compressed():
    assert str(gradckpt.stats()).partition("\n")[0] == "checkpoints: none so far"


def test_text_of_saved_tensors():
    x = torch.randn(64, 64, requires_grad=True)
    gradckpt.compress_saved("int8")(lambda: (x * 2).square().sum())().backward()
    assert lines()[0] == "saved tensors: 16.0 -> 4.12 KiB, 20.1 KiB at the peak, 1 of 1 tensors"


def test_it_is_a_dict():
    train()
    found = gradckpt.stats()
    assert json.loads(json.dumps(found)) == found
    assert found["compressed"] == 1
    gradckpt.stats.reset()
    assert found["compressed"] == 1
    assert gradckpt.stats()["compressed"] == 0
    assert gradckpt.stats().since(found) == gradckpt.stats()


# ---- what torch.compile made ----


def test_compiled_graphs_are_counted_apart():
    before = gradckpt.stats()
    layer = torch.compile(lambda x: gradckpt.checkpoint(torch.sin, x * 2.0, compress="int8"), backend="aot_eager")
    layer(torch.randn(64, 64, requires_grad=True)).sum().backward()
    scalars = gradckpt.stats().since(before).scalars("")
    assert (scalars["compiled_graphs"], scalars["compiled_tensors"], scalars["compressed"]) == (1, 1, 0)
    assert scalars["compiled_bytes_in_mib"] == 64 * 64 * 4 / 2**20
    assert scalars["compiled_bytes_out_mib"] == (32 * 130 + 64) / 2**20
    assert lines()[0] == "checkpoints of compiled graphs: 16.0 -> 4.12 KiB for one call, 1 tensors"
