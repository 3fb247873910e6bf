"""Host microseconds per checkpointed region, beside torch.utils.checkpoint in the same run.

Each case is a chain of small regions, so that what is measured is the machinery. Overhead is
forward + backward per region, less the same without checkpointing, less the recompute itself; the
recompute itself is the time that running the region again takes where a checkpoint runs it, in
backward, by a hook on the region's output (a run of the forward alone is cheaper: caches are warm
and its graph is not freed; the column "plain forward" subtracts that instead). All ways are timed
in turn, round by round; of the rounds the lower quartile is reported, since other processes only
ever add time. With one thread it is the time of the processor.

Checked: every way has the gradients of no checkpointing, int8's but for its error, and runs each
region twice (one that saves nothing once; one in a region twice, too, since the outer recompute
stops at the inner region's input). The ceiling is no checkpointing, whose work every way includes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import guards
import timing
import torch
from machine import add_quick, facts, print_head, print_json, print_table
from timing import Call, rounds_of, typical, with_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt

# ---- regions ----


class Keywords(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())

    def forward(self, x: torch.Tensor, **unused: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Sines(torch.nn.Module):
    """Saves one tensor an operator."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.n):
            x = torch.sin(x)
        return x


def tiny(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())


REGIONS: dict[str, Callable[[int], torch.nn.Module]] = {
    "empty": lambda width: torch.nn.Identity(),
    "tiny (Linear, ReLU)": tiny,
    "RNG used (Linear, Dropout)": lambda width: torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.Dropout(0.1)
    ),
    "nested": tiny,
    "1 saved tensor": lambda width: Sines(1),
    "10 saved tensors": lambda width: Sines(10),
    "4 keywords": Keywords,
}


def theirs(function: Any, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def ways_of(case: str) -> dict[str, Call]:
    tiny_int8: dict[str, Any] = {"codec": "int8", "min_numel": 0}
    int8 = gradckpt.CompressionConfig(**tiny_int8)
    ours = gradckpt.checkpoint
    ways: dict[str, Call]
    if case == "nested":
        ways = {
            "torch": lambda f, h: theirs(lambda x: theirs(f, x), h),
            "gradckpt": lambda f, h: ours(lambda x: ours(f, x), h, buffers="torch"),
        }
        return {"plain": lambda f, h: f(h), **ways}
    if case == "4 keywords":
        words: dict[str, Any] = {"mask": None, "positions": torch.arange(4), "use_cache": False, "scale": 1.0}
        return {
            "plain": lambda f, h: f(h, **words),
            "torch": lambda f, h: theirs(f, h, **words),
            "gradckpt": lambda f, h: ours(f, h, **words),
        }
    ways = {"plain": lambda f, h: f(h), "torch": theirs, "gradckpt": ours}
    if case.startswith("tiny"):
        ways["gradckpt int8"] = lambda f, h: ours(f, h, compress=int8)
        ways["gradckpt, closure"] = lambda f, h: ours(lambda x: f(x), h)
        ways["torch, no RNG"] = lambda f, h: theirs(f, h, preserve_rng_state=False)
        ways["gradckpt, no RNG"] = lambda f, h: ours(f, h, preserve_rng_state=False)
    return ways


# ---- timing ----


def step(layers: list[torch.nn.Module], x: torch.Tensor, call: Call) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a chain of regions."""
    h = x

    def forward() -> None:
        nonlocal h
        for layer in layers:
            h = call(layer, h)

    clock = timing.clock_of(torch.get_num_threads())
    return timing.seconds(forward, clock), timing.seconds(lambda: h.sum().backward(), clock)


def check_ways(case: str, ways: dict[str, Call], layers: list[torch.nn.Module], width: int) -> None:
    """Each way's gradients, and how often it runs a region."""
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    exact: list[torch.Tensor] = []
    torch.manual_seed(1)
    first, state = torch.randn(4, width), torch.get_rng_state()
    for name, call in ways.items():
        runs = 0
        hooks = [layer.register_forward_pre_hook(count) for layer in layers]
        torch.set_rng_state(state)  # dropout
        x = first.clone().requires_grad_()
        step(layers, x * 1, call)
        for hook in hooks:
            hook.remove()
        parameters = [p for layer in layers for p in layer.parameters()]
        found = [each.grad for each in (x, *parameters) if each.grad is not None]
        for p in parameters:
            p.grad = None
        exact = exact or found
        wrong = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)]).norm()
        error = float(wrong / torch.cat([b.flatten() for b in exact]).norm())
        guards.gradients(f"{case}, {name}", error, lossy=name.endswith("int8"))
        wanted = len(layers) * (1 if name == "plain" or case == "empty" else 2)
        guards.check(runs == wanted, f"{case}, {name}: {runs} runs of {len(layers)} regions, not {wanted}")


