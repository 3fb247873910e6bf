"""Runs programs one after the other in this process, and writes what their training did.

``python first_run_probe.py OUT PROGRAM...``: a program and its arguments are one word.
"""

import atexit
import runpy
import shlex
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Seen:
    """Of one program: the losses, and the gradients before the first step of its optimizer."""

    def __init__(self):
        self.losses, self.gradients, self.stats, self.before = [], None, None, None

    def step(self, optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.gradients is None:
            self.gradients = [p.grad.clone() for p in parameters if p.grad is not None]

    def backward(self, loss, *args, **kwargs):
        self.losses.append(loss.item())
        return original(loss, *args, **kwargs)


original = torch.Tensor.backward


def run(program):
    """What it did; with gradckpt, its counters, too."""
    argv, seen = shlex.split(program), Seen()
    hook = register_optimizer_step_pre_hook(seen.step)
    torch.Tensor.backward = lambda loss, *args, **kwargs: seen.backward(loss, *args, **kwargs)
    loaded = sys.modules.get("gradckpt")
    if loaded is not None:
        loaded.stats.reset()
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        hook.remove()
        torch.Tensor.backward = original
    loaded = sys.modules.get("gradckpt")
    stats = {} if loaded is None else dict(loaded.stats())
    return {"losses": seen.losses, "gradients": seen.gradients, "stats": stats}


if __name__ == "__main__":
    out, *programs = sys.argv[1:]
    found = []
    atexit.register(lambda: torch.save(found, out))
    for each in programs:
        found.append(run(each))
