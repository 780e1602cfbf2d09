"""Every error that m3 raises on purpose, in one hierarchy.

``ConfigurationError`` and ``ProtocolError`` say that the caller did something wrong; ``CollectiveError`` and ``FaultError`` say
that a rank (perhaps another one) failed; ``ResourceError`` says that the machine could not give what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3_core.agreement import Verdict
    from m3_core.faults import Fault


class M3Error(Exception):
    """Base of every error that m3 raises on purpose.

    Survives pickling with its type, message, attributes and notes, whatever its constructor takes: a server's ranks are processes, and
    their errors travel between them. The cause stays behind, as it does for every exception.
    """

    def __reduce__(self) -> tuple[Callable[..., M3Error], tuple[type[M3Error], tuple[object, ...], dict[str, object]]]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[M3Error], arguments: tuple[object, ...], attributes: dict[str, object]) -> M3Error:
    """An error as it was pickled, without its constructor: what that takes is not what an exception keeps in ``args``."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class ConfigurationError(M3Error, ValueError):
    """A value that the caller passed cannot work; the message names the value, the limit and the remedy."""


class RefusalError(ConfigurationError):
    """A configuration that m3 does not run.

    Attributes:
        reasons: every reason found, not only the first; never empty.
    """

    def __init__(self, reasons: Sequence[str], subject: str = "this configuration") -> None:
        if not reasons:
            raise ValueError("a refusal without a reason: pass at least one")
        self.reasons = tuple(reasons)
        self.subject = subject
        super().__init__(f"m3 refuses {subject}: " + "; ".join(self.reasons))


class ProtocolError(M3Error, RuntimeError):
    """An event that is illegal in the current state; the state is unchanged.

    Attributes:
        machine: name of the state machine.
        state: name of the state it was (and still is) in.
        event: name of the event that it does not take there.
    """

    def __init__(self, machine: str, state: str, event: str, allowed: Sequence[str] = ()) -> None:
        self.machine = machine
        self.state = state
        self.event = event
        self.allowed = tuple(allowed)
        legal = ", ".join(self.allowed) if self.allowed else "none (terminal state)"
        super().__init__(f"{machine}: event {event} is illegal in state {state}; legal here: {legal}")


class ResourceError(M3Error, RuntimeError):
    """The machine could not give memory, a mapping or a segment; the message says how much was asked and how much there is."""


class ResourceBusy(ResourceError):
    """Two users of one channel at once (two streams, or two threads)."""


class ResourceClosed(ResourceError):
    """A use after ``close()``."""


class BuildError(M3Error, RuntimeError):
    """A kernel did not compile or a code object did not load; the message carries the compiler's last lines."""


class CollectiveError(M3Error, RuntimeError):
    """A collective phase failed on at least one rank, and therefore on all of them.

    Attributes:
        phase: name of the phase.
        rank: the rank that raises this copy of the error.
        verdicts: one verdict a rank, in rank order.
    """

    def __init__(self, phase: str, rank: int, verdicts: Sequence[Verdict]) -> None:
        self.phase = phase
        self.rank = rank
        self.verdicts = tuple(verdicts)
        failed = [v for v in self.verdicts if v.reason is not None]
        own = any(v.rank == rank for v in failed)
        who = "this rank failed" if own else "this rank was ready, another failed"
        super().__init__(
            f"phase {phase} failed on rank(s) {[v.rank for v in failed]} (on rank {rank}: {who}): "
            + "; ".join(f"rank {v.rank}: {v.reason}" for v in failed)
        )


class FaultError(M3Error, RuntimeError):
    """The fault word is set: a launch gave up waiting, or a rank marked itself failed. Faults are sticky until a restart."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.describe())
