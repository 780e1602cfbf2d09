"""How a state of the world is packed into bytes, one byte a variable, and how ranks are renamed in it.

A state is a block for each rank, then for each (owner, source) pair of ranks a block of small variables, of visible words, of words on
their way, and of payloads on their way, then what belongs to no rank. Renaming the ranks therefore only moves blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs

from m3_core.check.rules import ATTENTION_ONLY, FFN_ONLY, Rules, Scope

ATTENTION = 0
FFN = 1


@attrs.frozen
class Slot:
    """What a mailbox word's position means."""

    owner: int
    source: int
    channel: int
    exchange: int
    half: int
    row: int
    column: int


@attrs.define
class _Block:
    """Variables that are laid out together."""

    size: int = 0

    def add(self, *shape: int) -> dict[tuple[int, ...], int]:
        """Offsets of a variable's elements in the block."""
        keys = list(itertools.product(*map(range, shape)))
        start = self.size
        self.size += len(keys)
        return {key: start + position for position, key in enumerate(keys)}


class Fields:
    """Byte positions of every variable.

    A word of a mailbox is 0 (cleared), else ``1 + 2 * ghost``, and one more once its reader has accepted it. The ghost (epoch, source,
    channel, exchange) is what the checker knows and the protocol does not. A flag of the handshake is 0, else
    ``1 + 2 * (2 * epoch + failed)``, and one more once accepted.
    """

    def __init__(self, rules: Rules, scope: Scope) -> None:
        """Lay out the variables of ``scope``; the rules say which positions coincide."""
        ranks, channels, blocks = scope.ranks, scope.channels, len(scope.blocks)
        self.ranks, self.channels, self.blocks = ranks, channels, blocks
        self._rules = rules
        # Under one slot for all sources a word's position does not tell who wrote it.
        self._named = 1 if rules.slot_per_source else ranks

        own = _Block()
        single = [own.add() for _ in range(6)]
        by_channel = [own.add(channels) for _ in range(4)]
        by_block = [own.add(channels, blocks) for _ in range(2)]
        scratch = [own.add(channels, blocks if scope.scratch else 0) for _ in range(4)]
        self._own = own.size

        def each_rank(offsets: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
            return {(rank, *key): rank * own.size + offset for rank in range(ranks) for key, offset in offsets.items()}

        self.life, self.reset, self.steps, self.stopped, self.fate, self.cleared = (
            [each_rank(o)[rank,] for rank in range(ranks)] for o in single
        )
        self.launch, self.epoch, self.exchange, self.word = map(each_rank, by_channel)
        self.pc, self.seen = map(each_rank, by_block)
        self.plain, self.plain_flight, self.announced, self.announced_flight = map(each_rank, scratch)

        pair = _Block()
        shared = [pair.add(channels) for _ in range(3)]
        verdicts = pair.add(2)
        self._pair = pair.size
        self._pair_start = ranks * own.size

        def each_pair(offsets: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
            return {
                (owner, source, *key): self._pair_start + (owner * ranks + source) * pair.size + offset
                for owner, source in itertools.product(range(ranks), repeat=2)
                for key, offset in offsets.items()
            }

        # [owner, source, channel]
        self.mark_flight, self.flag, self.flag_flight = map(each_pair, shared)
        # [reader, sender, phase]
        self.verdict = each_pair(verdicts)

        self.columns = (
            [block for block, kind in enumerate(scope.blocks) if kind != FFN_ONLY],
            [block for block, kind in enumerate(scope.blocks) if kind != ATTENTION_ONLY],
        )
        shape = (ranks, ranks, channels, 2, 2, max(scope.rows), max(map(len, self.columns)))
        self.slots = [Slot(*key) for key in itertools.product(*map(range, shape))]
        self._position = {attrs.astuple(slot): position for position, slot in enumerate(self.slots)}
        self._words = len(self.slots) // ranks**2
        self.mail_size = len(self.slots)
        self.mail_start = self._pair_start + ranks**2 * pair.size
        self.flight_start = self.mail_start + self.mail_size
        self.payload_start = self.flight_start + self.mail_size
        self._tail = self.payload_start + (0 if rules.payload_rides_with_tag else self.mail_size)
        self.failures, self.budget_stops, self.budget_timeouts, self.budget_aborts = range(self._tail, self._tail + 4)
        self.size = self._tail + 4

    def slot(self, owner: int, channel: int, exchange: int, half: int, source: int, row: int, column: int) -> int:
        """Position of a mailbox word relative to ``mail_start``, under the layout that the rules describe."""
        rules = self._rules
        return self._position[
            owner,
            source if rules.slot_per_source else 0,
            channel if rules.buffer_per_channel else 0,
            exchange if rules.region_per_exchange else 0,
            half if rules.region_per_parity else 0,
            row,
            column,
        ]

    # --- words -----------------------------------------------------------------------------------------------------------------------

    def pack(self, epoch: int, source: int, channel: int, exchange: int) -> int:
        """An unread word."""
        return 1 + 2 * (((epoch * self._named + source % self._named) * self.channels + channel) * 2 + exchange)

    def unpack(self, word: int) -> tuple[int, int, int]:
        """Epoch, channel and exchange of a word that is not 0."""
        ghost, exchange = divmod((word - 1) // 2, 2)
        ghost, channel = divmod(ghost, self.channels)
        return ghost // self._named, channel, exchange

    # --- renaming ranks --------------------------------------------------------------------------------------------------------------

    def canonical(self) -> Callable[[bytes], bytes]:
        """A function that maps all states which differ in the names of ranks only to one of them.

        Ranks are ordered by their own blocks; only ranks that are equal there are tried in every order.
        """
        ranks, own = range(self.ranks), self._own
        blocks = [slice(rank * own, rank * own + own) for rank in ranks]
        moves = {order: self._moves(order) for order in itertools.permutations(ranks)}
        # For an order and which neighbours in it are equal: every order that is as good.
        equals: dict[tuple[tuple[int, ...], tuple[bool, ...]], list[list[slice]]] = {}
        for ties in itertools.product((False, True), repeat=self.ranks - 1):
            groups = [0, *itertools.accumulate(not tie for tie in ties)]
            for order in moves:
                alike = [
                    moves[tuple(order[place] for place in places)]
                    for places in itertools.permutations(ranks)
                    if [groups[place] for place in places] == groups
                ]
                equals[order, ties] = alike
        join = b"".join

        def smallest(state: bytes) -> bytes:
            keys = [state[block] for block in blocks]
            order = tuple(sorted(ranks, key=keys.__getitem__))
            ties = tuple([keys[order[place]] == keys[order[place + 1]] for place in range(len(order) - 1)])
            alike = equals[order, ties]
            if len(alike) == 1:
                return join([state[move] for move in alike[0]])
            return min([join([state[move] for move in chosen]) for chosen in alike])

        return smallest

    def _moves(self, permutation: tuple[int, ...]) -> list[slice]:
        """The blocks of a state in the order in which they stand once ``permutation[new]`` is called ``new``."""

        def blocks(start: int, size: int) -> list[slice]:
            places = [start + (owner * self.ranks + source) * size for owner in permutation for source in permutation]
            return [slice(place, place + size) for place in places]

        moves = [slice(rank * self._own, (rank + 1) * self._own) for rank in permutation]
        moves += blocks(self._pair_start, self._pair) + blocks(self.mail_start, self._words) + blocks(self.flight_start, self._words)
        if self._tail > self.payload_start:
            moves += blocks(self.payload_start, self._words)
        return [*moves, slice(self._tail, self.size)]
