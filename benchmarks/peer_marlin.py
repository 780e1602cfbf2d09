"""What a user of vLLM runs today for the same half, on one rank: its compiled Marlin MXFP4 kernels in one graph over distinct layers.

A fused add and norm, an fp32 router, top-k, alignment, gate/up, activation, down and the sum of the experts; no tensor-parallel reduction,
which favours it. The library (``_moe_C_stable_libtorch.abi3.so``) is taken from a vLLM wheel and named on the command line; torch loads it
alone. Weights are random bits: only time is read.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

FLOAT4_E2M1F = 562949953487106  # vLLM's id of the scalar type
BLOCK = 8  # rows of a Marlin tile at decode


@attrs.frozen(eq=False)
class PeerLayer:
    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    router: Tensor
    bias: Tensor
    norm: Tensor


def random_layer(hidden: int, intermediate: int, experts: int, device: torch.device) -> PeerLayer:
    def words(*size: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)

    def scales(*size: int) -> Tensor:
        return torch.randint(118, 124, size, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)

    everyone = experts + 1
    return PeerLayer(
        words(everyone, hidden // 16, 4 * intermediate),
        scales(everyone, hidden // 32, 2 * intermediate),
        words(everyone, intermediate // 16, 2 * hidden),
        scales(everyone, intermediate // 32, hidden),
        torch.randn(experts, hidden, device=device) * 0.02,
        torch.zeros(experts, device=device),
        torch.zeros(hidden, dtype=torch.bfloat16, device=device),
    )


@torch.compile(dynamic=False)
def add_norm(part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stream = part.float() + residual.float()
    x = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    return stream.to(torch.bfloat16), x.to(torch.bfloat16), x.to(torch.bfloat16).float()


@torch.compile(dynamic=False)
def swiglu(both: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(torch.bfloat16)


def chain(layer: PeerLayer, picks: Tensor) -> Callable[[], None]:
    """One layer's half for fixed picks [rows, top_k + 1] (the last is the shared expert); all buffers are made here."""
    ops = torch.ops._moe_C
    device = picks.device
    rows, slots = picks.shape
    hidden, intermediate, experts = layer.norm.shape[0], layer.w13.shape[2] // 4, layer.w13.shape[0]
    part = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    residual = torch.randn_like(part)
    routed = (rows, slots - 1)
    weights, found, indices = (torch.empty(routed, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.int32))
    combine = torch.rand(rows, slots, device=device)
    room = rows * slots + experts * (BLOCK - 1)
    sorted_rows = torch.empty(room, dtype=torch.int32, device=device)
    tile_experts = torch.empty(-(-room // BLOCK), dtype=torch.int32, device=device)
    padded = torch.empty(1, dtype=torch.int32, device=device)
    work = torch.zeros(4 * torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device)
    both = torch.empty(rows * slots, 2 * intermediate, dtype=torch.bfloat16, device=device)
    contributions = torch.empty(rows * slots, hidden, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)

    def gemm(x: Tensor, y: Tensor, w: Tensor, s: Tensor, per_row: int, weigh: bool, size: tuple[int, int, int]) -> None:
        tables = (work, sorted_rows, tile_experts, padded, combine, BLOCK, per_row, weigh, FLOAT4_E2M1F)
        ops.moe_wna16_marlin_gemm(x, y, w, None, s, None, None, None, *tables, *size, False, True, False, -1, -1, -1)

    def run() -> None:
        _, x, wide = add_norm(part, residual, layer.norm)
        ops.topk_sigmoid(weights, found, indices, torch.nn.functional.linear(wide, layer.router), True, layer.bias, 2.0, None)
        ops.moe_align_block_size(picks, experts, BLOCK, sorted_rows, tile_experts, padded, None, None)
        gemm(x, both, layer.w13, layer.s13, slots, False, (rows, 2 * intermediate, hidden))
        gemm(swiglu(both), contributions, layer.w2, layer.s2, 1, True, (rows * slots, hidden, intermediate))
        ops.moe_sum(contributions.view(rows, slots, hidden), out, None, None)

    return run
