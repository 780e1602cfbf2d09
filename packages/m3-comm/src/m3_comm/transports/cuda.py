"""CUDA IPC: device memory of NVIDIA GPUs, one process a rank, on one or several GPUs.

Memory comes from plain driver allocations of this transport, which are the only ones that CUDA's IPC handles name as a whole. Several
processes may share one GPU; their launches then take turns.
"""

from __future__ import annotations

import ctypes

import structlog
import torch

from m3_comm.transports.base import Allocation, Handle, Mapping, round_up
from m3_comm.transports.cuda_driver import (
    HOST_REGISTER_DEVICE_MAP,
    HOST_REGISTER_PORTABLE,
    IPC_HANDLE_BYTES,
    IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
    MEMORY_TYPE_DEVICE,
    CudaDriver,
    DevicePointer,
    Function,
    IpcHandle,
    Module,
    PointerAttribute,
)
from m3_comm.views import device_bytes
from m3_core.errors import ResourceError

log = structlog.get_logger(__name__)

# One thread stores or loads a word with system scope, as the kernels' platform header does for peer memory, or reads the clock that the
# launches read.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry m3_store_word(.param .u64 address, .param .u64 value)
{
  .reg .u64 %a, %v;
  ld.param.u64 %a, [address];
  ld.param.u64 %v, [value];
  cvta.to.global.u64 %a, %a;
  st.relaxed.sys.global.u64 [%a], %v;
  ret;
}
.visible .entry m3_load_word(.param .u64 address, .param .u64 result)
{
  .reg .u64 %a, %r, %v;
  ld.param.u64 %a, [address];
  ld.param.u64 %r, [result];
  cvta.to.global.u64 %a, %a;
  cvta.to.global.u64 %r, %r;
  ld.relaxed.sys.global.u64 %v, [%a];
  st.global.u64 [%r], %v;
  ret;
}
.visible .entry m3_read_clock(.param .u64 unused, .param .u64 result)
{
  .reg .u64 %r, %v;
  ld.param.u64 %r, [result];
  cvta.to.global.u64 %r, %r;
  mov.u64 %v, %globaltimer;
  st.global.u64 [%r], %v;
  ret;
}
"""


class CudaTransport:
    """Peer memory of one CUDA device."""

    name = "cuda"
    frees_after_peers = True

    def __init__(self, device: int) -> None:
        """Take the device's primary context, the one that torch uses.

        Args:
            device: ordinal as CUDA numbers devices in this process.

        Raises:
            ResourceError: no driver is loaded in this process, or it has no such device.
        """
        self._ordinal = device
        self._driver = CudaDriver(device)
        self._owned: dict[int, Allocation] = {}
        self._mapped: set[int] = set()
        self._words: _WordKernels | None = None

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", self._ordinal)

    @property
    def traits(self) -> dict[str, str]:
        """None: there is one kind of memory."""
        return {}

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        """Get at least ``nbytes`` zeroed bytes of device memory of its own.

        Raises:
            ResourceError: the driver refuses.
            ConfigurationError: ``nbytes`` is below 1.
        """
        size = round_up(nbytes)
        pointer = DevicePointer()
        self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), size, what=f"allocating {size} bytes on CUDA device {self._ordinal}")
        allocation = Allocation(pointer.value, size)
        try:
            self._driver.call("cuMemsetD8_v2", pointer.value, 0, size, what=f"zeroing {size} bytes")
            self._driver.call("cuCtxSynchronize", what=f"zeroing {size} bytes")
        except BaseException:
            self._driver.release("cuMemFree_v2", pointer.value, what=f"freeing {size} bytes")
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
                f"memory at {allocation.address:#x} cannot be shared: it is {self._kind(allocation)}; let the transport allocate it"
            )
        handle = IpcHandle()
        self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), allocation.address, what="exporting device memory")
        return Handle(self.name, bytes(handle), 0, allocation.nbytes).encode()

    def open(self, handle: bytes) -> Mapping:
        """Map a peer's memory, with peer access enabled when it is first used.

        Raises:
            ResourceError: the driver refuses.
            ConfigurationError: the handle is of another transport, or damaged.
        """
        decoded = Handle.decode(handle, self.name)
        if len(decoded.base) != IPC_HANDLE_BYTES:
            raise ResourceError(f"CUDA IPC handle of {len(decoded.base)} bytes: it must have {IPC_HANDLE_BYTES}")
        pointer = DevicePointer()
        self._driver.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            IpcHandle.from_buffer_copy(decoded.base),
            IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            what="mapping a peer's device memory (are both devices visible to both processes?)",
        )
        self._mapped.add(pointer.value)
        return Mapping(pointer.value + decoded.offset, decoded.length, pointer.value)

    def unlink(self, allocation: Allocation) -> None:
        """Nothing: a handle dies with the memory."""

    def close(self, mapping: Mapping) -> None:
        """Unmap a peer's memory; does nothing the second time."""
        if mapping.base in self._mapped:
            self._mapped.discard(mapping.base)
            self._driver.release("cuIpcCloseMemHandle", mapping.base, what="unmapping a peer's device memory")

    def free(self, allocation: Allocation) -> None:
        """Free own memory; does nothing the second time."""
        if self._owned.get(allocation.address) is allocation:
            del self._owned[allocation.address]
            self._driver.release("cuMemFree_v2", allocation.address, what=f"freeing {allocation.nbytes} bytes")

    def sweep(self, label: str) -> None:
        """Nothing: the driver frees a process's memory with the process."""

    def write_word(self, address: int, value: int) -> None:
        """Store one aligned 64-bit word from a kernel, with system scope."""
        self._word_kernels().store(address, value)

    def read_word(self, address: int) -> int:
        """Load one aligned 64-bit word from a kernel, with system scope."""
        return self._word_kernels().load(address)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes as a uint8 tensor [nbytes] on the device that does not own them."""
        return device_bytes(address, nbytes, self.device)

    def map_host(self, address: int, nbytes: int) -> int:
        """Pin whole pages of host memory and return their address on the device.

        Raises:
            ResourceError: the driver refuses.
        """
        size = round_up(nbytes)
        self._driver.call(
            "cuMemHostRegister_v2", address, size, HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICE_MAP, what=f"pinning {size} host bytes"
        )
        pointer = DevicePointer()
        try:
            self._driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), address, 0, what=f"mapping {size} host bytes")
        except BaseException:
            self.unmap_host(address)
            raise
        return pointer.value

    def unmap_host(self, address: int) -> None:
        """Undo ``map_host`` for the same host address."""
        self._driver.release("cuMemHostUnregister", address, what="unpinning host bytes")

    @property
    def ticks_per_second(self) -> int:
        """The global timer counts nanoseconds."""
        return 1_000_000_000

    def read_clock(self) -> int:
        """The global timer, read by a kernel."""
        return self._word_kernels().clock()

    def _word_kernels(self) -> _WordKernels:
        if self._words is None:
            self._words = _WordKernels(self._driver)
        return self._words

    def _kind(self, allocation: Allocation) -> str:
        """What memory that is not this transport's own is, in words."""
        address, attribute = allocation.address, self._driver.attribute
        if address in self._owned:
            return "a copy of the allocation that allocate() returned"
        memory_type = attribute(address, PointerAttribute.MEMORY_TYPE)
        if memory_type is None:
            return "unknown to the CUDA driver (freed, or of another process)"
        if attribute(address, PointerAttribute.IS_MANAGED):
            return "managed memory, which has no IPC handle"
        if memory_type != MEMORY_TYPE_DEVICE:
            return "host memory"
        if address in self._mapped:
            return "a mapping of a peer's memory"
        if attribute(address, PointerAttribute.MEMORY_POOL):
            return "of a stream-ordered pool (cudaMallocAsync), which has no IPC handle"
        if not attribute(address, PointerAttribute.IS_LEGACY_IPC_CAPABLE):
            return "a virtual-memory mapping (torch's expandable segments are such), which has no IPC handle"
        base, size = attribute(address, PointerAttribute.RANGE_START) or 0, attribute(address, PointerAttribute.RANGE_SIZE) or 0
        if (base, size) != (address, allocation.nbytes):
            return f"a part of an allocation of {size} bytes at offset {address - base}, such as torch's caching allocator makes"
        return "an allocation of somebody else"


