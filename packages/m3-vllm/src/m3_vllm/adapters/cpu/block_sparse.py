"""Block-sparse attention in plain torch: the lightning indexer's choice of blocks, and attention over the chosen ones.

A block is one page of the paged caches. Both functions treat prefill and decode rows alike, one row at a time in effect: what a
row gets does not depend on the other rows of the step, nor on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m3_vllm.adapters.cpu.arithmetic import tiled_product

INIT_SCORE = 1e30
LOCAL_SCORE = 1e29
"""Scores that force a block; where a block is both, local is written last and stands (MiniMax-M3 facts: indexer semantics)."""
ATTENTION_TILE_ROWS = 16
"""Rows whose blocks are gathered together; bounds the copy of keys and values to rows x kv heads x top-k blocks."""


def select_blocks(
    index_query: torch.Tensor,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    request_bounds: Sequence[tuple[int, int]],
    *,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> torch.Tensor:
    """Choose each row's blocks by the largest product of its index query with a visible index key.

    Args:
        index_query: [S, heads, D], normed and rotated.
        index_cache: [pages, block tokens, D], one key a token, shared by the heads.
        block_table: int [requests, blocks], the page of each block of a request.
        positions: int [S], place of the row's token in its request; keys up to and including it are visible.
        request_bounds: first row and end row of each request.
        top_k: blocks to choose.
        init_blocks: blocks at the start of the request that are always chosen.
        local_blocks: blocks up to the row's own that are always chosen.

    Returns:
        int64 [S, heads, top_k]: block numbers within the request by descending score, the lower number first among equals; -1
        where fewer blocks are visible.
    """
    count, heads, width = index_query.shape
    block_tokens = index_cache.shape[1]
    chosen = torch.full((count, heads, top_k), -1, dtype=torch.int64, device=index_query.device)
    for request, (first, end) in enumerate(request_bounds):
        if first == end:
            continue
        position = positions[first:end, None]
        own = position // block_tokens
        blocks = int(own.max()) + 1
        keys = index_cache[block_table[request, :blocks].long()].reshape(blocks * block_tokens, width)
        scores = tiled_product(index_query[first:end].reshape(-1, width), keys).view(end - first, heads, -1)
        future = torch.arange(blocks * block_tokens, device=keys.device) > position
        # A block with a NaN score is the last of the visible ones.
        scores = torch.nan_to_num(scores, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        best = scores.masked_fill(future.unsqueeze(1), float("-inf")).view(end - first, heads, blocks, block_tokens).amax(dim=-1)

        block = torch.arange(blocks, device=keys.device)
        visible = block <= own
        best = best.masked_fill((visible & (block < init_blocks)).unsqueeze(1), INIT_SCORE)
        best = best.masked_fill((visible & (block > own - local_blocks)).unsqueeze(1), LOCAL_SCORE)
        # Invisible blocks sort behind visible ones by position alone: an infinite score must not make them equal.
        order = torch.sort(best, dim=-1, descending=True, stable=True).indices
        kept = order[..., : min(top_k, blocks)]
        chosen[first:end, :, : kept.shape[-1]] = torch.where(kept <= own.unsqueeze(1), kept, -1)
    return chosen


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of each row over its chosen blocks, in float32, rounded once.

    Args:
        query: [S, heads, D].
        cache: [pages, kv heads, block tokens, 2 D], a token's key and then its value.
        block_table: int [requests, blocks], the page of each block of a request.
        row_request: int [S], the row's request.
        positions: int [S], place of the row's token in its request.
        chosen: int64 [S, kv heads, K], block numbers within the request, -1 for none; each row names a block that it can see.
        scale: factor of the products before the softmax.

    Returns:
        [S, heads, D] in the query's type.
    """
    count, heads, width = query.shape
    _, kv_heads, block_tokens, _ = cache.shape
    out = torch.empty_like(query)
    head = torch.arange(kv_heads, device=query.device)[None, :, None]
    token = torch.arange(block_tokens, device=query.device)
    for first in range(0, count, ATTENTION_TILE_ROWS):
        tile = slice(first, min(first + ATTENTION_TILE_ROWS, count))
        blocks = chosen[tile]
        rows = blocks.shape[0]
        safe = blocks.clamp(min=0)
        table = block_table[row_request[tile]].long().unsqueeze(1).expand(-1, kv_heads, -1)
        pages = cache[table.gather(2, safe), head].to(torch.float32).view(rows, kv_heads, -1, 2 * width)
        seen = (blocks.unsqueeze(-1) >= 0) & (safe.unsqueeze(-1) * block_tokens + token <= positions[tile, None, None, None])
        seen = seen.view(rows, kv_heads, 1, -1)
        keys, values = pages[..., :width], pages[..., width:]
        grouped = query[tile].to(torch.float32).view(rows, kv_heads, heads // kv_heads, width)
        scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
        # A page may still hold another request's tokens behind this one's; not even a NaN of theirs may pass.
        visible_values = values.masked_fill(~seen.transpose(-1, -2), 0.0)
        out[tile] = (scores.softmax(dim=-1) @ visible_values).reshape(rows, heads, width).to(query.dtype)
    return out


def insert_pairs(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store keys and values [S, kv heads, D] at ``slots`` (int64 [S]; negative = nowhere) of a cache as in :func:`attend`."""
    real = slots >= 0
    page, offset = _place(slots[real], cache.shape[2])
    cache[page, :, offset] = torch.cat([keys[real], values[real]], dim=-1).to(cache.dtype)


def insert_index_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Store index keys [S, D] at ``slots`` (int64 [S]; negative = nowhere) of a cache as in :func:`select_blocks`."""
    real = slots >= 0
    page, offset = _place(slots[real], cache.shape[1])
    cache[page, offset] = keys[real].to(cache.dtype)


def _place(slots: torch.Tensor, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // block_tokens, slots % block_tokens
