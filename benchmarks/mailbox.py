"""Latency of the mailboxes, transport by transport, beside the nearest peer that runs there.

    python benchmarks/mailbox.py --world-size 2

Prints one-way latency of a tagged pair, an all-to-all hand-off, and a small all-reduce of 8 B to 256 KB, for shared memory and for gloo.
Ranks are processes of this machine. With more ranks than cores the figures tell about the scheduler, and the first line says so.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.lifetime import die_with_parent
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.shm import ShmTransport

SIZES = tuple(8 * 2**i for i in range(16))  # bytes: 8 to 262,144
ROUNDS = 5
Measurement = dict[str, list[float]]  # name -> nanoseconds an operation, one a round


def build(folder: Path) -> Path:
    """Compile mailbox.cpp into ``folder``."""
    library = folder / "mailbox.so"
    source = Path(__file__).with_name("mailbox.cpp")
    subprocess.run(["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
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
    take("flight record", 1, lambda t: float(code.flight_records(buffer.local, 1024, 100_000)))
    channel.agree("done", None)
    buffer.close()
    return results


def measure_gloo(channel: TorchAgreement, count: int) -> Measurement:
    rank, world = channel.rank, channel.world_size
    results: Measurement = {}

    def take(name: str, operations: int, divisor: int, step: Callable[[], object]) -> None:
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


def rank_main(
    rank: int, world_size: int, folder: Path, library: Path, count: int, parent: int, results: multiprocessing.SimpleQueue[object]
) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    channel = TorchAgreement(dist.group.WORLD)
    measured = {"shm": measure_shm(channel, library, count), "gloo": measure_gloo(channel, max(10, count // 10))}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--count", type=int, default=2000, help="operations a round (large all-reduces take fewer)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.world_size} ranks on {cores} cores"
        + (": they share cores, so this times the scheduler" if options.world_size > cores else "")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build(folder)
        results: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
        processes = [
            context.Process(target=rank_main, args=(rank, options.world_size, folder, library, options.count, os.getpid(), results))
            for rank in range(options.world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        if failed:
            print(f"ranks {failed} failed")
            return 1
        measured = results.get()
    assert isinstance(measured, dict)
    print(table(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
