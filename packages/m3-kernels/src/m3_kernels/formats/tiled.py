"""MXFP4 in tiles, for targets that copy weights into shared memory: what a wave multiplies in one step lies together.

A matrix is cut into tiles of 16 rows; of gate and up projections a tile has eight gate rows and the same eight up rows. A tile is cut along K
into steps of 128, K padded with zeros. A step has 1088 bytes:

- 1024 bytes of codes: the 16 bytes of row r and group g (32 K) begin at ``512 * (r // 8) + 16 * (4 * (r % 8) + g)``. They are four words of
  32 bits, low byte first, a word for eight K. The codes of K 2 p and 2 p + 1 of a word lie in its lower and upper half, at the same places:
  sign bit ``SIGN_BIT[p]``, magnitude bits from ``MAGNITUDE_BIT[p]`` on. A shift and a mask bring them to the border of a bf16's exponent and
  mantissa (``m3/platform/nvidia.h``).
- 64 bytes of E8M0 scales: that of row r and group g is byte ``1024 + 2 * (4 * (r % 8) + g) + r // 8``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_core.formulas import ceil_div
from m3_kernels.formats.mxfp4 import GROUP

TILE_ROWS = 16
STEP_K = 128
CODE_BYTES = 1024
STEP_BYTES = 1088
SIGN_BIT = (15, 12, 13, 14)
MAGNITUDE_BIT = (6, 3, 0, 9)
LARGEST_SCALE = 128
"""The largest E8M0 code of the layout: beyond it, scale and conversion are no single bf16 factor."""

_GROUPS = STEP_K // GROUP
assert CODE_BYTES == TILE_ROWS * STEP_K // 2


def tiled_shape(experts: int, rows: int, k: int) -> tuple[int, int, int, int]:
    """Shape of a tiled matrix: [experts, tiles, steps, bytes of a step]."""
    return experts, ceil_div(rows, TILE_ROWS), ceil_div(k, STEP_K), STEP_BYTES


def tile(codes: Tensor, scales: Tensor, *, gate_up: bool) -> Tensor:
    """Row-major MXFP4 in tiles.

    Args:
        codes: uint8 [experts, rows, K / 2], the even K index in the low nibble.
        scales: uint8 [experts, rows, K / 32], E8M0.
        gate_up: whether the first half of the rows are gate rows and the second the matching up rows.

    Returns:
        uint8 [experts, rows / 16, ceil(K / 128), 1088].

    Raises:
        ConfigurationError: if the shapes do not fit, rows are no multiple of 16, or a scale code is above 128 (2 to the power of 1; NaN is 255).
    """
    experts, rows, row_bytes = codes.shape
    if rows % TILE_ROWS or row_bytes % (GROUP // 2) or tuple(scales.shape) != (experts, rows, 2 * row_bytes // GROUP):
        raise ConfigurationError(
            f"codes have shape {list(codes.shape)} and scales {list(scales.shape)}; [experts, rows, K / 2] and [experts, rows, K / 32] are needed, "
            f"rows a multiple of {TILE_ROWS}, K of {GROUP}"
        )
    largest = int(scales.max()) if scales.numel() else 0
    if largest > LARGEST_SCALE:
        raise ConfigurationError(f"a scale code is {largest}; tiled MXFP4 holds codes up to {LARGEST_SCALE}: hold these experts as mxfp4")
    found = torch.empty(tiled_shape(experts, rows, 2 * row_bytes), dtype=torch.uint8, device=codes.device)
    # An expert at a time: what lies between is several times as large.
    for expert in range(experts):
        found[expert] = _tile_one(codes[expert], scales[expert], gate_up)
    return found


def _tile_one(codes: Tensor, scales: Tensor, gate_up: bool) -> Tensor:
    rows, row_bytes = codes.shape
    steps = ceil_div(2 * row_bytes, STEP_K)
    padded_codes = codes.new_zeros(rows, steps * STEP_K // 2)
    padded_codes[:, :row_bytes] = codes
    padded_scales = scales.new_zeros(rows, steps * _GROUPS)
    padded_scales[:, : scales.shape[1]] = scales
    order = _row_order(rows, gate_up, codes.device)
    # Row r of a tile as (r // 8, r % 8).
    bytes_ = padded_codes[order].view(-1, 2, 8, steps, _GROUPS, 4, 4).to(torch.int32)
    half = torch.zeros(*bytes_.shape[:-1], 2, dtype=torch.int32, device=codes.device)
    for pair, (sign, magnitude) in enumerate(zip(SIGN_BIT, MAGNITUDE_BIT, strict=True)):
        both = torch.stack((bytes_[..., pair] & 15, bytes_[..., pair] >> 4), dim=-1)
        half |= (both & 7) << magnitude | (both >> 3) << sign
    spread = torch.stack((half & 255, half >> 8), dim=-1).to(torch.uint8).flatten(-3)
    tiles = spread.permute(0, 3, 1, 2, 4, 5).reshape(-1, steps, CODE_BYTES)
    factors = padded_scales[order].view(-1, 2, 8, steps, _GROUPS).permute(0, 3, 2, 4, 1).reshape(-1, steps, STEP_BYTES - CODE_BYTES)
    return torch.cat((tiles, factors), dim=-1)


def untile(tiled: Tensor, k: int, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """The inverse of ``tile``: codes uint8 [experts, rows, K / 2] and scales uint8 [experts, rows, K / 32]."""
    experts, tiles, steps, _ = tiled.shape
    rows = TILE_ROWS * tiles
    half = tiled[..., :CODE_BYTES].reshape(experts, tiles, steps, 2, 8, _GROUPS, 4, 2, 2).to(torch.int32)
    half = half[..., 0] | half[..., 1] << 8
    pairs = []
    for sign, magnitude in zip(SIGN_BIT, MAGNITUDE_BIT, strict=True):
        code = half >> magnitude & 7 | (half >> sign & 1) << 3
        pairs.append(code[..., 0] | code[..., 1] << 4)
    codes = torch.stack(pairs, dim=-1).permute(0, 1, 3, 4, 2, 5, 6, 7).reshape(experts, rows, steps * STEP_K // 2).to(torch.uint8)
    scales = tiled[..., CODE_BYTES:].reshape(experts, tiles, steps, 8, _GROUPS, 2).permute(0, 1, 5, 3, 2, 4).reshape(experts, rows, -1)
    back = torch.argsort(_row_order(rows, gate_up, tiled.device))
    return codes[:, back, : k // 2].contiguous(), scales[:, back, : k // GROUP].contiguous()


def _row_order(rows: int, gate_up: bool, device: torch.device) -> Tensor:
    """The matrix's row at each row of the tiles."""
    order = torch.arange(rows, device=device)
    return order.view(2, -1, TILE_ROWS // 2).transpose(0, 1).reshape(-1) if gate_up else order
