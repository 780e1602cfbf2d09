from __future__ import annotations

import pytest
import torch

from m3_kernels.reference.arithmetic import EXACT, ROUNDED, block_order, segment_of_blocks
from m3_vllm.adapters.cpu.ordered import OrderedMatrices


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lane_values", [8, 16, 32])
@pytest.mark.parametrize("width", [64, 128, 192, 300, 1100])
def test_adds_in_the_given_order(width: int, lane_values: int) -> None:
    """Bit for bit the reference's sum, which runs one term after the other."""
    rows, matrices = random(5, width).bfloat16(), random(3, 7, width, seed=1).bfloat16()
    order, segment = block_order(width, lane_values=lane_values), segment_of_blocks(width)
    which = torch.tensor([2, 0, 0, 1, 2])
    product = OrderedMatrices(matrices, order, segment).product(rows, which)
    for row, matrix in enumerate(which.tolist()):
        expected = ROUNDED.dot(rows[row, None].float(), matrices[matrix].float(), order, segment)
        assert torch.equal(product[row], expected[0])


def test_rounds_each_product_of_wide_factors() -> None:
    rows, matrices = random(4, 96), random(2, 6, 96, seed=1)
    order = torch.arange(96)
    product = OrderedMatrices(matrices, order, 48).product(rows, torch.tensor([0, 1, 1, 0]))
    assert torch.equal(product[1], ROUNDED.dot(rows[1, None], matrices[1], order, 48)[0])


def test_the_order_matters() -> None:
    """Guards the tests above: another order gives other bits, so equality says something."""
    rows, matrices = random(64, 512).bfloat16(), random(1, 64, 512, seed=1).bfloat16()
    which = torch.zeros(64, dtype=torch.int64)
    ascending = OrderedMatrices(matrices, block_order(512), 128).product(rows, which)
    grouped = OrderedMatrices(matrices, block_order(512, lane_values=32), 128).product(rows, which)
    assert not torch.equal(ascending, grouped)
    exact = EXACT.dot(rows.double(), matrices[0].double(), torch.arange(512), 512)
    # A sum of n terms in any order is off by at most n rounding units of the sum of magnitudes.
    limit = 512 * 2.0**-24 * (rows.double().abs() @ matrices[0].double().abs().T)
    assert ((ascending - exact).abs() <= limit).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    rows, matrices = random(40, 256).bfloat16(), random(3, 32, 256, seed=1).bfloat16()
    which = torch.arange(40) % 3
    laid_out = OrderedMatrices(matrices, block_order(256), 128)
    together = laid_out.product(rows, which)
    for first, end in ((0, 1), (3, 5), (7, 24), (39, 40)):
        assert torch.equal(laid_out.product(rows[first:end], which[first:end]), together[first:end])
