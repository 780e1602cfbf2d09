"""A deterministic scheduler: actors as generators, virtual time, one random source.

An actor yields how long it works, or a ``Wait``. Everything random is drawn from one seeded source, in an order that depends on the seed
only, so that a seed replays a run exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias

import attrs


class Woken(Enum):
    """Why a wait ended."""

    DATA = auto()
    FAULT = auto()
    TIMEOUT = auto()


@attrs.frozen
class Wait:
    """Wait until ``ready`` holds.

    Attributes:
        ready: looks at memory; called whenever something changes on the actor's rank.
        seconds: the bound, in virtual seconds; None for a wait that its surroundings bound.
        fault: looks at the fault word; None if the wait does not look.
    """

    ready: Callable[[], bool]
    seconds: float | None
    fault: Callable[[], bool] | None = None


Actor: TypeAlias = Generator[float | Wait, Woken | None, None]


@attrs.define(eq=False)
class _Task:
    rank: int
    actor: Actor
    wait: Wait | None = None
    epoch: int = 0
    """Counts resumptions, so that a bound that was overtaken is ignored."""


class Scheduler:
    """Runs actors until none can go on.

    Attributes:
        now: virtual seconds.
        random: the only source of chance.
    """

    def __init__(self, seed: int) -> None:
        """Start at time 0 with the chance that ``seed`` gives."""
        self.now = 0.0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._waiting: dict[int, list[_Task]] = {}
        self._stopped: set[int] = set()
        self._stalled: dict[int, float] = {}

    def at(self, delay: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay`` virtual seconds."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call))

    def start(self, rank: int, actor: Actor, delay: float = 0.0) -> None:
        """Start an actor of ``rank``."""
        task = _Task(rank, actor)
        self.at(delay, lambda: self._resume(task, None))

    def changed(self, rank: int) -> None:
        """Something that actors of ``rank`` may wait for has changed: they look again."""
        for task in self._waiting.pop(rank, ()):
            wait = task.wait
            assert wait is not None
            if wait.ready():
                self._wake(task, Woken.DATA)
            elif wait.fault is not None and wait.fault():
                self._wake(task, Woken.FAULT)
            else:
                self._waiting.setdefault(rank, []).append(task)

    def stop(self, rank: int) -> None:
        """No actor of ``rank`` goes on, ever."""
        self._stopped.add(rank)
        self._waiting.pop(rank, None)

    def stall(self, rank: int, seconds: float) -> None:
        """No actor of ``rank`` goes on for ``seconds``."""
        self._stalled[rank] = max(self._stalled.get(rank, 0.0), self.now + seconds)

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def waiting(self) -> list[int]:
        """Ranks with an actor that waits although nothing is left to do."""
        return sorted(rank for rank, tasks in self._waiting.items() if tasks and rank not in self._stopped)

    def _wake(self, task: _Task, why: Woken) -> None:
        task.wait = None
        task.epoch += 1
        self.at(self.random.expovariate(1e6), lambda: self._resume(task, why))

    def _resume(self, task: _Task, why: Woken | None) -> None:
        if task.rank in self._stopped:
            return
        until = self._stalled.get(task.rank, 0.0)
        if until > self.now:
            self.at(until - self.now, lambda: self._resume(task, why))
            return
        try:
            step = task.actor.send(why)
        except StopIteration:
            return
        if isinstance(step, Wait):
            self._wait(task, step)
        else:
            self.at(step, lambda: self._resume(task, None))

    def _wait(self, task: _Task, wait: Wait) -> None:
        task.wait = wait
        if wait.ready():
            self._wake(task, Woken.DATA)
            return
        if wait.fault is not None and wait.fault():
            self._wake(task, Woken.FAULT)
            return
        self._waiting.setdefault(task.rank, []).append(task)
        if wait.seconds is not None:
            epoch = task.epoch

            def expire() -> None:
                if task.epoch == epoch and task in self._waiting.get(task.rank, ()):
                    self._waiting[task.rank].remove(task)
                    self._wake(task, Woken.TIMEOUT)

            self.at(wait.seconds, expire)
