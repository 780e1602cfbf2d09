"""The arithmetics of the references: float64 without rounding; fp32 with the launch's rounding points and the CPU target's orders of
summation; float64 with the launch's rounding points, for targets whose sums run in another order."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
SEGMENTS = 8
BLOCK_K = 128
STEP_K = 32
RUN_K = 8

# Taylor coefficients of 2^x, degree 10, as the CPU target has them.
_EXP2 = (
    1.0,
    6.931471805599453e-01,
    2.402265069591007e-01,
    5.5504108664821576e-02,
    9.618129107628477e-03,
    1.3333558146428441e-03,
    1.5403530393381606e-04,
    1.5252733804059838e-05,
    1.3215486790144305e-06,
    1.0178086009239696e-07,
    7.0549116208011209e-09,
)


@attrs.frozen
class Arithmetic:
    """How a reference computes.

    Attributes:
        dtype: type of all intermediate values.
        rounds: whether it rounds to bf16 where the launch does.
        ordered: whether it adds in the CPU target's order and computes powers as that target does.
    """

    dtype: torch.dtype
    rounds: bool
    ordered: bool

    def widen(self, values: Tensor) -> Tensor:
        """``values`` in this arithmetic's type."""
        return values.to(self.dtype)

    def bf16(self, values: Tensor) -> Tensor:
        """Round to bf16 (nearest even) where the launch does; the type stays."""
        return values.to(torch.bfloat16).to(self.dtype) if self.rounds else values

    def exp2(self, values: Tensor) -> Tensor:
        """2^values; ordered: the CPU target's sequence of operations (nearest integer, polynomial in float64, one rounding)."""
        if not self.ordered:
            return torch.exp2(values)
        clamped = values.double().nan_to_num(nan=0.0, posinf=200.0, neginf=-200.0).clamp(-160.0, 128.0)
        whole = torch.round(clamped)
        rest = clamped - whole
        power = torch.full_like(rest, _EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            power = power * rest + coefficient
        result = torch.ldexp(power, whole).to(torch.float32)
        result = torch.where(values >= 128.0, torch.full_like(result, math.inf), result)
        result = torch.where(values < -160.0, torch.zeros_like(result), result)
        return torch.where(torch.isnan(values), values, result)

    def root(self, values: Tensor) -> Tensor:
        """The square root, rounded as IEEE 754 says.

        ``torch.sqrt`` of fp32 may be one unit off, where it calls a vector library. A root in float64, even one unit off, is never so near
        to the middle between two fp32 values that rounding it gives another one.
        """
        return torch.sqrt(values.double()).to(self.dtype)

    def sigmoid(self, values: Tensor) -> Tensor:
        """1 / (1 + 2^(-x log2 e))."""
        log2_e = torch.tensor(LOG2_E, dtype=self.dtype, device=values.device)
        return 1.0 / (1.0 + self.exp2(-values * log2_e))

    def dot(self, rows: Tensor, matrix: Tensor, order: Tensor, segment: int) -> Tensor:
        """``rows @ matrix.T``; ordered: added in ``order``, every ``segment`` terms apart, the segments' sums in order.

        Args:
            rows: [n, K].
            matrix: [m, K].
            order: the K indices in the order in which they are added, -1 where a term is nothing.
            segment: terms of a segment.

        Returns:
            [n, m].
        """
        if not self.ordered:
            return rows @ matrix.T
        total: Tensor | None = None
        for start in range(0, order.numel(), segment):
            indices = [int(k) for k in order[start : start + segment] if k >= 0]
            part = torch.zeros(rows.shape[0], matrix.shape[0], dtype=self.dtype, device=rows.device)
            for k in indices:
                part = part + rows[:, k, None] * matrix[None, :, k]
            total = part if total is None else total + part
        assert total is not None
        return total


EXACT = Arithmetic(torch.float64, rounds=False, ordered=False)
ROUNDED = Arithmetic(torch.float32, rounds=True, ordered=True)
ROUNDED_SUMS_EXACT = Arithmetic(torch.float64, rounds=True, ordered=False)


def block_order(k: int, *, lane_values: int = RUN_K) -> Tensor:
    """The order in which blocks of 128 K are added, a step of 32 at a time.

    Four groups of lanes give a step eight values each. Group g holds ``lane_values`` consecutive ones at a time, g * ``lane_values`` on, and gives its
    first eight to the first step, its next eight to the second: with 8 the order ascends (BF16); with 16 two steps share 64 K (MXFP8), with 32
    four steps share the block (MXFP4, NVFP4).

    Args:
        k: length of the sum.
        lane_values: ``ExpertFormat.lane_values``: 8, 16 or 32.

    Returns:
        int64, whole blocks; -1 past K.
    """
    index = torch.arange(-(-k // BLOCK_K) * BLOCK_K)
    index = index.view(-1, STEP_K // RUN_K, lane_values // RUN_K, RUN_K).transpose(1, 2).reshape(-1)
    return torch.where(index < k, index, torch.full_like(index, -1))


def segment_of_blocks(k: int) -> int:
    """Terms of a segment where K is cut into eight runs of whole blocks."""
    blocks = -(-k // BLOCK_K)
    return -(-blocks // SEGMENTS) * BLOCK_K
