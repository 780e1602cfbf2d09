"""Proof that every directed pair of ranks works: a nonce is written through each mapping and read back on both sides.

An interface may report success and still map nothing, the wrong buffer, or memory whose stores never arrive. Each rank therefore
writes two words into every buffer, its own included: ``8 * rank`` bytes from the start and from the last ``8 * world_size`` bytes, so
that a mapping that is too short is found as well. The values depend on writer, reader, place and a number drawn for this construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WORD_BYTES = 8
_MASK = (1 << 64) - 1


class WordAccess(Protocol):
    """Loads and stores of one 64-bit word, in the way that the kernels do them."""

    def write_word(self, address: int, value: int) -> None:
        """Store one aligned word."""
        ...

    def read_word(self, address: int) -> int:
        """Load one aligned word."""
        ...


def nonce(seed: int, writer: int, reader: int, place: int) -> int:
    """The word that ``writer`` leaves at ``place`` (0 or 1) of ``reader``'s buffer: never 0, and different for each of the four.

    The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words.
    """
    word = (seed + 0x9E3779B97F4A7C15 * (1 + place + 2 * (reader + 64 * writer))) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return (word ^ (word >> 31)) or 1


def places(writer: int, world_size: int, nbytes: int) -> tuple[int, int]:
    """Byte offsets at which ``writer`` leaves its two words in a buffer of ``nbytes``."""
    return WORD_BYTES * writer, nbytes - WORD_BYTES * (world_size - writer)


def write(access: WordAccess, seed: int, rank: int, addresses: Sequence[int], nbytes: int) -> None:
    """Leave this rank's words in every buffer."""
    for reader, address in enumerate(addresses):
        for place, offset in enumerate(places(rank, len(addresses), nbytes)):
            access.write_word(address + offset, nonce(seed, rank, reader, place))


def read(access: WordAccess, seed: int, rank: int, local: int, addresses: Sequence[int], nbytes: int) -> list[str]:
    """Look for every rank's words in the own buffer, and for the own words in every buffer.

    Only once all ranks have written.

    Args:
        access: how to load.
        seed: the number drawn for this construction.
        rank: this rank.
        local: address of the own buffer as its owner sees it.
        addresses: every buffer's address as this rank's kernels see it.
        nbytes: size of each buffer.

    Returns:
        One sentence for each directed pair that does not work, naming it; empty if all do.
    """
    problems = []
    world_size = len(addresses)
    for writer in range(world_size):
        for place, offset in enumerate(places(writer, world_size, nbytes)):
            found, expected = access.read_word(local + offset), nonce(seed, writer, rank, place)
            if found != expected:
                problems.append(
                    f"pair {writer} -> {rank}: rank {writer} wrote {expected:#018x}, rank {rank} finds {found:#018x} at byte {offset}"
                )
    for reader, address in enumerate(addresses):
        for place, offset in enumerate(places(rank, world_size, nbytes)):
            found, expected = access.read_word(address + offset), nonce(seed, rank, reader, place)
            if found != expected:
                problems.append(
                    f"pair {rank} -> {reader}: rank {rank} wrote {expected:#018x} and reads back {found:#018x} at byte {offset}"
                )
    return problems


def clear(access: WordAccess, local: int, world_size: int, nbytes: int) -> None:
    """Zero the words that all ranks left in the own buffer. Only once all ranks have read."""
    for writer in range(world_size):
        for offset in places(writer, world_size, nbytes):
            access.write_word(local + offset, 0)
