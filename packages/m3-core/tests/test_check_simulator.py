"""Long random runs: fixed seeds keep every property, a seed replays exactly, and wrong ranks are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from m3_core.check import ranks, simulator
from m3_core.check.cli import simulated
from m3_core.check.scheduler import Actor, Scheduler, Wait, Woken
from m3_core.check.simulator import SIMULATED_TAGS, Failure, Setup, SimulationError, simulate
from m3_core.epochs import PUBLISHED, TagArithmetic
from m3_core.errors import ConfigurationError
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.tables import Transition


@pytest.mark.parametrize("seed", range(40))
def test_fixed_seeds(seed: int) -> None:
    """Sizes and failures follow from the seed."""
    simulate(simulated(seed))


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("seed", range(6))
def test_every_failure_ends_alike(failure: Failure, seed: int) -> None:
    setup = Setup(seed=seed, ranks=4, steps=40, layers=2, failure=failure)
    outcome = simulate(setup)
    assert max(outcome.tokens) - min(outcome.tokens) <= 1
    if failure is Failure.STOP:
        assert len(outcome.stopped) == 1
    if outcome.faulted:
        assert sorted((*outcome.faulted, *outcome.stopped)) == [0, 1, 2, 3]
        assert all(text.startswith("rank ") for text in outcome.faults)


def test_thousands_of_steps_and_many_resets() -> None:
    outcome = simulate(Setup(seed=1, ranks=2, blocks=1, layers=1, steps=2000, hidden=2, max_rows=1))
    assert outcome.tokens == (2000, 2000)
    assert outcome.resets == (24, 24)


def test_many_ranks_layers_and_channels() -> None:
    outcome = simulate(Setup(seed=3, ranks=8, blocks=2, layers=5, steps=20, channels=2, hidden=4, max_rows=1))
    assert outcome.tokens == (20,) * 8
    assert outcome.resets == (1,) * 8


def test_published_tags() -> None:
    assert simulate(Setup(seed=4, ranks=2, steps=20, tags=PUBLISHED)).resets == (0, 0)


def test_one_seed_is_one_run() -> None:
    setup = Setup(seed=11, ranks=4, steps=30, failure=Failure.LATE_STORE)
    once, again = simulate(setup), simulate(setup)
    assert once == again
    assert once.digest != simulate(attrs.evolve(setup, seed=12)).digest


def test_a_failure_is_told_to_the_user() -> None:
    outcome = next(
        outcome
        for outcome in (simulate(Setup(seed=seed, ranks=2, steps=40, failure=Failure.STOP)) for seed in range(20))
        if outcome.faults and "from rank" in outcome.faults[0]
    )
    assert f"from rank {outcome.stopped[0]} and gave up" in outcome.faults[0]
    assert "layer " in outcome.faults[0]


# --- ranks that do wrong -------------------------------------------------------------------------------------------------------------

CALM = Setup(seed=2, ranks=2, steps=60, max_rows=2)


def _forgets_to_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ranks.Rank._clear

    def clear(self: ranks.Rank) -> None:
        kept = bytes(self.world.memory[self.rank])
        original(self)
        self.world.memory[self.rank][:] = kept

    monkeypatch.setattr(ranks.Rank, "_clear", clear)


def _wrong_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TagArithmetic, "parity", lambda self, epoch: 0)


def _sends_the_payload_of_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ranks.payload

    def payload(rank: int, channel: int, launches: int, *rest: int) -> int:
        return original(rank, channel, launches % 7 and launches, *rest) ^ (launches == 50)

    calls = iter(range(10**9))
    monkeypatch.setattr(ranks, "payload", lambda *all_: payload(*all_) ^ (next(calls) == 5000))


def _never_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m3_core.epochs.EpochBudget.reset_due", lambda self, steps: False)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_wrong_halves, "WrongValueError"),
        (_sends_the_payload_of_another_launch, "WrongValueError"),
        (_never_resets, "returned 37 of 60 tokens"),
    ],
)
def test_wrong_ranks_are_found(spoil: Callable[[pytest.MonkeyPatch], None], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(CALM)
    spoil(monkeypatch)
    with pytest.raises(SimulationError, match=f"seed 2 of Setup.*{named}"):
        simulate(CALM)


def test_words_that_a_reset_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide step meets the tag that a wide step left before the reset, at the same epoch."""
    monkeypatch.setattr(simulator.World, "rows", lambda self, step: 2 if step % 80 == 5 else 1)
    setup = Setup(seed=0, ranks=2, steps=300, layers=1, blocks=1, max_rows=2, hidden=2)
    simulate(setup)
    _forgets_to_clear(monkeypatch)
    with pytest.raises(SimulationError, match="WrongValueError"):
        simulate(setup)


