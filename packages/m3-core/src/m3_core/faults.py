"""The fault word: what failed, where, at which epoch, and what to tell the user.

A channel's fault is four int32 at byte 0 of its peer buffer: ``set, rank, epoch, site``. A rank that gives up stores them on every rank as
two 64-bit words, ``[epoch, site]`` first and ``[1, rank]`` second, so that whoever sees ``set`` also sees the rest. Faults are sticky: a
reset does not clear them, only a restart does. If several ranks fail at once the two words may come from different ones; each of
them did fail.

The site word holds the site's number in bits 0-7, one more than the peer that was waited for in bits 8-15, and one more than the layer in
bits 16-30; 0 in a field means unknown. A rank that writes the plain site number is therefore understood too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import Enum, unique

import attrs

from m3_core.errors import ConfigurationError
from m3_core.formulas import formula

SITE_BITS = 8
PEER_BITS = 8
LAYER_BITS = 15
HOST_EPOCH = -1
MAX_FAULT_PEER = 2**PEER_BITS - 2
MAX_FAULT_LAYER = 2**LAYER_BITS - 2

_WORDS = struct.Struct("<4i")


@formula
def site_word(site: int, peer: int, layer: int) -> int:
    """The site word of a fault; ``peer`` and ``layer`` may be -1 for unknown."""
    return site | ((peer + 1) << SITE_BITS) | ((layer + 1) << (SITE_BITS + PEER_BITS))


@formula
def site_word_site(word: int) -> int:
    """The site's number."""
    return word & ((1 << SITE_BITS) - 1)


@formula
def site_word_peer(word: int) -> int:
    """The peer that was waited for, or -1."""
    return ((word >> SITE_BITS) & ((1 << PEER_BITS) - 1)) - 1


@formula
def site_word_layer(word: int) -> int:
    """The layer, or -1."""
    return ((word >> (SITE_BITS + PEER_BITS)) & ((1 << LAYER_BITS) - 1)) - 1


@unique
class Site(Enum):
    """Where a launch gives up; the value is the number in the site word."""

    HOST = 0
    REDUCE = 1
    NORM = 2
    ROUTER = 3
    ROUTE = 4
    TABLE = 5
    UP = 6
    DOWN = 7
    FINAL = 8
    EPOCH = 9
    WRAP = 10
    HANDSHAKE = 11
    INJECT = 12
    PEER = 13

    @property
    def is_wait(self) -> bool:
        """Whether a launch gives up here because a wait ran out; otherwise because of an event."""
        return _SITE_TEXT[self].is_wait

    @property
    def waited_for(self) -> str:
        """What the launch waited for; for a site that is no wait, the event it met."""
        return _SITE_TEXT[self].what

    @property
    def advice(self) -> str:
        """What the user can do."""
        return _SITE_TEXT[self].advice


@attrs.frozen
class _SiteText:
    is_wait: bool
    what: str
    advice: str


_PEER_ADVICE = (
    "look at the peer's log first: it was late, stopped or never launched; if all ranks are alive, "
    "check that they ran the same steps, and raise wait_seconds for a machine that stalls"
)
_GRID_ADVICE = (
    "a block of the same launch did not come: check that the whole grid is resident at once (nothing else may hold the device), "
    "and raise wait_seconds under a debugger or profiler"
)

_SITE_TEXT: dict[Site, _SiteText] = {
    Site.HOST: _SiteText(False, "its host aborted the step", "that rank's log holds the exception that made its host abort"),
    Site.REDUCE: _SiteText(True, "the peers' attention output (triples)", _PEER_ADVICE),
    Site.NORM: _SiteText(True, "the sums of squares of the row", _GRID_ADVICE),
    Site.ROUTER: _SiteText(True, "the normalised activations", _GRID_ADVICE),
    Site.ROUTE: _SiteText(True, "the router's logits of the row", _GRID_ADVICE),
    Site.TABLE: _SiteText(True, "the picked experts of all rows", _GRID_ADVICE),
    Site.UP: _SiteText(True, "the expert's input", _GRID_ADVICE),
    Site.DOWN: _SiteText(True, "the experts' intermediate activations", _GRID_ADVICE),
    Site.FINAL: _SiteText(True, "the peers' expert output (value pairs)", _PEER_ADVICE),
    Site.EPOCH: _SiteText(True, "the marks of all blocks of the launch", _GRID_ADVICE),
    Site.WRAP: _SiteText(
        False,
        "its epoch is at the limit, and the launch would reuse tags",
        "a collective reset did not run in time: call output_step once per sampled step on every rank, "
        "and keep dummy and capture runs within the epoch budget's room",
    ),
    Site.HANDSHAKE: _SiteText(True, "the peers' fault flags at the end of the step", _PEER_ADVICE),
    Site.INJECT: _SiteText(False, "a fault was injected", "unset fault injection"),
    Site.PEER: _SiteText(False, "it reported its failure at the end of the step", "that rank's log holds the cause"),
}


