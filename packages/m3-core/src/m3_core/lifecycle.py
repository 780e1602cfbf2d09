"""A rank's life, from construction to close.

The host of a rank holds one such machine. Every step starts in READY and ends there or in FAULTED; a fault is left by closing only.
"""

from __future__ import annotations

from enum import Enum, auto, unique

from m3_core.tables import Table, Transition


@unique
class Life(Enum):
    """States of a rank's life."""

    CONSTRUCTING = auto()
    READY = auto()
    STEPPING = auto()
    DRAINING = auto()
    CLEARING = auto()
    FAULTED = auto()
    CLOSED = auto()


@unique
class LifeEvent(Enum):
    """What happens to a rank."""

    BUILD_AGREED = auto()
    BUILD_REFUSED = auto()
    BEGIN_STEP = auto()
    END_STEP = auto()
    FAULT_SEEN = auto()
    ABORT = auto()
    RESET_DUE = auto()
    DRAIN_AGREED = auto()
    CLEAR_AGREED = auto()
    RESET_FAILED = auto()
    CLOSE = auto()


@unique
class LifeAction(Enum):
    """What the rank does about it."""

    LAUNCH = auto()
    """Enqueue the step's launches, or replay the graph that holds them."""
    RETURN_TOKENS = auto()
    """Let the step's output leave the worker."""
    DROP_TOKENS = auto()
    """Discard the step's output."""
    START_RESET = auto()
    """Run the reset's table."""
    MARK_ALL_RANKS = auto()
    """Set the fault word on every rank, the own one included; never raises."""
    RAISE_FAULT = auto()
    """Raise FaultError with what the fault word says."""
    RAISE_REFUSAL = auto()
    """Raise CollectiveError with every rank's reason."""
    RELEASE = auto()
    """Close the mappings, then free the own memory."""


LIFE: Table[Life, LifeEvent, LifeAction] = Table(
    "life of a rank",
    Life.CONSTRUCTING,
    {
        Life.CONSTRUCTING: {
            LifeEvent.BUILD_AGREED: Transition(Life.READY),
            LifeEvent.BUILD_REFUSED: Transition(Life.CLOSED, LifeAction.RELEASE, LifeAction.RAISE_REFUSAL),
        },
        Life.READY: {
            LifeEvent.BEGIN_STEP: Transition(Life.STEPPING, LifeAction.LAUNCH),
            LifeEvent.RESET_DUE: Transition(Life.DRAINING, LifeAction.START_RESET),
            LifeEvent.FAULT_SEEN: Transition(Life.FAULTED, LifeAction.RAISE_FAULT),
            LifeEvent.ABORT: Transition(Life.FAULTED, LifeAction.MARK_ALL_RANKS),
            LifeEvent.CLOSE: Transition(Life.CLOSED, LifeAction.RELEASE),
        },
        Life.STEPPING: {
            LifeEvent.END_STEP: Transition(Life.READY, LifeAction.RETURN_TOKENS),
            LifeEvent.FAULT_SEEN: Transition(Life.FAULTED, LifeAction.DROP_TOKENS, LifeAction.RAISE_FAULT),
            LifeEvent.ABORT: Transition(Life.FAULTED, LifeAction.DROP_TOKENS, LifeAction.MARK_ALL_RANKS),
            # Peers may wait for this step's words: they must learn that none will come.
            LifeEvent.CLOSE: Transition(Life.CLOSED, LifeAction.DROP_TOKENS, LifeAction.MARK_ALL_RANKS, LifeAction.RELEASE),
        },
        Life.DRAINING: {
            LifeEvent.DRAIN_AGREED: Transition(Life.CLEARING),
            LifeEvent.RESET_FAILED: Transition(Life.FAULTED, LifeAction.RAISE_REFUSAL),
            LifeEvent.ABORT: Transition(Life.FAULTED, LifeAction.MARK_ALL_RANKS),
        },
        Life.CLEARING: {
            LifeEvent.CLEAR_AGREED: Transition(Life.READY),
            LifeEvent.RESET_FAILED: Transition(Life.FAULTED, LifeAction.RAISE_REFUSAL),
            LifeEvent.ABORT: Transition(Life.FAULTED, LifeAction.MARK_ALL_RANKS),
        },
        Life.FAULTED: {
            LifeEvent.FAULT_SEEN: Transition(Life.FAULTED, LifeAction.RAISE_FAULT),
            LifeEvent.ABORT: Transition(Life.FAULTED, LifeAction.MARK_ALL_RANKS),
            LifeEvent.CLOSE: Transition(Life.CLOSED, LifeAction.RELEASE),
        },
        Life.CLOSED: {},
    },
)
