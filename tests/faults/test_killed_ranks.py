"""Ranks that are killed around real launches of the CPU target: who notices, how soon, what is named, and what is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_comm.agreement import TorchAgreement
from m3_comm.lifetime import die_with_parent
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.testing import RankRunner
from m3_comm.transports.segments import DEFAULT_DIRECTORY, segments
from m3_comm.transports.shm import ShmTransport
from m3_core.epochs import parity, triple_tag
from m3_core.errors import CollectiveError
from m3_core.faults import Site
from m3_core.words import triple_word_tag
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights

WAIT_SECONDS = 2.0
GRACE_SECONDS = 2.0
"""How much longer than the wait bound survivors may take."""

WORLDS = (2, 4)
LAYER = 5


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankRunner]:
    runner = RankRunner(tmp_path)
    yield runner
    assert runner.segments_left() == []


def _launch(world_size: int, buffer: PeerBuffer) -> FfnLaunch:
    shape = FfnShape(hidden=96, intermediate=32, experts=4, top_k=2, world_size=world_size, max_rows=2)
    generator = torch.Generator().manual_seed(1)

    def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    weights = FfnWeights(
        format=ExpertFormat.BF16,
        post_norm=random(96),
        router=random(4, 96, dtype=torch.float32),
        router_bias=random(4, dtype=torch.float32),
        w13=random(5, 64, 96),
        s13=None,
        w2=random(5, 96, 32),
        s2=None,
    )
    return FfnLaunch(FfnChannel(shape, buffer, grid=2, wait_seconds=WAIT_SECONDS), weights, FfnConstants(), LAYER)


def _step(launch: FfnLaunch) -> None:
    part = torch.ones(2, 96, dtype=torch.bfloat16)
    launch(part, part, torch.zeros(2, dtype=torch.int64), handshake=True)


def _build(channel: TorchAgreement) -> tuple[PeerBuffer, FfnLaunch]:
    buffer = PeerBuffer.create(channel, ShmTransport(), FfnShape(96, 32, 4, 2, channel.world_size, 2).peer_layout.total_bytes)
    launch = _launch(channel.world_size, buffer)
    for _ in range(3):
        _step(launch)
    assert not launch.channel.health().failed
    channel.agree("warm", None)
    return buffer, launch


def _survive(channel: TorchAgreement, buffer: PeerBuffer, launch: FfnLaunch, victim: int) -> tuple[float, Any]:
    start = time.monotonic()
    _step(launch)
    seconds = time.monotonic() - start
    fault = launch.channel.health()
    # The next phase of the host names the rank at once, whatever the fault word could tell.
    with pytest.raises(CollectiveError, match=rf"rank {victim}: .*its process \d+ is gone"):
        channel.agree("step", None)
    launch.channel.close()
    buffer.close()
    return seconds, fault


def _killed_between_steps(channel: TorchAgreement, victim: int) -> tuple[float, Any]:
    buffer, launch = _build(channel)
    if channel.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return _survive(channel, buffer, launch, victim)


def _killed_in_a_launch(channel: TorchAgreement, victim: int) -> tuple[float, Any]:
    buffer, launch = _build(channel)
    if channel.rank == victim:
        epoch = launch.channel.epoch()
        layout = launch.channel.shape.peer_layout
        pushed = [
            address + layout.attention_pair(parity(epoch), victim, row, triple)
            for address in buffer.addresses
            for row in range(layout.max_rows)
            for triple in range(layout.triples)
        ]

        def kill() -> None:
            # All its words in every buffer: a peer that missed one would give up there. The launch cannot end before the kill, because no
            # peer launches until then.
            for word in pushed:
                while triple_word_tag(ctypes.c_uint64.from_address(word).value) != triple_tag(epoch):
                    pass
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()
        _step(launch)
    with pytest.raises(CollectiveError, match=f"rank {victim}: "):
        channel.agree("killed", None)
    return _survive(channel, buffer, launch, victim)


# A rank that dies within a launch has sent its attention output: its peers miss what comes later.
@pytest.mark.parametrize(("scenario", "site"), [(_killed_between_steps, Site.REDUCE), (_killed_in_a_launch, Site.FINAL)])
@pytest.mark.parametrize("world_size", WORLDS)
def test_survivors_end_within_the_bound_with_a_fault_that_names_the_rank(
    ranks: RankRunner, scenario: Any, site: Site, world_size: int
) -> None:
    victim = world_size - 1
    outcomes = ranks(world_size, scenario, victim)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank in range(victim):
        assert outcomes[rank].error is None, outcomes[rank].trace
        seconds, fault = outcomes[rank].value
        assert seconds < WAIT_SECONDS + GRACE_SECONDS
        assert fault.failed
        assert (fault.site, fault.peer, fault.layer) == (site, victim, LAYER)


def _tied(channel: TorchAgreement, parent: int, pipe: int) -> None:
    die_with_parent(parent)
    _, launch = _build(channel)
    os.write(pipe, f"{os.getpid()} ".encode())
    # Steps until the kernel ends it.
    with contextlib.suppress(CollectiveError):
        while True:
            _step(launch)
            channel.agree("step", None)


def test_a_dead_parent_takes_its_ranks_with_it_in_the_middle_of_a_step(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            os.close(reader)
            RankRunner(tmp_path)(2, _tied, os.getpid(), writer)
        finally:
            os._exit(1)
    os.close(writer)
    told = b""
    while told.count(b" ") < 2:
        chunk = os.read(reader, 64)
        assert chunk, "the ranks did not start"
        told += chunk
    children = [int(word) for word in told.split()]
    descriptors = [os.pidfd_open(child) for child in children]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + GRACE_SECONDS
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0], "a rank outlives its parent"
        os.close(descriptor)
    os.close(reader)
    assert not [segment for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in children]
