"""Lightning: the callback in a Trainer, alone and on two ranks under DDP, FSDP and FSDP2;
Fabric; strategies' flags."""

import os
import warnings

import lightning.pytorch as pl
import pytest
import torch
import worlds
from checkout import HELPERS, ROOT
from lightning.fabric import Fabric
from lightning.fabric.strategies.fsdp import _activation_checkpointing_kwargs, _setup_activation_checkpointing
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_modules import LAYERS, QUIET, Block, LateStack, Llama, Record, Stack, data
from model_families import equal, error
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

import gradckpt
from gradckpt._models.regions import region_of
from gradckpt._stats import compiled
from gradckpt.integrations.lightning import GradckptCallback, StatsCallback

# Lightning's own: no validation data, few workers, names that torch has deprecated,
# barebones, resuming, eval mode.
OTHERS = ("You defined a `val", ".*many workers", ".*treespec", ".*barebones", ".*ckpt_path", ".*in eval mode at the")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in OTHERS]

BATCHES = 4
KINDS = {"stack": Stack, "late": LateStack, "llama": Llama}


class Lines(pl.loggers.Logger):
    """What a logger is given."""

    name, version = "lines", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def trainer(*callbacks, **options):
    return pl.Trainer(callbacks=list(callbacks), **{**QUIET, "devices": 1, **options})


def callback(kind, compress="int8", **options):
    return GradckptCallback(compress, None if kind == "llama" else {Block}, **options)


def fit(module, *callbacks, **options):
    """Losses and gradients of the first step; the same random numbers each time."""
    record = Record()
    torch.manual_seed(3)
    trainer(record, *callbacks, **options).fit(module, data(module, BATCHES))
    return module.losses, record.gradients


def stock(kind):
    """Under torch's checkpointing."""
    module = KINDS[kind]()
    if kind == "llama":
        module.model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        if kind == "late":
            module.configure_model()
        for i in range(LAYERS):
            module.blocks[i] = checkpoint_wrapper(module.blocks[i])
    losses, gradients = fit(module)
    return losses, {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients.items()}


def touched(module):
    return [name for name, each in module.named_modules() if region_of(each) is not None or "forward" in vars(each)]


@pytest.fixture(autouse=True)
def _fresh_counters():
    gradckpt.stats.reset()


@pytest.mark.parametrize("kind", KINDS)
class TestTrains:
    def test_as_stock_checkpointing_without_compression(self, kind):
        losses, gradients = fit(KINDS[kind](), callback(kind, None))
        assert gradckpt.stats()["regions"] == LAYERS * BATCHES
        exact, exact_gradients = stock(kind)
        assert losses == exact
        assert equal(gradients, exact_gradients)

    def test_within_the_bound_of_int8(self, kind):
        losses, gradients = fit(KINDS[kind](), callback(kind))
        assert gradckpt.stats()["compressed"] == LAYERS * BATCHES
        exact, exact_gradients = stock(kind)
        assert losses[0] == exact[0]
        assert gradients.keys() == exact_gradients.keys()
        assert 0 < error(gradients, exact_gradients) < 0.02
        assert losses == pytest.approx(exact, rel=0.05)

    def test_and_leaves_the_module_as_it_was(self, kind):
        module, ours = KINDS[kind](), callback(kind)
        keys = []

        class Keys(pl.Callback):
            def on_train_end(self, trainer, pl_module):
                keys.append(list(pl_module.state_dict()))
                assert touched(pl_module) or kind == "llama"

        for times in (1, 2):
            trainer(ours, Keys()).fit(module, data(module, BATCHES))
            assert ours.handle is None
            assert not touched(module)
            assert gradckpt.stats()["compressed"] == times * LAYERS * BATCHES
        if kind == "late":
            module = Stack()
        assert keys == [list(module.state_dict())] * 2
        if kind == "llama":
            assert not module.model.is_activation_checkpointing


class TestWhatIsChosen:
    def test_rules_carry_their_own_codecs(self, caplog):
        with caplog.at_level("INFO"):
            fit(Stack(), GradckptCallback("int8", {"blocks.0": "raw", "blocks.1": {"preserve_rng_state": False}}))
        assert "1 x Block  raw" in caplog.text
        assert "1 x Block  int8, preserve_rng_state=False" in caplog.text
        assert gradckpt.stats()["compressed"] == 2 * BATCHES

    def test_options_reach_enable(self):
        fit(Llama(), GradckptCallback(every_n_layers=2))
        assert gradckpt.stats()["compressed"] == 2 * BATCHES

    def test_options_reach_apply(self):
        fit(Stack(), GradckptCallback(modules={Block}, policy="save_matmuls:int8"))
        assert gradckpt.stats()["encoded"] > LAYERS * BATCHES

    def test_layers_of_other_models_are_known(self):
        class Encoder(Stack):
            def __init__(self):
                super().__init__()
                layer = torch.nn.TransformerEncoderLayer(64, 2, 96, batch_first=True)
                self.blocks = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

        fit(Encoder(), GradckptCallback())
        assert gradckpt.stats()["compressed"] == LAYERS * BATCHES


