"""The CPU target against the rounded reference, bit for bit, at every stage's output that leaves the launch and at what scratch keeps."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.formulas import round_up
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_kernels.formats import mxfp8
from m3_kernels.reference.arithmetic import ROUNDED
from m3_kernels.reference.down import down
from m3_kernels.reference.gate_up import gate_up
from m3_kernels.reference.half import Half, expert_matrices, half
from m3_kernels.testing import LayerInputs, ThreadRanks, pack_weights, random_inputs, random_weights

BF16, MXFP4, MXFP8, NVFP4 = ExpertFormat


def equal(found: Tensor, wanted: Tensor) -> bool:
    """Same values, a NaN equal to a NaN, -0 equal to 0."""
    return torch.equal(found.float().nan_to_num(nan=123456.0), wanted.float().nan_to_num(nan=123456.0))


def check(
    shape: FfnShape, format: ExpertFormat, inputs: LayerInputs, generator: torch.Generator, *, grid: int = 2, threads: int = 64
) -> Half:
    weights = random_weights(shape, format, generator)
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), shape.top_k, ROUNDED)
    with ThreadRanks(shape, grid=grid, block_threads=threads, poison=True) as ranks:
        results = ranks.run(ranks.launches(weights), inputs)
        assert [fault.describe() for fault in ranks.faults()] == ["no fault"] * shape.world_size
        assert [channel.epoch() for channel in ranks.channels] == [1] * shape.world_size
    valid = inputs.slots[: inputs.residual.shape[0]] >= 0
    for out, residual in results:
        assert equal(out, wanted.out)
        assert not out[~valid].any(), "a padded row's output is 0"
        assert equal(residual[valid], wanted.reduced.residual[valid])
    return wanted


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("format", list(ExpertFormat))
def test_tensor_parallel_sizes(world_size: int, format: ExpertFormat, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=192, intermediate=64, experts=8, top_k=4, world_size=world_size, max_rows=16)
    check(shape, format, random_inputs(shape, 3, generator, padded=[1]), generator)


@pytest.mark.parametrize("rows", range(1, 17))
def test_rows(rows: int, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=64, experts=8, top_k=2, world_size=2, max_rows=16)
    check(shape, list(ExpertFormat)[rows % 4], random_inputs(shape, rows, generator), generator)
    check(shape, list(ExpertFormat)[(rows + 1) % 4], random_inputs(shape, rows, generator), generator)


@pytest.mark.parametrize("rows", [17, 33, 64])
@pytest.mark.parametrize("format", list(ExpertFormat))
def test_more_rows_than_a_tile(rows: int, format: ExpertFormat, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=64, experts=4, top_k=2, world_size=2, max_rows=64)
    check(shape, format, random_inputs(shape, rows, generator, padded=[0, 5]), generator)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "top_k"),
    [
        (96, 16, 2, 1),  # two push tasks, two router parts
        (256, 32, 1, 1),  # one expert
        (206, 72, 8, 4),  # no multiple of 3, 4, 16 or 48
        (130, 18, 5, 5),  # rows that do not start at 16 bytes; every expert picked
        (512, 136, 17, 8),  # a second expert tile with one expert
        (1040, 24, 3, 2),  # more than eight K blocks: two a segment
        (98, 272, 3, 2),  # three K blocks in the second projection
    ],
)
def test_sizes_that_fill_no_task(hidden: int, intermediate: int, experts: int, top_k: int, generator: torch.Generator) -> None:
    shape = FfnShape(hidden, intermediate, experts, top_k, world_size=2, max_rows=4)
    check(shape, BF16, random_inputs(shape, 3, generator), generator)


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (448, 320), (1152, 64)])
def test_mxfp4_sizes(hidden: int, intermediate: int, generator: torch.Generator) -> None:
    """K of half a block, and scale groups that fill no multiple of eight (12 groups are padded to 16)."""
    shape = FfnShape(hidden, intermediate, experts=4, top_k=2, world_size=1, max_rows=4)
    check(shape, MXFP4, random_inputs(shape, 2, generator), generator)


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (96, 160), (416, 352), (1152, 64), (1056, 288)])
@pytest.mark.parametrize("format", [MXFP8, NVFP4])
def test_row_major_sizes(hidden: int, intermediate: int, format: ExpertFormat, generator: torch.Generator) -> None:
    """K that ends in every quarter of a block, and more than eight blocks."""
    shape = FfnShape(hidden, intermediate, experts=4, top_k=2, world_size=1, max_rows=4)
    check(shape, format, random_inputs(shape, 3, generator), generator)


@pytest.mark.parametrize("padded", [[0], [4], [0, 2, 4], [0, 1, 2, 3, 4]])
def test_padded_rows(padded: list[int], generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=4, world_size=2, max_rows=16)
    check(shape, BF16, random_inputs(shape, 5, generator, padded), generator)


def test_slots_longer_than_rows(generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=4, world_size=1, max_rows=16)
    inputs = random_inputs(shape, 2, generator)
    longer = torch.cat((inputs.slots, torch.full((5,), -1)))
    check(shape, BF16, LayerInputs(inputs.parts, inputs.residual, longer), generator)


@pytest.mark.parametrize(("grid", "threads"), [(1, 64), (2, 128), (3, 64), (5, 256), (8, 64), (1, 512)])
@pytest.mark.parametrize("format", [MXFP4, MXFP8, NVFP4])
def test_grid_and_block_do_not_change_bits(grid: int, threads: int, format: ExpertFormat, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=256, intermediate=64, experts=8, top_k=4, world_size=2, max_rows=16)
    check(shape, format, random_inputs(shape, 4, generator, padded=[2]), generator, grid=grid, threads=threads)


@pytest.mark.parametrize("format", list(ExpertFormat))
def test_nan_and_infinite_rows_stay_alone(format: ExpertFormat, generator: torch.Generator) -> None:
    """A row of NaN has NaN logits: its picks are experts 0, 1, ... with weight 0, its output is NaN; other rows are as without it."""
    shape = FfnShape(hidden=128, intermediate=64, experts=8, top_k=4, world_size=2, max_rows=16)
    inputs = random_inputs(shape, 5, generator)
    inputs.parts[1][1] = math.nan
    inputs.parts[0][3, 5] = math.inf
    wanted = check(shape, format, inputs, generator)
    assert wanted.routes.experts[1].tolist() == [0, 1, 2, 3]
    assert wanted.routes.weights[1].tolist() == [0.0] * 4
    assert torch.isnan(wanted.out[1]).all()
    assert torch.isfinite(wanted.out[[0, 2, 4]]).all()


def launch_with_router(shape: FfnShape, router: Tensor, bias: Tensor, inputs: LayerInputs, generator: torch.Generator) -> Half:
    weights = tuple(attrs.evolve(rank, router=router, router_bias=bias) for rank in random_weights(shape, BF16, generator))
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), shape.top_k, ROUNDED)
    with ThreadRanks(shape, poison=True) as ranks:
        for out, _ in ranks.run(ranks.launches(weights), inputs):
            assert equal(out, wanted.out)
    return wanted


def test_all_rows_take_the_same_experts(generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=2, world_size=2, max_rows=16)
    bias = torch.zeros(8)
    bias[[6, 3]] = torch.tensor([20.0, 10.0])
    router = torch.randn(8, 128, generator=generator) * 0.05
    wanted = launch_with_router(shape, router, bias, random_inputs(shape, 16, generator), generator)
    assert wanted.routes.experts.tolist() == [[6, 3]] * 16


def test_ties_go_to_the_lower_expert(generator: torch.Generator) -> None:
    """Every logit is 0 and every key equal: the picks are the first experts, with equal weights."""
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=4, world_size=1, max_rows=16)
    wanted = launch_with_router(shape, torch.zeros(8, 128), torch.zeros(8), random_inputs(shape, 2, generator), generator)
    assert wanted.routes.experts.tolist() == [[0, 1, 2, 3]] * 2
    assert wanted.routes.weights.tolist() == [[0.5] * 4] * 2


def test_nan_router_rows_and_biases(generator: torch.Generator) -> None:
    """An expert with a NaN logit or bias has key -infinity: it is picked only when nothing else is left, with weight 0 for a NaN logit."""
    shape = FfnShape(hidden=128, intermediate=32, experts=4, top_k=3, world_size=2, max_rows=16)
    router = torch.randn(4, 128, generator=generator) * 0.1
    router[1] = math.nan
    bias = torch.zeros(4)
    bias[2] = math.nan
    wanted = launch_with_router(shape, router, bias, random_inputs(shape, 3, generator), generator)
    for picks, weights in zip(wanted.routes.experts.tolist(), wanted.routes.weights.tolist(), strict=True):
        assert set(picks[:2]) == {0, 3}
        assert picks[2] == 1, "of two equal keys the lower expert"
        assert weights[2] == 0.0


def test_infinite_bias_forces_and_forbids(generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=4, top_k=2, world_size=1, max_rows=16)
    bias = torch.tensor([-math.inf, 0.0, math.inf, 0.0])
    wanted = launch_with_router(shape, torch.randn(4, 128, generator=generator), bias, random_inputs(shape, 4, generator), generator)
    assert all(picks[0] == 2 and picks[1] in (1, 3) for picks in wanted.routes.experts.tolist())


def test_row_position_does_not_change_bits(generator: torch.Generator) -> None:
    """The same row alone, first, last and among padded ones has the same bits."""
    shape = FfnShape(hidden=192, intermediate=64, experts=8, top_k=4, world_size=2, max_rows=64)
    weights = random_weights(shape, MXFP4, generator)
    many = random_inputs(shape, 40, generator)
    found = []
    with ThreadRanks(shape) as ranks:
        launches = ranks.launches(weights)
        for rows in ([7], [7, 1], [1, 2, 3, 7], [*range(30), 7]):
            inputs = LayerInputs(
                tuple(part[rows].contiguous() for part in many.parts), many.residual[rows].contiguous(), torch.arange(len(rows))
            )
            at = rows.index(7)
            found += [(out[at], residual[at]) for out, residual in ranks.run(launches, inputs)]
    for out, residual in found[1:]:
        assert torch.equal(out.view(torch.int16), found[0][0].view(torch.int16))
        assert torch.equal(residual.view(torch.int16), found[0][1].view(torch.int16))


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
@pytest.mark.parametrize("format", list(ExpertFormat))
def test_huge_and_tiny_activations(scale: float, format: ExpertFormat, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=64, experts=8, top_k=4, world_size=2, max_rows=16)
    inputs = random_inputs(shape, 2, generator)
    scaled = LayerInputs(tuple(part * scale for part in inputs.parts), inputs.residual * scale, inputs.slots)
    check(shape, format, scaled, generator)


def test_zero_activations(generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=4, world_size=2, max_rows=16)
    inputs = random_inputs(shape, 2, generator)
    zero = LayerInputs(tuple(torch.zeros_like(part) for part in inputs.parts), torch.zeros_like(inputs.residual), inputs.slots)
    assert not check(shape, BF16, zero, generator).out.any()


def test_other_constants(generator: torch.Generator) -> None:
    shape = FfnShape(hidden=128, intermediate=32, experts=8, top_k=4, world_size=1, max_rows=16)
    constants = FfnConstants(rms_norm_eps=1e-3, swiglu_alpha=1.3, swiglu_beta=0.25, swiglu_limit=0.5, routed_scaling_factor=3.0)
    weights = random_weights(shape, BF16, generator)
    inputs = random_inputs(shape, 3, generator)
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, constants, shape.top_k, ROUNDED)
    with ThreadRanks(shape, poison=True) as ranks:
        [(out, _)] = ranks.run(ranks.launches(weights, constants), inputs)
    assert equal(out, wanted.out)


def test_special_scale_codes(generator: torch.Generator) -> None:
    """Code 0 is 2^-127, code 255 makes its 32 weights NaN, 254 reaches infinity: as the dequantised reference has them."""
    shape = FfnShape(hidden=128, intermediate=64, experts=2, top_k=1, world_size=1, max_rows=4)
    [weights] = random_weights(shape, MXFP4, generator)
    inputs = random_inputs(shape, 2, generator)
    for tensor, code in ((weights.s13, 0), (weights.s2, 0), (weights.s2, 254), (weights.s2, 255)):
        assert tensor is not None
        kept = tensor.clone()
        tensor.view(-1)[::3] = code
        wanted = half(inputs.parts, inputs.residual, inputs.slots, [weights], FfnConstants(), shape.top_k, ROUNDED)
        with ThreadRanks(shape, poison=True) as ranks:
            [(out, _)] = ranks.run(ranks.launches([weights]), inputs)
        assert equal(out, wanted.out)
        assert bool(torch.isnan(out).any()) == (code >= 254)
        tensor.copy_(kept)


def check_weights(shape: FfnShape, weights: FfnWeights, inputs: LayerInputs, constants: FfnConstants | None = None) -> Half:
    """One rank's launch of given weights, against the reference."""
    constants = constants or FfnConstants()
    wanted = half(inputs.parts, inputs.residual, inputs.slots, [weights], constants, shape.top_k, ROUNDED)
    with ThreadRanks(shape, poison=True) as ranks:
        [(out, _)] = ranks.run(ranks.launches([weights], constants), inputs)
    assert equal(out, wanted.out)
    return wanted


