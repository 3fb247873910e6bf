"""gradckpt.patched: warnings when nothing is compressed, torch.compile, and transformers models."""

import json
import warnings

import pytest
import torch
import torch.utils.checkpoint
import transformers.modeling_utils  # noqa: F401 (gradckpt listens from then on, patched or not)
from behaviours import graphs_checkpoint
from checkout import HELPERS
from compile_cases import needs_outputs
from model_families import (  # noqa: F401 (a fixture of every test here)
    CALL_WIDTH,
    alone,
    call_gradients,
    compressed,
    equal,
    error,
    model,
    nothing_left_behind,
)
from processes import in_threads
from test_huggingface import IDS, build, replicate
from torch import nn
from torch.utils.checkpoint import checkpoint as early

import gradckpt
from gradckpt import GradckptInactiveWarning
from gradckpt._compile import graph


def train(call, steps=2, **keywords):
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(32, CALL_WIDTH, requires_grad=True) * 1
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
        self.expect("nothing in this process called .*activation_checkpointing=True", lambda layer, x: layer(x))

    def test_only_calls_of_gradckpt_without_compression(self):
        self.expect("called gradckpt.checkpoint without compression", gradckpt.checkpoint)

    def test_only_calls_of_gradckpt_that_keep_their_inputs(self):
        train(gradckpt.checkpoint, compress="raw")  # the engine has said its word in this process
        large = {"codec": "int8", "min_numel": 10**6}
        self.expect(r"not compressed: smaller than min_numel", gradckpt.checkpoint, compress=large)

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
        self.expect("not in closures", lambda layer, x: early(lambda: layer(x), use_reentrant=False))

    def test_at_the_end_of_the_block_when_there_is_no_optimizer(self):
        x = torch.randn(32, CALL_WIDTH, requires_grad=True)
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
                gradckpt.stats.reset()
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
            layer = torch.nn.Linear(4, 4).double()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught, gradckpt.patched("int8"):
                warnings.simplefilter("always")
                for _ in range(3):
                    checkpoint(layer, layer(torch.randn(2, 4).double()), use_reentrant=False).sum().backward()
                    optimizer.step()
            print(len(caught), caught[0].message)
        """
        found = alone(script)
        assert found.startswith("1 ")
        assert "float64, which no codec takes" in found

    def test_stats_of_one_block(self):
        train(early, use_reentrant=False)
        with gradckpt.patched("int8") as first:
            train(early, steps=1, use_reentrant=False)
            with gradckpt.patched("int4") as second:
                train(early, steps=1, use_reentrant=False)
        train(gradckpt.checkpoint, compress="int8")
        assert (first.stats()["calls"], second.stats()["calls"]) == (4, 4)
        assert (first.stats()["compressed"], second.stats()["compressed"]) == (8, 4)
        assert second.stats()["bytes_in"] == 4 * 32 * CALL_WIDTH * 4
        assert 0.12 < second.stats()["ratio"] < 0.14
        json.dumps(second.stats())

    def test_counters_begin_anew_with_reset_stats(self):
        train(gradckpt.checkpoint, compress="int8")
        with gradckpt.patched("int8") as handle:
            train(early, steps=1, use_reentrant=False)
            gradckpt.stats.reset()
            train(early, steps=6, use_reentrant=False)  # more regions than were counted at the start
            assert handle.stats()["compressed"] == 24
            handle.remove()
        gradckpt.stats.reset()
        assert handle.stats()["compressed"] == 24


class TestCompile:
    @pytest.fixture(autouse=True)
    def _no_graphs(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_what_is_compiled_meanwhile_compresses(self):
        layers = nn.Sequential(*(layer[:2] for layer in model()))

        def forward(x):
            for layer in layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x.square().sum()

        x = torch.randn(32, CALL_WIDTH, requires_grad=True)
        parameters = list(layers.parameters())
        exact = torch.autograd.grad(forward(x * 1), parameters)
        with gradckpt.patched("int8"):
            eager = torch.autograd.grad(forward(x * 1), parameters)
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        for _ in range(2):  # once more: what is compiled is compiled again when the patch comes or goes
            with gradckpt.patched("int8") as handle:
                found = torch.autograd.grad(compiled(x * 1), parameters)
                assert handle.inactive_reason is None
            assert error(found, eager) < 2e-3  # the last region's output is made again, too, for the square's gradient
            assert error(found, exact) > 1e-4
            with gradckpt.patched("raw") as handle:
                assert error(torch.autograd.grad(compiled(x * 1), parameters), exact) < 1e-5
                assert handle.inactive_reason is None
            assert error(torch.autograd.grad(compiled(x * 1), parameters), exact) < 1e-5

    @needs_outputs
    @pytest.mark.parametrize("kind", ["text", "made", "mapping"])
    def test_an_equal_policy_compiles_nothing_again(self, kind):
        make = {
            "text": lambda: "save_matmuls:int8",
            "made": lambda: gradckpt.policies.save_matmuls.compressed("int8"),
            "mapping": lambda: {torch.ops.aten.mm.default: "int8"},
        }[kind]
        torch._dynamo.utils.counters.clear()
        layer, x = model()[0][:2], torch.randn(32, CALL_WIDTH, requires_grad=True)
        compiled = torch.compile(
            lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), backend="aot_eager"
        )
        for _ in range(3):
            with gradckpt.patched("int8", policy=make()):
                compiled(x * 1).sum().backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    def test_what_a_graph_cannot_ask_about_stays_exact_and_says_so(self):
        """A codec that may refuse packs nothing there: gradients are right,
        and the user is told what packs."""
        layer = model()[0][:2]
        x = torch.randn(32, CALL_WIDTH, requires_grad=True)
        parameters = list(layer.parameters())
        exact = torch.autograd.grad(layer(x * 1).square().sum(), parameters)
        graph.may_overflow.cache_clear()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def forward(x):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).square().sum()

        with gradckpt.patched("lossless") as handle:
            with pytest.warns(GradckptInactiveWarning, match="'lossless' may overflow.* use 'int8'"):
                found = torch.autograd.grad(forward(x * 1), parameters)
            assert handle.stats()["compiled_tensors"] == handle.stats()["compressed"] == 0
            handle.remove()
        assert error(found, exact) < 1e-5
        with gradckpt.patched("int8") as handle:
            torch.autograd.grad(forward(x * 1), parameters)
            assert handle.stats()["compiled_tensors"] > 0

    def test_afterwards_graphs_are_torchs(self):
        """Dynamo keeps the function that it was given;
        outside of a patch it traces what it would by itself."""
        script = """
        import sys; sys.path.insert(0, {helpers!r})
        import torch
        from torch.utils.checkpoint import checkpoint
        from compile_cases import Graphs
        if {patched}:
            import gradckpt
            with gradckpt.patched("int8"):
                pass
        w = torch.ones(64, 64, requires_grad=True)
        region = lambda t: (t @ w).sin() @ w
        for call in (
            lambda x: checkpoint(region, x * 2),
            lambda x: checkpoint(region, x * 2, use_reentrant=False),
            lambda x: checkpoint(region, x * 2, preserve_rng_state=False),
        ):
            torch._dynamo.reset()
            graphs = Graphs()
            graphs.compile(call)(torch.ones(64, 64, requires_grad=True)).sum().backward()
            print(graphs.forward[0].graph, graphs.backward[0].graph)
        """
        outputs = [alone(script.format(helpers=str(HELPERS), patched=patched)) for patched in (False, True)]
        assert outputs[0].count("return") >= 6
        assert "region_input" not in outputs[0]
        assert outputs[0] == outputs[1]

    @graphs_checkpoint
    def test_no_compression_under_compile_says_so(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def forward(x, layer):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        with gradckpt.patched("int8") as handle:
            forward(
                torch.randn(32, CALL_WIDTH, requires_grad=True), nn.Linear(CALL_WIDTH, CALL_WIDTH)
            ).sum().backward()  # a leaf
            assert "region was compiled" in handle.inactive_reason
            handle.remove()

    @graphs_checkpoint
    def test_a_graph_that_runs_as_dynamo_made_it_compresses(self):
        """It calls torch's checkpoint; so backend="eager" is no reason for a warning here."""
        layers = nn.Sequential(*(layer[:2] for layer in model()))
        forward = torch.compile(lambda layer, x: early(layer, x, use_reentrant=False), backend="eager", fullgraph=True)
        with gradckpt.patched("int8"), warnings.catch_warnings():
            warnings.simplefilter("error", GradckptInactiveWarning)
            _, n = compressed(call_gradients, layers, forward)
        assert n == len(layers)

    def test_a_compiled_optimizer_step(self):
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        @torch.compile(backend="eager")  # torch breaks the graph in it by itself
        def step():
            optimizer.step()

        with gradckpt.patched("int8"):
            layer(torch.ones(2, 4)).sum().backward()
            before = layer.weight.detach().clone()
            step()
        assert not torch.equal(layer.weight, before)

    def test_fake_tensors_go_through_torchs(self):
        from torch._subclasses import FakeTensorMode

        with gradckpt.patched("int8") as handle, FakeTensorMode():
            early(
                nn.Linear(CALL_WIDTH, CALL_WIDTH),
                torch.randn(32, CALL_WIDTH, requires_grad=True) * 1,
                use_reentrant=False,
            )
            assert handle.stats()["traced"] == 1
            handle.remove()


