"""The flight recorder's memory: what a launch and its host write while they run, so that a stall can be read afterwards.

A ring belongs to one channel of one rank::

    0                                   header, FLIGHT_HEADER_BYTES
    FLIGHT_HEADER_BYTES                 launch records: FLIGHT_LAUNCH_RECORDS for each of `launches` epochs
    flight_host_offset(launches)        host records, a ring of their own

A record is four 64-bit words: clock; epoch (low half) and site word (high half, as in a fault); event in bits 0-7, block in bits 8-31 and
a detail in the high half; and the sum of these three and FLIGHT_CHECK, modulo 2^64. The last word takes the place of any order between
the stores: a record that is half old and half new, or never written, does not check. A launch therefore needs no fence and no atomic
for it, and its records' places follow from the epoch, so it keeps no counter either. Indices grow with the epoch until a reset starts
it anew; the clock orders the records of all times.

A place has one writer, or a record could be torn for good: the first thread of the first block writes all records of a launch but
GAVE_UP, which the one thread writes that claimed the rank's fault. Tasks 0 of the stages push and down fall to that block
(``m3_core.work``), so LAUNCH is earlier than anything that a peer can have of this launch, and DOWN earlier than any FFN output that a
peer needs to end its own.

What ``detail`` holds:

========== ====================================================================================================================
DONE       1 if the wait was left because of a fault; of HANDSHAKE, also 2 if a peer's failed flag came
GAVE_UP    the bound of the rank's waits in microseconds
END        1 if the launch failed: the epoch stays
FLAG       1 if the rank published that it failed
STEP_BEGIN the step's number, modulo 2^32; STEP_END likewise
RESET      a ``FlightReset``
========== ====================================================================================================================
"""

from __future__ import annotations

from enum import IntEnum, unique

from m3_core.formulas import Bytes, Word32, Word64, formula

FLIGHT_VERSION = 1
FLIGHT_HEADER_BYTES = 256
FLIGHT_RECORD_BYTES = 32
FLIGHT_RECORD_WORDS = 4
FLIGHT_LAUNCH_RECORDS = 32
FLIGHT_CHECK: Word64 = 0x6D33_F119_47A5_C0DE
FLIGHT_GAVE_UP_ORDINAL = 14
FLIGHT_END_ORDINAL = 15
FLIGHT_DOWN_ORDINAL = 16
FLIGHT_FLAG_ORDINAL = 31

# Events of a launch.
FLIGHT_LAUNCH = 1
FLIGHT_WAIT = 2
FLIGHT_DONE = 3
FLIGHT_GAVE_UP = 4
FLIGHT_END = 5
FLIGHT_DOWN = 6
FLIGHT_FLAG = 7
# Events of the host.
FLIGHT_STEP_BEGIN = 16
FLIGHT_STEP_END = 17
FLIGHT_RESET = 18
FLIGHT_ABORT = 19
FLIGHT_FAULT_SEEN = 20
FLIGHT_CLOSE = 21
# Details.
FLIGHT_LEFT = 1
FLIGHT_PEER_FAILED = 2


@unique
class FlightEvent(IntEnum):
    """What a record says; the value is the number in the record."""

    LAUNCH = FLIGHT_LAUNCH
    """The launch begins, before its first store to a peer."""
    WAIT = FLIGHT_WAIT
    """A wait finds that something has not come; its clock is that of the first look, its peer the missing one of the last."""
    DONE = FLIGHT_DONE
    """A wait that has such a record is over; of REDUCE and HANDSHAKE, any wait."""
    GAVE_UP = FLIGHT_GAVE_UP
    """The rank gives up, and is about to tell every rank."""
    END = FLIGHT_END
    """Every stage is over."""
    DOWN = FLIGHT_DOWN
    """Stage down begins, before its first store to a peer."""
    FLAG = FLIGHT_FLAG
    """The rank publishes its fault flag, at the end of a step."""
    STEP_BEGIN = FLIGHT_STEP_BEGIN
    STEP_END = FLIGHT_STEP_END
    """A step's tokens may be returned."""
    RESET = FLIGHT_RESET
    ABORT = FLIGHT_ABORT
    FAULT_SEEN = FLIGHT_FAULT_SEEN
    """The host finds the fault word set; a step's tokens are dropped."""
    CLOSE = FLIGHT_CLOSE

    @property
    def of_launch(self) -> bool:
        """Whether a launch writes it, and not the host."""
        return self < FLIGHT_STEP_BEGIN


@unique
class FlightReset(IntEnum):
    """How far a reset is: what happened in the reset's table (``m3_core.reset``)."""

    BEGIN = 1
    DRAINED = 2
    AGREED = 3
    CLEARED = 4
    RESUMED = 5
    BROKE = 6
    REFUSED = 7


@formula
def flight_rare_ordinal(event: int) -> int:
    """Place of DOWN and FLAG among the records of their launch; 0, the place of LAUNCH, for any other event."""
    return FLIGHT_DOWN_ORDINAL if event == FLIGHT_DOWN else (FLIGHT_FLAG_ORDINAL if event == FLIGHT_FLAG else 0)


@formula
def flight_once_ordinal(event: int) -> int:
    """Place of an event that a launch has once, among the records of its launch; LAUNCH is the first."""
    return (
        FLIGHT_GAVE_UP_ORDINAL if event == FLIGHT_GAVE_UP else (FLIGHT_END_ORDINAL if event == FLIGHT_END else flight_rare_ordinal(event))
    )


@formula
def flight_ordinal(event: int, site: int) -> int:
    """Place of an event among the records of its launch: the waits' begins at their sites' numbers, their ends 16 further."""
    return site if event == FLIGHT_WAIT else (FLIGHT_LAUNCH_RECORDS // 2 + site if event == FLIGHT_DONE else flight_once_ordinal(event))


@formula
def flight_launch_record(launches: int, epoch: int, event: int, site: int) -> Bytes:
    """Byte offset of a launch's record in a ring that keeps so many ``launches``."""
    return FLIGHT_HEADER_BYTES + Bytes(FLIGHT_RECORD_BYTES) * ((epoch % launches) * FLIGHT_LAUNCH_RECORDS + flight_ordinal(event, site))


@formula
def flight_host_offset(launches: int) -> Bytes:
    """Byte offset of the first host record."""
    return FLIGHT_HEADER_BYTES + Bytes(FLIGHT_RECORD_BYTES) * FLIGHT_LAUNCH_RECORDS * launches


@formula
def flight_bytes(launches: int, host_records: int) -> Bytes:
    """Size of a ring."""
    return flight_host_offset(launches) + Bytes(FLIGHT_RECORD_BYTES) * host_records


@formula
def flight_where(epoch: int, site_word: int) -> Word64:
    """The second word of a record."""
    return Word64(Word32(epoch & 4294967295)) | (Word64(Word32(site_word)) << 32)


@formula
def flight_what(event: int, block: int, detail: int) -> Word64:
    """The third word of a record; ``block`` has 24 bits."""
    return Word64(Word32(event)) | (Word64(Word32(block)) << 8) | (Word64(Word32(detail)) << 32)


@formula
def flight_check(clock: Word64, where: Word64, what: Word64) -> Word64:
    """The fourth word of a record."""
    return (clock + where + what + FLIGHT_CHECK) & 18446744073709551615
