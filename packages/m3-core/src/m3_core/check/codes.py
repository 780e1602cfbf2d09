"""Codes of the small variables in a state, and the steps that lead from state to state."""

from __future__ import annotations

from typing import TypeAlias

from m3_core.handshake import Handshake
from m3_core.lifecycle import Life
from m3_core.reset import Reset

# A block's program counter.
OFF = 0
READS_ATTENTION = 1
RELEASES = 2
GATHERS = 3
GATHERS_EARLY = 4
READS_FFN = 5
MARKED = 6
TRADES_FLAGS = 7
ENDED = 8
WAITS = frozenset((READS_ATTENTION, GATHERS, GATHERS_EARLY, READS_FFN, TRADES_FLAGS))

# A rank's fault word: the detail alone may be visible before the flag.
WORD_CLEAR = 0
WORD_DETAIL = 1
WORD_SET = 2

# How a rank failed, for the properties; the protocol does not know it.
STOPPED_AFTER_FLAG = 1
STOPPED_BEFORE_FLAG = 2
FAILED_AFTER_FLAG = 3
FAILED_BEFORE_FLAG = 4

VERDICT_READY = 1
VERDICT_BROKE = 2

DRAIN = 0
CLEAR = 1

Action: TypeAlias = tuple[object, ...]
Step: TypeAlias = tuple[Action, bytes]

LIVES = list(Life)
RESETS = list(Reset)
HANDSHAKES = list(Handshake)
LIFE_CODE = {state: code for code, state in enumerate(LIVES)}
RESET_CODE = {state: code for code, state in enumerate(RESETS)}
HANDSHAKE_CODE = {state: code for code, state in enumerate(HANDSHAKES)}
READY = LIFE_CODE[Life.READY]
STEPPING = LIFE_CODE[Life.STEPPING]
FAULTED = LIFE_CODE[Life.FAULTED]
IDLE = RESET_CODE[Reset.IDLE]
UNPUBLISHED = HANDSHAKE_CODE[Handshake.UNPUBLISHED]
PUBLISHED = frozenset((HANDSHAKE_CODE[Handshake.POLLING], HANDSHAKE_CODE[Handshake.CLEAR]))
