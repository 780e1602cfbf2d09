"""Stage final: the ranks' combined outputs, added in rank order and rounded once (MiniMax-M3 facts: decoder layer, step 19)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from m3_kernels.reference.arithmetic import Arithmetic
from m3_kernels.reference.reduce import rank_order_sum


def final(combined: Sequence[Tensor], arithmetic: Arithmetic) -> Tensor:
    """The launch's output, [rows, hidden], from every rank's combined output in rank order."""
    return rank_order_sum(combined, arithmetic)
