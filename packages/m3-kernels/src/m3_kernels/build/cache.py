"""A cache of compiled files whose names are keys of all that went into them.

An entry appears by an atomic rename and never changes: a process sees a whole file or none. A lock file only saves work; a process
that cannot get the lock in time compiles for itself.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from m3_core.errors import BuildError

LOCK_SECONDS = 300.0


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/m3/kernels``, by default under ``~/.cache``; not created yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "m3" / "kernels"


@contextmanager
def _lock(path: Path, seconds: float) -> Iterator[bool]:
    """Hold an advisory lock on ``path``; yields whether it was got within ``seconds``. The kernel frees it if the holder dies."""
    with path.open("a") as file:
        deadline = time.monotonic() + seconds
        held = False
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        try:
            yield held
        finally:
            if held:
                fcntl.flock(file, fcntl.LOCK_UN)


def cached(name: str, produce: Callable[[Path], None], *, root: Path | None = None, lock_seconds: float = LOCK_SECONDS) -> Path:
    """The cache entry ``name``, made by ``produce(path)`` if it is not there yet.

    Args:
        name: file name that carries the key.
        produce: writes the whole entry to the path that it is given; may raise.
        root: the cache folder; ``cache_root()`` by default.
        lock_seconds: how long to wait for another process that makes the same entry.

    Raises:
        BuildError: if the cache folder cannot be written; whatever ``produce`` raises.
    """
    folder = cache_root() if root is None else root
    entry = folder / name
    if entry.is_file():
        return entry
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{name}.lock", lock_seconds):
            if not entry.is_file():
                with TemporaryDirectory(prefix=f".{name}.", dir=folder) as temporary:
                    made = Path(temporary) / name
                    produce(made)
                    os.replace(made, entry)
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {folder}: {error}; set XDG_CACHE_HOME to a folder that can be written") from error
    return entry