def test_a_skipped_handshake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict(HANDSHAKE.rows[Handshake.UNPUBLISHED])
    row[HandshakeEvent.WORD_SET] = Transition(Handshake.POLLING, HandshakeAction.PUBLISH_CLEAR)
    monkeypatch.setattr(ranks, "HANDSHAKE", HANDSHAKE.with_row(Handshake.UNPUBLISHED, row))
    found = 0
    for seed in range(60):
        try:
            simulate(Setup(seed=seed, ranks=2, layers=1, steps=20, failure=Failure.LATE_STORE))
        except SimulationError:
            found += 1
    assert found > 0


def test_bad_setups() -> None:
    for name in ("blocks", "layers", "steps"):
        with pytest.raises(ConfigurationError, match=f"{name} is 0"):
            Setup(**{"seed": 0, name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="layers is 81"):
        Setup(seed=0, layers=81)
    assert SIMULATED_TAGS.reset_launches == 80


# --- the scheduler -------------------------------------------------------------------------------------------------------------------


def test_waits_end_by_data_fault_or_bound() -> None:
    scheduler = Scheduler(0)
    flags: dict[str, bool] = {"data": False, "fault": False}
    seen: list[tuple[str, Woken | None, float]] = []

    def waiter(name: str, seconds: float | None) -> Actor:
        why = yield Wait(lambda: flags["data"], seconds, lambda: flags["fault"])
        seen.append((name, why, round(scheduler.now)))

    def setter() -> Actor:
        yield 2.0
        flags["fault"] = True
        scheduler.changed(1)
        yield 2.0
        flags["data"] = True
        scheduler.changed(2)

    scheduler.start(0, waiter("bound", 1.0))
    scheduler.start(1, waiter("fault", 9.0))
    scheduler.start(2, waiter("data", 9.0))
    scheduler.start(3, waiter("never", None))
    scheduler.start(4, setter())
    scheduler.run()
    assert seen == [("bound", Woken.TIMEOUT, 1), ("fault", Woken.FAULT, 2), ("data", Woken.DATA, 4)]
    assert scheduler.waiting() == [3]
    scheduler.stop(3)
    assert scheduler.waiting() == []


def test_stalls_and_stops() -> None:
    scheduler = Scheduler(0)
    seen: list[Any] = []

    def worker(name: str) -> Actor:
        for _ in range(3):
            yield 1.0
            seen.append((name, round(scheduler.now)))

    scheduler.start(0, worker("stalled"))
    scheduler.start(1, worker("stopped"))
    scheduler.at(1.5, lambda: scheduler.stall(0, 5.0))
    scheduler.at(1.5, lambda: scheduler.stop(1))
    scheduler.run()
    assert seen == [("stalled", 1), ("stopped", 1), ("stalled", 6), ("stalled", 8)]


def test_problems_of_a_run_are_listed() -> None:
    world = simulator.World(CALM)
    world.ranks[0].returned = 60
    problems = simulator._problems(world, [])
    assert problems == ["rank 1 returned 0 of 60 tokens", "the recording is empty"]
