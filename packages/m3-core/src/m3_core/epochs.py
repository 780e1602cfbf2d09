"""Epochs, the tags made from them, and the budget that keeps tags from repeating.

An *epoch* counts the launches of one channel since its last reset, on the device; every rank's epoch moves alike. The half of the peer
buffer that a launch writes is ``parity(epoch)``. A half therefore sees one launch in ``PARITIES``, and a triple's tag repeats after
``PARITIES * 2**TRIPLE_TAG_BITS`` launches: ``TAG_PERIOD``. A launch at or past ``EPOCH_LIMIT``, below that period, refuses to run, and a
collective reset falls long before it.

A cleared word carries tag 0. No launch below ``EPOCH_LIMIT`` makes tag 0, so that a cleared word is never taken for data.
"""

from __future__ import annotations

import attrs

from m3_core.errors import ConfigurationError
from m3_core.formulas import Word32, ceil_div, formula

PARITIES = 2
PAIR_TAG_BITS = 32
TRIPLE_TAG_BITS = 16


@formula
def parity_of(epoch: int, parities: int) -> int:
    """The half of the peer buffer that the launch ``epoch`` writes and reads, for any number of halves."""
    return epoch % parities


@formula
def pair_tag_of(epoch: int, bits: int) -> Word32:
    """Tag of a value pair for any tag width: ``epoch + 1`` in ``bits`` bits."""
    return (Word32(epoch) + 1) & (4294967295 >> (32 - bits))


