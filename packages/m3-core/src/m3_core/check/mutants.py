"""Wrong protocols, each with the smallest world in which it is caught.

A mutant differs from the protocol in one rule. The same world is clean under the protocol itself: the checker's tests verify both.
"""

from __future__ import annotations

import attrs

from m3_core.check.properties import Property
from m3_core.check.rules import ATTENTION_ONLY, BOTH_IN_ORDER, FFN_ONLY, ONE_BIT_TAGS, SHORT_TAGS, TWO_BIT_TAGS, Rules, Scope
from m3_core.epochs import TagArithmetic
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.phase import PHASE, Phase, PhaseAction, PhaseEvent
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Transition


@attrs.frozen
class Mutant:
    """A wrong protocol.

    Attributes:
        name: short, with hyphens.
        change: what is wrong, in one sentence.
        rules: the wrong rules.
        scope: the world that shows it.
        breaks: the property that its shortest counterexample breaks.
        base: the right rules in the same world.
    """

    name: str
    change: str
    rules: Rules
    scope: Scope
    breaks: Property
    base: Rules = attrs.field(factory=lambda: Rules(tags=SHORT_TAGS))


@attrs.frozen
class WrongTags:
    """Tag arithmetic with one part replaced.

    Attributes:
        base: the right arithmetic.
        limit_moves: launches by which the limit lies too far.
        first_tag: what the first launch of a half is tagged with; 1 is right.
        halves: 1 to use a single half without changing the tags.
        resets: whether resets fall at all.
    """

    base: TagArithmetic
    limit_moves: int = 0
    first_tag: int = 1
    halves: int = 2
    resets: bool = True

    @property
    def limit(self) -> int:
        """The moved limit."""
        return self.base.limit + self.limit_moves

    @property
    def reset_launches(self) -> int:
        """The right threshold, or one that is never reached."""
        return self.base.reset_launches if self.resets else 10**6

    def parity(self, epoch: int) -> int:
        """The right half, or always the first."""
        return self.base.parity(epoch) % self.halves

    def pair_tag(self, epoch: int) -> int:
        """The right tag, moved."""
        return self.base.pair_tag(epoch + self.first_tag - 1)

    def triple_tag(self, epoch: int) -> int:
        """The right tag, moved."""
        return self.base.triple_tag(epoch + (self.first_tag - 1) * self.base.parities)

    def is_past_limit(self, epoch: int) -> bool:
        """Whether the moved limit is reached."""
        return epoch >= self.limit


_SMALL = Rules(tags=SHORT_TAGS)
_ONE = Scope()
_TWO_BLOCKS = Scope(blocks=(BOTH_IN_ORDER, BOTH_IN_ORDER))
_APART = Scope(blocks=(ATTENTION_ONLY, FFN_ONLY))
_SCRATCH = Scope(blocks=(BOTH_IN_ORDER, BOTH_IN_ORDER), scratch=True)
_TWO_CHANNELS = Scope(channels=2, last_epoch=1)


def _without_clear_agreement() -> Rules:
    row = {
        ResetEvent.DONE: Transition(Reset.RESUMED, ResetAction.RESUME),
        ResetEvent.BROKE: Transition(Reset.AGREEING_CLEAR, ResetAction.MARK_ALL_RANKS, ResetAction.AGREE_FAILED),
    }
    return attrs.evolve(_SMALL, reset=RESET.with_row(Reset.CLEARING, row))


def _with_silent_refusal() -> Rules:
    row = {
        ResetEvent.AGREED: Transition(Reset.RESUMED, ResetAction.RESUME),
        ResetEvent.REFUSED: Transition(Reset.FAILED, ResetAction.RAISE),
    }
    return attrs.evolve(_SMALL, reset=RESET.with_row(Reset.AGREEING_CLEAR, row))


def _with_resume_after_refusal() -> Rules:
    row = {
        ResetEvent.AGREED: Transition(Reset.RESUMED, ResetAction.RESUME),
        ResetEvent.REFUSED: Transition(Reset.RESUMED, ResetAction.RESUME),
    }
    table = RESET.with_row(Reset.AGREEING_CLEAR, row)
    return attrs.evolve(_SMALL, reset=table)


def _with_deaf_handshake() -> Rules:
    row = dict(HANDSHAKE.rows[Handshake.POLLING])
    row[HandshakeEvent.PEER_FAILED] = Transition(Handshake.FAILED)
    return attrs.evolve(_SMALL, handshake=HANDSHAKE.with_row(Handshake.POLLING, row))


def _with_optimistic_flag() -> Rules:
    row = dict(HANDSHAKE.rows[Handshake.UNPUBLISHED])
    row[HandshakeEvent.WORD_SET] = Transition(Handshake.POLLING, HandshakeAction.PUBLISH_CLEAR)
    return attrs.evolve(_SMALL, handshake=HANDSHAKE.with_row(Handshake.UNPUBLISHED, row))


