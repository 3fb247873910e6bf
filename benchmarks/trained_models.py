"""Small models trained for a few hundred steps, their layer inputs,
and what a codec does to their gradients.

    import trained_models
    trained_models.boundaries("llama")  # bf16 layer inputs [tokens, hidden] of a held-out batch
    trained_models.gradient_error("llama", round_trip)  # round_trip: bf16 tensor -> bf16 tensor

Training is plain fp32 on the CPU. The states are kept in build/trained_models, so that only the
first call trains (minutes); `python benchmarks/trained_models.py` trains whatever is missing.

The gradients compared: the stream between the layers is rounded to bf16 in the forward, all else is
fp32; the backward runs each layer again from its input (exact) or from round_trip(input). Both
start from the same bf16 values and the same loss, so their difference is the codec's alone.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import inspect
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import train_llama
import transformers

FOLDER = Path(__file__).resolve().parent.parent / "build" / "trained_models"
BATCHES = 3  # held-out batches over which gradients are compared
#: A parameter with less than this share of the gradient's norm has no gradient but rounding noise:
#: the keys' biases, which softmax ignores.
NO_GRADIENT = 1e-6
OUTLIERS, OUTLIER_SIZE = 4, 20.0  # channels of 256, and their factor

Batch = dict[str, torch.Tensor]
RoundTrip = Callable[[torch.Tensor], torch.Tensor]
Tick = Callable[[str, int, float], None]  # model, steps done, loss


class GradientError(NamedTuple):
    relative: float  # L2 over all parameters, mean over the batches
    cosine: float  # over all parameters, worst batch
    worst: float  # of one parameter, worst batch
    parameter: str


# ---- data: the seed alone decides what is in a batch; negative seeds draw from what is held out


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    return train_llama.read_text()


def windows(seed: int, seq: int, batch: int) -> torch.Tensor:
    return train_llama.take(text()[seed < 0], argparse.Namespace(seq=seq, batch=batch), seed)


def next_byte(seed: int) -> Batch:
    ids = windows(seed, 256, 4)
    return {"input_ids": ids, "labels": ids}


def masked_bytes(seed: int) -> Batch:
    """15 % of the bytes are hidden behind token 256 and asked for. Short windows:
    they are learned in few steps."""
    ids = windows(seed, 16, 64)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    return {"input_ids": ids.masked_fill(hidden, 256), "labels": ids.masked_fill(~hidden, -100)}


#: Rows of digits 0 to 9, 5 x 7 dots.
FONT = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""


@functools.cache
def glyphs() -> torch.Tensor:
    rows = [[[c == "#" for c in digit] for digit in row.split()] for row in FONT.split("\n") if row]
    return torch.tensor(rows, dtype=torch.float32).transpose(0, 1)[:, None]  # [10, 1, 7, 5]


def digits(seed: int) -> Batch:
    """128 noisy digits of 24 x 24 pixels, turned, stretched and shifted at random."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (128,), generator=g)
    turn = 0.3 * torch.randn(128, generator=g)
    grow = torch.exp(0.15 * torch.randn(128, 2, generator=g)) * torch.tensor([2.4, 1.7])
    shift = 0.4 * torch.randn(128, 2, 1, generator=g)
    rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], -1).view(-1, 2, 2)
    grid = torch.nn.functional.affine_grid(
        torch.cat([rotation * grow[:, :, None], shift], -1), [128, 1, 24, 24], align_corners=False
    )
    images = torch.nn.functional.grid_sample(glyphs()[labels], grid, align_corners=False)
    return {"pixel_values": images + 0.15 * torch.randn(images.shape, generator=g), "labels": labels}


# ---- models


@dataclass(frozen=True)
class Model:
    about: str
    make: Callable[[], torch.nn.Module]
    layers: str  # the path of the list of layers
    batch: Callable[[int], Batch]
    steps: int
    lr: float
    after: str = ""  # the model this one is made of, by scaling channels and fine-tuning


def llama(layers: int = 6, hidden: int = 128) -> torch.nn.Module:
    return train_llama.build(argparse.Namespace(layers=layers, hidden=hidden, seq=256, seed=0))


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    # Nor a cache: a block that runs again would attend to its keys twice.
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=256, n_embd=256, n_layer=6, n_head=8, bos_token_id=0, eos_token_id=0, **none
        )
    )


