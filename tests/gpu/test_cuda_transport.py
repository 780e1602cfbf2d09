"""The CUDA transport on real GPUs: ``python3 -m pytest -m gpu tests/gpu -v --durations=0``.

Rank r has device r modulo their number. Processes that share a device without MPS take turns on it, each for a time slice of the driver's
(some milliseconds), so the waits here are generous and the counts small. No test of this folder may use a GPU in the test process
itself: ranks are forked from it, and a context does not survive a fork. Free memory is therefore asked of NVML, which makes none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_comm.agreement import TorchAgreement
from m3_comm.flight import FlightRecorder
from m3_comm.flight_report import read
from m3_comm.peer_buffer import PeerBuffer, Stage
from m3_comm.testing import Outcome, RankRunner
from m3_comm.transports.base import Allocation, Mapping
from m3_comm.transports.cuda import CudaTransport
from m3_core.errors import CollectiveError, ResourceClosed, ResourceError
from m3_core.flight import FlightEvent

# The runner's bound names the rank and what it does; the test's own is for everything else.
RUN_BOUND = 60.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

NBYTES = 5_243_136  # a TP4 peer buffer of the published shape
WORLDS = (2, 4)
BOUND = 5 * 10**9  # nanoseconds of a wait in a kernel
DEAD_BOUND = 2 * 10**9
ROOT = Path(__file__).parents[2]
Ranks = Callable[..., list[Outcome]]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = tmp_path_factory.mktemp("kernels") / "mailbox.so"
    include = ROOT / "packages" / "m3-kernels" / "include"
    command = [compiler, "-std=c++17", "-arch=native", "-O2", "-shared", "-Xcompiler", "-fPIC", f"-I{include}"]
    subprocess.run([*command, str(ROOT / "benchmarks" / "mailbox.cu"), "-o", str(library)], check=True, timeout=120)
    return library


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Memory:
    """The devices' memory as NVML counts it: without a context, in microseconds."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        assert self._nvml.nvmlInit_v2() == 0
        assert self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        self._devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            assert self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
            self._devices.append(device)

    def free_bytes(self) -> int:
        found = _NvmlMemory()
        total = 0
        for device in self._devices:
            assert self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(found)) == 0
            total += found.free
        return total


@pytest.fixture(scope="session")
def memory() -> Memory:
    return Memory()


@pytest.fixture
def ranks(tmp_path: Path, memory: Memory) -> Iterator[Ranks]:
    """Ranks as processes; afterwards the GPUs have as much free memory as before."""
    runner = RankRunner(tmp_path)
    before = memory.free_bytes()
    yield functools.partial(runner, bound=RUN_BOUND)
    assert runner.segments_left() == []
    deadline = time.monotonic() + 20
    # The driver gives a killed process's memory back a moment after the process is gone.
    while (after := memory.free_bytes()) < before - 2**24 and time.monotonic() < deadline:
        pass
    assert after >= before - 2**24, f"{before - after} bytes of device memory did not come back"


def _device(rank: int) -> int:
    """Select the rank's device for torch, and return its ordinal."""
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return device


def _transport(rank: int) -> CudaTransport:
    return CudaTransport(_device(rank))


