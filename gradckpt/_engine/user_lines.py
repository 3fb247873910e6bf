"""Find the user's own line: the place a warning points to, and the source of a tensor in
residuals().
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

#: Packages whose frames stand between the user's line and ours.
LIBRARIES = frozenset(
    {
        *("gradckpt", "torch", "transformers", "accelerate", "peft", "trl", "sentence_transformers", "diffusers"),
        *("timm", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "torchtitan", "functorch"),
        *("contextlib", "functools", "threading", "concurrent", "queue", "runpy", "importlib"),
    }
)

#: Frames of these packages are not the source of a tensor; those of model libraries are.
ENGINES = frozenset({"gradckpt", "torch"})


def _is_of(frame: FrameType, packages: frozenset[str]) -> bool:
    names = frame.f_globals
    # `python -m torch.distributed.run` is __main__ too.
    name = str(names.get("__package__") if names.get("__name__") == "__main__" else names.get("__name__"))
    return name.partition(".")[0] in packages or frame.f_code.co_filename.startswith(("<eval_with_key>", "<frozen"))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def outside(frame: FrameType | None, packages: frozenset[str] = LIBRARIES) -> FrameType | None:
    """Return the innermost frame, from this one outwards, that belongs to none of the packages."""
    return next((each for each in outwards(frame) if not _is_of(each, packages)), None)


def user_frame() -> FrameType | None:
    """Return the frame of the user's line that led here, or None.

    Autograd runs the backward of a device in its own thread, which no user's line has called. The
    user's thread waits inside torch meanwhile, so its stack is searched, the main thread's first.
    """
    found = outside(sys._getframe(1))
    if found is not None:
        return found
    threads = sys._current_frames()
    threads.pop(threading.get_ident(), None)
    main = threads.pop(threading.main_thread().ident or 0, None)
    waiting = (frame for frame in (main, *threads.values()) if frame is not None and _is_of(frame, LIBRARIES))
    return next(filter(None, map(outside, waiting)), None)
