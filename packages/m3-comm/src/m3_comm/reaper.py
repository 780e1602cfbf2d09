"""Start-up removes what earlier processes left behind: segments of dead owners, never those of living ones."""

from __future__ import annotations

from pathlib import Path

from m3_comm.transports.segments import DEFAULT_DIRECTORY, remove_abandoned


def reap(directory: Path = DEFAULT_DIRECTORY) -> tuple[str, ...]:
    """Unlink every m3 segment in ``directory`` whose owner is dead.

    Safe while other processes start or run: an owner counts as dead only if no process has its id and start time, or, for owners
    of other process id namespaces, if nobody holds its lock. Segments of other users stay.

    Returns:
        The names that were unlinked; each is also logged as ``segment_reaped``.
    """
    return remove_abandoned(directory) if directory.is_dir() else ()
