"""A collective phase: each rank's verdict in, one verdict with all reasons out.

Whatever can fail on one rank alone ends in such a phase, so that all ranks go on or all raise. A verdict travels as bytes: one version
byte, one byte 0 (ready) or 1 (failed), the phase's name in UTF-8, a zero byte, the reason in UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from m3_core.errors import CollectiveError, ConfigurationError

VERDICT_VERSION = 1


@attrs.frozen
class Verdict:
    """What one rank says at the end of a phase.

    Attributes:
        rank: who says it.
        reason: why it failed; None if it is ready.
    """

    rank: int
    reason: str | None

    @property
    def ready(self) -> bool:
        """Whether the rank is ready."""
        return self.reason is None


def _check_phase(phase: str) -> str:
    if not phase or "\0" in phase:
        raise ConfigurationError(f"phase is {phase!r}; a phase has a name without zero characters")
    return phase


def encode_verdict(phase: str, reason: str | None) -> bytes:
    """The bytes that a rank sends: ``reason`` None means ready."""
    return bytes((VERDICT_VERSION, reason is not None)) + _check_phase(phase).encode() + b"\0" + (reason or "").encode()


def decode_verdict(rank: int, phase: str, payload: bytes) -> Verdict:
    """Read what ``rank`` sent in ``phase``; a payload of another phase or version is a verdict of failure, never an error."""
    if len(payload) < 3 or payload[0] != VERDICT_VERSION or payload[1] > 1 or b"\0" not in payload[2:]:
        return Verdict(rank, f"sent a verdict that this version cannot read ({payload[:16]!r}): install the same m3 on every rank")
    name, _, reason = payload[2:].partition(b"\0")
    sent = name.decode(errors="replace")
    if sent != phase:
        return Verdict(rank, f"is in phase {sent!r}, not {phase!r}: every rank must enter the same phases in the same order")
    return Verdict(rank, reason.decode(errors="replace") if payload[1] else None)


@attrs.frozen
class Agreement:
    """The outcome of a phase, equal on every rank.

    Attributes:
        phase: the phase's name.
        verdicts: one a rank, in rank order.

    Raises:
        ConfigurationError: if the verdicts are not those of ranks 0, 1, ... in order.
    """

    phase: str
    verdicts: tuple[Verdict, ...]

    def __attrs_post_init__(self) -> None:
        _check_phase(self.phase)
        ranks = [verdict.rank for verdict in self.verdicts]
        if not ranks or ranks != list(range(len(ranks))):
            raise ConfigurationError(f"phase {self.phase} has verdicts of ranks {ranks}; pass one for each rank, in rank order")

    @classmethod
    def from_payloads(cls, phase: str, payloads: Sequence[bytes]) -> Agreement:
        """Decode every rank's payload, in rank order."""
        return cls(phase, tuple(decode_verdict(rank, phase, payload) for rank, payload in enumerate(payloads)))

    @property
    def ok(self) -> bool:
        """Whether every rank is ready."""
        return all(verdict.ready for verdict in self.verdicts)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts of the ranks that failed."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ready)

    def require(self, rank: int) -> None:
        """Raise ``CollectiveError`` with all reasons unless every rank is ready.

        Args:
            rank: the rank that asks; the message says whether it failed itself.
        """
        if not self.ok:
            raise CollectiveError(self.phase, rank, self.verdicts)
