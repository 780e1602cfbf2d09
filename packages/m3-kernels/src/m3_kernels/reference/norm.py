"""Stage norm: the Gemma norm of the unrounded stream (MiniMax-M3 facts: decoder layer, step 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.reference.arithmetic import Arithmetic
from m3_kernels.reference.reduce import pairwise

STRANDS = 32


def norm(stream: Tensor, squares: Tensor, post_norm: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """X = (s * rstd) * (1 + w), rounded to bf16 once.

    Args:
        stream: [rows, hidden], not rounded.
        squares: [rows, tasks], from stage reduce.
        post_norm: bf16 [hidden], w.
        eps: added to the mean of squares.
        arithmetic: how to compute.

    Returns:
        [rows, hidden].
    """
    # By a tensor: torch multiplies by the reciprocal of a number on some devices.
    mean = row_sum(squares) / torch.tensor(stream.shape[1], dtype=arithmetic.dtype, device=squares.device)
    rstd = 1.0 / arithmetic.root(mean + torch.tensor(eps, dtype=arithmetic.dtype, device=squares.device))
    return arithmetic.bf16((stream * rstd[:, None]) * (1.0 + arithmetic.widen(post_norm)))


def row_sum(squares: Tensor) -> Tensor:
    """Sum over the tasks: strand i adds tasks i, i + 32, ... in order, then the 32 strands pairwise at distances 16, 8, 4, 2, 1.

    Returns:
        [rows].
    """
    rows, tasks = squares.shape
    strands = torch.zeros(rows, STRANDS, dtype=squares.dtype, device=squares.device)
    for start in range(0, tasks, STRANDS):
        chunk = squares[:, start : start + STRANDS]
        strands[:, : chunk.shape[1]] += chunk
    return pairwise(strands)
