"""The references against plain formulas that nobody derived from them."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape
from m3_kernels.formats.mxfp4 import dequantize_shuffled
from m3_kernels.reference.arithmetic import EXACT, ROUNDED, block_order, segment_of_blocks
from m3_kernels.reference.down import combine
from m3_kernels.reference.gate_up import swiglu
from m3_kernels.reference.half import Experts, half
from m3_kernels.reference.norm import row_sum
from m3_kernels.reference.push import triple_words
from m3_kernels.reference.reduce import sum_of_squares
from m3_kernels.reference.route import route, sum_parts
from m3_kernels.reference.router import router
from m3_kernels.reference.table import Slot, table
from m3_kernels.testing import random_inputs, random_weights

SHAPE = FfnShape(hidden=160, intermediate=64, experts=8, top_k=3, world_size=2, max_rows=8)


def plain_half(parts: list[Tensor], residual: Tensor, slots: Tensor, weights: list, top_k: int) -> tuple[Tensor, Tensor]:  # type: ignore[type-arg]
    """The half written down once more: dense, in float64, row by row."""
    stream = sum(part.double() for part in parts) + residual.double()
    norm = stream / (stream.pow(2).mean(dim=1, keepdim=True) + 1e-6).sqrt() * (1 + weights[0].post_norm.double())
    probability = torch.sigmoid(norm @ weights[0].router.double().T)
    out = torch.zeros_like(stream)
    for row in range(stream.shape[0]):
        if slots[row] < 0:
            continue
        picks = torch.topk(probability[row] + weights[0].router_bias.double(), top_k).indices
        scale = 2.0 / probability[row, picks].sum()
        for rank in weights:
            experts = Experts.of(rank)
            g13, g2 = (torch.ones(len(experts.w13)) if scales is None else scales for scales in (rank.g13, rank.g2))
            for expert, weight in [(len(experts.w13) - 1, 1.0), *((int(pick), float(probability[row, pick] * scale)) for pick in picks)]:
                # Here the global scale is a part of the weight, as the format defines it.
                gate, up = (experts.w13[expert].double() * g13[expert].double() @ norm[row]).chunk(2)
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                out[row] += weight * (experts.w2[expert].double() * g2[expert].double() @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)))
    return out, stream


@pytest.mark.parametrize("format", list(ExpertFormat))
def test_exact_half(format: ExpertFormat, generator: torch.Generator) -> None:
    """Two float64 evaluations of the same formula agree to a few units of the last place of its largest term."""
    shape = SHAPE if format is ExpertFormat.BF16 else FfnShape(128, 64, 8, 3, 2, 8)
    weights = random_weights(shape, format, generator)
    inputs = random_inputs(shape, 4, generator, padded=[2])
    found = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), shape.top_k, EXACT)
    out, stream = plain_half(list(inputs.parts), inputs.residual, inputs.slots, list(weights), shape.top_k)
    # A sum of n terms is off by at most n * 2^-53 times the sum of magnitudes; 2^-53 * 10^4 covers the chain of sums here.
    assert (found.reduced.stream - stream).abs().max() < 1e-12
    assert (found.out - out).abs().max() < 1e-12 * out.abs().max()
    assert not found.out[2].any()


def test_rounded_sums_do_not_depend_on_order_where_they_are_exact(generator: torch.Generator) -> None:
    """Small integers and powers of two: the ordered fp32 sum is the float64 sum."""
    rows = torch.randint(-8, 9, (5, 300), generator=generator).float()
    matrix = torch.randint(-4, 5, (7, 300), generator=generator).float() * 2.0**-3
    exact = rows.double() @ matrix.double().T
    for lane_values in (8, 16, 32):
        found = ROUNDED.dot(rows, matrix, block_order(300, lane_values=lane_values), 128)
        assert torch.equal(found.double(), exact)


@pytest.mark.parametrize(("k", "lane_values"), [(128, 8), (128, 16), (128, 32), (192, 32), (300, 8), (64, 32), (160, 16), (64, 16)])
def test_block_order_takes_every_index_once(k: int, lane_values: int) -> None:
    order = block_order(k, lane_values=lane_values)
    assert order.numel() % 128 == 0
    assert sorted(order[order >= 0].tolist()) == list(range(k))
    # What each group of lanes gives to the first two steps, at 8 a group.
    assert order[:8].tolist() == list(range(8))
    assert order[8:16].tolist() == list(range(lane_values, lane_values + 8))
    assert order[32:40].tolist() == list(range(32, 40) if lane_values == 8 else range(8, 16))
    if lane_values == 8:
        assert order[:k].tolist() == list(range(k))
    elif lane_values == 16 and k == 128:
        assert order[64:72].tolist() == list(range(64, 72))


@pytest.mark.parametrize(("k", "segment"), [(64, 128), (128, 128), (1024, 128), (1025, 256), (6144, 768)])
def test_segments(k: int, segment: int) -> None:
    assert segment_of_blocks(k) == segment


def test_exp2_is_within_an_ulp_and_total() -> None:
    """The polynomial's value is rounded once: it lies within one unit of the last place of 2^x; the edges are exact."""
    x = torch.cat((torch.linspace(-149.0, 127.99, 200_001), torch.randn(1000) * 1e-6)).float()
    found, wanted = ROUNDED.exp2(x).double(), torch.exp2(x.double())
    ulp = torch.maximum(2.0 ** (torch.floor(torch.log2(wanted)) - 23), torch.tensor(2.0**-149, dtype=torch.float64))
    assert ((found - wanted).abs() <= ulp).all()
    edges = torch.tensor([-math.inf, -1e9, -160.5, 128.0, 1e9, math.inf, 0.0, -1.0, 10.0])
    assert ROUNDED.exp2(edges).tolist() == [0.0, 0.0, 0.0, math.inf, math.inf, math.inf, 1.0, 0.5, 1024.0]
    assert torch.isnan(ROUNDED.exp2(torch.tensor([math.nan]))).all()


