"""Every property holds in every world, every wrong protocol is caught, and renaming ranks changes no verdict."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import attrs
import pytest

from m3_core.check.cli import check_scope
from m3_core.check.explorer import Result, explore, names_no_rank
from m3_core.check.mutants import MUTANTS, Mutant
from m3_core.check.properties import Property
from m3_core.check.rules import ATTENTION_ONLY, BOTH_IN_ORDER, FFN_ONLY, ONE_BIT_TAGS, SHORT_TAGS, TWO_BIT_TAGS, Rules, Scope
from m3_core.check.scopes import SCOPES
from m3_core.epochs import TagArithmetic
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Transition

SMALL = [checked.name for checked in SCOPES if not checked.large]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Future[Result]]]:
    """Two worlds at a time, the largest first."""
    order = sorted(SMALL, key=("failures", "exchange", "three-ranks").__contains__, reverse=True)
    with ProcessPoolExecutor(2) as pool:
        yield {name: pool.submit(check_scope, name) for name in order}


@pytest.mark.parametrize("name", SMALL)
def test_every_property_holds(name: str, results: dict[str, Future[Result]]) -> None:
    result = results[name].result()
    assert result.broken is None, result.detail
    assert result.complete


def test_a_world_has_more_than_a_million_states(results: dict[str, Future[Result]]) -> None:
    assert results["failures"].result().states > 10**6


_seen: dict[tuple[Rules, Scope], Result] = {}


def _right(mutant: Mutant) -> Result:
    key = (mutant.base, mutant.scope)
    if key not in _seen:
        _seen[key] = explore(*key)
    return _seen[key]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_protocol_is_clean_where_the_mutant_is_caught(mutant: Mutant) -> None:
    wrong = explore(mutant.rules, mutant.scope)
    assert wrong.broken is mutant.breaks
    assert wrong.trace[-1].text.startswith(f"VIOLATION {mutant.breaks.name}: ")
    right = _right(mutant)
    assert right.broken is None, right.detail
    assert right.complete


def test_mutants_are_many_and_different() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len({mutant.change for mutant in MUTANTS}) == len(MUTANTS)


def test_every_property_catches_a_mutant() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == set(Property)


# --- renaming ranks ------------------------------------------------------------------------------------------------------------------

TWO = (BOTH_IN_ORDER, BOTH_IN_ORDER)
UNREDUCED = [
    (Rules(tags=SHORT_TAGS), Scope()),
    (Rules(tags=SHORT_TAGS), Scope(stops=1)),
    (Rules(tags=ONE_BIT_TAGS), Scope(timeouts=1)),
    (Rules(tags=ONE_BIT_TAGS), Scope(aborts=1, split_words=True)),
    (Rules(tags=ONE_BIT_TAGS), Scope(blocks=TWO)),
    (Rules(tags=ONE_BIT_TAGS), Scope(ranks=3)),
]


@pytest.mark.parametrize(("rules", "scope"), UNREDUCED)
def test_renaming_ranks_loses_no_state(rules: Rules, scope: Scope) -> None:
    """Every state of the whole search is a renamed state of the reduced one, and there are as many as renamings make of those."""
    reduced = explore(rules, scope)
    whole = explore(rules, scope, symmetry=False)
    assert (reduced.broken, whole.broken) == (None, None)
    assert reduced.complete
    assert whole.complete
    assert reduced.depth == whole.depth
    assert reduced.states < whole.states <= reduced.states * (2 if scope.ranks == 2 else 6)


SYMMETRIC = [mutant for mutant in MUTANTS if names_no_rank(mutant.rules)]


@pytest.mark.parametrize("mutant", SYMMETRIC, ids=lambda mutant: mutant.name)
def test_renaming_ranks_hides_no_violation(mutant: Mutant) -> None:
    reduced = explore(mutant.rules, mutant.scope)
    whole = explore(mutant.rules, mutant.scope, symmetry=False)
    assert whole.broken is reduced.broken
    assert len(whole.trace) == len(reduced.trace)


# --- what the checker taught ---------------------------------------------------------------------------------------------------------


ONE_HALF = attrs.evolve(Rules(tags=TagArithmetic(3, 3, 1, 1, 6)), region_per_parity=False)


def test_one_half_would_do_if_launches_kept_their_order_inside() -> None:
    """Parity pays for not having to rely on the order of the two exchanges inside a launch."""
    assert explore(ONE_HALF, Scope(blocks=TWO, launches=2)).broken is None
    assert explore(ONE_HALF, Scope(blocks=(ATTENTION_ONLY, FFN_ONLY), launches=2)).broken is Property.OVERWRITE


def test_the_first_agreement_of_a_reset_only_carries_reasons() -> None:
    """Each rank clears its own buffer, and its peers' stores into it have been read: safety needs the second agreement alone."""
    row = {
        ResetEvent.DONE: Transition(Reset.CLEARING, ResetAction.CLEAR),
        ResetEvent.BROKE: Transition(Reset.AGREEING_DRAIN, ResetAction.MARK_ALL_RANKS, ResetAction.AGREE_FAILED),
    }
    rules = Rules(tags=SHORT_TAGS, reset=RESET.with_row(Reset.DRAINING, row))
    for scope in (Scope(), Scope(stops=1), Scope(timeouts=1)):
        assert explore(rules, scope).broken is None


def test_a_search_can_be_cut_short() -> None:
    result = explore(Rules(tags=TWO_BIT_TAGS), Scope(), max_states=100)
    assert not result.complete
    assert result.broken is None
    assert 100 < result.states < 200
