from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m3_comm.agreement import LocalAgreement, TorchAgreement
from m3_comm.flight import MAGIC, RECORD, FlightClock, FlightHeader, FlightRecorder
from m3_comm.flight_report import FlightRecord, merge, read
from m3_core.errors import CollectiveError, ConfigurationError, ResourceClosed, ResourceError
from m3_core.faults import Site, site_word
from m3_core.flight import (
    FLIGHT_HEADER_BYTES,
    FLIGHT_LEFT,
    FLIGHT_PEER_FAILED,
    FlightEvent,
    FlightReset,
    flight_check,
    flight_launch_record,
    flight_what,
    flight_where,
)

LAUNCHES = 4


def _launch(
    address: int,
    clock: int,
    event: FlightEvent,
    epoch: int,
    site: Site = Site.HOST,
    layer: int = -1,
    peer: int = -1,
    launches: int = LAUNCHES,
    detail: int = 0,
) -> None:
    """What a launch stores."""
    where, what = flight_where(epoch, site_word(site.value, peer, layer)), flight_what(event, 0, detail)
    offset = flight_launch_record(launches, epoch, event, site.value)
    ctypes.memmove(address + offset, RECORD.pack(clock, where, what, flight_check(clock, where, what)), RECORD.size)


def _ring(
    rank: int, world_size: int = 2, alive: bool = True, boot: str = "01234567", clock: FlightClock | None = None, process: int = 1000
) -> tuple[Any, int]:
    header = FlightHeader(rank, world_size, LAUNCHES, 2, clock or FlightClock(10**9, 0, 0), 0, process + rank, 5, boot, 0, alive)
    memory = ctypes.create_string_buffer(header.encode(), header.nbytes)
    return memory, ctypes.addressof(memory)


def _facts(record: FlightRecord) -> tuple[object, ...]:
    return record.nanoseconds, record.rank, record.event, record.epoch, record.site, record.layer, record.peer