class TestTheTrainersLife:
    def test_validation_between_epochs(self):
        module, ours = Stack(), callback("stack")
        t = trainer(ours, max_epochs=2)
        t.fit(module, data(module, BATCHES), data(module, 2))
        assert gradckpt.stats()["compressed"] == 2 * LAYERS * BATCHES
        regions = gradckpt.stats()["regions"]
        t.validate(module, data(module, 2), verbose=False)
        assert ours.handle is None
        assert gradckpt.stats()["regions"] == regions
        assert not touched(module)

    def test_checkpoints_have_the_keys_of_none_and_resume(self, tmp_path):
        def saved(folder, *callbacks):
            keep = ModelCheckpoint(folder, filename="last")
            torch.manual_seed(3)
            module = Stack()
            trainer(keep, *callbacks, enable_checkpointing=True).fit(module, data(module, BATCHES))
            return folder / "last.ckpt"

        plain, ours = saved(tmp_path / "plain"), saved(tmp_path / "ours", callback("stack"))
        one, other = (torch.load(path, weights_only=False) for path in (plain, ours))
        assert one["state_dict"].keys() == other["state_dict"].keys()
        Stack().load_state_dict(other["state_dict"])
        for path, callbacks in ((ours, []), (plain, [callback("stack")])):
            module = Stack()
            t = trainer(*callbacks, max_epochs=2)
            t.fit(module, data(module, BATCHES), ckpt_path=path)
            assert t.current_epoch == 2
            assert len(module.losses) == BATCHES
        assert gradckpt.stats()["compressed"] == 2 * LAYERS * BATCHES

    def test_gradient_accumulation_and_clipping(self):
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        plain, ours = Stack(), Stack()
        fit(plain, **options)
        fit(ours, callback("stack", None), **options)
        assert ours.losses == plain.losses

    def test_an_exception_leaves_nothing(self):
        class Breaks(Stack):
            def training_step(self, batch, index):
                if index == 1:
                    raise RuntimeError("broken")
                return super().training_step(batch, index)

        module, ours = Breaks(), callback("stack")
        with pytest.raises(RuntimeError, match="broken"):
            trainer(ours).fit(module, data(module))
        assert ours.handle is None
        assert not touched(module)

    def test_a_model_that_cannot_be_built_leaves_nothing(self):
        class Breaks(LateStack):
            def configure_model(self):
                raise RuntimeError("broken")

        t = trainer(callback("late"))
        with pytest.raises(RuntimeError, match="broken"):
            t.fit(Breaks(), data(None))
        assert "setup" not in vars(t.strategy)

    def test_barebones(self, monkeypatch):
        module = Stack()
        monkeypatch.setattr(module, "log_dict", None)
        pl.Trainer(accelerator="cpu", barebones=True, max_epochs=1, callbacks=[callback("stack")]).fit(
            module, data(module, BATCHES)
        )
        assert gradckpt.stats()["compressed"] == LAYERS * BATCHES

    def test_two_callbacks_are_refused(self):
        """Neither is lost without a word."""
        module = Stack()
        t = trainer(GradckptCallback("int8", {Block}), GradckptCallback("int4", torch.nn.Linear))
        with pytest.raises(ValueError, match=r"Stack is enabled already, .* another GradckptCallback"):
            t.fit(module, data(module))
        assert not touched(module)
        assert "setup" not in vars(t.strategy)

    def test_two_callbacks_and_a_setup_that_breaks(self):
        class Breaks(pl.Callback):
            def setup(self, trainer, pl_module, stage):
                raise RuntimeError("broken")

        t = trainer(callback("stack"), callback("stack"), Breaks())
        with pytest.raises(RuntimeError, match="broken"):
            t.fit(Stack(), data(None))
        assert "setup" not in vars(t.strategy)

    @pytest.mark.parametrize("compress", ["int8", None])
    def test_compiled(self, compress, recwarn, caplog):
        """Regions of a compiled graph are not counted, so their number is unknown."""

        class Bare(Stack):
            def training_step(self, batch, index):
                return self.loss(batch)

        torch._dynamo.reset()
        module = Bare()
        with caplog.at_level("INFO", "lightning.pytorch"):
            trainer(callback("stack", compress)).fit(torch.compile(module, backend="aot_eager"), data(module, BATCHES))
        assert not [w for w in recwarn if issubclass(w.category, gradckpt.GradckptInactiveWarning)]
        assert gradckpt.stats()["compiled_tensors"] == (LAYERS if compress else 0)
        said = "in compiled graphs 3 tensors compressed, 24.00 KiB -> 6.19 KiB per call" in caplog.text
        assert said == (compress is not None)

    @pytest.mark.parametrize("alone", [True, False])
    def test_the_other_copy_of_lightning(self, alone):
        """Also where it is the only one."""
        program = f"""
import sys
if {alone}:
    sys.modules["lightning"] = None  # as if it were not there
    import gradckpt.integrations.lightning
import pytorch_lightning as pl, torch
from gradckpt.integrations.lightning import GradckptCallback
import gradckpt
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range({LAYERS})))
    def training_step(self, batch, index):
        return self.blocks(self.blocks[0](batch)).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
ours = GradckptCallback(modules=torch.nn.Linear)
assert isinstance(ours, pl.Callback) and "lightning.pytorch" not in sys.modules
loader = torch.utils.data.DataLoader(torch.randn(4, 32, 64))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[ours], **quiet).fit(Module(), loader)
assert gradckpt.stats()["compressed"] == {LAYERS} * 4, gradckpt.stats()
"""
        worlds.call("-c", program, env=environment())


