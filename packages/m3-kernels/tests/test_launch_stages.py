"""Every stage's words and data, as they lie in the mailboxes and in scratch after a launch, against the stage's reference."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.epochs import pair_tag, parity
from m3_core.layout import ScratchLayout, hidden_stride, intermediate_stride
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape
from m3_kernels.reference.arithmetic import ROUNDED
from m3_kernels.reference.half import Half, half
from m3_kernels.reference.push import triple_words
from m3_kernels.testing import LayerInputs, ThreadRanks, random_inputs, random_weights

SHAPE = FfnShape(hidden=320, intermediate=64, experts=18, top_k=3, world_size=2, max_rows=8)
ROWS = 5
PADDED = 2
EPOCH = 70_001


@attrs.frozen(eq=False)
class Ran:
    inputs: LayerInputs
    wanted: Half
    scratch: Tensor
    buffers: tuple[Tensor, ...]
    layout: ScratchLayout

    def pairs(self, offset: int, count: int) -> tuple[Tensor, Tensor]:
        """Value bits (int32) and tags of `count` pairs of scratch."""
        words = self.scratch[offset : offset + 8 * count].view(torch.int32).view(count, 2)
        return words[:, 0].contiguous(), words[:, 1].contiguous()


@pytest.fixture(scope="module", params=list(ExpertFormat))
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    generator = torch.Generator().manual_seed(5)
    weights = random_weights(SHAPE, request.param, generator)
    inputs = random_inputs(SHAPE, ROWS, generator, padded=[PADDED])
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), SHAPE.top_k, ROUNDED)
    with ThreadRanks(SHAPE, poison=True, grid=3) as ranks:
        ranks.preset_epoch(EPOCH)
        ranks.run(ranks.launches(weights), inputs)
        yield Ran(inputs, wanted, ranks.channels[1].scratch(ROWS), ranks.buffers, SHAPE.scratch(ROWS))


def test_push(ran: Ran) -> None:
    layout = SHAPE.peer_layout
    for buffer in ran.buffers:
        for source, part in enumerate(ran.inputs.parts):
            start = layout.attention_pair(parity(EPOCH), source, 0, 0)
            found = buffer[start : start + 8 * ROWS * layout.triples].view(torch.int64).view(ROWS, -1)
            assert torch.equal(found, triple_words(part, EPOCH))


def test_the_other_half_is_untouched(ran: Ran) -> None:
    layout = SHAPE.peer_layout
    for buffer in ran.buffers:
        start = layout.attention_offset(1 - parity(EPOCH))
        assert (buffer[start : start + layout.half_bytes] == 0xFF).all()
        own = layout.attention_offset(parity(EPOCH))
        rows_beyond = layout.attention_pair(parity(EPOCH), 0, ROWS, 0)
        assert (buffer[rows_beyond : own + 8 * SHAPE.max_rows * layout.triples] == 0xFF).all()


def test_reduce(ran: Ran) -> None:
    count = ran.wanted.reduced.squares.numel()
    bits, tags = ran.pairs(ran.layout.ssq_offset, count)
    assert (tags == pair_tag(EPOCH)).all()
    assert torch.equal(bits.view(torch.float32).view(ROWS, -1), ran.wanted.reduced.squares)
    stride = hidden_stride(SHAPE.hidden)
    start = ran.layout.stream_offset
    stream = ran.scratch[start : start + 4 * ROWS * stride].view(torch.float32).view(ROWS, stride)
    assert torch.equal(stream[:, : SHAPE.hidden], ran.wanted.reduced.stream)


def test_norm(ran: Ran) -> None:
    _, tags = ran.pairs(ran.layout.x_ready_offset, ROWS)
    assert (tags == pair_tag(EPOCH)).all()
    stride = hidden_stride(SHAPE.hidden)
    start = ran.layout.x_offset
    x = ran.scratch[start : start + 2 * ROWS * stride].view(torch.bfloat16).view(ROWS, stride)
    assert torch.equal(x[:, : SHAPE.hidden].float(), ran.wanted.x)
    assert not x[:, SHAPE.hidden :].any()


def test_router(ran: Ran) -> None:
    bits, tags = ran.pairs(ran.layout.logit_offset, ran.wanted.logits.numel())
    assert (tags == pair_tag(EPOCH)).all()
    assert torch.equal(bits.view(torch.float32).view(ran.wanted.logits.shape), ran.wanted.logits)


def test_route(ran: Ran) -> None:
    bits, tags = ran.pairs(ran.layout.route_offset, 2 * SHAPE.top_k * ROWS)
    assert (tags == pair_tag(EPOCH)).all()
    words = bits.view(ROWS, 2, SHAPE.top_k)
    assert torch.equal(words[:, 0].to(torch.int64), ran.wanted.routes.experts)
    assert (words[PADDED, 0] == -1).all()
    assert torch.equal(words[:, 1].contiguous().view(torch.float32), ran.wanted.routes.weights)


def test_gate_up(ran: Ran) -> None:
    tiles = ran.layout.work.gate_up_tiles
    slots = ran.wanted.slots
    _, tags = ran.pairs(ran.layout.intermediate_ready_offset, ran.layout.work.slots * tiles)
    assert (tags[: len(slots) * tiles] == pair_tag(EPOCH)).all()
    assert (tags[len(slots) * tiles :] == -1).all(), "no task for a slot that does not exist"
    stride, columns = intermediate_stride(SHAPE.intermediate), ran.layout.work.slot_columns
    start = ran.layout.mid_offset
    mid = ran.scratch[start : start + 2 * ran.layout.work.slots * columns * stride].view(torch.bfloat16).view(-1, columns, stride)
    for index, (slot, wanted) in enumerate(zip(slots, ran.wanted.mids[1], strict=True)):
        assert torch.equal(mid[index, : len(slot.rows), : SHAPE.intermediate].float(), wanted)


def test_down(ran: Ran) -> None:
    layout = SHAPE.peer_layout
    for buffer in ran.buffers:
        for source, combined in enumerate(ran.wanted.combined):
            start = layout.ffn_pair(parity(EPOCH), source, 0, 0)
            words = buffer[start : start + 8 * ROWS * layout.column_pairs].view(torch.int32).view(ROWS, -1, 2)
            assert (words[..., 1] == pair_tag(EPOCH)).all()
            assert torch.equal(words[..., 0].contiguous().view(torch.bfloat16).view(ROWS, -1).float(), combined)


def test_handshake(ran: Ran) -> None:
    layout = SHAPE.peer_layout
    for buffer in ran.buffers:
        for rank in range(SHAPE.world_size):
            start = layout.handshake_pair(rank)
            assert buffer[start : start + 8].view(torch.int32).tolist() == [0, pair_tag(EPOCH)]
