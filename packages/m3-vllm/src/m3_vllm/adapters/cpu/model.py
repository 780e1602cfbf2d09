"""MiniMax-M3 for vLLM on a CPU: the class that the plugin names to vLLM, and the layers under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from m3_core.errors import ProtocolError
from m3_kernels.ffn import FfnConstants
from m3_vllm.adapters.cpu import steps
from m3_vllm.adapters.cpu.layers import DenseLayer, LayerCallable, SparseLayer
from m3_vllm.adapters.cpu.norm import GemmaNorm
from m3_vllm.adapters.cpu.requirements import check
from m3_vllm.adapters.cpu.weights import load_weights
from m3_vllm.settings import Settings


class MiniMaxM3CPUModel(nn.Module):
    """Embedding, layers and final norm.

    A layer's input is the reduced output of the previous layer, not yet added to the residual, and the residual after the
    previous layer's attention; the next norm adds them (MiniMax-M3 facts: boundary contract). The first layer gets the embedding
    as its output and zeros as its residual, whose sum is the embedding itself.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Build the layers that the text configuration lists, dense or sparse."""
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.constants = FfnConstants(
            rms_norm_eps=config.rms_norm_eps,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_beta=getattr(config, "swiglu_beta", 1.0),
            swiglu_limit=config.swiglu_limit,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleList(
            SparseLayer(config, self.constants, f"{prefix}.layers.{layer}")
            if sparse
            else DenseLayer(config, self.constants, vllm_config.cache_config, f"{prefix}.layers.{layer}")
            for layer, sparse in enumerate(config.moe_layer_freq)
        )
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def sparse_layers(self) -> dict[int, SparseLayer]:
        """The sparse layers by layer number, in order."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, SparseLayer)}

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, fused: Mapping[int, LayerCallable]) -> torch.Tensor:
        """Run every layer.

        Args:
            hidden: bf16 [S, H], embeddings.
            positions: int64 [S].
            fused: layers that run in place of the stock ones, by layer number.

        Returns:
            bf16 [S, H], normed.
        """
        residual = torch.zeros_like(hidden)
        for number, layer in enumerate(self.layers):
            hidden, residual = fused.get(number, layer)(positions, hidden, residual)
        normed, _ = self.norm.add(hidden, residual)
        return normed


class MiniMaxM3ForCPU(nn.Module):
    """MiniMax-M3's text model as vLLM's model interface wants it.

    Attributes:
        settings: m3's settings, the same on every rank.
        model: embedding, layers, norm.
        steps: what decides, counts and launches; set once the weights are loaded.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the model, its weights unset.

        Raises:
            RefusalError: with every reason, where the CPU model cannot run the checkpoint or the engine's configuration.
        """
        super().__init__()
        check(vllm_config)
        self.settings = Settings.from_additional_config(vllm_config.additional_config)
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.vllm_config = vllm_config
        self.steps: steps.Steps | None = None
        self.model = MiniMaxM3CPUModel(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int ``input_ids`` [S], bf16 [S, H]."""
        return self.model.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """One step of the decoder; vLLM's forward context holds its metadata and slots.

        Returns:
            bf16 [S, H], normed hidden states.

        Raises:
            FaultError: a launch of this step, or of an earlier one, failed on any rank.
        """
        hidden = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)  # type: ignore[arg-type]
        if self.steps is None:
            raise ProtocolError("MiniMaxM3ForCPU", "LOADING", "FORWARD", ("load the weights and call process_weights_after_loading first",))
        with self.steps.step(hidden.shape[0], intermediate_tensors=intermediate_tensors is not None) as fused:
            return self.model(hidden, positions, fused)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the rows to sample from, [rows, vocabulary]; None on ranks that do not sample."""
        if self.steps is not None:
            self.steps.output()
        return self.logits_processor(self.lm_head, hidden_states)  # type: ignore[no-any-return]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint under its published names; returns the names of the parameters filled.

        Raises:
            ConfigurationError: a tensor is unknown, has another shape, or is missing.
        """
        return load_weights(self, weights)

    def process_weights_after_loading(self) -> None:
        """Quantise the experts where the settings ask for it, lay weights out, build the launches; called by vLLM once, on every rank.

        Raises:
            RefusalError: mode "require" and the launches cannot be built, with all reasons of all ranks.
            CollectiveError: weights could not be prepared on some rank; or mode "require" and building failed on some rank.
        """
        self.steps = steps.build(self.model.sparse_layers(), self.config, self.model.constants, self.vllm_config, self.settings)