ENCODER = {"num_hidden_layers": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=257,
            hidden_size=256,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=16,
            initializer_range=0.05,
            **ENCODER,
        )
    )


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=24,
            patch_size=4,
            num_channels=1,
            hidden_size=128,
            num_attention_heads=4,
            intermediate_size=512,
            num_labels=10,
            **ENCODER,
        )
    )


MODELS = {
    "llama": Model("6 x 128, 120 steps", llama, "model.layers", next_byte, 120, 1e-3),
    "llama-outliers": Model(
        f"the same, {OUTLIERS // 2} of 128 channels x {OUTLIER_SIZE:g}, then 50 steps",
        llama,
        "model.layers",
        next_byte,
        50,
        1e-4,
        "llama",
    ),
    "llama-wide": Model("8 x 256, 400 steps", lambda: llama(8, 256), "model.layers", next_byte, 400, 1e-3),
    "llama-wide-outliers": Model(
        f"the same, {OUTLIERS} of 256 channels x {OUTLIER_SIZE:g}, then 50 steps",
        lambda: llama(8, 256),
        "model.layers",
        next_byte,
        50,
        1e-4,
        "llama-wide",
    ),
    "gpt2": Model("6 x 256, 120 steps", gpt2, "transformer.h", next_byte, 120, 1e-3),
    "bert": Model("masked bytes, 6 x 256, 300 steps", bert, "bert.encoder.layer", masked_bytes, 300, 4e-4),
    "vit": Model("drawn digits, 6 x 128, 250 steps", vit, "vit.layers", digits, 250, 2e-3),
}


def layers_of(name: str, model: torch.nn.Module) -> torch.nn.ModuleList:
    return model.get_submodule(MODELS[name].layers)


