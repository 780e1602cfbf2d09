"""Ranks as real processes, for tests of anything that several ranks do together."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.transports.segments import DEFAULT_DIRECTORY, segments

RUN_BOUND_SECONDS = 120.0
"""Only a broken test gets near it: no rank is left running when a run ends."""


@attrs.frozen
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned, None if it did not return.
        error: type and text of the exception that left it, None if none did.
        trace: that exception's traceback.
        exit_code: of the process; negative for the signal that killed it.
    """

    value: Any
    error: str | None
    trace: str
    exit_code: int | None


class RankRunner:
    """Runs one function in a process for every rank, forked from this one: the function needs no import path, only its arguments.

    This process must not have used a GPU before.
    """

    def __init__(self, folder: Path) -> None:
        """Run nothing yet.

        Args:
            folder: for the stores in which the ranks meet.
        """
        self._folder = folder
        self._runs = 0
        self.started: set[int] = set()

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0, bound: float = RUN_BOUND_SECONDS
    ) -> list[Outcome]:
        """Call ``function(channel, *args)`` on every rank; return how each ended, in rank order.

        Args:
            world_size: number of ranks.
            function: gets the rank's ``TorchAgreement`` first.
            args: the same for every rank.
            timeout: of the agreement, in seconds.
            bound: of the whole run, in seconds; ranks that still run then are killed.
        """
        context = multiprocessing.get_context("fork")
        self._runs += 1
        store = str(self._folder / f"store{self._runs}")
        processes, pipes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, world_size, store, timeout, args, theirs))
            process.start()
            assert process.pid is not None
            self.started.add(process.pid)
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        outcomes: list[Outcome] = []
        try:
            for process, pipe in zip(processes, pipes, strict=True):
                value, error, trace = None, None, ""
                if wait([pipe], bound):
                    with contextlib.suppress(EOFError):
                        value, error, trace = pipe.recv()
                process.join(bound)
                outcomes.append(Outcome(value, error, trace, process.exitcode))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return outcomes

    def segments_left(self) -> list[str]:
        """Names of shared-memory segments that ranks of this runner left; other programs' do not count."""
        return [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in self.started]


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
        # A rank whose function ends at once would close connections that its peers are still making.
        TorchAgreement(dist.group.WORLD).agree("started", None)
        value = function(TorchAgreement(dist.group.WORLD, timeout), *args)
    except BaseException as raised:
        error, trace = f"{type(raised).__name__}: {raised}", traceback.format_exc()
    pipe.send((value, error, trace))
    pipe.close()
