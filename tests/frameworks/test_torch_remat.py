"""torch_remat: its regions and checkpoints inside, outside and around gradckpt's."""

import gc
import sys
import threading

import pytest
import torch
from selective_ways import KeptBlock, Plain, X, checkpointed, counter, in_sequence, nested, run, torch_remat, ways

import gradckpt
from gradckpt._engine import kept_calls
from gradckpt._engine import remat as ours

remat = torch_remat()

CALLS = counter()
BLOCK, PLAIN = KeptBlock(remat.region, CALLS), Plain(CALLS)
MODULES = (BLOCK, PLAIN)

EXACT = {"kept": 1, "again": 1, "block": 1}


@pytest.fixture(autouse=True)
def _imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_remat", remat)


@pytest.fixture(autouse=True)
def _placeholders(monkeypatch):
    """torch without CUDA lacks what torch_remat's placeholders need: there they are NaN."""
    if not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        monkeypatch.setattr(torch._C, "_set_storage_data_ptr_access_error_msg", lambda *_: None, raising=False)
        nan = lambda nbytes, device: torch.UntypedStorage(nbytes, device=device).fill_(255)  # noqa: E731
        monkeypatch.setattr(sys.modules["torch_remat._placeholder"], "_null_storage", nan)
    kept_calls.warn_runs_again.cache_clear()


def theirs(function):
    return remat.checkpoint(region_name="region")(function)


def kept(function):
    return remat.region(function, "kept call", recompute=False)


def again(function):
    return remat.region(function, "call", recompute=True)


PARTS = {"block": BLOCK, "plain": PLAIN, "sin": torch.sin, "cos": torch.cos}
BLOCK_AND_PLAIN = {"block": 1, "again": 1, "plain": 2}
#: nesting -> calls in the backward
NESTINGS = {
    "ours(block)": {"block": 1, "again": 1},
    "ours(kept(plain))": {},
    "ours(again(plain))": {"plain": 1},
    "ours(kept(plain), again(sin), cos)": {},
    "ours(block, ours(plain))": BLOCK_AND_PLAIN,
    "ours(ours(plain), block)": BLOCK_AND_PLAIN,
    "ours(kept(ours(plain)))": {"plain": 1},
    "ours(again(ours(plain)))": {"plain": 1},
    "ours(again(ours(kept(plain))))": {},
    "theirs(ours(plain))": {"plain": 2},
    "theirs(kept(ours(plain)))": {"plain": 1},
    "theirs(again(ours(plain)))": {"plain": 2},
    "theirs(block, ours(plain))": BLOCK_AND_PLAIN,
    "theirs(ours(plain), block)": BLOCK_AND_PLAIN,
    "theirs(kept(ours(kept(plain))))": {},
    "ours(theirs(plain), block)": BLOCK_AND_PLAIN,
    "ours(block, theirs(plain))": BLOCK_AND_PLAIN,
    "ours(kept(theirs(plain)))": {"plain": 1},
}


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_nestings(nesting, backwards, monkeypatch):
    if "theirs" in nesting:  # torch_remat restores no random state
        monkeypatch.setattr(BLOCK, "p", 0.0)
    both = nested(nesting, PARTS, ours=checkpointed, theirs=theirs, kept=kept, again=again)
    ran, expected = (run(f, MODULES, CALLS, backwards) for f in both)
    assert ran.equals(expected)
    assert ran.forward == expected.forward
    assert ran.backward == {name: n * backwards for name, n in NESTINGS[nesting].items()}


WAYS = ways(BLOCK)


@pytest.mark.parametrize("way", WAYS)
def test_forms_of_region_that_honour_it(way):
    ran, expected = run(WAYS[way], MODULES, CALLS), run(BLOCK, MODULES, CALLS)
    assert ran.equals(expected)
    assert ran.forward == EXACT
    assert ran.backward == {"block": 1, "again": 1}


def test_patched_and_enabled_regions_honour_it():
    expected = run(BLOCK, MODULES, CALLS)
    with gradckpt.patched(None):
        ran = run(lambda x: torch.utils.checkpoint.checkpoint(BLOCK, x, use_reentrant=False), MODULES, CALLS)
    assert ran.equals(expected)
    assert ran.backward == {"block": 1, "again": 1}
    model = torch.nn.Sequential(BLOCK)
    with gradckpt.enable(model, None, modules=[BLOCK]):
        ran = run(model, MODULES, CALLS)
    assert ran.equals(expected)
    assert ran.backward == {"block": 1, "again": 1}


