from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_core import layout
from m3_core.errors import ConfigurationError, RefusalError
from m3_core.formulas import round_up
from m3_core.layout import ChannelLayout, EpochWords, PeerLayout, Region, ScratchLayout, check_regions
from m3_core.work import MAX_EXPERTS, MAX_ROWS, WORLD_SIZES, WorkShape

WORLDS = st.sampled_from(WORLD_SIZES)
ROWS = st.integers(1, MAX_ROWS)
HIDDEN = st.integers(1, 4096).map(lambda half: 2 * half)
TOP_K_EXPERTS = st.integers(1, MAX_EXPERTS).flatmap(lambda experts: st.tuples(st.integers(1, min(8, experts)), st.just(experts)))


def test_published_peer_buffer() -> None:
    peer = PeerLayout(world_size=4, max_rows=16, hidden=6144)
    assert (peer.triples, peer.column_pairs) == (2048, 3072)
    assert peer.half_bytes == 2_621_440
    assert peer.total_bytes == 5_243_136
    assert peer.handshake_pair(3) == 88
    assert peer.attention_offset(0) == 256
    assert peer.attention_pair(1, 3, 15, 2047) == 256 + 2_621_440 + ((3 * 16 + 15) * 2048 + 2047) * 8
    assert peer.ffn_pair(0, 2, 1, 7) == 256 + 4 * 16 * 2048 * 8 + ((2 * 16 + 1) * 3072 + 7) * 8


def test_published_peer_allocation_is_whole_pages() -> None:
    assert ChannelLayout(1, PeerLayout(4, 16, 6144)).total_bytes == 5_246_976


def total_with_published_tiles(rows: int) -> int:
    """Our gate/up tiles are half as tall as the published ones: there are 96 a slot instead of 48, and as many pairs."""
    ours = ScratchLayout(rows, 6144, 768, 128, 4, timeline_blocks=256)
    pairs, published_pairs = (round_up(8 * ours.work.slots * tiles, 256) for tiles in (96, 48))
    return ours.total_bytes - pairs + published_pairs


@pytest.mark.parametrize(("rows", "total"), [(1, 204_288), (4, 666_624), (16, 2_516_736)])
def test_published_scratch(rows: int, total: int) -> None:
    assert total_with_published_tiles(rows) == total


def test_published_scratch_of_all_widths() -> None:
    assert sum(total_with_published_tiles(rows) for rows in range(1, 17)) == 21_768_192


def test_published_work() -> None:
    work = WorkShape(rows=16, hidden=6144, intermediate=768, experts=128, top_k=4)
    assert work.push_tasks == 128
    assert (work.expert_tiles, work.router_parts, work.router_part_columns, work.router_tasks) == (8, 16, 384, 128)
    assert work.gate_up_tiles == 96
    assert (work.down_tasks, work.final_tasks) == (384, 192)
    assert (work.slots, work.slot_columns, work.picks) == (65, 16, 80)


@settings(max_examples=60)
@given(WORLDS, ROWS, HIDDEN)
def test_peer_regions_fill_the_buffer_without_overlap(world: int, rows: int, hidden: int) -> None:
    peer = PeerLayout(world, rows, hidden)
    regions = peer.regions
    assert regions[2].offset == layout.ERROR_LINE_BYTES
    for before, after in itertools.pairwise(regions[2:]):
        assert before.end == after.offset
    assert regions[-1].end == peer.total_bytes


@settings(max_examples=20)
@given(WORLDS, st.integers(1, 3), st.integers(1, 30).map(lambda half: 2 * half))
def test_every_pair_has_its_own_bytes(world: int, rows: int, hidden: int) -> None:
    peer = PeerLayout(world, rows, hidden)
    offsets = [peer.handshake_pair(rank) for rank in range(world)]
    for parity in range(2):
        for source in range(world):
            for row in range(rows):
                offsets += [peer.attention_pair(parity, source, row, triple) for triple in range(peer.triples)]
                offsets += [peer.ffn_pair(parity, source, row, pair) for pair in range(peer.column_pairs)]
    assert len(set(offsets)) == len(offsets)
    assert all(offset % 8 == 0 for offset in offsets)
    assert min(offsets) >= layout.ERROR_WORDS_BYTES
    assert max(offsets) + 8 == peer.total_bytes


