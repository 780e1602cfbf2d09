"""What each rank tells the API server: a small board in shared memory, written by the worker, read where /metrics is served.

vLLM shows a worker's own Prometheus counters only in its multi-process mode, which must be chosen before any metric exists. A board
needs no such choice. It is one page in ``/dev/shm``, named like every segment of m3 (so that a dead owner's is reaped) with the label
``status_INSTANCE_RANK``, and holds int64 words::

    0       format (STATUS_FORMAT)
    1       sequence: odd while the worker writes; a reader that sees it odd or changed reads again
    2...    the fields of RankStatus, in order
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from pathlib import Path

import attrs
import structlog

from m3_comm.processes import ProcessIdentity
from m3_comm.transports.segments import DEFAULT_DIRECTORY, SegmentName, segments
from m3_core.errors import ResourceError

log = structlog.get_logger(__name__)

STATUS_FORMAT = 0x6D33_0001
BOARD_BYTES = mmap.PAGESIZE
_READ_ATTEMPTS = 100
_WORD = struct.Struct("<q")
_LABEL = re.compile(r"status_(?P<instance>[0-9a-zA-Z]+)_(?P<rank>[0-9]+)")


@attrs.frozen
class RankStatus:
    """Counts and state of one rank. Every field is an int64 word on the board.

    Attributes:
        rank: rank in the tensor-parallel group.
        world_size: ranks of the group.
        fused_steps: steps that ran the fused launches.
        stock_steps: steps that ran the stock layers.
        launches: fused launches made by the host, all layers together.
        outputs: sampled steps.
        resets: epoch resets.
        epoch: launches since the last reset, as the device counts them.
        fault: whether the fault word is set (0 or 1); then the next three say more.
        fault_rank: the rank that failed.
        fault_epoch: the epoch at which it failed, -1 for a host abort.
        fault_site: the site's number.
    """

    rank: int
    world_size: int
    fused_steps: int = 0
    stock_steps: int = 0
    launches: int = 0
    outputs: int = 0
    resets: int = 0
    epoch: int = 0
    fault: int = 0
    fault_rank: int = 0
    fault_epoch: int = 0
    fault_site: int = 0


_FIELDS = len(attrs.fields(RankStatus))
_WORDS = struct.Struct(f"<{_FIELDS}q")
_SEQUENCE_OFFSET = _WORD.size
_FIELDS_OFFSET = 2 * _WORD.size


def instance_label(instance: str) -> str:
    """The letters and digits of a vLLM instance id, which a segment's label can hold."""
    return re.sub(r"[^0-9a-zA-Z]", "", instance) or "0"


def board_instance(instance_id: str, engine_index: int) -> str:
    """What the boards of one engine (of a data-parallel vLLM instance) share."""
    return f"{instance_label(instance_id)}e{engine_index}"


class StatusBoard:
    """The worker's side. One writer, any number of readers.

    Args:
        instance: of ``board_instance``, the same in the API server and in the workers.
        rank: this rank.
        directory: a tmpfs; other than ``/dev/shm`` for tests only.

    Raises:
        ResourceError: the board cannot be made.
    """

    def __init__(self, instance: str, rank: int, directory: Path = DEFAULT_DIRECTORY) -> None:
        name = SegmentName(ProcessIdentity.current(), f"status_{instance_label(instance)}_{rank}", 0)
        self._path = directory / str(name)
        try:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ResourceError(f"status board {self._path} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._descriptor, 0, BOARD_BYTES)
            self._memory = mmap.mmap(self._descriptor, BOARD_BYTES)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise ResourceError(
                f"status board {self._path} of {BOARD_BYTES} bytes: {error.strerror}; start the container with a larger --shm-size"
            ) from error
        self._sequence = 0
        self._closed = False
        _WORD.pack_into(self._memory, 0, STATUS_FORMAT)

    def publish(self, status: RankStatus) -> None:
        """Replace what readers see; a few dozen bytes, no system call. Does nothing after ``close``."""
        if self._closed:
            return
        self._sequence += 2
        _WORD.pack_into(self._memory, _SEQUENCE_OFFSET, self._sequence - 1)
        _WORDS.pack_into(self._memory, _FIELDS_OFFSET, *attrs.astuple(status))
        _WORD.pack_into(self._memory, _SEQUENCE_OFFSET, self._sequence)

    def close(self) -> None:
        """Take the name away and unmap; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._path.unlink(missing_ok=True)
        self._memory.close()
        os.close(self._descriptor)


def read_board(path: Path) -> RankStatus | None:
    """Read one board; None if it is gone, of another format, not yet written, or kept changing."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), BOARD_BYTES, access=mmap.ACCESS_READ) as memory:
            for _ in range(_READ_ATTEMPTS):
                before = _WORD.unpack_from(memory, _SEQUENCE_OFFSET)[0]
                fields = _WORDS.unpack_from(memory, _FIELDS_OFFSET)
                after = _WORD.unpack_from(memory, _SEQUENCE_OFFSET)[0]
                if before == after and before % 2 == 0 and before > 0 and _WORD.unpack_from(memory, 0)[0] == STATUS_FORMAT:
                    return RankStatus(*fields)
    except (OSError, ValueError):
        return None
    return None


def read_boards(instance: str, directory: Path = DEFAULT_DIRECTORY) -> tuple[RankStatus, ...]:
    """The boards of one vLLM instance's living workers, by rank."""
    wanted = instance_label(instance)
    found: dict[int, RankStatus] = {}
    for segment in segments(directory):
        match = _LABEL.fullmatch(segment.label)
        if match is None or match["instance"] != wanted or (segment.owner.judgeable and not segment.owner.alive()):
            continue
        status = read_board(directory / str(segment))
        if status is not None:
            found[status.rank] = status
    return tuple(found[rank] for rank in sorted(found))
