"""Stage table: the slot table (MiniMax-M3 facts: the fused launch, stages)."""

from __future__ import annotations

import attrs
from torch import Tensor


@attrs.frozen
class Slot:
    """An expert and the rows that it works on.

    Attributes:
        expert: its id; the shared expert's is the number of routed experts.
        rows: ascending.
        picks: the pick of each row: ``top_k * row + k``, or ``top_k * rows + row`` for the shared expert.
    """

    expert: int
    rows: tuple[int, ...]
    picks: tuple[int, ...]


def table(experts: Tensor, slots: Tensor, shared_expert: int) -> tuple[Slot, ...]:
    """Slot 0 is the shared expert over the valid rows; the picked experts follow by ascending id.

    Args:
        experts: int64 [rows, top_k], -1 in padded rows.
        slots: int64 [rows]; negative is padded.
        shared_expert: the shared expert's id.
    """
    rows, top_k = experts.shape
    valid = tuple(row for row in range(rows) if int(slots[row]) >= 0)
    found = [Slot(shared_expert, valid, tuple(top_k * rows + row for row in valid))]
    for expert in sorted({int(expert) for expert in experts.flatten() if expert >= 0}):
        picks = tuple(pick for pick in range(rows * top_k) if int(experts[pick // top_k, pick % top_k]) == expert)
        found.append(Slot(expert, tuple(pick // top_k for pick in picks), picks))
    return tuple(found)
