"""The router and the experts of one sparse layer: how they are held, loaded and computed."""

from __future__ import annotations

from enum import Enum

import torch
from attrs import frozen
from torch import nn

from m3_core.errors import ConfigurationError
from m3_kernels.ffn import ExpertFormat, FfnConstants
from m3_kernels.formats.mxfp4 import dequantize_shuffled, quantize_shuffled
from m3_vllm.adapters.cpu.arithmetic import clamped_swiglu, tiled_product

SMALLEST_SUM = 1e-20
"""Floor of the sum that normalises the picked experts' weights."""


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

    def forward(self, rows: torch.Tensor, bias: torch.Tensor, constants: FfnConstants) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick experts for bf16 ``rows`` [S, H], by float32 logits.

        Args:
            rows: normed rows.
            bias: float32 [E], added for the choice only.
            constants: the factor of the weights.

        Returns:
            (int64 [S, k] experts by descending biased score, the lower id first among equals; float32 [S, k] their weights: the
            unbiased sigmoids over their sum, times the routed scaling factor). A NaN score ranks last and weighs 0.
        """
        score = torch.sigmoid(tiled_product(rows, self.weight))
        key = torch.nan_to_num(score + bias, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        picked = torch.sort(key, dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        chosen = torch.nan_to_num(score, nan=0.0).gather(1, picked)
        total = chosen.new_zeros(chosen.shape[0])
        for pick in range(self.top_k):
            total = total + chosen[:, pick]
        return picked, chosen * (constants.routed_scaling_factor / total.clamp(min=SMALLEST_SUM)).unsqueeze(1)


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

    def forward(self, rows: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor, constants: FfnConstants) -> torch.Tensor:
        """This rank's part of the output of bf16 ``rows`` [S, H].

        Products accumulate in float32; the activation rounds to bf16; the combine starts with the shared expert and rounds after
        every product and every addition, in the order of the picks (MiniMax-M3 facts: combine order and its roundings).

        Args:
            rows: normed rows.
            picked: int64 [S, k].
            weights: float32 [S, k].
            constants: constants of the activation.

        Returns:
            bf16 [S, H].
        """
        count, picks = picked.shape
        products = torch.empty(count, picks, rows.shape[1], dtype=torch.float32, device=rows.device)
        for expert in sorted(set(picked.flatten().tolist())):
            row, pick = (picked == expert).nonzero(as_tuple=True)
            products[row, pick] = self._expert(rows[row], expert, constants)
        total = self._expert(rows, self.routed, constants).to(torch.bfloat16)
        for pick in range(picks):
            weighed = (weights[:, pick, None] * products[:, pick]).to(torch.bfloat16)
            total = (total.to(torch.float32) + weighed.to(torch.float32)).to(torch.bfloat16)
        return total

    def _expert(self, rows: torch.Tensor, expert: int, constants: FfnConstants) -> torch.Tensor:
        gate, up = tiled_product(rows, self.w13[expert]).chunk(2, dim=-1)
        middle = clamped_swiglu(gate, up, constants).to(torch.bfloat16)
        return tiled_product(middle, self.w2[expert])