@settings(max_examples=60)
@given(ROWS, HIDDEN, st.integers(1, 1024), TOP_K_EXPERTS, st.integers(0, 64))
def test_scratch_regions_are_aligned_and_apart(rows: int, hidden: int, intermediate: int, picks: tuple[int, int], blocks: int) -> None:
    top_k, experts = picks
    scratch = ScratchLayout(rows, hidden, intermediate, experts, top_k, blocks)
    assert all(region.offset % 256 == 0 for region in scratch.regions)
    assert scratch.total_bytes % 256 == 0
    work = scratch.work
    last = {
        "ssq": 8 * layout.ssq_pair_index(hidden, rows - 1, work.push_tasks - 1),
        "logit": 8 * layout.logit_pair_index(hidden, experts, rows - 1, experts - 1, work.router_parts - 1),
        "route": 8 * (layout.route_pair_index(top_k, rows - 1, top_k - 1) + top_k),
        "intermediate_ready": 8 * layout.intermediate_pair_index(intermediate, work.slots - 1, work.gate_up_tiles - 1),
        "stream": 4 * layout.stream_index(hidden, rows - 1, layout.hidden_stride(hidden) - 1),
        "x": 2 * layout.x_index(hidden, rows - 1, layout.hidden_stride(hidden) - 1),
        "mid": 2
        * layout.mid_index(rows, intermediate, work.slots - 1, work.slot_columns - 1, layout.intermediate_stride(intermediate) - 1),
    }
    width = {"stream": 4, "x": 2, "mid": 2}
    for region in scratch.regions:
        if region.name in last:
            assert last[region.name] + width.get(region.name, 8) == region.nbytes, region.name


@given(st.integers(1, 30000).map(lambda half: 2 * half))
def test_tasks_cover_every_column_once(hidden: int) -> None:
    work = WorkShape(1, hidden, 16, 1, 1)
    for tasks, columns in (
        (work.push_tasks, 48),
        (work.router_parts, work.router_part_columns),
        (work.down_tasks, 16),
        (work.final_tasks, 32),
    ):
        assert (tasks - 1) * columns < hidden <= tasks * columns
    assert work.router_parts <= 16
    assert work.router_part_columns % 16 == 0


@given(st.integers(0, 255), st.integers(1, 512), st.integers(0, 2000))
def test_tasks_go_round_the_grid(start: int, grid: int, task: int) -> None:
    from m3_core.work import first_block, task_block

    assert 0 <= first_block(start, grid) < grid
    assert task_block(start, task, grid) == (first_block(start, grid) + task) % grid


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((3, 16, 64), "world size is 3"),
        ((4, 0, 64), "rows is 0"),
        ((4, 65, 64), "rows is 65"),
        ((4, 16, 63), "hidden is 63"),
        ((4, 16, 0), "hidden is 0"),
        ((4, 16, 65538), "hidden is 65538"),
    ],
)
def test_peer_layout_refuses(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(RefusalError, match=named):
        PeerLayout(*sizes)


def test_a_refusal_lists_all_reasons() -> None:
    with pytest.raises(RefusalError) as caught:
        ScratchLayout(65, 63, 0, 0, 9, -1)
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        "hidden",
        "rows",
        "intermediate",
        "experts",
        "top_k",
        "timeline_blocks",
    ]
    with pytest.raises(RefusalError, match="a row picks each expert at most once"):
        ScratchLayout(1, 64, 16, 2, 3)


def test_scratch_refuses_more_than_32_bit_indices() -> None:
    with pytest.raises(RefusalError, match="lower rows or top_k"):
        ScratchLayout(64, 65536, 65536, 512, 8)
    with pytest.raises(RefusalError, match="rows is 65"):
        WorkShape(65, 64, 16, 4, 1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda p: p.attention_offset(2), "parity is 2; pass 0 to 1"),
        (lambda p: p.ffn_offset(-1), "parity is -1"),
        (lambda p: p.attention_pair(0, 2, 0, 0), "source is 2"),
        (lambda p: p.attention_pair(0, 0, 4, 0), "row is 4"),
        (lambda p: p.attention_pair(0, 0, 0, 22), "triple is 22"),
        (lambda p: p.ffn_pair(0, 0, 0, 32), "column_pair is 32"),
        (lambda p: p.handshake_pair(2), "rank is 2"),
    ],
)
def test_indices_out_of_range(call: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        call(PeerLayout(2, 4, 64))  # type: ignore[operator]


def test_channels() -> None:
    channels = ChannelLayout(3, PeerLayout(2, 4, 64))
    assert channels.channel_bytes == 8192
    assert [channels.offset(c) for c in range(3)] == [0, 8192, 16384]
    assert channels.total_bytes == 24576
    with pytest.raises(ConfigurationError, match="channel is 3"):
        channels.offset(3)
    with pytest.raises(ConfigurationError, match="channels is 0"):
        ChannelLayout(0, PeerLayout(2, 4, 64))


def test_epoch_words() -> None:
    words = EpochWords(256)
    assert (words.words, words.nbytes) == (260, 1040)
    assert [words.mark(b) for b in (0, 255)] == [4, 259]
    with pytest.raises(ConfigurationError, match="block is 256"):
        words.mark(256)
    with pytest.raises(ConfigurationError, match="grid is 0"):
        EpochWords(0)


@pytest.mark.parametrize(
    ("regions", "named"),
    [
        ((Region("a", 0, 16), Region("b", 8, 8)), "region b at byte 8 overlaps a"),
        ((Region("a", 4, 8),), "not aligned"),
        ((Region("a", 0, 72),), "past the buffer's 64"),
    ],
)
def test_overlap_is_found(regions: tuple[Region, ...], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_regions(regions, 64)