class TestLogs:
    @pytest.mark.parametrize("kind", ["stack", "llama"])
    def test_loggers_get_the_scalars(self, kind):
        lines = Lines()
        fit(KINDS[kind](), callback(kind), logger=lines, log_every_n_steps=2)
        rows = [row for row in lines.rows if "train_loss" in row]
        assert len(rows) == BATCHES // 2
        for row in rows:
            assert row["gradckpt/compressed"] == row["gradckpt/eligible"] == LAYERS
            assert row["gradckpt/ratio"] == pytest.approx(0.258, abs=0.001)
            assert row["gradckpt/bytes_in_mib"] == pytest.approx(LAYERS * 32 * 64 * 4 / 2**20)

    def test_unless_told_not_to(self):
        lines = Lines()
        fit(Stack(), callback("stack", log_stats=False), logger=lines, log_every_n_steps=1)
        assert not any("gradckpt/compressed" in row for row in lines.rows)

    def test_of_a_model_that_checkpoints_by_itself(self, caplog):
        class Wrapped(LateStack):
            def configure_model(self):
                super().configure_model()
                for i in range(LAYERS):
                    self.blocks[i] = gradckpt.compat.checkpoint_wrapper(self.blocks[i], compress="int8")

        lines, total = Lines(), LAYERS * BATCHES
        with caplog.at_level("INFO"):
            fit(Wrapped(), StatsCallback(), logger=lines, log_every_n_steps=1)
        assert lines.rows[0]["gradckpt/compressed"] == LAYERS
        assert f"gradckpt: {total} regions; compressed {total} of {total} inputs, 96.00 KiB -> 24.75 KiB" in caplog.text


class Marked(SingleDeviceStrategy):
    """Wraps as FSDPStrategy does, with its function."""

    def setup(self, trainer):
        _setup_activation_checkpointing(self.model, _activation_checkpointing_kwargs(None, {Block}))
        super().setup(trainer)


