"""Rules: which modules ``enable(model, modules=...)`` chooses, and the settings of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Union

from gradckpt._compression import (
    OPERATORS,
    Compress,
    CompressionConfig,
    advise,
    changes,
    check_no_operators,
    parse_compress,
    written,
)
from gradckpt._engine.arguments import OPTIONS, check_bool, check_option
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._engine.selective import contexts_key, contexts_of
from gradckpt._models.kinds import Tree
from gradckpt._offload import parse_offload
from gradckpt.selectors import Selector, describe, select

_CONFIG_FIELDS = tuple(field.name for field in dataclasses.fields(CompressionConfig))

#: The keys of a dict that is a value for ``compress``.
_CONFIG_KEYS = (_CONFIG_FIELDS, OPERATORS)

#: The keywords of a module's rule that gradckpt.checkpoint does not have, or not as text.
OF_MODULES = ("recompute", "offload", "parts", "tiles")

#: Those of them that make the working set of a region's backward smaller.
_WORKING_SET = ("parts", "tiles")

#: The forms of a region that is recomputed in parts; working_set.py describes them.
FORMS = ("nested", "sequential", "kept")

#: The keywords of gradckpt.checkpoint for one module; or ``compress`` and ``"recompute": False``.
Settings = dict[str, Any]

#: The value of a rule: whatever ``compress`` takes, a dict of keywords of gradckpt.checkpoint, or
#: "skip".
Value = Union[Compress, Mapping[str, Any]]

Rules = Union[Mapping[Any, Value], Selector, list[Any]]


def comparable(settings: Settings | None) -> Settings | None:
    if settings is None or "context_fn" not in settings:
        return settings
    return {**settings, "context_fn": contexts_key(settings["context_fn"])}


def summary(settings: Settings) -> str:
    config = settings["compress"]
    changed = []
    if config is not None:
        changed = changes(config)
    for key, value in settings.items():
        if key == "context_fn" and isinstance(value, functools.partial):  # of a policy
            key, value = "policy", value.args[0]
        if key != "compress":
            changed.append(f"{key}={describe(value)}")
    return ", ".join(["uncompressed" if config is None else config.codec, *changed])


def without_working_set(settings: Settings) -> tuple[Settings, Settings]:
    """Return the keywords of :func:`gradckpt.checkpoint`, and ``parts`` and ``tiles``."""
    rest = {key: value for key, value in settings.items() if key not in _WORKING_SET}
    return rest, {key: settings[key] for key in _WORKING_SET if key in settings}


def _check_working_set(settings: Settings) -> None:
    """Check ``parts`` and ``tiles``, and remove those that are None.

    Raises:
        ValueError, TypeError: They are none that :func:`gradckpt.enable` takes, or beside a policy.
    """
    for key in _WORKING_SET:
        if key in settings and settings[key] is None:
            del settings[key]
    if settings.get("parts", FORMS[0]) not in FORMS:
        *first, last = map(written, FORMS)
        raise ValueError(f"gradckpt: parts is {', '.join(first)} or {last}, not {written(settings['parts'])}")
    check_tiles(settings.get("tiles", 2))
    if "parts" in settings and "context_fn" in settings:
        raise ValueError(
            "gradckpt: parts= and policy= or context_fn= exclude each other; what is kept would serve the first of "
            "two recomputes only"
        )


def check_tiles(tiles: Any) -> None:
    """Check a number of tiles.

    Raises:
        ValueError, TypeError: It is none.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int):
        raise TypeError(f"gradckpt: tiles is a number of tiles, as in tiles=16, not {written(tiles)}")
    if tiles < 2:
        raise ValueError(f"gradckpt: tiles is 2 or more, not {tiles}; leave it out to run modules as a whole")


def is_saved(settings: Settings) -> bool:
    """Return whether the settings are those of a module that is not recomputed."""
    return not settings.get("recompute", True)


def parse_rules(rules: Any, defaults: Settings) -> list[tuple[Any, Settings | None]]:
    """Return the selectors and the settings of each; None means skip."""
    if isinstance(rules, Mapping):
        pairs = [(selector, _parse_value(value, defaults)) for selector, value in rules.items()]
    else:
        pairs = [(selector, defaults) for selector in (rules if isinstance(rules, list) else [rules])]
    if not pairs:
        raise ValueError('gradckpt: modules= is empty; pass a selector such as "layer", or leave it out')
    if all(settings is not None and is_saved(settings) for _, settings in pairs):
        saved_settings({**defaults, "compress": True})  # keywords of regions would have no effect
    return pairs


