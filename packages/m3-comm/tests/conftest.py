"""Ranks as real processes for the tests of this package.

``ranks`` forks them from the test process, so that a function of a test module can run in them without importing torch anew; one test
of each kind starts fresh interpreters instead (see ``fresh_rank.py``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.transports.segments import segments
from m3_comm.transports.shm import DEFAULT_DIRECTORY

STARTED: set[int] = set()
"""Ids of all processes that tests started as ranks."""

LAUNCH_BOUND_SECONDS = 120.0
"""Only a broken test gets near it: no rank is left running when it ends."""


@attrs.frozen
class Outcome:
    """How a rank ended: what its function returned, or the exception that left it (type and text), or the signal that killed it."""

    value: Any
    error: str | None
    trace: str
    exit_code: int | None


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, store: str, timeout: float, args: tuple[Any, ...], pipe: Connection
) -> None:
    value: Any = None
    error: str | None = None
    trace = ""
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        assert dist.group.WORLD is not None
        value = function(TorchAgreement(dist.group.WORLD, timeout), *args)
    except BaseException as raised:
        error, trace = f"{type(raised).__name__}: {raised}", traceback.format_exc()
    pipe.send((value, error, trace))
    pipe.close()


class RankRunner:
    """Runs one function in every rank's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Outcome]:
        """Call ``function(channel, *args)`` on every rank; return how each ended, in rank order."""
        context = multiprocessing.get_context("fork")
        self._runs += 1
        store = str(self._folder / f"store{self._runs}")
        processes, pipes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, world_size, store, timeout, args, theirs))
            process.start()
            assert process.pid is not None
            STARTED.add(process.pid)
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        outcomes: list[Outcome] = []
        try:
            for process, pipe in zip(processes, pipes, strict=True):
                value, error, trace = None, None, ""
                if wait([pipe], LAUNCH_BOUND_SECONDS):
                    with contextlib.suppress(EOFError):
                        value, error, trace = pipe.recv()
                process.join(LAUNCH_BOUND_SECONDS)
                outcomes.append(Outcome(value, error, trace, process.exitcode))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return outcomes


@pytest.fixture
def ranks(tmp_path: Path) -> RankRunner:
    return RankRunner(tmp_path)


@pytest.fixture(autouse=True)
def no_segment_left() -> Iterator[None]:
    """No test leaves a segment of its processes; other programs may use /dev/shm meanwhile."""
    STARTED.add(os.getpid())
    yield
    left = [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in STARTED]
    assert not left
