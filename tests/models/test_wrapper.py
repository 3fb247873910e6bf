"""checkpoint_wrapper and apply_activation_checkpointing in one process."""

import contextlib
import copy
import functools
import logging
import pickle

import behaviours
import pytest
import torch
import torch.distributed as dist
import worlds
from model_families import equal, error
from small_models import Chain
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradckpt
from gradckpt._models import ranks
from gradckpt.integrations.torch_distributed import CheckpointWrapper

N = 3
wrap, apply = gradckpt.compat.checkpoint_wrapper, gradckpt.compat.apply_activation_checkpointing


class MyBlock(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, scale=None, compress=1.0):
        y = self.dropout(self.second(nn.functional.gelu(self.first(x))))
        return x + (y if scale is None else y * scale) * compress


def is_block(module):
    return isinstance(module, MyBlock)


def net():
    return Chain(MyBlock, N)


def gradients(model, seed=1):
    model.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(4, 16, 64)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def stock():
    model = net()
    torchs.apply_activation_checkpointing(model, check_fn=is_block)
    return model


def wrapped(compress=None, **options):
    model = net()
    assert apply(model, compress, check_fn=is_block, **options) == N
    return model


# ---- the same as torch's


def test_none_is_torchs_to_the_last_bit():
    """And the default, as in all of gradckpt.compat."""
    model = net()
    apply(model, check_fn=is_block)
    assert "gradckpt: uncompressed" in repr(model)
    assert "gradckpt: uncompressed" in repr(wrap(MyBlock()))
    assert equal(gradients(model), gradients(stock()))
    assert equal(gradients(wrapped()), gradients(stock()))
    assert gradients(wrapped())[0].abs().sum() > 0


def test_int8_compresses_every_block():
    model = wrapped("int8")
    gradckpt.stats.reset()
    assert error(gradients(model), gradients(stock())) < 0.02
    s = gradckpt.stats()
    assert s["compressed"] == s["regions"] == s["recomputes"] == N
    assert s["bytes_out"] < 0.26 * s["bytes_in"]


def test_torchs_function_takes_ours():
    """As accelerate, Lightning and torchtune call it; and with torchtitan's keywords."""
    titans = {"preserve_rng_state": True, "determinism_check": "default", "early_stop": False, "debug": False}
    others = {"checkpoint_impl": torchs.CheckpointImpl.NO_REENTRANT}
    for compress, options in ((None, titans), ("int8", others)):
        model = net()
        wrapper = functools.partial(wrap, compress=compress, **options)
        torchs.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)
        assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == N
        assert equal(gradients(model), gradients(stock())) == (compress is None)


def test_context_fn_and_policy():
    calls = []

    def context_fn():
        calls.append(1)
        return torch.utils.checkpoint.noop_context_fn()

    assert equal(gradients(wrapped(context_fn=context_fn)), gradients(stock()))
    assert len(calls) == N
    assert equal(gradients(wrapped(policy="save_matmuls")), gradients(stock()))


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({MyBlock}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MyBlock}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=8000, exclude_wrap_modules={nn.ModuleList}),
        CustomPolicy(lambda module: is_block(module) and {"compress": "int4"}),
    ],
    ids=["ModuleWrapPolicy", "transformer", "size", "CustomPolicy"],
)
def test_torchs_policies(policy):
    model = net()
    assert apply(model, "int8", auto_wrap_policy=policy) == N
    assert all(isinstance(block, CheckpointWrapper) for block in model.blocks)
    codec = "int4" if isinstance(policy, CustomPolicy) else "int8"
    assert {block._settings["compress"].codec for block in model.blocks} == {codec}


def test_without_a_choice_it_takes_the_layers(caplog):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
    with caplog.at_level(logging.INFO, "gradckpt"):
        assert apply(model) == 4
    says = "gradckpt: wrapped 4 modules of TransformerEncoder: TransformerEncoderLayer"
    assert [r.getMessage() for r in caplog.records] == [says]


def test_a_shared_module_is_wrapped_once():
    model = net()
    model.blocks[2] = model.blocks[0]
    assert apply(model, None, check_fn=is_block) == N - 1
    assert model.blocks[2] is model.blocks[0]
    assert isinstance(model.blocks[0], CheckpointWrapper)


# ---- what a module can do


def test_state_dicts_both_ways():
    plain, model = net(), wrapped("int8")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] != []
    changed = {k: v + 1 for k, v in plain.state_dict().items()}
    model.load_state_dict(changed)
    assert all(torch.equal(v, changed[k]) for k, v in model.state_dict().items())
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(v, changed[k]) for k, v in plain.state_dict().items())
    block = wrap(MyBlock())
    assert list(block.state_dict()) == list(MyBlock().state_dict()) == [n for n, _ in block.named_parameters()]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(way):
    model = wrapped({"codec": "int8", "min_numel": 8})
    before = gradients(model)
    twin = way(model)
    gradckpt.stats.reset()
    assert equal(gradients(twin), before)
    assert gradckpt.stats()["compressed"] == N
    assert repr(twin) == repr(model)
    twin.embed.weight.data.zero_()
    assert equal(gradients(model), before)


