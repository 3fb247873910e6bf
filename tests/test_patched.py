"""gradckpt.patched: who is served, what is left to torch, and that nothing stays behind."""

import copy
import functools
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
import transformers.modeling_utils  # noqa: F401 (gradckpt listens from then on, patched or not)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint as early
from torch.utils.checkpoint import checkpoint_sequential

import gradckpt
from gradckpt import GradckptInactiveWarning

ROOT = Path(__file__).parent.parent
WIDTH = 64
early_partial = functools.partial(early, use_reentrant=False)


def default_argument(layer, x, function=early, **keywords):
    return function(layer, x, **keywords)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


def gradients(layers, call, **keywords):
    """Of one step through the layers, each of them a region."""
    torch.manual_seed(1)
    x = torch.randn(32, WIDTH, requires_grad=True) * 1
    for layer in layers:
        x = call(layer, x, **keywords)
    return torch.autograd.grad(x.square().sum(), list(layers.parameters()))


def compressed(function, *args, **keywords):
    """What the function returns, and how many tensors it compressed."""
    before = gradckpt.stats()["compressed"]
    result = function(*args, **keywords)
    return result, gradckpt.stats()["compressed"] - before


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(a, b):
    a, b = (torch.cat([x.flatten() for x in tensors]) for tensors in (a, b))
    return ((a - b).norm() / b.norm()).item()


def stock():
    """torch's functions as a user can look at them."""
    found = []
    for function in (early, checkpoint_sequential):
        inner = inspect.unwrap(function)
        own = {key: value for key, value in vars(inner).items() if key != "__dynamo_disable"}
        found += [function, inner, inner.__code__, inner.__defaults__, inner.__kwdefaults__, own]
        found += [
            inner.__globals__,
            inner.__closure__,
            inner.__module__,
            inner.__qualname__,
            inspect.signature(function),
        ]
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [*found, torch.utils.checkpoint.checkpoint, *(list(h) for h in hooks)]


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = stock()
    yield
    after = stock()
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))


