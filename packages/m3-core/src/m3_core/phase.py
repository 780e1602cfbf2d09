"""One rank's part in a collective phase, as a table.

A rank sends its verdict, then waits for the others'. It raises only once every verdict came or the wait reached its bound, never at the
first failure: its peers would otherwise wait for a verdict that it has not read.
"""

from __future__ import annotations

from enum import Enum, auto, unique

import attrs

from m3_core.agreement import Agreement, Verdict
from m3_core.errors import ConfigurationError
from m3_core.tables import Machine, Table, Transition


@unique
class Phase(Enum):
    """States of a collective phase on one rank."""

    WORKING = auto()
    GATHERING = auto()
    GATHERING_FAILURE = auto()
    AGREED = auto()
    REFUSED = auto()


@unique
class PhaseEvent(Enum):
    """What happens in the phase."""

    READY = auto()
    """The own work is done."""
    BROKE = auto()
    """The own work failed."""
    PEER_READY = auto()
    """A peer's verdict came, ready; others are missing."""
    PEER_BROKE = auto()
    """A peer's verdict came, failed; others are missing."""
    LAST_PEER_READY = auto()
    """The last missing verdict came, ready."""
    LAST_PEER_BROKE = auto()
    """The last missing verdict came, failed."""
    TIMEOUT = auto()
    """The wait reached its bound."""


@unique
class PhaseAction(Enum):
    """What the rank does."""

    SEND_VERDICT = auto()
    """Send the own verdict to every peer."""
    PROCEED = auto()
    """Go on: every rank was ready."""
    RAISE = auto()
    """Raise CollectiveError with every verdict; a missing one counts as a failure."""


PHASE: Table[Phase, PhaseEvent, PhaseAction] = Table(
    "collective phase",
    Phase.WORKING,
    {
        Phase.WORKING: {
            PhaseEvent.READY: Transition(Phase.GATHERING, PhaseAction.SEND_VERDICT),
            PhaseEvent.BROKE: Transition(Phase.GATHERING_FAILURE, PhaseAction.SEND_VERDICT),
        },
        Phase.GATHERING: {
            PhaseEvent.PEER_READY: Transition(Phase.GATHERING),
            PhaseEvent.PEER_BROKE: Transition(Phase.GATHERING_FAILURE),
            PhaseEvent.LAST_PEER_READY: Transition(Phase.AGREED, PhaseAction.PROCEED),
            PhaseEvent.LAST_PEER_BROKE: Transition(Phase.REFUSED, PhaseAction.RAISE),
            PhaseEvent.TIMEOUT: Transition(Phase.REFUSED, PhaseAction.RAISE),
        },
        Phase.GATHERING_FAILURE: {
            PhaseEvent.PEER_READY: Transition(Phase.GATHERING_FAILURE),
            PhaseEvent.PEER_BROKE: Transition(Phase.GATHERING_FAILURE),
            PhaseEvent.LAST_PEER_READY: Transition(Phase.REFUSED, PhaseAction.RAISE),
            PhaseEvent.LAST_PEER_BROKE: Transition(Phase.REFUSED, PhaseAction.RAISE),
            PhaseEvent.TIMEOUT: Transition(Phase.REFUSED, PhaseAction.RAISE),
        },
        Phase.AGREED: {},
        Phase.REFUSED: {},
    },
)


@attrs.define
class CollectivePhase:
    """Gathers the verdicts of one phase on one rank; does no I/O.

    A phase of one rank is over with its own verdict: that is its last one.

    Attributes:
        name: the phase's name.
        rank: this rank.
        world_size: ranks that take part.
    """

    name: str
    rank: int
    world_size: int
    _machine: Machine[Phase, PhaseEvent, PhaseAction] = attrs.field(factory=lambda: Machine(PHASE), init=False)
    _verdicts: dict[int, Verdict] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(f"rank is {self.rank} of {self.world_size}; pass 0 to {self.world_size - 1}")

    @property
    def state(self) -> Phase:
        """Where the phase is."""
        return self._machine.state

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose verdict has not come."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._verdicts)

    def own(self, reason: str | None) -> tuple[PhaseAction, ...]:
        """End the own work: ``reason`` says why it failed, None that it did not."""
        actions = self._machine.handle(PhaseEvent.READY if reason is None else PhaseEvent.BROKE)
        self._verdicts[self.rank] = Verdict(self.rank, reason)
        if self.world_size == 1:
            last = PhaseEvent.LAST_PEER_READY if reason is None else PhaseEvent.LAST_PEER_BROKE
            actions += self._machine.handle(last)
        return actions

    def receive(self, verdict: Verdict) -> tuple[PhaseAction, ...]:
        """Take a peer's verdict.

        Raises:
            ConfigurationError: if the peer is none of the phase's, or its verdict came before.
            ProtocolError: before the own verdict, and after the phase has ended.
        """
        if verdict.rank not in self.missing or verdict.rank == self.rank:
            raise ConfigurationError(f"phase {self.name}: rank {verdict.rank} is not among the missing ranks {list(self.missing)}")
        last = len(self.missing) == 1
        if verdict.ready:
            event = PhaseEvent.LAST_PEER_READY if last else PhaseEvent.PEER_READY
        else:
            event = PhaseEvent.LAST_PEER_BROKE if last else PhaseEvent.PEER_BROKE
        actions = self._machine.handle(event)
        self._verdicts[verdict.rank] = verdict
        return actions

    def timeout(self, seconds: float) -> tuple[PhaseAction, ...]:
        """The wait reached its bound of ``seconds``: every missing rank failed."""
        missing = self.missing
        actions = self._machine.handle(PhaseEvent.TIMEOUT)
        for rank in missing:
            self._verdicts[rank] = Verdict(rank, f"did not come within {seconds:g} s")
        return actions

    def outcome(self) -> Agreement:
        """Every verdict, once the phase has ended.

        Raises:
            ConfigurationError: before that.
        """
        if not self._machine.finished:
            raise ConfigurationError(f"phase {self.name} has not ended: no verdict from ranks {list(self.missing)}")
        return Agreement(self.name, tuple(self._verdicts[rank] for rank in range(self.world_size)))
