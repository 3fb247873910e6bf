"""Checkpointing under torch.compile: what the forward keeps, what a step takes,
what the gradients lose.

    python benchmarks/bench_compile.py [--backend inductor] [--layers 4 --hidden 256 --tokens 512]

A Llama of the Hugging Face library, random weights, float32, CPU, compiled with fullgraph=True: a
graph break would be an error. `kept` is what the forward leaves to its backward: bytes of
storages that cross from one to the other, weights apart, as outer saved-tensor hooks see them;
`payloads` are those that gradckpt encoded. Times are medians of one forward and backward,
compilation apart. Loss and error are against the plain model, uncompiled: absolute difference,
relative L2 distance of all gradients, smallest cosine of a parameter's.
"""

import argparse
import functools
import statistics
import time

import torch
from machine import facts, print_head, print_json, print_table, progress
from transformers import LlamaConfig, LlamaForCausalLM

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
    "int8, save_attention:int8": functools.partial(gradckpt.enable, compress="int8", policy="save_attention:int8"),
}


def build(o):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=o.hidden,
        intermediate_size=3 * o.hidden,
        num_hidden_layers=o.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,  # or transformers logs while it is traced, which breaks the graph
    )
    return LlamaForCausalLM(config).train()


def kept_bytes(model, forward):
    """(All, payloads), each storage once; payloads are the only bytes that are saved."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen = {}

    def pack(x):
        seen[x.untyped_storage()._cdata] = x.detach()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    kept = [x for storage, x in seen.items() if storage not in weights]
    return [sum(x.untyped_storage().nbytes() for x in xs) for xs in (kept, [x for x in kept if x.dtype == torch.uint8])]


def step(model, forward):
    model.zero_grad()
    loss = forward()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compare(grads, exact):
    error = sum((grads[n] - g).square().sum() for n, g in exact.items()).sqrt()
    norm = sum(g.square().sum() for g in exact.values()).sqrt()
    cosines = (torch.cosine_similarity(grads[n].flatten(), g.flatten(), 0).item() for n, g in exact.items())
    return (error / norm).item(), min(cosines)


def measure(o, kind, compiled, exact):
    torch._dynamo.reset()
    model = build(o)
    KINDS[kind](model)
    function = torch.compile(model, backend=o.backend, fullgraph=True) if compiled else model
    ids = torch.randint(0, 1024, (1, o.tokens), generator=torch.Generator().manual_seed(1))

    def forward():
        return function(input_ids=ids, labels=ids).loss

    start = time.perf_counter()
    loss, grads = step(model, forward)
    first = time.perf_counter() - start
    kept, payloads = kept_bytes(model, forward)
    times = []
    for _ in range(o.repeat):
        start = time.perf_counter()
        step(model, forward)
        times.append(time.perf_counter() - start)
    exact = exact or (loss, grads)
    error, cosine = compare(grads, exact[1])
    found = {"checkpoints": kind, "compiled": compiled, "kept": kept, "payloads": payloads}
    found |= {"step_s": statistics.median(times), "first_s": first, "loss_difference": abs(loss - exact[0])}
    return found | {"gradient_error": error, "worst_cosine": cosine}, exact


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, value in (("layers", 4), ("hidden", 256), ("tokens", 512), ("repeat", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    o = parser.parse_args()
    results, exact = [], None
    with progress(2 * len(KINDS)) as advance:
        for compiled in (False, True):
            for kind in KINDS:
                advance(f"{'compiled' if compiled else 'eager'} {kind}")
                found, exact = measure(o, kind, compiled, exact)
                results.append(found)
    print_head(f"torch.compile, backend {o.backend}", facts())
    columns = ["", "checkpoints", "kept, MiB", "payloads", "step, ms", "loss -", "gradient error", "worst cosine"]
    print_table(f"{o.layers} layers x {o.hidden}, 1 x {o.tokens} tokens", columns, [row(r) for r in results])
    print_json({**facts(), "backend": o.backend, "steps": results})


if __name__ == "__main__":
    main()
