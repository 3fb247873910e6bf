"""The pages under docs/ whose examples are programs: they run, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["compile.md", "huggingface.md", "launcher.md", "lightning.md", "selective.md", "stats.md"]


def run(page, env):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert blocks
    env = {**env, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    run(page, {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("page", ["deepspeed.md", "torchtitan.md"])
def test_examples_of_engines_run(page):
    run(page, frameworks.environment(frameworks.ENGINES))
