"""Settings of a whole model that can be tried out one after another: :class:`Setting`.

Nothing here reads values of tensors, so a setting also works under ``FakeTensorMode``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Union

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt import _C
from gradckpt._compression import CompressionConfig, parse_compress
from gradckpt._models import inactivity_warning
from gradckpt._models.regions import prepare, regions_in
from gradckpt._models.rules import OF_MODULES, parse_options
from gradckpt._models.switch import Handle, Modules, enable, snapshot, take_off
from gradckpt.integrations.transformers import models
from gradckpt.selectors import describe

logger = logging.getLogger("gradckpt")

#: Keywords of enable that gradckpt.checkpoint does not have.
_PLACES = ("modules", "every_n_layers")

#: Flags of models that checkpoint by themselves: transformers and diffusers, timm.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a model's training steps.

    ``name``: as tables print it. ``line``: what to write to train so. ``way``: ``"none"`` (no
    checkpointing), ``"torch"`` (torch's checkpoint) or ``"enable"``. ``options``: the keywords of
    ``enable``.
    """

    name: str
    line: str
    way: str = "enable"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, hash=False)

    @property
    def compresses(self) -> bool:
        """True if region inputs or saved tensors are compressed."""
        if self.way == "enable" and "compress" not in self.options:
            return not {"policy", "context_fn"} & self.options.keys()
        return parse_compress(self.options.get("compress")) is not None

    @property
    def recomputes(self) -> bool:
        """True if modules are checkpointed by ``enable``."""
        return self.way == "enable" and bool(self.options.get("recompute", True))

    @contextlib.contextmanager
    def active(self, model: Module, modules: Modules = None) -> Iterator[None]:
        """Put the model in this setting for a block, and afterwards in the one that it had.

        Attributes of modules get back their values of before, too. No warning is given about what
        the block compresses or not.

        Args:
            model: As for :func:`gradckpt.enable`. Whether it is enabled or checkpoints by a flag of
                its own makes no difference in the block.
            modules: As for :func:`gradckpt.enable`. ``None``: those that are enabled now, if any.

        Raises:
            ValueError, TypeError: As :func:`gradckpt.enable`.
        """
        as_enabled = modules is not None or self.recomputes or self.way == "torch"
        places = _places(model, modules) if as_enabled else [(model, {})]
        put_back = snapshot(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(inactivity_warning.unobserved())
            stack.callback(put_back)
            stack.callback(take_off, model)
            take_off(model)
            _turn_flags_off(model)
            with quiet():
                for part, place in places:
                    if self.way == "enable":
                        enable(part, **{**place, **self.options})
                    elif self.way == "torch":
                        _use_torchs(part, place)
            yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let settings that are only tried out log nothing."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


#: What :func:`setting_of` takes: a setting, its name in READY, a codec's name, a config, or a dict
#: of keywords of gradckpt.enable.
Candidate = Union[Setting, str, CompressionConfig, Mapping[str, Any]]


def _saved(codec: str) -> Setting:
    line = f'gradckpt.enable(model, "{codec}", recompute=False)'
    return Setting(f"compress_saved {codec}", line, options={"compress": codec, "recompute": False})


def _enabled(codec: str) -> Setting:
    return Setting(codec, f'gradckpt.enable(model, "{codec}")', options={"compress": codec})


#: Checkpointing with uncompressed inputs, which changes no gradient.
EXACT = Setting("exact", "gradckpt.enable(model, None)", options={"compress": None})

#: No checkpointing, and torch's.
NONE = Setting("none", "gradckpt.disable(model)", "none")
TORCH = Setting("torch", "gradckpt.enable(model, None)  # equal to torch's to the last bit", "torch")

READY: tuple[Setting, ...] = (
    NONE,
    TORCH,
    _enabled("int8"),
    _enabled("int4"),
    _enabled("lossless"),
    Setting(
        "selective int8",
        'gradckpt.enable(model, "int8", policy="every_other_matmul:int8")',
        options={"compress": "int8", "policy": "every_other_matmul:int8"},
    ),
    _saved("int8"),
    _saved("int4"),
)


def in_parts(setting: Setting, tiles: int | None = None) -> Setting | None:
    """Return the setting with its regions recomputed in parts, and with MLPs in so many tiles; None
    if it has no whole regions.
    """
    if setting.way == "none" or setting.options.keys() - {"compress"}:
        return None
    parts = _more(setting, f"{setting.name} in parts", parts="sequential")
    return parts if tiles is None else in_tiles(parts, tiles)


def in_tiles(setting: Setting, tiles: int) -> Setting | None:
    """Return the setting with MLPs in so many tiles; None if it has no regions or tiles already."""
    if setting.way == "none" or not setting.options.get("recompute", True) or "tiles" in setting.options:
        return None
    return _more(setting, f"{setting.name}, {tiles} tiles", tiles=tiles)


def _more(setting: Setting, name: str, **more: Any) -> Setting:
    options = {"compress": None, **setting.options, **more}
    rest = (f"{key}={_write(value)}" for key, value in options.items() if key != "compress")
    line = ", ".join(["model", _write(options["compress"]), *rest])
    return Setting(name, f"gradckpt.enable({line})", options=options)


def setting_of(candidate: Candidate) -> Setting:
    """Return the setting that a candidate means.

    Raises:
        ValueError: A name, codec, policy or keyword is unknown; the message names the nearest.
        TypeError: The candidate or an option has another type.
    """
    if isinstance(candidate, Setting):
        return candidate
    if isinstance(candidate, str):
        return _named(candidate)
    if isinstance(candidate, CompressionConfig):
        default = CompressionConfig(candidate.codec)
        changed = {key: value for key, value in vars(candidate).items() if value != getattr(default, key)}
        if not changed:
            return _named(candidate.codec)
        name = ", ".join([candidate.codec, *(f"{key}={_write(value)}" for key, value in changed.items())])
        line = f"gradckpt.enable(model, {_write({'codec': candidate.codec, **changed})})"
        return Setting(name, line, options={"compress": candidate})
    if isinstance(candidate, Mapping):
        return _of_keywords(dict(candidate))
    raise TypeError(
        "gradckpt: a candidate is a codec name, a CompressionConfig, a dict of enable's keywords or a name of a "
        f"setting; not {type(candidate).__name__}"
    )


def _named(name: str) -> Setting:
    ready = {each.name: each for each in READY}
    if name in ready:
        return ready[name]
    codec = name.removeprefix("compress_saved ")
    if codec != name and codec in _C.codecs():
        return _saved(codec)
    near = difflib.get_close_matches(name.lower(), [each for each in ready if " " in each], 1, 0.75)
    if near:
        raise ValueError(f"gradckpt: unknown setting {name!r}; did you mean {near[0]!r}?")
    CompressionConfig(name)  # raises with the nearest codec
    return _enabled(name)


def _of_keywords(given: dict[str, Any]) -> Setting:
    options = {key: value for key, value in given.items() if key not in _PLACES}
    parse_options(options, {}, (*_PLACES, *OF_MODULES))
    for ready in READY:
        if ready.way == "enable" and ready.options == given:
            return ready
    rest = [f"{key}={_write(value)}" for key, value in given.items() if key != "compress"]
    written = [f"compress={_write(given['compress'])}"] if "compress" in given else []
    compress = given.get("compress", ...)
    first = [compress if isinstance(compress, str) else written[0]] if written else []
    line = f"gradckpt.enable({', '.join(['model', *written, *rest])})"
    return Setting(", ".join([*first, *rest]) or "enable", line, options=given)


def _write(value: Any) -> str:
    """Return a value as Python source, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_write(key)}: {_write(each)}" for key, each in value.items()) + "}"
    return describe(value)


# ---- a model in a setting ----


def _places(model: Module, modules: Modules) -> list[tuple[Module, dict[str, Any]]]:
    """Return the models to enable, each with the keywords of enable that choose its modules."""
    if modules is not None:
        return [(model, {"modules": modules})]
    adapters = models.adapters_in(model)
    if adapters:
        return [(whole, {"every_n_layers": adapter.settings.every_n_layers}) for whole, adapter in adapters]
    regions = [region for region in regions_in(model) if region.saves is None]
    return [(model, {"modules": [region.module for region in regions]} if regions else {})]


def _turn_flags_off(model: Module) -> None:
    for module in model.modules():
        for flag in _FLAGS:
            if vars(module).get(flag) is True:
                vars(module)[flag] = False


def _use_torchs(model: Module, place: dict[str, Any]) -> None:
    """Checkpoint the modules that enable would choose by torch's own function."""
    enable(model, None, **place)
    adapters = models.adapters_in(model)
    names = list(Handle(model).modules)
    take_off(model)
    if adapters:
        for whole, adapter in adapters:
            models.turn_on_torchs(whole, adapter.settings.every_n_layers)
        return
    modules = dict(model.named_modules())
    for name in names:
        modules[name].__dict__["forward"] = _with_torchs(modules[name])


def _with_torchs(module: Module) -> Callable[..., Any]:
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        function, args, kwargs = prepare(forward, args, kwargs, None, False)
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)

    return checkpointed
