"""The weight layouts against their index formulas, and MXFP4 values against their definition."""

from __future__ import annotations

import math

import pytest
import torch

from m3_core.errors import ConfigurationError
from m3_core.formulas import round_up
from m3_kernels.formats import mxfp4
from m3_kernels.formats.shuffle import shuffle_scales, shuffle_weights, unshuffle_scales, unshuffle_weights


def weight_position(expert: int, row: int, byte: int, rows: int, row_bytes: int) -> int:
    """MiniMax-M3 facts: (16, 16) shuffle of weights."""
    return expert * rows * row_bytes + (row // 16) * 16 * row_bytes + (byte // 16) * 256 + (row % 16) * 16 + byte % 16


def scale_position(row: int, group: int, groups: int) -> int:
    """MiniMax-M3 facts: E8M0 scale shuffle."""
    return (row // 32) * (32 * groups) + (group // 8) * 256 + (group % 4) * 64 + (row % 16) * 4 + ((group % 8) // 4) * 2 + (row % 32) // 16


@pytest.mark.parametrize(
    ("expert", "row", "byte", "logical", "physical"),
    [(0, 0, 0, 0, 0), (0, 0, 16, 16, 256), (0, 1, 0, 64, 16), (0, 3, 21, 213, 309), (0, 17, 40, 1128, 1560), (1, 31, 63, 4095, 4095)],
)
def test_published_weight_positions(expert: int, row: int, byte: int, logical: int, physical: int) -> None:
    weights = torch.zeros(2, 32, 64, dtype=torch.uint8)
    weights[expert, row, byte] = 1
    assert int(weights.flatten().nonzero()) == logical
    assert int(shuffle_weights(weights).flatten().nonzero()) == physical
    assert weight_position(expert, row, byte, 32, 64) == physical


@pytest.mark.parametrize(
    ("row", "group", "physical"), [(0, 1, 64), (1, 0, 16 // 4), (0, 4, 2), (16, 0, 1), (5, 6, 150), (37, 11, 980), (63, 15, 1023)]
)
def test_published_scale_positions(row: int, group: int, physical: int) -> None:
    scales = torch.zeros(64, 16, dtype=torch.uint8)
    scales[row, group] = 1
    assert int(shuffle_scales(scales).flatten().nonzero()) == physical
    assert scale_position(row, group, 16) == physical


@pytest.mark.parametrize(("experts", "rows", "row_bytes"), [(1, 16, 32), (3, 48, 96), (2, 16, 160)])
def test_every_weight_position(experts: int, rows: int, row_bytes: int) -> None:
    """Each byte lies where the formula says, both ways."""
    weights = torch.randint(0, 256, (experts, rows, row_bytes), dtype=torch.uint8)
    shuffled = shuffle_weights(weights)
    index = [
        weight_position(expert, row, byte, rows, row_bytes) for expert in range(experts) for row in range(rows) for byte in range(row_bytes)
    ]
    assert sorted(index) == list(range(weights.numel()))
    assert torch.equal(shuffled.flatten()[index], weights.flatten())
    assert torch.equal(unshuffle_weights(shuffled), weights)


@pytest.mark.parametrize(("rows", "groups"), [(256, 8), (100, 12), (129 * 16, 3), (300, 24)])
def test_every_scale_position(rows: int, groups: int) -> None:
    scales = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    shuffled = shuffle_scales(scales, padding=77)
    assert shuffled.shape == (round_up(rows, 256), round_up(groups, 8))
    padded_groups = shuffled.shape[1]
    index = [scale_position(row, group, padded_groups) for row in range(rows) for group in range(groups)]
    assert torch.equal(shuffled.flatten()[index], scales.flatten())
    rest = torch.ones(shuffled.numel(), dtype=torch.bool)
    rest[index] = False
    assert (shuffled.flatten()[rest] == 77).all()
    assert torch.equal(unshuffle_scales(shuffled, rows, groups), scales)


def test_the_reader_sees_sixteen_rows_by_a_group_together() -> None:
    """16 rows x 128 FP4 values are 1 KiB: lane l finds its row l % 16 and group l // 16 at 16 l."""
    weights = torch.randint(0, 256, (1, 32, 128), dtype=torch.uint8)
    shuffled = shuffle_weights(weights).flatten()
    for lane in range(64):
        for tile_row in range(2):
            for block in range(2):
                found = shuffled[tile_row * 16 * 128 + block * 1024 + 16 * lane :][:16]
                start = 64 * block + 16 * (lane // 16)
                assert torch.equal(found, weights[0, 16 * tile_row + lane % 16, start : start + 16])


@pytest.mark.parametrize("shape", [(1, 24, 32), (1, 16, 48)])
def test_weights_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="multiple of 16 rows and of 32 bytes"):
        shuffle_weights(torch.zeros(shape, dtype=torch.uint8))


def test_wrong_dimensions_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"\[experts, rows, bytes\]"):
        shuffle_weights(torch.zeros(16, 32, dtype=torch.uint8))
    with pytest.raises(ConfigurationError, match=r"\[rows, groups\]"):
        shuffle_scales(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ConfigurationError, match="cannot be 300 rows"):
        unshuffle_scales(torch.zeros(256, 8, dtype=torch.uint8), 300, 8)
    with pytest.raises(ConfigurationError, match=r"\[experts, rows, K\]"):
        mxfp4.quantize_shuffled(torch.zeros(16, 64))


def test_all_elements_and_scales() -> None:
    """Every code under every scale is e2m1 * 2^(code - 127), exactly; past the range infinity, under 255 NaN."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    element = torch.tensor([*values, *(-value for value in values)] * 2, dtype=torch.float64)
    for scale in range(255):
        exact = element * 2.0 ** (scale - 127)
        exact = torch.where(exact.abs() >= 2.0**128, torch.copysign(torch.full_like(exact, math.inf), exact), exact)
        found = mxfp4.dequantize(packed, torch.tensor([scale], dtype=torch.uint8))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.double(), exact)
        assert torch.equal(torch.signbit(found), torch.signbit(exact))
    assert torch.isnan(mxfp4.dequantize(packed, torch.tensor([255], dtype=torch.uint8))).all()


def test_quantize_keeps_what_the_format_holds() -> None:
    """Groups that reach 4 or 6 times their scale come back unchanged, at every scale."""
    generator = torch.Generator().manual_seed(1)
    for exponent in (-126, -100, -1, 0, 1, 60, 124):
        element = torch.tensor(mxfp4.E2M1_VALUES)[torch.randint(0, 8, (4, 3, 32), generator=generator)]
        element[..., 7] = 6.0
        values = element * torch.tensor([1.0, -1.0])[torch.randint(0, 2, element.shape, generator=generator)] * 2.0**exponent
        codes, scales = mxfp4.quantize(values.flatten(-2))
        assert (scales == exponent + 127).all()
        assert torch.equal(mxfp4.dequantize(codes, scales).float(), values.flatten(-2).float())


def test_quantize_takes_the_nearest() -> None:
    """No other code is nearer, and on a tie the code is even."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    values[0, :8] = torch.tensor([8.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    codes, scales = mxfp4.quantize(values)
    step = 2.0 ** (scales.double() - 127)
    grid = torch.tensor([*mxfp4.E2M1_VALUES, *(-value for value in mxfp4.E2M1_VALUES)], dtype=torch.float64)
    nearest = (values[..., None] - (step[..., None] * grid)).abs().min(dim=-1).values
    assert torch.equal((mxfp4.dequantize(codes, scales).double() - values).abs(), nearest)
    # The row's largest value sets the scale: 8 is 4 times 2.
    ties = mxfp4.unpack(codes)[0]
    assert int(scales[0]) == 128
    assert ties[:8].tolist() == [4.0, 0.0, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]


def test_quantize_ties_at_unit_scale() -> None:
    values = torch.zeros(1, 32)
    values[0, :8] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -0.25])
    codes, scales = mxfp4.quantize(values)
    assert int(scales) == 127
    assert mxfp4.unpack(codes)[0, :8].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -0.0]


