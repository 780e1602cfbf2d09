"""The vocabulary of recorded runs, and their check against the protocol.

A recording is JSON lines, one event a line, each rank's events in the order in which they happened there; ranks may be interleaved in any
way. Keys of an event:

======== ======================================================================================================================
rank     integer, required
stage    a ``Stage``, lower case, required
event    an ``Event`` that the stage has (``EVENTS``), lower case, required
epoch    integer: the epoch at which the launch began; required for stages of a launch, left out for a host's
channel  integer, 0 if left out
block    integer; left out where the whole launch is meant
peer     integer: whom a wait that gave up waited for
time     number of any unit, one clock for all ranks; checked only if every event carries it
======== ======================================================================================================================

A recording has to hold every event of the stages ``STEP``, ``RESET``, ``HOST``, ``LAUNCH`` (one a launch, without a block) and
``HANDSHAKE``, the beginnings of ``PUSH`` and ``DOWN``, the ends of ``REDUCE`` and ``FINAL``, and every ``FAULT``; other stages may be left
out. It begins when the channel is at epoch 0. A block that has no work in a stage records nothing of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum, unique
from pathlib import Path

import attrs

from m3_core.epochs import EPOCH_LIMIT
from m3_core.errors import ConfigurationError, ProtocolError
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Machine


@unique
class Stage(Enum):
    """What an event belongs to."""

    STEP = "step"
    RESET = "reset"
    HOST = "host"
    LAUNCH = "launch"
    PUSH = "push"
    REDUCE = "reduce"
    NORM = "norm"
    ROUTER = "router"
    ROUTE = "route"
    TABLE = "table"
    UP = "up"
    DOWN = "down"
    FINAL = "final"
    FINISH = "finish"
    HANDSHAKE = "handshake"


@unique
class Event(Enum):
    """What happened."""

    BEGIN = "begin"
    """A stage's work begins; of DOWN and PUSH, before its first store to a peer."""
    END = "end"
    """A stage's work has ended; of STEP, its tokens are returned; of HANDSHAKE, every flag came and was clear."""
    FAULT = "fault"
    """A wait gave up, or the limit was reached: the fault word of every rank is being set."""
    LEAVE = "leave"
    """A stage is left because the fault word is set."""
    DROP = "drop"
    """The fault word is set after the step's last launch; its tokens are dropped."""
    DRAINED = "drained"
    AGREED = "agreed"
    """Every verdict of the drain came, ready."""
    CLEARED = "cleared"
    RESUMED = "resumed"
    """Every verdict of the clear came, ready."""
    BROKE = "broke"
    """The own part of a reset's phase failed."""
    REFUSED = "refused"
    """A verdict was a failure or did not come."""
    ABORT = "abort"
    CLOSE = "close"
    CLEAR_FLAG = "clear flag"
    """The own flag is published, clear."""
    FAILED_FLAG = "failed flag"
    """The own flag is published, failed."""
    PEER_FAILED = "peer failed"
    """A peer's failed flag came."""


_WORK = frozenset((Event.BEGIN, Event.END, Event.FAULT, Event.LEAVE))
EVENTS: dict[Stage, frozenset[Event]] = {
    **dict.fromkeys(Stage, _WORK),
    Stage.STEP: frozenset((Event.BEGIN, Event.END, Event.DROP)),
    Stage.RESET: frozenset(
        (Event.BEGIN, Event.DRAINED, Event.AGREED, Event.CLEARED, Event.RESUMED, Event.BROKE, Event.REFUSED),
    ),
    Stage.HOST: frozenset((Event.ABORT, Event.CLOSE)),
    Stage.HANDSHAKE: frozenset((Event.CLEAR_FLAG, Event.FAILED_FLAG, Event.PEER_FAILED, Event.END, Event.FAULT, Event.LEAVE)),
}
HOST_STAGES = frozenset((Stage.STEP, Stage.RESET, Stage.HOST))
_ORDER = {stage: position for position, stage in enumerate(Stage)}


