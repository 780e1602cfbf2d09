"""CUDA and HIP transports against doubles of the libraries' C interfaces: real processes, real calls through ctypes, memory of the host.

The doubles record every call and refuse what the libraries refuse; ``tests/gpu`` runs the CUDA transport on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_comm.agreement import TorchAgreement
from m3_comm.flight import FlightRecorder
from m3_comm.flight_report import read
from m3_comm.peer_buffer import PeerBuffer, Stage
from m3_comm.transports import cuda, cuda_driver, hip_runtime
from m3_comm.transports.base import Allocation, Handle
from m3_comm.transports.cuda import CudaTransport
from m3_comm.transports.hip import HipTransport, MemoryKind, choose_kind
from m3_comm.transports.hip_topology import GpuLink, gpu_link
from m3_comm.transports.libraries import loaded_library
from m3_core.errors import CollectiveError, ConfigurationError, ResourceError
from m3_core.flight import FlightEvent
from m3_core.ports import MemoryTransport

DOUBLES = Path(__file__).with_name("doubles")
NBYTES = 2 * 4096 + 8
ALLOCATED = 3 * 4096
KINDS = ("cuda", "hip")
TIMER_START = 1_700_000_000_000_000_000
"""Of the CUDA double's timer."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("doubles")
    built = {}
    for kind, name in (("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so.6")):
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, str(DOUBLES / f"{kind}_double.cpp"), "-o", str(folder / name)], check=True)
        built[kind] = folder / name
    return built


class CudaOnHost(CudaTransport):
    """The double's memory is the host's, so that torch's CPU build can look at it."""

    device = torch.device("cpu")  # type: ignore[assignment]

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class HipOnHost(HipTransport):
    device = torch.device("cpu")  # type: ignore[assignment]
    view = CudaOnHost.view  # type: ignore[assignment]


