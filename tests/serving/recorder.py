"""Methods that the oracle test adds to vLLM's workers: keep the discrete choices of every sparse layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorder:
    """Worker extension; one request at a time, so the order of rows is the order of tokens."""

    model_runner: Any

    def record_choices(self) -> None:
        """From now on keep every router's picks and every layer's blocks."""
        self.recorded: dict[str, dict[str, list[Any]]] = {"picks": {}, "blocks": {}}

        def keeping(choose: Callable[..., torch.Tensor], kept: list[Any]) -> Callable[..., torch.Tensor]:
            def chosen(*arguments: object) -> torch.Tensor:
                blocks = choose(*arguments)
                kept.extend(blocks.tolist())
                return blocks

            return chosen

        for number, layer in self.model_runner.model.model.sparse_layers().items():
            picks = self.recorded["picks"].setdefault(str(number), [])
            layer.block_sparse_moe.gate.register_forward_hook(lambda _module, _given, out, kept=picks: kept.extend(out.experts.tolist()))
            layer.self_attn.choose = keeping(layer.self_attn.choose, self.recorded["blocks"].setdefault(str(number), []))

    def take_choices(self) -> dict[str, dict[str, list[Any]]]:
        """Picks [rows, k] and blocks [rows, this rank's index heads, K] of every sparse layer."""
        return self.recorded