@attrs.frozen
class Record:
    """One event of a recording; see the module's text for the fields.

    Raises:
        ConfigurationError: if the stage has no such event, or the epoch is missing or too much.
    """

    rank: int
    stage: Stage
    event: Event
    epoch: int | None = None
    channel: int = 0
    block: int | None = None
    peer: int | None = None
    time: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.event not in EVENTS[self.stage]:
            legal = ", ".join(sorted(event.value for event in EVENTS[self.stage]))
            raise ConfigurationError(f"stage {self.stage.value} has no event {self.event.value!r}; it has {legal}")
        if (self.epoch is None) != (self.stage in HOST_STAGES):
            raise ConfigurationError(
                f"stage {self.stage.value} with epoch {self.epoch}; stages of a launch carry an epoch, a host's do not"
            )

    def to_json(self) -> str:
        """One line, without its end."""
        values = {field.name: getattr(self, field.name) for field in attrs.fields(Record)}
        kept = {name: value for name, value in values.items() if value is not None and (name, value) != ("channel", 0)}
        return json.dumps({name: value.value if isinstance(value, Enum) else value for name, value in kept.items()})

    @classmethod
    def from_json(cls, line: str, number: int = 0) -> Record:
        """Read a line.

        Raises:
            ConfigurationError: naming the line if it is no event.
        """
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("not an object")
            unknown = set(values) - {field.name for field in attrs.fields(cls)}
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            if "rank" not in values:
                raise ValueError("no rank")
            for name in ("rank", "epoch", "channel", "block", "peer"):
                if name in values and (type(values[name]) is not int or values[name] < 0):
                    raise ValueError(f"{name} is {values[name]!r}, not an integer from 0")
            if "time" in values and type(values["time"]) not in (int, float):
                raise ValueError(f"time is {values['time']!r}, not a number")
            stage, event = Stage(values.pop("stage", None)), Event(values.pop("event", None))
            return cls(stage=stage, event=event, **values)
        except (ValueError, RecursionError, ConfigurationError) as error:
            raise ConfigurationError(f"line {number} of the recording is no event: {error}") from error


