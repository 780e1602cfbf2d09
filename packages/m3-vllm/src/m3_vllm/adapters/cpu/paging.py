"""How vLLM pages the caches of a sparse layer: backends, metadata, and the index cache's layer.

vLLM has such classes for this model, but importing any module of its model package imports the GPU model as well. Two backends
share one builder: the main cache and the index cache are different groups with different slots and pages, else alike.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec, SparseCacheRole

from m3_vllm.minimax_m3 import BLOCK_TOKENS, HEAD_DIM


@frozen(kw_only=True, eq=False)
class BlockSparseMetadata(AttentionMetadata):
    """One step of one cache group; decode rows come before prefill rows.

    Attributes:
        rows: rows that hold a token.
        num_decodes: decode requests.
        num_decode_tokens: their rows.
        num_prefills: prefill requests.
        num_prefill_tokens: their rows.
        block_table: int32 [requests, blocks], pages.
        request_bounds: first and end row of each request.
        row_request: int64 [rows], each row's request.
    """

    rows: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    block_table: torch.Tensor
    request_bounds: tuple[tuple[int, int], ...]
    row_request: torch.Tensor


class BlockSparseMetadataBuilder(AttentionMetadataBuilder[BlockSparseMetadata]):
    """Builds :class:`BlockSparseMetadata`; asks vLLM to put requests with one new token first."""

    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        """Arguments as vLLM passes them to every builder."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> BlockSparseMetadata:
        """Metadata of one step; called by vLLM's runner once a step and group."""
        common = common_attn_metadata
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        starts: list[int] = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        bounds = tuple(pairwise(starts))
        lengths = torch.tensor([end - first for first, end in bounds])
        return BlockSparseMetadata(
            rows=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=prefills,
            num_prefill_tokens=prefill_tokens,
            block_table=common.block_table_tensor,
            request_bounds=bounds,
            row_request=torch.repeat_interleave(torch.arange(common.num_reqs), lengths),
        )


class BlockSparseImpl(AttentionImplBase[BlockSparseMetadata]):
    """Placeholder of vLLM's implementation object: it asks it what parallelism attention supports (none beyond heads)."""


class BlockSparseBackend(AttentionBackend):
    """Paged keys and values of a sparse layer; a page is one block of the sparse attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's log."""
        return "M3_BLOCK_SPARSE_CPU"

    @staticmethod
    def get_impl_cls() -> type[BlockSparseImpl]:
        """Class whose attributes tell what is supported."""
        return BlockSparseImpl

    @staticmethod
    def get_builder_cls() -> type[BlockSparseMetadataBuilder]:
        """Builder of the step's metadata."""
        return BlockSparseMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Sizes of one head."""
        return [HEAD_DIM]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Tokens of a page."""
        return [BLOCK_TOKENS]

    @classmethod
    def is_sparse(cls) -> bool:
        """Attention reads chosen blocks only."""
        return True


class IndexBackend(BlockSparseBackend):
    """Paged index keys of a sparse layer: one vector a token."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's log."""
        return "M3_INDEX_CPU"


class IndexCache(nn.Module, AttentionLayerBase):
    """The index keys of one sparse layer, known to vLLM as a layer of its own so that it gets pages of its own.

    Attributes:
        kv_cache: bf16 [pages, 128, 128] once vLLM has bound it; empty before.
    """

    def __init__(self, prefix: str) -> None:
        """Register the cache under ``prefix`` in vLLM's current configuration."""
        super().__init__()
        self.prefix = prefix
        self.kv_cache = torch.tensor([])
        register_cache_layer(prefix, self)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the view that vLLM allocated, [pages, 1, 128, 128]."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One bf16 vector of 128 a token, in the group that vLLM keeps for indexers."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=HEAD_DIM,
            dtype=torch.bfloat16,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Backend of the index keys."""
        return IndexBackend


def register_cache_layer(name: str, layer: AttentionLayerBase) -> None:
    """Enter a layer where vLLM looks for those that need cache pages.

    Raises:
        ValueError: the name is taken: two models were built in one configuration.
    """
    layers = get_current_vllm_config().compilation_config.static_forward_context
    if name in layers:
        raise ValueError(f"two layers are named {name}; build one model a configuration")
    layers[name] = layer
