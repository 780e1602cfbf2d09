"""Matrix products whose float32 additions run in a given order, for many rows and matrices at once.

The launch on the CPU target adds in an order of its own (``m3_kernels.reference``). The stock layers add in the same one, so that a
step gives the same bits whichever of the two it runs, and who shares the step changes nothing.
"""

from __future__ import annotations

import torch


class OrderedMatrices:
    """Matrices [E, N, K] laid out step by step of the sum over K; all segments of K advance together."""

    def __init__(self, matrices: torch.Tensor, order: torch.Tensor, segment: int) -> None:
        """Lay out ``matrices``, in float32.

        Args:
            matrices: [E, N, K], any float type.
            order: the indices of K in the order in which they are added, -1 where a term is nothing.
            segment: terms that are added apart from the others; the segments' sums are then added in order.
        """
        segments = -(-order.numel() // segment)
        steps = torch.full((segments * segment,), -1, dtype=torch.int64)
        steps[: order.numel()] = order
        # Column K is zero: a term that is nothing.
        self._columns = torch.where(steps < 0, matrices.shape[2], steps).view(segments, segment).t().contiguous()
        padded = torch.cat([matrices, matrices.new_zeros(*matrices.shape[:2], 1)], dim=2)
        self._steps = padded.permute(2, 0, 1)[self._columns].to(torch.float32).contiguous()

    def product(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """``rows[i] @ matrices[matrix[i]].T`` for every i, each product rounded to float32 before it is added.

        Args:
            rows: [P, K], any float type.
            matrix: int64 [P].

        Returns:
            float32 [P, N]; an element depends on its own row and matrix alone.
        """
        padded = torch.cat([rows, rows.new_zeros(rows.shape[0], 1)], dim=1)
        values = padded.t()[self._columns].to(torch.float32).unsqueeze(-1)
        total = torch.zeros(values.shape[1], rows.shape[0], self._steps.shape[3])
        for step in range(values.shape[0]):
            # Two operations: one fused one would not round the product.
            total += self._steps[step].index_select(1, matrix).mul_(values[step])
        result = total[0]
        for segment in total[1:]:
            result = result + segment
        return result
