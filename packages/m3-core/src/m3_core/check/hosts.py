"""The hosts of a small world: steps, faults seen, resets."""

from __future__ import annotations

from m3_core.check.codes import (
    CLEAR,
    DRAIN,
    FAILED_AFTER_FLAG,
    FAULTED,
    IDLE,
    LIFE_CODE,
    LIVES,
    OFF,
    READY,
    RESET_CODE,
    RESETS,
    STEPPING,
    STOPPED_AFTER_FLAG,
    UNPUBLISHED,
    VERDICT_BROKE,
    VERDICT_READY,
    WORD_CLEAR,
    Action,
    Step,
)
from m3_core.check.launches import Launches
from m3_core.check.properties import Property, Violation
from m3_core.lifecycle import LifeAction, LifeEvent
from m3_core.phase import Phase, PhaseEvent
from m3_core.reset import Reset, ResetAction, ResetEvent


class Hosts(Launches):
    """The steps of hosts."""

    def _live(self, state: bytearray, rank: int, event: LifeEvent) -> None:
        """Apply an event of the rank's life."""
        fields, scope = self.fields, self.scope
        transition = self.rules.life.step(LIVES[state[fields.life[rank]]], event)
        state[fields.life[rank]] = LIFE_CODE[transition.target]
        for action in transition.actions:
            if action is LifeAction.MARK_ALL_RANKS:
                for channel in range(scope.channels):
                    self._mark(state, rank, channel, everywhere=self.rules.abort_marks_peers)
            elif action is LifeAction.LAUNCH:
                skipped = 0 if self.rules.equal_launches or rank != 1 else state[fields.steps[rank]] % 2
                for channel in range(scope.channels):
                    state[fields.launch[rank, channel]] = skipped
                    state[fields.exchange[rank, channel]] = UNPUBLISHED
            elif action is LifeAction.RETURN_TOKENS:
                self._return_tokens(state, rank)
            elif action is LifeAction.START_RESET:
                state[fields.cleared[rank]] = 0
                self._reset(state, rank, ResetEvent.START)
        if state[fields.life[rank]] == FAULTED:
            # Launches that have not begun are not enqueued any more.
            for channel in range(scope.channels):
                if all(state[fields.pc[rank, channel, block]] == OFF for block in range(fields.blocks)):
                    state[fields.launch[rank, channel]] = scope.launches

    def _return_tokens(self, state: bytearray, rank: int) -> None:
        fields = self.fields
        steps = state[fields.steps[rank]]
        if not self._idle(state, rank):
            raise Violation(Property.TOKEN, f"rank {rank} returns a token of step {steps} while its launches still run")
        for peer in range(self.scope.ranks):
            if peer == rank:
                continue
            fate, at = state[fields.fate[peer]], state[fields.steps[peer]]
            ahead = at == steps + 1
            same_after_flag = at == steps and fate in (STOPPED_AFTER_FLAG, FAILED_AFTER_FLAG)
            if fate and not ahead and not same_after_flag:
                raise Violation(Property.TOKEN, f"rank {rank} returns a token of step {steps}, but rank {peer} failed in step {at}")
            # With a single step between resets, the peer may be in the next one.
            if steps == 0 and self._reset_steps > 1 and state[fields.reset[peer]] != IDLE:
                raise Violation(
                    Property.RESET, f"rank {rank} returns a token of its first step after a reset that rank {peer} has not finished"
                )
        state[fields.steps[rank]] = steps + 1
        for channel in range(self.scope.channels):
            state[fields.exchange[rank, channel]] = UNPUBLISHED

    def _at_the_end(self, state: bytes, rank: int) -> bool:
        return state[self.fields.life[rank]] == READY and state[self.fields.epoch[rank, 0]] >= self.scope.last_epoch

    def _reset_due(self, state: bytes, rank: int) -> bool:
        steps = state[self.fields.steps[rank]] - self.scope.uncounted_steps
        if not self.rules.replays_are_counted:
            steps //= 2
        if not self.rules.resets_together and rank == 1:
            steps += 1
        return steps >= self._reset_steps

    def _reset(self, state: bytearray, rank: int, event: ResetEvent) -> None:
        """Apply an event of the rank's reset, and of its life where the reset moves it."""
        fields, scope = self.fields, self.scope
        before = RESETS[state[fields.reset[rank]]]
        transition = self.rules.reset.step(before, event)
        state[fields.reset[rank]] = RESET_CODE[transition.target]
        phase = DRAIN if transition.target in (Reset.DRAINING, Reset.AGREEING_DRAIN) else CLEAR
        for action in transition.actions:
            if action in (ResetAction.AGREE_READY, ResetAction.AGREE_FAILED):
                for peer in range(scope.ranks):
                    ready = action is ResetAction.AGREE_READY
                    state[fields.verdict[peer, rank, phase]] = VERDICT_READY if ready else VERDICT_BROKE
            elif action is ResetAction.MARK_ALL_RANKS:
                for channel in range(scope.channels):
                    self._mark(state, rank, channel, everywhere=self.rules.abort_marks_peers)
            elif action is ResetAction.RESUME:
                self._check_cleared(state, rank)
                state[fields.steps[rank]] = 0
                state[fields.reset[rank]] = IDLE
                self._live(state, rank, LifeEvent.CLEAR_AGREED)
            elif action is ResetAction.RAISE:
                self._live(state, rank, LifeEvent.RESET_FAILED)
        if transition.target is Reset.CLEARING:
            self._live(state, rank, LifeEvent.DRAIN_AGREED)

    def _check_cleared(self, state: bytearray, rank: int) -> None:
        for peer in range(self.scope.ranks):
            if not state[self.fields.cleared[peer]]:
                raise Violation(Property.RESET, f"rank {rank} resumes after a reset in which rank {peer} has not cleared")

    def _clear(self, state: bytearray, rank: int) -> None:
        fields, scope, rules = self.fields, self.scope, self.rules
        for position, slot in enumerate(fields.slots):
            here = fields.mail_start + position
            if slot.owner == rank and rules.clear_zeroes_the_mailbox:
                self._check_unread(state, position, state[here], 0, "cleared")
                state[here] = 0
            elif slot.owner == rank and state[here]:
                state[here] = self._aged(state[here], slot.source)
        state[fields.cleared[rank]] = 1
        for channel in range(scope.channels):
            state[fields.epoch[rank, channel]] = 0
            if not rules.clear_spares_the_word:
                state[fields.word[rank, channel]] = WORD_CLEAR
            for source in range(scope.ranks):
                if rules.clear_zeroes_the_mailbox:
                    state[fields.flag[rank, source, channel]] = 0
            if scope.scratch:
                for block in range(fields.blocks):
                    for section in (fields.plain, fields.announced):
                        state[section[rank, channel, block]] = 0

    def _aged(self, word: int, source: int) -> int:
        """A word that a reset has left: the same tags, half and source, but a ghost that no launch of the new count has."""
        epoch, channel, exchange = self.fields.unpack(word)
        tags = self.rules.tags

        def looks(of: int) -> tuple[int, int, int]:
            return tags.parity(of), tags.pair_tag(of), tags.triple_tag(of)

        older = next(later for later in range(epoch + 1, 256) if looks(later) == looks(epoch))
        return self.fields.pack(older, source, channel, exchange) + (word - 1) % 2

    def _gather(self, state: bytearray, rank: int, phase: int) -> None:
        """Feed a complete set of verdicts to the phase's table, then its outcome to the reset's."""
        fields, scope = self.fields, self.scope
        table = self.rules.phase
        own = state[fields.verdict[rank, rank, phase]]
        here = table.step(table.initial, PhaseEvent.READY if own == VERDICT_READY else PhaseEvent.BROKE).target
        peers = [peer for peer in range(scope.ranks) if peer != rank]
        for peer in peers:
            ready = state[fields.verdict[rank, peer, phase]] == VERDICT_READY
            if peer == peers[-1]:
                event = PhaseEvent.LAST_PEER_READY if ready else PhaseEvent.LAST_PEER_BROKE
            else:
                event = PhaseEvent.PEER_READY if ready else PhaseEvent.PEER_BROKE
            here = table.step(here, event).target
        for sender in range(scope.ranks):
            state[fields.verdict[rank, sender, phase]] = 0
        self._reset(state, rank, ResetEvent.AGREED if here is Phase.AGREED else ResetEvent.REFUSED)

    # --- which steps can follow ---------------------------------------------------------------------------------------------------------

    def _host_steps(self, state: bytes, rank: int, steps: list[Step], waiting: list[Action]) -> None:
        fields, scope, rules = self.fields, self.scope, self.rules
        life = state[fields.life[rank]]
        if life == READY:
            if self._reset_due(state, rank):
                steps.append(self._life_step(state, rank, LifeEvent.RESET_DUE))
            elif not self._at_the_end(state, rank):
                steps.append(self._life_step(state, rank, LifeEvent.BEGIN_STEP))
        elif life == STEPPING:
            if self._idle(state, rank) or not rules.host_waits_for_launches:
                seen = rules.host_reads_the_word and self._is_set(state, rank)
                steps.append(self._life_step(state, rank, LifeEvent.FAULT_SEEN if seen else LifeEvent.END_STEP))
        elif life != FAULTED:
            reset = RESETS[state[fields.reset[rank]]]
            if reset in (Reset.AGREEING_DRAIN, Reset.AGREEING_CLEAR):
                phase = DRAIN if reset is Reset.AGREEING_DRAIN else CLEAR
                if all(state[fields.verdict[rank, sender, phase]] for sender in range(scope.ranks)):
                    self.current = ("verdicts", rank, phase)
                    new = bytearray(state)
                    self._gather(new, rank, phase)
                    steps.append((self.current, bytes(new)))
                else:
                    waiting.append(("agreement timeout", rank))
            else:
                self.current = ("reset", rank, reset.name, ResetEvent.DONE.name)
                new = bytearray(state)
                if reset is Reset.CLEARING:
                    self._clear(new, rank)
                self._reset(new, rank, ResetEvent.DONE)
                steps.append((self.current, bytes(new)))

    def _life_step(self, state: bytes, rank: int, event: LifeEvent) -> Step:
        self.current = ("host", rank, event.name)
        new = bytearray(state)
        self._live(new, rank, event)
        return self.current, bytes(new)

    def _failing_steps(self, state: bytes, rank: int, failures: list[Step]) -> None:
        """What may go wrong on a rank besides a wait's bound."""
        fields = self.fields
        life = state[fields.life[rank]]
        if state[fields.budget_stops]:
            self.current = ("stop", rank)
            new = bytearray(state)
            new[fields.budget_stops] -= 1
            self._fail(new, rank, stopped=True)
            new[fields.stopped[rank]] = 1
            failures.append((self.current, bytes(new)))
        if state[fields.budget_aborts] and life != FAULTED:
            reset = RESETS[state[fields.reset[rank]]]
            new = bytearray(state)
            new[fields.budget_aborts] -= 1
            self._fail(new, rank)
            if reset in (Reset.DRAINING, Reset.CLEARING):
                self.current = ("reset", rank, reset.name, ResetEvent.BROKE.name)
                self._reset(new, rank, ResetEvent.BROKE)
            else:
                self.current = ("host", rank, LifeEvent.ABORT.name)
                self._live(new, rank, LifeEvent.ABORT)
            failures.append((self.current, bytes(new)))
