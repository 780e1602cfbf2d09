"""Where every word lies: the peer buffer, its channels, the scratch of a row count, the epoch words.

All offsets are bytes. Words and numbers are little-endian. A *pair* is a 64-bit word of ``m3_core.words``.

Peer buffer of one channel (MiniMax-M3 facts: error line, handshake pairs, then two halves by parity, each with an attention and an FFN
region)::

    0                         error words: int32 set, rank, epoch, site
    64 + 8 * rank             handshake pairs
    256 + parity * half       attention region: pair (source * max_rows + row) * triples + triple
    ... + attention bytes     FFN region: pair (source * max_rows + row) * column_pairs + column pair

``source`` is the rank that pushed. The row stride is ``max_rows`` whatever the rows of a launch.
"""

from __future__ import annotations

import attrs

from m3_core.epochs import PARITIES
from m3_core.errors import ConfigurationError
from m3_core.formulas import Bytes, formula, round_up
from m3_core.work import (
    WorkShape,
    column_pairs,
    gate_up_tiles,
    push_tasks,
    require_shape,
    router_parts,
    shape_reasons,
    slot_columns,
    slots,
    triples,
)

PAIR_BYTES: Bytes = 8
WORD_BYTES: Bytes = 4
ERROR_LINE_BYTES: Bytes = 256
ERROR_WORDS = 4
ERROR_WORDS_BYTES: Bytes = ERROR_WORDS * WORD_BYTES
HANDSHAKE_OFFSET: Bytes = 64
SCRATCH_ALIGNMENT: Bytes = 256
CHANNEL_ALIGNMENT: Bytes = 4096
# Rows of bf16 and fp32 scratch start at multiples of this many elements: the K step of the matrix instructions and of MX scales.
ROW_ALIGNMENT = 32
EPOCH_WORD = 0
MARK_WORDS_START = 4
TIMELINE_STAMPS = 12
# Kernels index a buffer's pairs and elements with 32-bit signed integers.
MAX_REGION_BYTES: Bytes = 2**31 - 1


# --- peer buffer ---------------------------------------------------------------------------------------------------------------------


@formula
def handshake_pair(rank: int) -> Bytes:
    """The step-end handshake pair that ``rank`` writes."""
    return HANDSHAKE_OFFSET + PAIR_BYTES * rank


@formula
def attention_bytes(world_size: int, max_rows: int, hidden: int) -> Bytes:
    """Bytes of one attention region."""
    return PAIR_BYTES * world_size * max_rows * triples(hidden)


@formula
def ffn_bytes(world_size: int, max_rows: int, hidden: int) -> Bytes:
    """Bytes of one FFN region."""
    return PAIR_BYTES * world_size * max_rows * column_pairs(hidden)


@formula
def half_bytes(world_size: int, max_rows: int, hidden: int) -> Bytes:
    """Bytes of one parity half."""
    return attention_bytes(world_size, max_rows, hidden) + ffn_bytes(world_size, max_rows, hidden)


@formula
def peer_buffer_bytes(world_size: int, max_rows: int, hidden: int) -> Bytes:
    """Bytes of one channel's peer buffer."""
    return ERROR_LINE_BYTES + PARITIES * half_bytes(world_size, max_rows, hidden)


@formula
def attention_offset(world_size: int, max_rows: int, hidden: int, parity: int) -> Bytes:
    """Start of the attention region of a half."""
    return ERROR_LINE_BYTES + parity * half_bytes(world_size, max_rows, hidden)


@formula
def ffn_offset(world_size: int, max_rows: int, hidden: int, parity: int) -> Bytes:
    """Start of the FFN region of a half."""
    return attention_offset(world_size, max_rows, hidden, parity) + attention_bytes(world_size, max_rows, hidden)


@formula
def attention_pair_index(max_rows: int, hidden: int, source: int, row: int, triple: int) -> int:
    """Index of a triple pair in an attention region."""
    return (source * max_rows + row) * triples(hidden) + triple


@formula
def ffn_pair_index(max_rows: int, hidden: int, source: int, row: int, column_pair: int) -> int:
    """Index of a value pair in an FFN region."""
    return (source * max_rows + row) * column_pairs(hidden) + column_pair


