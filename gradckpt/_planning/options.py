"""What can be done with a region: keep, compress or recompute what its backward needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from gradckpt import _C
from gradckpt._codec_names import resolve_codec
from gradckpt._config import CompressionConfig, parse_compress
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._models.rules import OF_MODULES, Settings, parse_options
from gradckpt._models.working_set import have_parts
from gradckpt._offload import Offload, parse_offload, plain_data

__all__ = ["KEEP", "RECOMPUTE", "Option", "allowed", "find_option", "in_tiles"]

#: Of policies: those that keep least first.
_POLICIES = ("save_attention", "every_other_matmul", "save_matmuls", "save_attention|save_matmuls")

#: The end of the names of options whose payloads get a place.
_OFFLOADED = ", offload"

#: Codecs that ``error=`` permits where ``compress=`` says nothing.
_LOSSY = ("int8", "int6", "int4")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to treat a region. ``name``: as tables print it. ``rule``: the value for the region
    in ``modules=`` of :func:`gradckpt.enable`. ``codec``: the lossy codec, or None.
    """

    name: str
    rule: Any = dataclasses.field(compare=False)
    codec: str | None = None

    def settings(self) -> Settings | None:
        """Return the keywords of :func:`gradckpt.checkpoint`; None: the region stays as it is."""
        if self.rule == "skip":
            return None
        return parse_options(self.rule, {}, OF_MODULES)

    @property
    def place(self) -> Offload | None:
        """Where the payloads live; None: on their device."""
        return None if isinstance(self.rule, str) else parse_offload(self.rule.get("offload"))

    def beside(self, options: Iterable[Option]) -> Option | None:
        """Return the option that does the same without a place, if it is among these."""
        name = self.name.removesuffix(_OFFLOADED)
        return next((each for each in options if each.name == name), None) if self.place is not None else None

    @property
    def recomputes(self) -> bool:
        """False: what autograd saves is kept."""
        return not isinstance(self.rule, str) and bool(self.rule.get("recompute", True))

    @property
    def in_parts(self) -> bool:
        """True if regions are recomputed in parts."""
        return not isinstance(self.rule, str) and "parts" in self.rule

    @property
    def encodes(self) -> bool:
        """True if payloads are compressed."""
        return not isinstance(self.rule, str) and self.rule.get("compress") not in (None, False, "raw")

    def without_policy(self) -> str:
        """Return what the option does beside its policy, as text."""
        if isinstance(self.rule, str):
            return self.rule
        return str(sorted((key, value) for key, value in self.rule.items() if key != "policy"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, of which :func:`find_option` makes the option."""
        return {"name": self.name, "rule": self.rule}


#: As autograd does it.
KEEP = Option("keep", "skip")

#: Checkpointing with the uncompressed input.
RECOMPUTE = Option("recompute", {"compress": None})


def _compress(codec: str) -> Option:
    return Option(f"compress {codec}", {"compress": codec, "recompute": False}, _lossy(codec))


def _recompute(codec: str | None, policy: str | None = None) -> Option:
    words = ["recompute", *([codec] if codec else [])]
    rule: dict[str, Any] = {"compress": codec}
    if policy is not None:
        rule["policy"] = policy
        words.append(f"({policy})")
    return Option(" ".join(words), rule, _lossy(codec) if codec else None)


def _lossy(codec: str) -> str | None:
    return codec if _C.codec_info(codec)["max_error"] else None


def _offloaded(option: Option, place: Mapping[str, Any]) -> Option:
    """Return the same with payloads in a place; what is kept as it is becomes ``raw`` payloads."""
    rule = {"compress": "raw", "recompute": False} if option == KEEP else option.rule
    return Option(f"{option.name}{_OFFLOADED}", {**rule, "offload": dict(place)}, option.codec)


def _in_parts(option: Option, form: str = "sequential") -> Option:
    name = f"{option.name} in parts" if form == "sequential" else f"{option.name} (parts {form})"
    return Option(name, {**option.rule, "parts": form}, option.codec)


def in_tiles(option: Option, tiles: int) -> Option:
    """Return the same with MLPs in so many tiles."""
    return Option(f"{option.name}, {tiles} tiles", {**option.rule, "tiles": tiles}, option.codec)


def allowed(
    compress: Any,
    error: bool,
    offload: Offload | None = None,
    blocks: Sequence[Module] = (),
    tiles: int | None = None,
) -> list[Option]:
    """Return the options that a plan may choose from, in a fixed order.

    ``compress``: the codec or codecs that the user permits; ``None``: exact options alone, or with
    an ``error`` budget the codecs int8, int6 and int4. ``offload``: the place that payloads may
    have. ``blocks``: the regions, which may be recomputed in parts if all of them have some.
    ``tiles``: in how many tiles their MLPs may run.

    Raises:
        ValueError, TypeError: A codec is unknown or not for activations.
    """
    codecs = _codecs(compress, error)
    found = [KEEP, RECOMPUTE, _recompute("lossless"), _compress("lossless")]
    found += [_recompute(None, policy) for policy in _POLICIES]
    for codec in codecs:
        found += [_compress(codec), _recompute(codec), _recompute(codec, f"save_matmuls:{codec}")]
    whole = [RECOMPUTE, _recompute("lossless"), *map(_recompute, codecs)]
    has_parts = have_parts(blocks)
    in_parts = [_in_parts(option) for option in whole] if has_parts else []
    found += in_parts + ([_in_parts(RECOMPUTE, "kept")] if has_parts else [])
    if tiles is not None:
        found += [in_tiles(option, tiles) for option in (*whole, *in_parts)]
    if offload is not None:
        plain = [KEEP, RECOMPUTE, _compress("lossless")]
        plain += [make(codec) for codec in codecs for make in (_compress, _recompute)]
        found += [_offloaded(option, plain_data(offload)) for option in plain]
    return found


def _codecs(compress: Any, error: bool) -> list[str]:
    if compress is None or compress is False:
        return list(_LOSSY) if error else []
    listed: Iterable[Any] = compress if isinstance(compress, (tuple, list)) else [compress]
    names = []
    for each in listed:
        config = parse_compress(each)
        if config is None:
            continue
        if config != CompressionConfig(config.codec):
            raise ValueError(
                "gradckpt: with budget=, compress= names the permitted codecs alone; pass a name or a list of names"
            )
        compress_saved(config.codec)  # raises for a codec that is not for activations
        name = resolve_codec(config.codec)
        if name not in ("raw", "lossless") and name not in names:
            names.append(name)
    return names


def find_option(name: str, rule: Mapping[str, Any] | str) -> Option:
    """Return the option of a plan file, which has its name and rule.

    Raises:
        ValueError: The rule is not one of :func:`gradckpt.enable`.
    """
    option = Option(name, rule if isinstance(rule, str) else dict(rule))
    settings = option.settings()
    config = settings["compress"] if settings is not None else None
    return dataclasses.replace(option, codec=_lossy(config.codec) if config is not None else None)
