"""Steps of the world as events of a recording: one vocabulary for the model, the simulator and the real thing."""

from __future__ import annotations

from m3_core.check.codes import (
    ENDED,
    GATHERS,
    GATHERS_EARLY,
    HANDSHAKES,
    MARKED,
    OFF,
    READS_ATTENTION,
    READS_FFN,
    RELEASES,
    RESETS,
    TRADES_FLAGS,
    Action,
)
from m3_core.check.traces import Event, Record, Stage
from m3_core.check.world import World
from m3_core.handshake import Handshake
from m3_core.lifecycle import LifeEvent
from m3_core.reset import Reset

_STAGE = {
    READS_ATTENTION: Stage.REDUCE,
    RELEASES: Stage.NORM,
    GATHERS: Stage.NORM,
    GATHERS_EARLY: Stage.NORM,
    READS_FFN: Stage.FINAL,
    MARKED: Stage.FINISH,
    TRADES_FLAGS: Stage.HANDSHAKE,
}


def records(world: World, state: bytes, action: Action, new: bytes) -> tuple[Record, ...]:
    """The events of one step from ``state`` to ``new``; stores that become visible are none."""
    kind, *rest = action
    numbers = [part for part in rest if isinstance(part, int)]
    if kind in ("host", "reset", "verdicts", "agreement timeout"):
        return _host(world, state, action, new)
    if kind == "stop" or len(numbers) < 2 or kind in ("arrive", "payload", "flag", "mark", "plain", "announce"):
        return ()
    rank, channel = numbers[:2]
    block = numbers[2] if kind in ("start", "accept", "timeout", "leave", "release", "read early", "gather") else 0
    return tuple(_block(world, state, new, kind, rank, channel, block))


def _host(world: World, state: bytes, action: Action, new: bytes) -> tuple[Record, ...]:
    fields = world.fields
    rank = action[1]
    assert isinstance(rank, int)
    if action[0] == "host":
        stages = {
            LifeEvent.BEGIN_STEP.name: (Stage.STEP, Event.BEGIN),
            LifeEvent.END_STEP.name: (Stage.STEP, Event.END),
            LifeEvent.FAULT_SEEN.name: (Stage.STEP, Event.DROP),
            LifeEvent.ABORT.name: (Stage.HOST, Event.ABORT),
            LifeEvent.RESET_DUE.name: (Stage.RESET, Event.BEGIN),
        }
        return (Record(rank, *stages[str(action[2])]),)
    before = RESETS[state[fields.reset[rank]]]
    if action[0] == "reset":
        done = Event.DRAINED if before is Reset.DRAINING else Event.CLEARED
        return (Record(rank, Stage.RESET, done if action[3] == "DONE" else Event.BROKE),)
    after = RESETS[new[fields.reset[rank]]]
    if after is Reset.FAILED:
        return (Record(rank, Stage.RESET, Event.REFUSED),)
    return (Record(rank, Stage.RESET, Event.AGREED if before is Reset.AGREEING_DRAIN else Event.RESUMED),)


def _block(world: World, state: bytes, new: bytes, kind: object, rank: int, channel: int, block: int) -> list[Record]:
    fields = world.fields
    found: list[Record] = []
    counters = [fields.pc[rank, channel, other] for other in range(fields.blocks)]
    before = state[counters[block]]
    epoch = state[fields.epoch[rank, channel]] if before == OFF else state[fields.seen[rank, channel, block]]

    def note(stage: Stage, event: Event, of: int | None = block) -> None:
        found.append(Record(rank, stage, event, epoch, channel, of))

    ended = new[fields.launch[rank, channel]] != state[fields.launch[rank, channel]]
    after = ENDED if ended and new[counters[block]] == OFF else new[counters[block]]
    if kind == "start":
        if all(state[counter] == OFF for counter in counters):
            note(Stage.LAUNCH, Event.BEGIN, None)
        if after in (READS_ATTENTION, READS_FFN):
            note(Stage.PUSH if after == READS_ATTENTION else Stage.DOWN, Event.BEGIN)
    elif kind == "timeout" and before != TRADES_FLAGS:
        note(_STAGE[before], Event.FAULT)
    elif kind == "leave" and before != TRADES_FLAGS:
        note(_STAGE[before], Event.LEAVE)
    elif kind == "accept" and before != after:
        note(_STAGE[before], Event.END)
        if after == READS_FFN:
            note(Stage.DOWN, Event.BEGIN)
    elif kind == "gather":
        note(Stage.DOWN, Event.BEGIN)
    found.extend(_handshake(world, state, new, kind, rank, channel, epoch))
    if ended:
        # The step's last launch may end long after its epoch has moved.
        seen = state[fields.seen[rank, channel, 0]] if state[counters[0]] != OFF else state[fields.epoch[rank, channel]]
        moved = new[fields.epoch[rank, channel]] > seen
        found.append(Record(rank, Stage.LAUNCH, Event.END if moved else Event.LEAVE, seen, channel))
    return found


def _handshake(world: World, state: bytes, new: bytes, kind: object, rank: int, channel: int, epoch: int) -> list[Record]:
    here = world.fields.exchange[rank, channel]
    before, after = HANDSHAKES[state[here]], HANDSHAKES[new[here]]
    if before is after:
        return []
    if before is Handshake.UNPUBLISHED:
        event = Event.CLEAR_FLAG if after is Handshake.POLLING else Event.FAILED_FLAG
    elif after is Handshake.CLEAR:
        event = Event.END
    else:
        event = {"timeout": Event.FAULT, "leave": Event.LEAVE}.get(str(kind), Event.PEER_FAILED)
    return [Record(rank, Stage.HANDSHAKE, event, epoch, channel, 0)]
