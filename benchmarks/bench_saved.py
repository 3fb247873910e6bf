"""Memory and time of one step: plain, checkpointed, and with compress_saved().

    python benchmarks/bench_saved.py [--layers 4 --hidden 256 --tokens 512]
    python benchmarks/bench_saved.py --host      microseconds of the host per saved tensor
    python benchmarks/bench_saved.py --functions  bytes and errors of libraries' autograd Functions

A Llama of the Hugging Face library, random weights, float32, CPU. `kept` is what the
forward leaves alive for its backward: bytes of storages that autograd saved, weights apart, plus
payloads. Times are medians; error is the relative L2 distance of all gradients to those of the
plain step. With one thread it is the time of the processor. Of the host's times the least of all
rounds counts, above the same step without hooks: forward, backward and release.

Functions are those of tests/helpers/fused_functions.py, which have the same formulas as the
libraries': the bytes that each saves beside its weights, and the error of all gradients of a block
with it, over that of the block without it.

Checked: exact ways have the gradients of the plain step, none keeps less than its layers' inputs by
arithmetic, no codec less than its bits of what plain autograd keeps.
"""

import argparse
import contextlib
import functools
import statistics
import sys
from pathlib import Path

import guards
import small_llama
import timing
import torch
from machine import facts, print_head, print_table

import gradckpt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
import fused_functions


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
    "fresh": lambda x: functools.reduce(lambda y, _: y.sin(), range(SAVES), x),
    "fresh and again": lambda x: functools.reduce(lambda y, _: y.sin() * 0.5 + y.atan() * 0.5, range(SAVES), x),
    "fresh of these": lambda x: functools.reduce(lambda y, _: y.sin() * 0.5 + y * 0.5, range(SAVES), x),
    "leaf": lambda x: sum(x.sin() for _ in range(SAVES)),
}


def save(function, ones, context):
    x = ones.clone().requires_grad_()
    with context():
        y = function(x)
    y.backward(ones)
    return x.grad


def host(values, rounds):
    """Microseconds per saved tensor above no hook, by what is saved and by hooks."""
    hooks = {
        "no hook": contextlib.nullcontext,
        "identity pair": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        "int8": lambda: gradckpt.compress_saved({"codec": "int8", "min_numel": 0}),
    }
    ones, best = torch.ones(values), {}
    for kind, function in HOST.items():
        exact, *others = (save(function, ones, context) for context in hooks.values())
        for name, found in zip(("identity pair", "int8"), others, strict=True):
            error = float((found - exact).norm() / exact.norm())
            guards.at_most(f"{kind}, {name}: error", error, 0.5 if name == "int8" else 0.0, "that of its format")
    for _ in range(rounds):
        for kind, function in HOST.items():
            for name, context in hooks.items():
                seconds = timing.seconds(functools.partial(save, function, ones, context), timing.clock_of(1))
                best[kind, name] = min(seconds, best.get((kind, name), seconds))
    for kind, name in best:
        guards.takes(f"{kind}, {name}", best[kind, name], best[kind, "no hook"], "the same step without hooks")
    above = {key: (best[key] - best[key[0], "no hook"]) / SAVES * 1e6 for key in best}
    for name in hooks:
        above["found again", name] = above["fresh and again", name] - above["fresh of these", name]
    rows = [
        [kind, *(f"{above[kind, name]:.1f}" for name in ("identity pair", "int8"))]
        for kind in ("fresh", "found again", "leaf")
    ]
    print_table(f"Host, us per saved tensor of {values} values", ["", "identity pair", "int8"], rows)


def functions(dtype, names):
    """Rows: a Function, the part of its bytes that int8 keeps, and the errors of both blocks."""
    most = {torch.float32: 0.30, torch.bfloat16: 0.55}[dtype]
    rows = []
    for twin in fused_functions.TWINS:
        if names and twin.name not in names:
            continue
        leaves = fused_functions.inputs(twin, dtype)
        reference, plain = fused_functions.step(twin.fused, leaves, None)
        found, kept = fused_functions.step(twin.fused, leaves, "int8")
        unfused, _ = fused_functions.step(twin.plain, leaves, None)
        of_unfused, _ = fused_functions.step(twin.plain, leaves, "int8")
        error, beside = (fused_functions.error(*pair) for pair in ((found, reference), (of_unfused, unfused)))
        guards.at_most(f"{twin}: bytes", kept / plain, most, "int8 and what stays exact")
        guards.at_most(f"{twin}: error", error, 1.5 * beside, "1.5 times that of the block without the Function")
        guards.at_least(f"{twin}: error", error, beside / 100, "a part of the same")
        rows.append([twin.package, twin.name, f"{kept / plain:.3f}", f"{error:.4f}", f"{error / beside:.2f}"])
    head = ["", "", "bytes, of plain", "error", "of the block without it"]
    print_table(f"Functions, int8, {str(dtype).removeprefix('torch.')}", head, rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    small_llama.add_options(parser)
    parser.add_argument("--host", action="store_true", help="measure the host's time per saved tensor instead")
    parser.add_argument("--functions", action="store_true", help="measure autograd Functions of libraries instead")
    o = small_llama.parse(parser, argv)
    if o.functions:
        torch.set_num_threads(1)
        print_head("compress_saved", facts())
        for dtype in (torch.float32, torch.bfloat16):
            functions(dtype, ["LigerSiLUMulFunction", "LigerRMSNormFunction"] if o.quick else None)
        return
    if o.host:
        torch.set_num_threads(1)
        print_head("compress_saved", facts())
        host(512, 3 if o.quick else 20 * o.repeat)
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

    check_bytes(o, {name: kept for name, kept, *_ in rows})
    ceiling = guards.Products(lambda: step(model, loss_of, nothing))
    times = {name: [] for name, *_ in rows}
    errors = {}
    for _ in range(o.repeat):
        for name, _, context, region in rows:
            handle = checkpointed(None if region == "None" else region) if region else None
            gradients = None

            def run(context=context):
                nonlocal gradients
                gradients = step(model, loss_of, context)

            times[name].append(timing.seconds(run, timing.clock_of(torch.get_num_threads())))
            errors[name] = ((gradients - exact).norm() / exact.norm()).item()
            guards.gradients(name, errors[name], lossy=name.endswith(("int8", "int4")))
            if handle is not None:
                handle.remove()
    for name, found in times.items():
        ceiling.check(f"{name}, step", min(found))
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
    print(ceiling)


def check_bytes(o, kept):
    plain = kept["none"]
    for name, found in kept.items():
        codec = next((c for c in ("int8", "int4") if name.endswith(c)), None)
        if name.startswith("checkpoint"):
            guards.at_least(f"{name}, bytes kept", found, small_llama.inputs_bytes(o, codec), "the layers' inputs")
        elif codec:
            bits = gradckpt.codecs.info(codec)["bits_per_value"]
            guards.at_least(f"{name}, bytes kept", found, plain * bits / 32, f"{bits:g} bits for each value")
            guards.check(found < plain, f"{name}: keeps as much as plain autograd, so nothing was compressed")
        else:
            guards.check(found == plain, f"{name}: {found:,} bytes are kept, and {plain:,} by plain autograd")


if __name__ == "__main__":
    main()
