"""The NVIDIA target's host: code objects by row bound, launches on torch's current stream, the fault word from the side."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence

import attrs
import torch

from m3_core.errors import BuildError, ConfigurationError, ResourceClosed, ResourceError
from m3_core.faults import HOST_EPOCH
from m3_core.layout import ERROR_WORDS_BYTES as FAULT_BYTES
from m3_kernels.build.cuda import BLOCK_THREADS, CudaBuild, row_bound
from m3_kernels.hosts.arguments import Arguments, layout
from m3_kernels.hosts.base import ANY_SCALE
from m3_kernels.hosts.cuda_driver import STREAM_NON_BLOCKING, CudaDriver, DeviceAttribute, FunctionAttribute, Handle

# Beyond these E8M0 codes a scale is no bf16 once it has made up for the exponent that the codes' patterns lack (platform/nvidia.h).
PLAIN_SCALES: Mapping[str, int] = {"m3_ffn_mxfp4": 128, "m3_ffn_mxfp8": 134}
ENTRIES = ("m3_ffn_bf16", "m3_ffn_nvfp4", *PLAIN_SCALES, *(entry + ANY_SCALE for entry in PLAIN_SCALES))
COMPUTE_CAPABILITY = (9, 0)


@attrs.frozen
class Kernel:
    """A loaded entry.

    Attributes:
        function: the driver's handle.
        shared_bytes: dynamic shared memory of a block.
        registers: of a thread.
        spill_bytes: local memory of a thread.
        blocks_per_multiprocessor: how many blocks can be resident.
    """

    function: Handle
    shared_bytes: int
    registers: int
    spill_bytes: int
    blocks_per_multiprocessor: int


class CudaHost:
    """Launches of one shape on one CUDA device.

    Args:
        build: what to compile; its row bound is chosen launch by launch.
        device: the CUDA device; without an index, the current one.
        grid: blocks of a launch; None: one a multiprocessor.

    Raises:
        ResourceError: if there is no such device, or not one of compute capability 9.0.
        ConfigurationError: if ``grid`` is below 1.
    """

    def __init__(self, build: CudaBuild, device: torch.device, grid: int | None = None) -> None:
        self._driver: CudaDriver | None = None
        if not torch.cuda.is_available():
            raise ResourceError("torch finds no CUDA device; pass CPU tensors, or install a CUDA build of torch and a driver")
        index = torch.cuda.current_device()
        if device.index is not None:
            index = device.index
        self.device = torch.device("cuda", index)
        self.ticks_per_second = 1_000_000_000
        self.plain_scales = PLAIN_SCALES
        self._build = build
        driver = CudaDriver()
        capability = tuple(
            driver.device_attribute(index, attribute)
            for attribute in (DeviceAttribute.COMPUTE_CAPABILITY_MAJOR, DeviceAttribute.COMPUTE_CAPABILITY_MINOR)
        )
        if capability != COMPUTE_CAPABILITY:
            raise ResourceError(
                f"CUDA device {index} has compute capability {capability[0]}.{capability[1]}; the kernels are for 9.0 (H100, H200): "
                "use the stock layers on other devices"
            )
        self._multiprocessors = driver.device_attribute(index, DeviceAttribute.MULTIPROCESSOR_COUNT)
        self._shared_limit = driver.device_attribute(index, DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.grid = self._multiprocessors if grid is None else grid
        if self.grid < 1:
            raise ConfigurationError(f"grid is {grid}; a launch has at least one block")
        self._modules: list[Handle] = []
        self._kernels: dict[int, dict[str, Kernel]] = {}
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()
            self._context = Handle()
            driver.call("cuCtxGetCurrent", ctypes.byref(self._context), what=f"the context of {self.device}")
            self._entered = threading.local()
            # A side stream that waits for nothing: the fault word must be reachable while a launch spins.
            self._side = Handle()
            driver.call("cuStreamCreate", ctypes.byref(self._side), STREAM_NON_BLOCKING, what="creating a stream")
            # Pinned: one word for the mirror in stream order, one for reads from the side, one for what abort writes.
            self._pinned = ctypes.c_void_p()
            driver.call("cuMemHostAlloc", ctypes.byref(self._pinned), 3 * FAULT_BYTES, 0, what="allocating pinned host memory")
        assert self._pinned.value is not None
        ctypes.memset(self._pinned, 0, 3 * FAULT_BYTES)
        self._mirror, self._read, self._write = (self._pinned.value + i * FAULT_BYTES for i in range(3))
        self._parameters = (ctypes.c_void_p * 1)()
        self._parameters_address = ctypes.addressof(self._parameters)
        self._driver = driver

    @property
    def capturing(self) -> bool:
        """Whether torch's current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def kernel(self, rows: int, entry: str) -> Kernel:
        """The kernel of a prepared row count."""
        return self._kernels[row_bound(rows)][entry]

    def prepare(self, rows: int) -> None:
        """Load the code object that serves ``rows``.

        Raises:
            BuildError: if there is none, or it is not what its name says.
            ResourceError: if the blocks of a launch cannot all be resident.
        """
        bound = row_bound(rows)
        if bound in self._kernels:
            return
        driver = self._open_driver()
        if self.capturing:
            raise ConfigurationError(f"rows {rows} were not prepared before the capture; call prepare({rows}) outside it")
        build = attrs.evolve(self._build, rows=bound)
        code = build.code()
        module = Handle()
        with torch.cuda.device(self.device):
            driver.call("cuModuleLoadData", ctypes.byref(module), code, what=f"loading the code object {build.name(build.key())}")
            self._modules.append(module)
            self._require_own(driver, module, build)
            self._kernels[bound] = {entry: self._load(driver, module, entry, bound) for entry in ENTRIES}

    def _require_own(self, driver: CudaDriver, module: Handle, build: CudaBuild) -> None:
        found = driver.read_global(module, "m3_build_key").rstrip(b"\0").decode()
        if found != build.key():
            raise BuildError(f"a code object named {build.name(build.key())} carries key {found}; delete it and start again")
        numbers = struct.iter_unpack("<II", driver.read_global(module, "m3_arguments_layout"))
        theirs = "".join(f"{name}:{offset}:{size};" for (name, _), (offset, size) in zip(Arguments._fields_, numbers, strict=True))
        if theirs != layout():
            raise BuildError(
                f"a code object takes other arguments than this package passes: {theirs} against {layout()}; reinstall m3-kernels"
            )

    def _load(self, driver: CudaDriver, module: Handle, entry: str, bound: int) -> Kernel:
        function, blocks = Handle(), ctypes.c_int()
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode(), what=f"finding {entry}")
        (shared,) = struct.unpack("<I", driver.read_global(module, f"{entry}_shared_bytes"))
        if shared > self._shared_limit:
            raise ResourceError(
                f"{entry} for up to {bound} rows needs {shared} bytes of shared memory a block; {self.device} has {self._shared_limit}: lower max_rows"
            )
        driver.call(
            "cuFuncSetAttribute", function, int(FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES), shared, what=f"shared memory of {entry}"
        )
        driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, BLOCK_THREADS, shared)
        if blocks.value * self._multiprocessors < self.grid:
            raise ResourceError(
                f"a grid of {self.grid} blocks cannot be resident on {self.device}: {blocks.value} blocks of {entry} "
                f"({BLOCK_THREADS} threads, {shared} bytes of shared memory) on each of {self._multiprocessors} multiprocessors make "
                f"{blocks.value * self._multiprocessors}; pass a smaller grid"
            )
        registers, spill = (
            driver.function_attribute(function, attribute) for attribute in (FunctionAttribute.NUM_REGS, FunctionAttribute.LOCAL_SIZE_BYTES)
        )
        return Kernel(function, shared, registers, spill, blocks.value)

    def launch(self, entry: str, arguments: Arguments) -> None:
        """Start one launch on torch's current stream of this device.

        Raises:
            ResourceClosed: after ``close()``.
            ConfigurationError: if this device is not torch's current one.
            ResourceError: if the driver refuses.
        """
        driver = self._open_driver()
        if torch.cuda.current_device() != self.device.index:
            raise ConfigurationError(
                f"torch's current device is {torch.cuda.current_device()}, the launch is for {self.device}: use torch.cuda.device"
            )
        kernel = self._kernels[row_bound(arguments.sizes.rows)][entry]
        self._parameters[0] = ctypes.addressof(arguments)
        status = driver.launch_kernel(
            kernel.function,
            self.grid,
            1,
            1,
            BLOCK_THREADS,
            1,
            1,
            kernel.shared_bytes,
            torch.cuda.current_stream(self.device.index).cuda_stream,
            self._parameters_address,
            None,
        )
        if status:
            driver.require(status, "cuLaunchKernel", f"launching {entry}")

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory, in the order of torch's current stream."""
        self._open_driver().call("cuMemsetD8Async", address, 0, nbytes, self._stream(), what=f"clearing {nbytes} bytes")

    def synchronize(self) -> None:
        """Wait for the device."""
        self._open_driver()
        torch.cuda.synchronize(self.device)

    def mirror_fault(self, address: int) -> None:
        """Copy the fault word to pinned memory, in the order of torch's current stream; may be captured."""
        self._open_driver().call(
            "cuMemcpyDtoHAsync_v2", self._mirror, address, FAULT_BYTES, self._stream(), what="mirroring the fault word"
        )

    def mirrored_fault(self) -> bytes:
        """The last copy that has arrived."""
        return ctypes.string_at(self._mirror, FAULT_BYTES)

    def read_fault(self, address: int) -> bytes:
        """The fault word as it stands, launches running or not; while a graph is captured, the mirrored one."""
        if self.capturing:
            return self.mirrored_fault()
        found = self._read_from_the_side(address)
        # The rest of a word is written before the word is set: read again, a set word is whole.
        return found if found[:4] == bytes(4) else self._read_from_the_side(address)

    def abort(self, addresses: Sequence[int], rank: int) -> None:
        """Mark ``rank`` failed in every buffer that has no fault yet."""
        driver = self._open_driver()
        half = FAULT_BYTES // 2
        with torch.cuda.device(self.device):
            for address in addresses:
                if self._read_from_the_side(address)[:4] != bytes(4):
                    continue
                ctypes.memmove(self._write, struct.pack("<iiii", 1, rank, HOST_EPOCH, 0), FAULT_BYTES)
                for part in (1, 0):
                    driver.call(
                        "cuMemcpyHtoDAsync_v2",
                        address + part * half,
                        self._write + part * half,
                        half,
                        self._side,
                        what="marking a rank failed",
                    )
                    driver.call("cuStreamSynchronize", self._side, what="marking a rank failed")

    def close(self) -> None:
        """Unload the code objects; idempotent. Launches must have ended."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for module in self._modules:
                driver.call("cuModuleUnload", module)
            driver.call("cuStreamDestroy_v2", self._side)
            driver.call("cuMemFreeHost", self._pinned)
        self._kernels.clear()

    def _read_from_the_side(self, address: int) -> bytes:
        driver = self._open_driver()
        with torch.cuda.device(self.device):
            driver.call("cuMemcpyDtoHAsync_v2", self._read, address, FAULT_BYTES, self._side, what="reading the fault word")
            driver.call("cuStreamSynchronize", self._side, what="reading the fault word")
        return ctypes.string_at(self._read, FAULT_BYTES)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device.index).cuda_stream)

    def _enter_thread(self, driver: CudaDriver) -> None:
        """A thread that has used neither torch nor the driver has no context yet."""
        current = Handle()
        driver.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value is None:
            driver.call("cuCtxSetCurrent", self._context, what=f"entering the context of {self.device}")
        self._entered.context = self._context

    def _open_driver(self) -> CudaDriver:
        if self._driver is None:
            raise ResourceClosed("this channel is closed; build a new one")
        if not hasattr(self._entered, "context"):
            self._enter_thread(self._driver)
        return self._driver
