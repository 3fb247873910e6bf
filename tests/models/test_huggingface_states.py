"""gradckpt.enable and the Trainer's flag, after everything that can happen to a model: still
compressed, still right. Each case makes a model in the same state twice, with gradckpt and with
torch's checkpointing, and takes one step.

Transformers models inside an enabled one, too: turning checkpointing on or off in one of them means
the whole, as sentence-transformers does, which calls the method of each module that has it."""

import copy
import functools
import io
import multiprocessing
import pickle

import model_families
import processes
import pytest
import torch
import worlds
from model_families import FAMILIES, equal, error
from small_models import config_of
from test_huggingface import (
    IDS,
    LAYERS,
    NAME,
    SPELLINGS,
    build,
    compressed_by,
    off,
    on,
    replicate,
    step,
    train,
    trainer,
    transformers,
)

import gradckpt

#: Relative error of all gradients together with int8, and what bfloat16 adds.
BOUND = 0.01
BOUND_BF16 = 0.015


def turn_on(model, ours):
    if ours:
        gradckpt.enable(model)
    else:
        on(model, {"use_reentrant": False})
    return model


def fresh(ours):
    return turn_on(build(), ours)


def gradients(model, take=step):
    """Gradients of one step, in order, and how many tensors it compressed."""
    torch.manual_seed(3)
    compressed = take(model)
    return [p.grad.detach().float().clone() for p in model.parameters()], compressed


# ---- the states: a model ready for a step


def by_flag(ours, tmp_path):
    model = build()
    kwargs = {"compress": "int8"} if ours else {"use_reentrant": False}
    train(model, tmp_path, learning_rate=0.0, **{NAME: True, f"{NAME}_kwargs": kwargs})
    return model


def off_and_on_with_kwargs(ours, tmp_path):
    model = fresh(ours)
    off(model)
    on(model, {"use_reentrant": False})
    return model


