"""The 64-bit words that carry data and tag together.

A reader that sees the tag has the value, because one naturally aligned 64-bit access is indivisible. Words are little-endian in memory.

- value pair: bits 0-31 a value (int32, fp32, or two bf16, the lower column in the lower half), bits 32-63 the tag.
- triple pair: bits 0-47 three bf16 of ascending columns, bits 48-63 the tag.
"""

from __future__ import annotations

from m3_core.formulas import Word32, Word64, formula


@formula
def pack_pair(value: Word32, tag: Word32) -> Word64:
    """A value pair."""
    return (Word64(tag) << 32) | Word64(value)


@formula
def pair_word_value(word: Word64) -> Word32:
    """The value bits of a value pair."""
    return Word32(word & 4294967295)


@formula
def pair_word_tag(word: Word64) -> Word32:
    """The tag of a value pair."""
    return Word32(word >> 32)


@formula
def pack_triple(first: Word32, second: Word32, third: Word32, tag: Word32) -> Word64:
    """A triple pair of three 16-bit patterns and a 16-bit tag."""
    return (Word64(tag) << 48) | (Word64(third) << 32) | (Word64(second) << 16) | Word64(first)


@formula
def triple_word_value(word: Word64, index: int) -> Word32:
    """The 16-bit pattern of column ``index`` (0, 1 or 2) of a triple pair."""
    return Word32((word >> (16 * index)) & 65535)


@formula
def triple_word_tag(word: Word64) -> Word32:
    """The tag of a triple pair."""
    return Word32(word >> 48)


@formula
def pack_bf16_pair(lower: Word32, upper: Word32) -> Word32:
    """Two bf16 patterns of ascending columns as the value of a pair."""
    return (upper << 16) | lower