def _with_first_flag_only() -> Rules:
    row = dict(HANDSHAKE.rows[Handshake.POLLING])
    row[HandshakeEvent.PEER_CLEAR] = Transition(Handshake.CLEAR)
    return attrs.evolve(_SMALL, handshake=HANDSHAKE.with_row(Handshake.POLLING, row))


def _with_deaf_phase() -> Rules:
    row = dict(PHASE.rows[Phase.GATHERING])
    row[PhaseEvent.LAST_PEER_BROKE] = Transition(Phase.AGREED, PhaseAction.PROCEED)
    return attrs.evolve(_SMALL, phase=PHASE.with_row(Phase.GATHERING, row))


def _with_silent_abort() -> Rules:
    row = dict(LIFE.rows[Life.STEPPING])
    row[LifeEvent.ABORT] = Transition(Life.FAULTED, LifeAction.DROP_TOKENS)
    return attrs.evolve(_SMALL, life=LIFE.with_row(Life.STEPPING, row))


def _small(**changes: object) -> Rules:
    return attrs.evolve(_SMALL, **changes)  # type: ignore[arg-type]


MUTANTS: tuple[Mutant, ...] = (
    # layout
    Mutant(
        "one-region",
        "the attention and the FFN exchange share one region",
        _small(region_per_exchange=False),
        _ONE,
        Property.OVERWRITE,
    ),
    Mutant(
        "one-half",
        "no parity: every launch uses the same half, with tags that tell launches apart",
        attrs.evolve(_SMALL, tags=TagArithmetic(3, 3, 1, 1, 6), region_per_parity=False),
        attrs.evolve(_APART, launches=2),
        Property.OVERWRITE,
    ),
    Mutant(
        "one-half-same-tags",
        "no parity: every launch uses the same half, with the tags of two halves",
        _small(tags=WrongTags(SHORT_TAGS, halves=1)),
        _ONE,
        Property.STALE,
    ),
    Mutant(
        "one-slot-for-all-sources",
        "ranks push into the same words",
        _small(slot_per_source=False),
        _ONE,
        Property.STALE,
    ),
    Mutant(
        "one-buffer-for-channels",
        "channels share a peer buffer",
        _small(buffer_per_channel=False),
        _TWO_CHANNELS,
        Property.CHANNEL,
    ),
    Mutant(
        "one-epoch-for-channels",
        "channels share an epoch",
        _small(epoch_per_channel=False),
        _TWO_CHANNELS,
        Property.LEAD,
    ),
    # tags and epochs
    Mutant(
        "tag-reused-after-wrap",
        "no limit and no reset: tags wrap and meet words that narrower steps left alone",
        Rules(tags=WrongTags(ONE_BIT_TAGS, limit_moves=100, resets=False)),
        Scope(rows=(2, 1, 1, 1), last_epoch=8),
        Property.STALE,
        Rules(tags=ONE_BIT_TAGS),
    ),
    Mutant(
        "limit-off-by-one",
        "the limit lies one launch too far: its tag is that of a cleared word",
        Rules(tags=WrongTags(ONE_BIT_TAGS, limit_moves=1)),
        Scope(uncounted_steps=2, rows=(1, 1, 2)),
        Property.STALE,
        Rules(tags=ONE_BIT_TAGS),
    ),
    Mutant(
        "limit-not-checked",
        "launches do not look at the limit",
        Rules(tags=ONE_BIT_TAGS, launches_check_the_limit=False),
        Scope(uncounted_steps=2, rows=(1, 1, 2)),
        Property.STALE,
        Rules(tags=ONE_BIT_TAGS),
    ),
    Mutant(
        "tags-from-zero",
        "the first launch's tag is that of a cleared word",
        _small(tags=WrongTags(SHORT_TAGS, first_tag=0)),
        _ONE,
        Property.STALE,
    ),
    Mutant(
        "epoch-from-host",
        "a replayed graph runs with the epoch of its capture",
        Rules(tags=TWO_BIT_TAGS, epoch_on_device=False),
        Scope(launches=2),
        Property.STALE,
        Rules(tags=TWO_BIT_TAGS),
    ),
    Mutant(
        "epoch-before-marks",
        "the epoch moves before all blocks have marked the launch: a late block reads the next one",
        _small(advance_needs_all_marks=False),
        _TWO_BLOCKS,
        Property.LEAD,
    ),
    Mutant(
        "replays-not-counted",
        "the host counts only every other step",
        Rules(tags=TWO_BIT_TAGS, replays_are_counted=False),
        _ONE,
        Property.SPURIOUS,
        Rules(tags=TWO_BIT_TAGS),
    ),
    # memory order
    Mutant(
        "flag-before-payload",
        "value and tag are separate stores",
        _small(payload_rides_with_tag=False),
        _ONE,
        Property.STALE,
    ),
    Mutant(
        "release-dropped",
        "a block announces plain data before it is visible",
        _small(release_before_announcing=False),
        _SCRATCH,
        Property.STALE,
    ),
    Mutant(
        "acquire-dropped",
        "a block reads plain data before it polls",
        _small(acquire_after_polling=False),
        _SCRATCH,
        Property.STALE,
    ),
    Mutant(
        "fault-flag-before-detail",
        "a fault's flag becomes visible before its epoch and site",
        _small(detail_before_flag=False),
        Scope(timeouts=1, split_words=True),
        Property.STALE,
    ),
    # waits and faults
    Mutant(
        "unbounded-wait",
        "waits have no bound",
        _small(waits_are_bounded=False),
        Scope(stops=1),
        Property.WAIT,
    ),
    Mutant(
        "wait-ignores-fault",
        "waiting blocks do not look at the fault word",
        _small(waits_watch_the_word=False),
        Scope(aborts=1),
        Property.WAIT,
    ),
    Mutant(
        "timeout-only-local",
        "a wait that gives up marks its own rank only",
        _small(timeout_marks_peers=False),
        Scope(timeouts=1),
        Property.LEARN,
    ),
    Mutant(
        "abort-only-local", "a host that aborts marks its own rank only", _small(abort_marks_peers=False), Scope(aborts=1), Property.LEARN
    ),
    Mutant(
        "silent-abort",
        "a host that aborts in a step marks nobody",
        _with_silent_abort(),
        Scope(aborts=1),
        Property.LEARN,
    ),
    Mutant(
        "host-ignores-fault", "the host does not read the fault word", _small(host_reads_the_word=False), Scope(timeouts=1), Property.TOKEN
    ),
    Mutant(
        "host-does-not-wait",
        "the host returns tokens while launches run",
        _small(host_waits_for_launches=False),
        _ONE,
        Property.TOKEN,
    ),
    # step-end handshake
    Mutant(
        "handshake-skipped",
        "the step's last launch trades no flags",
        _small(exchange_flags=False),
        Scope(timeouts=1),
        Property.TOKEN,
    ),
    Mutant(
        "flag-published-early",
        "a rank publishes its flag when the last launch starts",
        _small(flag_comes_last=False),
        Scope(timeouts=1),
        Property.OVERWRITE,
    ),
    Mutant(
        "flag-without-epoch",
        "a flag of an earlier step is taken for this one's",
        _small(flag_carries_the_epoch=False),
        _ONE,
        Property.STALE,
    ),
    Mutant(
        "flag-always-clear",
        "a rank whose word is set publishes that it is clear",
        _with_optimistic_flag(),
        Scope(timeouts=1),
        Property.TOKEN,
    ),
    Mutant(
        "failed-flag-ignored",
        "a peer's failed flag ends the exchange without setting the own word",
        _with_deaf_handshake(),
        Scope(timeouts=1),
        Property.TOKEN,
    ),
    Mutant(
        "first-flag-enough",
        "the exchange ends at the first clear flag",
        _with_first_flag_only(),
        Scope(timeouts=1),
        Property.TOKEN,
    ),
    # reset
    Mutant(
        "reset-without-second-agreement",
        "a rank resumes before all have cleared",
        _without_clear_agreement(),
        _ONE,
        Property.RESET,
    ),
    Mutant(
        "reset-clears-the-fault", "a reset clears the fault word", _small(clear_spares_the_word=False), Scope(timeouts=1), Property.LEARN
    ),
    Mutant(
        "reset-keeps-the-words",
        "a reset takes the epoch back but leaves the mailboxes",
        _small(clear_zeroes_the_mailbox=False),
        Scope(rows=(1, 2)),
        Property.STALE,
    ),
    Mutant(
        "refusal-only-local",
        "a rank whose reset is refused marks nobody",
        _with_silent_refusal(),
        Scope(timeouts=1),
        Property.LEARN,
    ),
    Mutant(
        "refusal-ignored",
        "a rank resumes although the second agreement failed",
        _with_resume_after_refusal(),
        Scope(aborts=1),
        Property.RESET,
    ),
    Mutant(
        "verdict-ignored",
        "a peer's failed verdict counts as ready",
        _with_deaf_phase(),
        Scope(aborts=1),
        Property.RESET,
    ),
    # ranks that do not do alike
    Mutant(
        "padded-rank-skips",
        "a rank whose rows are all padded leaves the exchange out",
        Rules(tags=TWO_BIT_TAGS, padding_is_exchanged=False),
        Scope(launches=2),
        Property.OVERWRITE,
        Rules(tags=TWO_BIT_TAGS),
    ),
    Mutant(
        "unequal-launches",
        "one rank runs one launch fewer in some steps",
        Rules(tags=TWO_BIT_TAGS, equal_launches=False),
        Scope(launches=2),
        Property.WAIT,
        Rules(tags=TWO_BIT_TAGS),
    ),
    Mutant(
        "reset-decided-alone",
        "one rank counts a step more than the others and resets alone",
        Rules(tags=TWO_BIT_TAGS, resets_together=False),
        _ONE,
        Property.WAIT,
        Rules(tags=TWO_BIT_TAGS),
    ),
)
