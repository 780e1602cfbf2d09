"""A rank of the simulator: its host, and the blocks of its launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from m3_core.agreement import Verdict
from m3_core.check.scheduler import Actor, Wait, Woken
from m3_core.check.traces import Event, Record, Stage
from m3_core.epochs import EpochBudget
from m3_core.faults import Fault, Site
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.layout import ERROR_WORDS_BYTES
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.phase import CollectivePhase, Phase, PhaseAction
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Machine
from m3_core.words import (
    pack_bf16_pair,
    pack_pair,
    pack_triple,
    pair_word_tag,
    pair_word_value,
    triple_word_tag,
    triple_word_value,
)

if TYPE_CHECKING:
    from m3_core.check.simulator import World


class WrongValueError(AssertionError):
    """A rank accepted a word whose payload is not what its peer wrote for this launch."""


def payload(rank: int, channel: int, launches: int, exchange: int, row: int, column: int) -> int:
    """16 bits that differ between ranks, launches, rows and columns as chance would have it; ``launches`` counts over resets."""
    where = ((((launches * 8 + rank) * 8 + channel) * 2 + exchange) * 64 + row) * 4096 + column
    mixed = (where + 1) * 0x9E3779B97F4A7C15 % 2**64
    return ((mixed >> 32) * 0xD6E8FEB86659FD93 >> 32) & 0xFFFF


class GaveUp(Exception):
    """The block leaves its launch."""


class Channel:
    """The device state of one channel on one rank."""

    def __init__(self, blocks: int) -> None:
        """Nothing has run."""
        self.epoch = 0
        self.launches = 0
        self.marks = [0] * blocks
        self.ready = [0] * blocks
        self.running = 0
        self.handshake = Machine(HANDSHAKE)
        self.seen_fault = False


class Rank:
    """One rank.

    Attributes:
        rank: its number.
        life: where it is.
        returned: steps whose tokens it returned.
        resumed: resets it resumed from.
        breaks_next_reset: whether its part of the next reset fails.
    """

    def __init__(self, world: World, rank: int) -> None:
        """A rank that has been built."""
        setup = world.setup
        self.world = world
        self.rank = rank
        self.life = Machine(LIFE, Life.READY)
        self.returned = 0
        self.resumed = 0
        self.breaks_next_reset = False
        self.channels = [Channel(setup.blocks) for _ in range(setup.channels)]
        self.budget = EpochBudget(setup.layers, setup.tags.limit - setup.tags.reset_launches, setup.tags)
        self._step = 0
        self._resets = 0

    def _is(self, state: Life) -> bool:
        return self.life.state is state

    # --- memory ----------------------------------------------------------------------------------------------------------------------

    def _note(
        self, stage: Stage, event: Event, channel: int = 0, epoch: int | None = None, block: int | None = None, peer: int | None = None
    ) -> None:
        self.world.record(Record(self.rank, stage, event, epoch, channel, block, peer))

    def _is_set(self, channel: int) -> bool:
        start = self.world.channels.offset(channel)
        return self.world.memory[self.rank][start] != 0

    def fault(self, channel: int = 0) -> Fault:
        """The fault word of a channel, as the rank's host reads it."""
        start = self.world.channels.offset(channel)
        return Fault.decode(self.world.memory[self.rank][start : start + ERROR_WORDS_BYTES])

    def _set_fault(self, channel: int, fault: Fault, *, everywhere: bool = True) -> None:
        """Store the fault on every rank, detail first; the own rank's is visible at once."""
        world = self.world
        start = world.channels.offset(channel)
        detail, flag = fault.words()
        world.memory[self.rank][start : start + ERROR_WORDS_BYTES] = fault.encode()
        world.scheduler.changed(self.rank)
        for peer in range(world.setup.ranks):
            if everywhere and peer != self.rank:
                world.store_ordered(self.rank, peer, (start + 8, detail), (start, flag))

    def _wait(self, channel: int, ready: Callable[[], bool]) -> Wait:
        return Wait(ready, self.world.setup.wait_seconds, lambda: self._is_set(channel))

    # --- a launch --------------------------------------------------------------------------------------------------------------------

    def _block(self, channel: int, block: int, layer: int) -> Actor:
        """One block of a launch."""
        world = self.world
        device = self.channels[channel]
        yield world.scheduler.random.expovariate(1e6)
        epoch = device.epoch
        last = layer == world.setup.layers - 1
        with contextlib.suppress(GaveUp):
            yield from self._work(channel, block, layer, epoch)
        if block == 0 and last:
            yield from self._trade_flags(channel, epoch)
        device.running -= 1
        world.scheduler.changed(self.rank)

    def _work(self, channel: int, block: int, layer: int, epoch: int) -> Generator[float | Wait, Woken | None, None]:
        world, device, tags = self.world, self.channels[channel], self.world.setup.tags
        if self._is_set(channel):
            raise GaveUp
        if tags.is_past_limit(epoch):
            self._note(Stage.LAUNCH, Event.FAULT, channel, epoch, block)
            self._set_fault(channel, Fault(True, self.rank, epoch, Site.WRAP, layer=layer))
            raise GaveUp
        for exchange in (0, 1):
            if self._columns(block, exchange):
                yield from self._exchange(channel, block, layer, epoch, exchange)
            if exchange == 0:
                device.ready[block] = epoch + 1
                world.scheduler.changed(self.rank)
                yield from self._await(channel, block, layer, epoch, Site.NORM, Stage.NORM, lambda: min(device.ready) == epoch + 1)
        device.marks[block] = epoch + 1
        world.scheduler.changed(self.rank)
        if block == 0:
            yield from self._await(channel, block, layer, epoch, Site.EPOCH, Stage.FINISH, lambda: min(device.marks) == epoch + 1)
            device.epoch = epoch + 1

    def _exchange(self, channel: int, block: int, layer: int, epoch: int, exchange: int) -> Generator[float | Wait, Woken | None, None]:
        """Push the block's columns to every rank, then read and compare every rank's."""
        world = self.world
        rows = world.rows(self._step)
        pushes, reads, site = ((Stage.PUSH, Stage.REDUCE, Site.REDUCE), (Stage.DOWN, Stage.FINAL, Site.FINAL))[exchange]
        self._note(pushes, Event.BEGIN, channel, epoch, block)
        self._push(channel, block, exchange, epoch, rows)
        yield world.scheduler.random.expovariate(1e6)
        for source in range(world.setup.ranks):
            ready = self._words_ready(channel, block, exchange, epoch, rows, source)
            yield from self._await(channel, block, layer, epoch, site, reads, ready, source)
            self._compare(channel, block, exchange, epoch, rows, source)
        self._note(reads, Event.END, channel, epoch, block)

    def _await(
        self, channel: int, block: int, layer: int, epoch: int, site: Site, stage: Stage, ready: Callable[[], bool], peer: int | None = None
    ) -> Generator[float | Wait, Woken | None, None]:
        """A bounded wait of a launch; leaves the launch on a fault, and raises one at the bound."""
        why = yield self._wait(channel, ready)
        if why is Woken.TIMEOUT:
            self._note(stage, Event.FAULT, channel, epoch, block, peer)
            self._set_fault(channel, Fault(True, self.rank, epoch, site, peer, layer))
        if why is not Woken.DATA:
            raise GaveUp

    def _columns(self, block: int, exchange: int) -> range:
        layout = self.world.layout
        return range(block, layout.column_pairs if exchange else layout.triples, self.world.setup.blocks)

    def _offset(self, channel: int, exchange: int, epoch: int, source: int, row: int, column: int) -> int:
        layout, parity = self.world.layout, self.world.setup.tags.parity(epoch)
        within = layout.ffn_pair(parity, source, row, column) if exchange else layout.attention_pair(parity, source, row, column)
        return self.world.channels.offset(channel) + within

    def _values(self, source: int, channel: int, exchange: int, row: int, column: int) -> list[int]:
        launches = self.channels[channel].launches
        width = 2 if exchange else 3
        return [payload(source, channel, launches, exchange, row, width * column + index) for index in range(width)]

    def _push(self, channel: int, block: int, exchange: int, epoch: int, rows: int) -> None:
        world, tags = self.world, self.world.setup.tags
        for row in range(rows):
            for column in self._columns(block, exchange):
                values = self._values(self.rank, channel, exchange, row, column)
                if exchange:
                    word = pack_pair(pack_bf16_pair(values[0], values[1]), tags.pair_tag(epoch))
                else:
                    word = pack_triple(values[0], values[1], values[2], tags.triple_tag(epoch))
                for peer in range(world.setup.ranks):
                    world.store(self.rank, peer, self._offset(channel, exchange, epoch, self.rank, row, column), word)

    def _words_ready(self, channel: int, block: int, exchange: int, epoch: int, rows: int, source: int) -> Callable[[], bool]:
        world, tags = self.world, self.world.setup.tags
        offsets = [
            self._offset(channel, exchange, epoch, source, row, column) for row in range(rows) for column in self._columns(block, exchange)
        ]
        tag_of, wanted = (pair_word_tag, tags.pair_tag(epoch)) if exchange else (triple_word_tag, tags.triple_tag(epoch))
        return lambda: all(tag_of(world.load(self.rank, offset)) == wanted for offset in offsets)

    def _compare(self, channel: int, block: int, exchange: int, epoch: int, rows: int, source: int) -> None:
        for row in range(rows):
            for column in self._columns(block, exchange):
                word = self.world.load(self.rank, self._offset(channel, exchange, epoch, source, row, column))
                if exchange:
                    value = pair_word_value(word)
                    found = [value & 0xFFFF, value >> 16]
                else:
                    found = [triple_word_value(word, index) for index in range(3)]
                if found != self._values(source, channel, exchange, row, column):
                    raise WrongValueError(
                        f"rank {self.rank} channel {channel} epoch {epoch}: {found} of rank {source}, row {row}, column {column}"
                    )

    def _trade_flags(self, channel: int, epoch: int) -> Generator[float | Wait, Woken | None, None]:
        """The step-end fault exchange, by its table."""
        world, device = self.world, self.channels[channel]
        start = world.channels.offset(channel)
        tag = world.setup.tags.pair_tag(epoch)
        self._trade(channel, epoch, HandshakeEvent.WORD_SET if self._is_set(channel) else HandshakeEvent.WORD_CLEAR)
        missing = list(range(world.setup.ranks))

        def flag(source: int) -> int:
            return world.load(self.rank, start + world.layout.handshake_pair(source))

        def arrived() -> list[int]:
            return [source for source in missing if pair_word_tag(flag(source)) == tag]

        while device.handshake.state is Handshake.POLLING:
            why = yield self._wait(channel, lambda: bool(arrived()))
            if why is Woken.DATA:
                for source in arrived():
                    missing.remove(source)
                    failed = pair_word_value(flag(source)) != 0
                    last = HandshakeEvent.PEER_CLEAR if missing else HandshakeEvent.LAST_PEER_CLEAR
                    self._trade(channel, epoch, HandshakeEvent.PEER_FAILED if failed else last, source)
                    if failed:
                        break
            else:
                late = missing[0] if why is Woken.TIMEOUT else None
                self._trade(channel, epoch, HandshakeEvent.TIMEOUT if why is Woken.TIMEOUT else HandshakeEvent.WORD_SET, late)

    def _trade(self, channel: int, epoch: int, event: HandshakeEvent, peer: int | None = None) -> None:
        world, device = self.world, self.channels[channel]
        start = world.channels.offset(channel)
        unpublished = device.handshake.state is Handshake.UNPUBLISHED
        for action in device.handshake.handle(event):
            if action is HandshakeAction.SET_PEER_LOCALLY:
                assert peer is not None
                self._set_fault(channel, Fault(True, peer, epoch, Site.PEER), everywhere=False)
            elif action is HandshakeAction.SET_HANDSHAKE_ON_ALL:
                self._set_fault(channel, Fault(True, self.rank, epoch, Site.HANDSHAKE, peer))
            else:
                word = pack_pair(action is HandshakeAction.PUBLISH_FAILED, world.setup.tags.pair_tag(epoch))
                for owner in range(world.setup.ranks):
                    world.store(self.rank, owner, start + world.layout.handshake_pair(self.rank), word)
        names = {
            HandshakeEvent.WORD_CLEAR: Event.CLEAR_FLAG,
            HandshakeEvent.WORD_SET: Event.FAILED_FLAG if unpublished else Event.LEAVE,
            HandshakeEvent.PEER_FAILED: Event.PEER_FAILED,
            HandshakeEvent.LAST_PEER_CLEAR: Event.END,
            HandshakeEvent.TIMEOUT: Event.FAULT,
        }
        if event in names:
            self._note(Stage.HANDSHAKE, names[event], channel, epoch, 0, peer)

    # --- the host --------------------------------------------------------------------------------------------------------------------

    def host(self) -> Actor:
        """The rank's host, from its first step to its end."""
        world, setup = self.world, self.world.setup
        since_reset = 0
        while self.returned < setup.steps and self._is(Life.READY):
            yield world.scheduler.random.expovariate(1e5)
            if not self._is(Life.READY):
                return
            if self.budget.reset_due(since_reset):
                yield from self._reset()
                since_reset = 0
                continue
            self._live(LifeEvent.BEGIN_STEP)
            for channel, device in enumerate(self.channels):
                device.running = 1
                world.scheduler.start(self.rank, self._stream(channel))
            yield Wait(self._idle, None)
            if not self._is(Life.STEPPING):
                return
            failed = any(self._is_set(channel) for channel in range(setup.channels))
            self._live(LifeEvent.FAULT_SEEN if failed else LifeEvent.END_STEP)
            since_reset += 1

    def _idle(self) -> bool:
        return all(device.running == 0 for device in self.channels)

    def _stream(self, channel: int) -> Actor:
        """The launches of a step on one channel, one after the other."""
        world, device = self.world, self.channels[channel]
        device.handshake = Machine(HANDSHAKE)
        for layer in range(world.setup.layers):
            if not self._is(Life.STEPPING):
                break
            epoch = device.epoch
            self._note(Stage.LAUNCH, Event.BEGIN, channel, epoch)
            device.running += world.setup.blocks
            for block in range(world.setup.blocks):
                world.scheduler.start(self.rank, self._block(channel, block, layer))
            yield Wait(lambda: device.running == 1, None)
            device.launches += 1
            self._note(Stage.LAUNCH, Event.END if device.epoch > epoch else Event.LEAVE, channel, epoch)
        device.running = 0
        world.scheduler.changed(self.rank)

    def abort(self) -> None:
        """The host aborts, if it can still."""
        if self.life.state in (Life.READY, Life.STEPPING, Life.DRAINING, Life.CLEARING):
            self._live(LifeEvent.ABORT)

    def _live(self, event: LifeEvent) -> None:
        world = self.world
        before = self.life.state
        for action in self.life.handle(event):
            if action is LifeAction.MARK_ALL_RANKS:
                for channel in range(world.setup.channels):
                    self._set_fault(channel, Fault.host_abort(self.rank))
            elif action is LifeAction.RETURN_TOKENS:
                self.returned += 1
        if event is LifeEvent.BEGIN_STEP:
            self._note(Stage.STEP, Event.BEGIN)
        elif event is LifeEvent.END_STEP:
            self._note(Stage.STEP, Event.END)
            self._step += 1
        elif event is LifeEvent.FAULT_SEEN and before is Life.STEPPING:
            self._note(Stage.STEP, Event.DROP)
        elif event is LifeEvent.ABORT:
            self._note(Stage.HOST, Event.ABORT)

    def _reset(self) -> Generator[float | Wait, Woken | None, None]:
        """The reset, by its table."""
        machine = Machine(RESET)
        self._resets += 1
        self._live(LifeEvent.RESET_DUE)
        self._note(Stage.RESET, Event.BEGIN)
        machine.handle(ResetEvent.START)
        for name, done in (("drain", Event.DRAINED), ("clear", Event.CLEARED)):
            yield self.world.scheduler.random.expovariate(1e5)
            if self._is(Life.FAULTED):
                return
            broke = self.breaks_next_reset
            if name == "clear" and not broke:
                self._clear()
            machine.handle(ResetEvent.BROKE if broke else ResetEvent.DONE)
            if broke:
                self._mark_all()
            self._note(Stage.RESET, Event.BROKE if broke else done)
            agreed = yield from self._agree(name, "broke" if broke else None)
            if self._is(Life.FAULTED):
                return
            actions = machine.handle(ResetEvent.AGREED if agreed else ResetEvent.REFUSED)
            if ResetAction.MARK_ALL_RANKS in actions:
                self._mark_all()
            self._note(Stage.RESET, (Event.AGREED if name == "drain" else Event.RESUMED) if agreed else Event.REFUSED)
            if not agreed:
                self._live(LifeEvent.RESET_FAILED)
                return
            self._live(LifeEvent.DRAIN_AGREED if machine.state is Reset.CLEARING else LifeEvent.CLEAR_AGREED)
        self.resumed += 1

    def _mark_all(self) -> None:
        for channel in range(self.world.setup.channels):
            self._set_fault(channel, Fault.host_abort(self.rank))

    def _clear(self) -> None:
        """Zero the own buffer past the fault word of each channel, and what the device keeps."""
        world = self.world
        for channel, device in enumerate(self.channels):
            start = world.channels.offset(channel)
            end = start + world.layout.total_bytes
            world.memory[self.rank][start + ERROR_WORDS_BYTES : end] = bytes(end - start - ERROR_WORDS_BYTES)
            device.epoch = 0
            device.marks = [0] * len(device.marks)
            device.ready = [0] * len(device.ready)

    def _agree(self, name: str, reason: str | None) -> Generator[float | Wait, Woken | None, bool]:
        """One collective phase over messages that arrive at any time, by its table."""
        world, setup = self.world, self.world.setup
        phase = CollectivePhase(name, self.rank, setup.ranks)
        inbox = world.inbox(self.rank, self._resets, name)
        actions = phase.own(reason)
        if PhaseAction.SEND_VERDICT in actions:
            for peer in range(setup.ranks):
                if peer != self.rank:
                    world.send(self.rank, peer, self._resets, name, reason)
        while phase.state in (Phase.GATHERING, Phase.GATHERING_FAILURE):
            why = yield Wait(lambda: any(sender in phase.missing for sender in inbox), setup.wait_seconds)
            if why is Woken.TIMEOUT:
                phase.timeout(setup.wait_seconds)
            else:
                for sender in sorted(set(inbox) & set(phase.missing)):
                    phase.receive(Verdict(sender, inbox[sender]))
        return phase.state is Phase.AGREED
