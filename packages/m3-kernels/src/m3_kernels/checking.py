"""One launch against the references, stage by stage where scratch shows the stage: for tests and benchmarks of targets whose sums run in
another order than the CPU's. What is wrong raises ``AssertionError``."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from m3_core.epochs import pair_tag
from m3_core.layout import hidden_stride
from m3_core.work import router_parts
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnShape, FfnWeights
from m3_kernels.reference.arithmetic import ROUNDED, ROUNDED_SUMS_EXACT
from m3_kernels.reference.final import final
from m3_kernels.reference.half import half
from m3_kernels.reference.norm import norm
from m3_kernels.reference.reduce import reduce
from m3_kernels.reference.route import Routes, sum_parts
from m3_kernels.testing import LayerInputs

CONSTANTS = FfnConstants()
# Which K of a run of eight lies at each place: as the FP4 and FP8 conversions leave the weights.
FP4_RUN = (0, 4, 1, 5, 2, 6, 3, 7)
FP8_RUN = (0, 2, 1, 3, 4, 6, 5, 7)
RUNS = {ExpertFormat.MXFP4: FP4_RUN, ExpertFormat.MXFP8: FP8_RUN, ExpertFormat.NVFP4: FP4_RUN}
# Of a bf16 rounding: half a unit in the last place, relative.
HALF_ULP = 2.0**-9
F32 = 2.0**-24


@attrs.frozen(eq=False)
class Scratch:
    """What a launch left in scratch."""

    x: Tensor
    logits: Tensor
    routes: Routes


def read_scratch(channel: FfnChannel, format: ExpertFormat, rows: int, epoch: int) -> Scratch:
    """The stages' words after launch ``epoch``; every tag is checked."""
    shape = channel.shape
    scratch, layout = channel.scratch(rows), shape.scratch(rows)

    def pairs(offset: int, count: int) -> Tensor:
        words = scratch[offset : offset + 8 * count].view(torch.int32).view(count, 2)
        assert (words[:, 1] == pair_tag(epoch)).all()
        return words[:, 0].contiguous()

    stride = hidden_stride(shape.hidden)
    x = scratch[layout.x_offset : layout.x_offset + 2 * rows * stride].view(torch.bfloat16).view(rows, stride)
    if format in RUNS:
        natural = torch.argsort(torch.tensor(RUNS[format], device=x.device))
        x = x.view(rows, -1, 8)[..., natural].reshape(rows, stride)
    parts = router_parts(shape.hidden)
    logits = pairs(layout.logit_offset, rows * shape.experts * parts).view(torch.float32).view(rows, shape.experts, parts)
    routes = pairs(layout.route_offset, 2 * rows * shape.top_k).view(rows, 2, shape.top_k)
    return Scratch(x[:, : shape.hidden], logits, Routes(routes[:, 0].to(torch.int64), routes[:, 1].contiguous().view(torch.float32)))


def relative(found: Tensor, wanted: Tensor) -> float:
    """Distance over size, in the Euclidean norm; NaN never passes a comparison."""
    size = torch.linalg.vector_norm(wanted.double())
    return float(torch.linalg.vector_norm(found.double() - wanted.double()) / size) if size > 0 else float(found.double().abs().max())


def check_launch(
    shape: FfnShape,
    inputs: LayerInputs,
    weights: tuple[FfnWeights, ...],
    found: tuple[Tensor, Tensor],
    scratch: Scratch,
    *,
    alone: bool = False,
) -> float:
    """Assert that one rank's launch is right; returns the relative error of its output.

    Args:
        shape: sizes.
        inputs: of all ranks; with ``alone`` of one rank, which stands for all.
        weights: of all ranks, or of the one.
        found: output and new residual.
        scratch: of the same launch.
        alone: whether the rank's own buffer stood for its peers'.
    """
    out, residual = found
    rows = out.shape[0]
    valid = inputs.slots[:rows] >= 0
    parts = inputs.parts * shape.world_size if alone else inputs.parts
    first = weights[0]

    # Every operation of these stages is one IEEE operation in a fixed order: the same bits.
    reduced = reduce(parts, inputs.residual, ROUNDED)
    assert torch.equal(residual[valid], reduced.residual[valid].bfloat16())
    x = norm(reduced.stream, reduced.squares, first.post_norm, CONSTANTS.rms_norm_eps, ROUNDED)
    assert torch.equal(scratch.x.float(), x)

    # A part is summed in at most 3 * 24 products of tiles, 8 segments and 16 parts, each of which rounds once, by truncation at worst.
    exact = x.double() @ first.router.double().T
    room = x.double().abs() @ first.router.double().abs().T * (3 * 24 + 8 + 16) * 2 * F32
    logits = sum_parts(scratch.logits.double())
    assert ((logits - exact).abs() <= room).all()
    check_routes(scratch.routes, logits, room, first.router_bias, valid, shape.top_k)

    # With the launch's own picks: rounded where the launch rounds, sums in float64. What differs is how often a sum that is a little off
    # rounds to the neighbour; less than a rounding of every element.
    wanted = half(parts, inputs.residual, inputs.slots, weights, CONSTANTS, shape.top_k, ROUNDED_SUMS_EXACT, scratch.routes)
    combined = wanted.combined * shape.world_size if alone else wanted.combined
    expected = final(combined, ROUNDED_SUMS_EXACT)
    assert not out[~valid].any(), "a padded row's output is 0"
    error = relative(out, expected)
    assert error <= HALF_ULP, f"relative error {error}"
    for row in torch.nonzero(valid).flatten().tolist():
        assert relative(out[row], expected[row]) <= 2 * HALF_ULP, f"row {row}"
    return error


def check_routes(routes: Routes, logits: Tensor, room: Tensor, bias: Tensor, valid: Tensor, top_k: int) -> None:
    """The picks are the highest keys but for those that lie closer together than the logits' error, and weigh as they should."""
    probability = torch.sigmoid(logits)
    key = probability + bias.double()
    # A sigmoid's slope is at most 1/4; exp2, reciprocal and sum add a few units in the last place of numbers below 2.
    slack = room / 4 + 8 * 2 * F32 * (1 + bias.double().abs())
    for row in range(routes.experts.shape[0]):
        picks = routes.experts[row].tolist()
        if not valid[row]:
            assert picks == [-1] * top_k
            continue
        assert len(set(picks)) == top_k
        rest = torch.ones_like(key[row], dtype=torch.bool)
        for pick in picks:
            rest[pick] = False
            if rest.any():
                best = int(torch.where(rest, key[row], torch.full_like(key[row], -torch.inf)).argmax())
                assert key[row, pick] >= key[row, best] - slack[row, pick] - slack[row, best]
    picked = torch.gather(probability, 1, routes.experts.clamp(min=0))
    weights = CONSTANTS.routed_scaling_factor * picked / picked.sum(dim=1, keepdim=True)
    error = torch.gather(slack, 1, routes.experts.clamp(min=0)) / picked
    error = error + error.amax(dim=1, keepdim=True) + 16 * F32
    assert ((routes.weights.double() - weights).abs() <= error * weights)[valid].all()
