"""The dict that transformers passes to its checkpointing function: our keys, torch's, and no
others.

It is ``activation_checkpointing_kwargs`` (before 5.23: ``gradient_checkpointing_kwargs``) of the
Trainer and of the model's methods. Errors in it are raised when checkpointing is turned on.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt._compression import CompressionConfig, check_no_operators, instead_of, parse_compress
from gradckpt._engine.arguments import HOOKS_SEE_KEPT, check_bool, check_int, check_option
from gradckpt._engine.selective import contexts_of
from gradckpt._models.rules import saved_settings
from gradckpt._offload import Offload, parse_offload
from gradckpt.policies import is_known

#: Our keys; transformers 5.17 and later take the last two, which are its own, out of the dict.
OURS = (
    *("compress", "fake_quantize", "min_numel", "recompute", "budget", "plan", "policy"),
    *("selective", "every_n_layers", "offload"),
)

#: Keys that only we use. Others use ``policy`` as well.
_MARKS = frozenset(OURS[:6])

#: torch's keywords, in any version.
TORCHS = tuple(
    dict.fromkeys(
        (
            *(k for k, p in inspect.signature(torch_checkpoint).parameters.items() if p.kind is p.KEYWORD_ONLY),
            *("preserve_rng_state", HOOKS_SEE_KEPT),
        )
    )
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the layers of a model are checkpointed."""

    config: CompressionConfig | None = None
    context_fn: Callable[[], Any] | None = None  # of a policy
    recompute: bool = True
    every_n_layers: int = 1
    offload: Offload | None = None
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other keywords of gradckpt.checkpoint
    planned: bool = False  # a budget or a plan decides all of it
    working_set: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # parts and tiles


def pop_our_keys(keywords: dict[str, Any], base: Settings) -> Settings:
    """Take our keys out of the dict; missing ones are as in ``base``.

    Raises:
        ValueError, TypeError: A value is unknown; the message names the key and the known values.
    """
    if is_planned(keywords):
        plan_keywords(keywords)
        keywords.clear()
        return Settings(planned=True)
    _read_selective(keywords)
    ours = {key: keywords.pop(key) for key in OURS if key in keywords}
    every_n_layers = check_int("every_n_layers", ours.get("every_n_layers", base.every_n_layers), 1)
    offload = parse_offload(ours.get("offload", base.offload))
    context_fn = contexts_of(ours["policy"]) if "policy" in ours else base.context_fn
    recompute = check_bool("recompute", ours.get("recompute", base.recompute))
    if not recompute:
        ours = {"compress": True, **ours}
    config = _config(ours, base)
    if recompute:
        check_no_operators(config)
    return Settings(config, context_fn, recompute, every_n_layers, offload, base.keywords, working_set=base.working_set)


def _read_selective(keywords: dict[str, Any]) -> None:
    """Take TRL's key ``selective`` for ``policy="save_attention"``, and the contexts that its
    trainer makes of it.

    Raises:
        ValueError: A policy is given, too.
        TypeError: The value is no bool.
    """
    chosen = check_bool("selective", keywords.pop("selective", False))
    context_fn = keywords.get("context_fn")
    asked = context_fn.args[0] if isinstance(context_fn, functools.partial) and context_fn.args else None
    if (getattr(asked, "__module__", None) or "").split(".")[0] == "trl":
        del keywords["context_fn"]
        chosen = True
    if chosen and "policy" in keywords:
        raise ValueError('gradckpt: "selective" means policy="save_attention"; leave "selective" or "policy" out')
    if chosen:
        keywords["policy"] = "save_attention"


#: The keys that let a plan decide, and those that may stand beside each.
_PLANNED = {"budget": {"compress", "offload", "use_reentrant"}, "plan": {"use_reentrant"}}


def is_planned(keywords: Any) -> bool:
    """Return whether the kwargs ask for a budget or a plan."""
    return isinstance(keywords, Mapping) and not _PLANNED.keys().isdisjoint(keywords)


