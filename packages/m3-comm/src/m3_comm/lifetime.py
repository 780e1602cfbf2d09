"""A rank does not outlive the process that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from m3_core.errors import ResourceError

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.restype = ctypes.c_int
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however the parent ends.

    The signal is SIGKILL: a rank that waits inside a launch must end too, and its memory needs no help to go (the segments have no
    names by then). The kernel counts the *thread* that started this process as its parent: start ranks from a thread that lives as
    long as they do. ``exec`` of a set-user-id program and ``fork`` clear the request.

    Args:
        parent: process id of the parent, taken in the parent before it started this process.

    Raises:
        ResourceError: the kernel refused, or the parent has ended already.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ResourceError(f"this process cannot be tied to its parent {parent}: {os.strerror(ctypes.get_errno())}")
    # The parent may have ended before the request.
    if os.getppid() != parent:
        raise ResourceError(f"the parent {parent} of this rank has ended (its parent is now {os.getppid()}): the rank must end too")


def die_with_starter() -> bool:
    """``die_with_parent`` for a process that ``multiprocessing`` started, by fork or spawn.

    Returns:
        Whether this process is tied now. A process that was not started so, such as a user's own script, is left alone, and so is one
        whose parent for the kernel is a fork server.

    Raises:
        ResourceError: as ``die_with_parent``.
    """
    starter = multiprocessing.parent_process()
    if starter is None or starter.pid is None or (starter.pid != os.getppid() and starter.is_alive()):
        return False
    die_with_parent(starter.pid)
    return True
