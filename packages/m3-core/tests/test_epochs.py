from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core import epochs
from m3_core.epochs import EPOCH_LIMIT, PUBLISHED, RESET_LAUNCHES, TAG_PERIOD, EpochBudget, TagArithmetic
from m3_core.errors import ConfigurationError

EPOCHS = st.integers(0, EPOCH_LIMIT - 1)


def test_published_numbers() -> None:
    assert (epochs.PARITIES, epochs.PAIR_TAG_BITS, epochs.TRIPLE_TAG_BITS) == (2, 32, 16)
    assert (TAG_PERIOD, EPOCH_LIMIT, RESET_LAUNCHES) == (2**17, 126_976, 114_688)


def test_first_and_last_tags() -> None:
    assert [epochs.parity(e) for e in range(4)] == [0, 1, 0, 1]
    assert [epochs.pair_tag(e) for e in (0, 1, EPOCH_LIMIT - 1)] == [1, 2, EPOCH_LIMIT]
    assert [epochs.triple_tag(e) for e in (0, 1, 2, 3)] == [1, 1, 2, 2]
    assert [epochs.triple_tag(e) for e in (TAG_PERIOD - 3, TAG_PERIOD - 2, TAG_PERIOD - 1, TAG_PERIOD)] == [65535, 0, 0, 1]


@given(EPOCHS)
def test_no_launch_below_the_limit_makes_the_cleared_tag(epoch: int) -> None:
    assert epochs.pair_tag(epoch) != 0
    assert epochs.triple_tag(epoch) != 0


@given(EPOCHS, EPOCHS)
def test_half_and_triple_tag_name_a_launch_below_the_limit(first: int, second: int) -> None:
    same = (epochs.parity(first), epochs.triple_tag(first)) == (epochs.parity(second), epochs.triple_tag(second))
    assert same == (first == second)


@given(st.integers(0, 2**30))
def test_triple_tags_repeat_after_the_period(epoch: int) -> None:
    assert epochs.triple_tag(epoch) == epochs.triple_tag(epoch + TAG_PERIOD)
    assert epochs.parity(epoch) == epochs.parity(epoch + TAG_PERIOD)


def test_limit() -> None:
    assert not epochs.epoch_is_past_limit(EPOCH_LIMIT - 1)
    assert epochs.epoch_is_past_limit(EPOCH_LIMIT)


@given(st.integers(1, 32).flatmap(lambda bits: st.tuples(st.just(bits), st.integers(0, 2**bits - 1), st.integers(0, 2**bits - 1))))
def test_modular_comparison_against_its_definition(case: tuple[int, int, int]) -> None:
    bits, wanted, steps = case
    seen = (wanted + steps) % 2**bits
    assert epochs.tag_reached_of(seen, wanted, bits) == (steps < 2 ** (bits - 1))


@pytest.mark.parametrize("bits", [3, 16, 32])
def test_modular_comparison_on_both_sides_of_the_wrap(bits: int) -> None:
    top = 2**bits - 1
    assert epochs.tag_reached_of(top, top, bits)
    assert epochs.tag_reached_of(0, top, bits)
    assert epochs.tag_reached_of(1, top, bits)
    assert not epochs.tag_reached_of(top - 1, top, bits)
    assert not epochs.tag_reached_of(top, 0, bits)
    assert not epochs.tag_reached_of(top, 1, bits)
    half = 2 ** (bits - 1)
    assert epochs.tag_reached_of((top + half - 1) % 2**bits, top, bits)
    assert not epochs.tag_reached_of((top + half) % 2**bits, top, bits)
    if bits == 32:
        assert epochs.tag_reached(0, top)
        assert not epochs.tag_reached(top, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"triple_bits": 0}, "triple_bits is 0"),
        ({"triple_bits": 17}, "triple_bits is 17"),
        ({"pair_bits": 33}, "pair_bits is 33"),
        ({"pair_bits": 15}, "pair_bits is 15"),
        ({"parities": 0}, "parities is 0"),
        ({"limit_slack": 1}, "limit_slack is 1"),
        ({"limit_slack": 2**17}, "limit_slack is 131072"),
        ({"reset_slack": 2**12}, "reset_slack is 4096"),
        ({"reset_slack": 2**17}, "reset_slack is 131072"),
        ({"pair_bits": 16}, "does not fit a pair tag of 16 bits"),
    ],
)
def test_arithmetic_that_cannot_be_safe(change: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        attrs.evolve(PUBLISHED, **change)


@given(st.integers(1, 6), st.integers(1, 3))
def test_narrow_arithmetic_never_repeats_a_tag_below_its_limit(bits: int, parities: int) -> None:
    period = parities << bits
    if period <= parities + 1:
        return
    arithmetic = TagArithmetic(32, bits, parities, limit_slack=parities, reset_slack=parities + 1)
    seen = {(arithmetic.parity(e), arithmetic.triple_tag(e)) for e in range(arithmetic.limit)}
    assert len(seen) == arithmetic.limit
    assert all(tag for _, tag in seen)
    assert arithmetic.triple_tag(arithmetic.limit) == 0
    assert arithmetic.is_past_limit(arithmetic.limit)
    assert not arithmetic.is_past_limit(arithmetic.limit - 1)


def test_published_budget() -> None:
    budget = EpochBudget(57)
    assert budget.uncounted == 12_288
    assert budget.reset_launches == RESET_LAUNCHES
    assert budget.reset_step == 2013
    assert not budget.reset_due(2012)
    assert budget.reset_due(2013)
    assert budget.room == EPOCH_LIMIT - 2013 * 57 == 12_235


def test_more_uncounted_launches_than_the_room_move_the_reset_forward() -> None:
    budget = EpochBudget(57)
    assert not budget.reset_due(2012, budget.room)
    assert budget.reset_due(2012, budget.room + 1)


@given(st.integers(1, 400), st.integers(0, EPOCH_LIMIT - 1), st.integers(0, 2**18))
def test_a_checked_budget_never_reaches_the_limit_inside_a_step(layers: int, uncounted: int, extra: int) -> None:
    try:
        budget = EpochBudget(layers, uncounted)
    except ConfigurationError:
        return
    fits = min(extra, EPOCH_LIMIT - layers)
    low, high = 0, budget.reset_step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if budget.reset_due(middle, fits) else (middle + 1, high)
    assert low * layers + fits <= EPOCH_LIMIT or low == 0


@pytest.mark.parametrize(
    ("layers", "uncounted", "named"),
    [
        (0, 0, "layers is 0"),
        (EPOCH_LIMIT, 0, f"layers is {EPOCH_LIMIT}"),
        (57, -1, "uncounted is -1"),
        (57, EPOCH_LIMIT, f"uncounted is {EPOCH_LIMIT}"),
        (57, 0, "set aside at least 56"),
        (1.5, 0, "layers is 1.5; a whole number"),
        (57, True, "uncounted is True; a whole number"),
    ],
)
def test_budgets_that_cannot_be_safe(layers: int, uncounted: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        EpochBudget(layers, uncounted)


@pytest.mark.parametrize(("steps", "uncounted"), [(-1, 0), (0, -1)])
def test_reset_due_refuses_negative_counts(steps: int, uncounted: int) -> None:
    with pytest.raises(ConfigurationError, match="neither can be negative"):
        EpochBudget(57).reset_due(steps, uncounted)
