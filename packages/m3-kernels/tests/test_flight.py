"""What a launch writes into the flight recorder's ring, read word by word as ``m3_core.flight`` lays it out."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import attrs
import pytest
import torch

from m3_core.errors import ConfigurationError
from m3_core.faults import Site, site_word_layer, site_word_peer, site_word_site
from m3_core.flight import (
    FLIGHT_HEADER_BYTES,
    FLIGHT_LEFT,
    FLIGHT_PEER_FAILED,
    FLIGHT_RECORD_BYTES,
    FlightEvent,
    flight_bytes,
    flight_check,
    flight_host_offset,
    flight_launch_record,
)
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnShape
from m3_kernels.testing import InProcessPeers, LayerInputs, ThreadRanks, aligned_zeros, hooked_library, random_inputs, random_weights

SHAPE = FfnShape(hidden=96, intermediate=32, experts=4, top_k=2, world_size=2, max_rows=2)
LAYER = 5
LAUNCHES = 4
HOST_RECORDS = 2
WAIT_SECONDS = 0.5


class Ring:
    """A ring in this process."""

    def __init__(self, launches: int = LAUNCHES) -> None:
        self.launches = launches
        self.memory = aligned_zeros(flight_bytes(launches, HOST_RECORDS))
        self.address = self.memory.data_ptr()


@attrs.frozen
class Record:
    clock: int
    event: FlightEvent
    epoch: int
    site: Site
    layer: int
    peer: int
    block: int
    detail: int


def records(ring: Ring) -> list[Record]:
    """Every record of the ring, by clock; each checks, is where it belongs, and nothing is written elsewhere."""
    data = bytes(ring.memory.numpy().tobytes())
    found = []
    for offset in range(FLIGHT_HEADER_BYTES, flight_host_offset(ring.launches), FLIGHT_RECORD_BYTES):
        clock, where, what, check = struct.unpack_from("<4Q", data, offset)
        if not (clock or where or what or check):
            continue
        assert flight_check(clock, where, what) == check
        epoch, word = where & 0xFFFFFFFF, where >> 32
        record = Record(
            clock,
            FlightEvent(what & 0xFF),
            epoch,
            Site(site_word_site(word)),
            site_word_layer(word),
            site_word_peer(word),
            what >> 8 & 0xFFFFFF,
            what >> 32,
        )
        assert offset == flight_launch_record(ring.launches, epoch, record.event, record.site.value)
        found.append(record)
    assert not any(data[:FLIGHT_HEADER_BYTES])
    assert not any(data[flight_host_offset(ring.launches) :])
    return sorted(found, key=lambda record: record.clock)


def steady(found: Sequence[Record]) -> list[tuple[FlightEvent, Site, int]]:
    """What a launch writes whether or not it has to wait: event, site and detail, by clock."""
    always = {(FlightEvent.DONE, Site.REDUCE), (FlightEvent.DONE, Site.HANDSHAKE)}
    return [
        (r.event, r.site, r.detail) for r in found if r.event not in (FlightEvent.WAIT, FlightEvent.DONE) or (r.event, r.site) in always
    ]


@pytest.fixture
def rings() -> tuple[Ring, Ring]:
    return Ring(), Ring()


@pytest.fixture
def inputs(generator: torch.Generator) -> LayerInputs:
    return random_inputs(SHAPE, 2, generator)


@pytest.fixture
def ranks(rings: tuple[Ring, Ring]) -> Iterator[ThreadRanks]:
    with ThreadRanks(SHAPE, flight=rings) as running:
        yield running


@pytest.fixture
def hasty(rings: tuple[Ring, Ring]) -> Iterator[ThreadRanks]:
    """Ranks whose waits are meant to run out. One block: its first thread is the first that waits, and the first that gives up."""
    with ThreadRanks(SHAPE, grid=1, wait_seconds=WAIT_SECONDS, library=hooked_library(), flight=rings) as running:
        yield running


CLEAN = [
    (FlightEvent.LAUNCH, Site.HOST, 0),
    (FlightEvent.DONE, Site.REDUCE, 0),
    (FlightEvent.DOWN, Site.HOST, 0),
    (FlightEvent.END, Site.HOST, 0),
]
HANDSHAKE = [(FlightEvent.FLAG, Site.HANDSHAKE, 0), (FlightEvent.DONE, Site.HANDSHAKE, 0)]


@pytest.mark.parametrize("handshake", [False, True])
def test_a_launch_records_its_way_in_order(
    ranks: ThreadRanks, rings: tuple[Ring, Ring], inputs: LayerInputs, generator: torch.Generator, handshake: bool
) -> None:
    launches = ranks.launches(random_weights(SHAPE, ExpertFormat.BF16, generator), layer=LAYER)
    for _ in range(2):
        ranks.run(launches, inputs, handshake=handshake)
    for rank, ring in enumerate(rings):
        found = records(ring)
        for epoch in range(2):
            own = [record for record in found if record.epoch == epoch]
            assert steady(own) == CLEAN + (HANDSHAKE if handshake else [])
            assert {(record.layer, record.block) for record in own} == {(LAYER, 0)}
            # A wait's end has a begin before it; what is waited for on a peer names it.
            for wait in (record for record in own if record.event is FlightEvent.WAIT):
                done = next(record for record in own if (record.event, record.site) == (FlightEvent.DONE, wait.site))
                assert wait.clock <= done.clock
                assert done.detail == 0
                assert wait.peer in ((0, 1) if wait.site in (Site.REDUCE, Site.FINAL, Site.HANDSHAKE) else (-1,))
        # Everything that a peer needs begins before the peer can have it.
        other = records(rings[1 - rank])
        for epoch in range(2):
            clock = {(r.event, r.site): r.clock for r in found if r.epoch == epoch}
            theirs = {(r.event, r.site): r.clock for r in other if r.epoch == epoch}
            assert clock[FlightEvent.LAUNCH, Site.HOST] <= theirs[FlightEvent.DONE, Site.REDUCE]
            assert clock[FlightEvent.DOWN, Site.HOST] <= theirs[FlightEvent.END, Site.HOST]


def test_recording_changes_no_bit(inputs: LayerInputs, generator: torch.Generator, rings: tuple[Ring, Ring]) -> None:
    weights = random_weights(SHAPE, ExpertFormat.BF16, generator)
    outputs = []
    for flight in (None, rings):
        with ThreadRanks(SHAPE, flight=flight) as ranks:
            outputs.append(ranks.run(ranks.launches(weights), inputs))
    for (out, residual), (other_out, other_residual) in zip(*outputs, strict=True):
        assert torch.equal(out, other_out)
        assert torch.equal(residual, other_residual)
    assert records(rings[0])


def test_a_ring_keeps_the_last_launches(
    ranks: ThreadRanks, rings: tuple[Ring, Ring], inputs: LayerInputs, generator: torch.Generator
) -> None:
    launches = ranks.launches(random_weights(SHAPE, ExpertFormat.BF16, generator))
    for _ in range(LAUNCHES + 2):
        ranks.run(launches, inputs, handshake=False)
    begun = [record.epoch for record in records(rings[0]) if record.event is FlightEvent.LAUNCH]
    assert begun == list(range(2, LAUNCHES + 2))


def test_a_rank_that_waits_in_vain_records_for_whom(
    hasty: ThreadRanks, rings: tuple[Ring, Ring], inputs: LayerInputs, generator: torch.Generator
) -> None:
    launches = hasty.launches(random_weights(SHAPE, ExpertFormat.BF16, generator), layer=LAYER)
    hasty.run(launches, inputs, ranks=(0,))
    found = records(rings[0])
    assert records(rings[1]) == []
    by_event = {(record.event, record.site): record for record in found}
    wait, gave_up = by_event[FlightEvent.WAIT, Site.REDUCE], by_event[FlightEvent.GAVE_UP, Site.REDUCE]
    assert (wait.peer, wait.layer, wait.epoch) == (gave_up.peer, gave_up.layer, gave_up.epoch) == (1, LAYER, 0)
    assert gave_up.detail == round(WAIT_SECONDS * 1e6)
    assert gave_up.clock - wait.clock >= WAIT_SECONDS * 1e9
    assert steady(found) == [
        (FlightEvent.LAUNCH, Site.HOST, 0),
        (FlightEvent.GAVE_UP, Site.REDUCE, round(WAIT_SECONDS * 1e6)),
        (FlightEvent.DONE, Site.REDUCE, FLIGHT_LEFT),
        (FlightEvent.END, Site.HOST, FLIGHT_LEFT),
        (FlightEvent.FLAG, Site.HANDSHAKE, 1),
        (FlightEvent.DONE, Site.HANDSHAKE, FLIGHT_LEFT),
    ]
    # The next launch does not begin: it leaves the records of the one that failed alone, but for the handshake's.
    hasty.run(launches, inputs, ranks=(0,))
    later = records(rings[0])
    assert [r for r in later if r.site is not Site.HANDSHAKE] == [r for r in found if r.site is not Site.HANDSHAKE]


@pytest.mark.parametrize(("site", "peer"), [(Site.FINAL, 1), (Site.HANDSHAKE, 1), (Site.NORM, -1), (Site.TABLE, -1)])
def test_a_wait_that_does_not_end_is_recorded_as_left(
    hasty: ThreadRanks, rings: tuple[Ring, Ring], inputs: LayerInputs, generator: torch.Generator, site: Site, peer: int
) -> None:
    """A rank keeps back what a site waits for: its peers miss it there, or it misses it itself."""
    launches = hasty.launches(random_weights(SHAPE, ExpertFormat.BF16, generator))
    hasty.withhold(1, site)
    hasty.run(launches, inputs)
    found = [records(ring) for ring in rings]
    # Which rank's bound runs out first is the scheduler's choice; that one of them waits here, and leaves, is not.
    assert any(record.event is FlightEvent.GAVE_UP for own in found for record in own)
    waited = [own for own in found if (FlightEvent.WAIT, site, peer) in {(record.event, record.site, record.peer) for record in own}]
    assert waited
    for own in waited:
        assert [record.detail for record in own if (record.event, record.site) == (FlightEvent.DONE, site)] == [FLIGHT_LEFT]


def test_a_peer_that_reports_its_failure_is_recorded(
    hasty: ThreadRanks, rings: tuple[Ring, Ring], inputs: LayerInputs, generator: torch.Generator
) -> None:
    launches = hasty.launches(random_weights(SHAPE, ExpertFormat.BF16, generator))
    hasty.channels[1].inject_fault(1)
    hasty.run(launches, inputs)
    failed = records(rings[1])
    assert [r.site for r in failed if r.event is FlightEvent.GAVE_UP] == [Site.INJECT]
    assert [r.detail for r in failed if r.event is FlightEvent.FLAG] == [1]
    seen = [r for r in records(rings[0]) if (r.event, r.site) == (FlightEvent.DONE, Site.HANDSHAKE)]
    assert seen[0].detail in (FLIGHT_LEFT, FLIGHT_PEER_FAILED)


@pytest.mark.parametrize(("launches", "shift"), [(0, 0), (1, 4)])
def test_a_ring_that_cannot_be_written_is_refused(launches: int, shift: int) -> None:
    ring = Ring(1)
    ring.launches = launches
    ring.address += shift
    buffers = [aligned_zeros(SHAPE.peer_layout.total_bytes) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="flight ring at 0x"):
        FfnChannel(SHAPE, InProcessPeers(buffers, 0), grid=1, flight=ring)
