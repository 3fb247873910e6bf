"""What a user does, without an error, so that nothing is saved: each is said, with its cause, at
the user's line. And for which modules gradients have larger errors: once, at INFO, without running
the model."""

import functools
import logging
import os
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import worlds
from small_models import Chain, called
from test_huggingface import build as small_llama
from torch import nn

import gradckpt
from gradckpt._models.kinds import width_of

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from gradckpt import GradckptInactiveWarning, _compression, policies  # noqa: E402
from gradckpt._engine import op_mixing, user_lines  # noqa: E402
from gradckpt._stats import compiled  # noqa: E402

WIDTH = 64
STEPS = 3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    gradckpt.stats.reset()
    op_mixing.ran_again.clear()
    monkeypatch.setattr(compiled, "ever", False)  # by another test of this process


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.gelu(self.linear(x))


def train(model, rows=64, dtype=torch.float32):
    """Steps of a user; the warnings point at one of these lines."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(rows, WIDTH, dtype=dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def applied(call=called, compress="int8", **options):
    net = Chain(Block, 4, call)
    gradckpt.enable(net, modules={Block: compress}, **options)
    return net


def llama(**options):
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, use_cache=False, **shape, **options)
    model = transformers.LlamaForCausalLM(config).train()
    forward = model.forward
    ids = torch.arange(2 * 64).reshape(2, 64) % 64
    model.forward = lambda x: forward(input_ids=ids, labels=ids).loss
    return model


def checkpointed(call):
    """A net that calls gradckpt.checkpoint itself."""
    return Chain(Block, 4, functools.partial(call, functools.partial(gradckpt.checkpoint, compress="int8")))


class Box:
    """A container that nothing knows."""

    def __init__(self, x):
        self.x = x


# ---- what users do


def inside_torchs_checkpoint(reentrant):
    train(applied(lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)))


def collected_by_a_list():
    kept = []
    train(applied(lambda block, x: kept.append(x) or block(x)))


def collected_by_a_hook():
    net, kept = applied(), []

    def collect(module, args, output):
        kept.append(args[0])

    for block in net.blocks:
        block.register_forward_hook(collect)
    train(net)


def collected_as_hidden_states():
    model, kept = llama(output_hidden_states=True), []
    inner = model.model.forward

    def forward(*args, **kwargs):
        kept.append(inner(*args, **kwargs))
        return kept[-1]

    model.model.forward = forward
    gradckpt.enable(model)
    train(model)


def save_attention_with_eager_attention():
    model = llama(attn_implementation="eager")
    gradckpt.enable(model, policy="save_attention")
    train(model)


def save_attention_beside_restored_inputs(policy):
    model = llama()
    gradckpt.enable(model, "int8", policy=policy)
    train(model)


def attention(ctx, op, *args, **kwargs):
    return policies.save() if op in policies.save_attention.rules else False


def policy_of_operators_that_do_not_run():
    train(applied(compress=None, policy=[torch.ops.aten.convolution.default]))


def policy_that_takes_every_other_of_one():
    train(applied(policy=policies.every_other_matmul))


def policy_function_that_never_says_save():
    train(applied(policy=lambda ctx, op, *args, **kwargs: False))


def closures():
    train(checkpointed(lambda checkpoint, block, x: checkpoint(lambda: block(x))))


def unknown_container():
    train(checkpointed(lambda checkpoint, block, x: checkpoint(lambda box: block(box.x), Box(x))))


def detached_inputs():
    train(checkpointed(lambda checkpoint, block, x: checkpoint(block, x.detach())))


def leaf_inputs():
    train(checkpointed(lambda checkpoint, block, x: checkpoint(block, x.detach().requires_grad_())))


def double_precision():
    train(applied(compress="int8").double(), dtype=torch.float64)


def min_numel_above_all():
    train(applied(compress={"codec": "int8", "min_numel": 10**6}))


def eval_mode_with_apply():
    train(applied(lambda block, x: x + block(x.detach())).eval())


def eval_mode_with_enable():
    model = llama()
    gradckpt.enable(model)
    train(model.eval())


def parts_called_instead_of_modules():
    train(applied(lambda block, x: x + F.gelu(block.linear(x))))


def no_grad_around_the_modules():
    def call(block, x):
        with torch.no_grad():
            x = block(x)
        return net.embed(x)

    net = applied(call)
    train(net)


def frozen_embeddings():
    model = llama()
    gradckpt.enable(model)
    model.disable_input_require_grads() if vars(model).get("_require_grads_hooks") else None
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    train(model)


def saved_tensors_of_a_linear_model():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    net.forward = gradckpt.compress_saved("int8")(net.forward)
    train(net)


def saved_tensors_around_compiled_code():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    net.forward = gradckpt.compress_saved("int8")(torch.compile(net.forward, backend="aot_eager"))
    train(net)


FAILURES = [
    (functools.partial(inside_torchs_checkpoint, False), r"inside torch's own checkpoint \(.*turn one off"),
    (functools.partial(inside_torchs_checkpoint, True), r"inside torch's own checkpoint \(.*turn one off"),
    (collected_by_a_list, "costs memory: a list, an attribute or another checkpoint keeps 4 of 4 inputs alive"),
    (collected_by_a_hook, "costs memory: the forward hook .*collect on 'blocks.0' keeps 4 of 4 .*that off, and 3 more"),
    (collected_as_hidden_states, "costs memory: output_hidden_states=True of LlamaForCausalLM keeps 4 of 4"),
    (save_attention_with_eager_attention, r"policy kept nothing .*LlamaForCausalLM has 'eager'.*'sdpa'"),
    (functools.partial(save_attention_beside_restored_inputs, "save_attention:int8"), "attention.* runs again: .*mix"),
    (functools.partial(save_attention_beside_restored_inputs, attention), "attention.* runs again: .*mix"),
    (policy_of_operators_that_do_not_run, "policy kept nothing .*do not call aten.convolution.default; name operators"),
    (policy_that_takes_every_other_of_one, "policy kept nothing .*often enough"),
    (policy_function_that_never_says_save, "policy kept nothing .*the function saved none"),
    (closures, r"the regions got no tensors; pass activations as arguments"),
    (unknown_container, r"the regions got no tensors; .*in tuples, lists or dicts"),
    (detached_inputs, "does not require grad"),
    (leaf_inputs, "leaf .autograd keeps leaves anyway"),
    (double_precision, r"float64, which no codec takes \(train in float32 or bfloat16"),
    (min_numel_above_all, r"smaller than min_numel \(lower it with"),
    (eval_mode_with_apply, r"none of the 4 chosen modules .*in eval mode, and got no input .*; call model.train\(\)"),
    (eval_mode_with_enable, r"in eval mode, where transformers does not checkpoint; call model.train\(\)"),
    (parts_called_instead_of_modules, "none of the 4 chosen modules .*never called with grad on; .*calls their parts"),
    (
        no_grad_around_the_modules,
        r"none of the 4 chosen modules .*never called with grad on; look for torch.no_grad\(\)",
    ),
    (frozen_embeddings, r"no input of a layer requires grad .*enable_input_require_grads"),
    (saved_tensors_of_a_linear_model, r"compress_saved\(\) compressed nothing in 2 steps"),
    (saved_tensors_around_compiled_code, "does not require grad .*code compiled by itself .*compile the block with it"),
]


def name_of(failure):
    if name := getattr(failure, "__name__", None):
        return name
    return f"{failure.func.__name__}_{getattr(failure.args[0], '__name__', failure.args[0])}"


@pytest.mark.parametrize(("failure", "said"), FAILURES, ids=lambda x: name_of(x) if callable(x) else "")
def test_it_is_said_once_at_the_users_line(failure, said):
    with pytest.warns(GradckptInactiveWarning, match=said) as caught:
        failure()
    (warning,) = [w for w in caught if issubclass(w.category, GradckptInactiveWarning)]
    assert warning.filename == __file__
    assert str(warning.message).startswith("gradckpt: ")


# ---- what is no failure


def test_a_smoke_test_of_a_tiny_model_passes_under_warnings_as_errors(caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Chain(Block, 4)
        gradckpt.enable(net, None, modules={Block: "int8"}, policy="save_matmuls")
        train(net, rows=2)
        lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "smaller than min_numel (compressing them would save nothing)" in line]
    assert len(lines) == 3, lines  # of enable(), of the first step, and this one


def test_frozen_modules_are_one_line(caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    net = applied().requires_grad_(False)
    net.head = nn.Linear(WIDTH, 1)
    body, net.forward = net.forward, lambda x: net.head(body(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net)
    assert sum("4 chosen modules of Chain are frozen" in record.getMessage() for record in caplog.records) == 1


def test_modules_that_backward_needs_are_not_called_frozen_after_a_reset(caplog):
    caplog.set_level(logging.INFO, "gradckpt")
    net = applied().requires_grad_(False)
    head = nn.Linear(WIDTH, WIDTH)
    net.head = head
    body, net.forward = net.forward, lambda x: body(head(x))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for _ in range(3):
        net(torch.randn(64, WIDTH)).sum().backward()
        gradckpt.stats.reset()
        optimizer.step()
    assert head.weight.grad.count_nonzero()
    assert not [record for record in caplog.records if "frozen" in record.getMessage()]


@pytest.mark.parametrize("place", [gradckpt.Offload("cpu", prefetch=17), {"place": "cpu", "prefetch": 18}], ids=str)
def test_offload_without_a_device_is_said_once(place):
    """Whatever the size of the payloads."""
    model = llama()
    gradckpt.enable(model, offload=place)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="it is in host memory already"):
        train(model)
    train(model)


def test_offload_of_small_payloads_only(tmp_path):
    gradckpt.stats.reset()
    model = llama()
    place = gradckpt.Offload("disk", directory=worlds.with_disk(tmp_path), min_bytes="1GiB")
    gradckpt.enable(model, offload=place)
    with pytest.warns(
        gradckpt.GradckptInactiveWarning, match="all payloads are smaller than its min_bytes; lower that"
    ):
        train(model)
    assert "not offloaded: smaller than min_bytes" in str(gradckpt.stats())


@pytest.mark.parametrize("how", ["layers", "regions", "exact"])
def test_compiled_layers_are_active(how):
    """Their regions are in graphs, where nothing is counted per call."""
    if how == "layers":
        model = llama()
        gradckpt.enable(model)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    else:
        model = applied() if how == "regions" else applied(compress=None)
        for block in model.blocks:
            block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradckptInactiveWarning)
        train(model)
        if how == "layers":
            train(model)  # another optimizer, and no graph is made any more
    assert bool(gradckpt.stats()["compiled_tensors"]) == (how != "exact")


# ---- whose line


def test_a_warning_from_a_thread_of_autograds_points_at_the_line_that_waits():
    """On a device, backward runs in a thread that no line of the user's has called."""
    done = threading.Lock()
    done.acquire()
    names = {"done": done, "warn_inactive": _compression.warn_inactive}
    of_torch, of_ours = ({"__name__": name, **names} for name in ("torch.autograd.graph", "gradckpt._engine.callbacks"))
    exec("def on_device():\n    warn_inactive('said there')\n    done.release()", of_ours)
    exec("def backward(thread):\n    thread.start()\n    done.acquire()", of_torch)
    thread = threading.Thread(target=of_ours["on_device"])
    with pytest.warns(GradckptInactiveWarning, match="said there") as caught:
        of_torch["backward"](thread)
    thread.join()
    assert caught[0].filename == __file__