def around_generation(ours, tmp_path):
    """TRL's unwrap_model_for_generation (trl/models/utils.py): off, generate, on again,
    without kwargs."""
    model = fresh(ours)
    step(model)
    off(model)
    model.eval()
    with torch.no_grad():
        model.generate(IDS[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0, use_cache=True)
    model.train()
    on(model)
    return model


def generation_with_checkpointing_on(ours, tmp_path):
    model = fresh(ours)
    model.eval()
    with torch.no_grad():
        model.generate(IDS[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0, use_cache=True)
    return model.train()


def deep_copy(ours, tmp_path):
    return copy.deepcopy(fresh(ours))


def pickled(ours, tmp_path):
    return pickle.loads(pickle.dumps(fresh(ours))) if ours else fresh(ours)  # transformers' own cannot be pickled


def pickled_after_the_flag(ours, tmp_path):
    model = by_flag(ours, tmp_path)
    return pickle.loads(pickle.dumps(model)) if ours else model


def pickled_after_a_plain_flag(ours, tmp_path):
    """The Trainer turns on what enable() had turned on,
    with hooks of its own that no pickle can carry."""
    model = fresh(ours)
    train(model, tmp_path, learning_rate=0.0, **{NAME: True})
    return pickle.loads(pickle.dumps(model)) if ours else model


def saved_whole(ours, tmp_path):
    model = fresh(ours)
    if not ours:
        return model
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def to_dtype(ours, tmp_path):
    return fresh(ours).to(torch.bfloat16)


def reloaded(ours, tmp_path):
    model, other = fresh(ours), build()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    assert not model.load_state_dict(other.state_dict()).missing_keys
    return model


def saved_pretrained(ours, tmp_path):
    fresh(ours).save_pretrained(tmp_path)
    return turn_on(transformers.LlamaForCausalLM.from_pretrained(tmp_path), ours).train()


def data_parallel(ours, tmp_path):
    return torch.nn.DataParallel(fresh(ours))


def compiled_object(ours, tmp_path):
    """Enabled through the compiled wrapper, and wrapped since; neither is called here."""
    model = build()
    turn_on(torch.compile(model), ours) if ours else turn_on(model, ours)
    torch.compile(model)
    return model


def resized(ours, tmp_path):
    """New embeddings: the hook that makes the first layer's input
    require grad was on the old ones."""
    model = fresh(ours)
    torch.manual_seed(5)
    model.resize_token_embeddings(80)
    return model


STATES = [
    *(by_flag, off_and_on_with_kwargs, around_generation, generation_with_checkpointing_on, deep_copy, pickled),
    *(pickled_after_the_flag, pickled_after_a_plain_flag, saved_whole, to_dtype, reloaded, saved_pretrained),
    *(data_parallel, compiled_object, resized),
]


@pytest.mark.parametrize("state", STATES, ids=lambda f: f.__name__)
def test_state(state, tmp_path):
    exact, none = gradients(state(False, tmp_path / "stock"))
    assert none == 0
    grads, compressed = gradients(state(True, tmp_path / "ours"))
    assert compressed == LAYERS
    assert 0 < error(grads, exact) <= (BOUND_BF16 if state is to_dtype else BOUND)


# ---- the steps: what a training loop does with an enabled model


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return step(model)


@pytest.mark.filterwarnings("ignore:Calling .zero_grad:UserWarning")
def in_threads(model):
    """DataParallel's forward: replicas in threads of their own."""
    before = gradckpt.stats()["compressed"]
    model.zero_grad()
    replicas = [replicate(model) for _ in range(2)]
    losses = [None, None]

    def run(i):
        losses[i] = replicas[i](input_ids=IDS[i : i + 1], labels=IDS[i : i + 1]).loss

    processes.in_threads(*(functools.partial(run, i) for i in range(2)))
    ((losses[0] + losses[1]) / 2).backward()
    return (gradckpt.stats()["compressed"] - before) // 2


@pytest.mark.parametrize("take", [autocast, in_threads], ids=lambda f: f.__name__)
def test_step(take):
    exact, _ = gradients(fresh(False), take)
    grads, compressed = gradients(fresh(True), take)
    assert compressed == LAYERS
    assert 0 < error(grads, exact) <= (BOUND_BF16 if take is autocast else BOUND)


def in_data_parallel(inside, options):
    model = build()
    if inside:
        gradckpt.enable(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, **options)
    if not inside:
        gradckpt.enable(wrapped)
    return [gradients(wrapped) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["enabled before", "enabled through DDP"])
def test_distributed_data_parallel(options, inside):
    exact, _ = gradients(fresh(False))
    for grads, compressed in worlds.of_one(in_data_parallel, inside, options):
        assert compressed == LAYERS
        assert 0 < error(grads, exact) <= BOUND


# ---- another process


def child(pipe, data, tmp_path):
    """Trains what it unpickles."""
    model = pickle.loads(data)
    grads, compressed = gradients(model)
    pipe.send((pickle.dumps(grads), compressed))
    pipe.close()


def test_spawned_process(tmp_path):
    exact, _ = gradients(fresh(False))
    ends = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=child, args=(ends[1], pickle.dumps(fresh(True)), tmp_path)
    )
    process.start()
    ends[1].close()
    grads, compressed = ends[0].recv()
    process.join(60)
    assert process.exitcode == 0
    assert compressed == LAYERS
    assert 0 < error(pickle.loads(grads), exact) <= BOUND


# ---- loss scaling


def scaled_run(ours, scale):
    """Six steps of fp16 autocast: scale after each, and which of them changed the weights."""
    torch.manual_seed(4)
    model = fresh(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scales, moved = [], []
    before = gradckpt.stats()["compressed"]
    for _ in range(6):
        weights = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=IDS, labels=IDS).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)))
    return scales, moved, gradckpt.stats()["compressed"] - before


def test_overflow_skips_the_step():
    exact = scaled_run(False, 2.0**20)
    ours = scaled_run(True, 2.0**20)
    assert ours[:2] == exact[:2]
    assert not ours[1][0]
    assert ours[1][-1]
    assert ours[2] == 6 * LAYERS


