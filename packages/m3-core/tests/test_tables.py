from __future__ import annotations

import itertools
from enum import Enum, auto
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_core.agreement import Verdict
from m3_core.errors import ConfigurationError, ProtocolError
from m3_core.handshake import HANDSHAKE, Handshake, HandshakeAction, HandshakeEvent
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.phase import PHASE, CollectivePhase, Phase, PhaseAction, PhaseEvent
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Machine, Table, Transition, markdown, mermaid

TABLES: list[tuple[Table[Any, Any, Any], type[Enum], type[Enum]]] = [
    (LIFE, LifeEvent, LifeAction),
    (RESET, ResetEvent, ResetAction),
    (PHASE, PhaseEvent, PhaseAction),
    (HANDSHAKE, HandshakeEvent, HandshakeAction),
]
PAIRS = [
    pytest.param(table, state, event, id=f"{table.name}-{state.name}-{event.name}")
    for table, events, _ in TABLES
    for state, event in itertools.product(type(table.initial), events)
]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS)
def test_every_state_and_event(table: Table[Any, Any, Any], state: Enum, event: Enum) -> None:
    machine: Machine[Any, Any, Any] = Machine(table, state)
    legal = table.rows[state]
    if event in legal:
        assert machine.handle(event) == legal[event].actions
        assert machine.state is legal[event].target
        return
    with pytest.raises(ProtocolError) as caught:
        machine.handle(event)
    assert machine.state is state
    error = caught.value
    assert (error.machine, error.state, error.event) == (table.name, state.name, event.name)
    assert error.allowed == tuple(other.name for other in legal)
    assert f"event {event.name} is illegal in state {state.name}" in str(error)


@pytest.mark.parametrize(("table", "events", "actions"), TABLES)
def test_every_event_and_action_is_used(table: Table[Any, Any, Any], events: type[Enum], actions: type[Enum]) -> None:
    assert {event for _, event, _ in table} == set(events)
    assert {action for _, _, transition in table for action in transition.actions} == set(actions)


def test_terminal_states() -> None:
    assert LIFE.terminal == {Life.CLOSED}
    assert RESET.terminal == {Reset.RESUMED, Reset.FAILED}
    assert PHASE.terminal == {Phase.AGREED, Phase.REFUSED}
    assert HANDSHAKE.terminal == {Handshake.CLEAR, Handshake.FAILED}


@pytest.mark.parametrize("table", [table for table, _, _ in TABLES])
def test_a_terminal_state_can_be_reached_from_everywhere(table: Table[Any, Any, Any]) -> None:
    good = set(table.terminal)
    for _ in table.rows:
        good |= {state for state, _, transition in table if transition.target in good}
    assert good == set(table.rows)


def test_a_fault_is_left_by_closing_only() -> None:
    assert {transition.target for transition in LIFE.rows[Life.FAULTED].values()} == {Life.FAULTED, Life.CLOSED}


def test_tokens_are_returned_on_one_edge_only() -> None:
    edges = [(state, event) for state, event, transition in LIFE if LifeAction.RETURN_TOKENS in transition.actions]
    assert edges == [(Life.STEPPING, LifeEvent.END_STEP)]


def test_every_way_out_of_a_step_returns_or_drops_its_tokens() -> None:
    for transition in LIFE.rows[Life.STEPPING].values():
        assert (LifeAction.RETURN_TOKENS in transition.actions) != (LifeAction.DROP_TOKENS in transition.actions)


def test_a_reset_resumes_after_two_agreements_only() -> None:
    machine = Machine(RESET)
    actions = [
        machine.handle(event) for event in (ResetEvent.START, ResetEvent.DONE, ResetEvent.AGREED, ResetEvent.DONE, ResetEvent.AGREED)
    ]
    assert actions == [
        (ResetAction.SYNCHRONIZE,),
        (ResetAction.AGREE_READY,),
        (ResetAction.CLEAR,),
        (ResetAction.AGREE_READY,),
        (ResetAction.RESUME,),
    ]
    assert machine.finished


