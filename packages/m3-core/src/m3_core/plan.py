"""What a step runs: the fused launches, or the stock layers, and why.

Every fact is the same on every rank, so every rank decides alike: a rank that decided alone would hang its peers.
"""

from __future__ import annotations

from enum import Enum

import attrs

from m3_core.errors import ConfigurationError
from m3_core.work import MAX_ROWS


class GraphMode(Enum):
    """How the step's forward pass runs: eagerly or under capture (NONE), in a replayed whole (FULL), or in replayed pieces."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class Route(Enum):
    """Which layers a step runs."""

    FUSED = "fused"
    STOCK = "stock"


@attrs.frozen
class StepFacts:
    """What all ranks know alike about a step.

    Attributes:
        rows: rows of the forward pass, padding included.
        num_decodes: requests that decode.
        num_decode_tokens: their tokens.
        num_prefills: requests that prefill.
        num_prefill_tokens: their tokens.
        graph_mode: how the forward pass runs.
        slots: entries of the slot mapping.
        seq_lens: entries of the decode requests' sequence lengths.
        block_table_rows: rows of the decode requests' block table.
        forward_context: whether the engine gave a forward context.
        sparse_metadata: whether the first sparse layer's attention metadata is the sparse kind.
        decode_metadata: whether it has a part for decode requests.
        slots_are_int64: whether the slot mapping holds int64.
        intermediate_tensors: whether the pass starts from another pipeline stage's tensors.
        closed: whether the executor is closed.
        faulted: whether a fault is known to all ranks.
    """

    rows: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    graph_mode: GraphMode = GraphMode.NONE
    slots: int | None = None
    seq_lens: int | None = None
    block_table_rows: int | None = None
    forward_context: bool = True
    sparse_metadata: bool = True
    decode_metadata: bool = True
    slots_are_int64: bool = True
    intermediate_tensors: bool = False
    closed: bool = False
    faulted: bool = False

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(StepFacts):
            value = getattr(self, field.name)
            if type(value) is int and value < 0:
                raise ConfigurationError(f"{field.name} is {value}; a step counts from 0")


@attrs.frozen
class StepPlan:
    """The decision for a step.

    Attributes:
        route: which layers run.
        reasons: every reason against the fused launches; empty exactly if the route is FUSED.
    """

    route: Route
    reasons: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        if (self.route is Route.FUSED) == bool(self.reasons):
            raise ConfigurationError(
                f"route {self.route.value} with reasons {self.reasons}; the stock route has some, the fused route none"
            )

    @property
    def fused(self) -> bool:
        """Whether the fused launches run."""
        return self.route is Route.FUSED


def plan_step(facts: StepFacts, *, max_rows: int) -> StepPlan:
    """Decide a step from its facts.

    Args:
        facts: see ``StepFacts``.
        max_rows: the widest launch that was built, 1 to 64.

    Returns:
        FUSED if nothing speaks against it, else STOCK with every reason.

    Raises:
        ConfigurationError: if ``max_rows`` is out of range.
    """
    if not 1 <= max_rows <= MAX_ROWS:
        raise ConfigurationError(f"max_rows is {max_rows}; pass 1 to {MAX_ROWS}")
    checks = (
        (facts.closed, "the executor is closed"),
        (facts.faulted, "a fault is set; it stays until a restart"),
        (not facts.forward_context, "there is no forward context"),
        (facts.intermediate_tensors, "the pass starts from another pipeline stage"),
        (not 1 <= facts.rows <= max_rows, f"{facts.rows} rows; launches were built for 1 to {max_rows}"),
        (facts.graph_mode is GraphMode.PIECEWISE, "the graph is replayed in pieces"),
        (not facts.sparse_metadata, "the first sparse layer has no sparse attention metadata"),
        (not facts.decode_metadata, "the metadata has no decode part"),
        (facts.num_decodes == 0, "no request decodes"),
        (
            facts.num_prefills > 0 or facts.num_prefill_tokens > 0,
            f"{facts.num_prefills} requests prefill {facts.num_prefill_tokens} tokens",
        ),
        (
            not 0 < facts.num_decode_tokens <= facts.rows,
            f"{facts.num_decode_tokens} decode tokens in {facts.rows} rows",
        ),
        (
            facts.seq_lens is not None and facts.seq_lens < facts.num_decodes,
            f"{facts.seq_lens} sequence lengths for {facts.num_decodes} decode requests",
        ),
        (
            facts.block_table_rows is not None and facts.block_table_rows < facts.num_decodes,
            f"{facts.block_table_rows} block table rows for {facts.num_decodes} decode requests",
        ),
        (not facts.slots_are_int64, "the slot mapping is not int64"),
        (facts.slots is not None and facts.slots < facts.rows, f"{facts.slots} slots for {facts.rows} rows"),
    )
    reasons = tuple(reason for applies, reason in checks if applies)
    return StepPlan(Route.STOCK if reasons else Route.FUSED, reasons)