# ---- resume


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", SPELLINGS)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """Weights after stop, new model, resume: those of a run without a stop, to the last bit."""
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (12, 32))]

    def run(model, steps, where, resume=None):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step >= steps

        saves = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "train_dataset": data}
        made = trainer(
            model, tmp_path / where, callbacks=[Stop()], **saves, **model_families.flag({"compress": "int8"}, name)
        )
        count = compressed_by(functools.partial(made.train, resume_from_checkpoint=resume))
        assert made.state.global_step == steps
        return count

    whole = build()
    assert run(whole, 6, "whole") == 6 * LAYERS
    assert run(build(), 3, "stopped") == 3 * LAYERS
    again = build()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    assert run(again, 6, "stopped", str(tmp_path / "stopped" / "checkpoint-3")) == 3 * LAYERS
    assert equal(whole.parameters(), again.parameters())


# ---- models inside ----


ADAPTER = "_set_gradient_checkpointing"


def inner(model):
    return [module for module in model.modules() if module is not model and hasattr(type(module), ADAPTER)]


def turn_on_each(model, kwargs=None):
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            model_families.turn_on(module, kwargs)


def compressed(family, model):
    before = gradckpt.stats()
    model_families.gradients(family, model)
    after = gradckpt.stats()
    return after["compressed"] - before["compressed"], after["bytes_out"] - before["bytes_out"]


def holders(model):
    """Of each layer: the function that it is checkpointed with."""
    functions = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    return {function.func for function in functions if function is not None}


@pytest.mark.parametrize("family", ["llama", "clip", "t5"])
class TestInner:
    def make(self, family):
        model = model_families.build(family, "eager")
        if not inner(model):
            pytest.skip(f"{family} of this transformers has no model inside")
        return model, gradckpt.enable(model)

    def test_on_in_each(self, family):
        model, handle = self.make(family)
        layers, wanted = len(handle.modules), compressed(family, model)
        for kwargs in (None, {"use_reentrant": False}, {"compress": "int8"}, {"policy": "save_attention:int8"}):
            turn_on_each(model, kwargs)
            assert len(handle.modules) == layers
            assert compressed(family, model) == wanted
        turn_on_each(model, {"compress": "fp8"})
        assert config_of(handle).codec == "fp8_e4m3"
        assert compressed(family, model)[0] == wanted[0]
        handle.remove()
        assert holders(model) == {torch.utils.checkpoint.checkpoint}
        assert compressed(family, model) == (0, 0)

    def test_another_codec_in_one(self, family):
        model, handle = self.make(family)
        count, full = compressed(family, model)
        model_families.turn_on(inner(model)[-1], {"compress": "int4"})
        count2, less = compressed(family, model)
        assert count2 == count
        assert less < full
        assert len(handle.modules) == FAMILIES[family].layers
        handle.remove()
        assert holders(model) == {torch.utils.checkpoint.checkpoint}, "those of the first call, too"

    def test_off_in_each(self, family):
        model, _ = self.make(family)
        wanted = compressed(family, model)
        for module in inner(model):
            model_families.turn_off(module)
        assert compressed(family, model) == (0, 0)
        turn_on_each(model)
        assert compressed(family, model) == wanted

    def test_nothing_is_left_behind(self, family):
        model, handle = self.make(family)
        assert all(ADAPTER in vars(module) for module in inner(model))
        handle.remove()
        assert not any(ADAPTER in vars(module) for module in model.modules())
        for module in inner(model)[:1]:
            with gradckpt.enable(module):
                assert ADAPTER not in vars(model)

    @pytest.mark.parametrize(
        "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
    )
    def test_copies(self, family, way):
        model, _ = self.make(family)
        wanted = compressed(family, model)
        twin = way(model)
        gradckpt.disable(model)
        turn_on_each(twin)
        assert compressed(family, twin) == wanted
        assert compressed(family, model) == (0, 0)
        assert not model_families.is_on(model)
        gradckpt.disable(twin)
        assert not any(ADAPTER in vars(module) for module in twin.modules())
        assert compressed(family, twin) == (0, 0)


def test_a_refused_call_changes_nothing():
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    wanted = compressed("llama", model)
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        model_families.turn_on(model.model, {"compress": "zip"})
    assert compressed("llama", model) == wanted


def test_an_inner_model_outlives_its_enabled_one():
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    backbone = model.model
    del model
    model_families.turn_on(backbone)
    before = gradckpt.stats()["compressed"]
    backbone(input_ids=torch.arange(64).view(2, 32)).last_hidden_state.sum().backward()
    assert gradckpt.stats()["compressed"] - before == FAMILIES["llama"].layers


@pytest.mark.parametrize("gone", ["dead", "replaced", "disabled"])
def test_what_is_no_longer_inside_can_be_enabled(gone):
    model = model_families.build("llama", "sdpa")
    gradckpt.enable(model)
    backbone = model.model
    with pytest.raises(ValueError, match="already enabled, as part of another model"):
        gradckpt.enable(backbone)
    if gone == "dead":
        del model
    elif gone == "replaced":
        model.model = model_families.build("llama", "sdpa").model
    else:
        gradckpt.disable(model)
    with gradckpt.enable(backbone, compress="fp8") as handle:
        assert config_of(handle).codec == "fp8_e4m3"
        model_families.turn_on(backbone)
        before = gradckpt.stats()["compressed"]
        backbone(input_ids=torch.arange(64).view(2, 32)).last_hidden_state.sum().backward()
        assert gradckpt.stats()["compressed"] - before == FAMILIES["llama"].layers
    assert ADAPTER not in vars(backbone)
    assert holders(backbone) == {torch.utils.checkpoint.checkpoint}
