"""benchmarks/bench_families.py: what it prints, and that it fails when something is wrong."""

import json
import sys

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")
import bench_families

import gradckpt


def test_table_and_json(tmp_path, capsys):
    file = tmp_path / "families.json"
    assert bench_families.main(["--families", "llama,gemma2", "--codecs", "int8,raw", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    rows = {(r["family"], r["attention"]): r for r in json.loads(file.read_text())["rows"]}
    assert f"None bit-equal: {3 + (not rows['gemma2', 'sdpa']['missing'])} of" in printed
    int8, raw = rows["llama", "eager"]["runs"]
    assert int8["compressed"] == int8["eligible"] == 3
    assert 0 < int8["relative"] < 0.01
    assert raw["relative"] == 0
    assert raw["cosine"] == pytest.approx(1)
    for number in (f"{int8['relative']:.2%}", f"{int8['cosine']:.5f}", f"{int8['bytes_out'] / 1024:.1f}"):
        assert number in printed


def test_a_lost_gradient_fails(monkeypatch, capsys):
    gradients = bench_families.gradients

    def frozen_under_gradckpt(family, model):
        if gradckpt._models.switch.is_enabled(model):
            model.model.layers[0].input_layernorm.requires_grad_(False)
        return gradients(family, model)

    monkeypatch.setattr(bench_families, "gradients", frozen_under_gradckpt)
    assert bench_families.main(["--families", "llama"]) == 1
    assert "LOST" in capsys.readouterr().out


def test_unknown_family(capsys):
    with pytest.raises(SystemExit):
        bench_families.main(["--families", "llamo"])
    assert "unknown 'llamo'" in capsys.readouterr().err
