"""Why the launches cannot be built: found on each rank, agreed between all. Imports no vLLM."""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from m3_core.epochs import EPOCH_LIMIT, EpochBudget
from m3_core.errors import RefusalError
from m3_core.ports import AgreementChannel
from m3_kernels.ffn import ExpertFormat, FfnShape
from m3_vllm.settings import Settings


def agreed_refusals(channel: AgreementChannel, reasons: list[str]) -> tuple[str, ...]:
    """Every rank's reasons not to build the launches; a collective. Equal reasons of several ranks are named once."""
    ranks = channel.gather("adapter.refusals", json.dumps(reasons).encode())
    found: dict[str, list[int]] = {}
    for rank, payload in enumerate(ranks):
        for reason in json.loads(payload):
            found.setdefault(reason, []).append(rank)
    return tuple(reason if len(where) == len(ranks) else f"{reason} (on rank {where})" for reason, where in found.items())


@frozen
class LaunchRequest:
    """What is needed to build the launches, or why they cannot be built.

    Attributes:
        shape: sizes on this rank; None if they are refused.
        budget: when an epoch reset falls; None if the setting is refused.
        reasons: every reason against building.
    """

    shape: FfnShape | None
    budget: EpochBudget | None
    reasons: tuple[str, ...]

    @classmethod
    def collect(cls, config: Any, layers: int, ranks: int, max_rows: int, settings: Settings, format: ExpertFormat) -> LaunchRequest:
        """Check sizes and settings on this rank alone.

        Args:
            config: the checkpoint's text configuration.
            layers: number of sparse layers.
            ranks: tensor-parallel width.
            max_rows: rows of the widest launch.
            settings: m3's settings.
            format: how the experts are held.
        """
        reasons: list[str] = []
        shape: FfnShape | None = None
        try:
            shape = FfnShape(
                hidden=config.hidden_size,
                intermediate=config.intermediate_size // ranks,
                experts=config.num_local_experts,
                top_k=config.num_experts_per_tok,
                world_size=ranks,
                max_rows=max_rows,
            )
        except RefusalError as error:
            reasons += error.reasons
        else:
            reasons += shape.format_reasons(format)
        budget = EpochBudget(layers)
        if settings.reset_steps is not None:
            if settings.reset_steps > budget.reset_step:
                reasons.append(f"reset_steps={settings.reset_steps} is above {budget.reset_step}, the last safe step for {layers} layers")
            else:
                budget = EpochBudget(layers, uncounted=EPOCH_LIMIT - settings.reset_steps * layers)
        return cls(shape, budget, tuple(reasons))