def plan_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of :func:`gradckpt.enable` that kwargs with a budget or a plan mean.

    Raises:
        ValueError: Another key says what to do, too.
    """
    key = next(key for key in _PLANNED if key in keywords)
    for other, value in keywords.items():
        if other != key and (other not in _PLANNED[key] or (other == "use_reentrant" and value)):
            raise beside_plan(key, other)
    return {name: value for name, value in keywords.items() if name != "use_reentrant"}


def beside_plan(key: str, other: str) -> ValueError:
    """Return the error of another keyword beside ``key``, which is budget or plan."""
    if other == "error":
        return ValueError("gradckpt: error= is for gradckpt.plan(model, batch, budget=..., error=...); apply its plan")
    return ValueError(
        f"gradckpt: {key}= and {other}= exclude each other, since the {key} decides; leave one of them out"
    )


def _config(ours: Mapping[str, Any], base: Settings) -> CompressionConfig | None:
    fields = {key: ours[key] for key in ("fake_quantize", "min_numel") if key in ours}
    CompressionConfig(**fields)  # checked even if nothing is to be compressed
    compress = ours.get("compress", base.config)
    config = parse_compress(compress)
    if config is None:
        if fields and "compress" not in ours:
            key, value = next(iter(fields.items()))
            raise ValueError(f'gradckpt: {key}={value!r} has no effect without compress; add "compress": "int8"')
        return None
    if isinstance(compress, str):
        config = dataclasses.replace(base.config or CompressionConfig(), codec=config.codec)
    elif compress is True:
        config = base.config or CompressionConfig()
    return dataclasses.replace(config, **fields)


def check_alone(keywords: Mapping[str, Any], base: Settings | None = None) -> None:
    """Check the kwargs of a Trainer. Other unknown keys pass: they may be removed before the layers
    get them.

    Raises:
        ValueError, TypeError: As :func:`pop_our_keys` and :func:`check_torchs`.
    """
    torchs = dict(keywords)
    settings = pop_our_keys(torchs, base or Settings())
    check_torchs({key: value for key, value in torchs.items() if key in TORCHS or _near(key)})
    check_together(settings, torchs)


def _near(key: Any) -> str | None:
    return next(iter(difflib.get_close_matches(str(key), (*OURS, *TORCHS), 1, 0.75)), None)


def check_torchs(keywords: Mapping[str, Any]) -> None:
    """Check the keys that remain after :func:`pop_our_keys`, which torch's checkpoint gets.

    Raises:
        ValueError: A key is unknown, which the layers would ignore, or torch rejects a value.
        TypeError: A value has the wrong type.
    """
    for key, value in keywords.items():
        if key not in TORCHS:
            raise unknown_key(key, value)
        check_option(key, value)


def unknown_key(key: Any, value: Any) -> ValueError:
    near = instead_of(str(key), value, (*OURS, *TORCHS))
    meant = f"did you mean {near}?" if near else f"the keys are: {', '.join((*OURS, *TORCHS))}"
    return ValueError(f"gradckpt: unknown key {key!r} among the checkpointing kwargs; {meant}")


def check_together(settings: Settings, torchs: Mapping[str, Any]) -> None:
    """Check our settings against torch's keywords.

    Raises:
        ValueError: Our settings need the non-reentrant form, there are two sources of contexts, or
            nothing is recomputed and a keyword applies to that.
    """
    if not settings.recompute:
        _check_saved(settings, torchs)
    elif torchs.get("use_reentrant"):
        check_reentrant(settings)
    elif settings.context_fn is not None and "context_fn" in torchs:
        raise ValueError("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")


def _check_saved(settings: Settings, torchs: Mapping[str, Any]) -> None:
    """Check the kwargs of ``recompute=False``; ``use_reentrant=False`` is what others pass too."""
    given = {key: value for key, value in torchs.items() if key != "use_reentrant" or value}
    if settings.context_fn is not None:
        given["policy"] = settings.context_fn
    if settings.every_n_layers > 1:
        given["every_n_layers"] = settings.every_n_layers
    saved_settings({**given, "compress": settings.config, "recompute": False})


def check_reentrant(settings: Settings) -> None:
    """Check that the reentrant form supports the settings.

    Raises:
        ValueError: It does not.
    """
    compress = "" if settings.config is None else f"compress={settings.config.codec!r}"
    others = {"policy=": settings.context_fn, "offload=": settings.offload}
    keyword = compress or next((name for name, value in others.items() if value is not None), None)
    if keyword is not None:
        raise ValueError(
            f"gradckpt: {keyword} needs use_reentrant=False; leave use_reentrant=True out of the checkpointing "
            f"kwargs{', or pass compress=None' if compress else ''}"
        )


def misspelt(keywords: Any) -> str | None:
    """Return the first key that looks like a misspelt one of ours."""
    given = keywords if isinstance(keywords, Mapping) else ()
    return next((str(key) for key in given if key not in OURS and _near(key) in OURS), None)


def means_ours(keywords: Any) -> bool:
    """Return whether the kwargs ask for gradckpt, by exact keys.

    ``policy`` and ``offload`` alone count if their values are ours.
    """
    if not isinstance(keywords, Mapping):
        return False
    if not isinstance(keywords.get("offload", False), bool):
        return True
    return not _MARKS.isdisjoint(keywords) or is_known(keywords.get("policy"))


def is_old_default(keywords: Mapping[str, Any]) -> bool:
    """Return whether these are the kwargs that transformers 4 passes by default."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    return version.startswith("4.") and keywords == {"use_reentrant": True}
