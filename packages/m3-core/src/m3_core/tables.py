"""Transition tables: what a state machine of the protocol does, written as data.

A table maps each state to the events that are legal in it, and each of these to the next state and the actions to take. Events go in,
actions come out; nothing here performs them. A state without events is terminal. An event that a state does not list is illegal: it
raises ``ProtocolError`` and changes nothing.

The documentation's diagrams, the tests and the model checker read the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

import attrs

from m3_core.errors import ConfigurationError, ProtocolError

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)
ActionT = TypeVar("ActionT", bound=Enum)


@attrs.frozen(init=False)
class Transition(Generic[StateT, ActionT]):
    """Where an event leads, and what to do on the way, in order."""

    target: StateT
    actions: tuple[ActionT, ...]

    def __init__(self, target: StateT, *actions: ActionT) -> None:
        self.__attrs_init__(target, actions)


def _freeze(
    rows: Mapping[StateT, Mapping[EventT, Transition[StateT, ActionT]]],
) -> Mapping[StateT, Mapping[EventT, Transition[StateT, ActionT]]]:
    return MappingProxyType({state: MappingProxyType(dict(row)) for state, row in rows.items()})


@attrs.frozen
class Table(Generic[StateT, EventT, ActionT]):
    """A state machine.

    Attributes:
        name: for messages and diagrams.
        initial: the state it starts in.
        rows: for every state its legal events; an empty row marks a terminal state.

    Raises:
        ConfigurationError: if a target has no row, or a state cannot be reached.
    """

    name: str
    initial: StateT
    rows: Mapping[StateT, Mapping[EventT, Transition[StateT, ActionT]]] = attrs.field(converter=_freeze, hash=False)

    def __attrs_post_init__(self) -> None:
        reached = {self.initial}
        frontier = [self.initial]
        while frontier:
            state = frontier.pop()
            if state not in self.rows:
                raise ConfigurationError(f"table {self.name}: state {state.name} has no row; give it one, empty if it is terminal")
            targets = {transition.target for transition in self.rows[state].values()}
            frontier.extend(targets - reached)
            reached |= targets
        lost = [state.name for state in type(self.initial) if state not in reached]
        if lost:
            raise ConfigurationError(f"table {self.name}: nothing leads to {', '.join(lost)}; remove the state or add its transition")

    @property
    def terminal(self) -> frozenset[StateT]:
        """The states that take no event."""
        return frozenset(state for state, row in self.rows.items() if not row)

    def __iter__(self) -> Iterator[tuple[StateT, EventT, Transition[StateT, ActionT]]]:
        for state, row in self.rows.items():
            for event, transition in row.items():
                yield state, event, transition

    def step(self, state: StateT, event: EventT) -> Transition[StateT, ActionT]:
        """Where ``event`` leads from ``state``.

        Raises:
            ProtocolError: if the event is illegal there; it names both and what would be legal.
        """
        row = self.rows[state]
        if event not in row:
            raise ProtocolError(self.name, state.name, event.name, [legal.name for legal in row])
        return row[event]

    def with_row(self, state: StateT, row: Mapping[EventT, Transition[StateT, ActionT]]) -> Table[StateT, EventT, ActionT]:
        """A copy with another row for ``state``; the model checker builds its wrong protocols so."""
        return attrs.evolve(self, rows={**self.rows, state: row})


@attrs.define
class Machine(Generic[StateT, EventT, ActionT]):
    """A table with a current state.

    Attributes:
        table: what it does.
        state: where it is; changed by ``handle`` only.
    """

    table: Table[StateT, EventT, ActionT]
    state: StateT = attrs.field(default=attrs.Factory(lambda self: self.table.initial, takes_self=True))

    def handle(self, event: EventT) -> tuple[ActionT, ...]:
        """Take an event and return the actions to perform, in order.

        Raises:
            ProtocolError: if the event is illegal in the current state, which stays.
        """
        transition = self.table.step(self.state, event)
        self.state = transition.target
        return transition.actions

    @property
    def finished(self) -> bool:
        """Whether the state is terminal."""
        return self.state in self.table.terminal


def mermaid(table: Table[StateT, EventT, ActionT]) -> str:
    """The table as a Mermaid state diagram; an edge reads ``EVENT / ACTION, ACTION``."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial.name}"]
    for state, event, transition in table:
        actions = ", ".join(action.name for action in transition.actions)
        lines.append(f"    {state.name} --> {transition.target.name}: {event.name}" + (f" / {actions}" if actions else ""))
    lines.extend(f"    {state.name} --> [*]" for state in table.rows if state in table.terminal)
    return "\n".join(lines) + "\n"


def markdown(table: Table[StateT, EventT, ActionT]) -> str:
    """The table as a Markdown table: state, event, next state, actions."""
    lines = ["| state | event | next state | actions, in order |", "|---|---|---|---|"]
    for state, row in table.rows.items():
        if not row:
            lines.append(f"| {state.name} | none: terminal | | |")
        for event, transition in row.items():
            actions = ", ".join(action.name for action in transition.actions)
            lines.append(f"| {state.name} | {event.name} | {transition.target.name} | {actions} |")
    return "\n".join(lines) + "\n"
