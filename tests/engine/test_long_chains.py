"""Regions that save very many tensors: their graphs are freed without recursion."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, threading
import torch, gradckpt

regions, saved = map(int, sys.argv[1:3])
config = None if sys.argv[3] == "None" else {"codec": sys.argv[3], "min_numel": 0}


def function(x):
    for _ in range(saved):
        x = torch.sin(x)
    return x


def step():
    x = torch.rand(4, requires_grad=True)
    h = x * 1
    for _ in range(regions):
        h = gradckpt.checkpoint(function, h, compress=config)
    h.sum().backward()
    del h
    gc.collect()
    print("freed")


threading.stack_size(256 << 10)
thread = threading.Thread(target=step)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize(("regions", "saved"), [(1, 50_000), (500, 100)])
def test_a_long_chain_is_freed_on_a_small_stack(codec, regions, saved):
    command = [sys.executable, "-c", PROGRAM, str(regions), str(saved), str(codec)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr[-2000:]
