"""The launch against float64 on random inputs, within derived bounds: stage by stage, and from one end to the other.

A stage's bound says how far its result may be from the float64 result of the same formula, given how far its input may be off. Stage by
stage, the float64 formula gets the very values that the launch passed on (they lie in scratch and in the mailboxes), with no error: these
bounds are tight. From end to end the errors are carried along: no more than a worst case, wide but valid.

u = 2^-8 is the rounding unit of bf16 and v = 2^-24 that of fp32: rounding moves a value x by at most u |x| (v |x|); an fp32 dot product of n
terms is off by at most 2 n v times the sum of its terms' magnitudes (n v, with room for the second order, and for the product with a global
scale, which is a part of the weights here).

- norm: with q = mean(s^2) + eps off by a relative r <= 1/2, rstd is off by at most (1 - r)^(-1/2) - 1 <= r.
- sigmoid has slope at most 1/4; g * sigmoid(alpha g) has slope at most 1.1 for every alpha; clamping has slope at most 1.
- weights p / sum(p): the quotient with the numerator as large and the denominator as small as their errors allow.
- exp2, reciprocals and roots are within 4 v of their value on every target.

From end to end the same experts must be picked: the test asserts that the float64 keys are further apart than twice their bound.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.layout import hidden_stride, intermediate_stride
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_kernels.reference.arithmetic import EXACT
from m3_kernels.reference.down import combine, down
from m3_kernels.reference.final import final
from m3_kernels.reference.gate_up import gate_up
from m3_kernels.reference.half import Experts, Half, half
from m3_kernels.reference.norm import norm
from m3_kernels.reference.reduce import sum_of_squares
from m3_kernels.reference.route import Routes, route, sum_parts
from m3_kernels.reference.router import router
from m3_kernels.reference.table import table
from m3_kernels.testing import LayerInputs, ThreadRanks, random_inputs, random_weights

U = 2.0**-8
V = 2.0**-24
FUNCTION = 4 * V
CONSTANTS = FfnConstants()


def rounded(value: Tensor, error: Tensor, unit: float) -> Tensor:
    """Error after rounding something within ``error`` of ``value``."""
    return error + unit * (value.abs() + error)


def product(a: Tensor, error_a: Tensor, b: Tensor, error_b: Tensor) -> Tensor:
    """Error of an fp32 product."""
    return rounded(a * b, a.abs() * error_b + b.abs() * error_a + error_a * error_b, V)


def dot(rows: Tensor, error: Tensor, matrix: Tensor) -> Tensor:
    """Error of ``rows @ matrix.T`` where ``rows`` is off by ``error`` and ``matrix`` is exact."""
    magnitude = matrix.abs().T
    return error @ magnitude + 2 * rows.shape[1] * V * ((rows.abs() + error) @ magnitude)


def rank_sum_bound(values: list[Tensor], errors: list[Tensor]) -> Tensor:
    """Stages reduce and final: a rank-order sum rounded to bf16."""
    magnitude = torch.stack([value.abs() + error for value, error in zip(values, errors, strict=True)]).sum(dim=0)
    error = torch.stack(errors).sum(dim=0) + 2 * len(values) * V * magnitude
    return rounded(torch.stack(values).sum(dim=0), error, U)


def stream_bound(parts: list[Tensor], stream: Tensor) -> Tensor:
    return rounded(stream, rank_sum_bound(parts, [torch.zeros_like(part) for part in parts]), V)


def x_bound(stream: Tensor, error: Tensor, x: Tensor, post_norm: Tensor) -> Tensor:
    hidden = stream.shape[1]
    square = (stream**2).mean(dim=1, keepdim=True)
    e_square = (2 * stream.abs() * error + error**2).mean(dim=1, keepdim=True)
    e_square = e_square + 2 * hidden * V * ((stream.abs() + error) ** 2).mean(dim=1, keepdim=True)
    assert (e_square <= square / 2).all()
    rstd = (square + CONSTANTS.rms_norm_eps) ** -0.5
    e_rstd = rstd * (e_square / (square + CONSTANTS.rms_norm_eps) + FUNCTION + 2 * V)
    scale = 1 + post_norm.double()
    return rounded(x, product(stream * rstd, product(stream, error, rstd, e_rstd), scale, V * scale.abs()), U)


def probability_bound(logit: Tensor, error: Tensor) -> Tensor:
    return error / 4 + V * logit.abs() + 2 * FUNCTION * torch.sigmoid(logit)


def weight_bound(logit: Tensor, error: Tensor, routes: Routes) -> Tensor:
    picked = routes.experts.clamp(min=0)
    p, e_p = torch.sigmoid(logit).gather(1, picked), probability_bound(logit, error).gather(1, picked)
    total = p.sum(dim=1, keepdim=True)
    e_total = rounded(total, e_p.sum(dim=1, keepdim=True), picked.shape[1] * V)
    assert (e_total < total).all()
    return routes.weights * ((1 + e_p / p) / (1 - e_total / total) * (1 + 2 * FUNCTION) - 1)


def mid_bound(x: Tensor, error: Tensor, w13: Tensor, mid: Tensor) -> Tensor:
    e_gate, e_up = dot(x, error, w13).chunk(2, dim=1)
    gate, up = (x @ w13.T).chunk(2, dim=1)
    g, u = gate.clamp(max=CONSTANTS.swiglu_limit), up.clamp(-CONSTANTS.swiglu_limit, CONSTANTS.swiglu_limit)
    swish = g * torch.sigmoid(CONSTANTS.swiglu_alpha * g)
    e_swish = 1.1 * e_gate + (3 * FUNCTION + 2 * V * (1 + CONSTANTS.swiglu_alpha * g.abs())) * swish.abs()
    return rounded(mid, product(swish, e_swish, u + CONSTANTS.swiglu_beta, e_up + V * (u.abs() + 1 + e_up)), U)


def combine_bound(contribution: Tensor, error: Tensor, weights: Tensor, e_weights: Tensor, padded: Tensor) -> Tensor:
    rows, top_k = weights.shape
    t = contribution[rows * top_k :]
    e_t = rounded(t, error[rows * top_k :], U)
    for k in range(top_k):
        c, e_c = contribution[k : rows * top_k : top_k], error[k : rows * top_k : top_k]
        weight, e_weight = weights[:, k, None], e_weights[:, k, None]
        t = t + weight * c
        e_t = rounded(t, rounded(t, e_t + rounded(weight * c, product(weight, e_weight, c, e_c), U), V), U)
    return torch.where(padded[:, None], torch.zeros_like(e_t), e_t)


def exact_matrices(experts: Experts, expert: int) -> tuple[Tensor, Tensor]:
    """An expert's w13 and w2 with their global scales, in float64."""
    w13, w2 = experts.w13[expert].double(), experts.w2[expert].double()
    if experts.g13 is None or experts.g2 is None:
        return w13, w2
    return w13 * experts.g13[expert].double(), w2 * experts.g2[expert].double()


