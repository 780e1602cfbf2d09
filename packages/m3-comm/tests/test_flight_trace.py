"""Flight records, event by event, as the checker of recorded runs reads them."""

from __future__ import annotations

import pytest

from m3_comm.flight import FlightClock, FlightHeader
from m3_comm.flight_report import FlightRecord, Timeline
from m3_comm.flight_trace import recording
from m3_core.check.traces import Event, Stage
from m3_core.errors import ConfigurationError
from m3_core.faults import Site
from m3_core.flight import FLIGHT_LEFT, FLIGHT_PEER_FAILED, FlightEvent, FlightReset

WAIT_MICROSECONDS = 1_000_000


class Run:
    """Records of one rank, each a nanosecond after the last."""

    def __init__(self) -> None:
        self.records: list[FlightRecord] = []

    def add(self, event: FlightEvent, epoch: int = -1, detail: int = 0, site: Site = Site.HOST, peer: int | None = None) -> Run:
        self.records.append(FlightRecord(len(self.records), 0, event, epoch, site, 3, peer, 0, detail))
        return self

    def launch(self, epoch: int) -> Run:
        self.add(FlightEvent.LAUNCH, epoch)
        self.add(FlightEvent.WAIT, epoch, site=Site.REDUCE, peer=1)
        self.add(FlightEvent.DONE, epoch, site=Site.REDUCE)
        self.add(FlightEvent.DONE, epoch, site=Site.TABLE)
        self.add(FlightEvent.DOWN, epoch)
        return self.add(FlightEvent.END, epoch)

    def timeline(self, damaged: int = 0) -> Timeline:
        header = FlightHeader(0, 1, 4, 2, FlightClock(10**9, 0, 0), 0, 1, 1, "01234567")
        return Timeline(tuple(self.records), {0: header}, 1, {0: damaged})

    def events(self) -> list[tuple[str, str]]:
        return [(record.stage.value, record.event.value) for record in recording(self.timeline())]


LAUNCH = [("launch", "begin"), ("push", "begin"), ("reduce", "end"), ("down", "begin"), ("final", "end"), ("launch", "end")]


def test_a_step_and_a_reset() -> None:
    run = Run().add(FlightEvent.STEP_BEGIN).launch(0)
    run.add(FlightEvent.FLAG, 0, site=Site.HANDSHAKE).add(FlightEvent.DONE, 0, site=Site.HANDSHAKE).add(FlightEvent.STEP_END)
    for moment in (FlightReset.BEGIN, FlightReset.DRAINED, FlightReset.AGREED, FlightReset.CLEARED, FlightReset.RESUMED):
        run.add(FlightEvent.RESET, detail=moment)
    run.add(FlightEvent.STEP_BEGIN, detail=1).launch(0).add(FlightEvent.CLOSE)
    assert run.events() == [
        ("step", "begin"),
        *LAUNCH,
        ("handshake", "clear flag"),
        ("handshake", "end"),
        ("step", "end"),
        *(("reset", event) for event in ("begin", "drained", "agreed", "cleared", "resumed")),
        ("step", "begin"),
        *LAUNCH,
        ("host", "close"),
    ]
    records = recording(run.timeline())
    assert all((record.epoch is None) == (record.stage in (Stage.STEP, Stage.RESET, Stage.HOST)) for record in records)


@pytest.mark.parametrize(("site", "stage"), [
    (Site.REDUCE, "reduce"),
    (Site.TABLE, "table"),
    (Site.FINAL, "final"),
    (Site.EPOCH, "finish"),
    (Site.WRAP, "launch"),
    (Site.INJECT, "launch"),
])  # fmt: skip
def test_a_launch_that_fails(site: Site, stage: str) -> None:
    run = Run().add(FlightEvent.STEP_BEGIN).add(FlightEvent.LAUNCH, 0)
    run.add(FlightEvent.GAVE_UP, 0, WAIT_MICROSECONDS, site, peer=1)
    run.add(FlightEvent.DONE, 0, FLIGHT_LEFT, Site.REDUCE).add(FlightEvent.END, 0, FLIGHT_LEFT)
    # It published that it failed: what its wait finds afterwards is no event of the exchange.
    run.add(FlightEvent.FLAG, 0, 1, Site.HANDSHAKE).add(FlightEvent.DONE, 0, FLIGHT_PEER_FAILED, Site.HANDSHAKE)
    run.add(FlightEvent.FAULT_SEEN)
    assert run.events()[3:] == [(stage, "fault"), ("reduce", "leave"), ("launch", "leave"), ("handshake", "failed flag"), ("step", "drop")]
    fault = next(record for record in recording(run.timeline()) if record.event is Event.FAULT)
    assert fault.peer == 1


@pytest.mark.parametrize(("gave_up", "detail", "expected"), [
    (False, FLIGHT_PEER_FAILED, ["peer failed"]),
    (False, FLIGHT_LEFT, ["leave"]),
    (True, FLIGHT_LEFT, ["fault"]),
])  # fmt: skip
def test_an_exchange_that_fails(gave_up: bool, detail: int, expected: list[str]) -> None:
    run = Run().add(FlightEvent.STEP_BEGIN).launch(0).add(FlightEvent.FLAG, 0, 0, Site.HANDSHAKE)
    if gave_up:
        run.add(FlightEvent.GAVE_UP, 0, WAIT_MICROSECONDS, Site.HANDSHAKE, peer=1)
    run.add(FlightEvent.DONE, 0, detail, Site.HANDSHAKE)
    assert run.events()[-1 - len(expected) :] == [("handshake", "clear flag"), *(("handshake", event) for event in expected)]


def test_what_is_lost_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no record of step 0"):
        Run().add(FlightEvent.STEP_BEGIN, detail=1).events()
    with pytest.raises(ConfigurationError, match="no record of the launch of epoch 0 in step 0"):
        Run().add(FlightEvent.STEP_BEGIN).launch(1).events()
    with pytest.raises(ConfigurationError, match="no record of the launch of epoch 1 in step 0"):
        Run().add(FlightEvent.STEP_BEGIN).launch(0).launch(2).events()
    with pytest.raises(ConfigurationError, match="no record of any launch of step 0"):
        Run().add(FlightEvent.STEP_BEGIN).add(FlightEvent.STEP_END).events()
    with pytest.raises(ConfigurationError, match="2 records of rank 0 are half written"):
        recording(Run().timeline(damaged=2))
