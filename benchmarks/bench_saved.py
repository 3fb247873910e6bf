"""Memory and time of one step: plain, checkpointed, and with compress_saved().

    python benchmarks/bench_saved.py [--layers 4 --hidden 256 --tokens 512]
    python benchmarks/bench_saved.py --host      microseconds of the host per saved tensor

A Llama of the Hugging Face library, random weights, float32, CPU. `kept` is what the
forward leaves alive for its backward: bytes of storages that autograd saved, weights apart, plus
payloads. Times are medians; error is the relative L2 distance of all gradients to those of the
plain step. Of the host's times the least of all rounds counts, above the same step without hooks:
forward, backward and release.
"""

import argparse
import contextlib
import functools
import statistics
import time

import small_llama
import torch
from machine import facts, print_head, print_table

import gradckpt


def saved_bytes(model, loss_of, config):
    """Payloads, and what stays by reference beside them."""
    before = gradckpt.stats()["live_bytes"]
    by_reference, known = {}, {p.untyped_storage()._cdata for p in model.parameters()}
    with gradckpt.compress_saved(config):
        loss = loss_of()
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            raw = getattr(node, name) if name.startswith("_raw_saved_") else None
            value = getattr(getattr(raw, "data", None), "value", None)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in known:
                by_reference[value.untyped_storage()._cdata] = value
        stack.extend(edge[0] for edge in node.next_functions)
    return gradckpt.stats()["live_bytes"] - before + small_llama.nbytes(list(by_reference.values()))


def step(model, loss_of, context):
    model.zero_grad()
    with context:
        loss = loss_of()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


SAVES = 300

#: What a step saves SAVES times: a new tensor, one that it has saved before, a leaf.
HOST = {
    "fresh": lambda x: functools.reduce(lambda y, _: y.pow(2), range(SAVES), x),
    "fresh and again": lambda x: functools.reduce(lambda y, _: y.pow(2) * 0.5 + y.pow(3) * 0.5, range(SAVES), x),
    "fresh of these": lambda x: functools.reduce(lambda y, _: y.pow(2) * 0.5 + y * 0.5, range(SAVES), x),
    "leaf": lambda x: sum(x.pow(2) for _ in range(SAVES)),
}


def host(values, rounds):
    """Microseconds per saved tensor above no hook, by what is saved and by hooks."""
    hooks = {
        "no hook": contextlib.nullcontext,
        "identity pair": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        "int8": lambda: gradckpt.compress_saved({"codec": "int8", "min_numel": 0}),
    }
    ones, best = torch.ones(values), {}
    for _ in range(rounds):
        for kind, function in HOST.items():
            for name, context in hooks.items():
                x = ones.clone().requires_grad_()
                start = time.perf_counter()
                with context():
                    y = function(x)
                y.backward(ones)
                del y
                seconds = time.perf_counter() - start
                best[kind, name] = min(seconds, best.get((kind, name), seconds))
    above = {key: (best[key] - best[key[0], "no hook"]) / SAVES * 1e6 for key in best}
    for name in hooks:
        above["found again", name] = above["fresh and again", name] - above["fresh of these", name]
    rows = [
        [kind, *(f"{above[kind, name]:.1f}" for name in ("identity pair", "int8"))]
        for kind in ("fresh", "found again", "leaf")
    ]
    print_table(f"Host, us per saved tensor of {values} values", ["", "identity pair", "int8"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    small_llama.add_options(parser)
    parser.add_argument("--host", action="store_true", help="measure the host's time per saved tensor instead")
    o = parser.parse_args()
    if o.host:
        torch.set_num_threads(1)
        print_head("compress_saved", facts())
        host(512, 20 * o.repeat)
        return
    model = small_llama.build(o)
    ids = torch.randint(0, small_llama.VOCABULARY, (1, o.tokens))

    def loss_of():
        return model(ids, labels=ids).loss

    def checkpointed(compress):
        handle = gradckpt.enable(model, compress=compress)
        model.train()
        return handle

    nothing = contextlib.nullcontext()
    plain = small_llama.nbytes(small_llama.kept(model, loss_of))
    exact = step(model, loss_of, nothing)
    rows = [("none", plain, nothing, None)]
    rows += [
        (f"compress_saved {c}", saved_bytes(model, loss_of, c), gradckpt.compress_saved(c), None)
        for c in ("raw", "int8", "int4")
    ]
    for compress in (None, "int8"):
        handle = checkpointed(compress)
        kept = small_llama.nbytes(small_llama.kept(model, loss_of))
        rows.append((f"checkpoint {compress or ''}".strip(), kept, nothing, compress or "None"))
        handle.remove()

    step(model, loss_of, nothing)
    times = {name: [] for name, *_ in rows}
    errors = {}
    for _ in range(o.repeat):
        for name, _, context, region in rows:
            handle = checkpointed(None if region == "None" else region) if region else None
            start = time.perf_counter()
            gradients = step(model, loss_of, context)
            times[name].append(time.perf_counter() - start)
            errors[name] = ((gradients - exact).norm() / exact.norm()).item()
            if handle is not None:
                handle.remove()
    base = statistics.median(times["none"])
    table = []
    for name, kept, *_ in rows:
        t = statistics.median(times[name])
        table.append(
            [
                name,
                f"{kept / 2**20:.2f}",
                f"{kept / plain:.2f}",
                f"{t * 1e3:.0f}",
                f"{t / base:.2f}",
                f"{errors[name]:.4f}",
            ]
        )
    print_head("compress_saved", facts())
    print_table("One step", ["", "kept, MiB", "of plain", "step, ms", "of plain", "gradient error"], table)


if __name__ == "__main__":
    main()