ONE_RANK = FfnShape(hidden=128, intermediate=64, experts=2, top_k=1, world_size=1, max_rows=4)


def raw(tensor: Tensor | None) -> Tensor:
    """The bytes of a tensor of codes, to be written to."""
    assert tensor is not None
    return tensor.view(torch.uint8).view(-1)


@pytest.mark.parametrize(
    ("name", "codes", "nan"),
    [
        ("s13", (0, 1, 2, 3), False),  # bf16 subnormals, of which some round
        ("s2", (0, 1, 2, 3), False),
        ("s2", (180, 200, 0, 90), False),
        ("s2", (254,), True),  # infinity, of both signs
        ("s2", (255,), True),
        ("s13", (255,), True),
        ("w13", (0x7F,), True),
        ("w2", (0xFF,), True),
        ("w13", (0x7E, 0xFE, 0x01, 0x81, 0x80, 0x00), False),  # the ends of E4M3
        ("w2", (0x7E, 0xFE, 0x01, 0x81, 0x80, 0x00), False),
    ],
)
def test_special_codes_of_mxfp8(name: str, codes: tuple[int, ...], nan: bool, generator: torch.Generator) -> None:
    [weights] = random_weights(ONE_RANK, MXFP8, generator)
    values = raw(getattr(weights, name))
    for i, code in enumerate(codes):
        values[i * 5 :: 5 * len(codes)] = code
    wanted = check_weights(ONE_RANK, weights, random_inputs(ONE_RANK, 2, generator))
    assert bool(torch.isnan(wanted.out).any()) == nan


