"""The flight recorder: a ring of recent events per rank, in memory that every rank maps and that therefore outlives each of them.

A launch writes its own records (see ``m3_core.flight`` for the layout and why it needs neither fence nor atomic); the host adds those
that ``record`` takes. ``dump`` writes the own ring to a file, and those of ranks that cannot do it themselves. ``m3_comm.flight_report``
reads the files.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Collection
from pathlib import Path

import attrs
import structlog

from m3_comm.agreement import joint_stage
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.processes import ProcessIdentity, start_ticks
from m3_comm.transports.base import HostMappingTransport
from m3_comm.transports.shm import ShmTransport
from m3_core.errors import ConfigurationError, ResourceError
from m3_core.faults import Site, site_word
from m3_core.flight import (
    FLIGHT_HEADER_BYTES,
    FLIGHT_RECORD_BYTES,
    FLIGHT_VERSION,
    FlightEvent,
    flight_bytes,
    flight_check,
    flight_host_offset,
    flight_what,
    flight_where,
)
from m3_core.ports import AgreementChannel

log = structlog.get_logger(__name__)

MAGIC = b"m3flight"
FILE_PATTERN = "m3-flight-rank*.bin"
RECORD = struct.Struct("<qQQQ")
DEFAULT_LAUNCHES = 512
DEFAULT_HOST_RECORDS = 1024

_CLOCK_READINGS = 5
_HEADER = struct.Struct("<8sIIiiIIqqqqqqiiQ8s")
_NEXT_HOST_RECORD = struct.Struct("<Q")
_NEXT_HOST_RECORD_OFFSET = FLIGHT_HEADER_BYTES - _NEXT_HOST_RECORD.size


@attrs.frozen
class FlightClock:
    """How the launches' clock relates to the host's monotonic clock: one instant read on both.

    Attributes:
        ticks_per_second: rate of the launches' clock.
        ticks: its reading.
        monotonic_nanoseconds: the host's reading at the same instant.
    """

    ticks_per_second: int = attrs.field(validator=attrs.validators.gt(0))
    ticks: int
    monotonic_nanoseconds: int

    @classmethod
    def host(cls) -> FlightClock:
        """The CPU target's launches read the host's monotonic clock, in nanoseconds."""
        now = time.monotonic_ns()
        return cls(1_000_000_000, now, now)

    @classmethod
    def of_device(cls, device: HostMappingTransport) -> FlightClock:
        """The clock of a device's launches: the reading that took the host the least time, which is at most half of it off.

        A device whose clock cannot be read gets the right rate and a wrong start: the times of its launches are right among
        themselves, and differ from those of host and peers by a constant.
        """
        readings = []
        for _ in range(_CLOCK_READINGS):
            before = time.monotonic_ns()
            ticks = device.read_clock()
            after = time.monotonic_ns()
            if ticks is None:
                return cls(device.ticks_per_second, 0, before)
            readings.append((after - before, ticks, (before + after) // 2))
        _, ticks, now = min(readings)
        return cls(device.ticks_per_second, ticks, now)

    def nanoseconds(self, ticks: int) -> int:
        """A reading of the launches' clock in nanoseconds of the host's monotonic clock."""
        return self.monotonic_nanoseconds + (ticks - self.ticks) * 1_000_000_000 // self.ticks_per_second


@attrs.frozen
class FlightHeader:
    """The first bytes of a ring and of a dumped file.

    Attributes:
        rank: whose ring it is.
        world_size: ranks that record.
        launches: launches kept.
        host_records: host records kept.
        clock: of the launch records.
        wall_nanoseconds: Unix time at the clock's instant.
        process: the rank's process id.
        process_start: its start time in clock ticks since boot.
        boot: which boot; monotonic clocks of different boots cannot be compared.
        dumped_by: the rank that wrote the file, -1 in the ring itself.
        alive: whether the rank's process lived when the file was written.
    """

    rank: int
    world_size: int
    launches: int
    host_records: int
    clock: FlightClock
    wall_nanoseconds: int
    process: int
    process_start: int
    boot: str
    dumped_by: int = -1
    alive: bool = True

    @property
    def ring_identity(self) -> tuple[object, ...]:
        """What is the same in every copy of one ring."""
        return self.rank, self.process, self.process_start, self.launches, self.host_records, self.clock

    @property
    def nbytes(self) -> int:
        """Size of the ring."""
        return flight_bytes(self.launches, self.host_records)

    def encode(self) -> bytes:
        """The bytes at the start of the ring, without the host's counter."""
        return _HEADER.pack(
            MAGIC,
            FLIGHT_VERSION,
            FLIGHT_HEADER_BYTES,
            self.rank,
            self.world_size,
            self.launches,
            self.host_records,
            self.clock.ticks_per_second,
            self.clock.ticks,
            self.clock.monotonic_nanoseconds,
            self.wall_nanoseconds,
            self.process,
            self.process_start,
            self.dumped_by,
            self.alive,
            0,
            self.boot.encode(),
        )

    @classmethod
    def decode(cls, data: bytes, source: str) -> FlightHeader:
        """Read a ring's first bytes.

        Args:
            data: a whole ring.
            source: where it is from, for the error.

        Raises:
            ConfigurationError: it is no flight record, of another version, or cut short.
        """
        if len(data) < FLIGHT_HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
            raise ConfigurationError(f"{source}: no flight record of m3 (it does not begin with {MAGIC.decode()!r})")
        (
            _,
            version,
            header_bytes,
            rank,
            world_size,
            launches,
            host_records,
            rate,
            ticks,
            monotonic,
            wall,
            process,
            start,
            by,
            alive,
            _,
            boot,
        ) = _HEADER.unpack_from(data)
        if (version, header_bytes) != (FLIGHT_VERSION, FLIGHT_HEADER_BYTES):
            raise ConfigurationError(
                f"{source}: flight record of version {version}, this m3 reads version {FLIGHT_VERSION}: read it with the m3 that wrote it"
            )
        if launches < 1 or host_records < 1 or rate < 1 or len(data) != flight_bytes(launches, host_records):
            raise ConfigurationError(
                f"{source}: flight record of {len(data)} bytes does not fit its header ({launches} launches, {host_records} host records): the file is damaged"
            )
        try:
            boot_text = boot.decode("ascii")
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{source}: the flight record's boot id is {boot!r}, which is no text: the file is damaged") from error
        return cls(
            rank,
            world_size,
            launches,
            host_records,
            FlightClock(rate, ticks, monotonic),
            wall,
            process,
            start,
            boot_text,
            by,
            bool(alive),
        )


