"""The step-end fault exchange, run by one thread of the step's last launch on every rank.

A rank publishes whether its fault word is set, then waits for every rank's flag. It ends the step clear only if every flag came and was
clear. Whatever failed before its rank published is therefore known to all ranks before their step ends. What fails later (a rank
that gives up waiting for flags which others have seen, or a host that aborts after its last launch) cannot be known to a rank whose
step has ended with all flags clear, no protocol with bounded waits can do that; its data of the step are complete, and the fault stops
its next step.
"""

from __future__ import annotations

from enum import Enum, auto, unique

from m3_core.tables import Table, Transition


@unique
class Handshake(Enum):
    """States of the exchange on one rank."""

    UNPUBLISHED = auto()
    POLLING = auto()
    CLEAR = auto()
    FAILED = auto()


@unique
class HandshakeEvent(Enum):
    """What happens during the exchange."""

    WORD_CLEAR = auto()
    """The launch's work has ended and the own fault word is clear."""
    WORD_SET = auto()
    """The own fault word is set."""
    PEER_CLEAR = auto()
    """A rank's flag came, clear; others are missing."""
    LAST_PEER_CLEAR = auto()
    """The last missing flag came, clear."""
    PEER_FAILED = auto()
    """A rank's flag came, failed."""
    TIMEOUT = auto()
    """The wait reached its bound."""


@unique
class HandshakeAction(Enum):
    """What the rank does."""

    PUBLISH_CLEAR = auto()
    """Store the pair (0, pair tag) at the own handshake offset on every rank, with release."""
    PUBLISH_FAILED = auto()
    """Store the pair (1, pair tag) there, with release."""
    SET_PEER_LOCALLY = auto()
    """Set the own fault word: site PEER, the failing peer's rank."""
    SET_HANDSHAKE_ON_ALL = auto()
    """Set the fault word of every rank: site HANDSHAKE, the own rank."""


HANDSHAKE: Table[Handshake, HandshakeEvent, HandshakeAction] = Table(
    "step-end handshake",
    Handshake.UNPUBLISHED,
    {
        Handshake.UNPUBLISHED: {
            HandshakeEvent.WORD_CLEAR: Transition(Handshake.POLLING, HandshakeAction.PUBLISH_CLEAR),
            HandshakeEvent.WORD_SET: Transition(Handshake.FAILED, HandshakeAction.PUBLISH_FAILED),
        },
        Handshake.POLLING: {
            HandshakeEvent.PEER_CLEAR: Transition(Handshake.POLLING),
            HandshakeEvent.LAST_PEER_CLEAR: Transition(Handshake.CLEAR),
            HandshakeEvent.PEER_FAILED: Transition(Handshake.FAILED, HandshakeAction.SET_PEER_LOCALLY),
            HandshakeEvent.WORD_SET: Transition(Handshake.FAILED),
            HandshakeEvent.TIMEOUT: Transition(Handshake.FAILED, HandshakeAction.SET_HANDSHAKE_ON_ALL),
        },
        Handshake.CLEAR: {},
        Handshake.FAILED: {},
    },
)