class Kernels:
    """The functions of benchmarks/mailbox.cu."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.status = (ctypes.c_uint64 * 3)()
        address, number, tag, bound = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
        for name, arguments in {
            "mailbox_one_way": [address, number, number, tag, bound],
            "mailbox_hand_off": [address, number, number, number, tag, bound],
            "mailbox_all_reduce": [address, number, number, number, address, address, number, tag, bound],
            "flight_records": [address, number, number],
        }.items():
            getattr(self._library, name).argtypes = [*arguments, ctypes.c_void_p]

    def __call__(self, name: str, *arguments: int) -> int:
        """0, a CUDA error, or 1000 and the rank that was waited for."""
        return int(getattr(self._library, name)(*arguments, ctypes.addressof(self.status)))


def _checked(outcomes: list[Outcome], victim: int | None = None) -> list[Any]:
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.error is None, f"{outcome.error}\n{outcome.trace}"
            assert outcome.exit_code == 0
    return [outcome.value for outcome in outcomes]


def _share(channel: TorchAgreement) -> None:
    rank, world_size = channel.rank, channel.world_size
    transport = _transport(channel.rank)
    buffer = PeerBuffer.create(channel, transport, NBYTES)
    assert buffer.address_table.device == transport.device
    assert buffer.address_table.tolist() == list(buffer.addresses)
    assert int(buffer.bytes.count_nonzero()) == 0
    channel.agree("checked", None)
    # Distinct bytes from every rank to every rank, through torch's own kernels.
    part = NBYTES // world_size
    for peer, address in enumerate(buffer.addresses):
        transport.view(address + rank * part, part).fill_(16 * rank + peer + 1)
    torch.cuda.synchronize()
    channel.agree("written", None)
    for source in range(world_size):
        assert bool((buffer.bytes[source * part : (source + 1) * part] == 16 * source + rank + 1).all())
    channel.agree("read", None)
    view = buffer.bytes
    buffer.close()
    buffer.close()
    with pytest.raises(ResourceClosed):
        view.zero_()


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_process_reaches_every_buffer(ranks: Ranks, world_size: int) -> None:
    _checked(ranks(world_size, _share))


def _mailbox(channel: TorchAgreement, library: Path, count: int) -> dict[str, float]:
    rank, world_size = channel.rank, channel.world_size
    transport = _transport(channel.rank)
    buffer = PeerBuffer.create(channel, transport, NBYTES)
    kernels = Kernels(library)
    table = buffer.address_table.data_ptr()
    results = {}
    channel.agree("ready", None)
    if rank < 2:
        assert kernels("mailbox_one_way", table, rank, count, 1, BOUND) == 0
        assert kernels.status[2] == 2 * count - (rank == 1)
        results["one way"] = kernels.status[1] / (2 * count)
    channel.agree("ping-pong", None)
    buffer.bytes.zero_()
    torch.cuda.synchronize()
    channel.agree("zeroed", None)
    assert kernels("mailbox_hand_off", table, world_size, rank, count, 1, BOUND) == 0
    results["hand-off"] = kernels.status[1] / count
    channel.agree("hand-off", None)
    values = torch.full((256,), float(rank + 1), device="cuda")
    out = torch.zeros_like(values)
    torch.cuda.synchronize()
    arguments = (table, world_size, rank, 256, values.data_ptr(), out.data_ptr(), count, 10**6, BOUND)
    assert kernels("mailbox_all_reduce", *arguments) == 0
    assert out.tolist() == [world_size * (world_size + 1) / 2] * 256
    results["all-reduce 1024"] = kernels.status[1] / count
    results["devices"] = torch.cuda.device_count()
    channel.agree("done", None)
    buffer.close()
    return results


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_mailbox_passes_pairs_between_processes(ranks: Ranks, kernels: Path, world_size: int) -> None:
    values = _checked(ranks(world_size, _mailbox, kernels, 20))
    print(f"\n{world_size} processes, nanoseconds: {values[0]}")


class DiesAt(CudaTransport):
    """Is killed at an operation of the construction."""

    operation = ""

    def _do(self, operation: str) -> None:
        if operation == self.operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        allocation = super().allocate(nbytes, label)
        self._do("allocate")
        return allocation

    def export(self, allocation: Allocation) -> bytes:
        handle = super().export(allocation)
        self._do("export")
        return handle

    def open(self, handle: bytes) -> Mapping:
        mapping = super().open(handle)
        self._do("open")
        return mapping

    def read_word(self, address: int) -> int:
        self._do("read_word")
        return super().read_word(address)


STAGE_OF = {"allocate": Stage.ALLOCATE, "export": Stage.EXCHANGE, "open": Stage.OPEN, "read_word": Stage.PROBE_READ}


def _killed_in_construction(channel: TorchAgreement, operation: str, victim: int) -> tuple[float, str]:
    transport = DiesAt(_device(channel.rank))
    transport.operation = operation if channel.rank == victim else ""
    channel.agree("before", None)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, transport, NBYTES)
    assert (transport._owned, transport._mapped) == ({}, set())
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("operation", STAGE_OF)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_process_killed_in_construction_is_named(ranks: Ranks, operation: str, world_size: int) -> None:
    victim = world_size - 1
    values = _checked(ranks(world_size, _killed_in_construction, operation, victim), victim)
    for rank, value in enumerate(values):
        if rank != victim:
            assert value[0] < 15.0
            assert f"rank {victim}: " in value[1]
            assert STAGE_OF[operation].value in value[1]


def _killed_in_a_launch(channel: TorchAgreement, library: Path, victim: int, folder: Path) -> tuple[int, float]:
    rank, world_size = channel.rank, channel.world_size
    transport = _transport(channel.rank)
    buffer = PeerBuffer.create(channel, transport, NBYTES)
    recorder = FlightRecorder.create(channel, launches=8, host_records=8, device=transport)
    kernels = Kernels(library)
    recorder.record(FlightEvent.STEP_BEGIN, epoch=rank)
    table = buffer.address_table.data_ptr()
    channel.agree("ready", None)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    missing = kernels("mailbox_hand_off", table, world_size, rank, 1, 7, DEAD_BOUND)
    seconds = time.monotonic() - start
    files = recorder.dump(folder / str(rank))
    assert [path.name for path in files] == [f"m3-flight-rank{rank}.bin", f"m3-flight-rank{victim}-seen-by-rank{rank}.bin"]
    timeline = read(files)
    assert not timeline.headers[victim].alive
    with pytest.raises(CollectiveError, match=f"rank {victim}: "):
        channel.agree("after", None)
    # The survivors' device still works, the dead rank's memory included.
    buffer.bytes.fill_(3)
    transport.view(buffer.addresses[victim], 4096).fill_(4)
    torch.cuda.synchronize()
    recorder.close()
    buffer.close()
    return missing, seconds


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_launch_whose_peer_was_killed_ends_and_names_it(ranks: Ranks, kernels: Path, world_size: int, tmp_path: Path) -> None:
    victim = 1
    values = _checked(ranks(world_size, _killed_in_a_launch, kernels, victim, tmp_path), victim)
    for rank, value in enumerate(values):
        if rank != victim:
            assert value[0] == 1000 + victim
            assert DEAD_BOUND / 1e9 <= value[1] < DEAD_BOUND / 1e9 + 2.0


FOREIGN = """
import ctypes, sys
import torch
from m3_comm.transports.base import Allocation
from m3_comm.transports.cuda import CudaTransport
from m3_core.errors import ResourceError
kind = sys.argv[1]
keep = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda") if kind != "host" else torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
transport = CudaTransport(0)
try:
    transport.export(Allocation(tensor.data_ptr(), tensor.numel()))
