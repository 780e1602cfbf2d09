"""The two kinds of decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from m3_kernels.ffn import FfnConstants
from m3_vllm.adapters.cpu.arithmetic import clamped_swiglu
from m3_vllm.adapters.cpu.attention import DenseAttention, SparseAttention
from m3_vllm.adapters.cpu.ffn_half import SparseFfn, StockFfnHalf, sum_over_ranks
from m3_vllm.adapters.cpu.norm import GemmaNorm

LayerCallable: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(positions, hidden, residual) -> (hidden, residual), as at every layer boundary; see ``model.MiniMaxM3CPUModel``."""


class DenseMLP(nn.Module):
    """The network of a dense layer; its output is this rank's part, not reduced."""

    def __init__(self, config: Any, constants: FfnConstants, prefix: str) -> None:
        """Sizes come from the text configuration; columns are split over the tensor-parallel ranks."""
        super().__init__()
        self.constants = constants
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.dense_intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.dense_intermediate_size, config.hidden_size, bias=False, reduce_results=False, prefix=f"{prefix}.down_proj"
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Part of the output of bf16 ``rows`` [S, H], bf16 [S, H]."""
        fused, _ = self.gate_up_proj(rows)
        gate, up = fused.chunk(2, dim=-1)
        middle = clamped_swiglu(gate, up, self.constants)
        part, _ = self.down_proj(middle.to(rows.dtype))
        return part  # type: ignore[no-any-return]


class DenseLayer(nn.Module):
    """One of the leading layers: full attention and a dense network."""

    def __init__(self, config: Any, constants: FfnConstants, cache_config: CacheConfig, prefix: str) -> None:
        """Sizes come from the text configuration."""
        super().__init__()
        self.self_attn = DenseAttention(config, cache_config, f"{prefix}.self_attn")
        self.mlp = DenseMLP(config, constants, f"{prefix}.mlp")
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer; ``hidden`` and ``residual`` as at every layer boundary, see ``model.MiniMaxM3CPUModel``."""
        rows, residual = self.input_layernorm.add(hidden, residual)
        part = self.self_attn(positions, rows)
        rows, residual = self.post_attention_layernorm.add(sum_over_ranks(part), residual)
        return sum_over_ranks(self.mlp(rows)), residual


class SparseLayer(nn.Module):
    """A layer with block-sparse attention and experts.

    Attributes:
        stock_half: the second half in stock form.
    """

    def __init__(self, config: Any, constants: FfnConstants, prefix: str) -> None:
        """Sizes come from the text configuration."""
        super().__init__()
        self.self_attn = SparseAttention(config, f"{prefix}.self_attn")
        self.block_sparse_moe = SparseFfn(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            rank=get_tensor_model_parallel_rank(),
            ranks=get_tensor_model_parallel_world_size(),
        )
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.stock_half = StockFfnHalf(self.post_attention_layernorm, self.block_sparse_moe, constants)

    def attention_half(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input norm and attention; returns (this rank's unreduced part, the residual before it), both bf16 [S, H]."""
        rows, residual = self.input_layernorm.add(hidden, residual)
        return self.self_attn(positions, rows), residual

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer in stock form; ``hidden`` and ``residual`` as at every layer boundary."""
        part, residual = self.attention_half(positions, hidden, residual)
        return self.stock_half(part, residual, self.self_attn.slots())