@attrs.frozen(eq=False)
class Ran:
    """A launch and what it passed from stage to stage, in float64."""

    inputs: LayerInputs
    weights: tuple[FfnWeights, ...]
    top_k: int
    out: Tensor
    stream: Tensor
    x: Tensor
    logits: Tensor
    routes: Routes
    mids: tuple[Tensor, ...]
    combined: tuple[Tensor, ...]


def run(shape: FfnShape, inputs: LayerInputs, weights: tuple[FfnWeights, ...], constants: FfnConstants = CONSTANTS) -> Ran:
    rows = inputs.residual.shape[0]
    layout, peer = shape.scratch(rows), shape.peer_layout
    with ThreadRanks(shape, poison=True) as ranks:
        out = ranks.run(ranks.launches(weights, constants), inputs)[0][0]
        scratch = [channel.scratch(rows).clone() for channel in ranks.channels]

        def cut(rank: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
            return scratch[rank][start : start + count * dtype.itemsize].view(dtype)

        stride = hidden_stride(shape.hidden)
        stream = cut(0, layout.stream_offset, rows * stride, torch.float32).view(rows, stride)[:, : shape.hidden]
        x = cut(0, layout.x_offset, rows * stride, torch.bfloat16).view(rows, stride)[:, : shape.hidden]
        parts = layout.work.router_parts
        logits = cut(0, layout.logit_offset, 2 * rows * shape.experts * parts, torch.float32)[::2].view(rows, shape.experts, parts)
        route_words = cut(0, layout.route_offset, 4 * rows * shape.top_k, torch.int32)[::2].view(rows, 2, shape.top_k)
        routes = Routes(route_words[:, 0].to(torch.int64), route_words[:, 1].contiguous().view(torch.float32).double())
        mid_shape = (layout.work.slots, layout.work.slot_columns, intermediate_stride(shape.intermediate))
        mids = tuple(
            cut(rank, layout.mid_offset, mid_shape[0] * mid_shape[1] * mid_shape[2], torch.bfloat16).view(mid_shape)
            for rank in range(shape.world_size)
        )
        combined = []
        for source in range(shape.world_size):
            start = peer.ffn_pair(0, source, 0, 0)
            words = ranks.buffers[0][start : start + 8 * rows * peer.column_pairs].clone().view(torch.int32)[::2]
            combined.append(words.contiguous().view(torch.bfloat16).view(rows, shape.hidden).double())
    return Ran(
        inputs, weights, shape.top_k, out.double(), stream.double(), x.double(), logits.double(), routes,
        tuple(mid.double() for mid in mids), tuple(combined),
    )  # fmt: skip


def stage_excess(ran: Ran) -> dict[str, float]:
    """By how much each stage's worst value leaves its bound, as a multiple of it: at most 1 if it holds."""

    def excess(found: Tensor, wanted: Tensor, bound: Tensor) -> float:
        difference = (found - wanted).abs()
        assert not torch.isnan(difference).any()
        return float((difference / bound.clamp(min=1e-300)).max())

    parts = [part.double() for part in ran.inputs.parts]
    zero = torch.zeros_like(ran.stream)
    stream = torch.stack(parts).sum(dim=0) + ran.inputs.residual.double()
    first = ran.weights[0]
    x = norm(ran.stream, sum_of_squares(ran.stream), first.post_norm, CONSTANTS.rms_norm_eps, EXACT)
    logits = sum_parts(router(ran.x, first.router, EXACT))
    found_logits = sum_parts(ran.logits)
    e_parts = 2 * ran.logits.shape[-1] * V * ran.logits.abs().sum(dim=-1)
    routes = route(ran.logits, first.router_bias, ran.inputs.slots, ran.top_k, CONSTANTS.routed_scaling_factor, EXACT)
    same = torch.equal(routes.experts, ran.routes.experts)
    result = {
        "reduce": excess(ran.stream, stream, stream_bound(parts, stream)),
        "norm": excess(ran.x, x, x_bound(ran.stream, zero, x, first.post_norm)),
        "router": excess(found_logits, logits, dot(ran.x, zero, first.router.double())),
        "route": excess(ran.routes.weights, routes.weights, weight_bound(found_logits, e_parts, routes)) if same else float("inf"),
        "final": excess(ran.out, final(ran.combined, EXACT), rank_sum_bound(list(ran.combined), [zero] * len(ran.combined))),
    }
    rows = ran.x.shape[0]
    slots = table(ran.routes.experts, ran.inputs.slots, first.router.shape[0])
    for rank, (mids, combined, weights) in enumerate(zip(ran.mids, ran.combined, ran.weights, strict=True)):
        experts = Experts.of(weights)
        contribution = torch.zeros((ran.top_k + 1) * rows, ran.x.shape[1], dtype=torch.float64)
        error = torch.zeros_like(contribution)
        worst = 0.0
        for index, slot in enumerate(slots):
            w13, w2 = exact_matrices(experts, slot.expert)
            x_rows = ran.x[list(slot.rows)]
            wanted = gate_up(x_rows, w13, CONSTANTS, EXACT)
            mid = mids[index, : len(slot.rows), : w2.shape[1]]
            worst = max(worst, excess(mid, wanted, mid_bound(x_rows, torch.zeros_like(x_rows), w13, wanted)))
            contribution[list(slot.picks)] = down(mid, w2, EXACT)
            error[list(slot.picks)] = dot(mid, torch.zeros_like(mid), w2)
        result[f"gate_up[{rank}]"] = worst
        routed = contribution[: rows * ran.top_k].view(rows, ran.top_k, -1)
        wanted = combine(contribution[rows * ran.top_k :], routed, ran.routes.weights, ran.inputs.slots, EXACT)
        padded = ran.inputs.slots < 0
        bound = combine_bound(contribution, error, ran.routes.weights, torch.zeros_like(ran.routes.weights), padded)
        result[f"down[{rank}]"] = excess(combined, wanted, bound)
    return result


def whole_bound(exact: Half, inputs: LayerInputs, weights: tuple[FfnWeights, ...], top_k: int) -> tuple[Tensor, Tensor]:
    """Bounds from end to end, of the output [rows, hidden] and of the biased keys [rows, experts]."""
    parts = [part.double() for part in inputs.parts]
    e_stream = stream_bound(parts, exact.reduced.stream)
    e_x = x_bound(exact.reduced.stream, e_stream, exact.x, weights[0].post_norm)
    logit = sum_parts(exact.logits)
    e_logit = dot(exact.x, e_x, weights[0].router.double())
    e_key = rounded(torch.sigmoid(logit) + weights[0].router_bias.double(), probability_bound(logit, e_logit), V)
    e_weights = weight_bound(logit, e_logit, exact.routes)
    rows, errors = exact.x.shape[0], []
    for mids, rank in zip(exact.mids, weights, strict=True):
        experts = Experts.of(rank)
        contribution = torch.zeros((top_k + 1) * rows, exact.x.shape[1], dtype=torch.float64)
        error = torch.zeros_like(contribution)
        for slot, mid in zip(exact.slots, mids, strict=True):
            w13, w2 = exact_matrices(experts, slot.expert)
            e_mid = mid_bound(exact.x[list(slot.rows)], e_x[list(slot.rows)], w13, mid)
            contribution[list(slot.picks)] = mid @ w2.T
            error[list(slot.picks)] = dot(mid, e_mid, w2)
        errors.append(combine_bound(contribution, error, exact.routes.weights, e_weights, inputs.slots < 0))
    return rank_sum_bound(list(exact.combined), errors), e_key


def clear_case(shape: FfnShape, format: ExpertFormat, rows: int, generator: torch.Generator) -> tuple[LayerInputs, tuple[FfnWeights, ...]]:
    """Random inputs whose biases keep the experts' keys apart."""
    weights = random_weights(shape, format, generator)
    bias = torch.randperm(shape.experts, generator=generator) * 2.0
    for rank in weights:
        rank.router_bias.copy_(bias)
    return random_inputs(shape, rows, generator, padded=[1]), weights


CASES = [(format, world_size) for format in ExpertFormat for world_size in (1, 2, 4)]


@pytest.mark.parametrize(("format", "world_size"), CASES)
def test_every_stage_is_within_its_bound(format: ExpertFormat, world_size: int, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=256, intermediate=64, experts=8, top_k=4, world_size=world_size, max_rows=16)
    ran = run(shape, random_inputs(shape, 6, generator, padded=[1]), random_weights(shape, format, generator))
    assert {stage: excess for stage, excess in stage_excess(ran).items() if not excess <= 1} == {}


@pytest.mark.parametrize(("format", "world_size"), CASES)
def test_the_whole_is_within_its_bound(format: ExpertFormat, world_size: int, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=256, intermediate=64, experts=8, top_k=4, world_size=world_size, max_rows=16)
    inputs, weights = clear_case(shape, format, 6, generator)
    exact = half(inputs.parts, inputs.residual, inputs.slots, weights, CONSTANTS, shape.top_k, EXACT)
    bound, e_key = whole_bound(exact, inputs, weights, shape.top_k)
    keys = torch.sigmoid(sum_parts(exact.logits)) + weights[0].router_bias.double()
    ordered, _ = keys.sort(dim=1, descending=True)
    gaps = (ordered[:, :-1] - ordered[:, 1:])[:, : shape.top_k]
    assert (gaps > 2 * e_key.max(dim=1, keepdim=True).values).all(), "inputs whose picks rounding could turn"
    assert ((run(shape, inputs, weights).out - exact.out).abs() <= bound).all()


@pytest.mark.parametrize(
    ("wrong", "stages"),
    [
        (FfnConstants(rms_norm_eps=0.1), {"norm"}),
        (FfnConstants(routed_scaling_factor=2.001), {"route"}),
        (FfnConstants(swiglu_alpha=1.75), {"gate_up[0]", "gate_up[1]"}),
        (FfnConstants(swiglu_beta=1.02), {"gate_up[0]", "gate_up[1]"}),
        (FfnConstants(swiglu_limit=1.0), {"gate_up[0]", "gate_up[1]"}),
    ],
    ids=["eps", "scaling", "alpha", "beta", "limit"],
)
def test_a_wrong_constant_leaves_the_bound_of_its_stage(wrong: FfnConstants, stages: set[str], generator: torch.Generator) -> None:
    """The bounds are tight enough to name the stage that is wrong, and no other."""
    shape = FfnShape(hidden=256, intermediate=64, experts=8, top_k=4, world_size=2, max_rows=16)
    ran = run(shape, random_inputs(shape, 6, generator, padded=[1]), random_weights(shape, ExpertFormat.BF16, generator), wrong)
    assert {stage for stage, excess in stage_excess(ran).items() if not excess <= 1} == stages
