"""A region recomputed in parts, and MLPs in tiles: what a step takes and needs.

    python benchmarks/bench_working_set.py ROW [--layers 4 --hidden 256 --tokens 1024 --repeat 15]

Rows: ``parts``: the time of each form beside its bound, which is that of whole recomputing and of
what the form runs once more, and its peak beside the plan's; ``tiles``: memory, time and error of
an MLP in 16 tiles, and the time of a step of four times the tokens; ``budgets``: the smallest
budgets of models, as bytes that a step adds, without parts, with them and with tiles.

Models: of the Hugging Face library, random weights, CPU, float32 where nothing else is said. One
thread, and the time of the processor.

Checked: parts have the gradients of no checkpointing to the bit, peaks are within 1 % of the plan,
hidden tensors in tiles take no more than 1/14, gradients in tiles differ by no more than their
dtype rounds, no step is faster than its matrix products, no smallest budget rises.
"""

import argparse
import contextlib
import functools
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import budget_models
import fused_functions
import guards
import machine
import small_llama
import timing
import torch
from budget_models import Case, Size, case_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import gradckpt
from gradckpt._planning import options
from gradckpt._planning.options import find_blocks
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import EXACT, NONE, setting_of
from gradckpt._training_step import step_of_batch

FORMS = ("sequential", "kept", "nested")
TILES = 16
MODELS = ("llama", "t5", "bert", "vit", "mixtral")
#: Of the error that a product of rounded values has: what tiles may differ by.
ROUNDINGS = 4


def gradients(case):
    case.step()
    found = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
    case.model.zero_grad()
    return found


def llama(o, tokens):
    model = small_llama.build(o).train()
    ids = torch.randint(0, small_llama.VOCABULARY, (1, tokens))
    return Case("llama", model, {"input_ids": ids, "labels": ids})


# ---- parts


class Again:
    """What is called in the layers of a step, to be called once more without grad."""

    def __init__(self, case):
        self.calls = {"norms": [], "attention": [], "mlp": []}
        kinds = {"input_layernorm": "norms", "post_attention_layernorm": "norms", "self_attn": "attention"}
        with contextlib.ExitStack() as stack:
            for name, module in case.model.named_modules():
                kind = kinds.get(name.rpartition(".")[2], "mlp" if name.endswith(".mlp") else None)
                if kind is not None:
                    hook = functools.partial(self.note, kind)
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            case.step()

    def note(self, kind, module, args, kwargs):
        self.calls[kind].append((module.forward, args, kwargs))

    def run(self, *kinds):
        with torch.no_grad():
            for kind in kinds:
                for forward, args, kwargs in self.calls[kind]:
                    forward(*args, **kwargs)


def parts(o):
    case = llama(o, o.tokens)
    model = case.model
    ceiling, again = guards.Products(case.step), Again(case)
    exact = gradients(case)
    settings = {"none": NONE, "whole": EXACT, "whole, to its end": setting_of({"compress": None, "early_stop": False})}
    settings |= {form: setting_of({"compress": None, "parts": form}) for form in FORMS}
    settings["nested, to its end"] = setting_of({"compress": None, "parts": "nested", "early_stop": False})
    #: form -> what it adds to which whole recomputing
    bounds = {
        "sequential": ("whole", "norms", "attention"),
        "kept": ("whole", "norms"),
        "nested": ("whole", "norms", "attention"),
        "nested, to its end": ("whole, to its end", "norms", "attention", "mlp"),
    }

    runs = {name: functools.partial(case.seconds, setting) for name, setting in settings.items()}
    found = {name: [] for name in (*runs, *again.calls)}
    for _ in range(o.repeat):
        for name, run in runs.items():
            found[name].append(run())
        for kind in again.calls:
            found[kind].append(timing.seconds(functools.partial(again.run, kind), timing.clock_of(1)))
    least = {name: min(each) for name, each in found.items()}
    for name in settings:
        ceiling.check(f"{name}, step", least[name])

    rows = []
    for name, setting in settings.items():
        with setting.active(model):
            error = fused_functions.error(gradients(case), exact)
            planned = (
                trace_step(
                    model, lambda batch: step_of_batch(model, batch)(), case.batch, blocks=list(find_blocks(model))
                )
                .peak()
                .size
            )
        guards.gradients(name, error, lossy=False)
        peak = case.peak(setting)
        guards.at_most(f"{name}: plan and step are apart by", abs(planned / peak - 1), 0.01, "what a plan promises")
        row = [name, f"{least[name] * 1e3:.1f}", f"{least[name] / least['whole']:.3f}"]
        if name in bounds:
            bound = sum(least[each] for each in bounds[name])
            row += [f"{bound * 1e3:.1f}", f"{least[name] / bound:.3f}"]
        else:
            row += ["", ""]
        rows.append([*row, f"{peak / 2**20:.2f}", f"{planned / peak - 1:+.2%}"])
    head = ["way", "step, ms", "of whole", "bound, ms", "of bound", "peak, MiB", "plan"]
    machine.print_table(f"parts: {o.layers} layers x {o.hidden}, {o.tokens} tokens", head, rows)
    print(ceiling)