def test_triple_words() -> None:
    part = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.bfloat16)
    bits = [0x3F80, 0xC000, 0x3F00, 0x4040]
    found = triple_words(part, 5)[0].tolist()
    assert found[0] == bits[0] | bits[1] << 16 | bits[2] << 32 | 3 << 48
    assert found[1] == bits[3] | 3 << 48
    # The 16-bit tag may set the word's sign.
    assert triple_words(part, 2 * 0x8000)[0, 0].item() >> 48 == 0x8001 - 0x10000


def test_sums_of_squares(generator: torch.Generator) -> None:
    stream = torch.randint(-20, 21, (3, 130), generator=generator).float()
    squares = sum_of_squares(stream)
    assert squares.shape == (3, 3)
    assert torch.equal(squares[:, 2], (stream[:, 96:] ** 2).sum(dim=1))
    assert torch.equal(row_sum(squares), (stream**2).sum(dim=1))
    assert torch.equal(row_sum(torch.arange(70.0)[None]), torch.tensor([69.0 * 35]))


def test_router_parts(generator: torch.Generator) -> None:
    x = torch.randint(-3, 4, (2, 512), generator=generator).float()
    weight = torch.randint(-3, 4, (5, 512), generator=generator).float()
    for arithmetic in (EXACT, ROUNDED):
        parts = router(arithmetic.widen(x), weight, arithmetic)
        assert parts.shape == (2, 5, 16)
        assert torch.equal(parts[..., 3].double(), x.double()[:, 96:128] @ weight.double()[:, 96:128].T)
        assert torch.equal(sum_parts(parts).double(), x.double() @ weight.double().T)


def test_route_weights_are_unbiased() -> None:
    """The bias chooses, the sigmoids weigh: sigmoid(0) = 1/2 each, scaled to 2 in all."""
    logits = torch.zeros(1, 4, 1)
    logits[0, 0, 0] = 50.0
    routes = route(logits, torch.tensor([0.0, 0.0, 3.0, 2.0]), torch.tensor([0]), 2, 2.0, ROUNDED)
    assert routes.experts.tolist() == [[2, 3]]
    assert routes.weights.tolist() == [[1.0, 1.0]]


def test_table() -> None:
    experts = torch.tensor([[3, 1], [-1, -1], [1, 0], [3, 0]])
    assert table(experts, torch.tensor([5, -1, 6, 7]), 4) == (
        Slot(4, (0, 2, 3), (8, 10, 11)),
        Slot(0, (2, 3), (5, 7)),
        Slot(1, (0, 2), (1, 4)),
        Slot(3, (0, 3), (0, 6)),
    )
    assert table(torch.full((2, 2), -1), torch.tensor([-1, -1]), 4) == (Slot(4, (), ()),)


def test_swiglu_clamps_and_keeps_nan() -> None:
    gate = torch.tensor([0.0, 9.0, 7.0, -9.0, math.nan, math.inf, 1.0])
    up = torch.tensor([5.0, 9.0, 7.0, -9.0, 1.0, -math.inf, math.nan])
    found = swiglu(gate, up, FfnConstants(), ROUNDED)
    assert found[0] == 0.0
    assert found[1] == found[2]
    assert found[5] == swiglu(torch.tensor([7.0]), torch.tensor([-7.0]), FfnConstants(), ROUNDED)[0]
    assert torch.isnan(found[[4, 6]]).all()
    # silu(1) * (0 + 1) at alpha 1: 0.731 to bf16's eight bits.
    assert swiglu(torch.tensor([1.0]), torch.tensor([0.0]), FfnConstants(swiglu_alpha=1.0), ROUNDED).item() == 0.73046875


def test_combine_rounds_at_every_product_and_sum() -> None:
    """1 + 2^-8 is no bf16: rounded once at the end the sum would be 1 + 2^-7, rounded at every step it stays 1."""
    shared = torch.tensor([[1.0]])
    routed = torch.full((1, 2, 1), 2.0**-8)
    weights = torch.ones(1, 2)
    assert combine(shared, routed, weights, torch.tensor([0]), ROUNDED).item() == 1.0
    assert combine(shared, routed, weights, torch.tensor([0]), EXACT).item() == 1.0 + 2.0**-7
    assert combine(shared, routed, weights, torch.tensor([-1]), ROUNDED).item() == 0.0


def test_packed_experts_need_scales(generator: torch.Generator) -> None:
    [weights] = random_weights(FfnShape(64, 64, 2, 1, 1, 4), ExpertFormat.MXFP4, generator)
    assert weights.s13 is not None
    assert torch.equal(Experts.of(weights).w13, dequantize_shuffled(weights.w13, weights.s13))
    with pytest.raises(ConfigurationError, match="mxfp4 weights without scales"):
        Experts.of(attrs.evolve(weights, s2=None))
    [weights] = random_weights(FfnShape(64, 64, 2, 1, 1, 4), ExpertFormat.NVFP4, generator)
    with pytest.raises(ConfigurationError, match="nvfp4 weights without global scales: pass g13 and g2"):
        Experts.of(attrs.evolve(weights, g2=None))


def test_square_roots_are_the_nearest(generator: torch.Generator) -> None:
    """As IEEE 754 and the CPU target round them; ``torch.sqrt`` of fp32 is one unit off for many values on some machines."""
    values = torch.rand(4096, generator=generator) * 4 + 1e-6
    assert torch.equal(ROUNDED.root(values), torch.tensor([math.sqrt(value) for value in values.tolist()]))
