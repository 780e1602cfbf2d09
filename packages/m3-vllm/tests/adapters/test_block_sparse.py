from __future__ import annotations

import math

import pytest
import torch

from m3_vllm.adapters.cpu.block_sparse import attend, insert_index_keys, insert_pairs, select_blocks

BLOCK, WIDTH, PAGES = 128, 128, 12


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choose_by_loop(query: torch.Tensor, keys: torch.Tensor, position: int, top_k: int, init_blocks: int, local_blocks: int) -> list[int]:
    """One row, one head, from the rule's words: blocks by (forced, score, lower number)."""
    own = position // BLOCK
    ranked = []
    for block in range(own + 1):
        scores = [float(query @ keys[token]) for token in range(block * BLOCK, min((block + 1) * BLOCK, position + 1))]
        score = max(-1e30 if math.isnan(value) else value for value in scores)
        if block < init_blocks:
            score = 1e30
        if block > own - local_blocks:
            score = 1e29
        ranked.append((-score, block))
    return ([block for _, block in sorted(ranked)] + [-1] * top_k)[:top_k]


@pytest.mark.parametrize(("init_blocks", "local_blocks"), [(0, 1), (1, 1), (2, 2), (0, 0)])
def test_blocks_are_the_rules_choice(init_blocks: int, local_blocks: int) -> None:
    """Integers: every score is exact, and many tie."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-1, 2, (PAGES, BLOCK, WIDTH), generator=generator).bfloat16()
    tables = torch.tensor([[3, 7, 1, 9, 0, 5], [2, 4, 6, 0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([100, 127, 128, 383, 640, 700, 5, 200, 300])
    bounds = ((0, 6), (6, 9))
    query = torch.randint(-1, 2, (9, 2, WIDTH), generator=generator).bfloat16()
    query[:, :, 4:] = 0
    chosen = select_blocks(query, keys, tables, positions, bounds, top_k=3, init_blocks=init_blocks, local_blocks=local_blocks)
    for request, (first, end) in enumerate(bounds):
        sequence = keys[tables[request].long()].reshape(-1, WIDTH).float()
        for row in range(first, end):
            for head in range(2):
                expected = choose_by_loop(query[row, head].float(), sequence, int(positions[row]), 3, init_blocks, local_blocks)
                assert chosen[row, head].tolist() == expected, (row, head)


def test_a_nan_query_still_sees_its_blocks() -> None:
    keys = random(PAGES, BLOCK, WIDTH, seed=0).bfloat16()
    query = torch.full((1, 1, WIDTH), math.nan, dtype=torch.bfloat16)
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    chosen = select_blocks(query, keys, table, torch.tensor([300]), ((0, 1),), top_k=2, init_blocks=0, local_blocks=1)
    assert chosen.tolist() == [[[2, 0]]]


def test_attention_over_the_chosen_blocks() -> None:
    """Against float64 over the concatenated visible tokens of the chosen blocks, for two requests with shuffled pages."""
    cache = random(PAGES, 2, BLOCK, 2 * WIDTH, seed=1).bfloat16()
    tables = torch.tensor([[3, 7, 1, 9], [2, 4, 6, 0]], dtype=torch.int32)
    positions = torch.tensor([511, 130, 0, 383])
    requests = torch.tensor([0, 0, 1, 1])
    chosen = torch.tensor([[[3, 0], [3, 1]], [[1, 0], [1, -1]], [[0, -1], [0, -1]], [[2, 1], [2, 0]]])
    query = random(4, 8, WIDTH, seed=2).bfloat16()
    scale = WIDTH**-0.5
    out = attend(query, cache, tables, requests, positions, chosen, scale)
    for row in range(4):
        for head in range(8):
            group = head // 4
            keys, values = [], []
            for block in chosen[row, group].tolist():
                if block >= 0:
                    seen = min(BLOCK, int(positions[row]) + 1 - block * BLOCK)
                    page = cache[int(tables[requests[row], block]), group, :seen].double()
                    keys.append(page[:, :WIDTH])
                    values.append(page[:, WIDTH:])
            weights = (torch.cat(keys) @ query[row, head].double() * scale).softmax(dim=0)
            exact = weights @ torch.cat(values)
            # Half a unit of the bf16 result, and float32 sums of at most 256 terms of at most the largest value.
            limit = exact.abs() * 2.0**-8 + 512 * 2.0**-24 * torch.cat(values).abs().max()
            assert ((out[row, head].double() - exact).abs() <= limit).all()


def test_another_requests_tokens_in_a_page_do_not_pass() -> None:
    cache = random(PAGES, 1, BLOCK, 2 * WIDTH, seed=1).bfloat16()
    query = random(1, 2, WIDTH, seed=2).bfloat16()
    table, request, position = torch.tensor([[5]], dtype=torch.int32), torch.tensor([0]), torch.tensor([40])
    chosen = torch.tensor([[[0, -1]]])
    clean = attend(query, cache, table, request, position, chosen, 0.1)
    cache[5, :, 41:] = math.nan
    assert torch.equal(attend(query, cache, table, request, position, chosen, 0.1), clean)


def test_rows_do_not_depend_on_each_other() -> None:
    cache, keys = random(PAGES, 2, BLOCK, 2 * WIDTH, seed=1).bfloat16(), random(PAGES, BLOCK, WIDTH, seed=4).bfloat16()
    table = torch.tensor([[3, 7, 1, 9, 0]], dtype=torch.int32)
    positions = torch.arange(500, 540)
    query, index_query = random(40, 8, WIDTH, seed=2).bfloat16(), random(40, 2, WIDTH, seed=5).bfloat16()

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(positions[rows])
        chosen = select_blocks(index_query[rows], keys, table, positions[rows], ((0, count),), top_k=3, init_blocks=0, local_blocks=1)
        return chosen, attend(query[rows], cache, table, torch.zeros(count, dtype=torch.int64), positions[rows], chosen, 0.1)

    chosen, out = run(slice(0, 40))
    for rows in (slice(0, 1), slice(3, 5), slice(17, 40)):
        alone_chosen, alone = run(rows)
        assert torch.equal(alone_chosen, chosen[rows])
        assert torch.equal(alone, out[rows])


def test_inserts_skip_padding() -> None:
    cache, index = torch.zeros(3, 2, BLOCK, 2 * WIDTH).bfloat16(), torch.zeros(3, BLOCK, WIDTH).bfloat16()
    slots = torch.tensor([2 * BLOCK + 5, -1, 7])
    keys, values = random(3, 2, WIDTH, seed=0).bfloat16(), random(3, 2, WIDTH, seed=1).bfloat16()
    insert_pairs(cache, slots, keys, values)
    insert_index_keys(index, slots, keys[:, 0])
    assert torch.equal(cache[2, :, 5], torch.cat([keys[0], values[0]], dim=-1))
    assert torch.equal(index[0, 7], keys[2, 0])
    assert int((cache != 0).any(dim=-1).sum()) == 4
    assert int((index != 0).any(dim=-1).sum()) == 2
