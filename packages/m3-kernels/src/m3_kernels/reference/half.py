"""The whole half over all ranks, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_core.formulas import round_up
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnWeights
from m3_kernels.formats import mxfp8, nvfp4
from m3_kernels.formats.mxfp4 import GROUP, dequantize_shuffled
from m3_kernels.formats.shuffle import SCALE_GROUPS_MULTIPLE
from m3_kernels.reference.arithmetic import Arithmetic
from m3_kernels.reference.down import combine, down
from m3_kernels.reference.final import final
from m3_kernels.reference.gate_up import gate_up
from m3_kernels.reference.norm import norm
from m3_kernels.reference.reduce import Reduced, reduce
from m3_kernels.reference.route import Routes, route
from m3_kernels.reference.router import router
from m3_kernels.reference.table import Slot, table


@attrs.frozen(eq=False)
class Matrices:
    """One expert as plain matrices.

    Attributes:
        w13: [2 * intermediate, hidden], without its global scale.
        w2: [hidden, intermediate], without its global scale.
        g13: fp32 scalar, the global scale of ``w13``; None in formats that have none.
        g2: as ``g13``, of ``w2``.
        lane_values: of the format; the order of the sums follows.
    """

    w13: Tensor
    w2: Tensor
    g13: Tensor | None
    g2: Tensor | None
    lane_values: int


@attrs.frozen(eq=False)
class Experts:
    """One rank's experts as plain matrices.

    Attributes:
        w13: [experts + 1, 2 * intermediate, hidden], without global scales.
        w2: [experts + 1, hidden, intermediate], without global scales.
        g13: fp32 [experts + 1], the global scales of ``w13``; None in formats that have none.
        g2: as ``g13``, of ``w2``.
    """

    w13: Tensor
    w2: Tensor
    g13: Tensor | None
    g2: Tensor | None

    @classmethod
    def of(cls, weights: FfnWeights) -> Experts:
        """The plain values of ``weights``, as the launch widens them."""
        found = [expert_matrices(weights, expert) for expert in range(weights.w13.shape[0])]
        return cls(torch.stack([one.w13 for one in found]), torch.stack([one.w2 for one in found]), weights.g13, weights.g2)


def expert_matrices(weights: FfnWeights, expert: int) -> Matrices:
    """One expert's plain values, as the launch widens them.

    Raises:
        ConfigurationError: if the format needs scales that the weights lack.
    """
    format = weights.format
    if format is ExpertFormat.BF16:
        return Matrices(weights.w13[expert], weights.w2[expert], None, None, format.lane_values)
    if weights.s13 is None or weights.s2 is None:
        raise ConfigurationError(f"{format.value} weights without scales: pass s13 and s2")
    g13, g2 = None, None
    if format is ExpertFormat.NVFP4:
        if weights.g13 is None or weights.g2 is None:
            raise ConfigurationError("nvfp4 weights without global scales: pass g13 and g2")
        g13, g2 = weights.g13[expert], weights.g2[expert]
    w13, w2 = (_dequantized(format, *one, expert) for one in ((weights.w13, weights.s13), (weights.w2, weights.s2)))
    return Matrices(w13, w2, g13, g2, format.lane_values)


def _dequantized(format: ExpertFormat, values: Tensor, scales: Tensor, expert: int) -> Tensor:
    if format is ExpertFormat.MXFP8:
        return mxfp8.dequantize(values[expert], scales[expert])
    if format is ExpertFormat.NVFP4:
        return nvfp4.dequantize(values[expert], scales[expert])
    # An expert's scales are whole blocks of the shuffle, which has 32 rows.
    _, rows, row_bytes = values.shape
    own = rows * round_up(2 * row_bytes // GROUP, SCALE_GROUPS_MULTIPLE)
    return dequantize_shuffled(values[expert : expert + 1], scales.reshape(-1)[expert * own : (expert + 1) * own])[0]


@attrs.frozen(eq=False)
class Half:
    """Every stage's result.

    Attributes:
        reduced: stage reduce.
        x: stage norm, [rows, hidden].
        logits: stage router, [rows, experts, parts].
        routes: stage route.
        slots: stage table.
        mids: stages shared_up and up: per rank and slot, [columns, intermediate].
        combined: stage down: per rank, [rows, hidden].
        out: stage final, [rows, hidden].
    """

    reduced: Reduced
    x: Tensor
    logits: Tensor
    routes: Routes
    slots: tuple[Slot, ...]
    mids: tuple[tuple[Tensor, ...], ...]
    combined: tuple[Tensor, ...]
    out: Tensor


def half(
    parts: Sequence[Tensor],
    residual: Tensor,
    slots: Tensor,
    weights: Sequence[FfnWeights],
    constants: FfnConstants,
    top_k: int,
    arithmetic: Arithmetic,
    routes: Routes | None = None,
) -> Half:
    """The FFN half over all ranks.

    Args:
        parts: every rank's bf16 [rows, hidden].
        residual: bf16 [rows, hidden].
        slots: int64, at least ``rows``.
        weights: every rank's weights; router and norm are rank 0's.
        constants: constants of the arithmetic.
        top_k: picks a row.
        arithmetic: how to compute.
        routes: picks to use instead of stage route's, for comparisons beyond a choice that rounding may turn.
    """
    first = weights[0]
    reduced = reduce(parts, residual, arithmetic)
    x = norm(reduced.stream, reduced.squares, first.post_norm, constants.rms_norm_eps, arithmetic)
    logits = router(x, first.router, arithmetic)
    chosen = route(logits, first.router_bias, slots, top_k, constants.routed_scaling_factor, arithmetic) if routes is None else routes
    found = table(chosen.experts, slots, first.router.shape[0])
    mids, combined = [], []
    for rank in weights:
        rank_mids, contributions = _expert_stages(x, rank, found, top_k, constants, arithmetic)
        rows = x.shape[0]
        routed = contributions[: rows * top_k].view(rows, top_k, -1)
        mids.append(rank_mids)
        combined.append(combine(contributions[rows * top_k :], routed, chosen.weights, slots, arithmetic))
    return Half(reduced, x, logits, chosen, found, tuple(mids), tuple(combined), final(combined, arithmetic))


def _expert_stages(
    x: Tensor, weights: FfnWeights, slots: Sequence[Slot], top_k: int, constants: FfnConstants, arithmetic: Arithmetic
) -> tuple[tuple[Tensor, ...], Tensor]:
    rows, hidden = x.shape
    contributions = torch.zeros((top_k + 1) * rows, hidden, dtype=arithmetic.dtype, device=x.device)
    mids = []
    for slot in slots:
        own = expert_matrices(weights, slot.expert)
        mid = gate_up(x[list(slot.rows)], own.w13, constants, arithmetic, lane_values=own.lane_values, scale=own.g13)
        contributions[list(slot.picks)] = down(mid, own.w2, arithmetic, lane_values=own.lane_values, scale=own.g2)
        mids.append(mid)
    return tuple(mids), contributions
