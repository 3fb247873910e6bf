"""The build and the environment of gradckpt, for ``gradckpt doctor``, without names of persons
or paths.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_errors
from gradckpt._engine import torch_private as private
from gradckpt._version import __version__

#: The first and last release, by major and minor number, with which the tests were run.
TESTED = {"torch": ("2.11", "2.15"), "transformers": ("4.48", "5.24")}

#: Packages that are used with gradckpt: name of the import -> name of the distribution.
INTEGRATIONS = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "peft": "peft",
    "trl": "trl",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "diffusers": "diffusers",
    "timm": "timm",
    "sentence_transformers": "sentence-transformers",
    "torchtitan": "torchtitan",
}

#: Environment variables, and when they are read.
VARIABLES = {
    "GRADCKPT_ISA": "import",
    "GRADCKPT_CHECK_RANKS": "import",
    "GRADCKPT_CUDA": "build",
    "GRADCKPT_CUDA_ARCHS": "build",
    "GRADCKPT_DEBUG": "build",
    "GRADCKPT_SANITIZE": "build",
    "GRADCKPT_WERROR": "build",
}

#: The effect of a symbol that this torch does not have.
WITHOUT = {
    "aoti_torch_device_type_privateuse1": "devices beside CUDA keep tensors as they are",
    "aoti_torch_create_cuda_stream_guard": "saved tensors of another stream stay uncompressed on CUDA",
    "aoti_torch_delete_cuda_stream_guard": "saved tensors of another stream stay uncompressed on CUDA",
    "aoti_torch_get_current_cuda_stream": "torch.ops.gradckpt works on the CPU only",
    "a free dispatch key": "operators that a policy names are caught by a dispatch mode, which sees every operator",
}


def facts() -> dict[str, Any]:
    """Return all facts below, as JSON can carry them."""
    info = _C.build_info()
    return {
        "versions": versions(),
        "build": {
            "note": info["build"],
            "compiler": info["compiler"],
            "cuda_toolkit": cuda_version(info["cuda_runtime"]),
            "cuda_archs": info["cuda_archs"].split(";") if info["cuda_archs"] else [],
        },
        "cuda": cuda(info),
        "isa": isa(),
        "variables": variables(os.environ),
        "missing": missing(info),
        "differs": differs(),
        "integrations": {name: integration(name) for name in INTEGRATIONS},
    }


# ---- versions ----


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, Any]:
    return {
        "gradckpt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_tested": tested("torch", torch.__version__),
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
    }


def tested(name: str, version: str | None) -> bool | None:
    """Return whether a version is in the range of :data:`TESTED`.

    None if there is no range, or if the version has no numbers.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if name not in TESTED or numbers is None:
        return None
    first, last = (tuple(int(n) for n in bound.split(".")) for bound in TESTED[name])
    return first <= (int(numbers[1]), int(numbers[2])) <= last


def integration(name: str) -> dict[str, Any]:
    """Return whether a package can be imported, and its version, without importing it."""
    try:
        importable = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        importable = False
    version = version_of(INTEGRATIONS[name]) if importable else None
    return {"importable": importable, "version": version, "tested": tested(name, version)}


# ---- CPU ----


def isa() -> dict[str, Any]:
    used = _C.isa()
    _C.force_isa(None)
    best = _C.isa()
    _C.force_isa(used)
    return {"used": used, "best": best, "forced_by": "GRADCKPT_ISA" if os.environ.get("GRADCKPT_ISA") else None}


# ---- CUDA ----


def cuda_version(number: int) -> str | None:
    """Format CUDA's 1000 major + 10 minor; 0 means none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def kernels(archs: str, capability: tuple[int, int]) -> str:
    """Return how a build for e.g. ``"8.0;9.0+PTX"`` serves a card.

    It is ``native``, ``PTX`` (compiled at first use) or ``absent``.
    """
    found = "absent"
    for major, minor, feature, ptx in re.findall(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", archs):
        arch = int(major), int(minor)
        if arch == capability or (not feature and arch[0] == capability[0] and arch < capability):
            return "native"
        if ptx and not feature and arch < capability:
            found = "PTX"
    return found


def cuda(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CUDA version that the driver supports (None without one), cards and ``problem``,
    the reason why the CUDA codecs cannot run, or None.

    ``info`` is the result of :func:`gradckpt._C.build_info`.
    """
    gpus = [gpu(info, i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {"driver": cuda_version(info["cuda_driver"]), "gpus": gpus, "problem": problem(info, gpus)}


def gpu(info: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        return {"name": f"unusable ({reason})", "capability": None, "memory_gib": None, "kernels": "absent"}
    capability = properties.major, properties.minor
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "kernels": "absent" if torch.version.hip else kernels(info["cuda_archs"], capability),
    }


def problem(info: Mapping[str, Any], gpus: list[dict[str, Any]]) -> str | None:
    if torch.version.cuda is None:
        return "the installed torch is built without CUDA"
    if not gpus:
        return "torch sees no CUDA device"
    if not info["cuda_archs"]:
        return f"gradckpt is {info['build']}"
    if not info["cuda_usable"]:
        has, needs = cuda_version(info["cuda_driver"]), cuda_version(info["cuda_runtime"])
        return (
            f"the driver supports CUDA {has or '(unknown)'}, but gradckpt was built with the CUDA {needs} runtime; "
            "update the driver or build gradckpt with an older toolkit"
        )
    if any(card["kernels"] == "absent" for card in gpus):
        return f"gradckpt was built for {info['cuda_archs']} and not for every card here; set GRADCKPT_CUDA_ARCHS"
    return None


# ---- the rest ----


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of gradckpt that are set; a value that looks like a path is hidden."""
    return {
        name: "(a path)" if "/" in value else value
        for name, value in sorted(environment.items())
        if name.startswith("GRADCKPT_")
    }


def differs() -> list[str]:
    """Return what the installed torch says or takes otherwise than every torch that was tested."""
    taken = inspect.signature(_C.checkpoint).parameters
    theirs = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    keywords = [name for name, one in theirs.items() if one.kind is one.KEYWORD_ONLY and name not in taken]
    found = [f"its checkpoint() takes {name}=, which gradckpt does not know" for name in keywords]
    silent = torch_errors.in_our_words()
    return [*found, *(f"it has no text for {kind}; gradckpt says it in its own words" for kind in silent)]


def missing(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of what this torch does not have, each with the effect."""
    found = list(info["missing"])
    if _C.selective_key() is None:
        found.append("a free dispatch key")
    return {name: WITHOUT[name] for name in found} | {name: f"no {what}" for name, what in private.MISSING.items()}
