"""First runs: scripts as frameworks' own docs write them, with and without gradckpt, beside each
other.

``examples/first_run/before`` and ``after`` hold each script twice; docs/start.md shows what
differs.
"""

import difflib
import os
import re
import subprocess
import sys

import processes
import pytest
import torch
from checkout import EXAMPLES, HELPERS, PROGRAMS, ROOT

FOLDER = EXAMPLES / "first_run"
FRONT_END = PROGRAMS / "front_end"
PAGE = (ROOT / "docs" / "start.md").read_text()

NAMES = sorted(path.stem for path in (FOLDER / "before").glob("*.py"))

#: Regions of three steps.
REGIONS = dict.fromkeys(("nano_gpt", "lora", "sft", "dpo", "grpo", "vit", "front_end"), 3 * 4) | {"unet": 3 * 11}
#: Compressed tensors; with LoRA, the first layer's input is a leaf.
COMPRESSED = {**REGIONS, "lora": 3 * 3}

#: Old names of transformers that PEFT and TRL themselves use, also with torch's checkpointing.
OLD_NAMES = {"is_gradient_checkpointing", "gradient_checkpointing_enable", "gradient_checkpointing_disable"}
WARNINGS = ["ignore", "error::FutureWarning", *(f"ignore:`{name}` is deprecated:FutureWarning" for name in OLD_NAMES)]
CLEAN, OF_LIBRARIES = WARNINGS[:2], WARNINGS


def lines_of(folder, name):
    return (FOLDER / folder / f"{name}.py").read_text().splitlines()


def changed(name):
    """Lines that are written to get from one script to the other, without blank ones;
    and the diff."""
    before, after = lines_of("before", name), lines_of("after", name)
    count = 0
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            count += max(sum(map(bool, before[i:j])), sum(map(bool, after[k:m])))
    return count, [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]


def exact(name, folder):
    """A copy of the script with gradckpt, which compresses nothing."""
    text = (FOLDER / "after" / f"{name}.py").read_text()
    copy = text.replace('"int8"', "None").replace("enable(model)", "enable(model, None)")
    assert text.count("None") + 1 == copy.count("None")
    (folder / f"exact_{name}.py").write_text(copy)
    return folder / f"exact_{name}.py"


def train(folder, programs, environment=None, before=(), warnings=CLEAN):
    """What each program did, all in one process:
    what comes after an ``import gradckpt`` is with gradckpt."""
    env = environment or {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS, PROGRAMS)))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONWARNINGS"] = ",".join(warnings)
    command = [sys.executable, *before, PROGRAMS / "first_run_probe.py", "out.pt", *programs]
    done = subprocess.run(
        [str(each) for each in command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "out.pt"), done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of every script: what the script did without gradckpt, with it, and with it and no codec."""
    found = {}
    for names, where in (
        (("nano_gpt", "unet"), {}),
        (("lora", "sft", "dpo", "grpo"), {"warnings": OF_LIBRARIES}),
        (("vit",), {"environment": processes.environment(), "before": [PROGRAMS / "torchvision_operators.py"]}),
    ):
        folder = tmp_path_factory.mktemp(names[0])
        scripts = [FOLDER / how / f"{name}.py" for how in ("before", "after") for name in names]
        results, _ = train(folder, [*scripts, *(exact(name, folder) for name in names)], **where)
        found |= {name: results[i :: len(names)] for i, name in enumerate(names)}
    folder = tmp_path_factory.mktemp("front_end")
    run = f"-m front_end.train {FRONT_END / 'config.yaml'}"
    (before,), _ = train(folder, [run])
    (after,), said = train(folder, [f"-m gradckpt.run --compress int8 {run}"])
    assert "compressed 12 of 12 tensors in int8" in said
    (none,), _ = train(folder, [f"-m gradckpt.run --compress none {run}"])
    return {**found, "front_end": [before, after, none]}


@pytest.mark.parametrize("name", NAMES)
def test_two_lines_at_most(name):
    count, diff = changed(name)
    assert 0 < count <= 2, "\n".join(diff)
    assert "gradckpt" not in "\n".join(lines_of("before", name))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_same_lines(name):
    _, diff = changed(name)
    shown = re.findall(rf"`{name}\.py`.*?```diff\n(.*?)```", PAGE, re.DOTALL)
    lines = [line[2:].strip() for line in shown[0].splitlines() if line.startswith(("+ ", "- "))]
    assert lines == [line[2:].partition("  #")[0].strip() for line in diff]


def test_the_front_end_has_no_line():
    for path in FRONT_END.glob("*.*"):
        assert "gradckpt" not in path.read_text()


@pytest.mark.parametrize("name", COMPRESSED)
def test_trains_as_before_with_compressed_checkpoints(trained, name):
    """The forward is untouched, so the first loss is equal to the bit;
    gradients have int8's error."""
    before, after, _ = trained[name]
    assert not before["stats"]
    assert len(before["losses"]) == len(after["losses"]) == 3
    assert after["losses"][0] == before["losses"][0]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-2, abs=1e-6)  # a loss of GRPO may be 0
    one, other = (torch.cat([g.flatten() for g in each["gradients"]]) for each in (before, after))
    assert 0 < (other - one).norm() < 0.03 * one.norm()
    stats = after["stats"]
    assert stats["compressed"] == COMPRESSED[name]
    assert stats["codecs"] == {"int8": COMPRESSED[name]}
    assert stats["ratio"] < 0.26


@pytest.mark.parametrize("name", COMPRESSED)
def test_without_a_codec_it_is_torchs_to_the_bit(trained, name):
    """Beside torch's checkpointing; where the script had none, beside no checkpointing."""
    before, _, none = trained[name]
    assert none["losses"] == before["losses"]
    assert len(none["gradients"]) == len(before["gradients"])
    assert all(map(torch.equal, none["gradients"], before["gradients"]))
    assert none["stats"]["regions"] == REGIONS[name]
    assert none["stats"]["compressed"] == 0


def test_every_script_is_trained():
    assert {*NAMES, "front_end"} == COMPRESSED.keys()
    assert sorted(path.stem for path in (FOLDER / "after").glob("*.py")) == NAMES
