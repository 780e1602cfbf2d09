"""A rank does not outlive the process that started it."""

from __future__ import annotations

import ctypes
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
