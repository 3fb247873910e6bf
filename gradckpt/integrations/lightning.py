"""Lightning: ``Trainer(callbacks=[GradckptCallback()])`` trains with compressed checkpoints and
logs the saving.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same classes; the callbacks
here derive from the imported one, else from the installed one, and work with both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from gradckpt._compression import Compress, parse_compress
from gradckpt._engine.arguments import check_bool
from gradckpt._models.rules import parse_options
from gradckpt._models.switch import enable, is_enabled
from gradckpt._stats import Stats, format_bytes, stats

_IMPORTED = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_ALONE = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None

if _IMPORTED or _ALONE:
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.rank_zero import rank_zero_info
else:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

__all__ = ["GradckptCallback", "StatsCallback"]

#: The entries of stats().scalars() that are logged.
SCALARS = ("eligible", "compressed", "bytes_in_mib", "bytes_out_mib", "ratio", "peak_live_mib")


class StatsCallback(Callback):  # type: ignore[misc]
    """Log the compression of each training batch with ``self.log_dict``.

    The names are ``gradckpt/eligible``, ``compressed``, ``bytes_in_mib``, ``bytes_out_mib``,
    ``ratio`` (of the batch) and ``peak_live_mib``; the loggers get them every ``log_every_n_steps``
    batches. They count this process; ``ratio`` is missing if nothing was compressed. This callback
    is for models that already checkpoint through gradckpt; :class:`GradckptCallback` also turns
    checkpointing on.
    """

    def __init__(self) -> None:
        self._since: Stats = stats()
        self._at_start: Stats = self._since

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = self._at_start = stats()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.barebones:
            return  # log_dict would only warn
        now = stats()
        found = now.since(self._since).scalars("")
        self._since = now
        scalars = {"gradckpt/" + name: found[name] for name in SCALARS if name in found}
        pl_module.log_dict(scalars, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        found = stats().since(self._at_start)
        before, after = format_bytes(found["bytes_in"]), format_bytes(found["bytes_out"])
        rank_zero_info(
            f"gradckpt: {found['regions']} regions; compressed {found['compressed']} of {found['eligible']} inputs, "
            f"{before} -> {after}"
        )
        if found["compiled_tensors"] > 0:
            before, after = format_bytes(found["compiled_bytes_in"]), format_bytes(found["compiled_bytes_out"])
            rank_zero_info(
                f"gradckpt: in compiled graphs {found['compiled_tensors']} tensors compressed, {before} -> {after} "
                "per call"
            )


class GradckptCallback(StatsCallback):
    """Turn compressed checkpointing on for ``fit``, before the strategy wraps the model, and off
    after it.

    Args:
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        modules: The modules to checkpoint, as for :func:`gradckpt.enable`, or a set of classes as
            in ``FSDPStrategy(activation_checkpointing_policy=...)``.
        log_stats: Log as :class:`StatsCallback` does.
        **options: Those of :func:`gradckpt.enable`.

    State dicts and checkpoints have the same keys with and without it.

    Raises:
        ValueError, TypeError: The codec is unknown; or, when ``fit`` begins, the model or the
            strategy cannot be checkpointed: it has nothing to checkpoint, or is checkpointed twice.
    """

    def __init__(
        self, compress: Compress = "int8", modules: Any = None, *, log_stats: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.compress = parse_compress(compress)
        self.modules = tuple(modules) if isinstance(modules, (set, frozenset)) else modules
        self.log_stats = check_bool("log_stats", log_stats)
        self.options = options
        places = ("every_n_layers", "offload")
        given = {key: value for key, value in options.items() if key not in places}
        parse_options(given, {}, (*places, "recompute"))
        #: The result of gradckpt.enable; None outside fit.
        self.handle: Any = None
        self._waiting: _BeforeSetup | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._turn_off()  # from an interrupted fit
            self._waiting = _BeforeSetup(trainer.strategy, pl_module, self._turn_on)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.log_stats:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._turn_off()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._turn_off()

    def _turn_on(self, pl_module: Any) -> None:
        if is_enabled(pl_module):
            raise ValueError(
                f"gradckpt: this {type(pl_module).__name__} is enabled already, by gradckpt.enable or another "
                "GradckptCallback; leave one of them out"
            )
        self.handle = enable(pl_module, self.compress, modules=self.modules, **self.options)
        rank_zero_info(f"gradckpt: {self.handle!r}")

    def _turn_off(self) -> None:
        handle, waiting, self.handle, self._waiting = self.handle, self._waiting, None, None
        if waiting is not None:
            waiting.remove()
        if handle is not None:
            handle.remove()


class _BeforeSetup:
    """The replacement of ``strategy.setup`` of one strategy until it is called.

    At that moment the model is complete (``setup``, ``configure_model``) and not wrapped yet.
    Lightning has no callback hook there. With several callbacks, each holds the replacement of the
    previous one.
    """

    def __init__(self, strategy: Any, pl_module: Any, action: Callable[[Any], None]) -> None:
        self.strategy, self.pl_module, self.action = strategy, pl_module, action
        self.before = vars(strategy).get("setup")
        self.removed = False
        strategy.setup = self

    def __call__(self, trainer: Any) -> None:
        self.remove()
        self.action(self.pl_module)
        before = _wrapped(self.pl_module)
        self.strategy.setup(trainer)
        added = _wrapped(self.pl_module) - before
        if added:
            raise ValueError(
                f"gradckpt: {type(self.strategy).__name__} checkpoints {added} modules that GradckptCallback "
                "checkpoints already; leave activation_checkpointing_policy out of the strategy, or the callback out "
                "of the Trainer"
            )

    def remove(self) -> None:
        self.removed = True
        held = vars(self.strategy).get("setup")
        while isinstance(held, _BeforeSetup) and held.removed:
            held = held.before
        if held is not None:
            self.strategy.setup = held
        elif "setup" in vars(self.strategy):
            del self.strategy.setup


def _wrapped(module: Any) -> int:
    return sum(isinstance(each, CheckpointWrapper) for each in module.modules())
