"""Graphs of very many nodes: they are built, run and freed on a small stack, and freed at once."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os, sys, threading, weakref
import torch, gradckpt
from torch.nn.functional import silu


def on_a_small_stack(step, *arguments):
    print(*arguments, flush=True)  # what crashes is named
    threading.stack_size(256 << 10)
    thread = threading.Thread(target=step, args=arguments)
    thread.start()
    thread.join()
    gc.collect()
    assert gradckpt.stats()["live_bytes"] == 0


def regions(codec, count, saved):
    def function(x):
        for _ in range(saved):
            x = torch.sin(x)
        return x

    config = codec and {"codec": codec, "min_numel": 0}
    h = torch.rand(4, requires_grad=True) * 1
    for _ in range(count):
        h = gradckpt.checkpoint(function, h, compress=config)
    h.sum().backward()


w, b = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
FORMS = {
    "product": lambda h, i, start: torch.tanh(h @ w),
    "own result": lambda h, i, start: h.sigmoid(),
    "factors": lambda h, i, start: h * b + h * h,
    "skips": lambda h, i, start: silu(h) + start,
    "few saves": lambda h, i, start: silu(h) if i % 1000 == 0 else h @ w if i % 1000 == 999 else h + b,
    "towers": lambda h, i, start: torch.stack([h[0].sin(), silu(h[1])]),
}


def saved(form, codec, n, runs):
    start = torch.rand(4, 4, requires_grad=True) * 1

    def steps(h):
        for i in range(n):
            h = FORMS[form](h, i, start)
        return h

    block = gradckpt.compress_saved({"codec": codec, "min_numel": 0})
    if codec == "int8" and form == "product":
        h = block(steps)(start)
    else:
        with block:
            h = steps(start)
    if runs:
        h.sum().backward()


def freed_at_once(runs):
    first = torch.rand(64, 64, requires_grad=True)
    alive = weakref.ref(first)
    with gradckpt.compress_saved("int8"):
        h = first * 1
        for _ in range(3000):
            h = silu(h)
    if runs:
        h.sum().backward()
    del h, first
    for _ in range(10):  # what its oldest nodes hold goes once the interpreter comes round
        pass
    assert alive() is None, runs
    assert gradckpt.stats()["live_bytes"] == 0, runs


for name, *arguments in json.loads(sys.argv[1]):
    if name == "freed_at_once":
        freed_at_once(*arguments)
    else:
        on_a_small_stack({"regions": regions, "saved": saved}[name], *arguments)
print("freed", flush=True)
os._exit(0)  # after a backward in a thread torch 2.12 itself may abort at exit
"""
FORMS = ("product", "own result", "factors", "skips", "few saves", "towers")


def run(*chains):
    """In one process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(chains)], capture_output=True, text=True)
    assert (done.returncode, done.stdout[-6:]) == (0, "freed\n"), done.stdout[-200:] + done.stderr[-2000:]
    assert "Exception in thread" not in done.stderr, done.stderr[-2000:]


def test_a_long_chain_is_freed_on_a_small_stack():
    run(*(("regions", codec, *shape) for codec in (None, "int8") for shape in ((1, 50_000), (500, 100))))


def test_a_long_chain_under_compress_saved():
    for codec in ("int8", "raw"):
        run(*(("saved", form, codec, *how) for form in FORMS for how in ((6_000, False), (3_000, True))))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_two_hundred_thousand_nodes(form):
    run(("saved", form, "int8", 200_000, False), ("saved", form, "int8", 200_000, True))


def test_a_long_graph_is_freed_at_once():
    run(("freed_at_once", False), ("freed_at_once", True))
