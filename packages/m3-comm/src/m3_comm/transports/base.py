"""What every transport offers, and how a handle travels."""

from __future__ import annotations

import struct
from typing import Protocol, runtime_checkable

import attrs
import torch

from m3_core.errors import ConfigurationError

PAGE_BYTES = 4096
"""Allocations are whole pages of this size: HIP exports uncached memory only so, and mappings of files are whole pages anyway."""

_HANDLE_MAGIC = b"m3h1"
_HANDLE = struct.Struct("<4s8sQQH")  # magic, transport, offset, length, bytes of the base that follow


@attrs.frozen(eq=False)
class Allocation:
    """Memory that this rank owns; zeroed.

    Attributes:
        address: first byte, aligned to ``PAGE_BYTES``.
        nbytes: size, a multiple of ``PAGE_BYTES``.
    """

    address: int
    nbytes: int


@attrs.frozen(eq=False)
class Mapping:
    """A peer's memory in this process.

    Attributes:
        address: first byte as this process (and its device) sees it.
        nbytes: size.
        base: what the transport opened; differs from ``address`` where a handle has an offset.
    """

    address: int
    nbytes: int
    base: int


@attrs.frozen
class Handle:
    """How one rank names its memory to the others.

    Attributes:
        transport: name of the transport, at most 8 ASCII characters.
        base: the transport's own handle of the whole allocation.
        offset: byte at which the memory starts within what ``base`` names.
        length: size in bytes.
    """

    transport: str
    base: bytes
    offset: int
    length: int

    def encode(self) -> bytes:
        """Bytes for the exchange between ranks."""
        return _HANDLE.pack(_HANDLE_MAGIC, self.transport.encode(), self.offset, self.length, len(self.base)) + self.base

    @classmethod
    def decode(cls, data: bytes, transport: str) -> Handle:
        """Read what ``encode`` wrote.

        Raises:
            ConfigurationError: these are no handle bytes, or of another transport than the one named.
        """
        if len(data) < _HANDLE.size or data[:4] != _HANDLE_MAGIC:
            raise ConfigurationError(f"{len(data)} bytes that begin {data[:4].hex()!r} are no memory handle: pass what export() returned")
        _, name, offset, length, base_bytes = _HANDLE.unpack_from(data)
        base = data[_HANDLE.size :]
        if len(base) != base_bytes:
            raise ConfigurationError(f"memory handle cut short: {len(base)} of {base_bytes} bytes of its base came")
        named = name.rstrip(b"\0").decode()
        if named != transport:
            raise ConfigurationError(
                f"memory handle of transport {named!r} opened by transport {transport!r}: use the same transport on every rank"
            )
        return cls(named, base, offset, length)


@runtime_checkable
class HostMappingTransport(Protocol):
    """A device transport that can also show host memory to the device, such as the ring of a flight recorder."""

    def map_host(self, address: int, nbytes: int) -> int:
        """Pin whole pages of host memory and return their address on the device; raises ``ResourceError``."""
        ...

    def unmap_host(self, address: int) -> None:
        """Undo ``map_host`` for the same host address."""
        ...

    @property
    def ticks_per_second(self) -> int:
        """Rate of the clock that launches on this device read."""
        ...

    def read_clock(self) -> int | None:
        """That clock, in ticks; None if the transport cannot read it. Raises ``ResourceError``."""
        ...


class DeviceTransport(Protocol):
    """A memory transport with what ``PeerBuffer`` needs to prove and show the memory.

    Every method raises ``ResourceError`` when the machine or the driver refuses, with the driver's name of the error.
    """

    @property
    def name(self) -> str:
        """``shm``, ``cuda`` or ``hip``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        ...

    @property
    def traits(self) -> dict[str, str]:
        """What must be the same on every rank besides the name, such as the kind of memory; compared at construction."""
        ...

    @property
    def frees_after_peers(self) -> bool:
        """Whether memory may be freed only once every peer has closed its mapping of it."""
        ...

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        """Get at least ``nbytes`` zeroed bytes; ``label`` marks what belongs together, for ``sweep``."""
        ...

    def export(self, allocation: Allocation) -> bytes:
        """Make the allocation known to other processes; returns an encoded ``Handle``."""
        ...

    def open(self, handle: bytes) -> Mapping:
        """Map a peer's memory."""
        ...

    def unlink(self, allocation: Allocation) -> None:
        """Every rank has mapped it: nobody else may from now on. Idempotent."""
        ...

    def close(self, mapping: Mapping) -> None:
        """Give up a mapping; a second call does nothing."""
        ...

    def free(self, allocation: Allocation) -> None:
        """Give the memory back; implies ``unlink``; a second call does nothing."""
        ...

    def sweep(self, label: str) -> None:
        """After a failure: remove what ranks that died left behind under this label. Bounded."""
        ...

    def write_word(self, address: int, value: int) -> None:
        """Store one aligned 64-bit word in the way the kernels store a pair, and wait until it is stored."""
        ...

    def read_word(self, address: int) -> int:
        """Load one aligned 64-bit word in the way the kernels load a pair."""
        ...

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes as a uint8 tensor [nbytes] on ``device`` that does not own them."""
        ...


def round_up(nbytes: int) -> int:
    """The next multiple of ``PAGE_BYTES``.

    Raises:
        ConfigurationError: ``nbytes`` is below 1.
    """
    if nbytes < 1:
        raise ConfigurationError(f"buffer of {nbytes} bytes: ask for at least 1")
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
