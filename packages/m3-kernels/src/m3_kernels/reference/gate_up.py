"""Stages shared_up and up: gate, up and the activation (MiniMax-M3 facts: decoder layer, steps 15 and 16)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.ffn import FfnConstants
from m3_kernels.reference.arithmetic import RUN_K, Arithmetic, block_order, segment_of_blocks


def swiglu(gate: Tensor, up: Tensor, constants: FfnConstants, arithmetic: Arithmetic) -> Tensor:
    """g = min(gate, limit), u = clamp(up, -limit, limit), g * sigmoid(alpha g) * (u + beta); a NaN stays. Rounded to bf16 once."""
    g = torch.clamp(gate, max=constants.swiglu_limit)
    u = torch.clamp(up, min=-constants.swiglu_limit, max=constants.swiglu_limit)
    alpha = torch.tensor(constants.swiglu_alpha, dtype=arithmetic.dtype, device=gate.device)
    beta = torch.tensor(constants.swiglu_beta, dtype=arithmetic.dtype, device=gate.device)
    return arithmetic.bf16(g * arithmetic.sigmoid(alpha * g) * (u + beta))


def gate_up(
    x: Tensor, w13: Tensor, constants: FfnConstants, arithmetic: Arithmetic, *, lane_values: int = RUN_K, scale: Tensor | None = None
) -> Tensor:
    """The intermediate activations of one expert.

    Args:
        x: [n, hidden], the rows of the slot.
        w13: [2 * intermediate, hidden], gate rows, then up rows.
        constants: of the activation.
        arithmetic: how to compute.
        lane_values: of the weights' format; the order of the sum follows.
        scale: fp32 scalar, the global scale of ``w13``, which multiplies the sums before the activation.

    Returns:
        [n, intermediate].
    """
    hidden = x.shape[1]
    both = arithmetic.dot(
        arithmetic.widen(x), arithmetic.widen(w13), block_order(hidden, lane_values=lane_values), segment_of_blocks(hidden)
    )
    if scale is not None:
        both = both * arithmetic.widen(scale)
    gate, up = both.chunk(2, dim=1)
    return swiglu(gate, up, constants, arithmetic)