class TestErrors:
    def refused(self, module, ours, match, **options):
        with pytest.raises(ValueError, match=match):
            fit(module, ours, **options)
        assert not module.losses
        assert not touched(module)

    def test_unknown_words_at_once(self):
        with pytest.raises(ValueError, match="gradckpt: unknown codec 'int9'"):
            GradckptCallback("int9")
        with pytest.raises(ValueError, match="gradckpt: unknown option 'polcy'"):
            GradckptCallback(modules=Block, polcy="save_attention")
        with pytest.raises(TypeError, match="gradckpt: log_stats is True or False"):
            GradckptCallback(log_stats="yes")

    def test_nothing_to_checkpoint(self):
        one = Stack()
        one.blocks = one.blocks[:1]
        self.refused(one, GradckptCallback(), r"Stack has no repeated block of layers; .*modules=Block")
        self.refused(Stack(), GradckptCallback(modules="nowhere.*"), "no module matches 'nowhere")

    def test_the_strategys_flag_and_ours(self):
        self.refused(
            Stack(), callback("stack"), "Marked checkpoints 3 modules that GradckptCallback", strategy=Marked()
        )

    def test_wrapped_already(self):
        module = Stack()
        module.blocks[0] = checkpoint_wrapper(module.blocks[0])
        self.refused(module, callback("stack"), "gradckpt: .*CheckpointWrapper")

    def test_enabled_already(self):
        module = Llama()
        with gradckpt.enable(module) as handle:
            with pytest.raises(ValueError, match=r"Llama is enabled already, .* another"):
                fit(module, GradckptCallback())
            assert handle.modules

    def test_modules_in_eval_mode_are_checkpointed_where_gradients_pass(self):
        module = Stack()
        module.blocks.eval()
        gradckpt.stats.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error", gradckpt.GradckptInactiveWarning)
            fit(module, callback("stack"))
        assert gradckpt.stats()["recomputes"]

    def test_modules_that_are_never_called(self, monkeypatch):
        monkeypatch.setattr(compiled, "ever", False)
        module = Stack()
        module.spare = Block()
        with pytest.warns(gradckpt.GradckptInactiveWarning, match="never called with grad on"):
            fit(module, GradckptCallback(modules="spare"))


# ---- strategies ----


def environment():
    paths = os.pathsep.join(map(str, (ROOT, HELPERS)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks wrote: fits by strategy and kind."""
    out = tmp_path_factory.mktemp("ranks") / "fits"
    script = HELPERS / "lightning_modules.py"
    done = worlds.torchrun(script, out, env=environment(), timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp2"])
class TestTwoRanks:
    def test_as_stock_checkpointing_without_compression(self, ranks, how):
        for fits in ranks:
            found, exact = fits[how]["None"], fits[how]["stock"]
            assert found["regions"] == LAYERS * len(exact["losses"]) > 0
            assert found["losses"] == exact["losses"]
            for key in ("gradients", "parameters"):
                assert exact[key]
                assert equal(found[key], exact[key])

    @pytest.mark.parametrize("kind", ["int8", "wrapped"])
    def test_within_the_bound_of_int8(self, ranks, how, kind):
        for fits in ranks:
            found, exact = fits[how][kind], fits[how]["stock"]
            assert found["compressed"] == found["regions"] == LAYERS * len(exact["losses"])
            assert found["losses"][0] == exact["losses"][0]
            assert 0 < error(found["gradients"], exact["gradients"]) < 0.02

    def test_ranks_hold_what_they_should(self, ranks, how):
        """Replicas are equal; shards are not, and are smaller than the whole."""
        ours, others = (fits[how]["int8"]["parameters"] for fits in ranks)
        whole = sum(p.numel() for p in Stack().parameters())
        if how == "ddp":
            assert all(map(torch.equal, ours, others))
            assert sum(p.numel() for p in ours) == whole
        else:
            assert sum(p.numel() for p in (*ours, *others)) < 2 * whole


def test_fsdp_strategy_skips_its_flag_for_wrapped_modules():
    """What docs/frameworks.md quotes."""
    module = Stack()
    for i in range(LAYERS):
        module.blocks[i] = gradckpt.compat.checkpoint_wrapper(module.blocks[i])
    words = (
        "FSDP checkpointing is configured, but the model already contains checkpointed layers. "
        "Checkpointing will be ignored."
    )
    assert words in (ROOT / "docs" / "frameworks.md").read_text().replace("\n", " ")
    with pytest.warns(UserWarning, match=words):
        _setup_activation_checkpointing(module, _activation_checkpointing_kwargs(None, {Block}))
    assert sum(isinstance(each, CheckpointWrapper) for each in module.modules()) == LAYERS


def test_fabric():
    def run(compress, checkpointed=True):
        fabric = Fabric(accelerator="cpu", devices=1)
        module = torch.nn.Sequential(*Stack().blocks)
        if checkpointed:
            gradckpt.enable(module, modules={Block: compress})
        else:
            for i in range(LAYERS):
                module[i] = checkpoint_wrapper(module[i])
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        torch.manual_seed(3)
        x = torch.randn(1, 32, 64, requires_grad=True)
        fabric.backward(model(x * 1.0).square().mean())
        optimizer.step()
        return [p.detach() for p in module.parameters()]

    assert all(map(torch.equal, run(None), run(None, checkpointed=False)))
    run("int8")
    assert gradckpt.stats()["compressed"] == LAYERS


@pytest.mark.parametrize("options", [["--devices", "2"], ["--devices", "1", "--compress", "none"]])
def test_example(options):
    worlds.example_passes("lightning_ddp", *options, env=environment())