class _WordKernels:
    """The kernels of ``_PTX``, and a device word for the result."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        module = Module()
        driver.call("cuModuleLoadData", ctypes.byref(module), _PTX, what="loading the probe kernels")
        self._store, self._load, self._clock = Function(), Function(), Function()
        driver.call("cuModuleGetFunction", ctypes.byref(self._store), module, b"m3_store_word")
        driver.call("cuModuleGetFunction", ctypes.byref(self._load), module, b"m3_load_word")
        driver.call("cuModuleGetFunction", ctypes.byref(self._clock), module, b"m3_read_clock")
        # Lives as long as the context, like the module.
        self._result = DevicePointer()
        driver.call("cuMemAlloc_v2", ctypes.byref(self._result), 8, what="allocating 8 bytes")

    def store(self, address: int, value: int) -> None:
        self._launch(self._store, address, value)

    def load(self, address: int) -> int:
        return self._answer(self._load, address)

    def clock(self) -> int:
        return self._answer(self._clock, 0)

    def _answer(self, function: Function, argument: int) -> int:
        self._launch(function, argument, self._result.value)
        value = ctypes.c_uint64()
        self._driver.call("cuMemcpyDtoH_v2", ctypes.byref(value), self._result.value, 8, what="reading a probe word")
        return value.value

    def _launch(self, function: Function, first: int, second: int) -> None:
        words = (ctypes.c_uint64(first), ctypes.c_uint64(second))
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(word) for word in words))
        self._driver.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, pointers, None, what="launching a probe kernel")
        self._driver.call("cuCtxSynchronize", what="a probe kernel")