def test_records_of_launch_and_host_come_back(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(LocalAgreement(), launches=LAUNCHES, host_records=2)
    base = recorder._header.clock.ticks
    # Seven launches in a ring of four: the last four stay.
    for epoch in range(7):
        _launch(recorder.address, base + 10 * epoch, FlightEvent.LAUNCH, epoch, layer=3)
        _launch(recorder.address, base + 10 * epoch + 1, FlightEvent.WAIT, epoch, Site.REDUCE, 3)
        _launch(recorder.address, base + 10 * epoch + 2, FlightEvent.DONE, epoch, Site.REDUCE, 3)
        _launch(recorder.address, base + 10 * epoch + 3, FlightEvent.END, epoch, layer=3)
    for step in range(3):
        recorder.record(FlightEvent.STEP_END, epoch=step, detail=100 + step)
    (path,) = recorder.dump(tmp_path)
    recorder.close()
    timeline = read([path])
    launch = [r for r in timeline.records if isinstance(r.event, FlightEvent) and r.event.of_launch]
    host = [r for r in timeline.records if r not in launch]
    start = timeline.headers[0].clock.monotonic_nanoseconds
    assert [_facts(r) for r in launch] == [
        (start + 10 * epoch + i, 0, event, epoch, site, 3, None)
        for epoch in range(3, 7)
        for i, (event, site) in enumerate(
            [
                (FlightEvent.LAUNCH, Site.HOST),
                (FlightEvent.WAIT, Site.REDUCE),
                (FlightEvent.DONE, Site.REDUCE),
                (FlightEvent.END, Site.HOST),
            ]
        )
    ]
    assert [(r.event, r.epoch, r.detail) for r in host] == [(FlightEvent.STEP_END, 1, 101), (FlightEvent.STEP_END, 2, 102)]
    assert (timeline.missing, timeline.damaged, timeline.first_stall()) == ((), {0: 0}, None)
    assert timeline.headers[0].alive
    assert "no stall" in timeline.render()
    with pytest.raises(ResourceClosed):
        recorder.record(FlightEvent.ABORT)


def test_no_two_events_of_a_launch_share_a_place() -> None:
    sites = [site for site in Site if site.is_wait]
    places = [flight_launch_record(LAUNCHES, 1, event, site.value) for event in (FlightEvent.WAIT, FlightEvent.DONE) for site in sites]
    once = [event for event in FlightEvent if event.of_launch and event not in (FlightEvent.WAIT, FlightEvent.DONE)]
    places += [flight_launch_record(LAUNCHES, 1, event, Site.UP.value) for event in once]
    assert len(set(places)) == len(places)
    assert min(places) == flight_launch_record(LAUNCHES, 0, FlightEvent.LAUNCH, 0) + 1024
    assert max(places) < flight_launch_record(LAUNCHES, 2, FlightEvent.LAUNCH, 0)


def test_a_half_written_record_is_counted_and_left_out() -> None:
    memory, address = _ring(0)
    _launch(address, 5, FlightEvent.LAUNCH, 1)
    _launch(address, 6, FlightEvent.END, 1)
    offset = flight_launch_record(LAUNCHES, 1, FlightEvent.END, 0)
    for word in range(4):
        data = bytearray(memory.raw)
        # One word of the record that another launch left in the same place.
        data[offset + 8 * word : offset + 8 * word + 8] = (12345 + word).to_bytes(8, "little")
        timeline = merge([("ring", bytes(data))])
        assert [r.event for r in timeline.records] == [FlightEvent.LAUNCH]
        assert timeline.damaged == {0: 1}
    # A whole record in the wrong place is none either.
    data = bytearray(memory.raw)
    data[offset + 32 : offset + 64] = data[offset : offset + 32]
    assert merge([("ring", bytes(data))]).damaged == {0: 1}


def test_clocks_of_other_rates_are_brought_together() -> None:
    fast, fast_address = _ring(0, clock=FlightClock(10**9, 1_000, 5_000))
    slow, slow_address = _ring(1, clock=FlightClock(10**8, 70, 5_000))
    _launch(fast_address, 1_100, FlightEvent.LAUNCH, 0)
    _launch(slow_address, 75, FlightEvent.LAUNCH, 0)
    timeline = merge([("fast", fast.raw), ("slow", slow.raw)])
    assert [(r.rank, r.nanoseconds) for r in timeline.records] == [(1, 5_050), (0, 5_100)]


def test_the_first_stall_names_rank_site_and_the_peers_last_act() -> None:
    first, a = _ring(0, 3)
    second, b = _ring(1, 3)
    third, c = _ring(2, 3, alive=False)
    for address, start in ((a, 100), (b, 110), (c, 120)):
        _launch(address, start, FlightEvent.LAUNCH, 0, layer=3)
        _launch(address, start + 1, FlightEvent.WAIT, 0, Site.REDUCE, 3)
        _launch(address, start + 50, FlightEvent.DONE, 0, Site.REDUCE, 3)
        _launch(address, start + 60, FlightEvent.END, 0, layer=3)
    # Rank 2 is gone before epoch 1; rank 0 waits for it, gives up; rank 1 waits later and its wait is ended by the fault.
    for address, start in ((a, 1_000), (b, 2_000)):
        _launch(address, start, FlightEvent.LAUNCH, 1, layer=4)
        _launch(address, start + 5, FlightEvent.WAIT, 1, Site.REDUCE, 4)
    _launch(a, 3_000_001_005, FlightEvent.GAVE_UP, 1, Site.REDUCE, 4, peer=2, detail=3_000_000)
    for address in (a, b):
        _launch(address, 3_000_002_000, FlightEvent.DONE, 1, Site.REDUCE, 4, detail=FLIGHT_LEFT)
        _launch(address, 3_000_003_000, FlightEvent.END, 1, layer=4, detail=FLIGHT_LEFT)
    # Not what it would have done had it lived to see the fault.
    _launch(c, 3_000_001_100, FlightEvent.FLAG, 1, layer=5)
    timeline = merge([("0", first.raw), ("1", second.raw), ("2", third.raw)])
    assert [(s.wait.rank, s.wait.nanoseconds, s.peer) for s in timeline.stalls()] == [(0, 1_005, 2), (1, 2_005, None)]
    stall = timeline.first_stall()
    assert stall is not None
    assert stall.describe() == (
        f"first stall: rank 0 at REDUCE ({Site.REDUCE.waited_for}) of rank 2, epoch 1, layer 4; it gave up after 3.000000 s. "
        "The process of rank 2 was gone when the record was written. Last of rank 2: end, epoch 0, layer 3, 0.000001 s before the wait began."
    )
    assert timeline.render().splitlines()[-1] == stall.describe()
    # Without its file, rank 2 is named all the same.
    partial = merge([("0", first.raw), ("1", second.raw)])
    assert partial.missing == (2,)
    assert "no file of rank 2" in partial.render()
    assert "There is no record of rank 2" in partial.first_stall().describe()  # type: ignore[union-attr]


def test_a_wait_of_another_thread_than_the_recording_one_is_known_from_its_giving_up() -> None:
    rings = [_ring(rank) for rank in range(2)]
    a = rings[0][1]
    _launch(a, 1_000, FlightEvent.LAUNCH, 4, layer=6)
    # The first block had all it needed from its peer, and waits for its own rank's others.
    _launch(a, 900_000, FlightEvent.WAIT, 4, Site.ROUTER, 6)
    _launch(a, 2_000_001_500, FlightEvent.GAVE_UP, 4, Site.REDUCE, 6, peer=1, detail=2_000_000)
    _launch(a, 2_000_001_600, FlightEvent.DONE, 4, Site.ROUTER, 6, detail=FLIGHT_LEFT)
    stall = merge([(str(i), memory.raw) for i, (memory, _) in enumerate(rings)]).first_stall()
    assert stall is not None
    assert (stall.wait.rank, stall.wait.site, stall.wait.layer, stall.wait.nanoseconds, stall.peer) == (0, Site.REDUCE, 6, 1_500, 1)
    # Even if the other wait began first.
    _launch(a, 1_100, FlightEvent.WAIT, 4, Site.ROUTER, 6)
    stall = merge([(str(i), memory.raw) for i, (memory, _) in enumerate(rings)]).first_stall()
    assert stall is not None
    assert (stall.wait.site, stall.peer) == (Site.REDUCE, 1)


def test_a_failure_without_a_wait_is_named() -> None:
    memory, address = _ring(1)
    _launch(address, 1_000, FlightEvent.GAVE_UP, 126_976, Site.WRAP, 9, detail=2_000_000)
    timeline = merge([("1", memory.raw)])
    assert timeline.first_stall() is None
    assert timeline.render().splitlines()[-2:] == [
        f"first failure that was no wait: rank 1, gave up, WRAP ({Site.WRAP.waited_for}), epoch 126976, layer 9, bound of waits 2 s",
        "no stall: every wait in the record ended",
    ]


def test_copies_of_one_ring_are_taken_together() -> None:
    memory, address = _ring(0)
    _launch(address, 10, FlightEvent.LAUNCH, 0)
    early = bytearray(memory.raw)
    # Copied while a record was being written.
    early[flight_launch_record(LAUNCHES, 0, FlightEvent.END, 0)] = 1
    _launch(address, 20, FlightEvent.END, 0)
    for epoch in range(1, LAUNCHES + 1):
        _launch(address, 100 * epoch, FlightEvent.LAUNCH, epoch)
    timeline = merge([("early", bytes(early)), ("late", memory.raw)])
    assert [(r.event, r.epoch) for r in timeline.records] == [
        (FlightEvent.LAUNCH, 0),
        (FlightEvent.END, 0),
        *((FlightEvent.LAUNCH, epoch) for epoch in range(1, LAUNCHES + 1)),
    ]
    assert timeline.damaged == {0: 0}


@pytest.mark.parametrize(("event", "detail", "text"), [
    (FlightEvent.DONE, FLIGHT_LEFT, "left because of a fault"),
    (FlightEvent.DONE, FLIGHT_PEER_FAILED, "a peer failed"),
    (FlightEvent.END, FLIGHT_LEFT, "failed"),
    (FlightEvent.FLAG, 0, "clear"),
    (FlightEvent.FLAG, 1, "failed"),
    (FlightEvent.STEP_BEGIN, 7, "step 7"),
    (FlightEvent.RESET, FlightReset.AGREED, "agreed"),
    (FlightEvent.RESET, 99, "moment 99"),
    (FlightEvent.CLOSE, 3, "detail 3"),
])  # fmt: skip
def test_details_are_put_into_words(event: FlightEvent, detail: int, text: str) -> None:
    assert FlightRecord(0, 0, event, 1, Site.HANDSHAKE, None, None, 0, detail).describe().endswith(f", {text}")


def test_the_chain_of_waits_is_followed_to_its_end() -> None:
    rings = [_ring(rank, 3) for rank in range(3)]
    # Rank 0 waits for 1, 1 for 2, 2 for its own blocks; 0 began first.
    for (_, address), start, peer in zip(rings, (100, 200, 300), (1, 2, -1), strict=True):
        _launch(address, start, FlightEvent.LAUNCH, 7)
        _launch(address, start + 1, FlightEvent.WAIT, 7, Site.FINAL if peer >= 0 else Site.DOWN, 5, peer)
    stall = merge([(str(i), memory.raw) for i, (memory, _) in enumerate(rings)]).first_stall()
    assert stall is not None
    assert (stall.wait.rank, stall.wait.site, stall.peer) == (2, Site.DOWN, None)
    assert "its own blocks" in stall.describe()
    # Two ranks that wait for each other: the one that began first.
    _launch(rings[2][1], 301, FlightEvent.WAIT, 7, Site.DOWN, 5, 1)
    stall = merge([(str(i), memory.raw) for i, (memory, _) in enumerate(rings)]).first_stall()
    assert stall is not None
    assert stall.wait.rank == 2


def test_a_later_launch_proves_that_a_wait_ended() -> None:
    memory, address = _ring(0)
    _launch(address, 10, FlightEvent.WAIT, 1, Site.REDUCE)
    assert merge([("0", memory.raw)]).first_stall() is not None
    _launch(address, 20, FlightEvent.LAUNCH, 2)
    assert merge([("0", memory.raw)]).first_stall() is None


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    ring = _ring(0)[0].raw
    for rings, message in [
        ([], "no flight record given"),
        ([("a", ring), ("b", _ring(0, process=77)[0].raw)], r"b and a are of different runs of rank 0 \(processes 77 and 1000\)"),
        ([("a", ring), ("b", _ring(1, boot="76543210")[0].raw)], "of boot 76543210 with 2 ranks, a of boot 01234567"),
        ([("a", ring), ("b", _ring(1, 4)[0].raw)], "with 4 ranks, a of boot 01234567 with 2"),
        ([("a", b"text")], "a: no flight record"),
        ([("a", ring[:-1])], "does not fit its header"),
        ([("a", ring.replace(b"01234567", b"0123\xff567", 1))], "boot id is .* which is no text"),
        ([("a", MAGIC + b"\x09" + ring[len(MAGIC) + 1 :])], "version 9"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            merge(rings)
    with pytest.raises(ConfigurationError, match="absent: cannot be read"):
        read([tmp_path / "absent"])
    with pytest.raises(ConfigurationError, match="this folder has no flight record"):
        read([tmp_path])


def test_the_host_cannot_record_a_launch() -> None:
    recorder = FlightRecorder.create(LocalAgreement(), launches=1, host_records=1)
    with pytest.raises(ConfigurationError, match="WAIT is written by launches"):
        recorder.record(FlightEvent.WAIT)
    recorder.close()


def test_a_dump_that_fails_says_where(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(LocalAgreement(), launches=1, host_records=1)
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"m3-flight-rank0\.bin cannot be written: File exists"):
        recorder.dump(tmp_path / "file")
    recorder.close()


def _dies(channel: TorchAgreement, folder: Path, victim: int) -> list[str]:
    recorder = FlightRecorder.create(channel, launches=LAUNCHES, host_records=8)
    base = recorder._header.clock.ticks
    _launch(recorder.address, base + 1000 * (channel.rank + 1), FlightEvent.LAUNCH, 0, layer=5)
    recorder.record(FlightEvent.STEP_BEGIN, detail=40 + channel.rank)
    channel.agree("recorded", None)
    if channel.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match=f"rank {victim}"):
        channel.agree("next", None)
    files = [path.name for path in recorder.dump(folder)]
    assert [path.name for path in recorder.dump(folder)] == files
    # The survivors stay until all have written: a rank that left would be written as gone.
    with pytest.raises(CollectiveError, match=f"rank {victim}"):
        channel.agree("written", None)
    return files


@pytest.mark.parametrize("world_size", [2, 4])
def test_survivors_write_the_record_of_a_rank_that_was_killed(ranks: Any, tmp_path: Path, world_size: int) -> None:
    victim = 1
    outcomes = ranks(world_size, _dies, tmp_path, victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.trace
        seen = f"m3-flight-rank{victim}-seen-by-rank{rank}.bin"
        assert outcome.value == [f"m3-flight-rank{rank}.bin", seen]
        assert FlightHeader.decode((tmp_path / seen).read_bytes(), seen).dumped_by == rank
    # A survivor's own files, and all together.
    own = [tmp_path / "m3-flight-rank0.bin", tmp_path / f"m3-flight-rank{victim}-seen-by-rank0.bin"]
    for paths in (own, [tmp_path]):
        timeline = read(paths)
        assert [rank for rank, header in sorted(timeline.headers.items()) if not header.alive] == [victim]
        assert [(r.event, r.detail) for r in timeline.records if r.rank == victim and r.detail] == [(FlightEvent.STEP_BEGIN, 40 + victim)]
        assert [r.layer for r in timeline.records if r.rank == victim and r.event == FlightEvent.LAUNCH] == [5]


def _hangs(channel: TorchAgreement, folder: Path, suspect: int) -> list[str]:
    recorder = FlightRecorder.create(channel, launches=LAUNCHES, host_records=8)
    recorder.record(FlightEvent.STEP_BEGIN, detail=60 + channel.rank)
    channel.agree("recorded", None)
    files = [] if channel.rank == suspect else [path.name for path in recorder.dump(folder, suspects=[suspect])]
    channel.agree("written", None)
    return files


def test_a_suspect_that_lives_but_does_not_write_is_written_by_its_peers(ranks: Any, tmp_path: Path) -> None:
    outcomes = ranks(3, _hangs, tmp_path, 2)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].value == ["m3-flight-rank0.bin", "m3-flight-rank2-seen-by-rank0.bin"]
    timeline = read([tmp_path])
    assert [(r.rank, r.detail) for r in sorted(timeline.records, key=lambda r: r.rank)] == [(0, 60), (1, 61), (2, 62)]
    assert all(header.alive for header in timeline.headers.values())


CXX = """
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "m3/protocol.h"
using namespace m3::protocol;
static void store(unsigned char* ring, int launches, long long clock, int event, int epoch, int site, int layer, int peer) {
  auto* record = reinterpret_cast<volatile Word64*>(ring + flight_launch_record(launches, epoch, event, site));
  const Word64 where = flight_where(epoch, site_word(site, peer, layer)), what = flight_what(event, 0, 0);
  record[0] = Word64(clock); record[1] = where; record[2] = what; record[3] = flight_check(Word64(clock), where, what);
}
int main(int argc, char** argv) {
  const int launches = 4;
  std::vector<unsigned char> ring(flight_bytes(launches, 2));
  std::FILE* file = std::fopen(argv[1], "r+b");
  if (argc != 2 || !file || std::fread(ring.data(), 1, ring.size(), file) != ring.size()) return 1;
  for (int epoch = 100000; epoch < 100006; ++epoch) {
    store(ring.data(), launches, 10LL * epoch, FLIGHT_LAUNCH, epoch, 0, 7, -1);
    store(ring.data(), launches, 10LL * epoch + 1, FLIGHT_WAIT, epoch, 1, 7, -1);
    if (epoch == 100005) store(ring.data(), launches, 10LL * epoch + 9, FLIGHT_GAVE_UP, epoch, 1, 7, 1);
    else store(ring.data(), launches, 10LL * epoch + 2, FLIGHT_DONE, epoch, 1, 7, -1);
  }
  std::rewind(file);
  return std::fwrite(ring.data(), 1, ring.size(), file) == ring.size() && std::fclose(file) == 0 ? 0 : 1;
}
"""


def test_what_cxx_writes_by_the_generated_header_is_read(tmp_path: Path) -> None:
    include = Path(__file__).parents[2] / "m3-kernels" / "include"
    (tmp_path / "writer.cpp").write_text(CXX)
    subprocess.run(["g++", "-std=c++17", f"-I{include}", str(tmp_path / "writer.cpp"), "-o", str(tmp_path / "writer")], check=True)
    ring = tmp_path / "ring.bin"
    ring.write_bytes(_ring(0)[0].raw)
    subprocess.run([str(tmp_path / "writer"), str(ring)], check=True)
    timeline = read([ring])
    assert timeline.damaged == {0: 0}
    assert [r.epoch for r in timeline.records if r.event == FlightEvent.LAUNCH] == [100_002, 100_003, 100_004, 100_005]
    stall = timeline.first_stall()
    assert stall is not None
    assert (stall.wait.epoch, stall.wait.site, stall.wait.layer, stall.peer) == (100_005, Site.REDUCE, 7, 1)


def test_the_ring_begins_after_a_header_of_its_own() -> None:
    assert FlightHeader(0, 1, 1, 1, FlightClock.host(), 0, 1, 1, "01234567").nbytes == FLIGHT_HEADER_BYTES + 32 * 32 + 32
    assert sys.byteorder == "little"