def test_mxfp8_products_that_round(generator: torch.Generator) -> None:
    """Subnormal codes under scale 2^-127 are multiples of 2^-136, bf16 subnormals multiples of 2^-133: each product of w13 rounds by up to half of
    that. Activations of about 2^100 make the sums ordinary numbers."""
    [weights] = random_weights(ONE_RANK, MXFP8, generator)
    raw(weights.w13).bitwise_and_(0x87)
    raw(weights.s13).zero_()
    weights.post_norm.fill_(2.0**100)
    wanted = check_weights(ONE_RANK, weights, random_inputs(ONE_RANK, 2, generator))
    assert any(bool(mid.any()) for mid in wanted.mids[0])
    assert weights.s13 is not None
    assert not torch.equal(mxfp8.dequantize(weights.w13, weights.s13).double(), weights.w13.double() * 2.0**-127), "some products round"


@pytest.mark.parametrize(
    ("name", "codes", "nan"),
    [
        ("s13", (0x00, 0x80, 0x01, 0x81), False),  # zeros of both signs and the least scales
        ("s2", (0x7E, 0xFE), False),
        ("s13", (0x7F,), True),
        ("s2", (0xFF,), True),
    ],
)
def test_special_scales_of_nvfp4(name: str, codes: tuple[int, ...], nan: bool, generator: torch.Generator) -> None:
    [weights] = random_weights(ONE_RANK, NVFP4, generator)
    values = raw(getattr(weights, name))
    for i, code in enumerate(codes):
        values[i * 5 :: 5 * len(codes)] = code
    wanted = check_weights(ONE_RANK, weights, random_inputs(ONE_RANK, 2, generator))
    assert bool(torch.isnan(wanted.out).any()) == nan