def test_no_grad_and_eval():
    model, plain = wrapped("int8"), net()
    x = torch.randn(4, 16, 64)
    gradckpt.stats.reset()
    with torch.no_grad():
        torch.manual_seed(3)
        a = model(x)
        torch.manual_seed(3)
        assert torch.equal(a, plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert gradckpt.stats()["regions"] == N  # in eval mode with grad, as torch's


def test_keywords():
    block = MyBlock().eval()
    ours, theirs = wrap(block, "int8"), torchs.checkpoint_wrapper(block)
    x, scale = torch.randn(4, 16, 64, requires_grad=True), torch.rand(4, 16, 64, requires_grad=True)
    gradckpt.stats.reset()
    for wrapper in (ours, theirs):
        wrapper(x * 1, scale=scale * 1).sum().backward()
    assert gradckpt.stats()["compressed"] == 2
    # A keyword of the module that is also one of checkpoint's is the module's.
    assert torch.equal(ours(x, compress=3.0), block(x, compress=3.0))


def test_running_statistics_are_updated_once():
    norm = nn.BatchNorm1d(64)
    once, x = copy.deepcopy(norm), torch.randn(32, 64)
    once(x)
    wrap(norm, "int8")(x.requires_grad_() * 1).sum().backward()
    assert norm.num_batches_tracked == once.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, once.running_mean)


def test_compiled():
    model = wrapped("int8").eval()
    expected = gradients(model)
    gradckpt.stats.reset()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    model.zero_grad()
    compiled(torch.randn(4, 16, 64)).square().mean().backward()
    assert error([p.grad for p in model.parameters()], expected) < 0.02
    assert gradckpt.stats()["compiled_tensors"] == N


def test_alone_in_a_process_group_nothing_is_written():
    def in_the_group():
        keys = dist.distributed_c10d._get_default_store().num_keys()
        gradients(model)
        apply(net(), check_fn=is_block)
        assert dist.distributed_c10d._get_default_store().num_keys() == keys

    model = wrapped("int8")
    gradients(model)
    worlds.of_one(in_the_group)
    gradients(model)


def test_attributes_of_the_module_are_read_through_it():
    block = MyBlock()
    block.settings, block.nested, block.check = {"window": 4}, "mine", "yes"
    wrapper = wrap(block)
    assert (wrapper.settings, wrapper.nested, wrapper.check) == ({"window": 4}, "mine", "yes")
    assert wrapper.first.in_features == 64
    assert wrap(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))[1].out_features == 4


@contextlib.contextmanager
def fake_group(store, rank=0, world_size=8):
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_store_that_cannot_compare_is_no_error(caplog):
    with fake_group(FakeStore()), caplog.at_level(logging.INFO, "gradckpt"):
        model = wrapped("int8")
        gradients(model)
        assert any("the ranks' codecs were not compared" in r.getMessage() for r in caplog.records)
        assert model.blocks[0].rank_check.settled()


