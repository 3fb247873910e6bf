"""Checkpointing under torch.compile: what the forward keeps, what a step takes,
what the gradients lose.

    python benchmarks/bench_compile.py [--backend inductor] [--layers 4 --hidden 256 --tokens 512]

A Llama of the Hugging Face library, random weights, float32, CPU, compiled with fullgraph=True: a
graph break would be an error. `kept` is what the forward leaves to its backward: bytes of
storages that cross from one to the other, weights apart, as outer saved-tensor hooks see them;
`payloads` are those that gradckpt encoded. Times are medians of one forward and backward,
compilation apart. `saved int8` is recompute=False, compiled alone: beside it stands the step of the
compiled model without checkpointing and the codec's time for the same payloads, which are made and
read one by one. Loss and error are against the plain model, uncompiled: absolute difference,
relative L2 distance of all gradients, smallest cosine of a parameter's.

Checked: exact ways have the gradients of no checkpointing (compiled: but for the compiler's own
rounding), payloads are as long as their format says, nothing keeps less than the layers' inputs.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import guards
import small_llama
import timing
import torch
from machine import facts, print_head, print_json, print_table, progress
from model_families import errors

import gradckpt


def torchs(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


#: name -> how checkpointing is turned on
KINDS = {
    "none": lambda model: None,
    "torch": torchs,
    "gradckpt None": functools.partial(gradckpt.enable, compress=None),
    "int8": functools.partial(gradckpt.enable, compress="int8"),
    "int8 fake-quantized": functools.partial(gradckpt.enable, compress={"codec": "int8", "fake_quantize": True}),
    "int4": functools.partial(gradckpt.enable, compress="int4"),
    "int8, save_matmuls:int8": functools.partial(gradckpt.enable, compress="int8", policy="save_matmuls:int8"),
    "saved int8": functools.partial(gradckpt.enable, compress="int8", recompute=False),
}
EXACT = ("none", "torch", "gradckpt None")
ROUNDING = 1e-5  # of a compiler, which reorders sums


def step(model, forward):
    model.zero_grad()
    loss = forward()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def codec_seconds(o, counted, payloads):
    """To encode and decode as many tensors, of as many bytes."""
    n, size = counted["compiled_tensors"], counted["compiled_bytes_out"]
    guards.check(0 < payloads <= size, f"{payloads:,} bytes of payloads, and {size:,} are counted, casts included")
    x = torch.randn(counted["compiled_bytes_in"] // 4 // n)

    def run():
        for _ in range(n):
            gradckpt.codecs.encode(x, "int8").decode()

    clock = timing.clock_of(torch.get_num_threads())
    return statistics.median(timing.seconds(run, clock) for _ in range(o.repeat))


def build(o, kind, compiled):
    """The model, and a function that returns its loss."""
    model = small_llama.build(o).train()
    KINDS[kind](model)
    function = torch.compile(model, backend=o.backend, fullgraph=True) if compiled else model
    ids = torch.randint(0, small_llama.VOCABULARY, (1, o.tokens), generator=torch.Generator().manual_seed(1))
    return model, lambda: function(input_ids=ids, labels=ids).loss


def beside_plain(o, payloads):
    """Seconds of a compiled step without checkpoints and with ``saved int8``, in turn, and those of
    the codec.
    """
    torch._dynamo.reset()
    gradckpt.stats.reset()
    runs = {kind: functools.partial(step, *build(o, kind, True)) for kind in ("none", "saved int8")}
    found = timing.rounds_of(runs, o.repeat)
    plain, saved = (timing.typical(found, lambda each, kind=kind: each[kind]) for kind in runs)
    return plain, saved, codec_seconds(o, gradckpt.stats(), payloads)


def measure(o, kind, compiled, exact, ceiling):
    torch._dynamo.reset()
    model, forward = build(o, kind, compiled)
    loss, grads = step(model, forward)
    kept = small_llama.kept(model, forward)
    state = torch.get_rng_state().nbytes  # the only other bytes that are saved
    payloads = [x for x in kept if x.dtype == torch.uint8 and x.nbytes != state]
    exact, ceiling = exact or (loss, grads), ceiling or guards.Products(lambda: step(model, forward))
    clock = timing.clock_of(torch.get_num_threads())
    times = [timing.seconds(lambda: step(model, forward), clock) for _ in range(o.repeat)]
    error, cosine, _ = errors(grads, exact[1])
    found = {"checkpoints": kind, "compiled": compiled, "kept": small_llama.nbytes(kept)}
    found |= {"payloads": small_llama.nbytes(payloads)}
    found |= {"step_s": statistics.median(times), "loss_difference": abs(loss - exact[0])}
    found |= {"gradient_error": error, "worst_cosine": cosine}
    ceiling.check(f"{kind}, step", min(times))
    check(o, found)
    return found, exact, ceiling


def check(o, found):
    kind, compiled = found["checkpoints"], found["compiled"]
    what = f"{'compiled' if compiled else 'eager'} {kind}"
    inputs = small_llama.inputs_bytes(o)
    if kind in EXACT:
        rounded = compiled and found["gradient_error"] <= ROUNDING
        guards.gradients(what, 0.0 if rounded else found["gradient_error"], lossy=False)
        guards.check(found["payloads"] == 0, f"{what}: {found['payloads']:,} bytes of payloads, and no codec")
        guards.at_least(f"{what}, bytes kept", found["kept"], inputs, "the layers' inputs")
        return
    guards.gradients(what, found["gradient_error"], lossy=True)
    if kind.startswith("saved"):
        guards.at_least(f"{what}, bytes kept", found["kept"], found["payloads"], "the payloads")
        return
    wanted = small_llama.inputs_bytes(o, kind[:4])
    if "save_matmuls" in kind and compiled:  # without the compiler, hooks do not see them
        # As wide as an input: q, o; half as wide: k, v; three times: gate, up. A graph keeps no
        # down: its sums are the next layer's input, and what the model's norm reads exact.
        half = o.hidden // 2
        wanted = 10 * wanted + 2 * o.layers * o.tokens * (half >= 64 and half % 128 != 0)  # a byte for each row of k, v
    guards.check(found["payloads"] == wanted, f"{what}: {found['payloads']:,} bytes of payloads, not {wanted:,.0f}")
    guards.at_least(f"{what}, bytes kept", found["kept"], wanted, "the payloads")


def row(found):
    return [
        "compiled" if found["compiled"] else "eager",
        found["checkpoints"],
        f"{found['kept'] / 2**20:.2f}",
        f"{found['payloads'] / 2**20:.2f}",
        f"{found['step_s'] * 1e3:.0f}",
        f"{found['loss_difference']:.1e}",
        f"{found['gradient_error']:.4f}",
        f"{found['worst_cosine']:.5f}",
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    small_llama.add_options(parser)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    o = small_llama.parse(parser, argv)
    kinds = list(KINDS)
    if o.quick:
        o.backend, kinds = "aot_eager", ["none", "int8", "int8, save_matmuls:int8", "saved int8"]
    torch._functorch.config.enable_autograd_cache = False  # what comes from it is not counted
    results, exact, ceiling = [], None, None
    with progress(2 * len(kinds) - 1) as advance:
        for compiled in (False, True):
            for kind in kinds:
                if kind.startswith("saved") and not compiled:
                    continue
                advance(f"{'compiled' if compiled else 'eager'} {kind}")
                found, exact, ceiling = measure(o, kind, compiled, exact, ceiling)
                results.append(found)
    print_head(f"torch.compile, backend {o.backend}", facts())
    columns = ["", "checkpoints", "kept, MiB", "payloads", "step, ms", "loss -", "gradient error", "worst cosine"]
    print_table(f"{o.layers} layers x {o.hidden}, 1 x {o.tokens} tokens", columns, [row(r) for r in results])
    kept, payloads = ([r[key] for r in results if r["compiled"]] for key in ("kept", "payloads"))
    plain, saved, codec = beside_plain(o, payloads[-1])
    print(
        f"saved int8, beside the compiled model without checkpointing: {kept[-1] / kept[0]:.3f} of its bytes; its step "
        f"{(saved - codec) / plain:.3f} of {plain * 1e3:.1f} ms, and {codec * 1e3:.1f} ms of the codec"
    )
    print(ceiling)
    print_json({**facts(), "backend": o.backend, "steps": results})


if __name__ == "__main__":
    main()
