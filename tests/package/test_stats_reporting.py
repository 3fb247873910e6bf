"""stats() for loggers (scalars, TensorBoard) and for people (text, a table)."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
import torch
from checkout import ROOT

import gradckpt


@pytest.fixture(autouse=True)
def _fresh():
    gradckpt.reset_stats()


def train(regions=1, rows=64):
    """That many regions, each with an input of 64 x rows float32 and one too small."""
    for _ in range(regions):
        x = torch.randn(rows, 64, requires_grad=True) * 1.0
        small = torch.randn(4, requires_grad=True) * 1.0
        gradckpt.checkpoint(lambda a, b: (a.sin() * b.sum()).sum(), x, small, compress="int8").backward()


# ---- scalars ----


def test_scalars_are_the_numbers_of_stats():
    train(3)
    s, scalars = gradckpt.stats(), gradckpt.stats_scalars()
    assert all(type(value) is float for value in scalars.values())
    assert scalars["gradckpt/compressed"] == s["compressed"] == 3
    assert scalars["gradckpt/asked"] == 6
    assert scalars["gradckpt/bytes_in_mib"] == s["bytes_in"] / 2**20 == 3 * 64 * 64 * 4 / 2**20
    assert scalars["gradckpt/bytes_out_mib"] == s["bytes_out"] / 2**20
    assert scalars["gradckpt/peak_live_mib"] == s["peak_live_bytes"] / 2**20 > 0
    assert scalars["gradckpt/kept_mib"] == s["kept_bytes"] / 2**20 == 3 * 16 / 2**20
    assert scalars["gradckpt/kept/smaller_than_min_numel"] == 3
    assert scalars["gradckpt/ratio"] == s["ratio"]
    numbers = [key for key, value in s.items() if isinstance(value, int)]
    assert len(scalars) == len(numbers) + 1 + len(s["kept"])


def test_prefix_and_nothing_to_divide():
    scalars = gradckpt.stats_scalars("train/ckpt_")
    assert scalars["train/ckpt_compressed"] == 0.0
    assert not [key for key in scalars if not key.startswith("train/ckpt_") or key.endswith("ratio")]


def test_since():
    train(2, rows=64)
    before = gradckpt.stats()
    train(3, rows=128)
    after = gradckpt.stats_scalars("", since=before)
    assert (after["compressed"], after["kept/smaller_than_min_numel"]) == (3, 3)
    assert after["bytes_in_mib"] == 3 * 128 * 64 * 4 / 2**20
    assert after["ratio"] == (128 * 64 * 130 / 128) / (128 * 64 * 4)
    assert after["peak_live_mib"] == gradckpt.stats()["peak_live_bytes"] / 2**20
    idle = gradckpt.stats_scalars("", since=gradckpt.stats())
    assert idle["compressed"] == 0
    assert "ratio" not in idle


def test_since_before_a_reset():
    train(3)
    before = gradckpt.stats()
    gradckpt.reset_stats()
    train(2)
    scalars = gradckpt.stats_scalars("", since=before)
    assert (scalars["compressed"], scalars["kept/smaller_than_min_numel"]) == (2, 2)


def events(folder):
    """{tag: [(step, value)]} of what a SummaryWriter left there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in (1, 2):
            train(2)
            gradckpt.log_stats(writer, step)
        gradckpt.log_stats(writer, 2, prefix="other/")
    found = events(tmp_path)
    assert found["gradckpt/compressed"] == [(1, 2.0), (2, 4.0)]
    assert found["other/compressed"] == [(2, 4.0)]
    wanted = gradckpt.stats_scalars()
    assert {tag for tag in found if tag.startswith("gradckpt/")} == set(wanted)
    for tag, value in wanted.items():
        assert found[tag][-1] == (2, pytest.approx(value, rel=1e-6)), tag


# ---- for people ----


def test_text():
    train(3)
    lines = gradckpt.format_stats().splitlines()
    assert not [line for line in lines if line != line.rstrip() or "\t" in line]
    row = {line.partition("  ")[0]: line for line in lines}
    assert row["tensors compressed"].split()[-1] == "3"
    assert row["payloads written"].endswith("3  48.00 KiB -> 12.19 KiB, ratio 0.254")
    assert row["kept: smaller than min_numel"].split()[-1] == "3"
    assert len({line.index(" B") for line in lines if line.endswith("  0 B")}) == 1, "a column"
    out = io.StringIO()
    gradckpt.print_stats(out)
    assert out.getvalue().splitlines() == lines


def test_text_before_anything_was_compressed():
    assert "ratio" not in gradckpt.format_stats()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_terminal(rich, monkeypatch):
    train(3)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    out = Terminal()
    with contextlib.redirect_stdout(out):
        gradckpt.print_stats()
    assert ("│" in out.getvalue()) is rich
    assert "kept: smaller than min_numel" in out.getvalue()
    if not rich:
        assert out.getvalue() == gradckpt.format_stats() + "\n"


def test_importing_gradckpt_imports_no_framework():
    code = "import sys, gradckpt; assert not {'transformers', 'tensorboard', 'rich'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


# ---- what torch.compile made ----


def test_compiled_graphs_are_counted_apart():
    before = gradckpt.stats()
    layer = torch.compile(lambda x: gradckpt.checkpoint(torch.sin, x * 2.0, compress="int8"), backend="aot_eager")
    layer(torch.randn(64, 64, requires_grad=True)).sum().backward()
    scalars = gradckpt.stats_scalars("", since=before)
    assert (scalars["compiled_graphs"], scalars["compiled_tensors"], scalars["compressed"]) == (1, 1, 0)
    assert scalars["compiled_bytes_in_mib"] == 64 * 64 * 4 / 2**20
    assert scalars["compiled_bytes_out_mib"] == 32 * 130 / 2**20
    (line,) = [line for line in gradckpt.format_stats().splitlines() if line.startswith("of compiled graphs")]
    assert line.endswith("  1  16.00 KiB -> 4.06 KiB")
