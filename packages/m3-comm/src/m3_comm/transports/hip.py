"""HIP IPC: device memory of AMD GPUs, one process a rank.

The kind of memory decides how stores reach a peer. Uncached memory is meant for XGMI; on PCIe, writes to several peers at once collapse
with it, and fine-grained memory is the choice (MiniMax-M3 facts: published peer-write bandwidths). ``MemoryKind.AUTO`` reads the links
and chooses. Sizes are whole 4 KiB pages because uncached memory exports only so.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from pathlib import Path

import structlog
import torch

from m3_comm.probe import WordAccess
from m3_comm.transports.base import Allocation, Handle, Mapping, round_up
from m3_comm.transports.hip_runtime import (
    HOST_REGISTER_MAPPED,
    HOST_REGISTER_PORTABLE,
    IPC_HANDLE_BYTES,
    IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
    MEMCPY_DEVICE_TO_HOST,
    MEMCPY_HOST_TO_DEVICE,
    POINTER_ATTRIBUTE_IS_MANAGED,
    HipRuntime,
    IpcHandle,
    MallocFlag,
    Pointer,
)
from m3_comm.transports.hip_topology import TOPOLOGY, GpuLink, gpu_link
from m3_comm.views import device_bytes
from m3_core.errors import ResourceError

log = structlog.get_logger(__name__)


class MemoryKind(Enum):
    """How device memory is cached with respect to peers."""

    AUTO = "auto"
    UNCACHED = "uncached"
    FINE_GRAINED = "fine-grained"
    COARSE_GRAINED = "coarse-grained"


_FLAGS = {
    MemoryKind.UNCACHED: MallocFlag.UNCACHED,
    MemoryKind.FINE_GRAINED: MallocFlag.FINE_GRAINED,
    MemoryKind.COARSE_GRAINED: MallocFlag.DEFAULT,
}


def choose_kind(link: GpuLink) -> MemoryKind:
    """The kind for a link: uncached on XGMI and where the link cannot be read, fine-grained on PCIe."""
    return MemoryKind.FINE_GRAINED if link is GpuLink.PCIE else MemoryKind.UNCACHED


class HipTransport:
    """Peer memory of one AMD GPU."""

    name = "hip"
    frees_after_peers = True

    def __init__(
        self, device: int, kind: MemoryKind = MemoryKind.AUTO, *, words: WordAccess | None = None, topology: Path = TOPOLOGY
    ) -> None:
        """Use the HIP runtime that this process has loaded.

        Args:
            device: ordinal as HIP numbers devices in this process.
            kind: of the memory; must come out the same on every rank.
            words: how to store and load a probe word from a kernel of this device; through copies of 8 bytes if None.
            topology: the kernel driver's topology, for ``MemoryKind.AUTO``.

        Raises:
            ResourceError: no HIP runtime is loaded in this process, two are, or it has no such device.
        """
        self._ordinal = device
        self._runtime = HipRuntime(device)
        self._words = words
        self._owned: dict[int, Allocation] = {}
        self._mapped: set[int] = set()
        self._kind = kind
        if kind is MemoryKind.AUTO:
            link = gpu_link(topology)
            self._kind = choose_kind(link)
            log.info("memory_kind_chosen", kind=self._kind.value, link=link.value)

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory; never AUTO."""
        return self._kind

    @property
    def device(self) -> torch.device:
        """The device; ROCm builds of torch call it ``cuda``."""
        return torch.device("cuda", self._ordinal)

    @property
    def traits(self) -> dict[str, str]:
        """The kind of memory."""
        return {"memory kind": self._kind.value}

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        """Get at least ``nbytes`` zeroed bytes of device memory of its own.

        Raises:
            ResourceError: the runtime refuses.
            ConfigurationError: ``nbytes`` is below 1.
        """
        size = round_up(nbytes)
        pointer = Pointer()
        what = f"allocating {size} bytes of {self._kind.value} memory on HIP device {self._ordinal}"
        self._runtime.call("hipExtMallocWithFlags", ctypes.byref(pointer), size, _FLAGS[self._kind].value, what=what)
        if not pointer.value:
            raise ResourceError(f"{what} failed: hipExtMallocWithFlags returned no address")
        allocation = Allocation(pointer.value, size)
        try:
            self._runtime.call("hipMemset", allocation.address, 0, size, what=f"zeroing {size} bytes")
            self._runtime.call("hipDeviceSynchronize", what=f"zeroing {size} bytes")
        except BaseException:
            self._runtime.release("hipFree", allocation.address, what=f"freeing {size} bytes")
            raise
        self._owned[allocation.address] = allocation
        return allocation

    def export(self, allocation: Allocation) -> bytes:
        """The allocation's IPC handle.

        Raises:
            ResourceError: the memory is not this transport's own; the message says what it is instead. No handle call is made.
        """
        if self._owned.get(allocation.address) is not allocation:
            raise ResourceError(
                f"memory at {allocation.address:#x} cannot be shared: it is {self._describe(allocation)}; let the transport allocate it"
            )
        handle = IpcHandle()
        self._runtime.call("hipIpcGetMemHandle", ctypes.byref(handle), allocation.address, what="exporting device memory")
        return Handle(self.name, handle.data, 0, allocation.nbytes).encode()

    def open(self, handle: bytes) -> Mapping:
        """Map a peer's memory, with peer access enabled when it is first used.

        Raises:
            ResourceError: the runtime refuses.
            ConfigurationError: the handle is of another transport, or damaged.
        """
        decoded = Handle.decode(handle, self.name)
        if len(decoded.base) != IPC_HANDLE_BYTES:
            raise ResourceError(f"HIP IPC handle of {len(decoded.base)} bytes: it must have {IPC_HANDLE_BYTES}")
        pointer = Pointer()
        what = "mapping a peer's device memory (are both devices visible to both processes?)"
        base = IpcHandle.from_buffer_copy(decoded.base)
        self._runtime.call("hipIpcOpenMemHandle", ctypes.byref(pointer), base, IPC_MEM_LAZY_ENABLE_PEER_ACCESS, what=what)
        if not pointer.value:
            raise ResourceError(f"{what} failed: hipIpcOpenMemHandle returned no address")
        self._mapped.add(pointer.value)
        return Mapping(pointer.value + decoded.offset, decoded.length, pointer.value)

    def unlink(self, allocation: Allocation) -> None:
        """Nothing: a handle dies with the memory."""

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's memory; does nothing the second time."""
        if mapping.base in self._mapped:
            self._mapped.discard(mapping.base)
            self._runtime.release("hipIpcCloseMemHandle", mapping.base, what="unmapping a peer's device memory")

    def free(self, allocation: Allocation) -> None:
        """Free own memory; does nothing the second time."""
        if self._owned.get(allocation.address) is allocation:
            del self._owned[allocation.address]
            self._runtime.release("hipFree", allocation.address, what=f"freeing {allocation.nbytes} bytes")

    def sweep(self, label: str) -> None:
        """Nothing: the driver frees a process's memory with the process."""

    def write_word(self, address: int, value: int) -> None:
        """Store one aligned 64-bit word."""
        if self._words is not None:
            self._words.write_word(address, value)
            return
        word = ctypes.c_uint64(value)
        self._runtime.call("hipMemcpy", address, ctypes.addressof(word), 8, MEMCPY_HOST_TO_DEVICE, what="writing a probe word")
        self._runtime.call("hipDeviceSynchronize", what="writing a probe word")

    def read_word(self, address: int) -> int:
        """Load one aligned 64-bit word."""
        if self._words is not None:
            return self._words.read_word(address)
        word = ctypes.c_uint64()
        self._runtime.call("hipMemcpy", ctypes.addressof(word), address, 8, MEMCPY_DEVICE_TO_HOST, what="reading a probe word")
        return word.value

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes as a uint8 tensor [nbytes] on the device that does not own them."""
        return device_bytes(address, nbytes, self.device)

    def map_host(self, address: int, nbytes: int) -> int:
        """Pin whole pages of host memory and return their address on the device.

        Raises:
            ResourceError: the runtime refuses.
        """
        size = round_up(nbytes)
        self._runtime.call(
            "hipHostRegister", address, size, HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED, what=f"pinning {size} host bytes"
        )
        pointer = Pointer()
        try:
            self._runtime.call("hipHostGetDevicePointer", ctypes.byref(pointer), address, 0, what=f"mapping {size} host bytes")
        except BaseException:
            self.unmap_host(address)
            raise
        return pointer.value or 0

    def unmap_host(self, address: int) -> None:
        """Undo ``map_host`` for the same host address."""
        self._runtime.release("hipHostUnregister", address, what="unpinning host bytes")

    @property
    def ticks_per_second(self) -> int:
        """Rate of the constant clock of gfx942 and gfx950, which the launches read."""
        return 100_000_000

    def read_clock(self) -> None:
        """The runtime reads it only from a kernel, and this package has none for AMD."""
        return

    def _describe(self, allocation: Allocation) -> str:
        """What memory that is not this transport's own is, in words."""
        address, status = allocation.address, self._runtime.status
        if address in self._owned:
            return "a copy of the allocation that allocate() returned"
        managed = ctypes.c_uint64()
        if status("hipPointerGetAttribute", ctypes.byref(managed), POINTER_ATTRIBUTE_IS_MANAGED, address) == 0 and managed.value:
            return "managed memory, which has no IPC handle"
        retained = Pointer()
        if status("hipMemRetainAllocationHandle", ctypes.byref(retained), address) == 0:
            status("hipMemRelease", retained)
            return "a virtual-memory mapping (torch's expandable segments are such), which has no IPC handle"
        if address in self._mapped:
            return "a mapping of a peer's memory"
        base, size = Pointer(), ctypes.c_size_t()
        if status("hipMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address) != 0:
            return "unknown to the HIP runtime (freed, host memory, or of another process)"
        if (base.value, size.value) != (address, allocation.nbytes):
            return f"a part of an allocation of {size.value} bytes at offset {address - (base.value or 0)}, such as torch's caching allocator makes"
        return "an allocation of somebody else"
