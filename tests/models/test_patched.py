"""gradckpt.patched: who is served, what is left to torch, and that nothing stays behind."""

import functools
import inspect
import json
import pickle
import sys
import threading
import warnings

import processes
import pytest
import torch
import torch.utils.checkpoint
import transformers.modeling_utils  # noqa: F401 (gradckpt listens from then on, patched or not)
from model_families import (  # noqa: F401 (a fixture of every test here)
    CALL_WIDTH,
    alone,
    call_gradients,
    compressed,
    default_argument,
    early_partial,
    equal,
    error,
    model,
    nothing_left_behind,
)
from processes import in_threads
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as early
from torch.utils.checkpoint import checkpoint_sequential

import gradckpt
from gradckpt._engine.selective import contexts_of


class TestWhoIsServed:
    @pytest.mark.parametrize(
        "call",
        [
            lambda layer, x, **k: torch.utils.checkpoint.checkpoint(layer, x, **k),
            early,
            default_argument,
            lambda layer, x, **k: early_partial(layer, x),
            lambda layer, x, **k: early(layer, x),
            lambda layer, x, **k: early(function=lambda x: layer(x), x=x, **k),
        ],
        ids=["looked up", "imported early", "default argument", "partial", "use_reentrant unset", "function="],
    )
    def test_all_holders_of_the_function(self, call):
        layers = model()
        expected = call_gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch")
        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error")
            found, n = compressed(call_gradients, layers, call, use_reentrant=False)
        assert n == len(layers)
        assert equal(found, expected)

    @pytest.mark.parametrize("use_reentrant", [None, False, True])
    def test_without_compression_it_is_torch_to_the_last_bit(self, use_reentrant):
        layers = model()
        with warnings.catch_warnings(record=True) as expected_warnings:
            warnings.simplefilter("always")
            expected = call_gradients(layers, early, use_reentrant=False)
            if use_reentrant is None:
                early(layers[0], torch.randn(2, CALL_WIDTH, requires_grad=True), use_reentrant=None)
        with gradckpt.patched(None) as handle, warnings.catch_warnings(record=True) as found_warnings:
            warnings.simplefilter("always")
            # torch's reentrant form knows no autograd.grad
            found = call_gradients(layers, early, use_reentrant=False)
            early(layers[0], torch.randn(2, CALL_WIDTH, requires_grad=True), use_reentrant=use_reentrant)
        assert equal(found, expected)
        assert {str(w.message) for w in found_warnings} == {str(w.message) for w in expected_warnings}
        assert handle.stats()["reentrant"] == (use_reentrant is not False)
        assert handle.inactive_reason is None

    def test_explicit_reentrant_stays_torchs_and_is_counted(self):
        layer = model()[0]
        x = torch.randn(32, CALL_WIDTH, requires_grad=True)
        with gradckpt.patched("int8") as handle:
            y = early(layer, x * 1, use_reentrant=True)
            assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
            early(layer, x * 1, use_reentrant=False)
            assert (handle.stats()["calls"], handle.stats()["reentrant"], handle.stats()["compressed"]) == (2, 1, 1)

    @pytest.mark.parametrize("said", [{}, {"use_reentrant": False}])
    def test_sequential(self, said):
        layers = model()
        x = torch.randn(32, CALL_WIDTH, requires_grad=True)

        def step():
            return checkpoint_sequential(layers, 3, x * 1, **said).square().sum().backward()

        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compressed(step)[1] == 2

    def test_sequential_with_reentrant_is_torchs(self):
        with gradckpt.patched("int8") as handle:
            checkpoint_sequential(model(), 3, torch.randn(32, CALL_WIDTH, requires_grad=True), use_reentrant=True)
            early(nn.Identity(), torch.randn(32, CALL_WIDTH, requires_grad=True) * 1)
        assert handle.stats()["reentrant"] == 2

    def test_checkpoint_wrappers_of_torch_made_before(self):
        wrapped = nn.Sequential(*(checkpoint_wrapper(layer) for layer in model()))
        with gradckpt.patched("int8"):
            _, n = compressed(call_gradients, wrapped, lambda layer, x: layer(x))
        assert n == len(wrapped)

    def test_running_statistics_are_treated_as_torch_does(self):
        norm, twin = nn.BatchNorm1d(CALL_WIDTH), nn.BatchNorm1d(CALL_WIDTH)
        x = torch.randn(32, CALL_WIDTH, requires_grad=True)
        early(twin, x * 1, use_reentrant=False).sum().backward()
        with gradckpt.patched("raw"):
            early(norm, x * 1, use_reentrant=False).sum().backward()
        assert norm.num_batches_tracked == twin.num_batches_tracked == 2
        assert torch.equal(norm.running_mean, twin.running_mean)

    def test_replay_and_config(self):
        layers = model()
        config = {"codec": "int4", "min_numel": 0, "fake_quantize": True}
        with gradckpt.patched({"codec": "int4", "min_numel": 0}, fake_quantize=True) as handle:
            assert handle.config == gradckpt.CompressionConfig(**config)
            found = call_gradients(layers, early, use_reentrant=False)
        assert equal(found, call_gradients(layers, gradckpt.checkpoint, compress=config, buffers="torch"))

    def test_policy(self):
        layers, ran = model(), []
        policy = gradckpt.policies.save_matmuls

        def spied(layer, x):
            def region(x):
                ran.append(layer)
                return layer(x)

            return early(region, x, use_reentrant=False)

        with gradckpt.patched("int8", policy=policy):
            found = call_gradients(layers, spied)
        contexts = contexts_of(policy)
        expected = call_gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch", context_fn=contexts)
        assert equal(found, expected)
        assert not equal(found, call_gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch"))

    def test_a_regions_own_context_wins_over_the_policy(self):
        entered = []

        class Context:
            def __enter__(self):
                entered.append(self)

            def __exit__(self, *_):
                pass

        layer, x = model()[0], torch.randn(32, CALL_WIDTH, requires_grad=True)
        with gradckpt.patched("int8", policy="save_matmuls"):
            early(layer, x * 1, use_reentrant=False, context_fn=lambda: (Context(), Context())).sum().backward()
            assert len(entered) == 2

    def test_debug_wins_over_the_policy(self):
        """Alone: torch's log of operators has records that pytest's handlers cannot format."""
        script = """
        import torch, gradckpt
        from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled
        layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
        with gradckpt.patched("int8", policy="save_matmuls") as handle:
            checkpoint(layer, x * 1, use_reentrant=False, debug=True).sum().backward()
            with set_checkpoint_debug_enabled(True):
                checkpoint(layer, x * 1, use_reentrant=False).sum().backward()
        print(handle.stats()["compressed"])
        """
        assert alone(script).split() == ["2"]

    def test_torchs_errors(self):
        with gradckpt.patched("int8") as handle:
            if not callable(getattr(torch.utils.checkpoint, "_checkpoint_impl", None)):  # else it is a decorator
                with pytest.raises(TypeError, match="missing 1 required positional argument: 'function'"):
                    early()
            with pytest.raises(ValueError, match="Unexpected keyword arguments: z"):
                early(torch.sin, torch.ones(2), use_reentrant=True, z=1)
            with pytest.raises(ValueError, match="determinism_check should be one of"):
                early(torch.sin, torch.ones(2, requires_grad=True) * 1, use_reentrant=False, determinism_check="x")
            handle.remove()

    def test_explicit_calls_of_gradckpt_are_not_touched(self):
        layers = model()
        with gradckpt.patched("int8"):
            assert compressed(call_gradients, layers, gradckpt.checkpoint)[1] == 0
            assert compressed(call_gradients, layers, gradckpt.compat.checkpoint, use_reentrant=False)[1] == 0


class TestNothingLeftBehind:
    def test_identity_pickle_and_signature_while_active(self):
        before = inspect.signature(early)
        with gradckpt.patched("int8"):
            assert torch.utils.checkpoint.checkpoint is early
            assert pickle.loads(pickle.dumps(early_partial)).func is early
            assert inspect.signature(early) == before
            assert next(iter(before.parameters)) == "function"

    def test_after_an_exception(self):
        with pytest.raises(ZeroDivisionError), gradckpt.patched("int8"):
            early(lambda x: 1 / 0, torch.ones(2, requires_grad=True) * 1, use_reentrant=False)

    def test_backward_after_the_block(self):
        layer, x = model()[0], torch.randn(32, CALL_WIDTH, requires_grad=True)
        with gradckpt.patched("int8"):
            y = early(layer, x * 1, use_reentrant=False)
        y.sum().backward()
        assert x.grad.abs().sum() > 0

    def test_any_order_and_the_innermost_counts(self):
        def codec_now():
            before = gradckpt.stats()["bytes_out"]
            call_gradients(model()[:1], early, use_reentrant=False)
            return gradckpt.stats()["bytes_out"] - before

        first, second = gradckpt.patched("int8"), gradckpt.patched("int4")
        first.start()
        second.__enter__()
        int4 = codec_now()
        second.remove()
        int8 = codec_now()
        assert int4 < int8
        second.__enter__()
        first.remove()
        assert codec_now() == int4
        third = gradckpt.patched("int8").start()
        third.remove()
        third.remove()
        assert codec_now() == int4
        second.remove()
        assert codec_now() == 0

    def test_start_again_takes_the_earlier_ones_place(self):
        """A notebook's cell that runs twice."""
        earlier = gradckpt.patched("int8").start()
        with gradckpt.patched("int4") as block:
            handle = gradckpt.patched("int8").start()
            assert (earlier.active, block.active, handle.active) == (False, True, True)
        handle.remove()
        assert compressed(call_gradients, model(), early, use_reentrant=False)[1] == 0

    def test_decorator(self):
        calls = []

        @gradckpt.patched("int8")
        def train(depth):
            """Trains."""
            calls.append(compressed(call_gradients, model(), early, use_reentrant=False)[1])
            if depth:
                train(depth - 1)
            return depth

        assert train(1) == 1
        assert calls == [4, 4]
        assert train.__doc__ == "Trains."
        assert compressed(call_gradients, model(), early, use_reentrant=False)[1] == 0

    def test_threads_share_it(self):
        found, inside, done = [], threading.Event(), threading.Event()

        def work():
            inside.wait(30)
            found.append(call_gradients(model(), early, use_reentrant=False))
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        with gradckpt.patched("raw") as handle:
            inside.set()
            done.wait(30)
            assert handle.stats()["compressed"] == 4
        thread.join()
        assert equal(found[0], call_gradients(model(), early, use_reentrant=False))

    def test_many_threads_that_come_and_go(self):
        exact, wrong = call_gradients(model(), early, use_reentrant=False), []

        def work(codec):
            for _ in range(20):
                with gradckpt.patched(codec):
                    layers = model()
                    x = torch.randn(32, CALL_WIDTH, requires_grad=True) * 1
                    for layer in layers:
                        x = early(layer, x, use_reentrant=False)
                    torch.autograd.grad(x.sum(), list(layers.parameters()))
                    wrong.extend([] if torch.isfinite(x).all() else [codec])

        in_threads(*(functools.partial(work, codec) for codec in ("raw", "int8", None)))
        assert wrong == []
        assert equal(call_gradients(model(), early, use_reentrant=False), exact)

    def test_a_forked_child_inherits_it(self):
        processes.alone(fork_while_patched)


def fork_while_patched():
    def child():
        assert compressed(call_gradients, model(), early, use_reentrant=False)[1] == 4

    with gradckpt.patched("int8"):
        processes.in_child(child)
        call_gradients(model(), early, use_reentrant=False)


class TestItsStats:
    def step(self, rows):
        return early(nn.Tanh(), torch.randn(rows, CALL_WIDTH, requires_grad=True) * 1, use_reentrant=False)

    def size(self, rows):
        return gradckpt.codecs.encode(torch.zeros(rows, CALL_WIDTH), "int8").nbytes

    def test_the_peak_is_that_of_the_block(self):
        """While blocks begin and end in each other, and the process's own is left alone."""
        gradckpt.stats.reset()
        with gradckpt.patched("int8") as first:
            self.step(512)
        assert first.stats()["peak_live_bytes"] == self.size(512)
        with gradckpt.patched("int8") as outer:
            self.step(64)
            with gradckpt.patched("int8") as inner:
                self.step(128)
                assert inner.stats()["peak_live_bytes"] == self.size(128)
                kept = self.step(32)
            self.step(256)
            assert outer.stats()["peak_live_bytes"] == self.size(32) + self.size(256)
        later = gradckpt.patched("int8").start()
        assert later.stats()["peak_live_bytes"] == self.size(32), "alive before, and still"
        del kept
        later.remove()
        assert [each.stats()["peak_live_bytes"] for each in (first, outer, inner, later)] == [
            self.size(512),
            self.size(32) + self.size(256),
            self.size(128),
            self.size(32),
        ]
        assert gradckpt.stats()["peak_live_bytes"] == self.size(512)

    def test_a_reset_begins_its_peak_too(self):
        with gradckpt.patched("int8") as handle:
            self.step(512)
            gradckpt.stats.reset()
            self.step(64)
            with gradckpt.patched(None):
                assert handle.stats()["peak_live_bytes"] == gradckpt.stats()["peak_live_bytes"] == self.size(64)

    def test_they_print_as_those_of_gradckpt(self):
        gradckpt.stats.reset()
        with gradckpt.patched("int8") as handle:
            self.step(64).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                early(nn.Identity(), torch.ones(2, requires_grad=True), use_reentrant=True)
            found, expected = ([line.split() for line in str(s()).splitlines()] for s in (handle.stats, gradckpt.stats))
        assert [line for line in found if line not in expected] == [["left", "to", "torch:", "use_reentrant=True", "1"]]
        assert [line for line in found if line in expected] == expected
        assert found[0][:4] == ["checkpoints", "at", "the", "peak:"]
        assert handle.stats().scalars()["gradckpt/reentrant"] == 1
        assert json.loads(json.dumps(handle.stats()))["calls"] == 2
        assert repr(handle) == "<gradckpt.patched('int8'): not active>"


class TestErrors:
    def test_twice(self):
        with gradckpt.patched("int8") as handle:
            with pytest.raises(RuntimeError, match=r"this patched\(\) is active already"):
                handle.start()
            assert handle.active
            call_gradients(model(), early, use_reentrant=False)
        with handle:  # one after the other is fine
            assert handle.stats()["calls"] == 0
        assert not handle.active

    def test_another_function_in_torchs_place(self, monkeypatch):
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", gradckpt.compat.checkpoint)
        with pytest.raises(RuntimeError, match=r"is gradckpt\.compat\.checkpoint, not torch's own function"):
            gradckpt.patched("int8").start()
        monkeypatch.undo()
        assert compressed(call_gradients, model(), early, use_reentrant=False)[1] == 0

    def test_a_later_replacement_is_named(self, monkeypatch):
        def foreign(function, *args, **keywords):
            return function(*args)

        handle = gradckpt.patched("int8").start()
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", foreign)
        assert "foreign" in handle.inactive_reason
        monkeypatch.undo()
        handle.remove()

    def test_what_cannot_be_decorated(self):
        async def coroutine():
            pass

        def generator():
            yield

        for thing in (coroutine, generator, nn.Linear, 3):
            with pytest.raises(TypeError, match=r"patched\(\) (cannot decorate|decorates)"):
                gradckpt.patched("int8")(thing)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
