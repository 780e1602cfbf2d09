"""Stage down: the second projection and the combination on a rank (MiniMax-M3 facts: decoder layer, step 17; combine order)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.reference.arithmetic import RUN_K, Arithmetic, block_order


def down(mid: Tensor, w2: Tensor, arithmetic: Arithmetic, *, lane_values: int = RUN_K, scale: Tensor | None = None) -> Tensor:
    """One expert's contributions, not rounded.

    Args:
        mid: [n, intermediate].
        w2: [hidden, intermediate].
        arithmetic: how to compute.
        lane_values: of the weights' format; the order of the sum follows.
        scale: fp32 scalar, the global scale of ``w2``, which multiplies the sums.

    Returns:
        [n, hidden].
    """
    order = block_order(mid.shape[1], lane_values=lane_values)
    sums = arithmetic.dot(arithmetic.widen(mid), arithmetic.widen(w2), order, order.numel())
    return sums if scale is None else sums * arithmetic.widen(scale)


def combine(shared: Tensor, routed: Tensor, weights: Tensor, slots: Tensor, arithmetic: Arithmetic) -> Tensor:
    """t = bf16(shared), then t = bf16(t + bf16(w_k * c_k)) in pick order; 0 in padded rows.

    Args:
        shared: [rows, hidden], the shared expert's contribution.
        routed: [rows, top_k, hidden].
        weights: [rows, top_k].
        slots: int64 [rows]; negative is padded.
        arithmetic: how to compute.

    Returns:
        [rows, hidden].
    """
    t = arithmetic.bf16(shared)
    for k in range(routed.shape[1]):
        t = arithmetic.bf16(t + arithmetic.bf16(weights[:, k, None] * routed[:, k]))
    return torch.where((slots[: t.shape[0]] < 0)[:, None], torch.zeros_like(t), t)