except ResourceError as error:
    print(error)
"""


@pytest.mark.parametrize(("kind", "configuration", "named"), [
    ("caching", "", "a part of an allocation of"),
    ("expandable", "expandable_segments:True", "a virtual-memory mapping"),
    ("async", "backend:cudaMallocAsync", "of a stream-ordered pool"),
    ("host", "", "host memory"),
])  # fmt: skip
def test_foreign_pointers_are_refused_by_name(kind: str, configuration: str, named: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": configuration}
    done = subprocess.run([sys.executable, "-c", FOREIGN, kind], capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert f"cannot be shared: it is {named}" in done.stdout


def _too_much(channel: TorchAgreement) -> str:
    transport = _transport(channel.rank)
    nbytes = 2**46 if channel.rank == 1 else NBYTES
    with pytest.raises(ResourceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        transport.allocate(2**46)
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, transport, nbytes)
    assert transport._owned == {}
    return str(caught.value)


def test_unequal_sizes_are_named_before_anything_is_allocated(ranks: Ranks) -> None:
    for value in _checked(ranks(2, _too_much)):
        assert f"rank 1: nbytes is {2**46}" in value


def _recorded(channel: TorchAgreement, library: Path, folder: Path) -> float:
    transport = _transport(channel.rank)
    kernels = Kernels(library)
    start = time.monotonic_ns()
    recorder = FlightRecorder.create(channel, launches=64, host_records=8, device=transport)
    made = time.monotonic_ns()
    count = 128
    assert kernels("flight_records", recorder.address, 64, count) == 0
    end = time.monotonic_ns()
    (path,) = recorder.dump(folder)
    recorder.close()
    timeline = read([path])
    assert timeline.damaged == {0: 0}
    assert [(r.event, r.epoch, r.layer) for r in timeline.records] == [
        (event, epoch, 7) for epoch in range(64) for event in (FlightEvent.LAUNCH, FlightEvent.END)
    ]
    # The GPU's clock on the host's: reading it took less than making the recorder.
    error = made - start
    assert made - error <= timeline.records[0].nanoseconds
    assert timeline.records[-1].nanoseconds <= end + error
    return kernels.status[1] / count


def test_a_launch_writes_flight_records_into_host_memory(ranks: Ranks, kernels: Path, tmp_path: Path) -> None:
    (value,) = _checked(ranks(1, _recorded, kernels, tmp_path))
    print(f"\nflight record from the GPU: {value:.0f} ns each")
