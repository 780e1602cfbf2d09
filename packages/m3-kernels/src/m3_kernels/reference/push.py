"""Stage push: bf16 values travel three to a word (MiniMax-M3 facts: the fused launch, memory rules)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.epochs import triple_tag
from m3_core.work import COLUMNS_A_TRIPLE, triples


def triple_words(part: Tensor, epoch: int) -> Tensor:
    """The triple pairs that a rank pushes in launch ``epoch``.

    Args:
        part: bf16 [rows, hidden].
        epoch: of the launch.

    Returns:
        int64 [rows, triples]: three columns ascending from bit 0, the tag in the top 16 bits; columns past ``hidden`` are 0.
    """
    rows, hidden = part.shape
    count = triples(hidden)
    bits = torch.zeros(rows, count * COLUMNS_A_TRIPLE, dtype=torch.int64)
    bits[:, :hidden] = part.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    columns = bits.view(rows, count, COLUMNS_A_TRIPLE)
    tag = triple_tag(epoch)
    signed_tag = tag - 0x10000 if tag & 0x8000 else tag
    return columns[..., 0] | columns[..., 1] << 16 | columns[..., 2] << 32 | signed_tag << 48
