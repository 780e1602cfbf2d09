"""Arithmetic that does not depend on who else is in the batch.

A library picks another summation order for one row than for sixteen, so a token's hidden state would depend on which requests
share its step. Products in float32 here run in tiles of one fixed shape: every row takes part in the same computation whatever
the batch is.
"""

from __future__ import annotations

import torch

from m3_kernels.ffn import FfnConstants

TILE_ROWS = 16
"""Rows of one product. Any fixed number serves; 16 wastes little where one row decodes and still blocks well at prefill."""


def tiled_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``rows @ weight.T`` in float32, each output row independent of the number and order of the others.

    Args:
        rows: [S, K], any float type; widened.
        weight: [N, K], any float type; widened.

    Returns:
        float32 [S, N].
    """
    count, width = rows.shape
    wide = weight.to(torch.float32)
    padded = rows.new_zeros(-(-count // TILE_ROWS) * TILE_ROWS, width, dtype=torch.float32)
    padded[:count] = rows
    product = torch.empty(padded.shape[0], wide.shape[0], dtype=torch.float32, device=rows.device)
    for first in range(0, padded.shape[0], TILE_ROWS):
        torch.mm(padded[first : first + TILE_ROWS], wide.t(), out=product[first : first + TILE_ROWS])
    return product[:count]


def gemma_norm(value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gemma's RMS norm over the last axis, in float32 (MiniMax-M3 facts: ``s * rsqrt(mean(s^2) + eps) * (1 + w)``).

    Args:
        value: [..., N], widened to float32.
        weight: [N], stored as the offset from 1; widened to float32.
        eps: added to the mean square.

    Returns:
        float32 [..., N]; the caller rounds.
    """
    wide = value.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * scale * (1.0 + weight.to(torch.float32))


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, constants: FfnConstants) -> torch.Tensor:
    """``g * sigmoid(alpha g) * (u + beta)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``, in float32.

    Args:
        gate: [..., I]; it has no lower bound.
        up: [..., I].
        constants: alpha, beta and limit.

    Returns:
        float32 [..., I]; the caller rounds.
    """
    limit = constants.swiglu_limit
    bounded = gate.to(torch.float32).clamp(max=limit)
    return bounded * torch.sigmoid(constants.swiglu_alpha * bounded) * (up.to(torch.float32).clamp(-limit, limit) + constants.swiglu_beta)
