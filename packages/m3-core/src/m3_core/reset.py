"""The reset: all ranks together, between steps, take the epoch back to 0.

Drain, agree, clear, agree. The first agreement makes sure that no launch anywhere still reads or writes a mailbox that is about to be
cleared; the second that no rank pushes into a mailbox that its owner has yet to clear. The error words are not cleared. A rank that
leaves a phase without agreement marks every rank's fault word, because a peer may have seen all verdicts in time and gone on.
"""

from __future__ import annotations

from enum import Enum, auto, unique

from m3_core.tables import Table, Transition


@unique
class Reset(Enum):
    """States of a reset on one rank."""

    IDLE = auto()
    DRAINING = auto()
    AGREEING_DRAIN = auto()
    CLEARING = auto()
    AGREEING_CLEAR = auto()
    RESUMED = auto()
    FAILED = auto()


@unique
class ResetEvent(Enum):
    """What happens during a reset."""

    START = auto()
    DONE = auto()
    """The own part of the phase is done."""
    BROKE = auto()
    """The own part of the phase failed."""
    AGREED = auto()
    """Every rank's verdict came, all ready."""
    REFUSED = auto()
    """A rank's verdict was a failure, or did not come in time."""


@unique
class ResetAction(Enum):
    """What the rank does."""

    SYNCHRONIZE = auto()
    """Wait until every launch of the channel has ended here and its stores have arrived."""
    AGREE_READY = auto()
    """Enter the phase's agreement, ready."""
    AGREE_FAILED = auto()
    """Enter the phase's agreement with the reason of the failure."""
    CLEAR = auto()
    """Zero the own peer buffer from byte 16 on, all scratch, the epoch words; synchronise."""
    MARK_ALL_RANKS = auto()
    """Set the fault word on every rank."""
    RESUME = auto()
    """Steps may begin again, at epoch 0."""
    RAISE = auto()
    """Raise CollectiveError with every rank's reason."""


RESET: Table[Reset, ResetEvent, ResetAction] = Table(
    "reset",
    Reset.IDLE,
    {
        Reset.IDLE: {
            ResetEvent.START: Transition(Reset.DRAINING, ResetAction.SYNCHRONIZE),
        },
        Reset.DRAINING: {
            ResetEvent.DONE: Transition(Reset.AGREEING_DRAIN, ResetAction.AGREE_READY),
            ResetEvent.BROKE: Transition(Reset.AGREEING_DRAIN, ResetAction.MARK_ALL_RANKS, ResetAction.AGREE_FAILED),
        },
        Reset.AGREEING_DRAIN: {
            ResetEvent.AGREED: Transition(Reset.CLEARING, ResetAction.CLEAR),
            ResetEvent.REFUSED: Transition(Reset.FAILED, ResetAction.MARK_ALL_RANKS, ResetAction.RAISE),
        },
        Reset.CLEARING: {
            ResetEvent.DONE: Transition(Reset.AGREEING_CLEAR, ResetAction.AGREE_READY),
            ResetEvent.BROKE: Transition(Reset.AGREEING_CLEAR, ResetAction.MARK_ALL_RANKS, ResetAction.AGREE_FAILED),
        },
        Reset.AGREEING_CLEAR: {
            ResetEvent.AGREED: Transition(Reset.RESUMED, ResetAction.RESUME),
            ResetEvent.REFUSED: Transition(Reset.FAILED, ResetAction.MARK_ALL_RANKS, ResetAction.RAISE),
        },
        Reset.RESUMED: {},
        Reset.FAILED: {},
    },
)