class FlightRecorder:
    """This rank's ring and its view of the others'; made by ``create``."""

    def __init__(self, rings: PeerBuffer, header: FlightHeader, device: HostMappingTransport | None) -> None:
        """Wrap mapped rings; ``create`` is the way to make one."""
        self._rings = rings
        self._device = device
        self._device_address = None if device is None else device.map_host(rings.local, rings.nbytes)
        self._header = header
        self._lock = threading.Lock()
        self._recorded = 0

    @classmethod
    def create(
        cls,
        channel: AgreementChannel,
        *,
        launches: int = DEFAULT_LAUNCHES,
        host_records: int = DEFAULT_HOST_RECORDS,
        clock: FlightClock | None = None,
        device: HostMappingTransport | None = None,
    ) -> FlightRecorder:
        """Build the rings of all ranks together.

        Args:
            channel: the ranks.
            launches: launches kept, 1 KiB each.
            host_records: host records kept, 32 bytes each.
            clock: of the launches; if None the device's, or without a device the host's monotonic clock.
            device: whose launches record; None if they run on the host.

        Raises:
            CollectiveError: as ``PeerBuffer.create``, or a device cannot map its ring; nothing is kept.
        """
        # A device's clock is read below: it may fail on one rank alone.
        identity = ProcessIdentity.current()
        header = FlightHeader(
            channel.rank,
            channel.world_size,
            launches,
            host_records,
            clock or FlightClock.host(),
            time.time_ns(),
            identity.process,
            identity.start_ticks,
            identity.boot,
        )
        sizes = {"flight launches": launches, "flight host records": host_records, "flight version": FLIGHT_VERSION}
        rings = PeerBuffer.create(channel, ShmTransport(), header.nbytes, fingerprint=sizes)
        recorders: list[FlightRecorder] = []

        def finish() -> None:
            own = header if device is None or clock is not None else attrs.evolve(header, clock=FlightClock.of_device(device))
            ctypes.memmove(rings.local, own.encode(), _HEADER.size)
            recorders.append(cls(rings, own, device))

        try:
            joint_stage(channel, "flight-recorder/map", finish)
        except BaseException:
            for recorder in recorders:
                recorder.close()
            rings.close()
            raise
        return recorders[0]

    @property
    def address(self) -> int:
        """Address of the own ring as the launches see it; raises ResourceClosed after ``close``."""
        local = self._rings.local
        return local if self._device_address is None else self._device_address

    @property
    def launches(self) -> int:
        """Launches kept."""
        return self._header.launches

    def record(
        self,
        event: FlightEvent,
        *,
        epoch: int = -1,
        site: Site = Site.HOST,
        layer: int | None = None,
        peer: int | None = None,
        detail: int = 0,
    ) -> None:
        """Add an event of the host.

        Args:
            event: what happened; not one that launches write.
            epoch: of the channel, or -1.
            site: where, if the event has a place.
            layer: the layer's index, if one is meant.
            peer: the rank that is meant, if any.
            detail: a number of the event's own, 32 bits.

        Raises:
            ConfigurationError: the event belongs to the launches.
            ResourceClosed: after ``close``.
        """
        if event.of_launch:
            raise ConfigurationError(
                f"flight event {event.name} is written by launches; the host records {[e.name for e in FlightEvent if not e.of_launch]}"
            )
        where = flight_where(epoch, site_word(site.value, -1 if peer is None else peer, -1 if layer is None else layer))
        what = flight_what(event, 0, detail)
        with self._lock:
            clock = time.monotonic_ns()
            slot = self._recorded % self._header.host_records
            address = self._rings.local + flight_host_offset(self._header.launches) + FLIGHT_RECORD_BYTES * slot
            ctypes.memmove(address, RECORD.pack(clock, where, what, flight_check(clock, where, what)), RECORD.size)
            self._recorded += 1
            ctypes.memmove(self._rings.local + _NEXT_HOST_RECORD_OFFSET, _NEXT_HOST_RECORD.pack(self._recorded), _NEXT_HOST_RECORD.size)

    def dump(self, folder: Path, suspects: Collection[int] = ()) -> tuple[Path, ...]:
        """Write the own ring to ``folder``, and copies of the rings of ranks whose processes are gone or that are suspected.

        A rank that hangs writes nothing, so its peers do; every file says whose ring it holds and who wrote it, and a reader takes all of
        them together. A file appears whole or not at all, in the place of an earlier one of the same ring and writer.

        Args:
            folder: made if it is missing.
            suspects: ranks that may not come to write their own, such as the one that a fault waited for.

        Returns:
            The files written, the own one first.

        Raises:
            ResourceError: a file could not be written.
            ResourceClosed: after ``close``.
        """
        me = self._rings.rank
        written = []
        for rank in (me, *(r for r in range(self._rings.world_size) if r != me)):
            data = bytearray(ctypes.string_at(self._rings.addresses[rank], self._header.nbytes))
            try:
                header = FlightHeader.decode(bytes(data), f"ring of rank {rank}")
            except ConfigurationError as error:
                # A peer that died before it wrote its header has recorded nothing.
                log.warning("flight_ring_unreadable", rank=rank, reason=str(error))
                continue
            alive = start_ticks(header.process) == header.process_start
            if rank == me or not alive or rank in suspects:
                data[: _HEADER.size] = attrs.evolve(header, dumped_by=me, alive=alive).encode()
                written.append(_write(folder / file_name(rank, me), bytes(data)))
        log.info("flight_dumped", rank=me, files=[str(path) for path in written])
        return tuple(written)

    def close(self) -> None:
        """Unmap all rings, the device's view of the own one first; does nothing the second time.

        Raises:
            ResourceError: something could not be released; the rest has been.
        """
        if self._rings.closed:
            return
        try:
            if self._device is not None:
                self._device.unmap_host(self._rings.local)
        finally:
            self._rings.close()


def file_name(rank: int, writer: int) -> str:
    """Name of the file that holds ``rank``'s ring as ``writer`` wrote it."""
    return f"m3-flight-rank{rank}.bin" if rank == writer else f"m3-flight-rank{rank}-seen-by-rank{writer}.bin"


def _write(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(f"flight record {path} cannot be written: {error.strerror}") from error
    return path