@formula
def attention_pair(world_size: int, max_rows: int, hidden: int, parity: int, source: int, row: int, triple: int) -> Bytes:
    """The triple pair of columns ``3 * triple`` to ``3 * triple + 2`` of a row of ``source``."""
    return attention_offset(world_size, max_rows, hidden, parity) + PAIR_BYTES * attention_pair_index(max_rows, hidden, source, row, triple)


@formula
def ffn_pair(world_size: int, max_rows: int, hidden: int, parity: int, source: int, row: int, column_pair: int) -> Bytes:
    """The value pair of columns ``2 * column_pair`` and ``2 * column_pair + 1`` of a row of ``source``."""
    return ffn_offset(world_size, max_rows, hidden, parity) + PAIR_BYTES * ffn_pair_index(max_rows, hidden, source, row, column_pair)


@formula
def channel_bytes(world_size: int, max_rows: int, hidden: int) -> Bytes:
    """Distance between two channels' peer buffers in one allocation: whole pages, so that channels share none."""
    return round_up(peer_buffer_bytes(world_size, max_rows, hidden), CHANNEL_ALIGNMENT)


# --- scratch -------------------------------------------------------------------------------------------------------------------------


@formula
def ssq_pair_index(hidden: int, row: int, task: int) -> int:
    """Index of the pair that announces a reduce task's sum of squares (fp32) of a row."""
    return row * push_tasks(hidden) + task


@formula
def logit_pair_index(hidden: int, experts: int, row: int, expert: int, part: int) -> int:
    """Index of the pair that announces a router part's logit (fp32) of a row and expert."""
    return (row * experts + expert) * router_parts(hidden) + part


@formula
def route_pair_index(top_k: int, row: int, pick: int) -> int:
    """Index of the pair that announces a row's picked expert id (int32, -1 for none); its weight (fp32) is ``top_k`` pairs further."""
    return 2 * top_k * row + pick


@formula
def intermediate_pair_index(intermediate: int, slot: int, tile: int) -> int:
    """Index of the pair that announces a slot's finished gate/up tile."""
    return slot * gate_up_tiles(intermediate) + tile


@formula
def hidden_stride(hidden: int) -> int:
    """Elements between two rows of the fp32 stream and of X."""
    return round_up(hidden, ROW_ALIGNMENT)


@formula
def intermediate_stride(intermediate: int) -> int:
    """Elements between two columns of a slot's intermediate activations."""
    return round_up(intermediate, ROW_ALIGNMENT)


@formula
def stream_index(hidden: int, row: int, column: int) -> int:
    """Element of the fp32 stream (reduced attention output plus residual)."""
    return row * hidden_stride(hidden) + column


@formula
def x_index(hidden: int, row: int, column: int) -> int:
    """Element of X, the normalised activations (bf16)."""
    return row * hidden_stride(hidden) + column


@formula
def mid_index(rows: int, intermediate: int, slot: int, slot_column: int, element: int) -> int:
    """Element of MID, the activated intermediate (bf16): slot, then the slot's column, then the intermediate element."""
    return (slot * slot_columns(rows) + slot_column) * intermediate_stride(intermediate) + element


@formula
def timeline_index(block: int, stamp: int) -> int:
    """64-bit clock stamp ``stamp`` of a block."""
    return block * TIMELINE_STAMPS + stamp


@formula
def ssq_offset() -> Bytes:
    """Start of the sum-of-squares pairs."""
    return 0


@formula
def x_ready_offset(rows: int, hidden: int) -> Bytes:
    """Start of the X-ready pairs, one a row."""
    return ssq_offset() + round_up(PAIR_BYTES * rows * push_tasks(hidden), SCRATCH_ALIGNMENT)


@formula
def logit_offset(rows: int, hidden: int) -> Bytes:
    """Start of the logit pairs."""
    return x_ready_offset(rows, hidden) + round_up(PAIR_BYTES * rows, SCRATCH_ALIGNMENT)


@formula
def route_offset(rows: int, hidden: int, experts: int) -> Bytes:
    """Start of the route pairs."""
    return logit_offset(rows, hidden) + round_up(PAIR_BYTES * rows * experts * router_parts(hidden), SCRATCH_ALIGNMENT)


@formula
def intermediate_ready_offset(rows: int, hidden: int, experts: int, top_k: int) -> Bytes:
    """Start of the pairs that announce gate/up tiles."""
    return route_offset(rows, hidden, experts) + round_up(PAIR_BYTES * rows * 2 * top_k, SCRATCH_ALIGNMENT)