@pytest.mark.parametrize("fake_quantize", [False, True])
def test_compressed_inputs(fake_quantize):
    config = {"codec": "int8", "min_numel": 1, "fake_quantize": fake_quantize}
    way = checkpointed(BLOCK, compress=config)
    ran, expected = run(way, MODULES, CALLS), run(BLOCK, MODULES, CALLS)
    assert ran.backward == {"block": 1, "again": 1}
    assert torch.equal(ran.loss, expected.loss) is not fake_quantize
    assert torch.equal(ran.grads[-1], expected.grads[-1])  # the generator
    for a, b in zip(ran.grads[1:-1], expected.grads[1:-1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0.1, atol=0.1 * float(b.abs().max()))


@pytest.mark.parametrize(
    "way",
    [checkpointed(BLOCK, use_reentrant=True), lambda x: gradckpt.SelectiveRecompute.apply(BLOCK, None, x)],
    ids=["reentrant", "SelectiveRecompute"],
)
def test_regions_that_are_one_node_raise(way):
    with pytest.raises(RuntimeError, match=r"gradckpt: remat.region\('kept', recompute=False\) needs a graph"):
        run(way, MODULES, CALLS)


def test_a_policy_that_is_a_function_raises():
    way = checkpointed(BLOCK, policy=lambda ctx, op, *args, **kwargs: "mm" in str(op))
    with pytest.raises(RuntimeError, match="needs a policy without a function"):
        run(way, MODULES, CALLS)


@pytest.mark.parametrize("outer", [checkpointed, theirs], ids=["ours", "theirs"])
@pytest.mark.parametrize("inner", [checkpointed, theirs], ids=["ours", "theirs"])
def test_a_kept_region_of_a_region_that_runs_again_warns(outer, inner, monkeypatch):
    if outer is theirs and inner is theirs:
        pytest.skip("torch_remat raises")
    monkeypatch.setattr(BLOCK, "p", 0.0)
    nested = outer(in_sequence(inner(BLOCK), torch.cos))
    expected = run(in_sequence(BLOCK, torch.cos), MODULES, CALLS)
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="runs again"):
        ran = run(nested, MODULES, CALLS)
    assert ran.backward["kept"] == 1
    assert ran.equals(expected)


@pytest.mark.parametrize("compress", ["int8", "lossless"])
@pytest.mark.parametrize("inside", [checkpointed, theirs], ids=["ours", "theirs"])
def test_compress_saved_around(inside, compress, monkeypatch):
    monkeypatch.setattr(BLOCK, "p", 0.0)
    expected = run(inside(BLOCK), MODULES, CALLS)
    gradckpt.stats.reset()

    def function(x):
        with gradckpt.compress_saved({"codec": compress, "min_numel": 1}):
            return inside(BLOCK)(x)

    ran = run(function, MODULES, CALLS)
    assert torch.equal(ran.loss, expected.loss)
    assert gradckpt.stats()["eligible"] > 0
    assert ran.backward == {"block": 1, "again": 1}
    assert ran.equals(expected) or compress == "int8"


def test_exceptions_leave_no_state():
    def fail(x):
        raise KeyError("user")

    def function(x):
        return remat.region(fail, "fails", recompute=False)(x)

    with pytest.raises(KeyError, match="user"):
        gradckpt.checkpoint(function, X * 1)
    assert ours._found.state.get() is None
    assert run(checkpointed(BLOCK), MODULES, CALLS).equals(run(BLOCK, MODULES, CALLS))


def test_threads():
    expected, failed = run(BLOCK, MODULES, CALLS), []
    blocks = [KeptBlock(remat.region, counter(), 0.0) for _ in range(4)]
    reference = KeptBlock(remat.region, counter(), 0.0)

    def train(block):
        for _ in range(10):
            x = X.clone().requires_grad_()
            gradckpt.checkpoint(block, x * 1).square().sum().backward()
            y = X.clone().requires_grad_()
            with lock:
                reference(y * 1).square().sum().backward()
            if not torch.equal(x.grad, y.grad):
                failed.append(block)

    lock = threading.Lock()
    threads = [threading.Thread(target=train, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(block.calls["kept"] == 10 for block in blocks)
    assert expected


def test_what_is_kept_dies_with_the_graph():
    gc.collect()
    before = len(remat._region._live_regions)
    y = checkpointed(BLOCK)(X.clone().requires_grad_() * 1)
    assert len(remat._region._live_regions) == before + 1
    del y
    assert len(remat._region._live_regions) == before  # before gc runs


def test_another_torch_remat_warns(monkeypatch):
    monkeypatch.setattr(ours, "_found", None)
    monkeypatch.delattr(sys.modules["torch_remat._region"], "_Phase")
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="this torch_remat has no _Phase"):
        ran = run(checkpointed(PLAIN), MODULES, CALLS)
    assert ran.equals(run(PLAIN, MODULES, CALLS))


def test_an_import_inside_a_region_warns(monkeypatch):
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch_remat"}
    for name in modules:
        monkeypatch.delitem(sys.modules, name)

    def function(x):
        sys.modules.update(modules)
        return kept(PLAIN)(x)

    with pytest.warns(gradckpt.GradckptInactiveWarning, match="imported inside a region"):
        ran = run(checkpointed(function), MODULES, CALLS)
    assert ran.equals(run(PLAIN, MODULES, CALLS))
