"""Sizes of a launch and the names of the experts' formats."""

from __future__ import annotations

from enum import Enum

import attrs

from m3_core.errors import RefusalError
from m3_core.layout import PeerLayout, ScratchLayout
from m3_core.work import shape_reasons


class ExpertFormat(Enum):
    """How the experts' weights are held; the value is the name in settings and messages."""

    BF16 = "bf16"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def lane_values(self) -> int:
        """Consecutive values along K that a lane takes together, which decides the order of the sums (docs/kernels.md)."""
        return {ExpertFormat.BF16: 8, ExpertFormat.MXFP4: 32, ExpertFormat.MXFP8: 16, ExpertFormat.NVFP4: 32}[self]


@attrs.frozen
class FfnShape:
    """Sizes that all launches of a channel share.

    Attributes:
        hidden: hidden size, even.
        intermediate: intermediate size of an expert on this rank.
        experts: routed experts, without the shared one.
        top_k: routed experts a row.
        world_size: tensor-parallel ranks: 1, 2, 4 or 8.
        max_rows: the most rows of a launch, 1 to 64.

    Raises:
        RefusalError: with every reason why the sizes cannot run.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    world_size: int
    max_rows: int

    def __attrs_post_init__(self) -> None:
        missing = [name for name, value in attrs.asdict(self).items() if value is None]
        reasons = [f"{name} is None: a whole number is needed" for name in missing] or shape_reasons(
            hidden=self.hidden,
            rows=self.max_rows,
            world_size=self.world_size,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
        )
        if reasons:
            raise RefusalError(reasons, "this FFN shape")

    def format_reasons(self, format: ExpertFormat) -> list[str]:
        """Why these sizes cannot be held in ``format``; empty if they can."""
        if format is ExpertFormat.BF16:
            return []
        multiple, why = {
            ExpertFormat.MXFP4: (64, "MXFP4 weights in the (16, 16) shuffle need a multiple of 64 (64 values along K, 16 rows)"),
            ExpertFormat.MXFP8: (32, "MXFP8 weights need a multiple of 32 (a scale covers 32 values along K)"),
            ExpertFormat.NVFP4: (32, "NVFP4 weights need a multiple of 32 (a lane loads 32 values along K)"),
        }[format]
        reasons = [
            f"{name} is {value}: {why}; pad it or hold the experts as BF16"
            for name, value in (("hidden", self.hidden), ("intermediate", self.intermediate))
            if value % multiple
        ]
        # The row-major formats count loads of 16 bytes in a 32-bit word.
        limit = {ExpertFormat.MXFP8: 2**36, ExpertFormat.NVFP4: 2**37}.get(format)
        held = (self.experts + 1) * 2 * self.intermediate * self.hidden
        if limit is not None and held > limit:
            reasons.append(
                f"{self.experts + 1} matrices of {2 * self.intermediate} x {self.hidden} hold {held} codes: "
                f"{format.name} weights take at most {limit}; use more ranks"
            )
        return reasons

    def scratch(self, rows: int, *, timeline_blocks: int = 0) -> ScratchLayout:
        """The scratch of a launch of ``rows`` rows."""
        return ScratchLayout(rows, self.hidden, self.intermediate, self.experts, self.top_k, timeline_blocks)

    @property
    def peer_layout(self) -> PeerLayout:
        """The peer buffer of these sizes."""
        return PeerLayout(self.world_size, self.max_rows, self.hidden)
