"""The device of a small world: what the blocks of a launch do."""

from __future__ import annotations

from m3_core.check.codes import (
    ENDED,
    GATHERS,
    GATHERS_EARLY,
    HANDSHAKE_CODE,
    HANDSHAKES,
    MARKED,
    OFF,
    READS_ATTENTION,
    READS_FFN,
    RELEASES,
    STEPPING,
    TRADES_FLAGS,
    UNPUBLISHED,
    WAITS,
    WORD_SET,
    Action,
    Step,
)
from m3_core.check.memory import Memory
from m3_core.check.properties import Property, Violation
from m3_core.check.rules import ATTENTION_ONLY, FFN_ONLY
from m3_core.check.state import ATTENTION, FFN
from m3_core.handshake import HandshakeAction, HandshakeEvent


class Launches(Memory):
    """The steps of blocks."""

    def _last_launch(self, state: bytes | bytearray, rank: int, channel: int) -> bool:
        return self.rules.exchange_flags and state[self.fields.launch[rank, channel]] == self.scope.launches - 1

    def _trade(self, state: bytearray, rank: int, channel: int, event: HandshakeEvent) -> None:
        """Apply a handshake event; block 0 ends with the exchange."""
        fields = self.fields
        here = fields.exchange[rank, channel]
        transition = self.rules.handshake.step(HANDSHAKES[state[here]], event)
        state[here] = HANDSHAKE_CODE[transition.target]
        for action in transition.actions:
            if action is HandshakeAction.PUBLISH_CLEAR:
                self._publish(state, rank, channel, failed=False)
            elif action is HandshakeAction.PUBLISH_FAILED:
                self._publish(state, rank, channel, failed=True)
            elif action is HandshakeAction.SET_PEER_LOCALLY:
                self._mark(state, rank, channel, everywhere=False)
            elif action is HandshakeAction.SET_HANDSHAKE_ON_ALL:
                self._mark(state, rank, channel, everywhere=self.rules.timeout_marks_peers)
        ended = transition.target in self.rules.handshake.terminal
        state[fields.pc[rank, channel, 0]] = ENDED if ended else TRADES_FLAGS

    def _give_up(self, state: bytearray, rank: int, channel: int, block: int) -> None:
        """A block leaves the launch because the fault word is set."""
        fields = self.fields
        exchanged = state[fields.exchange[rank, channel]] != UNPUBLISHED
        if block == 0 and self._last_launch(state, rank, channel) and not exchanged:
            self._trade(state, rank, channel, HandshakeEvent.WORD_SET)
        state[fields.pc[rank, channel, block]] = ENDED

    def _end_launch(self, state: bytearray, rank: int, channel: int) -> None:
        """End the launch if every block has."""
        fields = self.fields
        counters = [fields.pc[rank, channel, block] for block in range(fields.blocks)]
        if state[counters[0]] != ENDED or any(state[counter] not in (MARKED, ENDED) for counter in counters[1:]):
            return
        for block, counter in enumerate(counters):
            state[counter] = OFF
            state[fields.seen[rank, channel, block]] = 0
        here = fields.launch[rank, channel]
        state[here] = state[here] + 1 if state[fields.life[rank]] == STEPPING else self.scope.launches

    def _start(self, state: bytearray, rank: int, channel: int, block: int) -> None:
        fields, rules = self.fields, self.rules
        epoch = state[self._epoch(rank, channel)]
        state[fields.seen[rank, channel, block]] = epoch
        if rules.launches_check_the_word and state[fields.word[rank, channel]] >= WORD_SET:
            self._give_up(state, rank, channel, block)
        elif rules.launches_check_the_limit and rules.tags.is_past_limit(epoch):
            if not self.scope.uncounted_steps and not state[fields.failures]:
                raise Violation(Property.SPURIOUS, f"rank {rank} refuses a launch at epoch {epoch}: no reset came before the limit")
            self._fail(state, rank)
            self._mark(state, rank, channel, everywhere=rules.timeout_marks_peers)
            self._give_up(state, rank, channel, block)
        else:
            if block == 0 and not rules.flag_comes_last and self._last_launch(state, rank, channel):
                self._trade(state, rank, channel, HandshakeEvent.WORD_CLEAR)
            steps = state[fields.steps[rank]]
            if not rules.padding_is_exchanged and rank == 1 and steps % 2 == 1:
                state[fields.pc[rank, channel, block]] = MARKED
            elif self.scope.blocks[block] == FFN_ONLY:
                self._push(state, rank, channel, block, FFN, epoch)
                state[fields.pc[rank, channel, block]] = READS_FFN
            else:
                self._push(state, rank, channel, block, ATTENTION, epoch)
                state[fields.pc[rank, channel, block]] = READS_ATTENTION
        self._end_launch(state, rank, channel)

    def _after_attention(self, state: bytearray, rank: int, channel: int, block: int) -> None:
        fields = self.fields
        epoch = state[fields.seen[rank, channel, block]]
        if self.scope.scratch:
            state[fields.plain_flight[rank, channel, block]] = epoch + 1
            state[fields.pc[rank, channel, block]] = RELEASES
        elif self.scope.blocks[block] == ATTENTION_ONLY:
            state[fields.pc[rank, channel, block]] = MARKED
        else:
            self._push(state, rank, channel, block, FFN, epoch)
            state[fields.pc[rank, channel, block]] = READS_FFN

    def _accept(self, state: bytearray, rank: int, channel: int, block: int, exchange: int, position: int, wanted: int) -> None:
        fields = self.fields
        word = state[fields.mail_start + position]
        epoch, _, _ = fields.unpack(wanted)
        if word != wanted:
            if word and fields.unpack(word)[1] != channel:
                raise Violation(Property.CHANNEL, f"rank {rank} accepts in channel {channel} a word of channel {fields.unpack(word)[1]}")
            what = "a cleared word" if not word else self._word_text(position, word)
            raise Violation(Property.STALE, f"rank {rank} accepts {what} in its launch of epoch {epoch}")
        if not self.rules.payload_rides_with_tag and state[fields.payload_start + position]:
            raise Violation(Property.STALE, f"rank {rank} accepts a word of epoch {epoch} whose payload has not arrived")
        state[fields.mail_start + position] = word + 1
        if all(
            state[fields.mail_start + other] == belongs + 1
            for other, belongs in self._wants(rank, channel, block, exchange, epoch, self.rows(state, rank))
        ):
            if exchange == ATTENTION:
                self._after_attention(state, rank, channel, block)
            else:
                state[fields.pc[rank, channel, block]] = MARKED
            self._end_launch(state, rank, channel)

    def _word_text(self, position: int, word: int) -> str:
        source = self.fields.slots[position].source
        epoch, _, exchange = self.fields.unpack(word)
        read = "" if word & 1 else ", read before,"
        return f"rank {source}'s {('attention', 'FFN')[exchange]} word of epoch {epoch}{read}"

    def _advance(self, state: bytearray, rank: int, channel: int) -> None:
        fields = self.fields
        here = self._epoch(rank, channel)
        seen = state[fields.seen[rank, channel, 0]]
        if self.scope.channels > 1 and state[here] != seen:
            raise Violation(Property.CHANNEL, f"rank {rank}'s launch of channel {channel} began at epoch {seen} and ends at {state[here]}")
        state[here] = state[here] + 1
        if not self._last_launch(state, rank, channel):
            state[fields.pc[rank, channel, 0]] = ENDED
        elif state[fields.exchange[rank, channel]] == UNPUBLISHED:
            is_set = state[fields.word[rank, channel]] >= WORD_SET
            self._trade(state, rank, channel, HandshakeEvent.WORD_SET if is_set else HandshakeEvent.WORD_CLEAR)
        else:
            state[fields.pc[rank, channel, 0]] = TRADES_FLAGS
        self._end_launch(state, rank, channel)

    def _read_flag(self, state: bytearray, rank: int, channel: int, source: int) -> None:
        fields = self.fields
        flag = state[fields.flag[rank, source, channel]]
        epoch, failed = divmod((flag - 1) // 2, 2)
        seen = state[fields.seen[rank, channel, 0]]
        if epoch != seen or not flag & 1:
            raise Violation(
                Property.STALE, f"rank {rank} accepts rank {source}'s flag of epoch {epoch} at the end of its launch of epoch {seen}"
            )
        state[fields.flag[rank, source, channel]] = flag + 1
        if failed:
            event = HandshakeEvent.PEER_FAILED
        else:
            belongs = 2 + 2 * (2 * seen)
            missing = any(state[fields.flag[rank, peer, channel]] != belongs for peer in range(self.scope.ranks))
            event = HandshakeEvent.PEER_CLEAR if missing else HandshakeEvent.LAST_PEER_CLEAR
        self._trade(state, rank, channel, event)
        self._end_launch(state, rank, channel)

    def _timeout(self, state: bytearray, rank: int, channel: int, block: int) -> None:
        fields = self.fields
        self._fail(state, rank)
        if state[fields.pc[rank, channel, block]] == TRADES_FLAGS:
            self._trade(state, rank, channel, HandshakeEvent.TIMEOUT)
        else:
            self._mark(state, rank, channel, everywhere=self.rules.timeout_marks_peers)
            self._give_up(state, rank, channel, block)
        self._end_launch(state, rank, channel)

    # --- which steps can follow ---------------------------------------------------------------------------------------------------------

    def _device_steps(self, state: bytes, rank: int, channel: int, steps: list[Step], waiting: list[Action]) -> None:
        fields, scope = self.fields, self.scope
        if state[fields.launch[rank, channel]] >= scope.launches:
            return
        is_set = state[fields.word[rank, channel]] >= WORD_SET
        begun = state[fields.life[rank]] == STEPPING or any(state[fields.pc[rank, channel, block]] for block in range(fields.blocks))
        for block in range(fields.blocks):
            pc = state[fields.pc[rank, channel, block]]
            if pc == OFF:
                if begun:
                    self.current = ("start", rank, channel, block)
                    new = bytearray(state)
                    self._start(new, rank, channel, block)
                    steps.append((self.current, bytes(new)))
                continue
            if pc in (READS_ATTENTION, READS_FFN):
                self._polls(state, rank, channel, block, FFN if pc == READS_FFN else ATTENTION, steps)
            elif pc == MARKED:
                if block == 0:
                    self._marks(state, rank, channel, steps, waiting, is_set=is_set)
                continue
            elif pc == TRADES_FLAGS:
                self._flags(state, rank, channel, steps)
            elif pc in (RELEASES, GATHERS, GATHERS_EARLY):
                self._scratch_steps(state, rank, channel, block, pc, steps)
            if pc in WAITS:
                self._leave(state, rank, channel, block, steps, waiting, is_set=is_set)

    def _leave(self, state: bytes, rank: int, channel: int, block: int, steps: list[Step], waiting: list[Action], *, is_set: bool) -> None:
        """A waiting block may see the fault word, or reach its bound."""
        if is_set and self.rules.waits_watch_the_word:
            self.current = ("leave", rank, channel, block)
            new = bytearray(state)
            if state[self.fields.pc[rank, channel, block]] == TRADES_FLAGS:
                self._trade(new, rank, channel, HandshakeEvent.WORD_SET)
            else:
                self._give_up(new, rank, channel, block)
            self._end_launch(new, rank, channel)
            steps.append((self.current, bytes(new)))
        if self.rules.waits_are_bounded:
            waiting.append(("timeout", rank, channel, block))

    def _marks(self, state: bytes, rank: int, channel: int, steps: list[Step], waiting: list[Action], *, is_set: bool) -> None:
        fields = self.fields
        others = [state[fields.pc[rank, channel, block]] for block in range(1, fields.blocks)]
        if all(pc == MARKED for pc in others) or not self.rules.advance_needs_all_marks:
            self.current = ("advance", rank, channel)
            new = bytearray(state)
            self._advance(new, rank, channel)
            steps.append((self.current, bytes(new)))
        else:
            self._leave(state, rank, channel, 0, steps, waiting, is_set=is_set)

    def _polls(self, state: bytes, rank: int, channel: int, block: int, exchange: int, steps: list[Step]) -> None:
        fields = self.fields
        epoch = state[fields.seen[rank, channel, block]]
        wanted_tag = self._tag(exchange, epoch)
        tags = self._tags[exchange]
        start = fields.mail_start
        for position, wanted in self._wants(rank, channel, block, exchange, epoch, self.rows(state, rank)):
            word = state[start + position]
            if word != wanted + 1 and tags[word] == wanted_tag:
                self.current = ("accept", rank, channel, block, exchange, position)
                new = bytearray(state)
                self._accept(new, rank, channel, block, exchange, position, wanted)
                steps.append((self.current, bytes(new)))

    def _flags(self, state: bytes, rank: int, channel: int, steps: list[Step]) -> None:
        fields, rules = self.fields, self.rules
        epoch = state[fields.seen[rank, channel, 0]]
        wanted_tag = self._tag(FFN, epoch)
        for source in range(self.scope.ranks):
            flag = state[fields.flag[rank, source, channel]]
            if not flag or flag == 2 + 2 * (2 * epoch):
                continue
            if not rules.flag_carries_the_epoch or self._tag(FFN, (flag - 1) // 4) == wanted_tag:
                self.current = ("read flag", rank, channel, source)
                new = bytearray(state)
                self._read_flag(new, rank, channel, source)
                steps.append((self.current, bytes(new)))

    def _scratch_steps(self, state: bytes, rank: int, channel: int, block: int, pc: int, steps: list[Step]) -> None:
        """Between the exchanges: write plain data, announce it, read every block's."""
        fields, rules = self.fields, self.rules
        epoch = state[fields.seen[rank, channel, block]]
        blocks = range(fields.blocks)
        if pc == RELEASES:
            if rules.release_before_announcing and state[fields.plain_flight[rank, channel, block]]:
                return
            new = bytearray(state)
            new[fields.announced_flight[rank, channel, block]] = epoch + 1
            new[fields.pc[rank, channel, block]] = GATHERS
            steps.append((("release", rank, channel, block), bytes(new)))
            return
        fresh = all(state[fields.plain[rank, channel, other]] == epoch + 1 for other in blocks)
        if not rules.acquire_after_polling and pc == GATHERS and not fresh:
            new = bytearray(state)
            new[fields.pc[rank, channel, block]] = GATHERS_EARLY
            steps.append((("read early", rank, channel, block), bytes(new)))
        if all(state[fields.announced[rank, channel, other]] == epoch + 1 for other in blocks):
            self.current = ("gather", rank, channel, block)
            if not fresh or pc == GATHERS_EARLY:
                raise Violation(Property.STALE, f"block {block} of rank {rank} reads plain data of epoch {epoch} that has not arrived")
            new = bytearray(state)
            self._push(new, rank, channel, block, FFN, epoch)
            new[fields.pc[rank, channel, block]] = READS_FFN
            steps.append((self.current, bytes(new)))
