"""POSIX shared memory: the transport of the CPU target.

Segments are files of the ``/dev/shm`` file system. ``memfd_create`` with ``/proc/PID/fd`` was the alternative: it needs no names, but
the right to trace the peer, and its memory escapes the limit that operators set with ``--shm-size``. Names cost little here: a segment
is made without one (``O_TMPFILE``), so that a process that dies early leaves nothing; it gets its name, already filled and locked, when
it is exported, and loses it as soon as every rank has mapped it. From then on the kernel frees it with its last mapping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
from pathlib import Path

import attrs
import structlog
import torch

from m3_comm.processes import ProcessIdentity
from m3_comm.reaper import reap
from m3_comm.transports.base import Allocation, Handle, Mapping, round_up
from m3_comm.transports.segments import DEFAULT_DIRECTORY, SegmentName, sweep
from m3_core.errors import ResourceError

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 1.0
"""How long ``sweep`` waits for dying owners: well within the 2 s in which survivors end."""

_PROT_READ_WRITE = 0x3
_MAP_SHARED = 0x01
_MAP_POPULATE = 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@attrs.define(eq=False)
class _Segment:
    """What the owner keeps of an allocation.

    Attributes:
        descriptor: open file; holds the lock while there is a name; -1 once closed.
        name: file name in the directory, or None while (or once) there is none.
        label: goes into the name.
    """

    descriptor: int
    name: str | None
    label: str
    inode: int


class ShmTransport:
    """Shared memory of one node's processes."""

    name = "shm"
    device = torch.device("cpu")
    frees_after_peers = False

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        """Own nothing yet; remove what processes that are dead left in the directory.

        Args:
            directory: a mounted tmpfs that all ranks see; other than ``/dev/shm`` for tests only.
        """
        self._directory = Path(directory)
        reap(self._directory)
        self._owned: dict[Allocation, _Segment] = {}
        self._mapped: set[int] = set()
        self._counter = itertools.count()

    @property
    def traits(self) -> dict[str, str]:
        """None: ranks that do not share the directory are found when they open each other's segments."""
        return {}

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        """Get at least ``nbytes`` zeroed bytes, all of them present now: nothing can run out later.

        Raises:
            ResourceError: no room (with the needed and the available bytes), or the directory is no tmpfs.
            ConfigurationError: ``nbytes`` is below 1.
        """
        size = round_up(nbytes)
        descriptor = self._open_unnamed()
        try:
            inode = os.fstat(descriptor).st_ino
            self._reserve(descriptor, size)
            address = self._map(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        allocation = Allocation(address, size)
        self._owned[allocation] = _Segment(descriptor, None, label, inode)
        return allocation

    def export(self, allocation: Allocation) -> bytes:
        """Give the segment its name and return its handle; a second call returns the same handle."""
        segment = self._owned[allocation]
        if segment.name is None:
            fcntl.flock(segment.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = str(SegmentName(ProcessIdentity.current(), segment.label, next(self._counter)))
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Naming the directory makes this linkat(2), which follows the link in /proc; link(2) would not.
                os.link(f"/proc/self/fd/{segment.descriptor}", name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
            except OSError as error:
                raise ResourceError(f"segment {name} cannot be named in {self._directory}: {error.strerror}") from error
            finally:
                os.close(directory)
            segment.name = name
        return Handle(self.name, f"{segment.inode}:{segment.name}".encode(), 0, allocation.nbytes).encode()

    def open(self, handle: bytes) -> Mapping:
        """Map a peer's segment.

        Raises:
            ResourceError: the segment is not in this process's directory, or another one stands under its name.
            ConfigurationError: the handle is of another transport, or damaged.
        """
        decoded = Handle.decode(handle, self.name)
        inode, _, name = decoded.base.decode().partition(":")
        if SegmentName.parse(name) is None:
            raise ResourceError(f"segment name {name!r} is none that m3 gives")
        path = self._directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ResourceError(
                f"segment {path} cannot be opened: {error.strerror}; the ranks must share one {self._directory} "
                f"(containers: run all ranks in one, or start them with --ipc=host) and run as one user"
            ) from error
        try:
            found = os.fstat(descriptor)
            if str(found.st_ino) != inode or found.st_size != decoded.offset + decoded.length:
                raise ResourceError(
                    f"segment {path} is not the one its owner exported: inode {found.st_ino}, {found.st_size} bytes; "
                    f"expected inode {inode}, {decoded.offset + decoded.length} bytes; the ranks must share one {self._directory}"
                )
            base = self._map(descriptor, found.st_size)
        finally:
            os.close(descriptor)
        self._mapped.add(base)
        return Mapping(base + decoded.offset, decoded.length, base)

    def unlink(self, allocation: Allocation) -> None:
        """Take the segment's name away, and with it the lock; does nothing if it has none."""
        segment = self._owned.get(allocation)
        if segment is None or segment.descriptor < 0:
            return
        if segment.name is not None:
            try:
                (self._directory / segment.name).unlink(missing_ok=True)
            except OSError as error:
                raise ResourceError(f"segment {segment.name} cannot be unlinked: {error.strerror}") from error
            segment.name = None
        os.close(segment.descriptor)
        segment.descriptor = -1

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's segment; does nothing the second time."""
        if mapping.base in self._mapped:
            self._mapped.discard(mapping.base)
            self._unmap(mapping.base, mapping.nbytes + mapping.address - mapping.base)

    def free(self, allocation: Allocation) -> None:
        """Unlink and unmap an own segment; does nothing the second time."""
        if allocation in self._owned:
            try:
                self.unlink(allocation)
            finally:
                del self._owned[allocation]
                self._unmap(allocation.address, allocation.nbytes)

    def sweep(self, label: str) -> None:
        """Remove what ranks that died left under this label, within ``SWEEP_SECONDS``."""
        left = sweep(self._directory, label, SWEEP_SECONDS)
        if left:
            log.warning("segments_left", names=left, directory=str(self._directory))

    def write_word(self, address: int, value: int) -> None:
        """Store one aligned 64-bit word."""
        ctypes.c_uint64.from_address(address).value = value

    def read_word(self, address: int) -> int:
        """Load one aligned 64-bit word."""
        return ctypes.c_uint64.from_address(address).value

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes as a uint8 tensor [nbytes] that does not own them."""
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def _open_unnamed(self) -> int:
        try:
            return os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(
                f"no shared memory in {self._directory}: {error.strerror}; it must be a writable tmpfs (mount one there)"
            ) from error

    def _reserve(self, descriptor: int, size: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise ResourceError(f"shared memory of {size} bytes in {self._directory}: {error.strerror}") from error
            space = os.statvfs(self._directory)
            raise ResourceError(
                f"shared memory in {self._directory} is full: {size} bytes needed, {space.f_bavail * space.f_frsize} of "
                f"{space.f_blocks * space.f_frsize} available; start the container with a larger --shm-size, or with --ipc=host"
            ) from error

    def _map(self, descriptor: int, size: int) -> int:
        address = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED | _MAP_POPULATE, descriptor, 0)
        if address == _MAP_FAILED:
            raise ResourceError(f"shared memory of {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        # A forked child must not keep the memory alive after its parent, nor write to peers.
        if _libc.madvise(address, size, _MADV_DONTFORK) != 0:
            reason = os.strerror(ctypes.get_errno())
            self._unmap(int(address), size)
            raise ResourceError(f"shared memory of {size} bytes cannot be kept from forked children: {reason}")
        return int(address)

    def _unmap(self, address: int, size: int) -> None:
        if _libc.munmap(address, size) != 0:
            raise ResourceError(f"shared memory of {size} bytes at {address:#x} cannot be unmapped: {os.strerror(ctypes.get_errno())}")
