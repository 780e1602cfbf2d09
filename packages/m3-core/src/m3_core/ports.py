"""What the core expects from the outside, as typed protocols. Nothing here does anything."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from m3_core.faults import Fault

TensorT = TypeVar("TensorT")


@runtime_checkable
class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


@runtime_checkable
class AgreementChannel(Protocol):
    """The host's collective between the ranks of one group. Every wait is bounded."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        ...

    def gather(self, phase: str, payload: bytes) -> tuple[bytes, ...]:
        """Exchange payloads of any length.

        Args:
            phase: the same name on every rank.
            payload: this rank's bytes.

        Returns:
            Every rank's payload, in rank order.

        Raises:
            CollectiveError: on every rank that came, if a rank did not come in time or was in another phase; it names them.
        """
        ...

    def agree(self, phase: str, reason: str | None) -> None:
        """End a phase that may fail on one rank alone.

        Args:
            phase: the same name on every rank.
            reason: why this rank failed; None if it is ready.

        Raises:
            CollectiveError: on every rank, if any rank gave a reason.
        """
        ...


@runtime_checkable
class Allocation(Protocol):
    """Memory of this rank that peers can map."""

    @property
    def address(self) -> int:
        """Start; aligned to at least 256 bytes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that may be used."""
        ...


@runtime_checkable
class Mapping(Protocol):
    """A peer's memory, mapped here."""

    @property
    def address(self) -> int:
        """Start, in this rank's address space."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that may be used."""
        ...


@runtime_checkable
class MemoryTransport(Protocol):
    """A way to share memory between the ranks of one node. Close mappings before their owner frees the allocation."""

    @property
    def name(self) -> str:
        """Short name: shm, cuda or hip."""
        ...

    def allocate(self, nbytes: int) -> Allocation:
        """Memory of this rank, zeroed; raises ResourceError."""
        ...

    def export(self, allocation: Allocation) -> bytes:
        """A handle that a peer of this node can open."""
        ...

    def open(self, handle: bytes) -> Mapping:
        """Map a peer's allocation; raises ResourceError."""
        ...

    def unlink(self, allocation: Allocation) -> None:
        """Make the handle useless for new opens, so that nothing stays behind if every rank is killed; idempotent."""
        ...

    def close(self, mapping: Mapping) -> None:
        """Unmap; idempotent."""
        ...

    def free(self, allocation: Allocation) -> None:
        """Give the memory back; idempotent."""
        ...


@runtime_checkable
class PeerMemory(Protocol):
    """One buffer a rank, each mapped by every rank."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks that share."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of each buffer."""
        ...

    @property
    def local(self) -> int:
        """Address of this rank's buffer."""
        ...

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all buffers in this rank's address space, by rank, the own one included."""
        ...

    def close(self) -> None:
        """Close the mappings, then free the own buffer; idempotent."""
        ...


@runtime_checkable
class FlightRing(Protocol):
    """Where a rank's launches write their flight records (``m3_core.flight``)."""

    @property
    def address(self) -> int:
        """Start of the ring as the launches see it; aligned to 8 bytes. It stays until the launches that write it are over."""
        ...

    @property
    def launches(self) -> int:
        """Launches that the ring keeps; at least 1."""
        ...


@runtime_checkable
class LaunchChannel(Protocol):
    """The device state that all launches on one channel of a peer buffer share."""

    def epoch(self) -> int:
        """The channel's epoch, read from the device."""
        ...

    def health(self) -> Fault:
        """The channel's fault word, read from this rank's buffer."""
        ...

    def abort(self) -> None:
        """Mark this rank failed on every rank, so that peers' waits end; never raises."""
        ...

    def zero_scratch_and_epoch(self) -> None:
        """Clear what a reset clears on this rank: mailboxes past the error words, all scratch, the epoch words."""
        ...

    def synchronize(self) -> None:
        """Wait until every launch of this channel on this rank has ended."""
        ...


class Launch(Protocol[TensorT]):
    """The FFN half of one sparse layer as one launch a rank."""

    def __call__(self, part: TensorT, residual: TensorT, slots: TensorT, *, handshake: bool) -> tuple[TensorT, TensorT]:
        """Run the half.

        Args:
            part: this rank's unreduced attention output projection, bf16 [rows, hidden], contiguous.
            residual: bf16 [rows, hidden], contiguous.
            slots: int64, at least ``rows``; negative means a padded row.
            handshake: whether the launch ends in the step's fault exchange; true on the step's last sparse layer.

        Returns:
            The reduced output and the new residual, bf16 [rows, hidden] each; in padded rows 0 and unspecified.
        """
        ...
