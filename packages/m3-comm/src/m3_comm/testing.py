"""Ranks as real processes, for tests of anything that several ranks do together."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.transports.segments import DEFAULT_DIRECTORY, segments

RUN_BOUND_SECONDS = 120.0
"""Only a broken test gets near it: no rank is left running when a run ends."""

_STACK_SIGNAL = signal.SIGUSR1
_STACK_SECONDS = 5.0


@attrs.frozen
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned, None if it did not return.
        error: type and text of the exception that left it, None if none did; for a rank that had to be killed because the run's bound
            was over, what it was doing.
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
            bound: of the whole run, in seconds; ranks that still run then are killed, and their outcomes say where they were.
        """
        self._runs += 1
        store = str(self._folder / f"store{self._runs}")
        ranks = [_Rank.start(rank, function, world_size, store, timeout, args) for rank in range(world_size)]
        self.started.update(rank.process.pid for rank in ranks if rank.process.pid is not None)
        deadline = time.monotonic() + bound
        try:
            return [rank.outcome(deadline, bound) for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()

    def segments_left(self) -> list[str]:
        """Names of shared-memory segments that ranks of this runner left; other programs' do not count."""
        return [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in self.started]


@attrs.frozen
class _Rank:
    """A started rank, the pipe of its outcome, and the pipe into which it writes its stack when asked."""

    number: int
    process: ForkProcess
    answer: Connection
    stack: int

    @classmethod
    def start(cls, number: int, function: Callable[..., Any], world_size: int, store: str, timeout: float, args: tuple[Any, ...]) -> _Rank:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        read_stack, write_stack = os.pipe()
        process = context.Process(target=_rank_main, args=(function, number, world_size, store, timeout, args, theirs, write_stack))
        process.start()
        theirs.close()
        os.close(write_stack)
        return cls(number, process, mine, read_stack)

    def outcome(self, deadline: float, bound: float) -> Outcome:
        value, error, trace = None, None, ""
        if wait([self.answer], max(deadline - time.monotonic(), 0.0)):
            with contextlib.suppress(EOFError):
                value, error, trace = self.answer.recv()
            self.process.join(max(deadline - time.monotonic(), 1.0))
        if self.process.is_alive():
            error = f"rank {self.number} did not end within {bound:g} s and was killed; it was at:\n{self._where()}"
        return Outcome(value, error, trace, self.process.exitcode)

    def _where(self) -> str:
        """Ask for the stacks of all threads, then kill."""
        assert self.process.pid is not None
        os.kill(self.process.pid, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        text = b""
        # The pipe ends with the process, which ends when it has written: a stack comes in many pieces on a loaded machine.
        while wait([self.stack], max(deadline - time.monotonic(), 0.0)) and (part := os.read(self.stack, 65536)):
            text += part
        self.process.kill()
        self.process.join()
        return text.decode(errors="replace") or "nothing: it does not handle signals (stopped, or in the kernel)"

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.answer.close()
        os.close(self.stack)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    args: tuple[Any, ...],
    pipe: Connection,
    stack: int,
) -> None:
    # Chained, so that the signal's own action ends the process behind its last line.
    faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=True, chain=True)
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