@formula
def stream_offset(rows: int, hidden: int, intermediate: int, experts: int, top_k: int) -> Bytes:
    """Start of the fp32 stream, and end of the tagged pairs."""
    return intermediate_ready_offset(rows, hidden, experts, top_k) + round_up(
        PAIR_BYTES * slots(rows, experts, top_k) * gate_up_tiles(intermediate), SCRATCH_ALIGNMENT
    )


@formula
def x_offset(rows: int, hidden: int, intermediate: int, experts: int, top_k: int) -> Bytes:
    """Start of X."""
    return stream_offset(rows, hidden, intermediate, experts, top_k) + round_up(Bytes(4) * rows * hidden_stride(hidden), SCRATCH_ALIGNMENT)


@formula
def mid_offset(rows: int, hidden: int, intermediate: int, experts: int, top_k: int) -> Bytes:
    """Start of MID."""
    return x_offset(rows, hidden, intermediate, experts, top_k) + round_up(Bytes(2) * rows * hidden_stride(hidden), SCRATCH_ALIGNMENT)


@formula
def timeline_offset(rows: int, hidden: int, intermediate: int, experts: int, top_k: int) -> Bytes:
    """Start of the timeline, and end of what a launch needs."""
    return mid_offset(rows, hidden, intermediate, experts, top_k) + round_up(
        Bytes(2) * slots(rows, experts, top_k) * slot_columns(rows) * intermediate_stride(intermediate), SCRATCH_ALIGNMENT
    )


@formula
def scratch_bytes(rows: int, hidden: int, intermediate: int, experts: int, top_k: int, timeline_blocks: int) -> Bytes:
    """Bytes of the scratch of one row count; ``timeline_blocks`` is the grid, or 0 to keep no timeline."""
    return timeline_offset(rows, hidden, intermediate, experts, top_k) + round_up(
        PAIR_BYTES * timeline_blocks * TIMELINE_STAMPS, SCRATCH_ALIGNMENT
    )


@formula
def mark_word(block: int) -> int:
    """Index of a block's mark in the epoch words (int32)."""
    return MARK_WORDS_START + block


@formula
def epoch_words(grid: int) -> int:
    """int32 words that hold the epoch (word 0) and the marks of ``grid`` blocks."""
    return MARK_WORDS_START + grid


