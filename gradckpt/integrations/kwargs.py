"""The dict that transformers hands to its checkpointing function: our keys in it, torch's, and no others.

It is ``gradient_checkpointing_kwargs`` (by its new name, ``activation_checkpointing_kwargs``) of the
Trainer and of the model's methods. What is wrong in it is said when checkpointing is turned on.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt.config import CompressionConfig, parse_compress
from gradckpt.policies import contexts_of, is_known

#: Everything that we read; the last two are transformers' own, which 5.17 and later take out of the dict.
OURS = ("compress", "replay", "min_numel", "policy", "every_n_layers", "offload")

#: Keys of ours alone. ``policy`` is a word of others, too.
_MARKS = frozenset(OURS[:4])

#: torch's, whatever this version has.
TORCHS = (
    *(k for k, p in inspect.signature(torch_checkpoint).parameters.items() if p.kind is p.KEYWORD_ONLY),
    "preserve_rng_state",
)

_FLAGS = ("preserve_rng_state", "debug", "early_stop")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the layers of a model are to be checkpointed."""

    config: CompressionConfig | None = None
    context_fn: Callable[[], Any] | None = None  # of a policy
    every_n_layers: int = 1
    offload: bool = False
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # others of gradckpt.checkpoint


def take(keywords: dict[str, Any], base: Settings) -> Settings:
    """Takes our keys out of the dict; what it does not say is as in ``base``.

    Raises:
        ValueError, TypeError: a value that there is not; the message names the key and what exists.
    """
    ours = {key: keywords.pop(key) for key in OURS if key in keywords}
    every_n_layers = check_every_n_layers(ours.get("every_n_layers", base.every_n_layers))
    offload = check_bool("offload", ours.get("offload", base.offload))
    context_fn = contexts_of(ours["policy"]) if "policy" in ours else base.context_fn
    return Settings(_config(ours, base), context_fn, every_n_layers, offload, base.keywords)


def _config(ours: Mapping[str, Any], base: Settings) -> CompressionConfig | None:
    fields = {key: ours[key] for key in ("replay", "min_numel") if key in ours}
    CompressionConfig(**fields)  # they are looked at even when nothing is to be compressed
    compress = ours.get("compress", base.config)
    config = parse_compress(compress)
    if config is None:
        if fields and "compress" not in ours:
            key, value = next(iter(fields.items()))
            raise ValueError(f'gradckpt: {key}={value!r} says how to compress, and nothing is; add "compress": "int8"')
        return None
    if isinstance(compress, str):
        config = dataclasses.replace(base.config or CompressionConfig(), codec=config.codec)
    elif compress is True:
        config = base.config or CompressionConfig()
    return dataclasses.replace(config, **fields)


def check_every_n_layers(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"gradckpt: every_n_layers is an int, not {n!r}")
    if n < 1:
        raise ValueError(f"gradckpt: every_n_layers is 1 or more, not {n}")
    return n


def check_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"gradckpt: {key} is True or False, not {value!r}")
    return value


def check_alone(keywords: Mapping[str, Any], base: Settings | None = None) -> None:
    """Check the kwargs of a Trainer. A key of others passes here: they may take it out before the layers are reached.

    Raises:
        ValueError, TypeError: as :func:`take` and :func:`check_torchs`.
    """
    torchs = dict(keywords)
    settings = take(torchs, base or Settings())
    check_torchs({key: value for key, value in torchs.items() if key in TORCHS or _nearest(key, 0.75)})
    check_together(settings, torchs)


def check_torchs(keywords: Mapping[str, Any]) -> None:
    """Check what is left after :func:`take`, which torch's checkpoint gets.

    Raises:
        ValueError: an unknown key, which the layers would swallow; a value that torch refuses.
        TypeError: a value of the wrong type.
    """
    for key, value in keywords.items():
        if key not in TORCHS:
            raise ValueError(unknown(key))
        if key in _FLAGS:
            check_bool(key, value)
        if key == "determinism_check" and value not in ("default", "none"):
            raise ValueError(f'gradckpt: determinism_check is "default" or "none", not {value!r}')
        if key == "context_fn" and not callable(value):
            raise TypeError(f"gradckpt: context_fn is a function that returns two context managers, not {value!r}")


def check_together(settings: Settings, torchs: Mapping[str, Any]) -> None:
    """Check our settings against torch's keywords.

    Raises:
        ValueError: something of ours with the reentrant form; two sources of contexts.
    """
    if torchs.get("use_reentrant"):
        check_reentrant(settings)
    elif settings.context_fn is not None and "context_fn" in torchs:
        raise ValueError("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")


def check_reentrant(settings: Settings) -> None:
    """Raises ValueError where the reentrant form cannot do what is asked."""
    asked = None
    if settings.config is not None:
        asked = f"compress={settings.config.codec!r}"
    elif settings.context_fn is not None:
        asked = "policy="
    elif settings.offload:
        asked = "offload=True"
    if asked is not None:
        instead = ", or pass compress=None" if settings.config is not None else ""
        raise ValueError(
            f"gradckpt: {asked} needs use_reentrant=False; leave use_reentrant=True out of the checkpointing "
            f"kwargs{instead}"
        )


def _nearest(key: Any, cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(str(key), (*OURS, *TORCHS), 1, cutoff)), None)


def unknown(key: str) -> str:
    near = _nearest(key)
    meant = f"; did you mean {near!r}?" if near else "."
    known = ", ".join((*OURS, *TORCHS))
    return f"gradckpt: unknown key {key!r} among the checkpointing kwargs{meant} The keys are: {known}"


def means_ours(keywords: Any) -> bool:
    """True if the kwargs ask for gradckpt: by exact keys, where ``policy`` alone counts if its value is ours."""
    if not isinstance(keywords, Mapping) or _MARKS.isdisjoint(keywords):
        return False
    return any(key in keywords for key in _MARKS - {"policy"}) or is_known(keywords["policy"])


def is_old_default(keywords: Mapping[str, Any]) -> bool:
    """transformers 4 passes this when it was given no kwargs at all."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    return version.startswith("4.") and keywords == {"use_reentrant": True}