class Double:
    """A loaded double."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.double_record.restype = ctypes.c_char_p
        self.library.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]

    def calls(self) -> list[str]:
        """Calls since the last time, addresses replaced by their order of appearance."""
        lines: list[str] = self.library.double_record().decode().splitlines()
        self.library.double_forget()
        seen: dict[str, str] = {}
        return [re.sub(r"0x[0-9a-f]+", lambda m: seen.setdefault(m[0], f"#{len(seen)}"), line) for line in lines]

    def fail(self, name: str, status: int, calls: int = 1) -> None:
        self.library.double_fail(name.encode(), status, calls)

    @property
    def held(self) -> int:
        return int(self.library.double_held())


def _transport(kind: str, device: int = 1) -> Any:
    return CudaOnHost(device) if kind == "cuda" else HipOnHost(device, MemoryKind.UNCACHED)


def _alone(function: Callable[[Double, str], None]) -> Callable[[Any, dict[str, Path], str], None]:
    """A test that runs in a process of its own, because a library stays loaded."""

    def in_rank(channel: TorchAgreement, path: Path, kind: str) -> None:
        function(Double(path), kind)

    def test(ranks: Any, libraries: dict[str, Path], kind: str) -> None:
        (outcome,) = ranks(1, in_rank, libraries[kind], kind)
        assert outcome.error is None, outcome.trace

    test.__name__ = function.__name__
    return pytest.mark.parametrize("kind", KINDS)(test)


EXPECTED = {
    "cuda": {
        "make": ["cuInit flags=0", "cuDeviceGet ordinal=1", "cuDevicePrimaryCtxRetain device=101"],
        "allocate": [f"cuMemAlloc_v2 size={ALLOCATED}", f"cuMemsetD8_v2 pointer=#0 value=0 count={ALLOCATED}", "cuCtxSynchronize"],
        "export": ["cuIpcGetMemHandle pointer=#0"],
        "free": ["cuMemFree_v2 pointer=#0"],
        "write": ["cuLaunchKernel store grid=1,1,1 block=1,1,1 shared=0", "cuCtxSynchronize"],
        "read": ["cuLaunchKernel load grid=1,1,1 block=1,1,1 shared=0", "cuCtxSynchronize", "cuMemcpyDtoH_v2 size=8"],
        "map host": [f"cuMemHostRegister_v2 size={mmap.PAGESIZE} flags=3", "cuMemHostGetDevicePointer_v2 flags=0"],
        "unmap host": ["cuMemHostUnregister"],
    },
    "hip": {
        "make": ["hipDeviceSynchronize device=1"],
        "allocate": [
            f"hipExtMallocWithFlags device=1 size={ALLOCATED} flags=3",
            f"hipMemset device=1 pointer=#0 value=0 size={ALLOCATED}",
            "hipDeviceSynchronize device=1",
        ],
        "export": ["hipIpcGetMemHandle device=1 pointer=#0"],
        "free": ["hipFree device=1 pointer=#0"],
        "write": ["hipMemcpy device=1 size=8 kind=1", "hipDeviceSynchronize device=1"],
        "read": ["hipMemcpy device=1 size=8 kind=2"],
        "map host": [f"hipHostRegister device=1 size={mmap.PAGESIZE} flags=3", "hipHostGetDevicePointer device=1 flags=0"],
        "unmap host": ["hipHostUnregister device=1"],
    },
}


@_alone
def test_every_call_has_the_right_arguments(double: Double, kind: str) -> None:
    expected = EXPECTED[kind]
    transport = _transport(kind)
    assert isinstance(transport, MemoryTransport)
    assert double.calls() == expected["make"]
    allocation = transport.allocate(NBYTES)
    assert double.calls() == expected["allocate"]
    assert allocation.nbytes == ALLOCATED
    assert not any(ctypes.string_at(allocation.address, ALLOCATED))
    handle = Handle.decode(transport.export(allocation), kind)
    assert double.calls() == expected["export"]
    assert (len(handle.base), handle.base[63], handle.offset, handle.length) == (64, 0x5A, 0, ALLOCATED)
    transport.read_word(allocation.address)  # loads the probe kernels
    double.calls()
    transport.write_word(allocation.address + 16, 0x1122334455667788)
    assert double.calls() == expected["write"]
    assert transport.read_word(allocation.address + 16) == 0x1122334455667788
    assert double.calls() == expected["read"]
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    assert transport.map_host(address, 100) == address
    assert double.calls() == expected["map host"]
    transport.unmap_host(address)
    assert double.calls() == expected["unmap host"]
    held = double.held
    for _ in range(2):
        transport.free(allocation)
        transport.unlink(allocation)
        transport.sweep("label")
    assert double.calls() == expected["free"]
    # The CUDA transport keeps a word of its own for loads.
    assert (held, double.held) == ((2, 1) if kind == "cuda" else (1, 0))


def test_every_kind_of_hip_memory_has_its_flag(ranks: Any, libraries: dict[str, Path]) -> None:
    def in_rank(channel: TorchAgreement, path: Path) -> list[str]:
        double = Double(path)
        flags = []
        for kind in (MemoryKind.COARSE_GRAINED, MemoryKind.FINE_GRAINED, MemoryKind.UNCACHED):
            transport = HipOnHost(0, kind)
            assert transport.traits == {"memory kind": kind.value}
            double.calls()
            transport.free(transport.allocate(1))
            flags.append(double.calls()[0])
        # The device that was current before is current again.
        assert double.library.hipSetDevice(2) == 0
        HipOnHost(3, MemoryKind.UNCACHED).allocate(1)
        current = ctypes.c_int()
        assert double.library.hipGetDevice(ctypes.byref(current)) == 0
        assert current.value == 2
        return flags

    (outcome,) = ranks(1, in_rank, libraries["hip"])
    assert outcome.error is None, outcome.trace
    assert outcome.value == [f"hipExtMallocWithFlags device=0 size=4096 flags={flag}" for flag in (0, 1, 3)]


FOREIGN = {
    "cuda": {
        0x7000_0000_0000: "virtual-memory mapping (torch's expandable segments",
        0x7100_0000_0000: "managed memory",
        0x7200_0000_0000: "stream-ordered pool",
        0x7300_0000_0000: "host memory",
        0x1000: "unknown to the CUDA driver",
    },
    "hip": {
        0x7000_0000_0000: "virtual-memory mapping (torch's expandable segments",
        0x7100_0000_0000: "managed memory",
        0x1000: "unknown to the HIP runtime",
    },
}


@_alone
def test_foreign_pointers_are_refused_by_name_before_any_handle_call(double: Double, kind: str) -> None:
    transport, other = _transport(kind), _transport(kind)
    own, foreign = transport.allocate(2 * 4096), other.allocate(2 * 4096)
    double.calls()
    for allocation, name in [
        *((Allocation(address, 4096), name) for address, name in FOREIGN[kind].items()),
        (Allocation(own.address + 4096, 4096), "a part of an allocation of 8192 bytes at offset 4096"),
        (Allocation(own.address, 4096), "a copy of the allocation"),
        (Allocation(foreign.address, 4096), "a part of an allocation of 8192 bytes at offset 0"),
        (foreign, "an allocation of somebody else"),
    ]:
        with pytest.raises(ResourceError, match=f"memory at {allocation.address:#x} cannot be shared: it is .*{re.escape(name)}"):
            transport.export(allocation)
    assert not [call for call in double.calls() if "Ipc" in call]
    transport.free(own)
    other.free(foreign)


@_alone
def test_a_refusal_carries_the_librarys_name_of_the_error(double: Double, kind: str) -> None:
    transport = _transport(kind)
    names = {"cuda": ("cuMemAlloc_v2", "CUDA_ERROR_OUT_OF_MEMORY"), "hip": ("hipExtMallocWithFlags", "hipErrorOutOfMemory")}[kind]
    double.fail(names[0], 2)
    with pytest.raises(ResourceError, match=rf"allocating 4096 bytes .*: {names[0]} returned {names[1]} \(2\)"):
        transport.allocate(1)
    # Memory that cannot be zeroed is given back.
    double.fail({"cuda": "cuMemsetD8_v2", "hip": "hipMemset"}[kind], 1)
    with pytest.raises(ResourceError, match="zeroing 4096 bytes failed"):
        transport.allocate(1)
    assert double.held == 0
    with pytest.raises(ResourceError, match=f"{kind.upper()} device 9 failed: "):
        _transport(kind, device=9)
    for data, error in [
        (Handle(kind, b"short", 0, 4096).encode(), ResourceError),
        (Handle("shm", bytes(64), 0, 4096).encode(), ConfigurationError),
        (Handle(kind, bytes(64), 0, 4096).encode(), ResourceError),
    ]:
        with pytest.raises(error):
            transport.open(data)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    double.fail({"cuda": "cuMemHostGetDevicePointer_v2", "hip": "hipHostGetDevicePointer"}[kind], 1)
    with pytest.raises(ResourceError, match="mapping 4096 host bytes failed"):
        transport.map_host(address, 1)
    assert double.held == 0


@_alone
def test_a_library_that_is_shutting_down_has_nothing_to_release(double: Double, kind: str) -> None:
    transport = _transport(kind)
    allocation = transport.allocate(1)
    double.fail({"cuda": "shutdown", "hip": "hipGetDevice"}[kind], 4, 1000)
    transport.free(allocation)


def _share(channel: TorchAgreement, path: Path, kind: str, failing: str | None) -> None:
    double = Double(path)
    transport = _transport(kind, device=channel.rank % 2)
    rank, world_size = channel.rank, channel.world_size
    if failing is not None:
        if rank == 1:
            double.fail(failing, 1)
        with pytest.raises(CollectiveError, match=r"rank 1: .*INVALID_VALUE|rank 1: .*InvalidValue"):
            PeerBuffer.create(channel, transport, NBYTES)
        assert double.held == (1 if kind == "cuda" and transport._words else 0)
        double.calls()
    buffer = PeerBuffer.create(channel, transport, NBYTES)
    for peer, address in enumerate(buffer.addresses):
        ctypes.c_uint64.from_address(address + 8 * rank).value = 100 * rank + peer + 1
    channel.agree("written", None)
    assert buffer.bytes[: 8 * world_size].view(torch.int64).tolist() == [100 * source + rank + 1 for source in range(world_size)]
    channel.agree("read", None)
    double.calls()
    buffer.close()
    released = [call.split()[0] for call in double.calls()]
    close, free = {"cuda": ("cuIpcCloseMemHandle", "cuMemFree_v2"), "hip": ("hipIpcCloseMemHandle", "hipFree")}[kind]
    assert released == [close] * (world_size - 1) + [free]


FAILING = {
    "cuda": [None, "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuModuleLoadData", "cuLaunchKernel", "cuMemcpyDtoH_v2"],
    "hip": [None, "hipExtMallocWithFlags", "hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipMemcpy"],
}


@pytest.mark.parametrize(("kind", "failing"), [(kind, failing) for kind in KINDS for failing in FAILING[kind]])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_device_memory_and_fail_together(
    ranks: Any, libraries: dict[str, Path], kind: str, failing: str | None, world_size: int
) -> None:
    for outcome in ranks(world_size, _share, libraries[kind], kind, failing):
        assert outcome.error is None, outcome.trace


def _unequal_kinds(channel: TorchAgreement, path: Path) -> str:
    Double(path)
    kind = MemoryKind.FINE_GRAINED if channel.rank == 1 else MemoryKind.UNCACHED
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, HipOnHost(0, kind), NBYTES)
    assert caught.value.phase == Stage.CHECK.value
    return str(caught.value)


def test_unequal_kinds_of_memory_are_named(ranks: Any, libraries: dict[str, Path]) -> None:
    for outcome in ranks(3, _unequal_kinds, libraries["hip"]):
        assert outcome.error is None, outcome.trace
        assert 'rank 1: memory kind is "fine-grained", on rank(s) [0, 2] it is "uncached"' in outcome.value


def test_a_library_that_is_not_loaded_is_not_loaded() -> None:
    for stem, make in (("libcuda", lambda: CudaTransport(0)), ("libamdhip64", lambda: HipTransport(0, MemoryKind.UNCACHED))):
        if stem in Path("/proc/self/maps").read_text():
            continue
        with pytest.raises(ResourceError, match=rf"no {stem}\.so is loaded in this process"):
            make()


def test_two_copies_of_a_library_are_refused(ranks: Any, libraries: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "libamdhip64.so.7"
    copy.write_bytes(libraries["hip"].read_bytes())

    def in_rank(channel: TorchAgreement) -> None:
        ctypes.CDLL(str(libraries["hip"]))
        assert loaded_library("libamdhip64", "") == libraries["hip"]
        ctypes.CDLL(str(copy))
        with pytest.raises(ResourceError, match=r"2 copies of libamdhip64\.so are loaded"):
            loaded_library("libamdhip64", "")

    (outcome,) = ranks(1, in_rank)
    assert outcome.error is None, outcome.trace


def _topology(folder: Path, links: dict[tuple[int, int], tuple[str, int]], gpus: tuple[int, ...]) -> Path:
    for node in range(max(gpus) + 1):
        (folder / str(node) / "io_links").mkdir(parents=True)
        (folder / str(node) / "properties").write_text(
            f"cpu_cores_count {0 if node in gpus else 64}\nsimd_count {1024 if node in gpus else 0}\n"
        )
    for (start, end), (kind, number) in links.items():
        link = folder / str(start) / kind / str(end)
        link.mkdir(parents=True)
        (link / "properties").write_text(f"type {number}\nversion_major 0\nnode_from {start}\nnode_to {end}\nweight 15\n")
    return folder


@pytest.mark.parametrize(("links", "link", "kind"), [
    ({(1, 0): ("io_links", 2), (1, 2): ("io_links", 11)}, GpuLink.XGMI, MemoryKind.UNCACHED),
    ({(1, 0): ("io_links", 2), (1, 2): ("p2p_links", 2)}, GpuLink.PCIE, MemoryKind.FINE_GRAINED),
    # A link to the processor says nothing about the link between GPUs, even if it is XGMI (as on an MI300A).
    ({(1, 0): ("io_links", 11), (1, 2): ("p2p_links", 2)}, GpuLink.PCIE, MemoryKind.FINE_GRAINED),
    ({(1, 0): ("io_links", 2)}, GpuLink.UNKNOWN, MemoryKind.UNCACHED),
])  # fmt: skip
def test_the_kind_of_memory_follows_the_link(
    tmp_path: Path, links: dict[tuple[int, int], tuple[str, int]], link: GpuLink, kind: MemoryKind
) -> None:
    assert gpu_link(_topology(tmp_path, links, gpus=(1, 2))) is link
    assert choose_kind(link) is kind


def test_a_topology_that_cannot_be_read_is_taken_for_xgmi(tmp_path: Path) -> None:
    assert gpu_link(tmp_path / "absent") is GpuLink.UNKNOWN
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_text("simd_count many\n\x00\n")
    assert gpu_link(tmp_path) is GpuLink.UNKNOWN


def _check_source(signatures: dict[str, list[Any]], include: str) -> str:
    """C++ that compiles only if each function has as many parameters as ctypes passes, of the same sizes, pointers where pointers are."""
    lines = []
    for name, arguments in signatures.items():
        # Opaque handles and device addresses are pointers in one header and numbers in another; both are passed alike.
        facts = ", ".join(f"Parameter{{{ctypes.sizeof(argument)}, {int(hasattr(argument, '_fields_'))}}}" for argument in arguments)
        lines.append(f'static_assert(matches(&{name}, std::array<Parameter, {len(arguments)}>{{{facts}}}), "{name}");')
    return (
        f"#include <{include}>\n#include <array>\n#include <type_traits>\n"
        "struct Parameter { unsigned long size; bool structure; };\n"
        "template <class R, class... A> constexpr bool matches(R (*)(A...), std::array<Parameter, sizeof...(A)> expected) {\n"
        "  const std::array<Parameter, sizeof...(A)> actual{Parameter{sizeof(A), std::is_class<A>::value}...};\n"
        "  for (unsigned long i = 0; i < sizeof...(A); ++i)\n"
        "    if (actual[i].size != expected[i].size || actual[i].structure != expected[i].structure) return false;\n"
        "  return sizeof(R) == 4;\n}\n" + "\n".join(lines) + "\n"
    )


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas (part of CUDA)")
def test_the_probe_kernels_assemble(tmp_path: Path) -> None:
    (tmp_path / "words.ptx").write_bytes(cuda._PTX)
    for architecture in ("sm_80", "sm_90"):
        subprocess.run(["ptxas", f"-arch={architecture}", str(tmp_path / "words.ptx"), "-o", str(tmp_path / "words.cubin")], check=True)


def _flight(channel: TorchAgreement, path: Path, kind: str, folder: Path) -> None:
    double = Double(path)
    transport = _transport(kind)
    double.calls()
    # One rank's device cannot map: all raise, nothing is held.
    name = {"cuda": "cuMemHostGetDevicePointer_v2", "hip": "hipHostGetDevicePointer"}[kind]
    if channel.rank == 0:
        double.fail(name, 1)
    with pytest.raises(CollectiveError, match=r"flight-recorder/map failed .*rank 0: mapping 8192 host bytes failed"):
        FlightRecorder.create(channel, launches=4, host_records=8, device=transport)
    assert double.held == (1 if kind == "cuda" else 0)
    start = time.monotonic_ns()
    recorder = FlightRecorder.create(channel, launches=4, host_records=8, device=transport)
    taken = time.monotonic_ns() - start
    assert recorder.address != 0
    # The CUDA transport keeps a word of its own, for what kernels answer.
    words = 1 if kind == "cuda" else 0
    assert double.held == 1 + words
    recorder.record(FlightEvent.STEP_BEGIN)
    timeline = read(recorder.dump(folder / str(channel.rank)))
    assert len(timeline.records) == 1
    clock = timeline.headers[channel.rank].clock
    if kind == "cuda":
        # The double's timer is the host's clock and a constant; reading it took no longer than making the recorder.
        error = clock.ticks - clock.monotonic_nanoseconds - TIMER_START
        assert abs(error) <= taken
    else:
        assert (clock.ticks_per_second, clock.ticks) == (100_000_000, 0)
    channel.agree("dumped", None)
    recorder.close()
    recorder.close()
    assert double.held == words


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_maps_the_flight_recorders_ring(ranks: Any, libraries: dict[str, Path], tmp_path: Path, kind: str) -> None:
    for outcome in ranks(2, _flight, libraries[kind], kind, tmp_path):
        assert outcome.error is None, outcome.trace


HIP_HEADERS = [Path(folder) for folder in (os.environ.get("M3_HIP_INCLUDE", ""), "/opt/rocm/include", "/usr/include") if folder]
CUDA_HEADERS = [Path(folder) for folder in (os.environ.get("M3_CUDA_INCLUDE", ""), "/usr/local/cuda/include", "/usr/include") if folder]


def _compile(source: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "check.cpp").write_text(source)
    return subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *flags, str(folder / "check.cpp")], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("signatures", "double"), [(cuda_driver.SIGNATURES, "cuda_double.cpp"), (hip_runtime.SIGNATURES, "hip_double.cpp")]
)
def test_the_doubles_have_the_parameters_that_ctypes_passes(tmp_path: Path, signatures: dict[str, list[Any]], double: str) -> None:
    good = _compile(_check_source(signatures, double), tmp_path, f"-I{DOUBLES}")
    assert good.returncode == 0, good.stderr
    # The check itself: one parameter of the wrong size, one too many.
    for wrong in (lambda a: [*a[:-1], ctypes.c_char], lambda a: [*a, ctypes.c_int]):
        name = next(n for n, arguments in signatures.items() if len(arguments) == 3)
        bad = _compile(_check_source({**signatures, name: wrong(signatures[name])}, double), tmp_path, f"-I{DOUBLES}")
        assert bad.returncode != 0
        assert name in bad.stderr


@pytest.mark.skipif(
    not any((f / "hip/hip_runtime_api.h").exists() for f in HIP_HEADERS), reason="no HIP headers (package libamdhip64-dev, or ROCm)"
)
def test_the_prototypes_are_those_of_the_installed_hip_headers(tmp_path: Path) -> None:
    folder = next(f for f in HIP_HEADERS if (f / "hip/hip_runtime_api.h").exists())
    done = _compile(_check_source(hip_runtime.SIGNATURES, "hip/hip_runtime_api.h"), tmp_path, "-D__HIP_PLATFORM_AMD__", f"-I{folder}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not any((f / "cuda.h").exists() for f in CUDA_HEADERS), reason="no CUDA headers")
def test_the_prototypes_are_those_of_the_installed_cuda_header(tmp_path: Path) -> None:
    folder = next(f for f in CUDA_HEADERS if (f / "cuda.h").exists())
    done = _compile(_check_source(cuda_driver.SIGNATURES, "cuda.h"), tmp_path, f"-I{folder}")
    assert done.returncode == 0, done.stderr
