"""Folders of frameworks that must not lie in the tests' own site-packages;
only processes of their own import them.

``frameworks.txt`` says what is in which, and why there are two; ``make test_all`` installs them.
"""

import os
import sys
from pathlib import Path

import pytest
from checkout import HELPERS, ROOT

#: timm, torchvision.
FOLDER = Path(sys.prefix) / "frameworks"

#: DeepSpeed, torchtitan.
ENGINES = Path(sys.prefix) / "engines"


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """Of a process that imports gradckpt, the tests' helpers and what is in the folder."""
    if not folder.is_dir():
        pytest.fail(f"{folder} is missing; `make test_all` installs what the tests need there", pytrace=False)
    path = os.pathsep.join(map(str, (ROOT, HELPERS, folder)))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