def test_quantize_saturates_and_keeps_zeros() -> None:
    values = torch.zeros(2, 32)
    values[0, 0] = 7.9
    codes, scales = mxfp4.quantize(values)
    assert mxfp4.dequantize(codes, scales)[0, 0] == 6.0
    assert scales.tolist() == [[127], [127]]
    assert not mxfp4.dequantize(codes, scales)[1].any()


def test_quantize_refuses() -> None:
    with pytest.raises(ConfigurationError, match="K is 40"):
        mxfp4.quantize(torch.zeros(1, 40))
    with pytest.raises(ConfigurationError, match="not finite"):
        mxfp4.quantize(torch.full((1, 32), math.nan))


def test_shuffled_round_trip() -> None:
    values = torch.randn(3, 48, 192, generator=torch.Generator().manual_seed(3))
    codes, scales = mxfp4.quantize(values)
    shuffled_codes, shuffled_scales = mxfp4.quantize_shuffled(values)
    assert torch.equal(mxfp4.dequantize_shuffled(shuffled_codes, shuffled_scales), mxfp4.dequantize(codes, scales))


def test_special_scales_are_counted() -> None:
    assert mxfp4.has_special_scales(torch.tensor([0, 1, 255, 255], dtype=torch.uint8)) == (1, 2)
