"""The launch with ranks that are processes and mailboxes in POSIX shared memory: same bits as with threads, and ends when a peer dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.shm import ShmTransport
from m3_core.faults import Fault, Site
from m3_kernels.build.cpu import default_library
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape
from m3_kernels.reference.arithmetic import ROUNDED
from m3_kernels.reference.half import half
from m3_kernels.testing import random_inputs, random_weights

ROWS = 3
LAUNCHES = 20
LAYER = 5
JOIN_SECONDS = 120.0


def shape_of(world_size: int) -> FfnShape:
    return FfnShape(hidden=192, intermediate=64, experts=8, top_k=4, world_size=world_size, max_rows=8)


def run_rank(
    body: Callable[[FfnChannel, TorchAgreement, Connection], None],
    rank: int,
    world_size: int,
    store: str,
    wait_seconds: float,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    channel = TorchAgreement(dist.group.WORLD, 60.0)
    shape = shape_of(world_size)
    buffer = PeerBuffer.create(channel, ShmTransport(), shape.peer_layout.total_bytes)
    try:
        ffn = FfnChannel(shape, buffer, grid=2, wait_seconds=wait_seconds)
        body(ffn, channel, pipe)
        ffn.close()
    finally:
        buffer.close()
    dist.destroy_process_group()


def start(
    folder: Path, world_size: int, body: Callable[[FfnChannel, TorchAgreement, Connection], None], wait_seconds: float
) -> tuple[list[Any], list[Connection]]:
    # Compiled here, once, before the ranks look for it.
    default_library()
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(body, rank, world_size, str(folder / "store"), wait_seconds, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


def case(shape: FfnShape, format: ExpertFormat) -> tuple[Any, Any]:
    """The same layer and inputs in every process."""
    generator = torch.Generator().manual_seed(11)
    weights = random_weights(shape, format, generator)
    return random_inputs(shape, ROWS, generator, padded=[1]), weights


def many_launches(channel: FfnChannel, agreement: TorchAgreement, pipe: Connection) -> None:
    results = []
    for format in ExpertFormat:
        inputs, weights = case(channel.shape, format)
        launch = FfnLaunch(channel, weights[channel.rank], FfnConstants(), LAYER)
        launch.warm(ROWS)
        agreement.agree("ready", None)
        outs = {
            launch(inputs.parts[channel.rank], inputs.residual, inputs.slots, handshake=number % 4 == 3)[0]
            .view(torch.int16)
            .numpy()
            .tobytes()
            for number in range(LAUNCHES)
        }
        results.append(outs)
    agreement.agree("done", None)
    pipe.send((results, channel.epoch(), channel.health()))


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_give_the_same_bits(world_size: int, tmp_path: Path) -> None:
    shape = shape_of(world_size)
    processes, pipes = start(tmp_path, world_size, many_launches, wait_seconds=60.0)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(JOIN_SECONDS)
    assert [process.exitcode for process in processes] == [0] * world_size
    wanted = []
    for format in ExpertFormat:
        inputs, weights = case(shape, format)
        out = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), shape.top_k, ROUNDED).out
        wanted.append({out.bfloat16().view(torch.int16).numpy().tobytes()})
    assert found == [(wanted, len(ExpertFormat) * LAUNCHES, Fault.none())] * world_size


def launch_until_fault(channel: FfnChannel, agreement: TorchAgreement, pipe: Connection) -> None:
    inputs, weights = case(channel.shape, ExpertFormat.BF16)
    launch = FfnLaunch(channel, weights[channel.rank], FfnConstants(), LAYER)
    agreement.agree("ready", None)
    # Two launches with every peer alive; then the parent kills rank 1, wherever it is in its own loop.
    for _ in range(2):
        launch(inputs.parts[channel.rank], inputs.residual, inputs.slots, handshake=True)
    pipe.send("running")
    while not channel.health().failed:
        launch(inputs.parts[channel.rank], inputs.residual, inputs.slots, handshake=True)
    pipe.send(channel.health())


@pytest.mark.parametrize("world_size", [2, 4])
def test_survivors_of_a_killed_rank_end_and_name_it(world_size: int, tmp_path: Path) -> None:
    wait_seconds = 1.0
    processes, pipes = start(tmp_path, world_size, launch_until_fault, wait_seconds)
    for pipe in pipes:
        assert pipe.recv() == "running"
    os.kill(processes[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    faults = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != 1]
    assert time.monotonic() - killed < wait_seconds + 2.0
    for fault in faults:
        assert fault.failed
        assert fault.rank != 1
        assert fault.site in (Site.REDUCE, Site.FINAL, Site.HANDSHAKE)
        assert fault.layer == LAYER
        # A survivor may wait for another survivor that is itself held up by the dead rank.
        assert fault.peer in set(range(world_size)) - {fault.rank}
        assert world_size > 2 or fault.peer == 1
    for rank, process in enumerate(processes):
        process.join(JOIN_SECONDS)
        assert process.exitcode == (-signal.SIGKILL if rank == 1 else 0)
