"""Stage reduce: rank-order sum, one rounding, residual add, sum of squares (MiniMax-M3 facts: decoder layer, steps 9 and 10)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from m3_core.work import COLUMNS_A_TRIPLE, PUSH_TRIPLES, push_tasks
from m3_kernels.reference.arithmetic import Arithmetic


@attrs.frozen(eq=False)
class Reduced:
    """What the stage leaves.

    Attributes:
        stream: [rows, hidden], the reduced partial plus the residual, not rounded.
        residual: [rows, hidden], the stream rounded to bf16.
        squares: [rows, tasks], the sums of squares of 48 columns.
    """

    stream: Tensor
    residual: Tensor
    squares: Tensor


def rank_order_sum(parts: Sequence[Tensor], arithmetic: Arithmetic) -> Tensor:
    """Sum of the ranks' tensors in rank order, rounded to bf16 once."""
    total = arithmetic.widen(parts[0])
    for part in parts[1:]:
        total = total + arithmetic.widen(part)
    return arithmetic.bf16(total)


def reduce(parts: Sequence[Tensor], residual: Tensor, arithmetic: Arithmetic) -> Reduced:
    """The stage over all ranks.

    Args:
        parts: every rank's bf16 [rows, hidden], in rank order.
        residual: bf16 [rows, hidden].
        arithmetic: how to compute.
    """
    stream = rank_order_sum(parts, arithmetic) + arithmetic.widen(residual)
    return Reduced(stream, arithmetic.bf16(stream), sum_of_squares(stream))


def sum_of_squares(stream: Tensor) -> Tensor:
    """Sums over 48 columns: in a triple (a + b) + c, then the 16 triples pairwise at distances 8, 4, 2, 1.

    Returns:
        [rows, tasks].
    """
    rows, hidden = stream.shape
    tasks = push_tasks(hidden)
    padded = torch.zeros(rows, tasks * PUSH_TRIPLES * COLUMNS_A_TRIPLE, dtype=stream.dtype, device=stream.device)
    padded[:, :hidden] = stream * stream
    columns = padded.view(rows, tasks, PUSH_TRIPLES, COLUMNS_A_TRIPLE)
    triple = (columns[..., 0] + columns[..., 1]) + columns[..., 2]
    return pairwise(triple)


def pairwise(values: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two): element i takes element i + half, until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]
