"""AITER's layouts after loading: the (16, 16) shuffle of weight bytes and the shuffle of E8M0 scales (MiniMax-M3 facts: weight layouts)."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_core.formulas import round_up

TILE_ROWS = 16
CHUNK_BYTES = 16
ROW_BYTES_MULTIPLE = 32
SCALE_ROWS_MULTIPLE = 256
SCALE_GROUPS_MULTIPLE = 8


def _require_rows(experts_rows_bytes: torch.Size) -> tuple[int, int, int]:
    if len(experts_rows_bytes) != 3:
        raise ConfigurationError(f"weights have shape {list(experts_rows_bytes)}; [experts, rows, bytes] is needed")
    experts, rows, row_bytes = experts_rows_bytes
    if rows % TILE_ROWS or row_bytes % ROW_BYTES_MULTIPLE:
        raise ConfigurationError(
            f"{rows} rows of {row_bytes} bytes: the (16, 16) shuffle needs a multiple of {TILE_ROWS} rows and of {ROW_BYTES_MULTIPLE} bytes"
        )
    return experts, rows, row_bytes


def shuffle_weights(weights: Tensor) -> Tensor:
    """Row-major bytes to the (16, 16) shuffle: 16 rows by 16 bytes lie together.

    Args:
        weights: uint8 [experts, rows, bytes], rows a multiple of 16, bytes of 32.

    Raises:
        ConfigurationError: if the shape does not fit.
    """
    experts, rows, row_bytes = _require_rows(weights.shape)
    tiles = weights.reshape(experts, rows // TILE_ROWS, TILE_ROWS, row_bytes // CHUNK_BYTES, CHUNK_BYTES)
    return tiles.permute(0, 1, 3, 2, 4).reshape(experts, rows, row_bytes).contiguous()


def unshuffle_weights(shuffled: Tensor) -> Tensor:
    """The inverse of ``shuffle_weights``."""
    experts, rows, row_bytes = _require_rows(shuffled.shape)
    tiles = shuffled.reshape(experts, rows // TILE_ROWS, row_bytes // CHUNK_BYTES, TILE_ROWS, CHUNK_BYTES)
    return tiles.permute(0, 1, 3, 2, 4).reshape(experts, rows, row_bytes).contiguous()


def _scale_axes(rows: int, groups: int) -> tuple[int, int, int, int, int, int]:
    return rows // 32, 2, 16, groups // 8, 2, 4


def shuffle_scales(scales: Tensor, *, padding: int = 0) -> Tensor:
    """Row-major scales to the E8M0 shuffle; rows are padded to a multiple of 256, groups of 8.

    Args:
        scales: uint8 [rows, groups], rows counted over all experts.
        padding: the code that fills the padding (AITER leaves it as it finds it).

    Returns:
        uint8 [padded rows, padded groups].

    Raises:
        ConfigurationError: if ``scales`` is not two-dimensional.
    """
    if scales.dim() != 2:
        raise ConfigurationError(f"scales have shape {list(scales.shape)}; [rows, groups] is needed")
    rows, groups = scales.shape
    padded_rows, padded_groups = round_up(rows, SCALE_ROWS_MULTIPLE), round_up(groups, SCALE_GROUPS_MULTIPLE)
    padded = torch.full((padded_rows, padded_groups), padding, dtype=torch.uint8)
    padded[:rows, :groups] = scales
    return padded.view(_scale_axes(padded_rows, padded_groups)).permute(0, 3, 5, 2, 4, 1).reshape(padded_rows, padded_groups).contiguous()


def unshuffle_scales(shuffled: Tensor, rows: int, groups: int) -> Tensor:
    """The inverse of ``shuffle_scales``, without the padding.

    Args:
        shuffled: uint8, any shape that holds the rows, padded to a multiple of 32 or more, by the groups padded to 8.
        rows: rows over all experts.
        groups: groups a row, not padded.

    Raises:
        ConfigurationError: if there are too few scales.
    """
    padded_groups = round_up(groups, SCALE_GROUPS_MULTIPLE)
    stored_rows = shuffled.numel() // padded_groups
    if stored_rows * padded_groups != shuffled.numel() or stored_rows < rows or stored_rows % 32:
        raise ConfigurationError(
            f"{shuffled.numel()} scales cannot be {rows} rows (padded to 32) of {groups} groups (padded to {padded_groups})"
        )
    blocks, _, _, columns, _, _ = _scale_axes(stored_rows, padded_groups)
    logical = shuffled.reshape(blocks, columns, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2).reshape(stored_rows, padded_groups)
    return logical[:rows, :groups].contiguous()
