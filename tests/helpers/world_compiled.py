"""torch's engines under torch.compile: what each rank does."""

import functools

import torch
from world_torch import Block, compare, ddp, fsdp1, fsdp2, train

#: The engine, what is compiled, and whether that holds the regions:
#: then their payloads are the graphs'.
CASES = {
    "ddp": (ddp, "model", True),
    "fsdp1": (fsdp1, "model", True),
    "fsdp1 outside": (functools.partial(fsdp1, inside=False), "model", False),  # the graph breaks in each region
    "fsdp2": (fsdp2, "model", True),
    "fsdp2 blocks": (fsdp2, "blocks", False),
}


def compiled(make, where, how):
    model = make(how)
    for module in [model] if where == "model" else [m for m in model.modules() if isinstance(m, Block)]:
        module.compile(backend="aot_eager")
    return model


def run(make, where, how):
    torch._dynamo.reset()
    return train(functools.partial(compiled, make, where), how)


def examine(make, where):
    stock, found = run(make, where, "torch"), {}
    for how in ("None", "int8"):
        mine = run(make, where, how)
        found[how] = {
            **compare(mine["gradients"], stock["gradients"]),
            "same losses": mine["losses"] == stock["losses"],
            **{key: mine["stats"][key] for key in ("regions", "compressed", "eligible", "compiled_tensors")},
            "bits": 8 * mine["stats"]["compiled_bytes_out"] / max(1, mine["stats"]["compiled_bytes_in"] / 4),
        }
    return found


def compiled_engines():
    return {name: examine(make, where) for name, (make, where, _) in CASES.items()}
