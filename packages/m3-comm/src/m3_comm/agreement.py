"""Agreement between the ranks of one node: every rank's payload or reason reaches every rank, or all of them learn who is missing.

One ``gather`` is two rounds of point-to-point messages. In the first, each rank sends its frame to every other one. In the second,
each rank tells the others whether it holds all frames. Without the second round, a rank that dies between two sends would let those
that have its frame go on, into whatever the others do not enter. All waits of a ``gather`` share one deadline: ``timeout`` for the
frames, and ``CONFIRM_SECONDS`` more for the confirmations.

A collective operation would be shorter, but its time-out does not say who is missing. Waits on single peers do.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum

import attrs
import structlog
import torch
import torch.distributed as dist

from m3_comm.processes import start_ticks
from m3_core.agreement import Agreement, Verdict, encode_verdict
from m3_core.errors import CollectiveError, ConfigurationError, ResourceBusy
from m3_core.ports import AgreementChannel

log = structlog.get_logger(__name__)

CONFIRM_SECONDS = 2.0
"""How much longer than its timeout a ``gather`` may take: the bound of the second round, counted from the first one's deadline."""

DEFAULT_TIMEOUT_SECONDS = 60.0
MESSAGE_TAG = 0x6D33
"""Point-to-point tag of all messages, so that they never match another user's of the same group."""

_FRAME_BYTES = 512
_MAGIC = 0x6D33_A6E1
_HEADER = struct.Struct("<IIIIHH")  # magic, sequence, process id, payload bytes, phase bytes, kind
_LENGTH = struct.Struct("<I")
PHASE_BYTES_LIMIT = 128
_INLINE_BYTES = _FRAME_BYTES - _HEADER.size - PHASE_BYTES_LIMIT
_CLOSED_BY_PEER = ("closed by peer", "connection reset", "broken pipe", "connection refused")


class _Kind(IntEnum):
    """What a frame is for."""

    PAYLOAD = 1
    CONFIRM = 2


