"""Stage route: selection and weights (MiniMax-M3 facts: decoder layer, steps 13 and 14; router details)."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from m3_kernels.reference.arithmetic import Arithmetic

LEAST_SUM = 1e-20
GROUP = 4


@attrs.frozen(eq=False)
class Routes:
    """Who goes where.

    Attributes:
        experts: int64 [rows, top_k], in pick order; -1 in padded rows.
        weights: [rows, top_k].
    """

    experts: Tensor
    weights: Tensor


def sum_parts(parts: Tensor) -> Tensor:
    """The router parts added as groups of four, each in order, and the groups in order: [rows, experts]."""
    total: Tensor | None = None
    for start in range(0, parts.shape[-1], GROUP):
        group = parts[..., start]
        for part in range(start + 1, min(start + GROUP, parts.shape[-1])):
            group = group + parts[..., part]
        total = group if total is None else total + group
    assert total is not None
    return total


def route(parts: Tensor, bias: Tensor, slots: Tensor, top_k: int, scaling: float, arithmetic: Arithmetic) -> Routes:
    """Pick by sigmoid + bias, the lower id on a tie; weigh by the sigmoids, scaled to sum to ``scaling``.

    A NaN key counts as -infinity, a NaN probability as 0.

    Args:
        parts: [rows, experts, parts], from stage router.
        bias: fp32 [experts].
        slots: int64 [rows]; negative is padded.
        top_k: picks a row.
        scaling: the routed scaling factor.
        arithmetic: how to compute.
    """
    probability = arithmetic.sigmoid(sum_parts(parts))
    key = probability + arithmetic.widen(bias)
    key = torch.where(torch.isnan(key), torch.full_like(key, -math.inf), key)
    probability = torch.where(torch.isnan(probability), torch.zeros_like(probability), probability)
    experts = torch.argsort(key, dim=-1, descending=True, stable=True)[:, :top_k]
    picked = torch.gather(probability, 1, experts)
    total = picked[:, 0]
    for k in range(1, top_k):
        total = total + picked[:, k]
    least = torch.tensor(LEAST_SUM, dtype=arithmetic.dtype, device=total.device)
    scale = torch.tensor(scaling, dtype=arithmetic.dtype, device=total.device) * (1.0 / torch.maximum(total, least))
    padded = (slots[: parts.shape[0]] < 0)[:, None]
    return Routes(torch.where(padded, torch.full_like(experts, -1), experts), picked * scale[:, None])
