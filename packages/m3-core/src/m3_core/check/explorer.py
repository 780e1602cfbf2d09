"""Breadth-first search: every state once, and the shortest way to a violation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import attrs

from m3_core.check.codes import Action
from m3_core.check.narrate import narrate
from m3_core.check.properties import Line, Property, Violation
from m3_core.check.rules import Rules, Scope
from m3_core.check.world import World

# What the world names as its action while it looks at a state as a whole.
LOOK: Action = ("look",)


@attrs.frozen
class Result:
    """What a search found.

    Attributes:
        states: distinct states.
        transitions: steps that were followed.
        depth: steps from the start to the farthest state seen.
        seconds: wall time.
        complete: whether every state was reached; false after a violation or at the limit of states.
        broken: the property that does not hold; None if all hold in every state seen.
        detail: what happened.
        trace: the shortest way there, as lines of a timeline.
        way: the same as states, each with the action that was taken in it; the last action breaks the property.
    """

    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool
    broken: Property | None = None
    detail: str = ""
    trace: tuple[Line, ...] = ()
    way: tuple[tuple[bytes, Action], ...] = ()


def explore(rules: Rules, scope: Scope, *, symmetry: bool = True, max_states: int | None = None) -> Result:
    """Visit every state of ``scope`` under ``rules``.

    Args:
        rules: the protocol, or a wrong one.
        scope: the size of the world.
        symmetry: visit one state for all that differ in the names of ranks only; sound where no rule names a rank.
        max_states: stop after so many states; None visits all.
    """
    world = World(rules, scope)
    started = time.perf_counter()
    canonical = world.fields.canonical() if symmetry and names_no_rank(rules) else None
    parents: dict[bytes, bytes | None] = {world.initial: None}
    frontier = [world.initial]
    transitions = depth = 0

    def result(*, complete: bool, violation: Violation | None = None, at: bytes = b"") -> Result:
        seconds = time.perf_counter() - started
        if violation is None:
            return Result(len(parents), transitions, depth, seconds, complete)
        way = _way(world, parents, at, canonical)
        lines = [line for state, action in way if action != LOOK for line in narrate(world, state, action)]
        lines.append(Line(None, f"VIOLATION {violation.broken.name}: {violation.detail}"))
        return Result(len(parents), transitions, depth, seconds, False, violation.broken, violation.detail, tuple(lines), way)

    while frontier:
        found: list[bytes] = []
        for state in frontier:
            try:
                steps = world.successors(state)
            except Violation as violation:
                return result(complete=False, violation=violation, at=state)
            transitions += len(steps)
            for _, new in steps:
                if canonical is not None:
                    new = canonical(new)
                if new not in parents:
                    parents[new] = state
                    found.append(new)
            if max_states is not None and len(parents) > max_states:
                return result(complete=False)
        frontier = found
        depth += bool(found)
    return result(complete=True)


def names_no_rank(rules: Rules) -> bool:
    """Whether the rules treat all ranks alike; some wrong protocols single one out."""
    return rules.padding_is_exchanged and rules.equal_launches and rules.resets_together and rules.slot_per_source


def _way(
    world: World, parents: dict[bytes, bytes | None], last: bytes, canonical: Callable[[bytes], bytes] | None
) -> tuple[tuple[bytes, Action], ...]:
    """Play the way to ``last`` again without renaming, then the step that broke the property.

    Under symmetry consecutive states of the search may name ranks differently; playing forward from the start and matching each
    state's canonical form keeps one naming throughout.
    """
    targets = [last]
    while (parent := parents[targets[-1]]) is not None:
        targets.append(parent)
    targets.reverse()
    way: list[tuple[bytes, Action]] = []
    state = targets[0]
    for target in targets[1:]:
        action, new = next(
            (action, new) for action, new in world.successors(state) if (canonical(new) if canonical is not None else new) == target
        )
        way.append((state, action))
        state = new
    with contextlib.suppress(Violation):
        world.successors(state)
    return (*way, (state, world.current))