def test_ranks_without_a_note_delay_no_other(monkeypatch):
    """Seven of eight train nothing: one wait, some reads, and then nothing."""
    naps = []
    monkeypatch.setattr(ranks.time, "sleep", naps.append)
    with fake_group(dist.HashStore()):
        model = wrapped("int8")
        for _ in range(ranks.LOOKS // N + 1):
            assert not model.blocks[0].rank_check.settled()
            gradients(model)
        assert 0.9 * ranks.PATIENCE < sum(naps) < 1.2 * ranks.PATIENCE
        gradients(model)
        assert all(block.rank_check.settled() for block in model.blocks)


def test_notes_of_an_earlier_group_do_not_count(monkeypatch):
    """The store may be the same, as that of torchrun's agent is."""
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    store = dist.HashStore()
    for rank, codec in enumerate(("int8", "int4")):
        with fake_group(store, rank, 2):
            gradients(wrapped(codec))


# ---- what is wrong


def refused(says, function, *args, error=ValueError, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith("gradckpt: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("codec", [None, "int8"])
def test_payloads_on_a_disk(codec, tmp_path):
    """Of one wrapped module, and of all that a function chooses."""
    place = gradckpt.Offload("disk", directory=worlds.with_disk(tmp_path), host_budget="32KiB", min_bytes="1B")
    x, found = torch.randn(64, 64).requires_grad_(), []
    for options in ({}, {"offload": place}, {"offload": place}):
        torch.manual_seed(0)
        net = nn.Sequential(*(MyBlock() for _ in range(N)))
        if len(found) == 1:
            net = nn.Sequential(*(wrap(block, codec, **options) for block in net))
        else:
            apply(net, codec, check_fn=is_block, **options)
        before = gradckpt.stats()["offload"].get("puts", 0)
        torch.manual_seed(1)
        net(x * 1).square().mean().backward()
        assert (gradckpt.stats()["offload"].get("puts", 0) > before) == bool(options)
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


WRONG = [
    ({"checkpoint_impl": torchs.CheckpointImpl.REENTRANT}, "cannot compress with CheckpointImpl.REENTRANT"),
    ({"checkpoint_fn": print}, "does not call checkpoint_fn="),
    ({"use_reentrant": False}, "unknown option 'use_reentrant'"),
    ({"recompute": False}, "unknown option 'recompute'"),
    ({"nested": 1}, "nested is True or False"),
]


@pytest.mark.parametrize(("options", "says"), WRONG, ids=str)
def test_options_that_cannot_be_had(options, says):
    """Codecs: test_messages.py."""
    refused(says, wrap, MyBlock(), error=(ValueError, TypeError), **options)
    refused("takes a torch.nn.Module, not int", wrap, 3, error=TypeError)


def test_the_same_block_twice():
    twice = "this MyBlock is checkpointed already: by torch's CheckpointWrapper"
    ours, theirs = wrap(MyBlock()), torchs.checkpoint_wrapper(MyBlock())
    for wrapper in (ours, theirs, torchs.offload_wrapper(ours)):
        refused(twice, wrap, wrapper)
        refused(twice, wrap, wrapper, nested=True)
    model = wrapped("int8")
    refused(twice, torchs.apply_activation_checkpointing, model, check_fn=is_block)
    refused(twice, apply, model, check_fn=is_block)
    refused(twice, apply, stock(), check_fn=is_block)


def test_torchs_wrapper_around_ours():
    model = net()
    apply(model, check_fn=lambda m: m in [b.first for b in model.blocks])
    torchs.apply_activation_checkpointing(model, check_fn=is_block)
    refused("and the MyBlock around it by torch's CheckpointWrapper", behaviours.call, gradients, model)
    block = torchs.checkpoint_wrapper(nn.Sequential(wrap(MyBlock(), None, nested=True)))
    block(torch.randn(2, 8, 64)).sum().backward()


def test_torchs_wrapper_inside_ours_since():
    model = wrapped("int8")
    for block in model.blocks:
        block.first.inner = torchs.checkpoint_wrapper(nn.Linear(2, 2))
    refused("a Linear inside this MyBlock is checkpointed already", gradients, model)


def test_enable_and_the_wrapper_on_one_module():
    block = MyBlock()
    handle = gradckpt.enable(block, None, modules=MyBlock)
    refused("this MyBlock is checkpointed already: by gradckpt.enable", wrap, block)
    refused(
        "it would run three times without nested=True: by gradckpt.enable",
        wrap,
        nn.Sequential(block),
    )
    handle.remove()
    wrapper = wrap(block)
    refused(
        "is checkpointed already: by torch's CheckpointWrapper",
        gradckpt.enable,
        nn.Sequential(wrapper),
        modules=MyBlock,
    )
    gradckpt.enable(block, None, modules=MyBlock)
    refused("this MyBlock is checkpointed already: by gradckpt.enable", wrapper, torch.randn(2, 64))


def test_nested_on_purpose():
    block = MyBlock()
    block.first = wrap(block.first)
    refused("a Linear inside this MyBlock is checkpointed already", wrap, block)
    outer = wrap(block, None, nested=True)
    gradckpt.stats.reset()
    outer(torch.randn(2, 16, 64, requires_grad=True) * 1).sum().backward()
    assert gradckpt.stats()["recomputes"] == 2
    model = net()
    chosen = (nn.Linear, MyBlock)
    refused("Linear is inside a MyBlock", apply, model,
            check_fn=lambda m: isinstance(m, chosen))  # fmt: skip
    assert not any(isinstance(m, CheckpointWrapper) for m in model.modules())
    count = apply(model, None, check_fn=lambda m: isinstance(m, chosen), nested=True)
    assert count == 3 * N + 1
    assert equal(gradients(model), gradients(stock()))


NONE = lambda module: False  # noqa: E731
NOTHING = [
    ({"check_fn": NONE}, "no module of this Chain would be wrapped: check_fn chose none; pass check_fn="),
    ({"check_fn": NONE}, "with the class of its blocks, one of: Dropout, Linear, ModuleList, MyBlock"),
    ({"auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})}, "auto_wrap_policy chose none"),
    ({"check_fn": is_block, "auto_wrap_policy": ModuleWrapPolicy({MyBlock})}, "exclude each other"),
    ({"auto_wrap_policy": 7}, "takes one of torch's policies"),
    ({"check_fn": 7}, "takes a function of a module, such as lambda module: "),
    ({"check_fn": nn.Linear}, "not <class 'torch.nn.modules.linear.Linear'>"),
]


@pytest.mark.parametrize(("choice", "says"), NOTHING)
def test_nothing_to_wrap(choice, says):
    refused(says, apply, net(), error=(ValueError, TypeError), **choice)
    refused("no layer was recognised", apply, nn.Sequential(nn.Linear(2, 2)))
    refused("takes a torch.nn.Module", apply, [], error=TypeError)
