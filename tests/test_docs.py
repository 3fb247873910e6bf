"""The pages under docs/ whose examples are programs: they run, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest

ROOT = Path(__file__).parent.parent


def blocks_of(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert blocks
    return "\n".join(blocks)


PAGES = ["compile.md", "diffusers.md", "huggingface.md", "launcher.md", "plain.md", "selective.md", "stats.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    check([sys.executable, "-c", blocks_of(page)], env)


def test_examples_of_timm_run(tmp_path):
    program = tmp_path / "timm_page.py"
    program.write_text(blocks_of("timm.md"))
    check([sys.executable, ROOT / "tests" / "torchvision_operators.py", program], frameworks.environment())


def check(command, env):
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
