"""Which process is meant, and whether it still lives.

A process id alone says little: ids are reused, and two containers that share ``/dev/shm`` count their own. The kernel's start time
(field 22 of ``/proc/PID/stat``, in clock ticks since boot), the boot and the id namespace make it one process of one boot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import attrs

_IDENTITY = re.compile(r"(?P<boot>[0-9a-f]{8})-(?P<namespace>[0-9]+)-(?P<process>[0-9]+)-(?P<start_ticks>[0-9]+)")
_DEAD_STATES = frozenset("ZXx")
_EXITING_FLAG = 0x4
"""Of the flags in field 9 of ``/proc/PID/stat``: set before a dying process closes its files, long before it is a zombie."""


@attrs.frozen
class ProcessIdentity:
    """One process of one boot.

    Attributes:
        boot: the first eight hexadecimal digits of the kernel's boot id.
        namespace: inode of the process id namespace in which ``process`` is counted.
        process: process id.
        start_ticks: start time in clock ticks since boot.
    """

    boot: str
    namespace: int
    process: int
    start_ticks: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        process = os.getpid()
        start = start_ticks(process)
        if start is None:
            raise RuntimeError(f"/proc/{process}/stat cannot be read: m3 needs a mounted /proc")
        return cls(_boot(), _namespace(), process, start)

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Read what ``str()`` wrote, or return None if it is something else."""
        match = _IDENTITY.fullmatch(text)
        if match is None:
            return None
        return cls(match["boot"], int(match["namespace"]), int(match["process"]), int(match["start_ticks"]))

    def __str__(self) -> str:
        """Text for names: parts joined by hyphens."""
        return f"{self.boot}-{self.namespace}-{self.process}-{self.start_ticks}"

    @property
    def judgeable(self) -> bool:
        """Whether this process counts ids in the same namespace of the same boot, so that ``alive`` means anything."""
        return self.boot == _boot() and self.namespace == _namespace()

    def alive(self) -> bool:
        """Whether it runs; a zombie does not, nor one that is ending, nor another process that got its id. Only for a ``judgeable`` identity."""
        return start_ticks(self.process) == self.start_ticks


def start_ticks(process: int) -> int | None:
    """Start time of a running process in clock ticks since boot, or None if there is none, only a zombie, or one that is ending."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in brackets and may itself hold spaces and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in _DEAD_STATES or int(fields[6]) & _EXITING_FLAG else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