# --- the table type ------------------------------------------------------------------------------------------------------------------


class Light(Enum):
    RED = auto()
    GREEN = auto()


class Tick(Enum):
    TICK = auto()


class Bell(Enum):
    RING = auto()


def test_tables_refuse_what_is_unreachable_or_missing() -> None:
    with pytest.raises(ConfigurationError, match="nothing leads to GREEN"):
        Table("light", Light.RED, {Light.RED: {}, Light.GREEN: {}})
    with pytest.raises(ConfigurationError, match="state GREEN has no row"):
        Table("light", Light.RED, {Light.RED: {Tick.TICK: Transition(Light.GREEN)}})


def test_drawings() -> None:
    table: Table[Light, Tick, Bell] = Table(
        "light", Light.RED, {Light.RED: {Tick.TICK: Transition(Light.GREEN, Bell.RING)}, Light.GREEN: {}}
    )
    assert mermaid(table) == ("stateDiagram-v2\n    [*] --> RED\n    RED --> GREEN: TICK / RING\n    GREEN --> [*]\n")
    assert markdown(table) == (
        "| state | event | next state | actions, in order |\n|---|---|---|---|\n"
        "| RED | TICK | GREEN | RING |\n| GREEN | none: terminal | | |\n"
    )
    back = table.with_row(Light.GREEN, {Tick.TICK: Transition(Light.RED)})
    assert "GREEN --> RED: TICK\n" in mermaid(back)
    assert back.terminal == frozenset()
    assert table.terminal == {Light.GREEN}


# --- the collective phase ------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_phase_ends_alike_on_every_rank_and_in_every_order(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 8))
    reasons = data.draw(st.lists(st.none() | st.sampled_from(["a", "b"]), min_size=world, max_size=world))
    outcomes = []
    for rank in range(world):
        phase = CollectivePhase("map", rank, world)
        actions = phase.own(reasons[rank])
        peers = data.draw(st.permutations([peer for peer in range(world) if peer != rank]))
        for position, peer in enumerate(peers):
            assert phase.missing == tuple(sorted(peers[position:]))
            with pytest.raises(ConfigurationError, match="has not ended"):
                phase.outcome()
            actions += phase.receive(Verdict(peer, reasons[peer]))
        assert phase.state is (Phase.REFUSED if any(reasons) else Phase.AGREED)
        assert actions == (PhaseAction.SEND_VERDICT, PhaseAction.RAISE if any(reasons) else PhaseAction.PROCEED)
        outcomes.append(phase.outcome())
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0].ok == (not any(reasons))


def test_phase_timeout_names_the_missing() -> None:
    phase = CollectivePhase("clear", 1, 4)
    phase.own(None)
    phase.receive(Verdict(0, None))
    assert phase.timeout(2.5) == (PhaseAction.RAISE,)
    assert [(v.rank, v.reason) for v in phase.outcome().failed] == [(2, "did not come within 2.5 s"), (3, "did not come within 2.5 s")]


def test_phase_misuse_changes_nothing() -> None:
    phase = CollectivePhase("clear", 0, 3)
    with pytest.raises(ProtocolError):
        phase.receive(Verdict(1, None))
    with pytest.raises(ProtocolError):
        phase.timeout(1.0)
    assert (phase.state, phase.missing) == (Phase.WORKING, (0, 1, 2))
    phase.own(None)
    for rank in (0, 3):
        with pytest.raises(ConfigurationError, match=f"rank {rank} is not among the missing"):
            phase.receive(Verdict(rank, None))
    phase.receive(Verdict(1, None))
    with pytest.raises(ConfigurationError, match="rank 1 is not among"):
        phase.receive(Verdict(1, "late"))
    with pytest.raises(ProtocolError):
        phase.own(None)
    phase.receive(Verdict(2, None))
    assert phase.outcome().ok
    with pytest.raises(ConfigurationError, match="rank is 3 of 3"):
        CollectivePhase("clear", 3, 3)
