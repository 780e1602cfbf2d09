"""The CPU target's host: resident blocks, and launches that run on the calling thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

import torch

from m3_core.errors import ConfigurationError, ResourceClosed, ResourceError
from m3_core.layout import ERROR_WORDS_BYTES as FAULT_BYTES
from m3_kernels.build.cpu import default_library
from m3_kernels.hosts.arguments import Arguments, require_layout

ENTRIES = ("m3_ffn_bf16", "m3_ffn_mxfp4", "m3_ffn_mxfp8", "m3_ffn_nvfp4")
MAX_GRID = 64
BLOCK_THREADS = 64
MAX_BLOCK_THREADS = 1024


def _declare(library: ctypes.CDLL) -> None:
    library.m3_arguments_layout.restype = ctypes.c_char_p
    library.m3_wave_width.restype = ctypes.c_int
    library.m3_ticks_per_second.restype = ctypes.c_longlong
    library.m3_shared_bytes.restype = ctypes.c_size_t
    library.m3_residents_create.restype = ctypes.c_void_p
    library.m3_residents_create.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
    library.m3_residents_destroy.restype = None
    library.m3_residents_destroy.argtypes = [ctypes.c_void_p]
    library.m3_read_fault.restype = None
    library.m3_read_fault.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.m3_abort.restype = None
    library.m3_abort.argtypes = [ctypes.POINTER(ctypes.c_longlong), ctypes.c_int, ctypes.c_int]
    for name in ENTRIES:
        entry = getattr(library, name)
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.POINTER(Arguments)]


class CpuHost:
    """``grid`` resident blocks of ``block_threads`` threads each: block 0 on the thread that launches, the others on OS threads of their own.

    Args:
        grid: blocks, 1 to 64.
        block_threads: threads a block, a multiple of the wave width (64), at most 1024.
        library: the compiled kernels; the process's default library if left out.

    Raises:
        ConfigurationError: if a number is out of range.
        ResourceError: if the threads or their stacks cannot be had.
        BuildError: if the library does not compile or load.
    """

    device = torch.device("cpu")
    plain_scales: Mapping[str, int] = {}
    capturing = False

    def __init__(self, grid: int, block_threads: int = BLOCK_THREADS, library: ctypes.CDLL | None = None) -> None:
        self._handle: int | None = None
        self._mirror = bytes(FAULT_BYTES)
        self._library = default_library() if library is None else library
        _declare(self._library)
        require_layout(self._library.m3_arguments_layout().decode())
        wave = self._library.m3_wave_width()
        if not 1 <= grid <= MAX_GRID:
            raise ConfigurationError(f"grid is {grid}; the CPU target takes 1 to {MAX_GRID} blocks, each an OS thread")
        if block_threads % wave or not wave <= block_threads <= MAX_BLOCK_THREADS:
            raise ConfigurationError(f"block_threads is {block_threads}; pass a multiple of {wave}, at most {MAX_BLOCK_THREADS}")
        self.grid = grid
        self.ticks_per_second: int = self._library.m3_ticks_per_second()
        self._process = os.getpid()
        self._handle = self._library.m3_residents_create(grid, block_threads, self._library.m3_shared_bytes())
        if not self._handle:
            raise ResourceError(
                f"cannot start {grid} blocks of {block_threads} threads: {os.strerror(ctypes.get_errno())}; pass a smaller grid"
            )

    def prepare(self, rows: int) -> None:
        """Nothing: one library serves every row count."""

    def launch(self, entry: str, arguments: Arguments) -> None:
        """Run one launch; returns when every block has ended. The interpreter's lock is released meanwhile.

        Raises:
            ResourceClosed: after ``close()``, or in a forked child, which has none of the threads.
        """
        if self._handle is None:
            raise ResourceClosed("this channel is closed; build a new one")
        if os.getpid() != self._process:
            raise ResourceClosed(f"this channel belongs to process {self._process}; build one in this process after the fork")
        getattr(self._library, entry)(self._handle, ctypes.byref(arguments))

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory of this rank."""
        ctypes.memset(address, 0, nbytes)

    def synchronize(self) -> None:
        """Nothing: a launch has ended when it returns."""

    def mirror_fault(self, address: int) -> None:
        """Keep the fault word as it stands."""
        self._mirror = self.read_fault(address)

    def mirrored_fault(self) -> bytes:
        """The word that ``mirror_fault`` kept."""
        return self._mirror

    def read_fault(self, address: int) -> bytes:
        """The 16 bytes of the fault word at ``address``, whole: a set word is never read without the rest."""
        words = (ctypes.c_char * FAULT_BYTES)()
        self._library.m3_read_fault(address, words)
        return bytes(words)

    def abort(self, addresses: Sequence[int], rank: int) -> None:
        """Mark ``rank`` failed in every buffer that has no fault yet."""
        self._library.m3_abort((ctypes.c_longlong * len(addresses))(*addresses), len(addresses), rank)

    def close(self) -> None:
        """End the threads; idempotent. Does nothing in a forked child."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._process:
            self._library.m3_residents_destroy(handle)
