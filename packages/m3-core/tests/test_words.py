from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from m3_core import words

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)


@given(U32, U32)
def test_pair_round_trip(value: int, tag: int) -> None:
    word = words.pack_pair(value, tag)
    assert 0 <= word < 2**64
    assert (words.pair_word_value(word), words.pair_word_tag(word)) == (value, tag)


@given(U16, U16, U16, U16)
def test_triple_round_trip(first: int, second: int, third: int, tag: int) -> None:
    word = words.pack_triple(first, second, third, tag)
    assert 0 <= word < 2**64
    assert [words.triple_word_value(word, index) for index in range(3)] == [first, second, third]
    assert words.triple_word_tag(word) == tag


def test_bit_positions() -> None:
    assert words.pack_pair(0x89ABCDEF, 0x01234567) == 0x0123456789ABCDEF
    assert words.pack_triple(0xCDEF, 0x89AB, 0x4567, 0x0123) == 0x0123456789ABCDEF
    assert words.pack_bf16_pair(0xCDEF, 0x89AB) == 0x89ABCDEF


@given(st.integers(0, 2**64 - 1))
def test_every_word_has_one_reading(word: int) -> None:
    assert words.pack_pair(words.pair_word_value(word), words.pair_word_tag(word)) == word
    thirds = [words.triple_word_value(word, index) for index in range(3)]
    assert words.pack_triple(*thirds, words.triple_word_tag(word)) == word
