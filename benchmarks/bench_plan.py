"""A plan beside a real step of 2 and 3 layers, scaled to 32 layers by arithmetic.

    python benchmarks/bench_plan.py [--tokens 32768 --layers 32]

A Llama of a quarter of the 8B model's width, with random bfloat16 weights and PEFT's LoRA of rank
16 on all linear layers, under autocast that casts as CUDA's; setting int8. The peak of a real step
at two numbers of layers and two LENGTHS gives what a layer and a token need, and so the peak at the
full size. The plan simulates the full model. Both count the CPU's kernels, which are what ran;
those of CUDA save other tensors (gradckpt/_planning/kernels.py).

Checked: a layer keeps at least its input's payload for each token, plan and scaled step are no more
than 5 % apart, and neither is below all checkpoints by arithmetic.
"""

import argparse
import json
import os
import tempfile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import guards
import peft
import torch
import transformers
from machine import add_quick, allow_old_name, facts, print_head, print_table

import gradckpt
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.kernels import cuda_autocast
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import READY

INT8 = next(setting for setting in READY if setting.name == "int8")
#: So long that a layer's checkpoint is larger than its adapters' gradients, as at the full size.
LAYERS, LENGTHS = (2, 3), (1536, 2048)
#: Of the model: its width, its words.
WIDTH, WORDS = 1024, 32064
APART = 0.05


def config_of(layers, width, words):
    return transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )


def plan_of(layers, loss, size):
    """The plan of the simulated model, from a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**config_of(layers, *size).to_dict(), "architectures": ["LlamaForCausalLM"]}, file, default=str)
        return ConfigModel(path, lora="r=16", loss=loss)


def planned_peak(layers, tokens, loss, size):
    source = plan_of(layers, loss, size)
    with INT8.active(source.model):
        blocks = source.model.model.layers
        return trace_step(source.model, lambda _: source.run(tokens), blocks=list(blocks)).peak()


def measured_peaks(layers, loss, size):
    """The peak of a real step for each length."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config_of(layers, *size)).to(torch.bfloat16)
    lora = peft.LoraConfig(r=16, target_modules="all-linear")
    model = peft.get_peft_model(base, lora).train()
    model.enable_input_require_grads()

    def run(**batch):
        return model(**batch).loss

    if loss != "model":
        source = plan_of(layers, loss, size)
        source.model, source._head = base, base.lm_head
        run = source._without_logits

    def step(tokens):
        ids = torch.randint(0, size[1], (1, tokens))
        with cuda_autocast():
            with torch.autocast("cpu", torch.bfloat16):
                result = run(input_ids=ids, labels=ids)
            result.backward()

    peaks = []
    with INT8.active(base):
        step(LENGTHS[0])  # lazy buffers
        for tokens in LENGTHS:
            model.zero_grad()
            with gradckpt.track_memory() as memory:
                step(tokens)
            peaks.append(memory.peak)
    return peaks


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    add_quick(parser)
    o = parser.parse_args(argv)
    allow_old_name()
    losses, size = ("model", "liger"), (WIDTH, WORDS)
    if o.quick:
        o.tokens, o.layers, losses, size = 4096, 4, ("liger",), (256, 2048)
    payload = size[0] * gradckpt.codecs.info("int8")["bits_per_value"] / 8
    transformers.utils.logging.set_verbosity_error()
    print_head("plan, beside a small real step that is scaled", facts())
    table = []
    few, short = LAYERS[0], LENGTHS[0]
    for loss in losses:
        peaks = [measured_peaks(layers, loss, size) for layers in LAYERS]
        # peak = fixed + layers * per_layer + tokens * (per_token + layers * checkpoint)
        slopes = [(last - first) / (LENGTHS[1] - short) for first, last in peaks]
        checkpoint = slopes[1] - slopes[0]
        per_token = slopes[0] - few * checkpoint
        at_no_token = [first - short * slope for (first, _), slope in zip(peaks, slopes, strict=True)]
        per_layer = at_no_token[1] - at_no_token[0]
        fixed = at_no_token[0] - few * per_layer
        scaled = fixed + o.layers * per_layer + o.tokens * (per_token + o.layers * checkpoint)
        planned = planned_peak(o.layers, o.tokens, loss, size)
        guards.at_least(f"{loss} loss: bytes a token and layer", checkpoint, payload, "its input in int8")
        floor = o.layers * o.tokens * payload
        for what, found in (("the scaled step", scaled), ("the plan", planned.size)):
            guards.at_least(f"{loss} loss: bytes of {what}", found, floor, "all checkpoints")
        apart = abs(planned.size / scaled - 1)
        guards.at_most(f"{loss} loss: plan and scaled step are apart by", apart, APART, "what is believable")
        table.append(
            [
                loss,
                f"{checkpoint:,.0f}",
                f"{per_token:,.0f}",
                f"{(fixed + o.layers * per_layer) / 2**20:.1f}",
                f"{scaled / 2**30:.3f}",
                f"{planned.size / 2**30:.3f}",
                f"{planned.size / scaled - 1:+.2%}",
                planned.position,
            ]
        )
    head = ["loss", "B/token/layer", "B/token", "rest, MiB", "scaled, GiB", "plan, GiB", "apart", "peak at"]
    print_table(f"int8: {o.layers} layers and {o.tokens:,} tokens, from {LAYERS} and {LENGTHS}", head, table)
    print(f"least by arithmetic: {payload:,.0f} B/token/layer, {o.layers * o.tokens * payload / 2**30:.3f} GiB")


if __name__ == "__main__":
    main()