class TestTransformers:
    def step(self, model):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    @pytest.mark.parametrize("before", [True, False], ids=["enabled before", "enabled inside"])
    def test_layers(self, before):
        model, twin = build(), build()
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

    def test_frozen_embeddings(self):
        """Autograd keeps the leaf that enable_input_require_grads makes: a payload only costs."""
        model = build()
        model.activation_checkpointing_enable()
        model.get_input_embeddings().requires_grad_(False)
        with gradckpt.patched("int8") as handle:
            assert compressed(self.step, model)[1] == 3
            assert handle.stats()["uncompressed"]["leaf"] == 1

    def test_a_pickle_from_inside_is_a_stock_model(self, tmp_path):
        model = build()
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

    def test_with_enable(self):
        """Who enabled a model said what it is to do; otherwise the patch says it."""
        model = build()
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

    def test_data_parallel_replicas(self):
        """As DataParallel runs them: copies of the model in threads."""
        model = build()
        model.activation_checkpointing_enable()
        replicas = [replicate(model) for _ in range(2)]
        with gradckpt.patched("int8") as handle:
            inputs = [{"input_ids": IDS, "labels": IDS}] * 2
            in_threads(*(lambda r=r, i=i: r(**i).loss.backward() for r, i in zip(replicas, inputs, strict=True)))
            assert handle.stats()["compressed"] == 8

    @pytest.mark.parametrize(("version", "n"), [("4.57.0", 4), ("5.23.0", 0)])
    def test_transformers_4_says_reentrant_by_default(self, monkeypatch, version, n):
        import transformers

        model = build()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
        monkeypatch.setattr(transformers, "__version__", version)
        with gradckpt.patched("int8") as handle:
            assert compressed(self.step, model)[1] == n
            assert handle.stats()["reentrant"] == 4 - n
            handle.remove()
