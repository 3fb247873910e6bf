"""What each rank does in the tests of accelerate and transformers."""

import functools

import model_families
import torch
import world_ranks
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import LlamaConfig, LlamaForCausalLM
from world_torch import COMPRESS, beside, clean, full_state, gradients
from worlds import RANK

import gradckpt
from gradckpt._models.regions import region_of

LAYERS = 3
BLOCK = "LlamaDecoderLayer"  # FSDP2 puts "FSDP" before it


def llama():
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train()


def is_layer(module):
    return type(module).__name__.endswith(BLOCK)


def wrap(model, how):
    """``enable``: through transformers' own hooks; the rest: wrappers."""
    way, _, codec = how.partition(" ")
    if way == "stock":
        model_families.turn_on(model, {"use_reentrant": False})
    elif way == "enable":
        gradckpt.enable(model, COMPRESS[codec])
    elif way == "wrap":
        gradckpt.compat.apply_activation_checkpointing(model, COMPRESS[codec], check_fn=is_layer)
    elif way == "apply":
        gradckpt.enable(model, COMPRESS[codec], modules="layer")
    return model


def plugin(version, flag=False):
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCK],
        activation_checkpointing=flag,
        use_orig_params=True if version == 1 else None,
        reshard_after_forward=None if version == 1 else True,
    )


def forget_device():
    AcceleratorState._reset_state()
    PartialState._reset_state()


def pretend_device():
    """accelerate has FSDP for devices alone; told that this is one,
    it does what it does on two GPUs."""
    forget_device()
    PartialState(cpu=True)
    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}


def prepare(version, how, flag=False, late=False):
    """Through accelerate: plain (0), FSDP1, FSDP2. ``late``: wrapped after prepare."""
    if version:
        pretend_device()
    else:
        forget_device()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(version, flag) if version else None)
    model = llama() if late else wrap(llama(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if late:
        wrap(model, how)
    return accelerator, model, optimizer


def train(version, how, **options):
    accelerator, model, optimizer = prepare(version, how, **options)
    gradckpt.stats.reset()
    generator = torch.Generator().manual_seed(RANK)
    ids = torch.randint(0, 64, (2, 64), generator=generator)
    with accelerator.no_sync(model):
        first = model(input_ids=ids, labels=ids).loss
        accelerator.backward(first)
    loss = model(input_ids=ids.flip(1), labels=ids).loss
    accelerator.backward(loss)
    grads = gradients(model)
    optimizer.step()
    return {"model": model, "losses": [first.item(), loss.item()], "gradients": grads, "stats": gradckpt.stats()}


def examine(version, hows, **options):
    stock = train(version, "stock", late=options.get("late", False) and version == 0)
    found = {}
    for how in hows:
        mine = train(version, how, **options)
        model = mine["model"]
        found[how] = {
            "engine": type(model).__name__,
            **beside(mine, stock),
            "wrapped": sum(map(is_checkpointed, model.modules())),
            "keys": {clean(key) for key in full_state(model)} == set(llama().state_dict()),
        }
    return found


def is_checkpointed(module):
    """By a wrapper, by transformers' function or by enable(model, modules=...)."""
    by_transformers = is_layer(module) and getattr(module, "gradient_checkpointing", False)
    return isinstance(module, CheckpointWrapper) or by_transformers or region_of(module) is not None


def accelerate_engines():
    hows = ("wrap None", "wrap int8", "enable None", "enable int8", "apply int8")
    found = {
        "plain": examine(0, hows),
        "fsdp1": examine(1, hows),
        "fsdp1 late": examine(1, ("wrap None", "wrap int8"), late=True),
        "fsdp2": examine(2, hows),
    }
    found["flags"] = {
        f"fsdp{version} {way}": error_of(functools.partial(train, version, f"{way} int8", flag=True))
        for version in (1, 2)
        for way in ("wrap", "enable", "apply")
    }
    for version in (1, 2):
        refused = error_of(functools.partial(prepare, version, "wrap int8", flag=True)) is not None
        found["flags"][f"fsdp{version} prepare"] = "refused" if refused else "prepared"
    found["ranks"] = world_ranks.by_ways(world_ranks.by_enable)
    return found


def error_of(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return None
