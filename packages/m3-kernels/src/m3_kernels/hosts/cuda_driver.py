"""The functions of the CUDA driver interface that the host uses, with their types (CUDA driver API, ``cuda.h``)."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, ClassVar

from m3_core.errors import ResourceError

DevicePointer = ctypes.c_uint64
Handle = ctypes.c_void_p
STREAM_NON_BLOCKING = 1


class FunctionAttribute(IntEnum):
    """CUfunction_attribute."""

    SHARED_SIZE_BYTES = 1
    LOCAL_SIZE_BYTES = 3
    NUM_REGS = 4
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class DeviceAttribute(IntEnum):
    """CUdevice_attribute."""

    MULTIPROCESSOR_COUNT = 16
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class CudaDriver:
    """The driver that this process has loaded; every call is made in the calling thread's current context.

    Raises:
        ResourceError: if no driver can be loaded.
    """

    _SIGNATURES: ClassVar[dict[str, list[Any]]] = {
        "cuInit": [ctypes.c_uint],
        "cuCtxGetCurrent": [ctypes.POINTER(Handle)],
        "cuCtxSetCurrent": [Handle],
        "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
        "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
        "cuModuleLoadData": [ctypes.POINTER(Handle), ctypes.c_char_p],
        "cuModuleUnload": [Handle],
        "cuModuleGetFunction": [ctypes.POINTER(Handle), Handle, ctypes.c_char_p],
        "cuModuleGetGlobal_v2": [ctypes.POINTER(DevicePointer), ctypes.POINTER(ctypes.c_size_t), Handle, ctypes.c_char_p],
        "cuFuncSetAttribute": [Handle, ctypes.c_int, ctypes.c_int],
        "cuFuncGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, Handle],
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": [ctypes.POINTER(ctypes.c_int), Handle, ctypes.c_int, ctypes.c_size_t],
        "cuLaunchKernel": [Handle, *[ctypes.c_uint] * 7, Handle, ctypes.c_void_p, ctypes.c_void_p],
        "cuMemHostAlloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint],
        "cuMemFreeHost": [ctypes.c_void_p],
        "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, DevicePointer, ctypes.c_size_t, Handle],
        "cuMemcpyHtoDAsync_v2": [DevicePointer, ctypes.c_void_p, ctypes.c_size_t, Handle],
        "cuMemcpyDtoH_v2": [ctypes.c_void_p, DevicePointer, ctypes.c_size_t],
        "cuMemsetD8Async": [DevicePointer, ctypes.c_ubyte, ctypes.c_size_t, Handle],
        "cuStreamCreate": [ctypes.POINTER(Handle), ctypes.c_uint],
        "cuStreamSynchronize": [Handle],
        "cuStreamDestroy_v2": [Handle],
    }

    def __init__(self) -> None:
        try:
            # The soname of the library that torch has loaded: the same copy.
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ResourceError(f"the CUDA driver cannot be loaded: {error}; install the NVIDIA driver") from error
        for name, types in self._SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = types
            function.restype = ctypes.c_int
        # Launches go straight to the function: a microsecond counts there.
        self.launch_kernel = self._library.cuLaunchKernel
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object, what: str = "") -> None:
        """Call a function.

        Raises:
            ResourceError: with the driver's name of the error.
        """
        self.require(getattr(self._library, name)(*arguments), name, what)

    def require(self, status: int, name: str, what: str = "") -> None:
        """Raise ``ResourceError`` unless ``status`` is 0."""
        if status == 0:
            return
        text = ctypes.c_char_p()
        named = self._library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
        raise ResourceError(
            f"{what or name} failed: {name} returned {text.value.decode() if named and text.value else 'unknown error'} ({status})"
        )

    def device_attribute(self, device: int, attribute: DeviceAttribute) -> int:
        """An attribute of the device with this ordinal."""
        handle, value = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), device, what=f"CUDA device {device}")
        self.call("cuDeviceGetAttribute", ctypes.byref(value), int(attribute), handle.value)
        return value.value

    def function_attribute(self, function: Handle, attribute: FunctionAttribute) -> int:
        """An attribute of a loaded kernel."""
        value = ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(value), int(attribute), function)
        return value.value

    def read_global(self, module: Handle, name: str) -> bytes:
        """The bytes of a module's variable; waits for the device.

        Raises:
            ResourceError: if the module has no such variable.
        """
        pointer, size = DevicePointer(), ctypes.c_size_t()
        self.call(
            "cuModuleGetGlobal_v2",
            ctypes.byref(pointer),
            ctypes.byref(size),
            module,
            name.encode(),
            what=f"finding {name} in a code object",
        )
        found = (ctypes.c_char * size.value)()
        self.call("cuMemcpyDtoH_v2", found, pointer, size.value, what=f"reading {name}")
        return bytes(found)
