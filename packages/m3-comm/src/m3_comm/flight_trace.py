"""Flight records as a recording in the vocabulary of ``m3_core.check.traces``, so that a real run can be checked against the protocol.

A rank stands as a whole in the recording, by what its first block recorded: tasks 0 of every stage that trades with peers fall to that
block, so what it began is what a peer's end proves. A launch's beginning is the beginning of its stage push, and its clean end that of its
stage final. Waits have no place in the vocabulary, and other stages may be left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from m3_comm.flight_report import FlightRecord, Timeline
from m3_core.check.traces import Event, Record, Stage
from m3_core.errors import ConfigurationError
from m3_core.faults import Site
from m3_core.flight import FLIGHT_LEFT, FLIGHT_PEER_FAILED, FlightEvent, FlightReset

_RESET_EVENTS = {
    FlightReset.BEGIN: Event.BEGIN,
    FlightReset.DRAINED: Event.DRAINED,
    FlightReset.AGREED: Event.AGREED,
    FlightReset.CLEARED: Event.CLEARED,
    FlightReset.RESUMED: Event.RESUMED,
    FlightReset.BROKE: Event.BROKE,
    FlightReset.REFUSED: Event.REFUSED,
}
_HOST_EVENTS = {
    FlightEvent.STEP_BEGIN: (Stage.STEP, Event.BEGIN),
    FlightEvent.STEP_END: (Stage.STEP, Event.END),
    FlightEvent.FAULT_SEEN: (Stage.STEP, Event.DROP),
    FlightEvent.ABORT: (Stage.HOST, Event.ABORT),
    FlightEvent.CLOSE: (Stage.HOST, Event.CLOSE),
}
_STAGE_OF_SITE: dict[Site, Stage] = {
    Site.EPOCH: Stage.FINISH,
    **{site: Stage[site.name] for site in Site if site.is_wait and site is not Site.EPOCH},
}


def recording(timeline: Timeline) -> list[Record]:
    """The run as a recording: rank by rank, each rank's events in the order of their clock.

    Args:
        timeline: every rank's records from its first launch on; ``m3_comm.flight_report.read`` takes several copies of a ring together,
            so a run that is longer than a ring, or has a reset in it, is written from copies made in time.

    Raises:
        ConfigurationError: a rank has no file, or some of its records are lost or half written; a recording has to be whole.
    """
    if timeline.missing:
        raise ConfigurationError(f"no flight record of rank(s) {list(timeline.missing)}: a recording needs every rank's")
    found: list[Record] = []
    for rank in sorted(timeline.headers):
        if timeline.damaged[rank]:
            raise ConfigurationError(
                f"{timeline.damaged[rank]} records of rank {rank} are half written in every copy: write the records while no launch runs"
            )
        own = [record for record in timeline.records if record.rank == rank]
        _require_whole(rank, own)
        found.extend(event for record in own for event in _events(record, own))
    return found


def _require_whole(rank: int, records: list[FlightRecord]) -> None:
    """Every launch and every step since the rank began is there."""
    epoch = step = launches = 0
    for record in records:
        if record.event == FlightEvent.STEP_BEGIN:
            if record.detail != step:
                raise _lost(rank, f"step {step}")
            step += 1
            launches = 0
        elif record.event == FlightEvent.STEP_END and launches == 0:
            raise _lost(rank, f"any launch of step {record.detail}")
        elif record.event == FlightEvent.RESET and record.detail == FlightReset.RESUMED:
            epoch = 0
        elif record.event == FlightEvent.LAUNCH:
            launches += 1
            if record.epoch > epoch:
                raise _lost(rank, f"the launch of epoch {epoch} in step {step - 1}")
        elif record.event == FlightEvent.END and record.detail == 0:
            epoch = record.epoch + 1


def _lost(rank: int, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank} has no record of {what}: later ones have taken its place; write the records more often, and before every reset"
    )


def _events(record: FlightRecord, own: list[FlightRecord]) -> Iterator[Record]:
    if record.event in _HOST_EVENTS:
        stage, event = _HOST_EVENTS[FlightEvent(record.event)]
        yield Record(record.rank, stage, event, time=record.nanoseconds)
    elif record.event == FlightEvent.RESET:
        yield Record(record.rank, Stage.RESET, _RESET_EVENTS[FlightReset(record.detail)], time=record.nanoseconds)
    else:
        for stage, event in _launch_events(record, own):
            peer = record.peer if event is Event.FAULT else None
            yield Record(record.rank, stage, event, record.epoch, peer=peer, time=record.nanoseconds)


def _launch_events(record: FlightRecord, own: list[FlightRecord]) -> Iterator[tuple[Stage, Event]]:
    left = record.detail == FLIGHT_LEFT
    match record.event:
        case FlightEvent.LAUNCH:
            yield Stage.LAUNCH, Event.BEGIN
            yield Stage.PUSH, Event.BEGIN
        case FlightEvent.DOWN:
            yield Stage.DOWN, Event.BEGIN
        case FlightEvent.END if left:
            yield Stage.LAUNCH, Event.LEAVE
        case FlightEvent.END:
            yield Stage.FINAL, Event.END
            yield Stage.LAUNCH, Event.END
        case FlightEvent.FLAG:
            yield Stage.HANDSHAKE, Event.FAILED_FLAG if record.detail else Event.CLEAR_FLAG
        case FlightEvent.GAVE_UP:
            yield _STAGE_OF_SITE.get(record.site or Site.HOST, Stage.LAUNCH), Event.FAULT
        case FlightEvent.DONE if record.site is Site.REDUCE:
            yield Stage.REDUCE, Event.LEAVE if left else Event.END
        case FlightEvent.DONE if record.site is Site.HANDSHAKE and not _settled(record, own):
            ends = {FLIGHT_LEFT: Event.LEAVE, FLIGHT_PEER_FAILED: Event.PEER_FAILED}
            yield Stage.HANDSHAKE, ends.get(record.detail, Event.END)


def _settled(done: FlightRecord, own: list[FlightRecord]) -> bool:
    """Whether this rank's exchange had failed before its wait ended: it published that it had failed, or gave up itself."""
    same = [record for record in own if record.epoch == done.epoch and record.nanoseconds <= done.nanoseconds]
    flags = [record for record in same if record.event == FlightEvent.FLAG]
    gave_up = [record for record in same if record.event == FlightEvent.GAVE_UP and record.site is Site.HANDSHAKE]
    return bool(gave_up) or (bool(flags) and flags[-1].detail != 0)