def test_frames_of_libraries_are_walked_over():
    names = {"__name__": "transformers.trainer", "look": user_lines.user_frame}
    exec("def step():\n    return look()", names)
    frame = names["step"]()
    assert frame.f_code.co_filename == __file__
    assert frame is sys._getframe()


# ---- larger errors ----


class Normed(nn.Module):
    def __init__(self, width=64, norm=nn.LayerNorm, act=nn.GELU):
        super().__init__()
        self.norm, self.up, self.act, self.down = norm(width), nn.Linear(width, 256), act(), nn.Linear(256, width)

    def forward(self, x):
        raise AssertionError("the model is not run")


def net(*args, **kwargs):
    return nn.Sequential(*(Normed(*args, **kwargs) for _ in range(3)))


@pytest.fixture
def said(caplog):
    """The lines since the last look, without what was chosen."""
    caplog.set_level(logging.DEBUG, "gradckpt")

    def look():
        lines = [record.getMessage() for record in caplog.records if "handle" not in record.getMessage()]
        assert {record.levelname for record in caplog.records} <= {"INFO"}
        caplog.clear()
        return lines

    return look


@pytest.mark.parametrize("codec", ["int8", "int8_plain", "int6", "int4"])
def test_a_width_whose_rows_share_steps(said, codec):
    model = net(48)
    gradckpt.enable(model, codec)
    (line,) = said()
    assert line.startswith("gradckpt: width 48 is less than 64")
    gradckpt.enable(model, codec)
    assert said() == [], "again with equal arguments"


