"""Stage router: fp32 logits, cut along K into parts (MiniMax-M3 facts: router details)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.formulas import ceil_div, round_up
from m3_core.work import router_part_columns, router_parts
from m3_kernels.reference.arithmetic import SEGMENTS, Arithmetic

STEP = 16


def router(x: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Logits of every part: its columns in 8 segments of whole 16-column steps, each added ascending, the segments in order.

    Args:
        x: [rows, hidden].
        weight: fp32 [experts, hidden].
        arithmetic: how to compute.

    Returns:
        [rows, experts, parts].
    """
    hidden = x.shape[1]
    columns = router_part_columns(hidden)
    segment = round_up(ceil_div(columns, SEGMENTS), STEP)
    logits = []
    for part in range(router_parts(hidden)):
        order = torch.arange(part * columns, part * columns + ceil_div(columns, segment) * segment)
        order = torch.where(order < min(hidden, (part + 1) * columns), order, torch.full_like(order, -1))
        logits.append(
            arithmetic.dot(arithmetic.widen(x), arithmetic.widen(weight), order, segment)
            if arithmetic.ordered
            else _part(x, weight, order, arithmetic)
        )
    return torch.stack(logits, dim=-1)


def _part(x: Tensor, weight: Tensor, order: Tensor, arithmetic: Arithmetic) -> Tensor:
    columns = order[order >= 0]
    return arithmetic.widen(x[:, columns]) @ arithmetic.widen(weight[:, columns]).T