# --- the same as objects -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Region:
    """A named range of bytes."""

    name: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte after the region."""
        return self.offset + self.nbytes


def check_regions(regions: tuple[Region, ...], total: int) -> None:
    """Raise ``ConfigurationError`` unless the regions are apart, inside ``total`` bytes, and begin at pair boundaries."""
    end = 0
    previous = "the start"
    for region in sorted(regions, key=lambda region: (region.offset, region.end)):
        if region.offset < end or region.offset % PAIR_BYTES:
            raise ConfigurationError(
                f"region {region.name} at byte {region.offset} overlaps {previous} (which ends at {end}) or is not aligned to {PAIR_BYTES}"
            )
        end, previous = region.end, region.name
    if end > total:
        raise ConfigurationError(f"region {previous} ends at byte {end}, past the buffer's {total}")


def _index(name: str, value: int, count: int) -> int:
    if not 0 <= value < count:
        raise ConfigurationError(f"{name} is {value}; pass 0 to {count - 1}")
    return value


@attrs.frozen
class PeerLayout:
    """The peer buffer of one channel on one rank; every rank's has the same layout.

    Attributes:
        world_size: ranks that exchange: 1, 2, 4 or 8.
        max_rows: row stride, and the most rows of a launch: 1 to 64.
        hidden: hidden size, even.

    Raises:
        RefusalError: with every reason why the sizes cannot run.
        ConfigurationError: from the offset methods, for an index out of range.
    """

    world_size: int
    max_rows: int
    hidden: int

    def __attrs_post_init__(self) -> None:
        reasons = shape_reasons(hidden=self.hidden, rows=self.max_rows, world_size=self.world_size)
        if not reasons and self.total_bytes > MAX_REGION_BYTES:
            reasons = [f"the peer buffer would take {self.total_bytes} bytes, the limit is {MAX_REGION_BYTES}: lower max_rows"]
        require_shape("this peer buffer", reasons)
        check_regions(self.regions, self.total_bytes)

    @property
    def triples(self) -> int:
        """Triple pairs a row."""
        return triples(self.hidden)

    @property
    def column_pairs(self) -> int:
        """Value pairs a row."""
        return column_pairs(self.hidden)

    @property
    def half_bytes(self) -> int:
        """Bytes of one parity half."""
        return half_bytes(self.world_size, self.max_rows, self.hidden)

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffer."""
        return peer_buffer_bytes(self.world_size, self.max_rows, self.hidden)

    def attention_offset(self, parity: int) -> int:
        """Start of the attention region of a half."""
        return attention_offset(self.world_size, self.max_rows, self.hidden, _index("parity", parity, PARITIES))

    def ffn_offset(self, parity: int) -> int:
        """Start of the FFN region of a half."""
        return ffn_offset(self.world_size, self.max_rows, self.hidden, _index("parity", parity, PARITIES))

    def attention_pair(self, parity: int, source: int, row: int, triple: int) -> int:
        """Byte offset of the triple pair that ``source`` pushed for columns ``3 * triple`` and following of ``row``."""
        return attention_pair(
            self.world_size,
            self.max_rows,
            self.hidden,
            _index("parity", parity, PARITIES),
            _index("source", source, self.world_size),
            _index("row", row, self.max_rows),
            _index("triple", triple, self.triples),
        )

    def ffn_pair(self, parity: int, source: int, row: int, column_pair: int) -> int:
        """Byte offset of the value pair that ``source`` pushed for columns ``2 * column_pair`` and following of ``row``."""
        return ffn_pair(
            self.world_size,
            self.max_rows,
            self.hidden,
            _index("parity", parity, PARITIES),
            _index("source", source, self.world_size),
            _index("row", row, self.max_rows),
            _index("column_pair", column_pair, self.column_pairs),
        )

    def handshake_pair(self, rank: int) -> int:
        """Byte offset of the step-end pair that ``rank`` writes."""
        return handshake_pair(_index("rank", rank, self.world_size))

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every region, in order."""
        attention = attention_bytes(self.world_size, self.max_rows, self.hidden)
        ffn = ffn_bytes(self.world_size, self.max_rows, self.hidden)
        halves = [
            region
            for half in range(PARITIES)
            for region in (
                Region(f"attention[{half}]", self.attention_offset(half), attention),
                Region(f"ffn[{half}]", self.ffn_offset(half), ffn),
            )
        ]
        return (
            Region("error words", 0, ERROR_WORDS_BYTES),
            Region("handshake", HANDSHAKE_OFFSET, PAIR_BYTES * self.world_size),
            *halves,
        )


@attrs.frozen
class ChannelLayout:
    """Independent peer buffers in one allocation: micro-batches, or several models on one device. Each channel has its own epoch and fault.

    Attributes:
        channels: how many, at least 1.
        peer: the layout of each.
    """

    channels: int
    peer: PeerLayout

    def __attrs_post_init__(self) -> None:
        if self.channels < 1:
            raise ConfigurationError(f"channels is {self.channels}; an allocation holds at least one")
        check_regions(self.regions, self.total_bytes)

    @property
    def channel_bytes(self) -> int:
        """Distance between two channels: whole pages of 4096 bytes."""
        return channel_bytes(self.peer.world_size, self.peer.max_rows, self.peer.hidden)

    @property
    def total_bytes(self) -> int:
        """Bytes of the allocation."""
        return self.channels * self.channel_bytes

    def offset(self, channel: int) -> int:
        """Start of a channel's peer buffer."""
        return self.channel_bytes * _index("channel", channel, self.channels)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every channel's peer buffer."""
        return tuple(Region(f"channel[{channel}]", self.offset(channel), self.peer.total_bytes) for channel in range(self.channels))


