"""A fresh venv of some interpreter with some torch, and what gradckpt does in it:
the doctor and a training step.

``make release`` installs the wheel there; the canary of ``make soak``
runs the checkout beside the newest torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

from commands import Failed, last_line, run

#: What a user's first script is like.
SCRIPT = """
import torch, gradckpt
torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    hidden = torch.randn(64, 256, requires_grad=True) * 1.0
    for layer in layers:
        hidden = gradckpt.checkpoint(layer, hidden, compress="int8")
    hidden.square().mean().backward()
    optimizer.step()
stats = gradckpt.stats()
assert 0 < stats["bytes_out"] < stats["bytes_in"], stats
print(gradckpt.__file__)
"""
#: torch says so when it is imported; nothing here needs numpy.
NO_NUMPY = "ignore:Failed to initialize NumPy"


class Unavailable(Exception):
    """An interpreter or a torch cannot be had on this machine; the message says why."""


def interpreter(name: str) -> Path:
    """Return the path of an interpreter that starts and can make a venv."""
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not on PATH")
    probe = [found, "-c", "import ensurepip, sys, venv; print(sys.executable)"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.splitlines() or ["no output"])[0 if "Traceback" not in done.stderr else -1]
        raise Unavailable(f"{name} does not start or cannot make a venv: {said}")
    return Path(done.stdout.strip())


def reach(index: str) -> None:
    """Raise Unavailable if torch's page of a package index cannot be read.

    pip would take some older torch from wherever else it is configured to look,
    after minutes of retries.
    """
    try:
        urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=30).close()
    except OSError as error:
        raise Unavailable(f"{index} (TORCH_INDEX) cannot be read: {getattr(error, 'reason', error)}") from None


class FreshVenv:
    """A venv in ``folder``. Its programs see no other program on PATH,
    and no setting of Python, CUDA or gradckpt."""

    def __init__(self, folder: Path, interpreter: Path) -> None:
        self.folder = folder
        run([interpreter, "-m", "venv", folder / "venv"])
        self.python = folder / "venv" / "bin" / "python"
        foreign = ("PYTHON", "GRADCKPT_", "CUDA_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.env["PATH"] = str(self.python.parent)

    def run(self, *arguments: str | Path) -> str:
        return run([self.python, *arguments], cwd=self.folder, env=self.env)

    def pip_install(self, *arguments: str | Path) -> None:
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def add_torch(self, wanted: str, index: str = "") -> str:
        """Install a torch and return its version.

        Args:
            wanted: ``"newest"``, a version (``"2.11"``: the last 2.11.x),
                or a folder that holds an installed torch.
            index: The package index to take it from; pip's own if empty.
        """
        try:
            if os.sep in wanted:
                site = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
                (Path(site) / "torch.pth").write_text(f"{wanted}\n")
            else:
                if index:
                    reach(index)
                options = ["--index-url", index] if index else []
                self.pip_install(*options, "torch" if wanted == "newest" else f"torch=={wanted}.*")
            return self.run("-W", NO_NUMPY, "-c", "import torch; print(torch.__version__)").split()[-1]
        except Failed as failed:
            raise Unavailable(f"torch {wanted}: {last_line(str(failed))}") from None

    def doctor(self) -> str:
        """Return what ``python -m gradckpt`` prints; its exit status must be 0."""
        return self.run("-W", NO_NUMPY, "-m", "gradckpt")

    def train(self) -> None:
        """Run three training steps of the gradckpt that is installed here."""
        (self.folder / "train.py").write_text(SCRIPT)
        trained = self.run("-W", NO_NUMPY, "train.py")
        if not trained.startswith(str(self.folder)):
            raise Failed(f"the installed wheel was not the one that ran, but {trained}")


def install(wheel: Path, folder: Path, interpreter: Path, torch: str, index: str = "") -> str:
    """Install the wheel in a fresh venv, run the doctor and a training step,
    and return what the doctor printed."""
    venv = FreshVenv(folder, interpreter)
    venv.add_torch(torch, index)
    venv.pip_install("--no-index", "--no-deps", "--force-reinstall", wheel.resolve())
    tested = venv.doctor()
    venv.train()
    return tested


def summary(tested: str) -> str:
    """Return a line about what the doctor printed: versions, and how many of its checks passed."""
    fields = dict(re.findall(r"^(torch|Python) +(\S+?),", tested, re.MULTILINE))
    checks = len(re.findall(r"^ok ", tested, re.MULTILINE))
    return f"CPython {fields['Python']}, torch {fields['torch']}: doctor ({checks} checks), training step"
