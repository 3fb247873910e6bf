"""Memory and time of a Llama-shaped stack under several kinds of checkpoints, by number of tokens.

    python benchmarks/gpu_memory.py [--tokens 8k,32k]
        [--kinds none,torch,int8] [--layers 12] [--hidden 2048]

Decoder layers (RMSNorm, attention with rotary positions by torch's SDPA, SwiGLU) with random
bfloat16 weights, one sequence, one region per layer. Kept: what the forward leaves allocated, its
output among it, weights not. Peak: the most that torch's allocator had handed out during forward
and backward, weights and gradients included (the title gives them). Where memory runs out, OOM.
Time: of that one forward and backward, after a short sequence to warm up.

--device cpu: tiny, and both figures are those of gradckpt.stats(), payloads alone.

Checked: gradients are finite and exact ones equal, payloads have the bytes of their format, nothing
keeps less than its layers' inputs, and no step is faster than its matrix products.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import guards
import machine
import timing
import torch
import torch.utils.checkpoint
from torch.nn import functional

import gradckpt

KINDS = ("none", "torch", "raw", "int8", "int4")
TITLES = {"none": "no checkpointing", "torch": "torch's checkpointing"}
TOKENS = ("8k", "16k", "32k", "64k", "128k")
HEAD = 128
GIB = 2**30
LEAST = 64  # tokens
Result = dict[str, Any]


# ---- model ----


def rotary(tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [tokens, HEAD]."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD, 2, device=device) / HEAD)
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    angle = torch.cat([angle, angle], 1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Layer(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 8 // 3 // 128 * 128
        self.heads = hidden // HEAD
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, HEAD)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Stack(torch.nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(hidden)

    def forward(self, ids: torch.Tensor, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.embedding(ids)
        cos, sin = rotary(ids.shape[1], str(ids.device), x.dtype)
        for layer in self.layers:
            x = call(layer, x, cos, sin)
        return self.norm(x)


def caller(kind: str) -> Callable[..., torch.Tensor]:
    """How a layer is called."""
    if kind == "none":
        return lambda layer, *args: layer(*args)
    if kind == "torch":
        return lambda layer, *args: torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)
    return lambda layer, *args: gradckpt.checkpoint(layer, *args, compress=kind)


# ---- measuring ----


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch's own error, or what a library that allocates for itself says."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def one_step(model: Stack, ids: torch.Tensor, kind: str) -> Result:
    cuda = ids.is_cuda
    gradckpt.stats.reset()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    payloads = kept = 0

    def run() -> None:
        nonlocal payloads, kept
        y = model(ids, caller(kind))
        if cuda:
            torch.cuda.synchronize()  # flags, too
        payloads = gradckpt.stats()["live_bytes"]
        kept = torch.cuda.memory_allocated() - before if cuda else payloads
        y.backward(torch.ones_like(y))
        if cuda:
            torch.cuda.synchronize()

    seconds = timing.seconds(run)
    check(model, ids.numel(), kind, payloads, kept if cuda else None)
    stats = gradckpt.stats()
    peak = torch.cuda.max_memory_allocated() if cuda else stats["peak_live_bytes"]
    plain = not cuda and kind in TITLES
    return {
        "kept": None if plain else kept,
        "peak": None if plain else peak,
        "s": seconds,
        "ratio": stats["ratio"],
    }


def check(model: Stack, tokens: int, kind: str, payloads: int, kept: int | None) -> None:
    """The bytes of a step by arithmetic, and that it made gradients."""
    values = len(model.layers) * tokens * model.embedding.embedding_dim
    bits = 16 if kind in TITLES else gradckpt.codecs.info(kind)["sizes"]["bfloat16"][0]
    wanted = 0 if kind in TITLES else values * bits / 8
    what = f"{kind}, {tokens:,} tokens"
    guards.check(payloads == wanted, f"{what}: {payloads:,} bytes of payloads; arithmetic says {wanted:,.0f}")
    if kept is not None:
        guards.at_least(f"{what}: bytes kept", kept, values * bits / 8, "the layers' inputs")
    finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    guards.check(finite, f"{what}: a gradient is missing or not finite")


def ceiling_of(model: Stack, device: str) -> guards.Products:
    """Of a step of :data:`LEAST` tokens; longer ones have more products a token."""
    ids = torch.zeros(1, LEAST, dtype=torch.long, device=device)

    def run() -> None:
        model(ids, caller("none")).sum().backward()

    found = guards.Products(run, device, torch.bfloat16)
    model.zero_grad(set_to_none=True)
    return found


def measure(model: Stack, tokens: int, kind: str, device: str) -> Result:
    """{"oom": True} where memory runs out."""
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    oom = False
    result: Result = {}
    try:
        result = one_step(model, ids, kind)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        oom = True  # the error's traceback holds the step's tensors: leave the handler before cleaning up
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"kind": kind, "tokens": tokens, "oom": oom, **result}


def build(options: argparse.Namespace) -> Stack:
    torch.manual_seed(0)
    with torch.device(options.device):
        return Stack(options.layers, options.hidden).to(torch.bfloat16).train()


def measure_all(model: Stack, options: argparse.Namespace) -> list[Result]:
    results = []
    spent = 0.0
    with machine.progress(len(options.tokens) * len(options.kinds)) as step:
        if options.device == "cuda":
            for kind in options.kinds:  # libraries load, kernels are chosen
                measure(model, 1024, kind, options.device)
        for tokens in options.tokens:
            started = time.perf_counter()
            for kind in options.kinds:
                step(f"{kind}, {tokens} tokens")
                results.append(measure(model, tokens, kind, options.device))
            last = time.perf_counter() - started
            spent += last
            if tokens != options.tokens[-1] and spent + 4 * last > options.seconds:  # attention is quadratic
                print(f"more than {tokens} tokens would take beyond --seconds {options.seconds:g}: not measured")
                break
    return results


# ---- what is shown ----


def cell(result: Result, key: str, unit: float, digits: int) -> str:
    if result["oom"]:
        return "OOM"
    return "-" if result[key] is None else f"{result[key] / unit:.{digits}f}"


def show(results: list[Result], model: Stack, options: argparse.Namespace) -> None:
    weights = sum(p.nbytes for p in model.parameters())
    table = machine.print_markdown if options.markdown else machine.print_table
    sizes = list(dict.fromkeys(r["tokens"] for r in results))
    found = {(r["tokens"], r["kind"]): r for r in results}
    shape = f"{options.layers} layers x {options.hidden}; weights {weights / GIB:.2f} GiB, gradients as much"
    cells = []
    for kind in options.kinds:
        for tokens in sizes:
            r = found[tokens, kind]
            torchs = found.get((tokens, "torch"), {"oom": True})
            less = None if r["oom"] or torchs["oom"] or not torchs["peak"] else r["peak"] / torchs["peak"]
            cells.append(
                [
                    TITLES.get(kind, f"gradckpt {kind}"),
                    f"{tokens:,}",
                    cell(r, "kept", GIB, 2),
                    cell(r, "peak", GIB, 2),
                    "-" if less is None else f"{less:.2f}x",
                    cell(r, "s", 1, 2),
                ]
            )
    table(shape, ["checkpoints", "tokens", "kept GiB", "peak GiB", "of torch's", "s"], cells)


def count(text: str) -> int:
    """8k is 8192."""
    try:
        n = int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    except ValueError:
        n = 0
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 8192 or 8k")
    return n


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machine.add_device(parser)
    parser.add_argument(
        "--tokens",
        type=lambda text: [count(word) for word in text.split(",")],
        help=f"comma-separated, ascending (default {','.join(TOKENS)})",
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="comma-separated: none, torch, or a codec (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, help="(12)")
    parser.add_argument("--hidden", type=int, help=f"a multiple of {HEAD} (2048)")
    parser.add_argument("--seconds", type=float, default=150, help="do not start what ends later (default %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="a table in Markdown, as docs/performance.md has it")
    options = parser.parse_args(argv)
    tiny = options.device == "cpu"
    options.tokens = options.tokens or [count(word) for word in (("64", "128") if tiny else TOKENS)]
    options.layers = options.layers or (2 if tiny else 12)
    options.hidden = options.hidden or (HEAD if tiny else 2048)
    taking = [c for c in gradckpt.codecs.names() if "bfloat16" in gradckpt.codecs.info(c)["dtypes"]]
    machine.choose(parser, options, "kinds", [*TITLES, *taking])
    if options.layers < 1 or options.hidden < 1 or options.hidden % HEAD:
        parser.error(f"--layers is 1 or more, --hidden a multiple of {HEAD}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    machine.require(options.device, "gpu_memory")
    found = machine.facts(options.device)
    machine.print_head("memory of forward and backward, bfloat16, one sequence", found)
    model = build(options)
    ceiling = ceiling_of(model, options.device)
    results = measure_all(model, options)
    for r in results:
        if not r["oom"]:
            least = ceiling.seconds * r["tokens"] / LEAST
            guards.takes(f"{r['kind']}, {r['tokens']:,} tokens", r["s"], least, f"{ceiling.words}, by tokens")
    print(f"{ceiling}, for each {LEAST} tokens")
    show(results, model, options)
    setting = {"layers": options.layers, "hidden": options.hidden}
    machine.print_json({"benchmark": "gpu_memory", **found, **setting, "rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
