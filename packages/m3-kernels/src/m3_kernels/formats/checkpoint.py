"""Experts as published checkpoints hold them, and as the launch reads them row major (MXFP8, NVFP4), both ways.

A checkpoint has three linears an expert (MiniMax-M3 facts: tensor names of one sparse layer): w1 (gate) and w3 (up) of [I, H], w2 (down) of [H, I],
each with its scales, I over all tensor-parallel ranks. The launch has, on a rank with its slice of I, rows of w1, then rows of w3 as ``w13``, and
``w2``; expert by expert, the shared expert last. With ``i`` the slice's width, ``G`` the values of a scale and ``first = rank * i``:

    w13[e, n, k] = w1_e[first + n, k] for n < i, else w3_e[first + n - i, k]       s13[e, n, j] the same of their scales, j = k // G
    w2[e, n, k] = w2_e[n, first + k]                                               s2[e, n, j] = scale of w2_e[n, first // G + j]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from m3_core.errors import ConfigurationError


@attrs.frozen(eq=False)
class Linear:
    """One linear of a checkpoint.

    Attributes:
        weight: codes, [rows, K] or, two a byte, [rows, K / 2].
        scale: [rows, K / G].
        global_scale: fp32 scalar ([] or [1]), in formats that have one.
    """

    weight: Tensor
    scale: Tensor
    global_scale: Tensor | None = None


@attrs.frozen(eq=False)
class CheckpointExpert:
    """One expert of a checkpoint: gate ``w1``, up ``w3``, down ``w2``."""

    w1: Linear
    w3: Linear
    w2: Linear


@attrs.frozen(eq=False)
class RowMajorExperts:
    """One rank's experts as ``FfnWeights`` takes them: ``w13``, ``s13``, ``w2``, ``s2`` and, in formats that have them, ``g13`` and ``g2``."""

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    g13: Tensor | None = None
    g2: Tensor | None = None


def linear_names(moe: str, expert: int, routed: int) -> tuple[str, str, str]:
    """Names of an expert's w1, w3 and w2 in a checkpoint, without what follows the last dot.

    Args:
        moe: prefix of the mixture of experts, ``language_model.model.layers.{i}.block_sparse_moe``.
        expert: 0 to ``routed``; ``routed`` is the shared expert.
        routed: routed experts.
    """
    if expert == routed:
        return f"{moe}.shared_experts.gate_proj", f"{moe}.shared_experts.up_proj", f"{moe}.shared_experts.down_proj"
    return f"{moe}.experts.{expert}.w1", f"{moe}.experts.{expert}.w3", f"{moe}.experts.{expert}.w2"


