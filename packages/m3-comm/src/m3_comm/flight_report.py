"""Reads dumped flight records: one timeline over all ranks, and the first stall with what its culprit did last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from m3_comm.flight import FILE_PATTERN, RECORD, FlightHeader
from m3_core.errors import ConfigurationError
from m3_core.faults import Site, site_word_layer, site_word_peer, site_word_site
from m3_core.flight import (
    FLIGHT_HEADER_BYTES,
    FLIGHT_PEER_FAILED,
    FLIGHT_RECORD_BYTES,
    FlightEvent,
    FlightReset,
    flight_check,
    flight_host_offset,
    flight_launch_record,
)

DEFAULT_LAST = 200
_WITH_SITE = frozenset((FlightEvent.WAIT, FlightEvent.DONE, FlightEvent.GAVE_UP, FlightEvent.FAULT_SEEN))


@attrs.frozen
class FlightRecord:
    """One event of one rank.

    Attributes:
        nanoseconds: when, on the node's monotonic clock.
        rank: whose.
        event: what; a bare number if this version does not know it.
        epoch: of the launch, -1 for a host event without one.
        site: where, None if unknown.
        layer: the layer's index, None if unknown.
        peer: the rank that is waited for or meant, None if unknown or none.
        block: the block that wrote it.
        detail: a number of the event's own.
    """

    nanoseconds: int
    rank: int
    event: FlightEvent | int
    epoch: int
    site: Site | None
    layer: int | None
    peer: int | None
    block: int
    detail: int

    def describe(self) -> str:
        """The event in words, without rank and time."""
        name = self.event.name if isinstance(self.event, FlightEvent) else f"event {self.event}"
        parts = [name.lower().replace("_", " ")]
        if self.event in _WITH_SITE:
            parts.append(f"{self.site.name} ({self.site.waited_for})" if self.site else "unknown site")
        if self.epoch >= 0:
            parts.append(f"epoch {self.epoch}")
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.peer is not None:
            parts.append(f"peer {self.peer}")
        parts.extend(self._detail())
        return ", ".join(parts)

    def _detail(self) -> Iterator[str]:
        match self.event:
            case FlightEvent.DONE if self.detail:
                yield "a peer failed" if self.detail == FLIGHT_PEER_FAILED else "left because of a fault"
            case FlightEvent.END if self.detail:
                yield "failed"
            case FlightEvent.FLAG:
                yield "failed" if self.detail else "clear"
            case FlightEvent.GAVE_UP:
                yield f"bound of waits {self.detail / 1e6:g} s"
            case FlightEvent.STEP_BEGIN | FlightEvent.STEP_END:
                yield f"step {self.detail}"
            case FlightEvent.RESET:
                known = self.detail in FlightReset._value2member_map_
                yield FlightReset(self.detail).name.lower() if known else f"moment {self.detail}"
            case _ if self.detail:
                yield f"detail {self.detail}"


@attrs.frozen
class Stall:
    """A wait that did not end, and what is known of the rank it waited for.

    Attributes:
        wait: the record of the wait's begin; where another thread than the recording one gave up, made from the record of that.
        peer: the rank that was waited for, None if the rank's own blocks or unknown.
        gave_up: the record of giving up, None if it was still waiting.
        last: the last record of ``peer`` until the wait gave up, None if there is none.
        peer_alive: whether the peer's process lived when its file was written; None without a file of it.
    """

    wait: FlightRecord
    peer: int | None
    gave_up: FlightRecord | None
    last: FlightRecord | None
    peer_alive: bool | None

    def describe(self) -> str:
        """Two or three sentences that name who waited for what, how it ended, and what the other side did last."""
        wait = self.wait
        site = f"{wait.site.name} ({wait.site.waited_for})" if wait.site else "an unknown site"
        where = f"epoch {wait.epoch}" + (f", layer {wait.layer}" if wait.layer is not None else "")
        for_whom = f" of rank {self.peer}" if self.peer is not None else ""
        text = f"first stall: rank {wait.rank} at {site}{for_whom}, {where}; "
        text += (
            f"it gave up after {(self.gave_up.nanoseconds - wait.nanoseconds) / 1e9:.6f} s"
            if self.gave_up
            else "the wait has no end in the record"
        )
        if self.peer is None:
            return text + ". Who was missing is not recorded: its own blocks, or a wait that another rank's fault ended."
        if self.peer_alive is False:
            text += f". The process of rank {self.peer} was gone when the record was written"
        if self.last is None:
            return text + f". There is no record of rank {self.peer} until then: add its file, or it recorded nothing."
        gap = (wait.nanoseconds - self.last.nanoseconds) / 1e9
        when = f"{gap:.6f} s before the wait began" if gap >= 0 else f"{-gap:.6f} s after the wait began"
        return text + f". Last of rank {self.peer}: {self.last.describe()}, {when}."


@attrs.frozen
class Timeline:
    """The records of several ranks in the order of time.

    Attributes:
        records: sorted by time, then rank.
        headers: by rank, of the ranks whose files were given.
        world_size: ranks that recorded.
        damaged: records that did not check, by rank: half written when the ring was copied. Of several copies, the best one counts.
    """

    records: tuple[FlightRecord, ...]
    headers: dict[int, FlightHeader]
    world_size: int
    damaged: dict[int, int]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a file."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.headers)

    def stalls(self) -> tuple[Stall, ...]:
        """Every rank's waits that did not end before the rank's record does, by the time they began."""
        found = []
        for rank in self.headers:
            own = [record for record in self.records if record.rank == rank]
            last_launch = max((r.nanoseconds for r in own if r.event == FlightEvent.LAUNCH), default=-1)
            ended = {(r.epoch, r.site): r.nanoseconds for r in own if r.event == FlightEvent.DONE and r.detail == 0}
            gave_up: dict[tuple[int, Site | None], FlightRecord] = {
                (r.epoch, r.site): r for r in own if r.event == FlightEvent.GAVE_UP and r.site and r.site.is_wait
            }
            waits = {(r.epoch, r.site): r for r in own if r.event == FlightEvent.WAIT}
            for key, end in gave_up.items():
                begin = attrs.evolve(end, event=FlightEvent.WAIT, nanoseconds=end.nanoseconds - 1_000 * end.detail, detail=0)
                waits.setdefault(key, begin)
            # A launch that came later proves that a wait ended, although its record is gone.
            found += [
                self._stall(wait, gave_up.get(key))
                for key, wait in waits.items()
                if wait.nanoseconds >= last_launch and ended.get(key, -1) < wait.nanoseconds
            ]
        return tuple(sorted(found, key=lambda stall: (stall.wait.nanoseconds, stall.wait.rank)))

    def first_stall(self) -> Stall | None:
        """Where the trouble began.

        From the earliest stall, the chain of who waits for whom is followed as long as the rank that is waited for waits itself. Of
        several waits of one rank, that which gave up counts.
        """
        stalls = self.stalls()
        if not stalls:
            return None
        by_rank: dict[int, Stall] = {}
        for stall in sorted(stalls, key=lambda stall: stall.gave_up is None):
            by_rank.setdefault(stall.wait.rank, stall)
        first = stalls[0].wait.rank
        current, visited = by_rank[first], {first}
        while current.peer in by_rank and current.peer not in visited:
            visited.add(current.peer)
            current = by_rank[current.peer]
        return current

    def first_failure(self) -> FlightRecord | None:
        """The first rank that failed by itself, without waiting: its host aborted, its epoch was at the limit, or a fault was injected."""
        for record in self.records:
            if record.event == FlightEvent.ABORT or (record.event == FlightEvent.GAVE_UP and record.site and not record.site.is_wait):
                return record
        return None

    def render(self, last: int = DEFAULT_LAST) -> str:
        """The timeline as text: at most ``last`` records, times in seconds from the first one shown, then the first stall."""
        shown = self.records[-last:] if last > 0 else ()
        lines = [f"{len(self.records)} records of ranks {sorted(self.headers)} of {self.world_size}"]
        lines += [f"no file of rank {rank}" for rank in self.missing]
        lines += [f"rank {rank}: {count} records half written" for rank, count in sorted(self.damaged.items()) if count]
        for record in shown:
            lines.append(f"{(record.nanoseconds - shown[0].nanoseconds) / 1e9:+14.6f} s  rank {record.rank}  {record.describe()}")
        failure = self.first_failure()
        if failure is not None:
            lines.append(f"first failure that was no wait: rank {failure.rank}, {failure.describe()}")
        stall = self.first_stall()
        lines.append(stall.describe() if stall else "no stall: every wait in the record ended")
        return "\n".join(lines)

    def _stall(self, wait: FlightRecord, gave_up: FlightRecord | None) -> Stall:
        peer = gave_up.peer if gave_up is not None and gave_up.peer is not None else wait.peer
        # What the peer did once it knew of the fault explains nothing.
        known = [record for record in self.records if record.rank == peer and (gave_up is None or record.nanoseconds <= gave_up.nanoseconds)]
        last = known[-1] if known else None
        return Stall(wait, peer, gave_up, last, self.headers[peer].alive if peer in self.headers else None)


def read(paths: Iterable[Path]) -> Timeline:
    """Merge dumped files; a folder stands for all flight records in it.

    Raises:
        ConfigurationError: a file cannot be read or is no flight record, a folder has none, or the files are of different runs.
    """
    rings = []
    for path in paths:
        files = sorted(path.glob(FILE_PATTERN)) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"{path}: this folder has no flight record ({FILE_PATTERN})")
        for file in files:
            try:
                rings.append((str(file), file.read_bytes()))
            except OSError as error:
                raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error
    return merge(rings)


def merge(rings: Sequence[tuple[str, bytes]]) -> Timeline:
    """Merge rings given as (where it is from, bytes); several of one rank are taken together. Raises as ``read``."""
    if not rings:
        raise ConfigurationError("no flight record given: name the files that were dumped, at least one a rank")
    headers: dict[int, FlightHeader] = {}
    sources: dict[int, str] = {}
    records: dict[FlightRecord, None] = {}
    damaged: dict[int, int] = {}
    for source, data in rings:
        header = FlightHeader.decode(data, source)
        other = next(iter(headers.values()), header)
        if (header.boot, header.world_size) != (other.boot, other.world_size):
            raise ConfigurationError(
                f"{source} is of boot {header.boot} with {header.world_size} ranks, {sources[other.rank]} of boot {other.boot} with {other.world_size}: pass files of one run"
            )
        known = headers.get(header.rank, header)
        if known.ring_identity != header.ring_identity:
            raise ConfigurationError(
                f"{source} and {sources[header.rank]} are of different runs of rank {header.rank} (processes {header.process} and {known.process}): pass files of one run"
            )
        headers[header.rank] = attrs.evolve(known, alive=known.alive and header.alive)
        sources.setdefault(header.rank, source)
        own = list(_records(header, data))
        whole = [record for record in own if record is not None]
        records.update(dict.fromkeys(whole))
        damaged[header.rank] = min(damaged.get(header.rank, len(own)), len(own) - len(whole))
    return Timeline(
        tuple(sorted(records, key=lambda r: (r.nanoseconds, r.rank))), headers, next(iter(headers.values())).world_size, damaged
    )


def _records(header: FlightHeader, data: bytes) -> Iterator[FlightRecord | None]:
    """Each record that was ever written; None for one that does not check."""
    host_start = flight_host_offset(header.launches)
    for offset in range(FLIGHT_HEADER_BYTES, len(data), FLIGHT_RECORD_BYTES):
        clock, where, what, check = RECORD.unpack_from(data, offset)
        if not (clock or where or what or check):
            continue
        if flight_check(clock, where, what) != check:
            yield None
            continue
        epoch, word = where & 0xFFFFFFFF, where >> 32
        epoch -= (epoch >> 31) << 32
        number, peer, layer = what & 0xFF, site_word_peer(word), site_word_layer(word)
        site = site_word_site(word)
        event = FlightEvent(number) if number in FlightEvent._value2member_map_ else number
        if offset < host_start and offset != flight_launch_record(header.launches, max(epoch, 0), number, site):
            yield None
            continue
        yield FlightRecord(
            header.clock.nanoseconds(clock) if offset < host_start else clock,
            header.rank,
            event,
            epoch,
            Site(site) if site in Site._value2member_map_ else None,
            None if layer < 0 else layer,
            None if peer < 0 else peer,
            what >> 8 & 0xFFFFFF,
            what >> 32,
        )
