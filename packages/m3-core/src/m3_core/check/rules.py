"""The protocol as a value, and the size of a world in which it is checked."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import attrs

from m3_core.epochs import TagArithmetic
from m3_core.errors import ConfigurationError
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.phase import PHASE, Phase, PhaseAction, PhaseEvent
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Table

LifeTable: TypeAlias = Table[Life, LifeEvent, LifeAction]
ResetTable: TypeAlias = Table[Reset, ResetEvent, ResetAction]
HandshakeTable: TypeAlias = Table[Handshake, HandshakeEvent, HandshakeAction]
PhaseTable: TypeAlias = Table[Phase, PhaseEvent, PhaseAction]


class Tags(Protocol):
    """What the world needs of ``TagArithmetic``; mutants pass a wrong one."""

    @property
    def limit(self) -> int:
        """First epoch at which a launch refuses."""
        ...

    @property
    def reset_launches(self) -> int:
        """Counted launches from which on a reset is due."""
        ...

    def parity(self, epoch: int) -> int:
        """The half of a launch."""
        ...

    def pair_tag(self, epoch: int) -> int:
        """Tag of a value pair."""
        ...

    def triple_tag(self, epoch: int) -> int:
        """Tag of a triple pair."""
        ...

    def is_past_limit(self, epoch: int) -> bool:
        """Whether a launch must refuse."""
        ...


THREE_BIT_TAGS = TagArithmetic(pair_bits=5, triple_bits=3, parities=2, limit_slack=2, reset_slack=4)
"""Period 16, limit 14, reset after 12 launches."""

ONE_BIT_TAGS = TagArithmetic(pair_bits=3, triple_bits=1, parities=2, limit_slack=2, reset_slack=3)
"""Period 4, limit 2, reset after 1 launch."""

SHORT_TAGS = TagArithmetic(pair_bits=3, triple_bits=2, parities=2, limit_slack=2, reset_slack=6)
"""Period 8, limit 6, reset after 2 launches."""

TWO_BIT_TAGS = TagArithmetic(pair_bits=4, triple_bits=2, parities=2, limit_slack=2, reset_slack=4)
"""Period 8, limit 6, reset after 4 launches."""


@attrs.frozen
class Rules:
    """The protocol, one rule a field. Every default is the protocol as it ships; a mutant changes one.

    Attributes:
        tags: epoch arithmetic.
        life: table of a rank's life.
        reset: table of the reset.
        handshake: table of the step-end fault exchange.
        phase: table of a collective phase.
        region_per_exchange: the attention and the FFN exchange have regions of their own.
        region_per_parity: a half of the buffer for each parity.
        slot_per_source: every pushing rank has words of its own.
        buffer_per_channel: every channel has a peer buffer of its own.
        epoch_per_channel: every channel has an epoch of its own.
        payload_rides_with_tag: value and tag are one word.
        release_before_announcing: plain data is visible before the pair that announces it.
        acquire_after_polling: plain data is read after the pair was seen.
        waits_are_bounded: every wait ends at the latest at its bound.
        waits_watch_the_word: a waiting block leaves when the fault word is set.
        launches_check_the_word: a launch that starts with the fault word set does nothing but the handshake.
        launches_check_the_limit: a launch that starts at the limit refuses.
        advance_needs_all_marks: the epoch moves once every block has marked the launch.
        epoch_on_device: a launch reads its epoch from the device, so that a graph replay moves on.
        padding_is_exchanged: a rank whose rows are all padded exchanges as ever.
        equal_launches: every rank runs the same launches a step.
        timeout_marks_peers: a wait that gives up sets the fault word on every rank.
        abort_marks_peers: a host that aborts sets it on every rank.
        detail_before_flag: epoch and site are stored before the flag.
        clear_spares_the_word: a reset leaves the fault word.
        clear_zeroes_the_mailbox: a reset zeroes the mailboxes.
        host_waits_for_launches: the host ends a step after its last launch has ended.
        host_reads_the_word: the host reads the fault word before it returns tokens.
        flag_carries_the_epoch: the handshake's flag is tagged with the launch's epoch.
        flag_comes_last: a rank publishes its flag after the last launch's work.
        exchange_flags: the step's last launch runs the handshake.
        replays_are_counted: the host counts every sampled step, replayed ones too.
        resets_together: whether a reset is due is decided from facts that all ranks share.
    """

    tags: Tags = THREE_BIT_TAGS
    life: LifeTable = LIFE
    reset: ResetTable = RESET
    handshake: HandshakeTable = HANDSHAKE
    phase: PhaseTable = PHASE
    region_per_exchange: bool = True
    region_per_parity: bool = True
    slot_per_source: bool = True
    buffer_per_channel: bool = True
    epoch_per_channel: bool = True
    payload_rides_with_tag: bool = True
    release_before_announcing: bool = True
    acquire_after_polling: bool = True
    waits_are_bounded: bool = True
    waits_watch_the_word: bool = True
    launches_check_the_word: bool = True
    launches_check_the_limit: bool = True
    advance_needs_all_marks: bool = True
    epoch_on_device: bool = True
    padding_is_exchanged: bool = True
    equal_launches: bool = True
    timeout_marks_peers: bool = True
    abort_marks_peers: bool = True
    detail_before_flag: bool = True
    clear_spares_the_word: bool = True
    clear_zeroes_the_mailbox: bool = True
    host_waits_for_launches: bool = True
    host_reads_the_word: bool = True
    flag_carries_the_epoch: bool = True
    flag_comes_last: bool = True
    exchange_flags: bool = True
    replays_are_counted: bool = True
    resets_together: bool = True


BOTH_IN_ORDER = "attention, then FFN"
ATTENTION_ONLY = "attention"
FFN_ONLY = "FFN"


@attrs.frozen
class Scope:
    """The size of a world.

    Attributes:
        ranks: 2 or more.
        blocks: what each block of a launch exchanges, in the order of the blocks; block 0 also advances the epoch and trades the flags.
            Blocks of kind ``BOTH_IN_ORDER`` push FFN words after they have read their attention words; ``ATTENTION_ONLY`` and
            ``FFN_ONLY`` blocks of one launch do not wait for each other, which is weaker than any kernel.
        launches: launches a step.
        channels: independent channels of each rank.
        rows: rows of the steps since a reset, repeated; rows past a step's are not pushed.
        scratch: whether blocks hand plain data to each other between the two exchanges.
        split_words: whether the two words of a fault become visible apart.
        stops: ranks that may stop for ever, anywhere.
        timeouts: waits that may give up although data would come. Where nothing else can move, waits give up without counting.
        aborts: hosts that may abort, or fail their part of a reset.
        uncounted_steps: steps after every reset that the budget does not count.
        last_epoch: no step begins at or past this epoch; ends worlds whose rules let epochs grow.
    """

    ranks: int = 2
    blocks: tuple[str, ...] = (BOTH_IN_ORDER,)
    launches: int = 1
    channels: int = 1
    rows: tuple[int, ...] = (1,)
    scratch: bool = False
    split_words: bool = False
    stops: int = 0
    timeouts: int = 0
    aborts: int = 0
    uncounted_steps: int = 0
    last_epoch: int = 20

    def __attrs_post_init__(self) -> None:
        for name in ("ranks", "launches", "channels"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; a world has at least one")
        if not self.blocks or not set(self.blocks) <= {BOTH_IN_ORDER, ATTENTION_ONLY, FFN_ONLY}:
            raise ConfigurationError(f"blocks are {self.blocks}; pass at least one, each of a known kind")
        if not self.rows or min(self.rows) < 1:
            raise ConfigurationError(f"rows are {self.rows}; every step has at least one row")
        # A word's ghost (epoch, source, channel, exchange, read or not) has to fit one byte of a state.
        largest = 2 + 2 * (self.last_epoch + self.launches) * self.ranks * self.channels * 2
        if largest > 255:
            raise ConfigurationError(
                f"epochs up to {self.last_epoch} with {self.ranks} ranks and {self.channels} channels need "
                f"{largest + 1} values, a byte has 256: lower last_epoch"
            )

    @property
    def ordered(self) -> bool:
        """Whether every block reads its attention words before it pushes FFN words."""
        return set(self.blocks) == {BOTH_IN_ORDER}
