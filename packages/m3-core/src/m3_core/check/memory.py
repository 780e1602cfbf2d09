"""The memory of a small world: stores that become visible one by one, fault words, and what their readers rely on."""

from __future__ import annotations

from m3_core.check.codes import (
    FAILED_AFTER_FLAG,
    FAILED_BEFORE_FLAG,
    FAULTED,
    IDLE,
    OFF,
    PUBLISHED,
    READS_FFN,
    READY,
    STEPPING,
    STOPPED_AFTER_FLAG,
    STOPPED_BEFORE_FLAG,
    WORD_SET,
    Action,
)
from m3_core.check.properties import Property, Violation
from m3_core.check.rules import Rules, Scope
from m3_core.check.state import ATTENTION, FFN, Fields
from m3_core.formulas import ceil_div


class Memory:
    """Readings of a state, and stores.

    Attributes:
        rules: the protocol.
        scope: the size.
        fields: how a state is packed.
        initial: the state in which every rank has been built.
        current: the action that is being applied; names the culprit when a property breaks.
    """

    def __init__(self, rules: Rules, scope: Scope) -> None:
        """Build the tables that the steps look up."""
        self.rules = rules
        self.scope = scope
        self.fields = fields = Fields(rules, scope)
        self.current: Action = ()
        state = bytearray(fields.size)
        for rank in range(scope.ranks):
            state[fields.life[rank]] = READY
            state[fields.cleared[rank]] = 1
            for channel in range(scope.channels):
                state[fields.launch[rank, channel]] = scope.launches
        state[fields.budget_stops] = scope.stops
        state[fields.budget_timeouts] = scope.timeouts
        state[fields.budget_aborts] = scope.aborts
        self.initial = bytes(state)

        self._reset_steps = ceil_div(rules.tags.reset_launches, scope.launches)
        # Under one region for both exchanges a reader meets words of the other kind; it reads the bits where its own tag is.
        self._tags = [[0, *(self._tag(exchange, fields.unpack(word)[0]) for word in range(1, 256))] for exchange in (ATTENTION, FFN)]
        self._wanted: dict[tuple[int, int, int, int, int, int], tuple[tuple[int, int], ...]] = {}

    # --- small readings of a state ---------------------------------------------------------------------------------------------------

    def _told(self, epoch: int) -> int:
        """The epoch that a launch works with; a graph whose epoch comes from the host repeats that of its capture."""
        return epoch if self.rules.epoch_on_device else epoch % self.scope.launches

    def _tag(self, exchange: int, epoch: int) -> int:
        tags = self.rules.tags
        return (tags.triple_tag, tags.pair_tag)[exchange](self._told(epoch))

    def rows(self, state: bytes | bytearray, rank: int) -> int:
        """Rows of the step that ``rank`` runs."""
        return self.scope.rows[state[self.fields.steps[rank]] % len(self.scope.rows)]

    def _idle(self, state: bytes | bytearray, rank: int) -> bool:
        return all(state[self.fields.launch[rank, channel]] == self.scope.launches for channel in range(self.scope.channels))

    def _is_set(self, state: bytes | bytearray, rank: int) -> bool:
        return any(state[self.fields.word[rank, channel]] >= WORD_SET for channel in range(self.scope.channels))

    def _reads(self, state: bytes | bytearray, rank: int, channel: int) -> bool:
        """Whether what lies in a mailbox of ``rank`` will still be read."""
        fields = self.fields
        return not state[fields.stopped[rank]] and state[fields.life[rank]] != FAULTED and state[fields.word[rank, channel]] < WORD_SET

    def _wants(self, rank: int, channel: int, block: int, exchange: int, epoch: int, rows: int) -> tuple[tuple[int, int], ...]:
        """Positions that a block reads, each with the word that belongs there."""
        key = (rank, channel, block, exchange, epoch, rows)
        wanted = self._wanted.get(key)
        if wanted is None:
            fields = self.fields
            half = self.rules.tags.parity(self._told(epoch))
            column = fields.columns[exchange].index(block)
            wanted = tuple(
                (fields.slot(rank, channel, exchange, half, source, row, column), fields.pack(epoch, source, channel, exchange))
                for source in range(self.scope.ranks)
                for row in range(rows)
            )
            self._wanted[key] = wanted
        return wanted

    # --- faults ----------------------------------------------------------------------------------------------------------------------

    def _fail(self, state: bytearray, rank: int, *, stopped: bool = False) -> None:
        fields = self.fields
        state[fields.failures] = 1
        if not state[fields.fate[rank]]:
            published = state[fields.life[rank]] == STEPPING and all(
                state[fields.exchange[rank, channel]] in PUBLISHED for channel in range(self.scope.channels)
            )
            if stopped:
                state[fields.fate[rank]] = STOPPED_AFTER_FLAG if published else STOPPED_BEFORE_FLAG
            else:
                state[fields.fate[rank]] = FAILED_AFTER_FLAG if published else FAILED_BEFORE_FLAG

    def _mark(self, state: bytearray, rank: int, channel: int, *, everywhere: bool) -> None:
        fields = self.fields
        state[fields.word[rank, channel]] = WORD_SET
        if everywhere:
            for peer in range(self.scope.ranks):
                if peer != rank:
                    state[fields.mark_flight[peer, rank, channel]] = 2 if self.scope.split_words else 1

    def _check_learned(self, state: bytes) -> None:
        fields, scope = self.fields, self.scope
        for failed in range(scope.ranks):
            if state[fields.fate[failed]] < FAILED_AFTER_FLAG:
                continue
            for rank in range(scope.ranks):
                if rank == failed or state[fields.stopped[rank]] or state[fields.life[rank]] == FAULTED:
                    continue
                knows = any(
                    state[fields.word[rank, channel]]
                    or any(state[fields.mark_flight[rank, writer, channel]] for writer in range(scope.ranks))
                    for channel in range(scope.channels)
                )
                if not knows:
                    raise Violation(
                        Property.LEARN, f"rank {failed} failed, but the fault word of rank {rank} is clear and no mark is on its way"
                    )

    # --- stores ----------------------------------------------------------------------------------------------------------------------

    def _check_unread(self, state: bytes | bytearray, position: int, old: int, new: int, what: str) -> None:
        """Raise if ``old`` at a mailbox position is unread by a rank that will read it."""
        slot = self.fields.slots[position]
        if old & 1 and self._reads(state, slot.owner, slot.channel):
            epoch, channel, _ = self.fields.unpack(old)
            if new and self.fields.unpack(new)[1] != channel:
                raise Violation(
                    Property.CHANNEL, f"a word of channel {self.fields.unpack(new)[1]} {what} an unread word of channel {channel}"
                )
            by = f"a word of epoch {self.fields.unpack(new)[0]} {what}" if new else f"is {what}"
            raise Violation(Property.OVERWRITE, f"rank {slot.owner} has not read rank {slot.source}'s word of epoch {epoch}, which {by}")

    def _push(self, state: bytearray, rank: int, channel: int, block: int, exchange: int, epoch: int) -> None:
        fields, scope = self.fields, self.scope
        self._check_lead(state, rank, channel, 2 * epoch + exchange)
        half = self.rules.tags.parity(self._told(epoch))
        column = fields.columns[exchange].index(block)
        word = fields.pack(epoch, rank, channel, exchange)
        for peer in range(scope.ranks):
            for row in range(self.rows(state, rank)):
                position = fields.slot(peer, channel, exchange, half, rank, row, column)
                self._check_unread(state, position, state[fields.flight_start + position], word, "overtakes")
                state[fields.flight_start + position] = word
                if not self.rules.payload_rides_with_tag:
                    state[fields.payload_start + position] = 1

    def _check_lead(self, state: bytearray, rank: int, channel: int, half: int) -> None:
        """Raise if a peer lags by more than half a layer behind a push of half-layer ``half``.

        Where the blocks of a launch do not wait for each other the bound is weaker: a launch has begun only after every peer's last one.
        """
        fields, scope = self.fields, self.scope
        in_step = scope.ordered and (scope.scratch or fields.blocks == 1)
        least = half - 1 if in_step else 2 * (half // 2) - 2
        for peer in range(scope.ranks):
            if peer == rank or not self._reads(state, peer, channel) or state[fields.reset[peer]] != IDLE:
                continue
            for block in range(fields.blocks):
                pc = state[fields.pc[peer, channel, block]]
                if pc == OFF:
                    pushed = 2 * state[self._epoch(peer, channel)] - 1
                else:
                    pushed = 2 * state[fields.seen[peer, channel, block]] + (pc >= READS_FFN)
                if pushed < least:
                    raise Violation(
                        Property.LEAD, f"rank {rank} pushes half-layer {half} while block {block} of rank {peer} has pushed up to {pushed}"
                    )

    def _publish(self, state: bytearray, rank: int, channel: int, *, failed: bool) -> None:
        # A failed flag may take the place of a clear one that a peer has yet to read: that peer's wait ends by the mark that is on its way.
        fields = self.fields
        flag = 1 + 2 * (2 * state[fields.seen[rank, channel, 0]] + failed)
        for peer in range(self.scope.ranks):
            old = state[fields.flag_flight[peer, rank, channel]]
            if old & 1 and not failed and self._reads(state, peer, channel):
                raise Violation(Property.OVERWRITE, f"rank {rank}'s flag overtakes its last one, which rank {peer} has not read")
            state[fields.flag_flight[peer, rank, channel]] = flag

    def _epoch(self, rank: int, channel: int) -> int:
        return self.fields.epoch[rank, channel if self.rules.epoch_per_channel else 0]
