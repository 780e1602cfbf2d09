"""The worlds in which the protocol is checked."""

from __future__ import annotations

import attrs

from m3_core.check.rules import (
    ATTENTION_ONLY,
    BOTH_IN_ORDER,
    FFN_ONLY,
    ONE_BIT_TAGS,
    SHORT_TAGS,
    THREE_BIT_TAGS,
    TWO_BIT_TAGS,
    Rules,
    Scope,
)


@attrs.frozen
class Checked:
    """A world that must be clean.

    Attributes:
        name: short, with hyphens.
        about: what it shows, in one sentence.
        rules: the protocol, with tags narrow enough for the world.
        scope: its size.
        large: whether it takes minutes; checked on request only.
    """

    name: str
    about: str
    rules: Rules
    scope: Scope
    large: bool = False


_TWO_BLOCKS = (BOTH_IN_ORDER, BOTH_IN_ORDER)

SCOPES: tuple[Checked, ...] = (
    Checked(
        "exchange",
        "two ranks with two blocks each, 3-bit tags, no failure: closes over any number of steps and resets",
        Rules(tags=THREE_BIT_TAGS),
        Scope(blocks=_TWO_BLOCKS),
    ),
    Checked(
        "failures",
        "two ranks; one may stop, one wait may give up, one host may abort, in any combination; the words of a fault arrive apart",
        Rules(tags=SHORT_TAGS),
        Scope(stops=1, timeouts=1, aborts=1, split_words=True),
    ),
    Checked("three-ranks", "three ranks, of which one may stop", Rules(tags=SHORT_TAGS), Scope(ranks=3, stops=1)),
    Checked(
        "apart",
        "blocks of the two exchanges do not wait for each other inside a launch: the two halves alone keep words from being overwritten",
        Rules(tags=TWO_BIT_TAGS),
        Scope(blocks=(ATTENTION_ONLY, FFN_ONLY), launches=2),
    ),
    Checked("widths", "steps of one and two rows in turn", Rules(tags=TWO_BIT_TAGS), Scope(rows=(1, 2))),
    Checked(
        "scratch",
        "two blocks hand plain data to each other between the exchanges; a rank may stop",
        Rules(tags=SHORT_TAGS),
        Scope(blocks=_TWO_BLOCKS, scratch=True, stops=1),
    ),
    Checked("channels", "two channels a rank", Rules(tags=SHORT_TAGS), Scope(channels=2, last_epoch=1)),
    Checked(
        "limit",
        "more uncounted launches than the budget has room for: the limit refuses, nothing stale is read",
        Rules(tags=ONE_BIT_TAGS),
        Scope(uncounted_steps=2, rows=(1, 1, 2)),
    ),
    Checked(
        "three-ranks-failures",
        "three ranks; a wait may give up anywhere",
        Rules(tags=ONE_BIT_TAGS),
        Scope(ranks=3, timeouts=1),
        large=True,
    ),
    Checked(
        "exchange-failures",
        "two ranks with two blocks each; a wait may give up anywhere",
        Rules(tags=ONE_BIT_TAGS),
        Scope(blocks=_TWO_BLOCKS, timeouts=1),
        large=True,
    ),
)
