"""What several workers of one run need: built by the first, under a lock."""

import fcntl


def built_once(request, factory, name, build):
    """The folder in which `build(folder)` left what it made."""
    base = factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            build(folder)
            (folder / "done").touch()
    return folder
