"""Runs a program that imports torchvision beside torch's CPU wheel: ``python
torchvision_operators.py PROGRAM ARGS...``

PyPI has torchvision for CUDA alone. Beside a torch without CUDA its library does not load, the
operators in it are missing, and ``import torchvision`` fails while it describes two of them. timm
needs the import, but neither operator, so they are declared here without a kernel, unless
torchvision's own are there.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare() -> "torch.library.Library | None":
    """The declarations, which hold as long as the object lives; None:
    torchvision's own operators load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed; `make test_all` installs it for the tests of timm")
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        return library
    return None


if __name__ == "__main__":
    declared = declare()
    del sys.argv[0], sys.path[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