@attrs.frozen
class RowMajorFormat:
    """What the conversions need to know of a format.

    Attributes:
        name: in messages.
        codes: type of the weights' tensor.
        values_an_element: values along K that an element of that tensor holds.
        scales: type of the scales' tensor.
        group: values along K that share a scale.
        scale_name: what a checkpoint calls a linear's scales.
        global_scale_name: what it calls the linear's global scale; None if the format has none.
    """

    name: str
    codes: torch.dtype
    values_an_element: int
    scales: torch.dtype
    group: int
    scale_name: str
    global_scale_name: str | None

    def read(self, tensors: Mapping[str, Tensor], moe: str, routed: int) -> list[CheckpointExpert]:
        """The experts of one layer out of a checkpoint's tensors by name, the shared expert last.

        Raises:
            ConfigurationError: naming every tensor that is missing.
        """
        suffixes = ["weight", self.scale_name, *([] if self.global_scale_name is None else [self.global_scale_name])]
        names = [linear_names(moe, expert, routed) for expert in range(routed + 1)]
        missing = [f"{name}.{suffix}" for linears in names for name in linears for suffix in suffixes if f"{name}.{suffix}" not in tensors]
        if missing:
            raise ConfigurationError(f"the checkpoint is no {self.name} one: it lacks {', '.join(missing)}")
        return [CheckpointExpert(*(Linear(*(tensors[f"{name}.{suffix}"] for suffix in suffixes)) for name in linears)) for linears in names]

    def pack(self, experts: Sequence[CheckpointExpert], *, rank: int = 0, world_size: int = 1) -> RowMajorExperts:
        """A rank's slice of a layer's experts as the launch reads it; no code is changed.

        Args:
            experts: the routed experts, then the shared one.
            rank: whose slice.
            world_size: tensor-parallel ranks.

        Raises:
            ConfigurationError: naming the expert and the linear that does not fit the first expert, the ranks or the format; or whose w1 and w3
                have different global scales.
        """
        if not experts or world_size < 1 or not 0 <= rank < world_size:
            raise ConfigurationError(
                f"{len(experts)} experts, rank {rank} of {world_size}: pass at least one expert and a rank below the ranks"
            )
        intermediate, hidden = self._sizes(experts[0])
        own = intermediate // world_size
        if own * world_size != intermediate or own % self.group:
            raise ConfigurationError(
                f"the intermediate size {intermediate} over {world_size} ranks gives no whole groups of {self.group}: use fewer ranks"
            )
        for number, expert in enumerate(experts):
            for name, (rows, k) in {"w1": (intermediate, hidden), "w3": (intermediate, hidden), "w2": (hidden, intermediate)}.items():
                self._require(f"expert {number}, {name}", getattr(expert, name), rows, k)
        part = slice(rank * own, (rank + 1) * own)
        columns, groups = self._columns(rank, own)
        return RowMajorExperts(
            w13=_stack([torch.cat((_bytes(e.w1.weight)[part], _bytes(e.w3.weight)[part])) for e in experts], self.codes),
            s13=_stack([torch.cat((_bytes(e.w1.scale)[part], _bytes(e.w3.scale)[part])) for e in experts], self.scales),
            w2=_stack([_bytes(e.w2.weight)[:, columns] for e in experts], self.codes),
            s2=_stack([_bytes(e.w2.scale)[:, groups] for e in experts], self.scales),
            g13=self._global_scales([(f"expert {n}", (e.w1, e.w3)) for n, e in enumerate(experts)]),
            g2=self._global_scales([(f"expert {n}", (e.w2,)) for n, e in enumerate(experts)]),
        )

    def unpack(self, ranks: Sequence[RowMajorExperts]) -> list[CheckpointExpert]:
        """The inverse of ``pack``: whole experts from every rank's slice, in rank order."""
        found = []
        for e in range(ranks[0].w13.shape[0]):
            halves = [(_bytes(own.w13[e]).chunk(2), _bytes(own.s13[e]).chunk(2)) for own in ranks]
            gate, up = (
                Linear(
                    torch.cat([codes[half] for codes, _ in halves]).view(self.codes),
                    torch.cat([scales[half] for _, scales in halves]).view(self.scales),
                    None if ranks[0].g13 is None else ranks[0].g13[e].clone(),
                )
                for half in (0, 1)
            )
            down = Linear(
                torch.cat([_bytes(own.w2[e]) for own in ranks], dim=1).view(self.codes),
                torch.cat([_bytes(own.s2[e]) for own in ranks], dim=1).view(self.scales),
                None if ranks[0].g2 is None else ranks[0].g2[e].clone(),
            )
            found.append(CheckpointExpert(gate, up, down))
        return found

    def _sizes(self, expert: CheckpointExpert) -> tuple[int, int]:
        if expert.w1.weight.dim() != 2:
            raise ConfigurationError(
                f"expert 0, w1: weight has shape {list(expert.w1.weight.shape)}; {self.name} linears have two dimensions"
            )
        return expert.w1.weight.shape[0], expert.w1.weight.shape[1] * self.values_an_element

    def _columns(self, rank: int, own: int) -> tuple[slice, slice]:
        elements, groups = own // self.values_an_element, own // self.group
        return slice(rank * elements, (rank + 1) * elements), slice(rank * groups, (rank + 1) * groups)

    def _require(self, where: str, linear: Linear, rows: int, k: int) -> None:
        if k % self.group:
            raise ConfigurationError(f"{where}: K is {k}; {self.name} needs a multiple of {self.group}")
        for name, tensor, dtype, size in (
            ("weight", linear.weight, self.codes, (rows, k // self.values_an_element)),
            (self.scale_name, linear.scale, self.scales, (rows, k // self.group)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != size:
                raise ConfigurationError(
                    f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}; {dtype} {list(size)} is needed ({self.name} checkpoints)"
                )

    def _global_scales(self, experts: Sequence[tuple[str, Sequence[Linear]]]) -> Tensor | None:
        if self.global_scale_name is None:
            return None
        found = []
        for where, linears in experts:
            scales = [linear.global_scale for linear in linears]
            for scale in scales:
                if scale is None or scale.dtype != torch.float32 or scale.numel() != 1:
                    what = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
                    raise ConfigurationError(f"{where}: {self.global_scale_name} is {what}; one torch.float32 number is needed")
            values = [scale.reshape(()) for scale in scales if scale is not None]
            # By bits: a NaN agrees with itself, and 0 does not with -0.
            if len({int(value.view(torch.int32)) for value in values}) > 1:
                raise ConfigurationError(
                    f"{where}: w1 and w3 have the global scales {', '.join(str(value.item()) for value in values)}; "
                    "the launch takes one for both: requantise them together"
                )
            found.append(values[0])
        return torch.stack(found)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _stack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(list(tensors)).contiguous().view(dtype)