# ---- tiles


class Live(TorchDispatchMode):
    """The most bytes of tensors that are there at a time, of those that operators make inside:
    of all of them, and of those with one of these numbers of values."""

    def __init__(self, values):
        super().__init__()
        self.values, self.known, self.most, self.most_hidden = values, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self.known = {key: each for key, each in self.known.items() if not each[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in {*given, *self.known}:
                storage = x.untyped_storage()
                size = storage.nbytes()
                hidden = size // x.element_size() in self.values
                self.known[storage._cdata] = StorageWeakRef(storage), size, hidden
        self.most = max(self.most, sum(size for _, size, _ in self.known.values()))
        self.most_hidden = max(self.most_hidden, sum(size for _, size, hidden in self.known.values() if hidden))
        return out


def mlp_of(o, dtype):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=o.hidden, intermediate_size=7 * o.hidden // 2)
    model = LlamaMLP(config).train().to(dtype)
    x, grad = (torch.randn(1, o.long, o.hidden).to(dtype) for _ in range(2))
    return model, x, grad


def step_of(model, x, grad):
    """Gradients are summed into those that exist, as in all steps but the first of some."""
    x = x.detach().requires_grad_()
    model(x).backward(grad)
    return x.grad


def tiles(o):
    tiles_of_an_mlp(o)
    tiles_of_a_step(o)


def tiles_of_an_mlp(o):
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model, x, grad = mlp_of(o, dtype)
        inner = model.config.intermediate_size
        values = {o.long * inner, o.long // TILES * inner}
        guards.check(
            o.long // TILES > o.hidden, "a tile must have more tokens than a weight has rows; pass a larger --long"
        )
        truth, *_ = mlp_of(o, torch.float64)
        truth.load_state_dict(model.state_dict())
        exact = [step_of(truth, x.double(), grad.double()), *(p.grad for p in truth.parameters())]
        least, live, errors = {}, {}, {}
        for tiled in (False, True):
            keywords = {"tiles": TILES} if tiled else {}
            with gradckpt.enable(model, None, modules=LlamaMLP, **keywords):
                step_of(model, x, grad)  # the first one runs the module on two tiles more
                model.zero_grad(set_to_none=False)
                errors[tiled] = fused_functions.error(
                    [step_of(model, x, grad), *(p.grad for p in model.parameters())], exact
                )
                with Live(values) as live[tiled]:
                    step_of(model, x, grad)
                clock = timing.clock_of(1)
                run = functools.partial(step_of, model, x, grad)
                least[tiled] = min(timing.seconds(run, clock) for _ in range(o.repeat))
        ceiling = guards.Products(run, dtype=dtype)
        ceiling.check(f"{dtype}: MLP in tiles", least[True])
        hidden = live[True].most_hidden / live[False].most_hidden
        name = str(dtype).removeprefix("torch.")
        guards.at_most(f"{name}: hidden tensors in tiles", hidden, 1 / 14, "16 tiles")
        guards.at_least(f"{name}: hidden tensors in tiles", hidden, 1 / 16, "16 tiles")
        guards.at_most(f"{name}: error in tiles", errors[True], ROUNDINGS * errors[False], "that in one piece")
        rows.append(
            [
                name,
                f"1/{1 / hidden:.1f}",
                f"1/{live[False].most / live[True].most:.2f}",
                f"{least[True] / least[False]:.3f}",
                f"{errors[False]:.2e}",
                f"{errors[True]:.2e}",
            ]
        )
    head = ["MLP in 16 tiles", "hidden tensors", "all tensors", "time", "error in one piece", "in tiles"]
    machine.print_table(f"tiles: {o.hidden} -> {7 * o.hidden // 2}, {o.long} tokens", head, rows)


def tiles_of_a_step(o):
    case = llama(o, 4 * o.tokens)
    model = case.model
    ceiling = guards.Products(case.step)
    rows, exact, least, peaks = [], gradients(case), {}, {}
    ways = {
        name: setting_of({"compress": None, **more})
        for name, more in (
            ("whole", {}),
            ("16 tiles", {"tiles": TILES}),
            ("in parts, 16 tiles", {"parts": "sequential", "tiles": TILES}),
        )
    }
    for name, setting in ways.items():
        with setting.active(model):
            error = fused_functions.error(gradients(case), exact)
        guards.at_most(f"{name}: error", error, 1e-5, "float32's roundings")
        peaks[name] = case.peak(setting), error
    for _ in range(o.repeat):
        for name, setting in ways.items():
            with setting.active(model):
                case.step()  # each setting looks at its modules anew
                found = timing.seconds(case.step, timing.clock_of(1))
            least[name] = min(found, least.get(name, found))
    for name, (peak, error) in peaks.items():
        ceiling.check(f"{name}, step", least[name])
        rows.append(
            [
                name,
                f"{least[name] * 1e3:.1f}",
                f"{least[name] / least['whole']:.3f}",
                f"{peak / 2**20:.2f}",
                f"{error:.1e}",
            ]
        )
    head = ["way", "step, ms", "of whole", "peak, MiB", "gradients apart"]
    machine.print_table(f"tiles: {o.layers} layers x {o.hidden}, {4 * o.tokens} tokens", head, rows)
    print(ceiling)


# ---- budgets


def budgets(o):
    size = Size(o.hidden, o.tokens, 1, o.layers)
    rows = []
    for name in MODELS[: 1 if o.quick else None]:
        case = case_of(name, size)
        if case is None:
            continue

        def smallest(compress, tiles=None, parts=True, case=case):
            without = (
                contextlib.nullcontext() if parts else mock.patch.object(options, "have_parts", return_value=False)
            )
            with budget_models.balanced(case), without, mock.patch.object(options, "_SECONDS", 0.0):
                plan = case.plan("1TiB", compress=compress, tiles=tiles)
            return plan.smallest_budget - sum(plan.fixed.values())

        row = [name]
        for compress in (None, "int8"):
            before = smallest(compress, parts=False)
            after = smallest(compress)
            guards.at_most(f"{name}: smallest budget with parts", after, before, "that without")
            row += [f"{before / 2**20:.2f}", f"{after / 2**20:.2f} ({after / before - 1:+.0%})"]
            tiled = None
            with contextlib.suppress(ValueError):  # no MLP that is a module
                tiled = smallest(compress, tiles=TILES)
                guards.at_most(f"{name}: smallest budget with tiles", tiled, after, "that without")
            row.append("" if tiled is None else f"{tiled / 2**20:.2f} ({tiled / before - 1:+.0%})")
        rows.append(row)
    head = ["smallest budget, MiB", "exact", "parts", "and tiles", "int8", "parts", "and tiles"]
    machine.print_table(f"budgets: {o.layers} layers x {o.hidden}, {o.tokens} tokens", head, rows)


ROWS = {each.__name__: each for each in (parts, tiles, budgets)}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("row", choices=ROWS)
    small_llama.add_options(parser)
    parser.set_defaults(tokens=1024, repeat=15)
    parser.add_argument("--long", type=int, default=32768, help="tokens of the MLP alone")
    o = small_llama.parse(parser, argv)
    if o.quick:
        o.layers, o.long = 2, 4096
    torch.set_num_threads(1)
    machine.keep_memory()
    budget_models.use_clock(timing.clock_of(1))
    machine.print_head(f"working set: {o.row}", machine.facts())
    ROWS[o.row](o)


if __name__ == "__main__":
    main()
