"""A small world of ranks, and every step that can follow from a state of it.

A rank is a host, and for each channel a stream of launches with one program counter a block. Stores go through a flight of their own
and become visible one by one, in any order. Whatever the protocol decides by a table or by arithmetic is decided here by the same
table or arithmetic, out of ``Rules``.

Reductions that lose no verdict: a block reads its epoch and issues its stores in one step (each store is then delayed at will);
accepting the last word and issuing what follows is one step; a rank receives all verdicts of a phase at once.
"""

from __future__ import annotations

from m3_core.check.codes import (
    FAULTED,
    WORD_CLEAR,
    WORD_DETAIL,
    WORD_SET,
    Action,
    Step,
)
from m3_core.check.hosts import Hosts
from m3_core.check.properties import Property, Violation
from m3_core.reset import ResetEvent


class World(Hosts):
    """The states of one scope under one set of rules."""

    def successors(self, state: bytes) -> list[Step]:
        """Every step that can follow, as (action, next state).

        Raises:
            Violation: if a step breaks a property, or nothing can follow although a rank has not finished; ``current`` is the step.
        """
        fields, scope = self.fields, self.scope
        steps: list[Step] = []
        failures: list[Step] = []
        self.current = ("look",)
        if state[fields.failures]:
            self._check_learned(state)
        self._deliver(state, steps)
        waiting: list[Action] = []
        for rank in range(scope.ranks):
            if not state[fields.stopped[rank]]:
                self._host_steps(state, rank, steps, waiting)
                for channel in range(scope.channels):
                    self._device_steps(state, rank, channel, steps, waiting)
                self._failing_steps(state, rank, failures)
        if steps:
            if state[fields.budget_timeouts]:
                failures.extend((action, self._give_up_waiting(state, action, spend=True)) for action in waiting)
            return steps + failures
        return failures + self._forced(state, waiting)

    def _forced(self, state: bytes, waiting: list[Action]) -> list[Step]:
        """What follows where only a bound can end a wait."""
        fields, scope = self.fields, self.scope
        self.current = ("look",)
        stopped = any(state[fields.stopped[rank]] for rank in range(scope.ranks))
        gone = stopped or any(state[fields.life[rank]] == FAULTED for rank in range(scope.ranks))
        for action in waiting:
            if not (stopped or (gone and action[0] == "agreement timeout")):
                raise Violation(Property.WAIT, f"rank {action[1]} waits for its bound, though no rank stopped")
        unfinished = [
            rank
            for rank in range(scope.ranks)
            if not state[fields.stopped[rank]]
            and not (self._idle(state, rank) and (state[fields.life[rank]] == FAULTED or self._at_the_end(state, rank)))
        ]
        if unfinished and not waiting:
            raise Violation(Property.WAIT, f"rank(s) {unfinished} wait for ever")
        return [(action, self._give_up_waiting(state, action, spend=False)) for action in waiting]

    def _give_up_waiting(self, state: bytes, action: Action, *, spend: bool) -> bytes:
        new = bytearray(state)
        self.current = action
        if spend:
            new[self.fields.budget_timeouts] -= 1
        rank = action[1]
        assert isinstance(rank, int)
        if action[0] == "agreement timeout":
            self._fail(new, rank)
            self._reset(new, rank, ResetEvent.REFUSED)
        else:
            _, _, channel, block = action
            assert isinstance(channel, int)
            assert isinstance(block, int)
            self._timeout(new, rank, channel, block)
        return bytes(new)

    def _deliver(self, state: bytes, steps: list[Step]) -> None:
        """Every store on its way may become visible now."""
        fields, scope = self.fields, self.scope
        start = fields.flight_start
        for position, word in enumerate(state[start : start + fields.mail_size]):
            if word:
                self.current = ("arrive", position, word)
                here = fields.mail_start + position
                self._check_unread(state, position, state[here], word, "overwrites")
                new = bytearray(state)
                new[here] = word
                new[start + position] = 0
                steps.append((self.current, bytes(new)))
            if not self.rules.payload_rides_with_tag and state[fields.payload_start + position]:
                new = bytearray(state)
                new[fields.payload_start + position] = 0
                steps.append((("payload", position), bytes(new)))
        for key, here in fields.flag_flight.items():
            flag = state[here]
            if flag:
                owner, source, channel = key
                self.current = ("flag", owner, channel, source, flag)
                old = state[fields.flag[key]]
                failed = (flag - 1) // 2 % 2
                if old & 1 and not failed and self._reads(state, owner, channel):
                    raise Violation(Property.OVERWRITE, f"rank {source}'s flag overwrites its last one, which rank {owner} has not read")
                new = bytearray(state)
                new[fields.flag[key]] = flag
                new[here] = 0
                steps.append((self.current, bytes(new)))
        if state[fields.failures]:
            for key, here in fields.mark_flight.items():
                if state[here]:
                    self._deliver_mark(state, key, here, steps)
        if scope.scratch:
            for flight, visible, name in (
                (fields.plain_flight, fields.plain, "plain"),
                (fields.announced_flight, fields.announced, "announce"),
            ):
                for key, here in flight.items():
                    if state[here]:
                        new = bytearray(state)
                        new[visible[key]] = state[here]
                        new[here] = 0
                        steps.append(((name, *key), bytes(new)))

    def _deliver_mark(self, state: bytes, key: tuple[int, ...], here: int, steps: list[Step]) -> None:
        owner, source, channel = key
        self.current = ("mark", owner, channel, source)
        new = bytearray(state)
        word = self.fields.word[owner, channel]
        if state[here] == 2:
            if not self.rules.detail_before_flag and new[word] == WORD_CLEAR:
                raise Violation(Property.STALE, f"rank {owner} sees the flag of rank {source}'s fault before its epoch and site")
            new[here] = 1
            new[word] = max(new[word], WORD_DETAIL)
        else:
            new[here] = 0
            new[word] = WORD_SET
        steps.append((self.current, bytes(new)))
