"""What mypy has to infer from the public surface; checked, never run.

Each ``type: ignore`` stands for an error that mypy must report: an unused one is an error itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import attrs

from m3_core.agreement import Agreement, Verdict
from m3_core.epochs import EpochBudget, pair_tag, tag_reached
from m3_core.faults import Fault, Site
from m3_core.layout import PeerLayout, Region
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.plan import StepFacts, StepPlan, plan_step
from m3_core.ports import AgreementChannel, Clock, Launch, LaunchChannel
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Machine, Table, Transition


def tables() -> None:
    assert_type(LIFE, Table[Life, LifeEvent, LifeAction])
    assert_type(LIFE.step(Life.READY, LifeEvent.CLOSE), Transition[Life, LifeAction])
    machine = Machine(RESET)
    assert_type(machine, Machine[Reset, ResetEvent, ResetAction])
    assert_type(machine.handle(ResetEvent.START), tuple[ResetAction, ...])
    assert_type(LIFE.rows[Life.READY], Mapping[LifeEvent, Transition[Life, LifeAction]])
    machine.handle(LifeEvent.CLOSE)  # type: ignore[arg-type]
    LIFE.step(Reset.IDLE, LifeEvent.CLOSE)  # type: ignore[arg-type]
    LIFE.rows[Life.READY] = {}  # type: ignore[index]


def data(fault: Fault, facts: StepFacts, layout: PeerLayout) -> None:
    assert_type(pair_tag(3), int)
    assert_type(tag_reached(3, 2), bool)
    assert_type(EpochBudget(57).reset_due(3), bool)
    assert_type(fault.site, Site | None)
    assert_type(fault.peer, int | None)
    assert_type(Fault.decode(b""), Fault)
    assert_type(plan_step(facts, max_rows=16), StepPlan)
    assert_type(layout.regions, tuple[Region, ...])
    assert_type(Agreement("map", (Verdict(0, None),)).failed, tuple[Verdict, ...])
    fault.rank = 3  # type: ignore[misc]
    layout.hidden = 3  # type: ignore[misc]
    attrs.evolve(layout, hiden=3)  # type: ignore[call-arg]
    Verdict(0)  # type: ignore[call-arg]


class Monotonic:
    def now(self) -> float:
        return 0.0


class Wrong:
    def now(self) -> str:
        return ""


def ports(channel: AgreementChannel, device: LaunchChannel, launch: Launch[list[int]]) -> None:
    clock: Clock = Monotonic()
    wrong: Clock = Wrong()  # type: ignore[assignment]
    assert_type(channel.gather("map", b""), tuple[bytes, ...])
    assert_type(device.health(), Fault)
    assert_type(launch([1], [2], [3], handshake=True), tuple[list[int], list[int]])
    launch([1], [2], [3])  # type: ignore[call-arg]
    del clock, wrong
