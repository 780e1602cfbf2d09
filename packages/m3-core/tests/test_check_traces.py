"""Recordings: reading and writing them, and what the check finds in right and wrong ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core.check.explorer import explore
from m3_core.check.export import records
from m3_core.check.mutants import MUTANTS
from m3_core.check.scopes import SCOPES, Checked
from m3_core.check.simulator import Failure, Setup, simulate
from m3_core.check.traces import EVENTS, HOST_STAGES, Event, Record, Stage, check, read, write
from m3_core.check.world import World
from m3_core.epochs import EPOCH_LIMIT
from m3_core.errors import ConfigurationError

LEGAL = [(stage, event) for stage in Stage for event in EVENTS[stage]]
LEGAL.sort(key=lambda pair: (pair[0].value, pair[1].value))
SMALL = st.integers(0, 2**31)


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    stage, event = draw(st.sampled_from(LEGAL))
    epoch = None if stage in HOST_STAGES else draw(SMALL)
    time = draw(st.none() | st.integers(0, 2**60) | st.floats(0, 1e9))
    return Record(draw(SMALL), stage, event, epoch, draw(SMALL), draw(st.none() | SMALL), draw(st.none() | SMALL), time)


@given(any_record())
def test_round_trip(record: Record) -> None:
    assert Record.from_json(record.to_json()) == record


def test_files(tmp_path: Path) -> None:
    events = [Record(0, Stage.STEP, Event.BEGIN), Record(0, Stage.LAUNCH, Event.BEGIN, 0)]
    write(tmp_path / "run.jsonl", events)
    assert (tmp_path / "run.jsonl").read_text() == (
        '{"rank": 0, "stage": "step", "event": "begin"}\n{"rank": 0, "stage": "launch", "event": "begin", "epoch": 0}\n'
    )
    assert read(tmp_path / "run.jsonl") == events


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 7"),
        ("[]", "not an object"),
        ('{"stage": "step", "event": "begin"}', "no rank"),
        ('{"rank": -1, "stage": "step", "event": "begin"}', "rank is -1"),
        ('{"rank": true, "stage": "step", "event": "begin"}', "rank is True"),
        ('{"rank": 0, "stage": "step", "event": "begin", "time": "now"}', "time is 'now'"),
        ('{"rank": 0, "stage": "step", "event": "begin", "colour": 1}', "unknown keys"),
        ('{"rank": 0, "stage": "lunch", "event": "begin"}', "'lunch' is not a valid Stage"),
        ('{"rank": 0, "stage": "step", "event": "drained"}', "stage step has no event 'drained'; it has begin, drop, end"),
        ('{"rank": 0, "stage": "step", "event": "begin", "epoch": 1}', "a host's do not"),
        ('{"rank": 0, "stage": "push", "event": "begin"}', "stages of a launch carry an epoch"),
    ],
)
def test_lines_that_are_no_event(line: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match="line 7 of the recording is no event") as caught:
        Record.from_json(line, 7)
    assert named in str(caught.value)


# --- right recordings ----------------------------------------------------------------------------------------------------------------


def walk(checked: Checked, seed: int, steps: int) -> list[Record]:
    """A random walk through a world; failures are taken seldom."""
    world = World(checked.rules, checked.scope)
    chance = random.Random(seed)
    state, found = world.initial, []
    for _ in range(steps):
        choices = world.successors(state)
        if not choices:
            break
        calm = [
            choice
            for choice in choices
            if choice[0][0] not in ("stop", "timeout", "agreement timeout") and choice[0][-1] not in ("ABORT", "BROKE")
        ]
        action, new = chance.choice(choices if chance.random() < 0.01 or not calm else calm)
        found.extend(records(world, state, action, new))
        state = new
    return found


@pytest.mark.parametrize("checked", [checked for checked in SCOPES if checked.name != "limit"], ids=lambda checked: checked.name)
def test_walks_through_the_model_are_recordings_of_the_protocol(checked: Checked) -> None:
    events = 0
    for seed in range(12):
        found = walk(checked, seed, 800)
        events += len(found)
        assert check(found) == ()
    assert events > 400


@pytest.fixture(scope="module")
def run() -> list[Record]:
    """Four ranks, with resets."""
    outcome = simulate(Setup(seed=5, ranks=4, steps=60))
    assert outcome.resets == (2, 2, 2, 2)
    return list(outcome.records)


def test_a_simulated_run_is_a_recording_of_the_protocol(run: list[Record]) -> None:
    assert check(run) == ()
    untimed = [attrs.evolve(record, time=None) for record in run]
    by_rank = sorted(untimed, key=lambda record: record.rank)
    assert check(by_rank) == ()


@pytest.mark.parametrize("failure", list(Failure))
def test_so_is_a_run_that_fails(failure: Failure) -> None:
    for seed in range(4):
        assert check(simulate(Setup(seed=seed, ranks=2, steps=30, failure=failure)).records) == ()


# --- wrong recordings ----------------------------------------------------------------------------------------------------------------

Change = Callable[[list[Record]], list[Record]]


def first(stage: Stage, event: Event, rank: int, nth: int = 0) -> Callable[[list[Record]], int]:
    def find(run: list[Record]) -> int:
        places = [index for index, record in enumerate(run) if (record.stage, record.event, record.rank) == (stage, event, rank)]
        return places[nth]

    return find


def without(find: Callable[[list[Record]], int]) -> Change:
    return lambda run: run[: find(run)] + run[find(run) + 1 :]


def changed(find: Callable[[list[Record]], int], **values: object) -> Change:
    return lambda run: [*run[: find(run)], attrs.evolve(run[find(run)], **values), *run[find(run) + 1 :]]  # type: ignore[arg-type]


def added(find: Callable[[list[Record]], int], record: Record) -> Change:
    return lambda run: [*run[: find(run)], attrs.evolve(record, time=run[find(run)].time), *run[find(run) :]]


def all_but(keep: Callable[[Record], bool]) -> Change:
    return lambda run: [record for record in run if keep(record)]


def is_of(record: Record, stage: Stage, event: Event, rank: int, epoch: int | None = None) -> bool:
    return (record.stage, record.event, record.rank) == (stage, event, rank) and epoch in (None, record.epoch)


WRONG: list[tuple[str, Change, str]] = [
    ("a rank is missing", all_but(lambda record: record.rank != 1), "every rank from 0 has to be recorded"),
    ("no attention push", all_but(lambda record: not is_of(record, Stage.PUSH, Event.BEGIN, 2, 5)), "rank 2 never did push begin there"),
    ("no FFN push", all_but(lambda record: not is_of(record, Stage.DOWN, Event.BEGIN, 1, 3)), "rank 1 never did down begin there"),
    ("late push", changed(first(Stage.PUSH, Event.BEGIN, 3), time=1e3), "before rank 3 did push begin"),
    ("no flag", without(first(Stage.HANDSHAKE, Event.CLEAR_FLAG, 0)), "rank 0 does handshake end out of turn"),
    ("an epoch is skipped", changed(first(Stage.LAUNCH, Event.BEGIN, 1, 4), epoch=9), "at epoch 9; its last one leaves 4"),
    ("past the limit", changed(first(Stage.LAUNCH, Event.BEGIN, 1), epoch=EPOCH_LIMIT), "past the limit 126976"),
    ("launch outside a step", without(first(Stage.STEP, Event.BEGIN, 2)), "begins a launch while it is READY"),
    ("step twice", added(first(Stage.STEP, Event.END, 0), Record(0, Stage.STEP, Event.BEGIN)), "rank 0 does step begin out of turn"),
    ("no drain", without(first(Stage.RESET, Event.DRAINED, 3)), "but rank 3 never was drained"),
    ("late clear", changed(first(Stage.RESET, Event.CLEARED, 3), time=1e3), "before rank 3 was cleared"),
    ("token after abort", added(first(Stage.STEP, Event.END, 1), Record(1, Stage.HOST, Event.ABORT)), "rank 1 does step end out of turn"),
    (
        "token in spite of a fault",
        added(first(Stage.HANDSHAKE, Event.CLEAR_FLAG, 2), Record(2, Stage.FINAL, Event.FAULT, 2, 0, 0)),
        "but rank 2 failed no later than step 0",
    ),
    (
        "unequal launches",
        all_but(lambda record: not (record.rank == 1 and record.epoch == 2)),
        "step 0 of channel 0 has launches [(0, 0), (0, 1), (0, 2)] on rank 0 and [(0, 0), (0, 1)] on rank 1",
    ),
    (
        "stages out of order",
        added(first(Stage.FINAL, Event.END, 0), Record(0, Stage.FINISH, Event.END, 0, 0, 0)),
        "is in stage final of epoch 0 after a later one in the same block",
    ),
]


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_recordings(run: list[Record], change: Change, named: str) -> None:
    problems = check(change(run))
    assert any(named in problem for problem in problems), problems[:5]


def test_an_empty_recording() -> None:
    assert check([]) == ("the recording is empty",)


# Wrong protocols whose counterexample shows in its events; the others go wrong inside words, which a recording does not hold.
VISIBLE = (
    "handshake-skipped",
    "host-ignores-fault",
    "flag-always-clear",
    "failed-flag-ignored",
    "first-flag-enough",
)


@pytest.mark.parametrize("name", VISIBLE)
def test_counterexamples_of_wrong_protocols(name: str) -> None:
    """The events of a wrong protocol's counterexample, the step that breaks the property included, are no recording of the protocol."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    world = World(mutant.rules, mutant.scope)
    way = explore(mutant.rules, mutant.scope).way
    found: list[Record] = []
    for (state, action), (new, _) in itertools.pairwise(way):
        found.extend(records(world, state, action, new))
    last = way[-1][1]
    if last[0] == "host":
        assert isinstance(last[1], int)
        found.append(Record(last[1], Stage.STEP, Event.END))
    assert check(found) != ()


def test_the_vocabulary_is_json() -> None:
    assert json.loads(Record(1, Stage.HANDSHAKE, Event.PEER_FAILED, 3, 1, 0, 2, 5).to_json()) == {
        "rank": 1,
        "stage": "handshake",
        "event": "peer failed",
        "epoch": 3,
        "channel": 1,
        "block": 0,
        "peer": 2,
        "time": 5,
    }


def test_a_recording_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none" / "run.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=f"cannot be written: {reason}"):
            write(path, ())
