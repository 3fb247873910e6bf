"""What an interpreter lacks for `make gpu`, a line each; the exit status is 1 when it lacks
something.

    python3 benchmarks/gpu_python.py

Nothing is installed and nothing of gradckpt imported: this runs before the build,
on a machine without a network.
"""

import os
import shutil
import sys
import sysconfig

PYTHON, TORCH = (3, 11), (2, 11)


def numbers(version):
    """(2, 11) of "2.11.0+cu130"."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])


def missing(module):
    """The line on a module that cannot be imported; None when it can."""
    try:
        __import__(module)
    except ImportError as error:
        return f"it cannot import {module} ({error}); install {module} there"
    return None


def lacks_of_torch():
    if said := missing("torch"):
        return [f"{said}, >= 2.11 and built with CUDA"]
    import torch

    lacks = []
    if numbers(torch.__version__) < TORCH:
        lacks.append(f"its torch is {torch.__version__}; install torch >= 2.11 there")
    if torch.version.cuda is None:
        lacks.append(f"its torch {torch.__version__} is built without CUDA; install one with CUDA there")
    elif not torch.cuda.is_available():
        lacks.append(f"its torch {torch.__version__} sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES")
    return lacks


def lacks():
    if sys.version_info < PYTHON:
        return [f"it is Python {sys.version.split()[0]}; name an interpreter >= 3.11"]
    found = lacks_of_torch()
    found += filter(None, map(missing, ("setuptools", "numpy")))
    if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.append("it has no Python.h; install its development package, e.g. python3-dev")
    if shutil.which("gcc") is None:
        found.append("gcc was not found; install the Debian package gcc")
    return found


if __name__ == "__main__":
    said = lacks()
    for line in said:
        print(f"make gpu: GPU_PYTHON={os.environ.get('GPU_PYTHON') or sys.executable}: {line}", file=sys.stderr)
    sys.exit(bool(said))