@attrs.frozen
class ScratchLayout:
    """The private scratch of one row count on one rank, zeroed once and by a reset, never between launches.

    Row counts have scratch of their own: a tag left by another row count could otherwise be taken for fresh.

    Attributes:
        rows: rows of the launch, 1 to 64.
        hidden: hidden size, even.
        intermediate: intermediate size of an expert on this rank.
        experts: routed experts, without the shared one.
        top_k: routed experts a row.
        timeline_blocks: blocks that leave clock stamps; 0 keeps no timeline.

    Raises:
        RefusalError: with every reason why the sizes cannot run.
    """

    rows: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    timeline_blocks: int = 0

    def __attrs_post_init__(self) -> None:
        reasons = shape_reasons(hidden=self.hidden, rows=self.rows, intermediate=self.intermediate, experts=self.experts, top_k=self.top_k)
        if self.timeline_blocks < 0:
            reasons.append(f"timeline_blocks is {self.timeline_blocks}: pass the grid, or 0 for no timeline")
        if not reasons and self.total_bytes > MAX_REGION_BYTES:
            reasons.append(f"the scratch would take {self.total_bytes} bytes, the limit is {MAX_REGION_BYTES}: lower rows or top_k")
        require_shape("this scratch", reasons)
        check_regions(self.regions, self.total_bytes)

    @property
    def work(self) -> WorkShape:
        """The task counts of the same launch."""
        return WorkShape(self.rows, self.hidden, self.intermediate, self.experts, self.top_k)

    @property
    def ssq_offset(self) -> int:
        """Sum-of-squares pairs: rows x reduce tasks."""
        return ssq_offset()

    @property
    def x_ready_offset(self) -> int:
        """X-ready pairs: rows."""
        return x_ready_offset(self.rows, self.hidden)

    @property
    def logit_offset(self) -> int:
        """Logit pairs: rows x experts x router parts."""
        return logit_offset(self.rows, self.hidden)

    @property
    def route_offset(self) -> int:
        """Route pairs: rows x (top_k ids, top_k weights)."""
        return route_offset(self.rows, self.hidden, self.experts)

    @property
    def intermediate_ready_offset(self) -> int:
        """Pairs of finished gate/up tiles: slots x tiles."""
        return intermediate_ready_offset(self.rows, self.hidden, self.experts, self.top_k)

    @property
    def stream_offset(self) -> int:
        """The fp32 stream: rows x hidden, row stride ``hidden_stride``."""
        return stream_offset(*self._dims)

    @property
    def x_offset(self) -> int:
        """X, bf16: rows x hidden, row stride ``hidden_stride``."""
        return x_offset(*self._dims)

    @property
    def mid_offset(self) -> int:
        """MID, bf16: slots x slot columns x intermediate, column stride ``intermediate_stride``."""
        return mid_offset(*self._dims)

    @property
    def timeline_offset(self) -> int:
        """Clock stamps, 64 bits: blocks x 12."""
        return timeline_offset(*self._dims)

    @property
    def total_bytes(self) -> int:
        """Bytes of the scratch."""
        return scratch_bytes(*self._dims, self.timeline_blocks)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every region, in order, without the padding between."""
        work = self.work
        stride = hidden_stride(self.hidden)
        mid = 2 * work.slots * work.slot_columns * intermediate_stride(self.intermediate)
        return (
            Region("ssq", self.ssq_offset, PAIR_BYTES * self.rows * work.push_tasks),
            Region("x_ready", self.x_ready_offset, PAIR_BYTES * self.rows),
            Region("logit", self.logit_offset, PAIR_BYTES * self.rows * self.experts * work.router_parts),
            Region("route", self.route_offset, PAIR_BYTES * self.rows * 2 * self.top_k),
            Region("intermediate_ready", self.intermediate_ready_offset, PAIR_BYTES * work.slots * work.gate_up_tiles),
            Region("stream", self.stream_offset, 4 * self.rows * stride),
            Region("x", self.x_offset, 2 * self.rows * stride),
            Region("mid", self.mid_offset, mid),
            Region("timeline", self.timeline_offset, PAIR_BYTES * TIMELINE_STAMPS * self.timeline_blocks),
        )

    @property
    def _dims(self) -> tuple[int, int, int, int, int]:
        return (self.rows, self.hidden, self.intermediate, self.experts, self.top_k)


@attrs.frozen
class EpochWords:
    """The int32 words that hold a channel's epoch and its blocks' marks.

    Attributes:
        grid: blocks of a launch, at least 1.
    """

    grid: int

    def __attrs_post_init__(self) -> None:
        if self.grid < 1:
            raise ConfigurationError(f"grid is {self.grid}; a launch has at least one block")

    @property
    def words(self) -> int:
        """int32 words in all."""
        return epoch_words(self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return WORD_BYTES * self.words

    def mark(self, block: int) -> int:
        """Index of the word that ``block`` marks when it has finished."""
        return mark_word(_index("block", block, self.grid))