@formula
def triple_tag_of(epoch: int, parities: int, bits: int) -> Word32:
    """Tag of a triple pair for any tag width and number of halves: one more than the launches that this half has seen, in ``bits`` bits."""
    return (Word32(epoch // parities) + 1) & (4294967295 >> (32 - bits))


@formula
def tag_reached_of(seen: Word32, wanted: Word32, bits: int) -> bool:
    """Whether a counter of ``bits`` bits that shows ``seen`` has come to ``wanted`` or at most half a period past it.

    The one modular comparison of the protocol. It holds on both sides of a wrap as long as the two are less than half a period apart.
    """
    return ((seen - wanted) & (4294967295 >> (32 - bits))) < (Word32(1) << (bits - 1))


@attrs.frozen
class TagArithmetic:
    """The tag arithmetic for given widths; ``PUBLISHED`` is the one that ships, the model checker uses narrow ones.

    Attributes:
        pair_bits: bits of a value pair's tag, 1 to 32.
        triple_bits: bits of a triple pair's tag, 1 to 16; not more than ``pair_bits``.
        parities: halves of the peer buffer.
        limit_slack: launches by which ``limit`` stays below ``period``. At least 1 launch per half: the last of the period make tag 0.
        reset_slack: launches by which the reset threshold stays below ``period``; more than ``limit_slack``.

    Raises:
        ConfigurationError: if a width or a slack cannot be safe.
    """

    pair_bits: int
    triple_bits: int
    parities: int
    limit_slack: int
    reset_slack: int

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.triple_bits <= 16:
            raise ConfigurationError(f"triple_bits is {self.triple_bits}; a triple leaves 1 to 16 bits of its word for the tag")
        if not self.triple_bits <= self.pair_bits <= 32:
            raise ConfigurationError(f"pair_bits is {self.pair_bits}; pass {self.triple_bits} (triple_bits) to 32")
        if self.parities < 1:
            raise ConfigurationError(f"parities is {self.parities}; a peer buffer has at least one half")
        if not self.parities <= self.limit_slack < self.period:
            raise ConfigurationError(
                f"limit_slack is {self.limit_slack}; pass {self.parities} to {self.period - 1}: "
                f"the last {self.parities} launches of a period make tag 0"
            )
        if not self.limit_slack < self.reset_slack < self.period:
            raise ConfigurationError(
                f"reset_slack is {self.reset_slack}; pass {self.limit_slack + 1} to {self.period - 1}: a reset falls before the limit"
            )
        if self.limit >= 2**self.pair_bits:
            raise ConfigurationError(
                f"the limit {self.limit} does not fit a pair tag of {self.pair_bits} bits; widen pair_bits or raise limit_slack"
            )

    @property
    def period(self) -> int:
        """Launches after which a half's triple tags repeat."""
        return self.parities << self.triple_bits

    @property
    def limit(self) -> int:
        """First epoch at which a launch refuses to run."""
        return self.period - self.limit_slack

    @property
    def reset_launches(self) -> int:
        """Counted launches after which a reset is due."""
        return self.period - self.reset_slack

    def parity(self, epoch: int) -> int:
        """The half of launch ``epoch``."""
        return parity_of(epoch, self.parities)

    def pair_tag(self, epoch: int) -> int:
        """Tag of a value pair."""
        return pair_tag_of(epoch, self.pair_bits)

    def triple_tag(self, epoch: int) -> int:
        """Tag of a triple pair."""
        return triple_tag_of(epoch, self.parities, self.triple_bits)

    def is_past_limit(self, epoch: int) -> bool:
        """Whether a launch that starts at ``epoch`` must refuse."""
        return epoch >= self.limit


# The launches between the reset threshold and the limit are room for uncounted ones (dummy and capture runs, the rest of a step).
PUBLISHED = TagArithmetic(PAIR_TAG_BITS, TRIPLE_TAG_BITS, PARITIES, limit_slack=2**12, reset_slack=2**14)

TAG_PERIOD = PUBLISHED.period
EPOCH_LIMIT = PUBLISHED.limit
RESET_LAUNCHES = PUBLISHED.reset_launches


@formula
def parity(epoch: int) -> int:
    """The half of the peer buffer that launch ``epoch`` writes and reads: 0 or 1."""
    return parity_of(epoch, PARITIES)


@formula
def pair_tag(epoch: int) -> Word32:
    """Tag of a value pair of launch ``epoch``: ``epoch + 1``, 32 bits."""
    return pair_tag_of(epoch, PAIR_TAG_BITS)


@formula
def triple_tag(epoch: int) -> Word32:
    """Tag of a triple pair of launch ``epoch``: ``((epoch >> 1) + 1) & 0xFFFF``."""
    return triple_tag_of(epoch, PARITIES, TRIPLE_TAG_BITS)


@formula
def tag_reached(seen: Word32, wanted: Word32) -> bool:
    """Whether a 32-bit counter that shows ``seen`` has come to ``wanted``, over a wrap too; see ``tag_reached_of``."""
    return tag_reached_of(seen, wanted, PAIR_TAG_BITS)


@formula
def epoch_is_past_limit(epoch: int) -> bool:
    """Whether a launch that starts at ``epoch`` must refuse (site WRAP)."""
    return epoch >= EPOCH_LIMIT


@attrs.frozen
class EpochBudget:
    """When a reset falls, for steps of ``layers`` launches each.

    The host counts sampled steps, not launches: it does not see the launches of a graph replay. A reset is due after the first sampled step
    by which the counted launches reach ``limit - uncounted``. That step overshoots the threshold by up to ``layers - 1`` launches, so
    what surely fits beside the counted ones is ``room``, which is that much smaller than ``uncounted``; ``reset_due`` takes the
    uncounted launches that really happened and moves the reset forward when they leave less than a step.

    Attributes:
        layers: launches a step, at least 1.
        uncounted: launches set aside for runs that no sampled step counts (dummy and capture runs).
        arithmetic: the tag arithmetic; the published one unless a checker passes another.

    Raises:
        ConfigurationError: if the launches up to the reset could pass the limit, or a value is out of range.
    """

    layers: int
    uncounted: int = EPOCH_LIMIT - RESET_LAUNCHES
    arithmetic: TagArithmetic = PUBLISHED

    def __attrs_post_init__(self) -> None:
        limit = self.arithmetic.limit
        for name, value in (("layers", self.layers), ("uncounted", self.uncounted)):
            if type(value) is not int:
                raise ConfigurationError(f"{name} is {value!r}; a whole number of launches is needed")
        if not 1 <= self.layers < limit:
            raise ConfigurationError(f"layers is {self.layers}; a step has 1 to {limit - 1} launches (epoch limit {limit})")
        if not 0 <= self.uncounted < limit:
            raise ConfigurationError(f"uncounted is {self.uncounted}; pass 0 to {limit - 1} launches (epoch limit {limit})")
        if self.room < 0:
            raise ConfigurationError(
                f"{self.layers} launches a step with {self.uncounted} uncounted: the reset falls after "
                f"{self.reset_step * self.layers} launches, past the limit {limit}; set aside at least {self.layers - 1}"
            )

    @property
    def reset_launches(self) -> int:
        """Counted launches from which on a reset is due."""
        return self.arithmetic.limit - self.uncounted

    @property
    def reset_step(self) -> int:
        """The sampled step since the last reset after which the next reset falls (57 layers: 2013)."""
        return ceil_div(self.reset_launches, self.layers)

    @property
    def room(self) -> int:
        """Uncounted launches that fit without moving the reset (57 layers: 12,235)."""
        return self.arithmetic.limit - self.reset_step * self.layers

    def reset_due(self, steps_since_reset: int, uncounted_launches: int = 0) -> bool:
        """Whether to reset now, after ``steps_since_reset`` sampled steps; the same on every rank if its arguments are.

        Args:
            steps_since_reset: sampled steps since the last reset, stock-routed ones too.
            uncounted_launches: launches since the last reset that belong to no sampled step, as far as the host knows.
        """
        if steps_since_reset < 0 or uncounted_launches < 0:
            raise ConfigurationError(
                f"steps_since_reset is {steps_since_reset}, uncounted_launches {uncounted_launches}; neither can be negative"
            )
        next_step_ends = (steps_since_reset + 1) * self.layers + uncounted_launches
        return steps_since_reset >= self.reset_step or next_step_ends > self.arithmetic.limit
