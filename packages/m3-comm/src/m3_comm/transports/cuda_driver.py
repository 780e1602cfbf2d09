"""The functions of the CUDA driver interface that the transport uses, with their types (CUDA driver API, ``cuda.h``)."""

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
HOST_REGISTER_DEVICE_MAP = 2
MEMORY_TYPE_HOST = 1
MEMORY_TYPE_DEVICE = 2
ERROR_DEINITIALIZED = 4

Device = ctypes.c_int
Context = ctypes.c_void_p
DevicePointer = ctypes.c_uint64
Module = ctypes.c_void_p
Function = ctypes.c_void_p
Stream = ctypes.c_void_p


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * IPC_HANDLE_BYTES),)


class PointerAttribute(IntEnum):
    """CUpointer_attribute."""

    MEMORY_TYPE = 2
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    IS_LEGACY_IPC_CAPABLE = 10
    RANGE_START = 11
    RANGE_SIZE = 12
    MEMORY_POOL = 17


SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(Device), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(Context), Device],
    "cuDevicePrimaryCtxRelease_v2": [Device],
    "cuCtxPushCurrent_v2": [Context],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(Context)],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [ctypes.POINTER(DevicePointer), ctypes.c_size_t],
    "cuMemFree_v2": [DevicePointer],
    "cuMemsetD8_v2": [DevicePointer, ctypes.c_ubyte, ctypes.c_size_t],
    "cuMemcpyDtoH_v2": [ctypes.c_void_p, DevicePointer, ctypes.c_size_t],
    "cuIpcGetMemHandle": [ctypes.POINTER(IpcHandle), DevicePointer],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(DevicePointer), IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [DevicePointer],
    "cuPointerGetAttribute": [ctypes.c_void_p, ctypes.c_int, DevicePointer],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(DevicePointer), ctypes.c_void_p, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuModuleLoadData": [ctypes.POINTER(Module), ctypes.c_void_p],
    "cuModuleUnload": [Module],
    "cuModuleGetFunction": [ctypes.POINTER(Function), Module, ctypes.c_char_p],
    "cuLaunchKernel": [Function, *[ctypes.c_uint] * 7, Stream, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)],
}


def _error_name(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return text.value.decode() if library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value else "unknown error"


class CudaDriver:
    """The driver with one device's primary context, which is the one that torch uses."""

    def __init__(self, device: int) -> None:
        """Retain the primary context.

        Args:
            device: ordinal as CUDA numbers them in this process.

        Raises:
            ResourceError: no driver is loaded, or there is no such device.
        """
        path = loaded_library("libcuda", "a CUDA build of torch loads it when it is first used: call torch.cuda.init() before")
        self._library = Library(path, SIGNATURES, _error_name)
        self._library.call("cuInit", 0)
        handle = Device()
        self._library.call("cuDeviceGet", ctypes.byref(handle), device, what=f"CUDA device {device}")
        self._device = handle.value
        context = Context()
        self._library.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device, what=f"the context of CUDA device {device}")
        self._context = context

    def call(self, name: str, *arguments: object, what: str = "") -> None:
        """Call a driver function in the context; raises ``ResourceError`` with the driver's name of the error."""
        with self._current():
            self._library.call(name, *arguments, what=what)

    def release(self, name: str, *arguments: object, what: str) -> None:
        """As ``call``, but a driver that is shutting down has released everything already."""
        if self._library.status("cuCtxPushCurrent_v2", self._context) == ERROR_DEINITIALIZED:
            return
        try:
            status = self._library.status(name, *arguments)
            if status != ERROR_DEINITIALIZED:
                self._library.require(status, name, what)
        finally:
            self._library.status("cuCtxPopCurrent_v2", ctypes.byref(Context()))

    def attribute(self, address: int, attribute: PointerAttribute) -> int | None:
        """A pointer's attribute as a number, or None if the driver does not know the pointer."""
        value = ctypes.c_uint64(0)
        with self._current():
            status = self._library.status("cuPointerGetAttribute", ctypes.byref(value), int(attribute), address)
        return value.value if status == 0 else None

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._library.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.status("cuCtxPopCurrent_v2", ctypes.byref(Context()))