def fit(model: torch.nn.Module, recipe: Model, tick: Callable[[int, float], None]) -> None:
    optimizer, schedule = train_llama.optimizer_of(model, recipe.steps, recipe.lr)
    torch.manual_seed(0)
    for step in range(recipe.steps):
        optimizer.zero_grad()
        loss = model(**recipe.batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tick(step + 1, loss.item())


@torch.no_grad()
def scale_channels(name: str, model: torch.nn.Module) -> None:
    """A few channels of a Llama's stream become OUTLIER_SIZE times as large on every token.

    What writes them is scaled; the norms' gains give back that factor and the change of the rms, as
    measured on one batch, so that the function stays nearly the same.
    """
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    width = model.config.hidden_size
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(5))[: OUTLIERS * width // 256]
    factor = torch.ones(width)
    factor[chosen] = OUTLIER_SIZE
    change: dict[torch.nn.Module, torch.Tensor] = {}

    def note(norm: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        change[norm] = (args[0] * factor).pow(2).mean(-1).sqrt().div(args[0].pow(2).mean(-1).sqrt()).mean()

    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    model(**MODELS[name].batch(0))
    for hook in hooks:
        hook.remove()
    for norm in norms:
        norm.weight *= change[norm] / factor
    model.get_input_embeddings().weight *= factor
    for layer in layers_of(name, model):
        layer.self_attn.o_proj.weight *= factor[:, None]
        layer.mlp.down_proj.weight *= factor[:, None]


def state_file(name: str, folder: Path) -> Path:
    """The name says what the state depends on: all of this file above, the Llama,
    the text, versions."""
    facts = [Path(__file__).read_text().partition("def state_file")[0], len(text()[0])]
    facts += [inspect.getsource(f) for f in (train_llama.build, train_llama.take, train_llama.optimizer_of)]
    facts += [torch.__version__, transformers.__version__]
    return folder / f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}.pt"


def load(name: str, tick: Tick = lambda name, step, loss: None, folder: Path = FOLDER) -> torch.nn.Module:
    """The trained model; trains it where its state is not yet in the folder.
    A second process waits for the first."""
    recipe = MODELS[name]
    model = recipe.make().train()
    file = state_file(name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            model.load_state_dict(torch.load(file, weights_only=True))
            return model
        if recipe.after:
            model.load_state_dict(load(recipe.after, tick, folder).state_dict())
            scale_channels(name, model)
        fit(model, recipe, functools.partial(tick, name))
        part = file.with_suffix(".part")
        torch.save(model.state_dict(), part)
        part.replace(file)
    return model


# ---- boundaries


class Recomputed(torch.autograd.Function):
    """A layer that keeps round_trip(x) alone and runs again from it in backward."""

    @staticmethod
    def forward(ctx, x, layer, round_trip):
        ctx.layer = layer
        rounded = x.bfloat16()
        ctx.kept = round_trip(rounded)
        return layer(rounded.float())

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.kept.float().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        y.backward(gradient)
        return x.grad, None, None


@contextmanager
def rebuilt(layers: torch.nn.ModuleList, round_trip: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within, every layer's input is rounded to bf16, and its backward starts from
    round_trip(number, input)."""
    for number, layer in enumerate(layers):
        plain = layer.forward

        def forward(x, *args, plain=plain, number=number, **kwargs):
            run = lambda x: plain(x, *args, **kwargs)  # noqa: E731
            return Recomputed.apply(x, run, functools.partial(round_trip, number))

        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def gradients(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.double().flatten() for name, p in model.named_parameters()}


def held_out(name: str, number: int) -> Batch:
    return MODELS[name].batch(-1 - number)


@functools.cache
def trained(name: str) -> torch.nn.Module:
    return load(name, print_step)


@functools.cache
def exact(name: str, number: int) -> dict[str, torch.Tensor]:
    model = trained(name)
    with rebuilt(layers_of(name, model), lambda layer, x: x):
        return gradients(model, held_out(name, number))


@functools.cache
def boundaries(name: str) -> list[torch.Tensor]:
    """The layers' inputs, bf16 [tokens, hidden], for the first held-out batch."""
    seen: list[torch.Tensor] = []

    def keep(layer: int, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.flatten(0, -2).clone())
        return x

    model = trained(name)
    with torch.no_grad(), rebuilt(layers_of(name, model), keep):
        model(**held_out(name, 0))
    return seen


def compare(pairs: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> GradientError:
    """Of (gradients, exact gradients), one pair for each batch."""
    relative, cosines, worst = [], [], []
    for got, want in pairs:
        both = [torch.cat(list(g.values())) for g in (got, want)]
        norm = both[1].norm()
        relative.append(((both[0] - both[1]).norm() / norm).item())
        cosines.append(torch.cosine_similarity(*both, dim=0).item())
        named = [n for n in want if want[n].norm() > NO_GRADIENT * norm]
        worst += [(torch.cosine_similarity(got[n], want[n], dim=0).item(), n) for n in named]
    return GradientError(statistics.fmean(relative), min(cosines), *min(worst))


def layered_gradient_error(name: str, round_trip: Callable[[int, torch.Tensor], torch.Tensor]) -> GradientError:
    """gradient_error with a round trip that is told the layer's number."""
    model = trained(name)
    pairs = []
    for number in range(BATCHES):
        want = exact(name, number)
        with rebuilt(layers_of(name, model), round_trip):
            pairs.append((gradients(model, held_out(name, number)), want))
    return compare(pairs)


def gradient_error(name: str, round_trip: RoundTrip) -> GradientError:
    return layered_gradient_error(name, lambda layer, x: round_trip(x))


def autocast_floor(name: str) -> GradientError:
    """bf16 autocast against fp32, boundaries in whatever each makes of them."""
    model, pairs = trained(name), []
    for number in range(BATCHES):
        want = gradients(model, held_out(name, number))
        with torch.autocast("cpu", torch.bfloat16):
            pairs.append((gradients(model, held_out(name, number)), want))
    return compare(pairs)


def rounding_floor(name: str) -> GradientError:
    """Boundaries rounded to bf16 against fp32 boundaries, fp32 maths in both."""
    model = trained(name)
    return compare([(exact(name, n), gradients(model, held_out(name, n))) for n in range(BATCHES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(MODELS)}")
    names = parser.parse_args().models or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(MODELS)}")
    for name in names:
        load(name, print_step)
        print(f"{name}: {state_file(name, FOLDER)}", flush=True)


def print_step(name: str, step: int, loss: float) -> None:
    if step % 25 == 0:
        print(f"{name:20} {step:4}/{MODELS[name].steps} loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
