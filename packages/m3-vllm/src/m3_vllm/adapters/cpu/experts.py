"""The router and the experts of one sparse layer: how they are held, loaded and computed.

They compute what the launch computes, in the CPU target's own order (``m3_kernels.reference``), so both give the same bits.
"""

from __future__ import annotations

from enum import Enum

import torch
from attrs import frozen
from torch import nn

from m3_core.errors import ConfigurationError, ProtocolError
from m3_core.formulas import ceil_div, round_up
from m3_core.work import router_part_columns, router_parts
from m3_kernels.ffn import ExpertFormat, FfnConstants
from m3_kernels.formats.mxfp4 import dequantize_shuffled, quantize_shuffled
from m3_kernels.reference.arithmetic import ROUNDED, SEGMENTS, block_order, segment_of_blocks
from m3_kernels.reference.down import combine
from m3_kernels.reference.gate_up import swiglu
from m3_kernels.reference.route import Routes, route
from m3_kernels.reference.router import STEP
from m3_vllm.adapters.cpu.ordered import OrderedMatrices


@frozen
class PackedExperts:
    """MXFP4 experts in the layouts that the launch reads: codes in the (16, 16) shuffle, scales in the E8M0 shuffle.

    Attributes:
        w13: uint8 [E + 1, 2 I, H / 2].
        s13: uint8 [rows of w13 padded to 256, H / 32 padded to 8].
        w2: uint8 [E + 1, H, I / 2].
        s2: uint8 [rows of w2 padded to 256, I / 32 padded to 8].
    """

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor


class Projection(Enum):
    """The three matrices of an expert, by the published names of routed and shared experts."""

    GATE = ("w1", "gate_proj")
    DOWN = ("w2", "down_proj")
    UP = ("w3", "up_proj")

    @classmethod
    def named(cls, name: str) -> Projection | None:
        """The projection that a checkpoint calls ``name``; None if it is none."""
        return next((member for member in cls if name in member.value), None)


class Router(nn.Module):
    """Sigmoid routing with a bias that steers the choice alone (MiniMax-M3 facts: router details)."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        """One float32 row of ``hidden`` weights for each of ``experts``, of which a token takes ``top_k``."""
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=torch.float32), requires_grad=False)
        self._columns: int = router_part_columns(hidden)
        self._parts: OrderedMatrices | None = None

    def prepare(self) -> None:
        """Lay the weights out for the product, once they are loaded."""
        experts, hidden = self.weight.shape
        padded = self.weight.new_zeros(experts, router_parts(hidden) * self._columns)
        padded[:, :hidden] = self.weight.data
        matrices = padded.view(experts, -1, self._columns).transpose(0, 1)
        segment = round_up(ceil_div(self._columns, SEGMENTS), STEP)
        self._parts = OrderedMatrices(matrices, torch.arange(self._columns), segment)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [S, E, parts] of bf16 ``rows`` [S, H]: the parts of each logit, which the route adds.

        Raises:
            ProtocolError: before :meth:`prepare`.
        """
        if self._parts is None:
            raise ProtocolError("Router", "LOADING", "LOGITS", ("prepare first",))
        count, hidden = rows.shape
        parts = router_parts(hidden)
        padded = rows.new_zeros(count, parts * self._columns)
        padded[:, :hidden] = rows
        product = self._parts.product(padded.view(count * parts, self._columns), torch.arange(parts).repeat(count))
        return product.view(count, parts, -1).transpose(1, 2)

    def forward(self, rows: torch.Tensor, bias: torch.Tensor, slots: torch.Tensor, constants: FfnConstants) -> Routes:
        """Pick experts for bf16 ``rows`` [S, H].

        Args:
            rows: normed rows.
            bias: float32 [E], added for the choice only.
            slots: int64, at least S; a row with a negative one picks -1.
            constants: the factor of the weights.
        """
        return route(self.logits(rows), bias, slots, self.top_k, constants.routed_scaling_factor, ROUNDED)