def measure(case: str, width: int, depth: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Way -> (forward, backward), microseconds per region."""
    torch.manual_seed(0)
    layers = [REGIONS[case](width) for _ in range(depth)]
    ways = ways_of(case)
    check_ways(case, ways, layers, width)
    ways |= {"hook": with_hook(ways["plain"], False), "again": with_hook(ways["plain"], True)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(rounds + 5):
        for name, call in ways.items():
            x = torch.randn(4, width, requires_grad=True) * 1
            took = step(layers, x, call)
            if round_ >= 5:
                times[name].append(took)
    for name in ways:
        least = {each: min(map(sum, times[each])) for each in ("plain", name)}
        guards.takes(f"{case}, {name}", least[name], least["plain"], "the same without checkpointing")
    quartile = {
        name: tuple(sorted(t[part] for t in took)[len(took) // 4] / depth * 1e6 for part in (0, 1))
        for name, took in times.items()
    }
    return {name: (forward, backward) for name, (forward, backward) in quartile.items()}


def overheads(case: str, times: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Way -> microseconds per region: forward, backward, and over the recompute,
    in both readings."""
    saves = case != "empty"
    again = times["again"][1] - times["hook"][1] if saves else 0.0
    once_more = times["plain"][0] if saves else 0.0
    rows = {}
    for name, (forward, backward) in times.items():
        if name in ("plain", "hook", "again"):
            continue
        over_forward, over_backward = forward - times["plain"][0], backward - times["plain"][1]
        rows[name] = {
            "forward_us": forward,
            "backward_us": backward,
            "over_forward_us": over_forward,
            "overhead_us": over_forward + over_backward - again,
            "over_plain_forward_us": over_forward + over_backward - once_more,
        }
    return rows


def run_cases(args: argparse.Namespace) -> tuple[list[list[str]], dict[str, Any]]:
    table, found = [], {}
    for case in REGIONS:
        times = measure(case, args.width, args.depth, args.rounds)
        rows = found[case] = overheads(case, times)
        for name, row in rows.items():
            peer = rows["torch, no RNG"] if "no RNG" in name else rows["torch"]
            ours = name.startswith("gradckpt")

            def share(key: str, row: dict[str, float] = row, peer: dict[str, float] = peer, ours: bool = ours) -> str:
                return f"{row[key] / peer[key]:.3f}" if ours else ""

            table.append(
                [case if name == "torch" else "", name, f"{row['forward_us']:.1f}", f"{row['backward_us']:.1f}"]
                + [f"{row['over_forward_us']:.1f}", share("over_forward_us")]
                + [f"{row['overhead_us']:.1f}", share("overhead_us"), share("over_plain_forward_us")]
            )
    for name in ("torch", "gradckpt"):
        ten, one = (found[f"{n} saved tensor{s}"][name]["overhead_us"] for n, s in ((10, "s"), (1, "")))
        found.setdefault("per extra saved tensor", {})[name] = (ten - one) / 9
    return table, found


# ---- a whole model ----


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return out


def transformer(layers: int, rounds: int) -> dict[str, float]:
    """Way -> milliseconds of a step (forward and backward) of a tiny transformer."""
    torch.manual_seed(0)
    width = 64
    blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))

    def one(call: Call, extra: bool = False) -> None:
        x = torch.randn(1, 8, width, requires_grad=True) * 1
        if extra:
            h = x
            for block in blocks:
                h = block(h)
        h = x
        for block in blocks:
            h = call(block, h)
        blocks.zero_grad()
        h.square().mean().backward()

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: one(lambda f, h: f(h)),
        "plain + one forward": lambda: one(lambda f, h: f(h), extra=True),
        "plain + each block again in backward": lambda: one(with_hook(lambda f, h: f(h), True)),
        "torch": lambda: one(theirs),
        "gradckpt": lambda: one(gradckpt.checkpoint),
    }
    found = rounds_of(ways, rounds, floor="plain")
    return {name: typical(found, lambda t, name=name: t[name]) * 1e3 for name in ways}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8, help="features of a region (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=50, help="regions in the chain (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=80, help="rounds, each way once (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="of the transformer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    add_quick(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.depth, args.rounds, args.layers = 5, 8, 2
    torch.set_num_threads(args.threads)

    table, found = run_cases(args)
    model = transformer(args.layers, max(args.rounds // 2, 5))
    machine = facts()
    if not args.json:
        print_head("host cost per checkpointed region", machine)
        columns = ["case", "", "forward us", "backward us", "over plain fwd", "of torch's", "overhead us", "of torch's"]
        print_table("", [*columns, "of torch's, plain forward"], table)
        slope = found["per extra saved tensor"]
        ours, peer = slope["gradckpt"], slope["torch"]
        print(f"per extra saved tensor: torch {peer:.2f} us, gradckpt {ours:.2f} us, {ours / peer:.3f} of torch's")
        rows = [[name, f"{ms:.2f}", f"{ms / model['torch']:.3f}"] for name, ms in model.items()]
        print_table(f"a step of a {args.layers}-layer tiny transformer", ["", "ms", "of torch's"], rows)
        for name in ("plain + one forward", "plain + each block again in backward"):
            print(f"gradckpt / ({name}): {model['gradckpt'] / model[name]:.3f}")
    print_json({"benchmark": "overhead", **machine, "us_per_region": found, "transformer_ms": model})


if __name__ == "__main__":
    main()
