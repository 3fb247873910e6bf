"""gradckpt.integrations.deepspeed beside deepspeed.checkpointing;
test_deepspeed.py runs it where DeepSpeed is."""

import functools
import inspect
import json
import sys

import deepspeed
import pytest
import torch
from deepspeed import checkpointing as theirs
from deepspeed.pipe import PipelineModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import gradckpt
from gradckpt.integrations import deepspeed as ours

WIDTH = 64


@pytest.fixture(autouse=True)
def _fresh():
    ours.configure(None)
    gradckpt.stats.reset()
    theirs.get_cuda_rng_tracker().reset()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """One."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled now, for inference
    store = tmp_path_factory.mktemp("store") / "file"
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=0, world_size=1, auto_mpi_discovery=False)


class Mpu:
    """Of one rank."""

    get_model_parallel_rank = get_data_parallel_rank = get_model_parallel_group = lambda self: 0
    get_model_parallel_world_size = get_data_parallel_world_size = lambda self: 1


def layers(count=2):
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))


def step(checkpointing, body=None, **kwargs):
    """Gradients of two checkpointed layers and their input, and the random state afterwards."""
    modules = layers()
    x = torch.randn(32, WIDTH, requires_grad=True)
    h = x * 1.0
    for module in modules:
        function = module if body is None else body(module)
        h = checkpointing.checkpoint(function, h, **kwargs)
    h.square().sum().backward()
    return [x.grad, *(p.grad for p in modules.parameters()), torch.get_rng_state()]


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# ---- names ----


@pytest.mark.parametrize("name", [name for name in ours.__all__ if name not in ("checkpoint", "CudaRNGStatesTracker")])
def test_parameters_are_theirs(name):
    mine, other = (list(inspect.signature(getattr(m, name)).parameters) for m in (ours, theirs))
    assert mine[: len(other)] == other or name == "non_reentrant_checkpoint"


def test_the_tracker_is_theirs():
    assert ours.get_cuda_rng_tracker() is theirs.get_cuda_rng_tracker()


# ---- checkpoint ----


class TestCheckpoint:
    def test_equal_to_theirs_without_compression(self):
        def body(module):
            return lambda x: functional.dropout(functional.gelu(module(x)), 0.2)

        torch.manual_seed(1)
        exact = step(theirs, body)
        ours.configure(None, compress=None)
        torch.manual_seed(1)
        assert equal(step(ours, body), exact)
        assert gradckpt.stats()["regions"] == 2

    @pytest.mark.parametrize("call", [ours.checkpoint, ours.non_reentrant_checkpoint])
    def test_int8_unless_told_otherwise(self, call):
        x = torch.randn(32, WIDTH, requires_grad=True)
        call(layers()[0], x * 1.0).sum().backward()
        assert gradckpt.stats()["compressed"] == 1
        assert gradckpt.stats()["ratio"] == pytest.approx(8.25 / 32)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * 2,
            lambda x: (x * 2,),
            lambda x: [x * 2, x * 3],
            lambda x: (x * 2, 7),
        ],
        ids=["tensor", "one in a tuple", "list", "a number, too"],
    )
    def test_returns_what_theirs_returns(self, function):
        x = torch.randn(32, WIDTH, requires_grad=True) * 1.0
        mine, other = ours.checkpoint(function, x), theirs.checkpoint(function, x)
        assert type(mine) is type(other)
        pairs = zip(mine, other, strict=True) if isinstance(mine, tuple) else [(mine, other)]
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)

    def test_keywords_go_to_the_function(self):
        def function(x, scale, compress=1.0, debug=1.0):
            return x * scale * compress * debug

        scale = torch.ones(32, WIDTH, requires_grad=True)
        x = torch.randn(32, WIDTH, requires_grad=True)
        ours.checkpoint(function, x * 1.0, scale=scale, compress=2.0, debug=3.0).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))
        assert (scale.grad - 6 * x).norm() < 0.02 * scale.grad.norm()

    def test_inputs_need_not_require_grad(self):
        module = layers()[0]
        ours.checkpoint(module, torch.randn(32, WIDTH)).sum().backward()
        assert module.weight.grad is not None

    def test_under_no_grad(self):
        with torch.no_grad():
            assert not ours.checkpoint(layers()[0], torch.randn(32, WIDTH)).requires_grad
        assert gradckpt.stats()["regions"] == 0

    def test_buffers_are_updated_once(self):
        norm = torch.nn.BatchNorm1d(WIDTH)
        theirs.get_cuda_rng_tracker().add("model-parallel-rng", 7)
        ours.checkpoint(norm, torch.randn(32, WIDTH, requires_grad=True) * 1.0).sum().backward()
        assert norm.num_batches_tracked == 1


# ---- the tracker of random states ----


def forked(module):
    def function(x):
        with theirs.get_cuda_rng_tracker().fork():
            x = functional.dropout(module(x), 0.3)
        return functional.dropout(x, 0.2)

    return function


def nested(module):
    inner = forked(module)
    return lambda x: forked(module)(ours.checkpoint(inner, forked(module)(x)))


class TestTracker:
    def tracked(self, checkpointing, body):
        tracker = theirs.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
        torch.manual_seed(1)
        return [*step(checkpointing, body), *tracker.get_states().values()]

    def test_recomputes_drop_what_the_forward_dropped(self):
        exact = self.tracked(theirs, forked)
        ours.configure(None, compress=None)
        assert equal(self.tracked(ours, forked), exact)

    def test_nested(self):
        class Plain:
            checkpoint = staticmethod(lambda function, x: function(x))

        ours.configure(None, compress=None)
        found = self.tracked(ours, nested)
        assert gradckpt.stats()["recomputes"] > 2
        flat = lambda module: lambda x: forked(module)(forked(module)(forked(module)(x)))  # noqa: E731
        assert equal(found, self.tracked(Plain, flat))

    def test_a_second_backward(self):
        ours.configure(None, compress=None)
        theirs.get_cuda_rng_tracker().add("model-parallel-rng", 7)
        x = torch.randn(32, WIDTH, requires_grad=True)
        out = ours.checkpoint(forked(layers()[0]), x * 1.0).square().sum()
        one = torch.autograd.grad(out, x, retain_graph=True)
        state = theirs.get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
        assert equal(one, torch.autograd.grad(out, x))
        assert torch.equal(state, theirs.get_cuda_rng_tracker().get_states()["model-parallel-rng"])

    def test_an_exception_in_the_recompute(self):
        calls = []

        def breaks(x):
            with theirs.get_cuda_rng_tracker().fork():
                torch.rand(1)
            calls.append(x)
            if len(calls) == 2:
                raise RuntimeError("broken")
            return x.exp()

        tracker = theirs.get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 7)
        out = ours.checkpoint(breaks, torch.randn(32, WIDTH, requires_grad=True) * 1.0).sum()
        state = tracker.get_states()["model-parallel-rng"].clone()
        with pytest.raises(RuntimeError, match="broken"):
            out.backward()
        assert torch.equal(state, tracker.get_states()["model-parallel-rng"])

    @pytest.mark.usefixtures("ranks")
    def test_seeds_of_model_parallel_ranks(self):
        ours.configure(Mpu(), compress=None)
        ours.model_parallel_cuda_manual_seed(123)
        assert torch.initial_seed() == 123
        exact = step(theirs, forked)
        ours.model_parallel_cuda_manual_seed(123)
        assert equal(step(ours, forked), exact)


# ---- configure ----


BLOCK = {
    "train_micro_batch_size_per_gpu": 1,
    "activation_checkpointing": {"compress": "int4", "cpu_checkpointing": True},
}


class TestConfigure:
    def ratio(self):
        gradckpt.stats.reset()
        step(ours)
        return gradckpt.stats()["ratio"]

    def offered(self):
        return gradckpt.stats()["offload"].get("kept", 0)

    def test_codec(self):
        ours.configure(None, compress="int4")
        assert self.ratio() == pytest.approx(4.375 / 32)
        ours.configure(None)
        assert self.ratio() == pytest.approx(8.25 / 32)

    def test_is_configured(self, monkeypatch):
        monkeypatch.setattr(ours, "_settings", ours._Settings({}))
        assert not ours.is_configured()
        ours.configure(None)
        assert ours.is_configured()

    @pytest.mark.filterwarnings("ignore:gradckpt. offload='cpu' leaves payloads where they are")
    @pytest.mark.parametrize("as_file", [False, True])
    def test_deepspeeds_configuration(self, as_file, tmp_path, monkeypatch):
        monkeypatch.setattr(ours, "Offload", functools.partial(gradckpt.Offload, min_bytes="1B"))
        config = BLOCK
        if as_file:
            config = str(tmp_path / "config.json")
            (tmp_path / "config.json").write_text(json.dumps(BLOCK))
        ours.configure(None, config)
        assert self.ratio() == pytest.approx(4.375 / 32)
        assert self.offered() == 2  # to a place, and host memory is where they are
        ours.configure(None, config, compress="int8", checkpoint_in_cpu=False)
        assert self.ratio() == pytest.approx(8.25 / 32)
        assert self.offered() == 0

    def test_policy(self):
        ours.configure(None, {**BLOCK, "activation_checkpointing": {"policy": "save_matmuls:int8"}})
        step(ours)
        assert gradckpt.stats()["encoded"] > 2

    @pytest.mark.parametrize(
        ("argument", "key"),
        [
            ("partition_activations", "partition_activations"),
            ("contiguous_checkpointing", "contiguous_memory_optimization"),
            ("synchronize", "synchronize_checkpoint_boundary"),
            ("profile", "profile"),
        ],
    )
    def test_what_it_cannot_do_is_an_error(self, argument, key):
        before = ours._settings
        with pytest.raises(ValueError, match=f"gradckpt: {argument} of DeepSpeed's checkpointing is not supported: "):
            ours.configure(None, **{argument: True})
        with pytest.raises(ValueError, match=f"gradckpt: {argument} of"):
            ours.configure(None, {**BLOCK, "activation_checkpointing": {key: True}})
        assert ours._settings is before
        ours.configure(None, {**BLOCK, "activation_checkpointing": {key: True}}, **{argument: False})

    def test_wrong_words(self):
        with pytest.raises(ValueError, match="gradckpt: unknown codec 'int9'"):
            ours.configure(None, compress="int9")
        with pytest.raises(ValueError, match="gradckpt: unknown key 'compres' in the block activation_checkpointing"):
            ours.configure(None, {**BLOCK, "activation_checkpointing": {"compres": "int4"}})
        with pytest.raises(ValueError, match="gradckpt: unknown option 'compres'"):
            ours.configure(None, compres="int8")
        with pytest.raises(TypeError, match="gradckpt: checkpoint_in_cpu is True or False"):
            ours.configure(None, checkpoint_in_cpu="yes")
        with pytest.raises(ValueError, match="gradckpt: partition_activations"):
            ours.partition_activations_in_checkpoint(True)

    def test_the_rest_of_the_names(self):
        ours.partition_activations_in_checkpoint(False)
        ours.set_num_layers(3)
        ours.reset()
        step(ours)


# ---- a pipeline ----


@pytest.mark.usefixtures("ranks")
def test_pipeline_module(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")

    def run(function):
        torch.manual_seed(0)
        pipeline = PipelineModule(
            [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)],
            num_stages=1,
            loss_fn=functional.mse_loss,
            activation_checkpoint_interval=1,
            activation_checkpoint_func=function,
        )
        engine, *_ = deepspeed.initialize(
            model=pipeline, optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.1), config={"train_batch_size": 32}
        )
        torch.manual_seed(1)
        engine.train_batch(iter([(torch.randn(32, WIDTH, requires_grad=True) * 1.0, torch.randn(32, WIDTH))]))
        return [p.detach() for p in pipeline.parameters()]

    exact = run(theirs.checkpoint)
    ours.configure(None, compress=None)
    assert equal(run(ours.checkpoint), exact)
    ours.configure(None)
    assert not equal(run(ours.checkpoint), exact)
    assert gradckpt.stats()["compressed"] == 3


# ---- Trains a tiny Llama and a stack of blocks under ZeRO 1, 2, 3, each with several ways of
# checkpointing. By torchrun.
#
# torchrun --standalone --nproc-per-node 2 deepspeed_checks.py OUT
#
# Rank 0 writes OUT: losses, how the parameters moved, whole, and what was compressed, by stage,
# model and way.

LAYERS, RANK_WIDTH, ROWS, STEPS = 3, 64, 32, 3


class RankBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(RANK_WIDTH)
        self.up = torch.nn.Linear(RANK_WIDTH, 2 * RANK_WIDTH)
        self.down = torch.nn.Linear(2 * RANK_WIDTH, RANK_WIDTH)

    def forward(self, x):
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(torch.nn.Module):
    """Calls the checkpoint function of ``checkpointing`` for each block,
    as code for DeepSpeed does."""

    def __init__(self, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.first = torch.nn.Linear(RANK_WIDTH, RANK_WIDTH)
        self.blocks = torch.nn.ModuleList(RankBlock() for _ in range(LAYERS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.checkpointing.checkpoint(block, x)
        return x.square().mean()


class Torchs:
    @staticmethod
    def checkpoint(function, x):
        return torch_checkpoint(function, x, use_reentrant=False)


def llama(way, frozen=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=RANK_WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "embed" in name)
    if way == "stock":
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        gradckpt.enable(model, compress=None if way == "None" else way)
    return model


def stack(way):
    torch.manual_seed(0)
    if way in ("stock", "theirs"):
        return Stack(Torchs if way == "stock" else theirs).train()
    ours.configure(None, compress=None if way == "None" else "int8", checkpoint_in_cpu=way == "in host memory")
    return Stack(ours).train()


def train(model, stage, batch):
    gradckpt.stats.reset()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
    torch.manual_seed(5 + torch.distributed.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = batch(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            moved[name] = parameter.detach() - before[name]
    stats = gradckpt.stats()
    return {
        "losses": losses,
        "moved": moved,
        "regions": stats["regions"],
        "compressed": stats["compressed"],
        "same keys": list(before) == list(model.state_dict()),
    }


def text(engine):
    ids = torch.randint(0, 64, (1, ROWS))
    return engine(input_ids=ids, labels=ids).loss


def rows(engine):
    return engine(torch.randn(1, ROWS, RANK_WIDTH))


def main(out):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled now, for inference
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for stage in (1, 2, 3):
        for way in ("stock", "None", "int8"):
            found[stage, "llama", way] = train(llama(way), stage, text)
            found[stage, "frozen", way] = train(llama(way, frozen=True), stage, text)
        for way in ("stock", "theirs", "None", "int8", "in host memory"):
            found[stage, "stack", way] = train(stack(way), stage, rows)
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    torch.distributed.barrier()  # Gloo's threads let go of their last tensors while Python is there to free them
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