def read(path: Path) -> list[Record]:
    """The events of a file."""
    with path.open(encoding="utf-8") as lines:
        return [Record.from_json(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file that ``read`` reads.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as lines:
            lines.writelines(record.to_json() + "\n" for record in records)
    except OSError as error:
        raise ConfigurationError(f"recording {path} cannot be written: {error.strerror}; name a file in a folder that exists") from error


# A launch of a channel: how many resets came before, and its epoch.
Launch = tuple[int, int]


@attrs.define
class _Rank:
    """What the check knows of one rank, from its own events only."""

    rank: int
    problems: list[str]
    life: Machine[Life, LifeEvent, LifeAction] = attrs.field(factory=lambda: Machine(LIFE, Life.READY))
    reset: Machine[Reset, ResetEvent, ResetAction] = attrs.field(factory=lambda: Machine(RESET))
    resets: int = 0
    """Resets begun."""
    resumed: int = 0
    """Resets resumed from."""
    step: int = -1
    """Steps begun in all, less one."""
    launches: dict[int, list[list[Launch]]] = attrs.field(factory=lambda: defaultdict(list))
    """For each channel, the launches of each step."""
    returned: set[int] = attrs.field(factory=set)
    failed_at: int | None = None
    """The step in which the rank failed before it published a clear flag, or which it had not begun."""
    published: bool = False
    next_epoch: dict[int, int] = attrs.field(factory=lambda: defaultdict(int))
    exchange: dict[int, Machine[Handshake, HandshakeEvent, HandshakeAction]] = attrs.field(factory=dict)
    stage_of_block: dict[tuple[int, int | None], int] = attrs.field(factory=dict)
    done: dict[tuple[Stage, Event, int, Launch], list[float | None]] = attrs.field(factory=lambda: defaultdict(list))
    """Times of the events of launches, by stage, event, channel and launch."""
    reset_done: dict[tuple[Event, int], float | None] = attrs.field(factory=dict)

    def problem(self, number: int, text: str) -> None:
        self.problems.append(f"event {number}: rank {self.rank} {text}")

    def fail(self) -> None:
        if self.failed_at is None:
            stepping = self.life.state is Life.STEPPING
            self.failed_at = self.step + 1 if (self.published and stepping) or not stepping else self.step

    def take(self, number: int, record: Record) -> None:
        """Move the tables by one event of this rank."""
        try:
            if record.stage in HOST_STAGES:
                self._host(record)
            else:
                self._launch(number, record)
        except ProtocolError as error:
            self.problem(number, f"does {record.stage.value} {record.event.value} out of turn: {error}")

    def _host(self, record: Record) -> None:
        stage, event = record.stage, record.event
        if stage is Stage.STEP:
            steps = {Event.BEGIN: LifeEvent.BEGIN_STEP, Event.END: LifeEvent.END_STEP, Event.DROP: LifeEvent.FAULT_SEEN}
            self.life.handle(steps[event])
            if event is Event.BEGIN:
                self.step += 1
                self.published = False
                self.exchange.clear()
            elif event is Event.END:
                self.returned.add(self.step)
        elif stage is Stage.HOST:
            self.life.handle(LifeEvent.ABORT if event is Event.ABORT else LifeEvent.CLOSE)
            if event is Event.ABORT:
                self.fail()
        elif event is Event.BEGIN:
            self.life.handle(LifeEvent.RESET_DUE)
            self.reset = Machine(RESET)
            self.reset.handle(ResetEvent.START)
            self.resets += 1
        else:
            names = {
                Event.DRAINED: ResetEvent.DONE,
                Event.CLEARED: ResetEvent.DONE,
                Event.AGREED: ResetEvent.AGREED,
                Event.RESUMED: ResetEvent.AGREED,
                Event.BROKE: ResetEvent.BROKE,
                Event.REFUSED: ResetEvent.REFUSED,
            }
            actions = self.reset.handle(names[event])
            self.reset_done[event, self.resets] = record.time
            if event is Event.BROKE or event is Event.REFUSED:
                self.fail()
            if ResetAction.CLEAR in actions:
                self.life.handle(LifeEvent.DRAIN_AGREED)
            elif ResetAction.RESUME in actions:
                self.life.handle(LifeEvent.CLEAR_AGREED)
                self.resumed += 1
                self.next_epoch.clear()
            elif ResetAction.RAISE in actions:
                self.life.handle(LifeEvent.RESET_FAILED)

    def _launch(self, number: int, record: Record) -> None:
        assert record.epoch is not None
        channel, event, stage = record.channel, record.event, record.stage
        launch = (self.resumed, record.epoch)
        if stage is Stage.LAUNCH and event is Event.BEGIN:
            if self.life.state is not Life.STEPPING:
                self.problem(number, f"begins a launch while it is {self.life.state.name}")
            expected = self.next_epoch[channel]
            if record.epoch != expected:
                self.problem(number, f"begins a launch of channel {channel} at epoch {record.epoch}; its last one leaves {expected}")
            if record.epoch >= EPOCH_LIMIT:
                self.problem(number, f"begins a launch at epoch {record.epoch}, past the limit {EPOCH_LIMIT}")
            steps = self.launches[channel]
            steps.extend([] for _ in range(self.step + 1 - len(steps)))
            if steps:
                steps[-1].append(launch)
            self.stage_of_block = {key: place for key, place in self.stage_of_block.items() if key[0] != channel}
        elif stage is Stage.LAUNCH and event is Event.END:
            self.next_epoch[channel] = record.epoch + 1
        elif event is Event.FAULT:
            self.fail()
        if stage is Stage.HANDSHAKE:
            self._handshake(record)
        elif stage is not Stage.LAUNCH and event in (Event.BEGIN, Event.END):
            block = (channel, record.block)
            place = _ORDER[stage]
            if place < self.stage_of_block.get(block, 0):
                self.problem(number, f"is in stage {stage.value} of epoch {record.epoch} after a later one in the same block")
            self.stage_of_block[block] = max(place, self.stage_of_block.get(block, 0))
        self.done[stage, event, channel, launch].append(record.time)

    def _handshake(self, record: Record) -> None:
        machine = self.exchange.setdefault(record.channel, Machine(HANDSHAKE))
        names = {
            Event.CLEAR_FLAG: HandshakeEvent.WORD_CLEAR,
            Event.FAILED_FLAG: HandshakeEvent.WORD_SET,
            Event.PEER_FAILED: HandshakeEvent.PEER_FAILED,
            Event.END: HandshakeEvent.LAST_PEER_CLEAR,
            Event.FAULT: HandshakeEvent.TIMEOUT,
            Event.LEAVE: HandshakeEvent.WORD_SET,
        }
        machine.handle(names[record.event])
        if record.event is Event.CLEAR_FLAG:
            self.published = True


# What must have happened on every rank before the second event can happen on any.
_NEEDS = (
    ((Stage.PUSH, Event.BEGIN), (Stage.REDUCE, Event.END), "read attention words"),
    ((Stage.DOWN, Event.BEGIN), (Stage.FINAL, Event.END), "read FFN words"),
    ((Stage.HANDSHAKE, Event.CLEAR_FLAG), (Stage.HANDSHAKE, Event.END), "ended the handshake clear"),
)
_RESET_NEEDS = ((Event.DRAINED, Event.AGREED, "agreed on the drain"), (Event.CLEARED, Event.RESUMED, "resumed"))


def check(records: Iterable[Record]) -> tuple[str, ...]:
    """Everything in a recording that the protocol does not allow; empty if it does.

    Args:
        records: the events; each rank's in its own order.
    """
    problems: list[str] = []
    ranks: dict[int, _Rank] = {}
    timed = True
    for number, record in enumerate(records, 1):
        rank = ranks.setdefault(record.rank, _Rank(record.rank, problems))
        rank.take(number, record)
        timed = timed and record.time is not None
    if not ranks:
        return ("the recording is empty",)
    if sorted(ranks) != list(range(len(ranks))):
        problems.append(f"the recording has ranks {sorted(ranks)}; every rank from 0 has to be recorded")
    everyone = [ranks[rank] for rank in sorted(ranks)]
    problems.extend(_exchange_problems(everyone, timed=timed))
    problems.extend(_reset_problems(everyone, timed=timed))
    problems.extend(_token_problems(everyone))
    problems.extend(_launch_problems(everyone))
    return tuple(problems)


def _exchange_problems(everyone: list[_Rank], *, timed: bool) -> Iterator[str]:
    """An exchange ends on a rank only after every rank has begun its part."""
    for before, after, what in _NEEDS:
        for reader in everyone:
            for (stage, event, channel, launch), ends in reader.done.items():
                if (stage, event) != after:
                    continue
                for writer in everyone:
                    begins = writer.done.get((*before, channel, launch), [])
                    where = f"rank {reader.rank} {what} of epoch {launch[1]} (after {launch[0]} resets, channel {channel})"
                    if not begins:
                        yield f"{where}, but rank {writer.rank} never did {before[0].value} {before[1].value} there"
                    elif timed and _first(begins) > _first(ends):
                        yield f"{where} before rank {writer.rank} did {before[0].value} {before[1].value}"


def _first(times: list[float | None]) -> float:
    return min(time for time in times if time is not None)


def _reset_problems(everyone: list[_Rank], *, timed: bool) -> Iterator[str]:
    for before, after, what in _RESET_NEEDS:
        for reader in everyone:
            for (event, reset), at in reader.reset_done.items():
                if event is not after:
                    continue
                for writer in everyone:
                    key = (before, reset)
                    if key not in writer.reset_done:
                        yield f"rank {reader.rank} {what} in reset {reset}, but rank {writer.rank} never was {before.value}"
                    elif timed and at is not None and (writer.reset_done[key] or 0) > at:
                        yield f"rank {reader.rank} {what} in reset {reset} before rank {writer.rank} was {before.value}"


def _token_problems(everyone: list[_Rank]) -> Iterator[str]:
    for failed in everyone:
        if failed.failed_at is None:
            continue
        for rank in everyone:
            late = sorted(step for step in rank.returned if step >= failed.failed_at)
            if late:
                at = failed.failed_at
                yield f"rank {rank.rank} returned tokens of step {late[0]}, but rank {failed.rank} failed no later than step {at}"


def _launch_problems(everyone: list[_Rank]) -> Iterator[str]:
    """Ranks that returned a step ran the same launches in it."""
    first = everyone[0]
    for rank in everyone[1:]:
        for step in sorted(first.returned & rank.returned):
            for channel in sorted({*first.launches, *rank.launches}):
                mine, theirs = (_at(one.launches[channel], step) for one in (first, rank))
                if mine != theirs:
                    yield f"step {step} of channel {channel} has launches {mine} on rank {first.rank} and {theirs} on rank {rank.rank}"


def _at(steps: list[list[Launch]], step: int) -> list[Launch]:
    return steps[step] if step < len(steps) else []
