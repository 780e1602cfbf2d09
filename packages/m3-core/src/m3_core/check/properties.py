"""What must hold in every reachable state, and how a violation reads."""

from __future__ import annotations

from enum import Enum, unique

import attrs


@unique
class Property(Enum):
    """The properties; the value is the sentence that a report prints."""

    OVERWRITE = "no unread pair is overwritten or cleared"
    STALE = "no stale pair is accepted, and no plain data is read before it arrived"
    LEAD = "a rank is never more than half a layer ahead of a peer"
    LEARN = "a fault that is announced reaches every rank and stays"
    TOKEN = "no rank returns a token of a step in which a rank failed before its flag, nor of a later one"
    RESET = "a reset resumes on all ranks or on none"
    WAIT = "no execution waits for ever, and none waits for its bound unless a rank stopped"
    SPURIOUS = "no fault without a failure"
    CHANNEL = "channels never interfere"


class Violation(Exception):
    """A step that breaks a property.

    Attributes:
        broken: the property.
        detail: what happened, in one sentence.
    """

    def __init__(self, broken: Property, detail: str) -> None:
        self.broken = broken
        self.detail = detail
        super().__init__(f"{broken.name}: {detail}")


@attrs.frozen
class Line:
    """One line of a timeline.

    Attributes:
        rank: whose column; None for what happens between ranks.
        text: what happened.
    """

    rank: int | None
    text: str


def timeline(lines: tuple[Line, ...], ranks: int, width: int = 44) -> str:
    """A trace with one column a rank; what no rank does itself stands in the column of the rank whose memory changes."""
    heads = "     " + "".join(f"rank {rank}".ljust(width) for rank in range(ranks))
    rows = [heads.rstrip()]
    for number, line in enumerate(lines, 1):
        indent = 0 if line.rank is None else width * line.rank
        rows.append(f"{number:3}  " + " " * indent + line.text)
    return "\n".join(rows) + "\n"
