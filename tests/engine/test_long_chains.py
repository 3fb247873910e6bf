"""Graphs of very many nodes: they are built, run and freed on a small stack, and freed at once."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, sys, threading
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
    print("freed", flush=True)


threading.stack_size(256 << 10)
thread = threading.Thread(target=step)
thread.start()
thread.join()
os._exit(0)  # after a backward in a thread torch 2.12 itself may abort at exit
"""


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize(("regions", "saved"), [(1, 50_000), (500, 100)])
def test_a_long_chain_is_freed_on_a_small_stack(codec, regions, saved):
    command = [sys.executable, "-c", PROGRAM, str(regions), str(saved), str(codec)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr[-2000:]


SAVED = """
import gc, sys, threading
import torch, gradckpt
from torch.nn.functional import silu

form, codec, n, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "run"
config = {"codec": codec, "min_numel": 0}
w, b = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
FORMS = {
    "product": lambda h, i: torch.tanh(h @ w),
    "own result": lambda h, i: h.sigmoid(),
    "factors": lambda h, i: h * b + h * h,
    "skips": lambda h, i: silu(h) + START[0],
    "few saves": lambda h, i: silu(h) if i % 1000 == 0 else h @ w if i % 1000 == 999 else h + b,
    "towers": lambda h, i: torch.stack([h[0].sin(), silu(h[1])]),
}


def steps(h):
    for i in range(n):
        h = FORMS[form](h, i)
    return h


def step():
    global START
    START = [torch.rand(4, 4, requires_grad=True) * 1]
    if codec == "int8" and form == "product":
        h = gradckpt.compress_saved(config)(steps)(START[0])
    else:
        with gradckpt.compress_saved(config):
            h = steps(START[0])
    if runs:
        h.sum().backward()
    del h, START
    print("dropped")


threading.stack_size(256 << 10)
thread = threading.Thread(target=step)
thread.start()
thread.join()
gc.collect()
assert gradckpt.stats()["live_bytes"] == 0
print("freed")
"""
FORMS = ("product", "own result", "factors", "skips", "few saves", "towers")


def chain(*arguments):
    done = subprocess.run([sys.executable, "-c", SAVED, *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "dropped\nfreed\n"), done.stderr[-2000:]


@pytest.mark.parametrize("codec", ["int8", "raw"])
@pytest.mark.parametrize("form", FORMS)
def test_a_long_chain_under_compress_saved(form, codec):
    chain(form, codec, 6_000, "drop")
    chain(form, codec, 3_000, "run")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_two_hundred_thousand_nodes(form):
    chain(form, "int8", 200_000, "drop")
    chain(form, "int8", 200_000, "run")


def test_a_long_graph_is_freed_at_once():
    """Also what its oldest nodes hold, once the interpreter comes round."""
    program = """
import torch, gradckpt, weakref
for kept in ("dropped", "run"):
    first = torch.rand(64, 64, requires_grad=True)
    alive = weakref.ref(first)
    with gradckpt.compress_saved("int8"):
        h = first * 1
        for _ in range(3000):
            h = torch.nn.functional.silu(h)
    if kept == "run":
        h.sum().backward()
    del h, first
    for _ in range(10):
        pass
    assert alive() is None, kept
    assert gradckpt.stats()["live_bytes"] == 0, kept
"""
    subprocess.run([sys.executable, "-c", program], check=True)
