"""The norms of the residual stream and of the heads."""

from __future__ import annotations

import torch
from torch import nn

from m3_vllm.adapters.cpu.arithmetic import gemma_norm


class GemmaNorm(nn.Module):
    """Gemma's RMS norm with the addition to the residual that precedes it; vLLM's own class for this model needs FlashInfer."""

    def __init__(self, width: int, eps: float) -> None:
        """Weights of ``width``, zero until loaded; ``eps`` is added to the mean square."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def add(self, value: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``value`` to ``residual`` and norm the sum.

        The norm reads the sum before its rounding (MiniMax-M3 facts: input norm with add).

        Args:
            value: bf16 [S, N].
            residual: bf16 [S, N].

        Returns:
            (bf16 norm of the float32 sum, bf16 sum), both fresh.
        """
        total = value.to(torch.float32) + residual.to(torch.float32)
        return gemma_norm(total, self.weight, self.eps).to(value.dtype), total.to(residual.dtype)
