"""Per-head norm and partial rotation: what one fused operator does on a GPU."""

from __future__ import annotations

import torch

from m3_vllm.adapters.cpu.arithmetic import gemma_norm


def norm_and_rotate(heads: torch.Tensor, weight: torch.Tensor, eps: float, cosines_sines: torch.Tensor) -> torch.Tensor:
    """Norm each head, rotate its first dimensions by position, round once.

    The norm's result stays in float32 until after the rotation (MiniMax-M3 facts: per-head norms, partial rotation).

    Args:
        heads: bf16 [S, heads, D].
        weight: [D], the norm's offset from 1.
        eps: the norm's epsilon.
        cosines_sines: [S, R], this row's R/2 cosines, then R/2 sines; R <= D dimensions rotate, as two halves.

    Returns:
        bf16 [S, heads, D].
    """
    rotated = cosines_sines.shape[-1]
    half = rotated // 2
    normed = gemma_norm(heads, weight, eps)
    cosine, sine = cosines_sines.to(torch.float32).unsqueeze(1).chunk(2, dim=-1)
    low, high = normed[..., :half], normed[..., half:rotated]
    out = torch.empty_like(heads)
    out[..., :half] = low * cosine - high * sine
    out[..., half:rotated] = high * cosine + low * sine
    out[..., rotated:] = normed[..., rotated:]
    return out