class TestWhoIsServed:
    @pytest.mark.parametrize(
        "call",
        [
            lambda layer, x, **k: torch.utils.checkpoint.checkpoint(layer, x, **k),
            early,
            default_argument,
            lambda layer, x, **k: early_partial(layer, x),
            lambda layer, x, **k: early(function=lambda x: layer(x), x=x, **k),
        ],
        ids=["looked up", "imported early", "default argument", "partial", "function="],
    )
    def test_whoever_holds_the_function(self, call):
        layers = model()
        expected = gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch")
        with gradckpt.patched("int8"):
            found, n = compressed(gradients, layers, call, use_reentrant=False)
        assert n == len(layers)
        assert equal(found, expected)

    def test_gradients_within_the_bound_of_the_codec(self):
        layers = model()
        exact = gradients(layers, early, use_reentrant=False)
        with gradckpt.patched("int8"):
            assert 0 < error(gradients(layers, early, use_reentrant=False), exact) < 0.01
        assert equal(gradients(layers, early, use_reentrant=False), exact)

    @pytest.mark.parametrize("use_reentrant", [None, False, True])
    def test_without_compression_it_is_torch_to_the_last_bit(self, use_reentrant):
        layers = model()
        with warnings.catch_warnings(record=True) as expected_warnings:
            warnings.simplefilter("always")
            expected = gradients(layers, early, use_reentrant=False)
            if use_reentrant is None:
                early(layers[0], torch.randn(2, WIDTH, requires_grad=True), use_reentrant=None)
        with gradckpt.patched(None) as handle, warnings.catch_warnings(record=True) as found_warnings:
            warnings.simplefilter("always")
            # torch's reentrant form knows no autograd.grad
            found = gradients(layers, early, use_reentrant=False)
            early(layers[0], torch.randn(2, WIDTH, requires_grad=True), use_reentrant=use_reentrant)
        assert equal(found, expected)
        assert {str(w.message) for w in found_warnings} == {str(w.message) for w in expected_warnings}
        assert handle.stats()["reentrant"] == (use_reentrant is not False)
        assert handle.inactive_reason is None

    def test_use_reentrant_that_nobody_said_is_ours_and_says_nothing(self):
        layers = model()
        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error")
            found, n = compressed(gradients, layers, early)
        assert n == len(layers)
        assert equal(found, gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch"))

    def test_explicit_reentrant_stays_torchs_and_is_counted(self):
        layer = model()[0]
        x = torch.randn(32, WIDTH, requires_grad=True)
        with gradckpt.patched("int8") as handle:
            y = early(layer, x * 1, use_reentrant=True)
            assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
            early(layer, x * 1, use_reentrant=False)
            assert (handle.stats()["calls"], handle.stats()["reentrant"], handle.stats()["compressed"]) == (2, 1, 1)

    @pytest.mark.parametrize("said", [{}, {"use_reentrant": False}])
    def test_sequential(self, said):
        layers = model()
        x = torch.randn(32, WIDTH, requires_grad=True)

        def step():
            return checkpoint_sequential(layers, 3, x * 1, **said).square().sum().backward()

        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compressed(step)[1] == 2

    def test_sequential_with_reentrant_is_torchs(self):
        with gradckpt.patched("int8") as handle:
            checkpoint_sequential(model(), 3, torch.randn(32, WIDTH, requires_grad=True), use_reentrant=True)
            early(nn.Identity(), torch.randn(32, WIDTH, requires_grad=True) * 1)
        assert handle.stats()["reentrant"] == 2

    def test_checkpoint_wrappers_of_torch_made_before(self):
        wrapped = nn.Sequential(*(checkpoint_wrapper(layer) for layer in model()))
        with gradckpt.patched("int8"):
            _, n = compressed(gradients, wrapped, lambda layer, x: layer(x))
        assert n == len(wrapped)

    def test_keywords_of_the_region_that_are_called_as_ours(self):
        def region(x, compress, buffers):
            return x * compress + buffers

        x = torch.randn(32, WIDTH, requires_grad=True)
        with gradckpt.patched("int8"):
            y, n = compressed(early, region, x * 1, compress=2.0, buffers=1.0, use_reentrant=False)
        assert n == 1
        assert torch.equal(y, x * 2 + 1)

    def test_running_statistics_are_treated_as_torch_does(self):
        norm, twin = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        x = torch.randn(32, WIDTH, requires_grad=True)
        early(twin, x * 1, use_reentrant=False).sum().backward()
        with gradckpt.patched("raw"):
            early(norm, x * 1, use_reentrant=False).sum().backward()
        assert norm.num_batches_tracked == twin.num_batches_tracked == 2
        assert torch.equal(norm.running_mean, twin.running_mean)

    def test_replay_and_config(self):
        layers = model()
        config = {"codec": "int4", "min_numel": 0, "replay": True}
        with gradckpt.patched({"codec": "int4", "min_numel": 0}, replay=True) as handle:
            assert handle.config == gradckpt.CompressionConfig(**config)
            found = gradients(layers, early, use_reentrant=False)
        assert equal(found, gradients(layers, gradckpt.checkpoint, compress=config, buffers="torch"))

    def test_policy(self):
        layers, ran = model(), []
        policy = gradckpt.policies.save_matmuls

        def spied(layer, x):
            def region(x):
                ran.append(layer)
                return layer(x)

            return early(region, x, use_reentrant=False)

        with gradckpt.patched("int8", policy=policy):
            found = gradients(layers, spied)
        contexts = gradckpt.policies.contexts_of(policy)
        expected = gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch", context_fn=contexts)
        assert equal(found, expected)
        assert not equal(found, gradients(layers, gradckpt.checkpoint, compress="int8", buffers="torch"))

    def test_a_regions_own_context_wins_over_the_policy(self):
        entered = []

        class Context:
            def __enter__(self):
                entered.append(self)

            def __exit__(self, *_):
                pass

        layer, x = model()[0], torch.randn(32, WIDTH, requires_grad=True)
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
            assert compressed(gradients, layers, gradckpt.checkpoint)[1] == 0
            assert compressed(gradients, layers, gradckpt.compat.checkpoint, use_reentrant=False)[1] == 0


class TestNothingLeftBehind:
    def test_identity_pickle_and_signature_while_active(self):
        before = inspect.signature(early)
        with gradckpt.patched("int8"):
            assert torch.utils.checkpoint.checkpoint is early
            assert pickle.loads(pickle.dumps(early_partial)).func is early
            assert inspect.signature(early) == before
            assert next(iter(before.parameters)) == "function"

    def test_every_function_and_class_in_torch_and_transformers_is_the_same_object(self):
        def snapshot():
            kinds = (type, type(lambda: 0), type(len), functools.partial)
            return {
                (room, name): thing
                for room, module in sorted(sys.modules.items())
                if room.split(".")[0] in ("torch", "transformers", "accelerate")
                for name, thing in vars(module).items()
                if isinstance(thing, kinds)
            }

        late = "transformers.models.gpt_neox.modeling_gpt_neox"
        sys.modules.pop(late, None)
        before = snapshot()
        with gradckpt.patched("int8"):
            importlib.import_module(late)
            gradients(model(), early, use_reentrant=False)
        after = snapshot()
        # transformers forgets lazily looked up names of its own when a module of it is imported
        assert {key: after.get(key, thing) for key, thing in before.items()} == before
        assert any(room == late for room, _ in after)
        strangers = [k for k, thing in after.items() if getattr(thing, "__module__", "") == "gradckpt.patched"]
        assert strangers == []

    def test_after_an_exception(self):
        with pytest.raises(ZeroDivisionError), gradckpt.patched("int8"):
            early(lambda x: 1 / 0, torch.ones(2, requires_grad=True) * 1, use_reentrant=False)

    def test_backward_after_the_block(self):
        layer, x = model()[0], torch.randn(32, WIDTH, requires_grad=True)
        with gradckpt.patched("int8"):
            y = early(layer, x * 1, use_reentrant=False)
        y.sum().backward()
        assert x.grad.abs().sum() > 0

    def test_any_order_and_the_innermost_counts(self):
        def codec_now():
            before = gradckpt.stats()["bytes_out"]
            gradients(model()[:1], early, use_reentrant=False)
            return gradckpt.stats()["bytes_out"] - before

        first, second = gradckpt.patched("int8").start(), gradckpt.patched("int4").start()
        int4 = codec_now()
        second.remove()
        int8 = codec_now()
        assert int4 < int8
        second.start()
        first.remove()
        assert codec_now() == int4
        third = gradckpt.patched("int8").start()
        third.remove()
        third.remove()
        assert codec_now() == int4
        second.remove()
        assert codec_now() == 0

    def test_decorator(self):
        calls = []

        @gradckpt.patched("int8")
        def train(depth):
            """Trains."""
            calls.append(compressed(gradients, model(), early, use_reentrant=False)[1])
            if depth:
                train(depth - 1)
            return depth

        assert train(1) == 1
        assert calls == [4, 4]
        assert train.__doc__ == "Trains."
        assert compressed(gradients, model(), early, use_reentrant=False)[1] == 0

    def test_threads_share_it(self):
        found, inside, done = [], threading.Event(), threading.Event()

        def work():
            inside.wait(30)
            found.append(gradients(model(), early, use_reentrant=False))
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        with gradckpt.patched("raw") as handle:
            inside.set()
            done.wait(30)
            assert handle.stats()["compressed"] == 4
        thread.join()
        assert equal(found[0], gradients(model(), early, use_reentrant=False))

    def test_many_threads_that_come_and_go(self):
        exact, wrong = gradients(model(), early, use_reentrant=False), []

        def work(codec):
            for _ in range(20):
                with gradckpt.patched(codec):
                    layers = model()
                    x = torch.randn(32, WIDTH, requires_grad=True) * 1
                    for layer in layers:
                        x = early(layer, x, use_reentrant=False)
                    torch.autograd.grad(x.sum(), list(layers.parameters()))
                    wrong.extend([] if torch.isfinite(x).all() else [codec])

        threads = [threading.Thread(target=work, args=(codec,)) for codec in ("raw", "int8", None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert equal(gradients(model(), early, use_reentrant=False), exact)

    def test_a_forked_child_inherits_it(self):
        with gradckpt.patched("int8"):
            pid = os.fork()
            if pid == 0:
                os._exit(compressed(gradients, model(), early, use_reentrant=False)[1])
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
            gradients(model(), early, use_reentrant=False)


class TestErrors:
    def test_twice(self):
        with gradckpt.patched("int8") as handle:
            with pytest.raises(RuntimeError, match=r"this patched\(\) is active already"):
                handle.start()
            assert handle.active
            gradients(model(), early, use_reentrant=False)
        with handle:  # one after the other is fine
            assert handle.stats()["calls"] == 0
        assert not handle.active

    @pytest.mark.parametrize(
        ("keywords", "kind", "match"),
        [
            ({"compress": "int9"}, ValueError, "unknown codec 'int9'; choose one of: raw"),
            ({"compress": 8}, TypeError, "compress= takes None"),
            ({"policy": "save_everything"}, ValueError, "unknown policy 'save_everything'; choose one of"),
            ({"replay": 1}, TypeError, "replay is True or False"),
        ],
    )
    def test_bad_arguments_before_anything_happens(self, keywords, kind, match):
        with pytest.raises(kind, match=match):
            gradckpt.patched(**keywords)

    def test_somebody_else_in_torchs_place(self, monkeypatch):
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", gradckpt.compat.checkpoint)
        with pytest.raises(RuntimeError, match=r"is gradckpt\.compat\.checkpoint, not torch's own function"):
            gradckpt.patched("int8").start()
        monkeypatch.undo()
        assert compressed(gradients, model(), early, use_reentrant=False)[1] == 0

    def test_somebody_who_comes_later_is_named(self, monkeypatch):
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


def train(call, steps=2, **keywords):
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(32, WIDTH, requires_grad=True) * 1
        for layer in layers:
            x = call(layer, x, **keywords)
        x.square().sum().backward()
        optimizer.step()


class TestInactive:
    """Asking for compression where it cannot act warns by the second step."""

    def expect(self, match, call, **keywords):
        with gradckpt.patched("int8") as handle:
            with pytest.warns(GradckptInactiveWarning, match=match) as caught:
                train(call, **keywords)
            assert len(caught) == 1
            assert caught[0].filename == __file__  # the line of optimizer.step()
            train(call, **keywords)  # once is enough, also at the end of the block
        assert handle.stats()["compressed"] == 0

    def test_nothing_calls_checkpoint(self):
        self.expect("nothing in this process called .*gradient_checkpointing=True", lambda layer, x: layer(x))

    def test_only_calls_of_gradckpt_without_compression(self):
        self.expect("called gradckpt themselves, without compression", gradckpt.checkpoint)

    def test_only_calls_of_gradckpt_that_keep_their_inputs(self):
        train(gradckpt.checkpoint, compress="raw")  # the engine has said its word in this process
        large = {"codec": "int8", "min_numel": 10**6}
        self.expect(r"kept because: smaller than min_numel", gradckpt.checkpoint, compress=large)

    def test_all_reentrant(self):
        self.expect("all 8 calls of checkpoint passed use_reentrant=True", early, use_reentrant=True)

    def test_a_policy_that_no_region_gets(self):
        said = "policy did nothing: all 8 calls .*use_reentrant=True"
        with gradckpt.patched(None, policy="save_matmuls"), pytest.warns(GradckptInactiveWarning, match=said):
            train(early, use_reentrant=True)
        with gradckpt.patched(None, policy="save_matmuls") as handle:
            train(early, use_reentrant=False)
            assert handle.inactive_reason is None

    def test_inputs_are_kept(self):
        train(gradckpt.checkpoint, compress="raw")  # the engine has said its word in this process
        self.expect("closing over them", lambda layer, x: early(lambda: layer(x), use_reentrant=False))

    def test_at_the_end_of_the_block_when_there_is_no_optimizer(self):
        x = torch.randn(32, WIDTH, requires_grad=True)
        with pytest.warns(GradckptInactiveWarning, match="use_reentrant=True"), gradckpt.patched("int8"):
            early(torch.sin, x * 1, use_reentrant=True).sum().backward()

    def test_nothing_is_said_when_something_was_compressed_or_nothing_asked(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", GradckptInactiveWarning)
            with gradckpt.patched("int8"):
                train(early, use_reentrant=False)
            with gradckpt.patched(None):
                train(lambda layer, x: layer(x))
            with gradckpt.patched("int8"):
                train(early, use_reentrant=False)
                gradckpt.reset_stats()
            with gradckpt.patched("int8"), torch.no_grad():
                early(torch.sin, torch.ones(2), use_reentrant=False)
            with gradckpt.patched("int8"):
                pass
            with pytest.raises(KeyError), gradckpt.patched("int8"):
                early(torch.sin, torch.ones(2), use_reentrant=True)
                raise KeyError

    def test_engine_and_patch_do_not_say_it_twice(self):
        script = """
            import torch, warnings, gradckpt
            from torch.utils.checkpoint import checkpoint
            layer = torch.nn.Linear(4, 4)  # smaller than min_numel
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught, gradckpt.patched("int8"):
                warnings.simplefilter("always")
                for _ in range(3):
                    checkpoint(layer, layer(torch.randn(2, 4)), use_reentrant=False).sum().backward()
                    optimizer.step()
            print(len(caught), caught[0].message)
        """
        found = alone(script)
        assert found.startswith("1 ")
        assert "smaller than min_numel" in found

    def test_stats_of_one_block(self):
        train(early, use_reentrant=False)
        with gradckpt.patched("int8") as first:
            train(early, steps=1, use_reentrant=False)
            with gradckpt.patched("int4") as second:
                train(early, steps=1, use_reentrant=False)
        train(gradckpt.checkpoint, compress="int8")
        assert (first.stats()["calls"], second.stats()["calls"]) == (4, 4)
        assert (first.stats()["compressed"], second.stats()["compressed"]) == (8, 4)
        assert second.stats()["bytes_in"] == 4 * 32 * WIDTH * 4
        assert 0.12 < second.stats()["ratio"] < 0.14
        json.dumps(second.stats())

    def test_counters_begin_anew_with_reset_stats(self):
        train(gradckpt.checkpoint, compress="int8")
        with gradckpt.patched("int8") as handle:
            train(early, steps=1, use_reentrant=False)
            gradckpt.reset_stats()
            train(early, steps=6, use_reentrant=False)  # more regions than were counted at the start
            assert handle.stats()["compressed"] == 24
            handle.remove()
        gradckpt.reset_stats()
        assert handle.stats()["compressed"] == 24


def alone(script):
    """Standard output of a program of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestCompile:
    def test_what_is_compiled_meanwhile_compresses(self):
        layers = nn.Sequential(*(layer[:2] for layer in model()))

        def forward(x):
            for layer in layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x.square().sum()

        x = torch.randn(32, WIDTH, requires_grad=True)
        parameters = list(layers.parameters())
        exact = torch.autograd.grad(forward(x * 1), parameters)
        with gradckpt.patched("int8"):
            eager = torch.autograd.grad(forward(x * 1), parameters)
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        for _ in range(2):  # once more: what is compiled is compiled again when the patch comes or goes
            with gradckpt.patched("int8") as handle:
                found = torch.autograd.grad(compiled(x * 1), parameters)
                assert handle.inactive_reason is None
            assert error(found, eager) < 2e-3  # the last region's output is made again, too, for the square's gradient
            assert error(found, exact) > 1e-4
            with gradckpt.patched("lossless"):
                assert error(torch.autograd.grad(compiled(x * 1), parameters), exact) < 1e-5
            assert error(torch.autograd.grad(compiled(x * 1), parameters), exact) < 1e-5
        torch._dynamo.reset()

    @pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"preserve_rng_state": False}])
    def test_afterwards_graphs_are_torchs(self, options):
        """Dynamo keeps the function that it was given; outside of a patch it traces what it would by itself."""
        script = """
        import sys; sys.path.insert(0, {tests!r})
        import torch
        from torch.utils.checkpoint import checkpoint
        from compiled_graphs import Graphs
        if {patched}:
            import gradckpt
            with gradckpt.patched("int8"):
                pass
        graphs = Graphs()
        w = torch.ones(64, 64, requires_grad=True)
        f = graphs.compile(lambda x: checkpoint(lambda t: (t @ w).sin() @ w, x * 2, **{options}))
        f(torch.ones(64, 64, requires_grad=True)).sum().backward()
        print(graphs.forward[0].graph, graphs.backward[0].graph)
        """
        outputs = [
            alone(script.format(tests=str(ROOT / "tests"), patched=patched, options=options))
            for patched in (False, True)
        ]
        assert "region_input" not in outputs[0]
        assert outputs[0] == outputs[1]

    def test_no_compression_under_compile_says_so(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def forward(x, layer):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        with gradckpt.patched("int8") as handle:
            forward(torch.randn(32, WIDTH, requires_grad=True), nn.Linear(WIDTH, WIDTH)).sum().backward()  # a leaf
            assert "was traced" in handle.inactive_reason
            handle.remove()
        torch._dynamo.reset()

    def test_compiled_layers_inside_eager_regions_compress(self):
        layers = nn.Sequential(*(layer[:2] for layer in model()))
        exact = gradients(layers, early, use_reentrant=False)
        torch._dynamo.reset()
        compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in layers))
        with gradckpt.patched("int8"):
            found, n = compressed(gradients, compiled, early, use_reentrant=False)
        assert n == len(layers)
        assert error(found, exact) < 0.01
        torch._dynamo.reset()

    def test_explicit_calls_in_compiled_code_compress(self):
        layers = nn.Sequential(*(layer[:2] for layer in model()))
        exact = gradients(layers, early, use_reentrant=False)
        torch._dynamo.reset()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def forward(x):
            for layer in layers:
                x = gradckpt.checkpoint(layer, x, compress="int8")
            return x

        with gradckpt.patched("int8") as handle:
            torch.manual_seed(1)
            x = torch.randn(32, WIDTH, requires_grad=True) * 1
            found = torch.autograd.grad(forward(x).square().sum(), list(layers.parameters()))
            assert handle.stats()["compiled_tensors"] > 0
            assert handle.inactive_reason is None
        assert error(found, exact) < 0.01
        torch._dynamo.reset()

    def test_a_graph_that_runs_as_dynamo_made_it_compresses(self):
        """It calls torch's checkpoint; so backend="eager" is no reason for a warning here."""
        layers = nn.Sequential(*(layer[:2] for layer in model()))
        torch._dynamo.reset()
        forward = torch.compile(lambda layer, x: early(layer, x, use_reentrant=False), backend="eager", fullgraph=True)
        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error", GradckptInactiveWarning)
            _, n = compressed(gradients, layers, forward)
        assert n == len(layers)
        torch._dynamo.reset()

    def test_a_compiled_optimizer_step(self):
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        torch._dynamo.reset()

        @torch.compile(backend="eager")  # torch breaks the graph in it by itself
        def step():
            optimizer.step()

        with gradckpt.patched("int8"):
            layer(torch.ones(2, 4)).sum().backward()
            before = layer.weight.detach().clone()
            step()
        assert not torch.equal(layer.weight, before)
        torch._dynamo.reset()

    def test_fake_tensors_go_through_torchs(self):
        from torch._subclasses import FakeTensorMode

        with gradckpt.patched("int8") as handle, FakeTensorMode():
            early(nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH, requires_grad=True) * 1, use_reentrant=False)
            assert handle.stats()["traced"] == 1
            handle.remove()


def replica(module):
    """As DataParallel makes one: the modules copied, the parameters those of the original (here: shared)."""
    copy = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copy._modules[name] = replica(child)
    copy._parameters = dict(module._parameters)
    return copy


class TestTransformers:
    @pytest.fixture
    def llama(self):
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers = pytest.importorskip("transformers")

        def build():
            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
            )
            return transformers.LlamaForCausalLM(config).train()

        return build

    IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))

    def step(self, model):
        model.zero_grad()
        model(input_ids=self.IDS, labels=self.IDS).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    @pytest.mark.parametrize("before", [True, False], ids=["enabled before", "enabled inside"])
    def test_layers(self, llama, before):
        model, twin = llama(), llama()
        gradckpt.enable(twin, compress="int8")
        if before:
            model.activation_checkpointing_enable()
        with gradckpt.patched("int8"):
            if not before:
                model.activation_checkpointing_enable()
            found, n = compressed(self.step, model)
        assert n == 4
        assert equal(found, self.step(twin))
        after, n = compressed(self.step, model)
        assert n == 0
        assert error(found, after) < 0.01
        gradckpt.disable(twin)

    @pytest.mark.parametrize(
        "change",
        [
            copy.deepcopy,
            lambda model: model.to(torch.float64).to(torch.float32),
            lambda model: model if model.load_state_dict(copy.deepcopy(model.state_dict())) else None,
            lambda model: (model.activation_checkpointing_disable(), model.activation_checkpointing_enable(), model)[2],
            lambda model: (gradckpt.enable(model).remove(), model.activation_checkpointing_enable(), model)[2],
        ],
        ids=["deepcopy", "to", "state_dict", "off and on", "enable and remove"],
    )
    def test_what_happens_to_models(self, llama, change):
        model = llama()
        model.activation_checkpointing_enable()
        with gradckpt.patched("int8"):
            assert compressed(self.step, model)[1] == 4
            assert compressed(self.step, change(model))[1] == 4

    def test_frozen_embeddings(self, llama):
        """The leaf of enable_input_require_grads is nobody else's, so it is compressed, too."""
        model = llama()
        model.activation_checkpointing_enable()
        model.get_input_embeddings().requires_grad_(False)
        with gradckpt.patched("int8"):
            assert compressed(self.step, model)[1] == 4

    def test_a_users_leaf_is_kept(self):
        x = torch.randn(32, WIDTH, requires_grad=True)
        with gradckpt.patched("int8") as handle:
            early(nn.Linear(WIDTH, WIDTH), x, use_reentrant=False).sum().backward()
            assert handle.stats()["kept"] == {"leaf": 1}
            handle.remove()

    def test_a_pickle_from_inside_is_a_stock_model(self, llama, tmp_path):
        model = llama()
        with gradckpt.patched("int8"):
            model.activation_checkpointing_enable()
            for handle in model._require_grads_hooks if hasattr(model, "_require_grads_hooks") else []:
                handle.remove()  # a local function of transformers, which no pickle can carry
            model._require_grads_hooks = []
            self.step(model)
            torch.save(model, tmp_path / "model.pt")
        found = alone(f"""
            import sys, torch
            model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
            ids = torch.zeros(2, 32, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
            print(model.is_gradient_checkpointing, "gradckpt" in sys.modules)
        """)
        assert found.split() == ["True", "False"]

    def test_with_enable(self, llama):
        """Who enabled a model said what it is to do; otherwise the patch says it."""
        model = llama()
        with gradckpt.patched("int8"):
            handle = gradckpt.enable(model, compress=None)
            assert compressed(self.step, model)[1] == 0
            handle.remove()
            model.activation_checkpointing_enable()
            assert compressed(self.step, model)[1] == 4
        handle = gradckpt.enable(model, compress="int8")
        with gradckpt.patched(None):
            assert compressed(self.step, model)[1] == 4
        handle.remove()

    def test_data_parallel_replicas(self, llama):
        """As DataParallel runs them: copies of the model in threads."""
        model = llama()
        model.activation_checkpointing_enable()
        replicas = [replica(model) for _ in range(2)]
        with gradckpt.patched("int8") as handle:
            inputs = [{"input_ids": self.IDS, "labels": self.IDS}] * 2
            threads = [
                threading.Thread(target=lambda r=r, i=i: r(**i).loss.backward())
                for r, i in zip(replicas, inputs, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert handle.stats()["compressed"] == 8

    @pytest.mark.parametrize(("version", "n"), [("4.57.0", 4), ("5.23.0", 0)])
    def test_transformers_4_says_reentrant_by_default(self, llama, monkeypatch, version, n):
        import transformers

        model = llama()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
        monkeypatch.setattr(transformers, "__version__", version)
        with gradckpt.patched("int8") as handle:
            assert compressed(self.step, model)[1] == n
            assert handle.stats()["reentrant"] == 4 - n
            handle.remove()