class Experts(nn.Module):
    """Routed experts and the shared one, this rank's slice of each, in the layout of the launch.

    Attributes:
        w13: bf16 [E + 1, 2 I, H]: an expert's gate rows, then its up rows.
        w2: bf16 [E + 1, H, I].
        routed: E; the shared expert has this id.
        packed: the same values as MXFP4 once :meth:`quantise` was called; None before.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, *, rank: int, ranks: int) -> None:
        """Room for ``experts`` routed experts and a shared one, of ``intermediate`` over all ``ranks``."""
        super().__init__()
        self.routed = experts
        self.rank = rank
        self.width = intermediate // ranks
        self.w13 = nn.Parameter(torch.empty(experts + 1, 2 * self.width, hidden, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(experts + 1, hidden, self.width, dtype=torch.bfloat16), requires_grad=False)
        self.packed: PackedExperts | None = None
        self._gate_up: OrderedMatrices | None = None
        self._down: OrderedMatrices | None = None
        self._missing = {(expert, projection) for expert in range(experts + 1) for projection in Projection}

    def load(self, expert: int, projection: Projection, full: torch.Tensor) -> str:
        """Copy this rank's slice of one full matrix: gate and up split by rows, down by columns.

        Args:
            expert: 0..E; E is the shared expert.
            projection: which matrix.
            full: [I over all ranks, H], or [H, I over all ranks] for the down projection.

        Returns:
            Name of the parameter that holds it.

        Raises:
            ConfigurationError: the expert does not exist or the shape is another.
        """
        if not 0 <= expert <= self.routed:
            raise ConfigurationError(f"expert {expert} of {self.routed} routed experts; the checkpoint and its config.json disagree")
        own = slice(self.rank * self.width, (self.rank + 1) * self.width)
        if projection is Projection.DOWN:
            target, piece = self.w2[expert], full[:, own]
        else:
            half = 0 if projection is Projection.GATE else self.width
            target, piece = self.w13[expert, half : half + self.width], full[own]
        if piece.shape != target.shape:
            raise ConfigurationError(
                f"expert {expert}, {projection.name.lower()}: shape {tuple(full.shape)} gives this rank {tuple(piece.shape)}, "
                f"needed {tuple(target.shape)}; the checkpoint and its config.json disagree"
            )
        target.copy_(piece)
        self._missing.discard((expert, projection))
        return "w2" if projection is Projection.DOWN else "w13"

    def missing(self) -> list[str]:
        """Matrices that no call of :meth:`load` has filled."""
        return sorted(f"{'shared' if expert == self.routed else expert}.{projection.name.lower()}" for expert, projection in self._missing)

    @property
    def format(self) -> ExpertFormat:
        """How the launch finds the experts."""
        return ExpertFormat.BF16 if self.packed is None else ExpertFormat.MXFP4

    def quantise(self) -> None:
        """Hold the nearest MXFP4 values: packed for the launch, and exactly those values as bf16 for the stock layers.

        Raises:
            ConfigurationError: hidden or intermediate size is no multiple of 64, or a weight is not finite.
        """
        w13, s13 = quantize_shuffled(self.w13.data)
        w2, s2 = quantize_shuffled(self.w2.data)
        self.w13.copy_(dequantize_shuffled(w13, s13))
        self.w2.copy_(dequantize_shuffled(w2, s2))
        self.packed = PackedExperts(w13, s13, w2, s2)

    def prepare(self) -> None:
        """Lay the weights out for the products, once they are loaded and perhaps quantised."""
        lane_values = self.format.lane_values
        hidden = self.w13.shape[2]
        self._gate_up = OrderedMatrices(self.w13.data, block_order(hidden, lane_values=lane_values), segment_of_blocks(hidden))
        order = block_order(self.width, lane_values=lane_values)
        self._down = OrderedMatrices(self.w2.data, order, order.numel())

    def forward(self, rows: torch.Tensor, routes: Routes, slots: torch.Tensor, constants: FfnConstants) -> torch.Tensor:
        """This rank's part of the output of bf16 ``rows`` [S, H]; 0 in padded rows.

        Products accumulate in float32; the activation rounds to bf16; the combine starts with the shared expert and rounds after
        every product and every addition, in the order of the picks (MiniMax-M3 facts: combine order and its roundings).

        Args:
            rows: normed rows.
            routes: who goes where.
            slots: int64, at least S; negative marks a padded row.
            constants: constants of the activation.

        Returns:
            bf16 [S, H].

        Raises:
            ProtocolError: before :meth:`prepare`.
        """
        if self._gate_up is None or self._down is None:
            raise ProtocolError("Experts", "LOADING", "FORWARD", ("prepare first",))
        count, picks = routes.experts.shape
        # A padded row's picks are -1; it takes part as any other and its result is dropped.
        experts = torch.cat([routes.experts.clamp(min=0), routes.experts.new_full((count, 1), self.routed)], dim=1).flatten()
        gate, up = self._gate_up.product(rows.repeat_interleave(picks + 1, dim=0), experts).chunk(2, dim=1)
        contributions = self._down.product(swiglu(gate, up, constants, ROUNDED), experts).view(count, picks + 1, -1)
        return combine(contributions[:, picks], contributions[:, :picks], routes.weights, slots, ROUNDED).to(torch.bfloat16)