def _parse_value(value: Any, defaults: Settings) -> Settings | None:
    if isinstance(value, str) and value == "skip":
        return None
    fields = isinstance(value, Mapping) and any(value and all(key in known for key in value) for known in _CONFIG_KEYS)
    if not isinstance(value, Mapping) or fields:
        value = {"compress": value}
    return parse_options(value, defaults, OF_MODULES)


def parse_options(given: Mapping[str, Any], defaults: Settings, others: tuple[str, ...] = ()) -> Settings:
    """Return the keywords of :func:`gradckpt.checkpoint` that options mean; ``others`` are the
    caller's.
    """
    for key, value in given.items():
        if key in _CONFIG_FIELDS and key != "codec":
            raise ValueError(f'gradckpt: {key!r} is a field of compress=; pass compress={{"{key}": {value!r}}}')
        if key not in OPTIONS and not (key in OF_MODULES and key in others):
            where = "gradckpt.enable" if "recompute" in others else "gradckpt.checkpoint"
            raise ValueError(f"gradckpt: unknown option {key!r}; {advise(str(key), value, (*OPTIONS, *others), where)}")
        check_option(key, value)
    if not check_bool("recompute", given.get("recompute", defaults.get("recompute", True))):
        return saved_settings({"compress": defaults.get("compress"), **given})
    settings = {"compress": None, **defaults, **given}
    if "offload" in given:
        settings["offload"] = parse_offload(given["offload"])
    settings.pop("recompute", None)
    settings["compress"] = parse_compress(settings["compress"])
    check_no_operators(settings["compress"])
    if "policy" in given:
        if "context_fn" in given:
            raise ValueError("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")
        context_fn = contexts_of(settings.pop("policy"))
        settings.pop("context_fn", None)  # of the defaults
        if context_fn is not None:
            settings["context_fn"] = context_fn
    if settings.get("debug") and "context_fn" in settings:
        raise ValueError("gradckpt: debug=True and policy= or context_fn= exclude each other; leave one of them out")
    _check_working_set(settings)
    return settings


def saved_settings(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a module that is not recomputed; ``given``: its keywords.

    Raises:
        ValueError: A keyword applies to regions only, or nothing would be compressed.
    """
    for key in given:
        if key not in ("compress", "recompute", "offload"):
            raise ValueError(
                f"gradckpt: recompute=False and {key}= exclude each other; nothing is recomputed, so leave one of them "
                "out"
            )
    offload = parse_offload(given.get("offload"))
    config = compress_saved(given.get("compress", True), offload=offload).config
    if config is None:
        raise ValueError(
            "gradckpt: recompute=False and compress=None exclude each other, since nothing would change; pass a codec, "
            "or leave recompute out"
        )
    place = {"offload": offload} if "offload" in given else {}
    return {"compress": config, "recompute": False, **place}


def resolve(pairs: list[tuple[Any, Settings | None]], tree: Tree) -> dict[str, Settings]:
    """Return the settings by name, in the model's order; a module with several names occurs
    once.
    """
    by_name: dict[str, Settings | None] = {}
    for selector, settings in pairs:
        free = [name for name in select(selector, tree) if name not in by_name]
        if not free:
            raise ValueError(
                f"gradckpt: every module that {describe(selector)} matches is taken by a rule before it; put the "
                "narrower rule first"
            )
        by_name.update(dict.fromkeys(free, settings))
    first: dict[int, str] = {}
    for name, module in tree.names:
        if name not in by_name:
            continue
        other = first.setdefault(id(module), name)
        if comparable(by_name[other]) != comparable(by_name[name]):
            raise ValueError(
                f"gradckpt: {other!r} and {name!r} are one {type(module).__name__}, and the rules give it different "
                "settings; give both names the same"
            )
    settled = {name: by_name[name] for name in first.values()}
    wrapped = {name: settings for name, settings in settled.items() if settings is not None}
    if not wrapped:
        raise ValueError('gradckpt: every rule says "skip", so nothing would be checkpointed')
    return wrapped
