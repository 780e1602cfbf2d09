"""A tiny random MiniMax-M3: its sizes, its configuration file and its weights under the published names.

Small enough for a CPU, whole enough for a server: three dense layers, then sparse ones with the lightning indexer, routed
experts and a shared one. Names and shapes follow the published BF16 checkpoint (MiniMax-M3 facts: tensors of a sparse layer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from m3_core.errors import RefusalError
from m3_vllm.minimax_m3 import ARCHITECTURE, BLOCK_TOKENS, DENSE_LAYERS, HEAD_DIM, ROTARY_DIM

if TYPE_CHECKING:
    # Deferred so that the command line can declare its arguments where torch is missing.
    import torch

SPECIAL_TOKENS = 3
"""<unk>, <s>, </s>: token ids 0, 1, 2."""
SMALLEST_VOCABULARY = SPECIAL_TOKENS + 256
"""Every byte needs a token of its own."""

SUCCESSOR_GAIN = 1.0
CONTEXT_GAIN = 2.0
"""The head prefers each token's successor on one cycle over the vocabulary with the first gain, and reads the rest of the hidden
state through random rows with the second. The first keeps greedy decoding from repeating one token; the second is large enough
that attention and experts decide a good part of the tokens, so a wrong layer shows in the text."""


@frozen(kw_only=True)
class TinyModel:
    """Sizes of a tiny checkpoint.

    Attributes:
        layers: decoder layers; the first three are dense.
        hidden: width of the residual stream.
        heads: query heads of 128.
        kv_heads: key-value heads, and index heads, of 128.
        experts: routed experts of a sparse layer (one shared expert comes on top).
        top_k: routed experts a token takes.
        intermediate: width of one expert over all ranks.
        dense_intermediate: width of a dense layer's network.
        topk_blocks: blocks of 128 tokens a query attends to.
        vocabulary: token ids.
        positions: longest sequence.
        tensor_parallel: widest tensor parallelism that the sizes must divide by.
        seed: seed of every random value.
    """

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    experts: int = 16
    top_k: int = 4
    intermediate: int = 256
    dense_intermediate: int = 512
    topk_blocks: int = 4
    vocabulary: int = 512
    positions: int = 8192
    tensor_parallel: int = 2
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that do not fit together, with every reason (RefusalError)."""
        reasons = list(self._problems())
        if reasons:
            raise RefusalError(reasons, "these sizes of a tiny checkpoint")

    def _problems(self) -> Iterator[str]:
        lowest = {"layers": DENSE_LAYERS + 1, "vocabulary": SMALLEST_VOCABULARY, "positions": BLOCK_TOKENS, "seed": 0}
        for name, value in asdict(self).items():
            if value < lowest.get(name, 1):
                yield f"{name}={value} is below {lowest.get(name, 1)}"
        ranks = max(self.tensor_parallel, 1)
        if self.hidden % 64:
            yield f"hidden={self.hidden} is no multiple of 64 (MXFP4 shuffles rows in chunks of 32 bytes)"
        if self.intermediate % (64 * ranks):
            yield f"intermediate={self.intermediate} is no multiple of {64 * ranks} (64 a rank at tensor parallelism {ranks})"
        if self.dense_intermediate % ranks:
            yield f"dense_intermediate={self.dense_intermediate} is no multiple of tensor parallelism {ranks}"
        if self.heads % ranks:
            yield f"heads={self.heads} is no multiple of tensor parallelism {ranks}"
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            yield f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"
        if self.kv_heads >= 1 and self.kv_heads % ranks and ranks % self.kv_heads:
            yield f"kv_heads={self.kv_heads} and tensor parallelism {ranks}: one must divide the other"
        if self.top_k > self.experts:
            yield f"top_k={self.top_k} is above experts={self.experts}"
        if self.vocabulary % (64 * ranks):
            yield f"vocabulary={self.vocabulary} is no multiple of {64 * ranks} (the embedding pads to 64 a rank)"

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``: the vision-language wrapper with the text model nested, as published."""
        sparse = [0] * DENSE_LAYERS + [1] * (self.layers - DENSE_LAYERS)
        text = {
            "architectures": [ARCHITECTURE],
            "model_type": "minimax_m3_text",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "shared_intermediate_size": self.intermediate,
            "dense_intermediate_size": self.dense_intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "rotary_dim": ROTARY_DIM,
            "partial_rotary_factor": ROTARY_DIM / HEAD_DIM,
            "rope_theta": 5_000_000,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": sparse,
            "num_mtp_modules": 0,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": HEAD_DIM,
                "sparse_num_index_heads": self.kv_heads,
                "sparse_topk_blocks": self.topk_blocks,
                "sparse_block_size": BLOCK_TOKENS,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
                "sparse_attention_freq": sparse,
                "sparse_disable_index_value": sparse,
            },
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "minimax_m3_vl",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "text_config": text,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight by its published name: bf16, the router and its bias fp32.

        Rows are scaled to their fan-in, so a unit input gives a unit output and no activation leaves the range of a trained model.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * std

        def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return normal(rows, columns, std=gain / math.sqrt(columns)).to(torch.bfloat16)

        def norm(width: int) -> torch.Tensor:
            return normal(width, std=0.05).to(torch.bfloat16)

        weights: dict[str, torch.Tensor] = {}

        def network(prefix: str, width: int, names: tuple[str, str, str]) -> None:
            gate, up, down = names
            weights[f"{prefix}{gate}.weight"] = linear(width, self.hidden, 1.5)
            weights[f"{prefix}{up}.weight"] = linear(width, self.hidden, 1.5)
            weights[f"{prefix}{down}.weight"] = linear(self.hidden, width, 0.5)

        embedding = normal(self.vocabulary, self.hidden, std=1.0)
        for layer in range(self.layers):
            prefix = f"language_model.model.layers.{layer}."
            weights[f"{prefix}input_layernorm.weight"] = norm(self.hidden)
            weights[f"{prefix}post_attention_layernorm.weight"] = norm(self.hidden)
            attention = f"{prefix}self_attn."
            weights[f"{attention}q_proj.weight"] = linear(self.heads * HEAD_DIM, self.hidden)
            weights[f"{attention}k_proj.weight"] = linear(self.kv_heads * HEAD_DIM, self.hidden)
            weights[f"{attention}v_proj.weight"] = linear(self.kv_heads * HEAD_DIM, self.hidden)
            weights[f"{attention}o_proj.weight"] = linear(self.hidden, self.heads * HEAD_DIM)
            weights[f"{attention}q_norm.weight"] = norm(HEAD_DIM)
            weights[f"{attention}k_norm.weight"] = norm(HEAD_DIM)
            if layer < DENSE_LAYERS:
                network(f"{prefix}mlp.", self.dense_intermediate, ("gate_proj", "up_proj", "down_proj"))
                continue
            weights[f"{attention}index_q_proj.weight"] = linear(self.kv_heads * HEAD_DIM, self.hidden)
            weights[f"{attention}index_k_proj.weight"] = linear(HEAD_DIM, self.hidden)
            weights[f"{attention}index_q_norm.weight"] = norm(HEAD_DIM)
            weights[f"{attention}index_k_norm.weight"] = norm(HEAD_DIM)
            experts = f"{prefix}block_sparse_moe."
            weights[f"{experts}gate.weight"] = normal(self.experts, self.hidden, std=1 / math.sqrt(self.hidden))
            weights[f"{experts}e_score_correction_bias"] = normal(self.experts, std=0.05)
            for expert in range(self.experts):
                network(f"{experts}experts.{expert}.", self.intermediate, ("w1", "w3", "w2"))
            network(f"{experts}shared_experts.", self.intermediate, ("gate_proj", "up_proj", "down_proj"))

        text = torch.arange(SPECIAL_TOKENS, self.vocabulary)
        cycle = text[torch.randperm(text.numel(), generator=generator)]
        head = normal(self.vocabulary, self.hidden, std=CONTEXT_GAIN)
        # Row of a token's successor: the embedding of the token itself.
        head[cycle.roll(-1)] += SUCCESSOR_GAIN * embedding[cycle]
        head[:SPECIAL_TOKENS] = 0.0
        weights["language_model.lm_head.weight"] = (head / math.sqrt(self.hidden)).to(torch.bfloat16)
        weights["language_model.model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
        weights["language_model.model.norm.weight"] = norm(self.hidden)
        return weights
