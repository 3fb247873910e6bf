"""tests/helpers/pages.py: what pages show of `gradckpt plan` is what it prints."""

import os
import re
import subprocess
import sys

import pytest
import torch
from checkout import HELPERS, ROOT

pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

PAGES = ("README.md", "docs/decide.md", "docs/budgets.md")
RERUN = "run python tests/helpers/pages.py " + " ".join(PAGES)


def written(page, folder):
    """A copy of a page that pages.py has written to."""
    copy = folder / "page.md"
    copy.write_text(page)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, HELPERS / "pages.py", copy]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return copy.read_text()


these_versions = pytest.mark.skipif(
    (torch.__version__[:4], transformers.__version__) != ("2.13", "5.24.0"),
    reason="other versions allocate other temporaries than those that the pages show",
)


@pytest.mark.timeout(1500)  # docs/decide.md plans a dozen models
@these_versions
@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_the_command_prints(page, tmp_path):
    text = (ROOT / page).read_text()
    assert written(text, tmp_path) == text, RERUN


@these_versions
def test_the_live_model_prints_what_the_page_shows():
    page = (ROOT / "docs" / "decide.md").read_text()
    section = page[page.index("## A plan of a live model") :]
    program, shown = (re.search(rf"```{kind}\n(.*?)```", section, re.S)[1] for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split()).startswith(" ".join(shown.split()))  # the page wraps a sentence
