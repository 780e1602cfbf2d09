"""What a channel needs of a target: resident blocks, launches, and access to peer memory from the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from m3_kernels.hosts.arguments import Arguments

ANY_SCALE = "_any_scale"


class Host(Protocol):
    """One target on one device, for one channel."""

    @property
    def device(self) -> torch.device:
        """Where scratch, weights, inputs and outputs lie."""
        ...

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        ...

    @property
    def ticks_per_second(self) -> int:
        """Rate of the clock that bounds waits."""
        ...

    @property
    def plain_scales(self) -> Mapping[str, int]:
        """By entry, the largest E8M0 code that it takes, and that it takes no NaN weights; ``ANY_SCALE`` ends the name of the one for others. An
        entry that is missing takes all."""
        ...

    @property
    def capturing(self) -> bool:
        """Whether launches are being recorded into a graph, so that nothing may be allocated or waited for."""
        ...

    def prepare(self, rows: int) -> None:
        """Make ready what a launch of ``rows`` rows needs besides its scratch, so that no later launch does.

        Raises:
            BuildError: if kernels do not compile or load.
            ResourceError: if the blocks of a launch cannot all be resident.
        """
        ...

    def launch(self, entry: str, arguments: Arguments) -> None:
        """Start one launch, in the order of the device's current stream; ``prepare`` was called for its rows.

        Raises:
            ResourceClosed: after ``close()``.
        """
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory of this rank, in the order of the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until everything started so far has ended."""
        ...

    def read_fault(self, address: int) -> bytes:
        """The 16 bytes of the fault word at ``address`` as it stands: a set word is never read without the rest.

        While ``capturing``, what ``mirrored_fault`` returns.
        """
        ...

    def mirror_fault(self, address: int) -> None:
        """Copy the fault word to where the host reads it for free, in the order of the current stream; may be captured."""
        ...

    def mirrored_fault(self) -> bytes:
        """The last copy that has arrived; zeros before the first."""
        ...

    def abort(self, addresses: Sequence[int], rank: int) -> None:
        """Mark ``rank`` failed in every buffer that has no fault yet, while launches may be running."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...
