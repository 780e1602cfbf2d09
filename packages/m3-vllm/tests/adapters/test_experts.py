from __future__ import annotations

import pytest
import torch

from m3_core.errors import ConfigurationError, ProtocolError
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnWeights
from m3_kernels.reference.arithmetic import ROUNDED, block_order, segment_of_blocks
from m3_kernels.reference.half import half
from m3_kernels.reference.route import route
from m3_kernels.reference.router import router
from m3_vllm.adapters.cpu.experts import Experts, Projection, Router

CONSTANTS = FfnConstants()
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 192, 128, 5, 3


def random(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def loaded(rank: int, ranks: int) -> Experts:
    experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, rank=rank, ranks=ranks)
    for expert in range(EXPERTS + 1):
        for number, projection in enumerate(Projection):
            shape = (HIDDEN, INTERMEDIATE) if projection is Projection.DOWN else (INTERMEDIATE, HIDDEN)
            experts.load(expert, projection, random(*shape, seed=10 * expert + number, std=0.1).bfloat16())
    assert experts.missing() == []
    return experts


@pytest.mark.parametrize("hidden", [48, 192, 256, 1024])
def test_router_is_the_references(hidden: int) -> None:
    rows, slots = random(9, hidden, seed=0).bfloat16(), torch.tensor([0, 1, -1, 3, 4, 5, 6, 7, 8])
    module = Router(hidden, EXPERTS, TOP_K)
    module.weight.data = random(EXPERTS, hidden, seed=1, std=0.3)
    module.prepare()
    bias = random(EXPERTS, seed=2, std=0.2)
    logits = router(rows, module.weight.data, ROUNDED)
    assert torch.equal(module.logits(rows), logits)
    expected = route(logits, bias, slots, TOP_K, CONSTANTS.routed_scaling_factor, ROUNDED)
    routes = module(rows, bias, slots, CONSTANTS)
    assert torch.equal(routes.experts, expected.experts)
    assert torch.equal(routes.weights, expected.weights)
    assert routes.experts[2].tolist() == [-1] * TOP_K


@pytest.mark.parametrize("format", [ExpertFormat.BF16, ExpertFormat.MXFP4])
def test_each_ranks_part_is_the_references(format: ExpertFormat) -> None:
    """The whole half over two ranks in the reference; each rank's router and experts here, bit for bit."""
    ranks = [loaded(rank, 2) for rank in range(2)]
    module = Router(HIDDEN, EXPERTS, TOP_K)
    module.weight.data = random(EXPERTS, HIDDEN, seed=1, std=0.3)
    module.prepare()
    bias, post_norm = random(EXPERTS, seed=2, std=0.2), random(HIDDEN, seed=3, std=0.1).bfloat16()
    weights = []
    for experts in ranks:
        if format is ExpertFormat.MXFP4:
            experts.quantise()
        experts.prepare()
        packed = experts.packed
        assert experts.format is format
        weights.append(
            FfnWeights(format, post_norm, module.weight.data, bias, experts.w13.data, None, experts.w2.data, None)
            if packed is None
            else FfnWeights(format, post_norm, module.weight.data, bias, packed.w13, packed.s13, packed.w2, packed.s2)
        )
    slots = torch.tensor([4, -1, 0, 9, 2, 3, 8])
    parts = [random(7, HIDDEN, seed=20 + rank).bfloat16() for rank in range(2)]
    expected = half(parts, random(7, HIDDEN, seed=30).bfloat16(), slots, weights, CONSTANTS, TOP_K, ROUNDED)
    rows = expected.x.to(torch.bfloat16)
    routes = module(rows, bias, slots, CONSTANTS)
    for rank, experts in enumerate(ranks):
        part = experts(rows, routes, slots, CONSTANTS)
        assert torch.equal(part.float(), expected.combined[rank])
        assert (part[1] == 0).all()


def test_packed_experts_add_in_their_own_order() -> None:
    """Columns of very different size: otherwise sums of MXFP4 products are exact in float32, whatever their order."""
    experts = loaded(0, 1)
    experts.quantise()
    experts.prepare()
    assert experts._gate_up is not None
    rows = (random(8, HIDDEN, seed=5) * torch.exp2(random(HIDDEN, seed=6, std=6.0).round())).bfloat16()
    product = experts._gate_up.product(rows, torch.full((8,), 2))
    sums = {
        format: ROUNDED.dot(
            rows.float(), experts.w13[2].float(), block_order(HIDDEN, lane_values=format.lane_values), segment_of_blocks(HIDDEN)
        )
        for format in (ExpertFormat.BF16, ExpertFormat.MXFP4)
    }
    assert torch.equal(product, sums[ExpertFormat.MXFP4])
    assert not torch.equal(product, sums[ExpertFormat.BF16])


def test_quantised_experts_compute_from_quantised_values() -> None:
    plain, quantised = loaded(0, 1), loaded(0, 1)
    quantised.quantise()
    assert not torch.equal(plain.w13, quantised.w13)
    again = quantised.w13.data.clone()
    quantised.quantise()
    assert torch.equal(quantised.w13.data, again), "quantising what is quantised changes it"


def test_slices_of_a_rank() -> None:
    gate, up = random(INTERMEDIATE, HIDDEN, seed=1).bfloat16(), random(INTERMEDIATE, HIDDEN, seed=3).bfloat16()
    down = random(HIDDEN, INTERMEDIATE, seed=2).bfloat16()
    experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, rank=1, ranks=2)
    assert experts.load(2, Projection.GATE, gate) == experts.load(2, Projection.UP, up) == "w13"
    assert experts.load(EXPERTS, Projection.DOWN, down) == "w2"
    own = slice(INTERMEDIATE // 2, INTERMEDIATE)
    assert torch.equal(experts.w13[2], torch.cat([gate[own], up[own]]))
    assert torch.equal(experts.w2[EXPERTS], down[:, own])
    missing = experts.missing()
    assert len(missing) == 3 * (EXPERTS + 1) - 3
    assert "shared.gate" in missing
    assert "2.gate" not in missing


def test_refuses_what_does_not_fit() -> None:
    experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE, rank=0, ranks=2)
    with pytest.raises(ConfigurationError, match="expert 6 of 5"):
        experts.load(EXPERTS + 1, Projection.GATE, torch.zeros(INTERMEDIATE, HIDDEN))
    with pytest.raises(ConfigurationError, match="shape"):
        experts.load(0, Projection.GATE, torch.zeros(INTERMEDIATE, HIDDEN + 1))
    with pytest.raises(ProtocolError, match="prepare"):
        experts(torch.zeros(1, HIDDEN), route_of_one(), torch.zeros(1, dtype=torch.int64), CONSTANTS)


def route_of_one():  # type: ignore[no-untyped-def]
    return route(torch.zeros(1, EXPERTS, 1), torch.zeros(EXPERTS), torch.zeros(1, dtype=torch.int64), TOP_K, 2.0, ROUNDED)
