"""Latency of the mailboxes, transport by transport, beside the nearest peer that runs there.

    python benchmarks/mailbox.py --world-size 2

    python benchmarks/mailbox.py --world-size 2 --transport cuda --devices 0,1

Prints one-way latency of a tagged pair, an all-to-all hand-off, and a small all-reduce of 8 B to 256 KB. Ranks are processes of this
machine. The transport ``shm`` stands beside gloo; with more ranks than cores the figures tell about the scheduler, and the first line says
so. The transport ``cuda`` stands beside NCCL where every rank has a GPU of its own. Mailbox operations run back to back within one
launch, as in the kernels; NCCL's are a launch each, timed on the device: one by one from the host, and as a graph, which takes the host
out of it.

Ranks that share a GPU take turns on it, each for a time slice of some milliseconds, and every hand-over costs at least one: they make few
operations, and their figures tell about the driver's scheduler.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.flight import FlightRecorder
from m3_comm.lifetime import die_with_parent
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.cuda import CudaTransport
from m3_comm.transports.shm import ShmTransport

SIZES = tuple(8 * 2**i for i in range(16))  # bytes: 8 to 262,144
ROUNDS = 5
COUNT = 2000
SHARED_COUNT = 10
"""Operations a round where ranks share a GPU: each takes a time slice a rank, some milliseconds."""
GRAPH_COUNT = 100
"""NCCL operations in a graph."""
Measurement = dict[str, list[float]]  # name -> nanoseconds an operation, one a round


BOUND = 5 * 10**9  # nanoseconds of a wait on the GPU


def report(rank: int, what: str) -> None:
    """Say what comes next, so that a run that hangs has named its place."""
    if rank == 0:
        print(f"  measuring {what}", file=sys.stderr, flush=True)


def build(folder: Path, transport: str) -> Path:
    """Compile mailbox.cpp or mailbox.cu into ``folder``."""
    library = folder / "mailbox.so"
    here = Path(__file__).parent
    include = here.parent / "packages" / "m3-kernels" / "include"
    if transport == "cuda":
        compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        command = [
            compiler,
            "-std=c++17",
            "-arch=native",
            "-O2",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            f"-I{include}",
            str(here / "mailbox.cu"),
        ]
    else:
        command = ["g++", "-std=c++20", "-O3", "-pthread", "-shared", "-fPIC", f"-I{include}", str(here / "mailbox.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    table, word, number, pointer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
    for name, arguments in {
        "mailbox_one_way": [table, number, word, number, ctypes.c_uint32],
        "mailbox_hand_off": [table, number, number, word, number, ctypes.c_uint32],
        "mailbox_all_reduce": [table, number, number, word, number, pointer, pointer, number, ctypes.c_uint32],
        "flight_records": [word, number, number],
    }.items():
        getattr(loaded, name).argtypes = arguments
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def checked(nanoseconds: float) -> float:
    if nanoseconds < 0:
        raise RuntimeError(f"a mailbox wait ran out or brought a wrong value ({nanoseconds})")
    return nanoseconds


def measure_shm(channel: TorchAgreement, library: Path, count: int) -> Measurement:
    rank, world = channel.rank, channel.world_size
    code = load(library)
    largest = SIZES[-1] // 4
    buffer = PeerBuffer.create(channel, ShmTransport(), 2 * 8 * world * largest)
    table = buffer.address_table
    tag = 1
    results: Measurement = {}

    def take(name: str, operations: int, call: Callable[[int], float]) -> None:
        nonlocal tag
        report(rank, f"shm {name}")
        for _ in range(ROUNDS):
            channel.agree("ready", None)
            results.setdefault(name, []).append(checked(call(tag)))
            tag += operations

    take("one way", count, lambda t: float(code.mailbox_one_way(table.data_ptr(), rank, 0, count, t)))
    take("hand-off", count, lambda t: float(code.mailbox_hand_off(table.data_ptr(), world, rank, 0, count, t)))
    for size in SIZES:
        elements = size // 4
        repeats = max(4, min(count, 2**22 // size))
        values = torch.full((elements,), float(rank + 1))
        out = torch.zeros(elements)
        take(
            f"all-reduce {size}",
            repeats,
            lambda t, n=elements, v=values, o=out, r=repeats: float(  # type: ignore[misc]
                code.mailbox_all_reduce(table.data_ptr(), world, rank, 0, n, v.data_ptr(), o.data_ptr(), r, t)
            ),
        )
        assert out.eq(world * (world + 1) / 2).all()
    recorder = FlightRecorder.create(channel)
    take("flight record", 1, lambda t: float(code.flight_records(recorder.address, recorder.launches, 100_000)))
    channel.agree("done", None)
    recorder.close()
    buffer.close()
    return results


def measure_gloo(channel: TorchAgreement, count: int) -> Measurement:
    rank, world = channel.rank, channel.world_size
    results: Measurement = {}

    def take(name: str, operations: int, divisor: int, step: Callable[[], object]) -> None:
        report(rank, f"gloo {name}")
        for _ in range(ROUNDS):
            channel.agree("ready", None)
            start = time.perf_counter_ns()
            for _ in range(operations):
                step()
            results.setdefault(name, []).append((time.perf_counter_ns() - start) / operations / divisor)

    word = torch.zeros(1, dtype=torch.int64)

    def ping() -> None:
        if rank == 0:
            dist.send(word, 1)
            dist.recv(word, 1)
        elif rank == 1:
            dist.recv(word, 0)
            dist.send(word, 0)

    take("one way", count, 2, ping)
    words = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    take("hand-off", count, 1, lambda: dist.all_gather(words, word))
    for size in SIZES:
        values = torch.zeros(size // 4)
        take(f"all-reduce {size}", max(4, min(count, 2**22 // size)), 1, lambda v=values: dist.all_reduce(v))  # type: ignore[misc]
    return results


def measure_cuda(channel: TorchAgreement, library: Path, count: int) -> Measurement:
    rank, world = channel.rank, channel.world_size
    code = ctypes.CDLL(str(library))
    address, number, tag_type, word = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
    code.mailbox_one_way.argtypes = [address, number, number, tag_type, word, address]
    code.mailbox_hand_off.argtypes = [address, number, number, number, tag_type, word, address]
    code.mailbox_all_reduce.argtypes = [address, number, number, number, address, address, number, tag_type, word, address]
    code.flight_records.argtypes = [address, number, number, address]
    recorder = FlightRecorder.create(channel, launches=64, host_records=8, device=CudaTransport(torch.cuda.current_device()))
    buffer = PeerBuffer.create(channel, CudaTransport(torch.cuda.current_device()), 2 * 8 * world * (SIZES[-1] // 4))
    peers = buffer.address_table.data_ptr()
    status = (ctypes.c_uint64 * 3)()
    out_status = ctypes.addressof(status)
    tag = 1
    results: Measurement = {}

    def take(name: str, operations: int, call: Callable[[int], int]) -> None:
        nonlocal tag
        report(rank, f"cuda {name}")
        for _ in range(ROUNDS):
            channel.agree("ready", None)
            outcome = call(tag)
            if outcome != 0:
                raise RuntimeError(f"{name}: {outcome} is a CUDA error, or 1000 and the rank that was waited for")
            results.setdefault(name, []).append(status[1] / operations)
            tag += operations

    # Ranks above 1 take no part in it, but count tags with the others.
    take("one way", 2 * count, lambda t: int(code.mailbox_one_way(peers, rank, count, t, BOUND, out_status)) if rank < 2 else 0)
    take("hand-off", count, lambda t: int(code.mailbox_hand_off(peers, world, rank, count, t, BOUND, out_status)))
    for size in SIZES:
        elements = size // 4
        repeats = max(4, min(count, 2**22 // size))
        values = torch.full((elements,), float(rank + 1), device="cuda")
        out = torch.zeros_like(values)
        torch.cuda.synchronize()
        arguments = (peers, world, rank, elements, values.data_ptr(), out.data_ptr(), repeats)
        take(f"all-reduce {size}", repeats, lambda t, a=arguments: int(code.mailbox_all_reduce(*a, t, BOUND, out_status)))  # type: ignore[misc]
        assert out.eq(world * (world + 1) / 2).all()
    take("flight record", 1000, lambda t: int(code.flight_records(recorder.address, 64, 1000, out_status)))
    channel.agree("done", None)
    buffer.close()
    recorder.close()
    return results


def measure_nccl(channel: TorchAgreement, count: int) -> dict[str, Measurement]:
    """NCCL's operations one by one, and as a graph of them."""
    rank, world = channel.rank, channel.world_size
    group = dist.new_group(backend="nccl")
    eager: Measurement = {}
    graphs: Measurement = {}
    word = torch.zeros(1, dtype=torch.int64, device="cuda")
    gathered = torch.zeros(world, dtype=torch.int64, device="cuda")

    def ping() -> None:
        if rank == 0:
            dist.send(word, 1, group=group)
            dist.recv(word, 1, group=group)
        elif rank == 1:
            dist.recv(word, 0, group=group)
            dist.send(word, 0, group=group)

    def time_rounds(name: str, operations: int, step: Callable[[], object], results: Measurement, repeats: int) -> None:
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            channel.agree("ready", None)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(repeats):
                step()
            end.record()
            end.synchronize()
            results.setdefault(name, []).append(start.elapsed_time(end) * 1e6 / repeats / operations)

    steps: list[tuple[str, int, Callable[[], object]]] = [
        ("hand-off", 1, lambda: dist.all_gather_into_tensor(gathered, word, group=group)),
        *(
            (f"all-reduce {values.nbytes}", 1, lambda v=values: dist.all_reduce(v, group=group))
            for values in (torch.zeros(size // 4, device="cuda") for size in SIZES)
        ),
        ("one way", 2, ping),
    ]
    for name, operations, step in steps:
        report(rank, f"nccl {name}")
        step()
        time_rounds(name, operations, step, eager, count)
    for name, operations, step in steps:
        report(rank, f"nccl {name} as a graph")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_COUNT):
                step()
        graph.replay()
        time_rounds(name, operations * GRAPH_COUNT, graph.replay, graphs, max(1, count // GRAPH_COUNT))
        # Before the communicator that it holds operations of.
        del graph
    dist.destroy_process_group(group)
    return {"nccl": eager, "nccl graph": graphs}


def measure(
    channel: TorchAgreement, transport: str, library: Path, count: int, devices: tuple[int, ...]
) -> Iterator[dict[str, Measurement]]:
    if transport == "shm":
        yield {"shm": measure_shm(channel, library, count)}
        yield {"gloo": measure_gloo(channel, max(10, count // 10))}
        return
    torch.cuda.set_device(devices[channel.rank])
    torch.cuda.init()  # type: ignore[no-untyped-call]
    yield {"cuda": measure_cuda(channel, library, count)}
    if len(set(devices)) == channel.world_size:
        yield measure_nccl(channel, count)


def rank_main(
    rank: int,
    world_size: int,
    folder: Path,
    library: Path,
    transport: str,
    count: int,
    devices: tuple[int, ...],
    parent: int,
    results: multiprocessing.SimpleQueue[object],
) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    channel = TorchAgreement(dist.group.WORLD)
    for measured in measure(channel, transport, library, count, devices):
        channel.agree("measured", None)
        if rank == 0:
            results.put(measured)
    dist.destroy_process_group()


def table(measured: dict[str, Measurement]) -> str:
    """Median of the rounds, in microseconds; in brackets the least and the most."""
    transports = list(measured)
    lines = [f"{'':<22}" + "".join(f"{name + ' us':>32}" for name in transports)]
    for name in measured[transports[0]]:
        cells = []
        for transport in transports:
            rounds = measured[transport].get(name)
            cells.append(
                "-" if rounds is None else f"{statistics.median(rounds) / 1e3:.3f} [{min(rounds) / 1e3:.3f}, {max(rounds) / 1e3:.3f}]"
            )
        lines.append(f"{name + (' B' if name.startswith('all-reduce') else ''):<22}" + "".join(f"{cell:>32}" for cell in cells))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--transport", default="shm", choices=("shm", "cuda"))
    parser.add_argument("--devices", help="cuda: a GPU for each rank, such as 0,1; the same one may be named again (default: 0 for all)")
    parser.add_argument("--count", type=int, help=f"operations a round (default {COUNT}, {SHARED_COUNT} where ranks share a GPU)")
    options = parser.parse_args()
    if options.devices is not None and options.transport != "cuda":
        parser.error("--devices belongs to --transport cuda")
    options.devices = tuple(int(text) for text in (options.devices or ",".join(["0"] * options.world_size)).split(","))
    if len(options.devices) != options.world_size:
        parser.error(f"--devices names {len(options.devices)} GPUs for {options.world_size} ranks")
    options.shared = options.transport == "cuda" and len(set(options.devices)) < options.world_size
    options.count = options.count or (SHARED_COUNT if options.shared else COUNT)
    return options


def main() -> int:
    options = parse()
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.world_size} ranks on {cores} cores"
        + (": they share cores, so this times the scheduler" if options.world_size > cores else "")
        + (f", GPUs {options.devices}" if options.transport == "cuda" else "")
        + (": they share a GPU, so this times its time slices" if options.shared else ""),
        flush=True,
    )
    measured: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build(folder, options.transport)
        results: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
        arguments = (options.world_size, folder, library, options.transport, options.count, options.devices, os.getpid(), results)
        processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(options.world_size)]
        for process in processes:
            process.start()
        # What was measured before a rank failed is shown too.
        for process in processes:
            process.join()
        while not results.empty():
            part = results.get()
            assert isinstance(part, dict)
            measured |= part
    if measured:
        print(table(measured))
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if failed:
        print(f"ranks {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