@attrs.frozen
class Fault:
    """The fault word of a channel.

    Attributes:
        failed: whether any rank failed.
        rank: the rank that failed; for site PEER the peer that reported it; 0 while not failed.
        epoch: the epoch of the launch, -1 if the host aborted.
        site: where it gave up; None for a number that this version does not know.
        peer: the rank that was waited for, None if unknown or none.
        layer: the layer's index, None if unknown.
        site_number: the raw number, as written.

    Raises:
        ConfigurationError: if a field does not fit its bits.
    """

    failed: bool
    rank: int
    epoch: int
    site: Site | None
    peer: int | None = None
    layer: int | None = None
    site_number: int = attrs.field(default=attrs.Factory(lambda self: self.site.value if self.site else 0, takes_self=True))

    def __attrs_post_init__(self) -> None:
        for name, value, limit in (("peer", self.peer, MAX_FAULT_PEER), ("layer", self.layer, MAX_FAULT_LAYER)):
            if value is not None and not 0 <= value <= limit:
                raise ConfigurationError(f"{name} is {value}; a fault word holds 0 to {limit}, or None")
        for name, value in (("rank", self.rank), ("epoch", self.epoch)):
            if not -(2**31) <= value < 2**31:
                raise ConfigurationError(f"{name} is {value}; a fault word holds 32-bit signed numbers")
        if not 0 <= self.site_number < 2**SITE_BITS:
            raise ConfigurationError(f"site_number is {self.site_number}; a fault word holds 0 to {2**SITE_BITS - 1}")
        if self.site is not None and self.site.value != self.site_number:
            raise ConfigurationError(
                f"site is {self.site.name} ({self.site.value}) but site_number is {self.site_number}; leave site_number out"
            )
        if self.site is None and self.site_number in _KNOWN:
            raise ConfigurationError(f"site is None but {self.site_number} is {Site(self.site_number).name}; pass that site")

    @classmethod
    def none(cls) -> Fault:
        """No fault: 16 zero bytes."""
        return cls(False, 0, 0, Site.HOST)

    @classmethod
    def host_abort(cls, rank: int) -> Fault:
        """What a host writes on every rank when it aborts: 1, rank, -1, 0."""
        return cls(True, rank, HOST_EPOCH, Site.HOST)

    def encode(self) -> bytes:
        """The 16 bytes of the error words, little-endian int32 ``set, rank, epoch, site word``."""
        peer = -1 if self.peer is None else self.peer
        layer = -1 if self.layer is None else self.layer
        return _WORDS.pack(int(self.failed), self.rank, self.epoch, site_word(self.site_number, peer, layer))

    @classmethod
    def decode(cls, words: bytes | bytearray | memoryview) -> Fault:
        """Read the error words from the first 16 bytes of ``words``; any bit pattern has a meaning.

        Raises:
            ConfigurationError: if there are fewer than 16 bytes.
        """
        if len(words) < _WORDS.size:
            raise ConfigurationError(f"{len(words)} bytes cannot hold a fault word; pass at least {_WORDS.size}")
        failed, rank, epoch, word = _WORDS.unpack(bytes(words[: _WORDS.size]))
        number, peer, layer = site_word_site(word), site_word_peer(word), site_word_layer(word)
        return cls(
            failed=failed != 0,
            rank=rank,
            epoch=epoch,
            site=Site(number) if number in _KNOWN else None,
            peer=None if peer < 0 else peer,
            layer=None if layer < 0 else layer,
            site_number=number,
        )

    def words(self) -> tuple[int, int]:
        """The two 64-bit words in the order in which they are stored: byte 8 (epoch, site word) first, then byte 0 (set, rank)."""
        encoded = self.encode()
        return int.from_bytes(encoded[8:16], "little"), int.from_bytes(encoded[0:8], "little")

    def describe(self, layer_names: Mapping[int, str] | None = None) -> str:
        """One sentence for the user: rank, layer, stage, epoch, peer, what was waited for, and advice.

        Args:
            layer_names: names of layers by index; a layer without a name is given by its index.
        """
        if not self.failed:
            return "no fault"
        where = []
        if self.layer is not None:
            name = (layer_names or {}).get(self.layer)
            where.append(f"layer {self.layer} ({name})" if name else f"layer {self.layer}")
        if self.site is None:
            where.append(f"unknown site {self.site_number}")
            remedy = "its version of m3 differs from this one: install the same on every rank"
            return f"rank {self.rank} failed at {', '.join(where)}, epoch {self.epoch}; {remedy}"
        where.append(f"stage {self.site.name}")
        if self.epoch != HOST_EPOCH:
            where.append(f"epoch {self.epoch}")
        peer = "" if self.peer is None or not self.site.is_wait else f" from rank {self.peer}"
        what = f"waited for {self.site.waited_for}{peer} and gave up" if self.site.is_wait else self.site.waited_for
        return f"rank {self.rank} failed at {', '.join(where)}: {what}; {self.site.advice}"


_KNOWN = frozenset(site.value for site in Site)
