"""The functions of the HIP runtime that the transport uses, with their types (HIP runtime API, ``hip_runtime_api.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from m3_comm.transports.libraries import Library, loaded_library

IPC_HANDLE_BYTES = 64
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_MAPPED = 2
MEMCPY_HOST_TO_DEVICE = 1
MEMCPY_DEVICE_TO_HOST = 2
POINTER_ATTRIBUTE_IS_MANAGED = 8
ERROR_DEINITIALIZED = 4

Pointer = ctypes.c_void_p


class MallocFlag(IntEnum):
    """Flags of ``hipExtMallocWithFlags``."""

    DEFAULT = 0x0
    FINE_GRAINED = 0x1
    UNCACHED = 0x3


class IpcHandle(ctypes.Structure):
    """hipIpcMemHandle_t: passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)

    @property
    def data(self) -> bytes:
        """All bytes, zeros included."""
        return bytes(self)


SIGNATURES: dict[str, list[Any]] = {
    "hipGetDevice": [ctypes.POINTER(ctypes.c_int)],
    "hipSetDevice": [ctypes.c_int],
    "hipDeviceSynchronize": [],
    "hipExtMallocWithFlags": [ctypes.POINTER(Pointer), ctypes.c_size_t, ctypes.c_uint],
    "hipFree": [Pointer],
    "hipMemset": [Pointer, ctypes.c_int, ctypes.c_size_t],
    "hipMemcpy": [Pointer, Pointer, ctypes.c_size_t, ctypes.c_int],
    "hipIpcGetMemHandle": [ctypes.POINTER(IpcHandle), Pointer],
    "hipIpcOpenMemHandle": [ctypes.POINTER(Pointer), IpcHandle, ctypes.c_uint],
    "hipIpcCloseMemHandle": [Pointer],
    "hipMemGetAddressRange": [ctypes.POINTER(Pointer), ctypes.POINTER(ctypes.c_size_t), Pointer],
    "hipPointerGetAttribute": [Pointer, ctypes.c_int, Pointer],
    "hipMemRetainAllocationHandle": [ctypes.POINTER(Pointer), Pointer],
    "hipMemRelease": [Pointer],
    "hipHostRegister": [Pointer, ctypes.c_size_t, ctypes.c_uint],
    "hipHostGetDevicePointer": [ctypes.POINTER(Pointer), Pointer, ctypes.c_uint],
    "hipHostUnregister": [Pointer],
}


def _error_name(library: ctypes.CDLL, status: int) -> str:
    library.hipGetErrorName.argtypes = [ctypes.c_int]
    library.hipGetErrorName.restype = ctypes.c_char_p
    text = library.hipGetErrorName(status)
    return text.decode() if text else "unknown error"


class HipRuntime:
    """The runtime, with one device current during every call."""

    def __init__(self, device: int) -> None:
        """Bind the runtime that this process has loaded.

        Args:
            device: ordinal as HIP numbers them in this process.

        Raises:
            ResourceError: no HIP runtime is loaded, two are, or there is no such device.
        """
        path = loaded_library("libamdhip64", "a ROCm build of torch loads it: import that torch first")
        self._library = Library(path, SIGNATURES, _error_name)
        self._device = device
        self.call("hipDeviceSynchronize", what=f"HIP device {device}")

    def call(self, name: str, *arguments: object, what: str = "") -> None:
        """Call a function with the device current; raises ``ResourceError`` with HIP's name of the error."""
        self._library.require(self.status(name, *arguments), name, what)

    def status(self, name: str, *arguments: object) -> int:
        """Call a function with the device current and return what it returned."""
        with self._current():
            return self._library.status(name, *arguments)

    def release(self, name: str, *arguments: object, what: str) -> None:
        """As ``call``, but a runtime that is shutting down has released everything already."""
        previous = ctypes.c_int()
        if self._library.status("hipGetDevice", ctypes.byref(previous)) == ERROR_DEINITIALIZED:
            return
        status = self.status(name, *arguments)
        if status != ERROR_DEINITIALIZED:
            self._library.require(status, name, what)

    @contextmanager
    def _current(self) -> Iterator[None]:
        previous = ctypes.c_int()
        self._library.call("hipGetDevice", ctypes.byref(previous))
        if previous.value == self._device:
            yield
            return
        self._library.call("hipSetDevice", self._device, what=f"HIP device {self._device}")
        try:
            yield
        finally:
            self._library.status("hipSetDevice", previous.value)
