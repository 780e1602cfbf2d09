"""Names of shared-memory segments, and which of them nobody needs any more.

A name tells its owner (see ``processes``) and a label that the ranks of one construction share. The owner holds an exclusive
``flock`` on the segment as long as it has a name, which also tells a living owner in another process id namespace from a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import structlog

from m3_comm.processes import ProcessIdentity
from m3_core.errors import ConfigurationError

log = structlog.get_logger(__name__)

_NAME = re.compile(r"m3\.(?P<owner>[0-9a-f-]+)\.(?P<label>[0-9a-zA-Z_]*)\.(?P<count>[0-9]+)")
DEFAULT_DIRECTORY = Path("/dev/shm")

_POLL_SECONDS = 0.01


@attrs.frozen
class SegmentName:
    """The parts of a segment's file name.

    Attributes:
        owner: the process that made it.
        label: shared by the segments of one construction; letters, digits and underscores.
        count: tells apart one owner's segments of one label.
    """

    owner: ProcessIdentity
    label: str
    count: int

    def __attrs_post_init__(self) -> None:
        """Refuse a label that could not be read back."""
        if _NAME.fullmatch(str(self)) is None or len(str(self)) > 255:
            raise ConfigurationError(f"segment label {self.label!r}: only letters, digits and underscores, 160 at most")

    def __str__(self) -> str:
        """The file name."""
        return f"m3.{self.owner}.{self.label}.{self.count}"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Read a file name, or return None if it is none of ours."""
        match = _NAME.fullmatch(name)
        owner = ProcessIdentity.parse(match["owner"]) if match else None
        return None if match is None or owner is None else cls(owner, match["label"], int(match["count"]))


def segments(directory: Path) -> Iterator[SegmentName]:
    """Every segment of m3 in ``directory``, whoever owns it."""
    for name in sorted(os.listdir(directory)):
        parsed = SegmentName.parse(name)
        if parsed is not None:
            yield parsed


def abandoned(directory: Path, segment: SegmentName) -> bool:
    """Whether the segment's owner is dead for certain.

    The owner's process decides where its id means anything here: a forked child of a dead owner may still hold the lock. Elsewhere
    the lock decides. A segment of another user, or one that vanishes meanwhile, does not count as abandoned.
    """
    if segment.owner.judgeable:
        return not segment.owner.alive()
    try:
        descriptor = os.open(directory / str(segment), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_abandoned(directory: Path, label: str | None = None) -> tuple[str, ...]:
    """Unlink the segments of dead owners (of one label, or of all); return their names."""
    removed = []
    for segment in segments(directory):
        if (label is None or segment.label == label) and abandoned(directory, segment):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(directory / str(segment))
                removed.append(str(segment))
                log.info("segment_reaped", name=str(segment), directory=str(directory), process=segment.owner.process)
    return tuple(removed)


def sweep(directory: Path, label: str, seconds: float) -> tuple[str, ...]:
    """Unlink a label's segments of dead owners; return the names that are left.

    A dying process closes its connections before it counts as dead, so this looks again for up to ``seconds`` while there are any.
    """
    deadline = time.monotonic() + seconds
    while True:
        remove_abandoned(directory, label)
        left = tuple(str(s) for s in segments(directory) if s.label == label)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)
