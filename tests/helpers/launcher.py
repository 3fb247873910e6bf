"""``python -m gradckpt.run`` in a process of its own, and scripts for it."""

import os
import subprocess
import sys
import textwrap

from checkout import ROOT

ENV = {
    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
LAUNCH = ["-m", "gradckpt.run"]


def call(*command, cwd, status=0, env=ENV):
    """A Python process: its output, with the exit status that is expected."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def script(folder, text, name="script.py"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def program(folder, name, text, interpreter=sys.executable):
    """A console script as installers make it."""
    path = script(folder, f"#!{interpreter}\n{textwrap.dedent(text)}", f"bin/{name}")
    path.chmod(0o755)
    return path


def on_path(folder):
    return {**ENV, "PATH": f"{folder / 'bin'}{os.pathsep}{ENV['PATH']}"}


REGION = """
    import sys
    import torch
    from torch.utils.checkpoint import checkpoint
    layer = torch.nn.Linear(64, 64)
    def step():
        checkpoint(layer, layer(torch.randn(32, 64)), use_reentrant=False).sum().backward()
"""
