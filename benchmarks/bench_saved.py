"""Memory and time of one step: plain, checkpointed, and with compress_saved().

    python benchmarks/bench_saved.py [--layers 4 --hidden 256 --tokens 512]

A Llama of the Hugging Face library, random weights, float32, CPU. `kept` is what the
forward leaves alive for its backward: bytes of storages that autograd saved, weights apart, plus
payloads. Times are medians; error is the relative L2 distance of all gradients to those of the
plain step.
"""

import argparse
import contextlib
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    small_llama.add_options(parser)
    o = parser.parse_args()
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
