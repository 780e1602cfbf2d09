"""The second half of a sparse layer in stock form: every rank's own torch, vLLM's collectives between.

It has the launch's signature, and the bits of the launch on the CPU target, so a step can run either.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from m3_kernels.ffn import FfnConstants
from m3_kernels.reference.arithmetic import ROUNDED
from m3_kernels.reference.norm import norm
from m3_kernels.reference.reduce import sum_of_squares
from m3_vllm.adapters.cpu.experts import Experts, Router
from m3_vllm.adapters.cpu.norm import GemmaNorm


class StockFfnHalf:
    """From the unreduced attention output to the reduced output of the experts, bound to one layer's modules."""

    def __init__(self, norm: GemmaNorm, ffn: SparseFfn, constants: FfnConstants) -> None:
        """Bind the half to a layer: the norm after attention, router and experts, constants of the arithmetic."""
        self._norm = norm
        self._ffn = ffn
        self._constants = constants

    def __call__(self, part: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the half; a collective: every rank of the tensor-parallel group calls it with the same number of rows.

        Args:
            part: bf16 [S, H], this rank's unreduced output projection.
            residual: bf16 [S, H].
            slots: int64, at least S, negative where a row is padding; None if no row is. A padded row's output is 0.

        Returns:
            (bf16 [S, H] output of the experts, summed over ranks; bf16 [S, H] new residual), both fresh.
        """
        if slots is None:
            slots = torch.zeros(part.shape[0], dtype=torch.int64)
        stream = sum_over_ranks(part).to(torch.float32) + residual.to(torch.float32)
        normed = norm(stream, sum_of_squares(stream), self._norm.weight.data, self._norm.eps, ROUNDED).to(torch.bfloat16)
        routes = self._ffn.gate(normed, self._ffn.e_score_correction_bias.data, slots, self._constants)
        out = sum_over_ranks(self._ffn.experts(normed, routes, slots, self._constants))
        return out, stream.to(torch.bfloat16)


def sum_over_ranks(part: torch.Tensor) -> torch.Tensor:
    """Sum of every rank's bf16 ``part`` [S, H] in float32, in rank order, rounded once; the same bits on every rank.

    Two terms have one order and one rounding, so vLLM's own all-reduce gives just that; more ranks gather the parts.
    """
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return part
    if ranks == 2:
        # vLLM's CPU all-reduce writes into its argument.
        return tensor_model_parallel_all_reduce(part.clone())
    parts = tensor_model_parallel_all_gather(part.unsqueeze(0), dim=0)
    total = parts[0].to(torch.float32)
    for rank in range(1, ranks):
        total = total + parts[rank].to(torch.float32)
    return total.to(part.dtype)


class SparseFfn(nn.Module):
    """Parameters of a sparse layer's router and experts under their published names.

    Attributes:
        gate: the router.
        e_score_correction_bias: float32 [E].
        experts: routed experts and the shared one.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, intermediate: int, *, rank: int, ranks: int) -> None:
        """Sizes as of :class:`Router` and :class:`Experts`."""
        super().__init__()
        self.gate = Router(hidden, experts, top_k)
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
        self.experts = Experts(experts, hidden, intermediate, rank=rank, ranks=ranks)

    def prepare(self) -> None:
        """Lay the loaded weights out for the stock half."""
        self.gate.prepare()
        self.experts.prepare()