@attrs.frozen
class _Frame:
    """One decoded frame.

    Attributes:
        inline: the first bytes of the payload; what does not fit follows in a message of its own.
    """

    sequence: int
    process: int
    payload_bytes: int
    phase: str
    kind: _Kind
    inline: bytes

    @property
    def rest_bytes(self) -> int:
        return self.payload_bytes - len(self.inline)

    def encode(self) -> bytes:
        phase = self.phase.encode()
        header = _HEADER.pack(_MAGIC, self.sequence, self.process, self.payload_bytes, len(phase), self.kind)
        return (header + phase + self.inline).ljust(_FRAME_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> _Frame:
        """Raise ``ValueError`` for bytes that are no frame of this version."""
        magic, sequence, process, payload_bytes, phase_bytes, kind = _HEADER.unpack_from(data)
        if magic != _MAGIC or phase_bytes > PHASE_BYTES_LIMIT:
            raise ValueError(
                f"sent bytes that are no agreement frame of this version (they begin {data[:8].hex()}, expected {_MAGIC:#010x})"
            )
        start = _HEADER.size + phase_bytes
        inline = data[start : start + min(payload_bytes, _INLINE_BYTES)]
        return cls(sequence, process, payload_bytes, data[_HEADER.size : start].decode(), _Kind(kind), inline)


class LocalAgreement:
    """The agreement of a rank that has no peers."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def gather(self, phase: str, payload: bytes) -> tuple[bytes, ...]:
        """Return the payload alone."""
        _check_phase(phase)
        return (bytes(payload),)

    def agree(self, phase: str, reason: str | None) -> None:
        """Raise ``CollectiveError`` if there is a reason."""
        agree_over(self, phase, reason)


class TorchAgreement:
    """Agreement over the CPU (gloo) backend of a ``torch.distributed`` process group.

    A wait that runs out closes the group's connections (gloo does that on every time-out): the group cannot be used afterwards, and
    peers that come later learn it at once instead of waiting.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Wrap a group; no message is sent yet.

        Args:
            group: a group with a gloo backend for CPU tensors; all its ranks are on this node.
            timeout: bound of every wait, in seconds.

        Raises:
            ConfigurationError: the group has no gloo backend, or the timeout is not positive.
        """
        if not timeout > 0:
            raise ConfigurationError(
                f"agreement timeout {timeout!r} s: must be above 0 s; pass a bound such as {DEFAULT_TIMEOUT_SECONDS:g}"
            )
        backend = str(dist.get_backend_config(group))
        if "gloo" not in backend:
            raise ConfigurationError(
                f"process group with backend {backend!r}: agreement needs gloo for CPU tensors; pass new_group(backend='gloo')"
            )
        self._group = group
        self._timeout = float(timeout)
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._sequence = 0
        self._processes: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self._world_size

    def gather(self, phase: str, payload: bytes) -> tuple[bytes, ...]:
        """Give every rank's payload to every rank.

        Args:
            phase: what the ranks are at; must be the same on all of them. At most 128 bytes of UTF-8.
            payload: this rank's bytes; lengths may differ between ranks.

        Returns:
            The payloads in rank order.

        Raises:
            CollectiveError: a rank did not come within the timeout, ended, or is in another phase; it is named, with what is known.
            ConfigurationError: the phase's name is empty or too long.
            ResourceBusy: another thread of this process is in a ``gather`` on this channel.
        """
        _check_phase(phase)
        if not self._lock.acquire(blocking=False):
            raise ResourceBusy(
                f"phase {phase} on rank {self._rank}: another thread is in a phase on this channel; use one thread, or a channel each"
            )
        try:
            return self._gather(phase, bytes(payload))
        finally:
            self._lock.release()

    def agree(self, phase: str, reason: str | None) -> None:
        """Go on together or raise together.

        Args:
            phase: as in ``gather``.
            reason: why this rank cannot go on, or None if it can.

        Raises:
            CollectiveError: any rank gave a reason, or the ``gather`` failed.
        """
        agree_over(self, phase, reason)

    def _gather(self, phase: str, payload: bytes) -> tuple[bytes, ...]:
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFF_FFFF
        peers = [p for p in range(self._world_size) if p != self._rank]
        started = time.monotonic()
        deadline = started + self._timeout
        own = _Frame(sequence, os.getpid(), len(payload), phase, _Kind.PAYLOAD, payload[:_INLINE_BYTES])
        raw, problems = self._trade(dict.fromkeys(peers, _FRAME_BYTES), dict.fromkeys(peers, own.encode()), deadline)
        frames = self._decode(raw, problems)
        rest = payload[_INLINE_BYTES:]
        incoming = {p: f.rest_bytes for p, f in frames.items() if f.rest_bytes > 0}
        outgoing = {p: rest for p in peers if p not in problems} if rest else {}
        if incoming or outgoing:
            tails, late = self._trade(incoming, outgoing, deadline)
            problems |= late
        else:
            tails = {}
        self._confirm(phase, sequence, frames, problems, deadline)
        if not problems:
            problems |= self._out_of_step(phase, sequence, frames)
        if problems:
            self._fail(phase, problems, time.monotonic() - started)
        payloads = {p: f.inline + tails.get(p, b"") for p, f in frames.items()}
        payloads[self._rank] = payload
        return tuple(payloads[r] for r in range(self._world_size))

    def _confirm(self, phase: str, sequence: int, frames: Mapping[int, _Frame], problems: dict[int, str], deadline: float) -> None:
        """Second round: tell the peers that came which ranks are missing here, and hear the same from them; adds to ``problems``."""
        present = [p for p in frames if p not in problems]
        missing = sum(1 << p for p in problems).to_bytes(self._world_size // 8 + 1, "little")
        own = _Frame(sequence, os.getpid(), len(missing), phase, _Kind.CONFIRM, missing)
        raw, lost = self._trade(dict.fromkeys(present, _FRAME_BYTES), dict.fromkeys(present, own.encode()), deadline + CONFIRM_SECONDS)
        confirms = self._decode(raw, lost)
        if not problems:
            problems |= {p: f"left while the phase was being confirmed: {text}" for p, text in lost.items()}
        for reporter, frame in confirms.items():
            bits = int.from_bytes(frame.inline, "little")
            for rank in range(self._world_size):
                if bits >> rank & 1 and rank not in problems:
                    problems[rank] = f"rank {reporter} has no word from it"

    def _out_of_step(self, phase: str, sequence: int, frames: Mapping[int, _Frame]) -> dict[int, str]:
        problems: dict[int, str] = {}
        for peer, frame in frames.items():
            if frame.phase != phase:
                problems[peer] = f"is in phase {frame.phase!r} while rank {self._rank} is in phase {phase!r}"
            elif frame.sequence != sequence:
                problems[peer] = f"is at its collective number {frame.sequence} while rank {self._rank} is at number {sequence}"
        return problems

    def _fail(self, phase: str, problems: Mapping[int, str], seconds: float) -> None:
        log.warning("agreement_failed", phase=phase, rank=self._rank, ranks=sorted(problems), seconds=round(seconds, 3))
        raise CollectiveError(phase, self._rank, [Verdict(r, problems.get(r)) for r in range(self._world_size)])

    def _decode(self, raw: Mapping[int, bytes], problems: dict[int, str]) -> dict[int, _Frame]:
        frames: dict[int, _Frame] = {}
        for peer, data in raw.items():
            try:
                frames[peer] = _Frame.decode(data)
            except ValueError as error:
                problems[peer] = str(error)
            else:
                self._processes[peer] = frames[peer].process
        return frames

    def _trade(
        self, incoming: Mapping[int, int], outgoing: Mapping[int, bytes], deadline: float
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """Receive so many bytes of each rank in ``incoming`` while sending ``outgoing``; return what came, and why the rest did not.

        All operations are posted before the first wait: what a peer waits for never depends on what this rank waits for.
        """
        problems: dict[int, str] = {}
        received = {p: torch.empty(n, dtype=torch.uint8) for p, n in incoming.items()}
        sent = {p: torch.frombuffer(bytearray(data), dtype=torch.uint8) for p, data in outgoing.items()}
        receives: dict[int, dist.Work | None] = {}
        sends: dict[int, dist.Work | None] = {}
        for peer, tensor in received.items():
            try:
                receives[peer] = dist.irecv(tensor, group=self._group, group_src=peer, tag=MESSAGE_TAG)
            except RuntimeError as error:
                problems[peer] = self._explain(peer, error, late=False)
        for peer, tensor in sent.items():
            try:
                sends[peer] = dist.isend(tensor, group=self._group, group_dst=peer, tag=MESSAGE_TAG)
            except RuntimeError as error:
                problems[peer] = self._explain(peer, error, late=False)
        for peer, work in receives.items():
            self._wait(work, peer, deadline, problems)
        # A receive that ran out has closed every connection, so sends are judged only if every frame came.
        unsent: dict[int, str] = {}
        for peer, work in sends.items():
            self._wait(work, peer, deadline, unsent)
        if not problems:
            problems = unsent
        return {p: bytes(t.numpy().tobytes()) for p, t in received.items() if p not in problems}, problems

    def _wait(self, work: dist.Work | None, peer: int, deadline: float, problems: dict[int, str]) -> None:
        if work is None:
            problems[peer] = "the group has no member of this rank here"
            return
        try:
            # Zero would mean "no bound" to gloo.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            problems[peer] = self._explain(peer, error, late=time.monotonic() >= deadline)

    def _explain(self, peer: int, error: RuntimeError, *, late: bool) -> str:
        text = str(error).splitlines()[0]
        if any(sign in text.lower() for sign in _CLOSED_BY_PEER):
            return f"its connection is closed ({self._process_state(peer)})"
        if late:
            return f"did not come within {self._timeout:g} s ({self._process_state(peer)})"
        return f"could not be reached ({self._process_state(peer)}): {text}"

    def _process_state(self, peer: int) -> str:
        process = self._processes.get(peer)
        if process is None:
            return "it has not been heard of before"
        if start_ticks(process) is None:
            return f"its process {process} is gone"
        return f"its process {process} exists: it hangs, is in another phase, or gave up waiting"


def agree_over(channel: AgreementChannel, phase: str, reason: str | None) -> None:
    """Gather every rank's reason over ``channel``.

    Raises:
        CollectiveError: on every rank, if any rank gave a reason.
    """
    Agreement.from_payloads(phase, channel.gather(phase, encode_verdict(phase, reason))).require(channel.rank)


def joint(channel: AgreementChannel, phase: str, payload: bytes, reason: str | None) -> tuple[bytes, ...]:
    """Give every rank's payload to every rank, unless a rank has a reason not to go on: then raise on all of them.

    Args:
        channel: the ranks.
        phase: as in ``AgreementChannel.gather``.
        payload: this rank's bytes; not looked at by anyone if ``reason`` is given.
        reason: why this rank cannot go on, or None.

    Returns:
        The payloads in rank order.

    Raises:
        CollectiveError: some rank gave a reason; the verdicts carry all of them.
    """
    verdict = encode_verdict(phase, reason)
    answers = channel.gather(phase, _LENGTH.pack(len(verdict)) + verdict + payload)
    ends = [_LENGTH.size + _LENGTH.unpack_from(answer)[0] for answer in answers]
    Agreement.from_payloads(phase, [answer[_LENGTH.size : end] for answer, end in zip(answers, ends, strict=True)]).require(channel.rank)
    return tuple(answer[end:] for answer, end in zip(answers, ends, strict=True))


def joint_stage(channel: AgreementChannel, phase: str, work: Callable[[], bytes | None]) -> tuple[bytes, ...]:
    """Do this rank's part of a stage, then join the other ranks, whether it worked or not.

    Args:
        channel: the ranks.
        phase: as in ``AgreementChannel.gather``.
        work: this rank's part; what it returns goes to every rank.

    Returns:
        What each rank's ``work`` returned, in rank order (empty bytes for None).

    Raises:
        CollectiveError: ``work`` raised on some rank; this rank's own exception, if any, is the cause.
        BaseException: what ``work`` raised here, if it is no ``Exception`` (an interrupt), after the other ranks know.
    """
    failure: BaseException | None = None
    payload = b""
    try:
        payload = work() or b""
    except BaseException as error:  # re-raised below, once the other ranks know
        failure = error
    reason = None if failure is None else describe(failure)
    try:
        answers = joint(channel, phase, payload, reason)
    except CollectiveError as error:
        if failure is not None and not isinstance(failure, Exception):
            raise failure from error
        raise error from failure
    return answers


def describe(error: BaseException) -> str:
    """One line that says what an exception is: an m3 error's own message, any other's type and message."""
    text = " ".join(str(error).split()) or "no message"
    return text if type(error).__module__ == "m3_core.errors" else f"{type(error).__name__}: {text}"


def _check_phase(phase: str) -> None:
    size = len(phase.encode())
    if not 0 < size <= PHASE_BYTES_LIMIT:
        raise ConfigurationError(f"phase name {phase!r} of {size} bytes: must have 1 to {PHASE_BYTES_LIMIT}; give a shorter one")