@pytest.mark.parametrize("name", ["g13", "g2"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1.1e-3, 2.0**-149, 3e38, math.inf, math.nan])
def test_global_scales_of_nvfp4(name: str, value: float, generator: torch.Generator) -> None:
    """A global scale multiplies the sums as IEEE 754 says, its own expert's only."""
    shape = attrs.evolve(ONE_RANK, top_k=2)
    [weights] = random_weights(shape, NVFP4, generator)
    inputs = random_inputs(shape, 2, generator)
    before = check_weights(shape, weights, inputs)
    getattr(weights, name)[1] = value
    wanted = check_weights(shape, weights, inputs)
    for index, slot in enumerate(wanted.slots):
        if slot.expert != 1:
            assert torch.equal(wanted.mids[0][index], before.mids[0][index])
        elif name == "g13":
            assert not torch.equal(wanted.mids[0][index].nan_to_num(nan=1e9), before.mids[0][index])
    assert [slot.expert for slot in wanted.slots] == [2, 0, 1]
    assert not torch.equal(wanted.out.nan_to_num(nan=1e9), before.out)


@pytest.mark.parametrize(
    ("format", "name", "hidden", "intermediate"),
    [(MXFP8, "w2", 160, 96), (MXFP8, "w2", 128, 128), (NVFP4, "s2", 160, 96), (NVFP4, "s2", 128, 128), (MXFP4, "s2", 128, 192)],
)
def test_a_nan_weight_stays_in_its_column(
    hidden: int, intermediate: int, format: ExpertFormat, name: str, generator: torch.Generator
) -> None:
    """A lane that is past the end of K has nothing left of what it held before."""
    shape = FfnShape(hidden, intermediate, experts=2, top_k=1, world_size=1, max_rows=4)
    [weights] = random_weights(shape, format, generator)
    shared, row = shape.experts, 21
    if format is MXFP4:
        # Where the E8M0 shuffle puts the row's first scale.
        groups = round_up(intermediate // 32, 8)
        raw(weights.s2)[(shared * hidden + row) // 32 * 32 * groups + row % 16 * 4 + row % 32 // 16] = 255
    else:
        values = getattr(weights, name)
        assert values.dim() == 3
        values.view(torch.uint8)[shared, row, 0] = 0x7F
    out = check_weights(shape, weights, random_inputs(shape, 2, generator)).out
    assert torch.isnan(out).nonzero()[:, 1].tolist() == [row] * 2


@pytest.mark.parametrize("format", list(ExpertFormat))
def test_sums_run_in_the_formats_order(format: ExpertFormat, generator: torch.Generator) -> None:
    """Sums of products with so few bits are exact in fp32 as a rule, whatever their order. Here two equal large values, at K 0 and 15, meet weights 1
    and -1: what is added between the two loses bits, and what lies between them is another set in every order."""
    shape = FfnShape(hidden=256, intermediate=128, experts=2, top_k=1, world_size=1, max_rows=8)
    constants = FfnConstants(swiglu_limit=1e30)
    w13 = torch.randn(3, 256, 256, generator=generator)
    w13[..., 0], w13[..., 15] = 1.0, -1.0
    # Rows 0 and 15 of gate and up are equal and large, and so are those activations.
    w13[:, [0, 128]] *= 2.0**8
    w13[:, [15, 143]] = w13[:, [0, 128]]
    w2 = torch.randn(3, 256, 128, generator=generator)
    w2[..., 0], w2[..., 15] = 1.0, -1.0
    post_norm = torch.zeros(256, dtype=torch.bfloat16)
    post_norm[[0, 15]] = 2.0**17
    router = torch.randn(2, 256, generator=generator)
    weights = pack_weights(format, post_norm, router, torch.zeros(2), w13.bfloat16(), w2.bfloat16())
    inputs = random_inputs(shape, 8, generator)
    for tensor in (inputs.parts[0], inputs.residual):
        tensor[:, 15] = tensor[:, 0]
    wanted = check_weights(shape, weights, inputs, constants)
    own = expert_matrices(weights, 2)
    mid = wanted.mids[0][0]
    contribution = down(mid, own.w2, ROUNDED, lane_values=format.lane_values, scale=own.g2)
    assert torch.isfinite(contribution).all()
    for lane_values in {8, 16, 32} - {format.lane_values}:
        other = gate_up(wanted.x, own.w13, constants, ROUNDED, lane_values=lane_values, scale=own.g13)
        assert not torch.equal(other, mid), "an order of gate and up that cannot be seen"
        other = down(mid, own.w2, ROUNDED, lane_values=lane_values, scale=own.g2)
        assert not torch.equal(other.bfloat16(), contribution.bfloat16()), "an order of down that cannot be seen"


@pytest.mark.parametrize("format", list(ExpertFormat))
def test_zero_weights(format: ExpertFormat, generator: torch.Generator) -> None:
    """Every bit of the experts 0, scales too: the output is exactly 0."""
    [weights] = random_weights(ONE_RANK, format, generator)
    for tensor in (weights.w13, weights.w2):
        raw(tensor).zero_()
    for scales in (weights.s13, weights.s2):
        if scales is not None:
            raw(scales).zero_()
    assert not check_weights(ONE_RANK, weights, random_inputs(ONE_RANK, 2, generator)).out.any()


@pytest.mark.parametrize("format", [MXFP8, NVFP4])
def test_random_bytes_are_weights(format: ExpertFormat, generator: torch.Generator) -> None:
    """Any byte is a code of some meaning; but for NaN ones, of which one in 128 would leave nothing else to see."""
    for turn in range(3):
        [weights] = random_weights(ONE_RANK, format, generator)
        for tensor in (weights.w13, weights.w2, weights.s13, weights.s2):
            values = raw(tensor)
            bytes_ = torch.randint(0, 256, values.shape, dtype=torch.uint8, generator=generator)
            if tensor is not None and tensor.dtype == torch.float8_e4m3fn:
                bytes_ = torch.where((bytes_ & 0x7F) == 0x7F, torch.full_like(bytes_, 0x3A), bytes_)
            if format is MXFP8 and tensor is weights.s13:
                bytes_ = bytes_ % 120
            if format is MXFP8 and tensor is weights.s2:
                bytes_ = bytes_ % 200
            values.copy_(bytes_)
        wanted = check_weights(ONE_RANK, weights, random_inputs(ONE_RANK, turn + 1, generator))
        assert bool(torch.isfinite(wanted.out).any())