@pytest.mark.parametrize(
    ("width", "compress"), [(48, None), (48, "lossless"), (48, "fp8"), (64, "int8"), (192, "int8")], ids=str
)
def test_widths_of_which_nothing_is_said(said, width, compress):
    gradckpt.enable(net(width), compress)
    assert said() == []


def test_each_width_is_named_once(said):
    model = nn.Sequential(Normed(48), Normed(32), Normed(48), Normed(96))
    gradckpt.enable(model, "int8")
    (line,) = said()
    assert line.startswith("gradckpt: width 32, 48 is less")


def test_the_layers_of_transformers(said):
    gradckpt.enable(small_llama(), "int8")
    (line,) = said()
    assert line.startswith("gradckpt: width 32 is less")


def test_relu_and_batch_norm(said):
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.ReLU), "fp8")
    (line,) = said()
    assert line.startswith("gradckpt: Normed has ReLU and BatchNorm")
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.ReLU), "lossless")
    gradckpt.enable(net(128, nn.BatchNorm1d, nn.GELU), "int8")
    gradckpt.enable(net(128, nn.LayerNorm, nn.ReLU), "int8")
    assert said() == []


class Hollow(nn.Linear):
    def __init__(self):
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (Normed(192), 192),
        (nn.Linear(48, 64), 48),
        (nn.RMSNorm((4, 32)), 32),
        (nn.LazyLinear(64), None),
        (nn.Sequential(nn.Conv2d(3, 48, 3), nn.Linear(48, 64)), None),
        (nn.Identity(), None),
        (Hollow(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_width_is_read_and_never_raises(module, width):
    assert width_of(module) == width
