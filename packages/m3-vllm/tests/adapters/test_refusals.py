from __future__ import annotations

import json
from types import SimpleNamespace

import attrs
import pytest

from m3_core.epochs import EpochBudget
from m3_kernels.ffn import ExpertFormat, FfnShape
from m3_vllm.adapters.cpu.refusals import LaunchRequest, agreed_refusals
from m3_vllm.settings import Settings

CONFIG = SimpleNamespace(hidden_size=256, intermediate_size=256, num_local_experts=16, num_experts_per_tok=4)


def collect(settings: Settings | None = None, format: ExpertFormat = ExpertFormat.BF16, **changes: int) -> LaunchRequest:
    config = SimpleNamespace(**{**vars(CONFIG), **changes})
    return LaunchRequest.collect(config, 3, 2, 4, settings or Settings(), format)


def test_what_fits() -> None:
    shape = FfnShape(hidden=256, intermediate=128, experts=16, top_k=4, world_size=2, max_rows=4)
    assert collect() == LaunchRequest(shape, EpochBudget(3), ())


@pytest.mark.parametrize("steps", [1, 7, 2000])
def test_a_reset_falls_where_the_settings_say(steps: int) -> None:
    budget = collect(Settings(reset_steps=steps)).budget
    assert budget is not None
    assert budget.reset_step == steps
    assert budget.reset_due(steps)
    assert not budget.reset_due(steps - 1)


def test_every_reason_is_collected() -> None:
    last = EpochBudget(3).reset_step
    request = collect(Settings(reset_steps=last + 1), num_experts_per_tok=9, hidden_size=255)
    assert request.shape is None
    assert [reason.split(" ")[0] for reason in request.reasons[-1:]] == [f"reset_steps={last + 1}"]
    assert any("top_k" in reason for reason in request.reasons)
    assert any("hidden" in reason for reason in request.reasons)
    assert any("intermediate is 96" in reason for reason in collect(format=ExpertFormat.MXFP4, intermediate_size=192).reasons)


@attrs.frozen
class GivenPayloads:
    """A channel whose ranks' payloads are known."""

    payloads: tuple[bytes, ...]
    rank: int = 0

    @property
    def world_size(self) -> int:
        return len(self.payloads)

    def gather(self, phase: str, payload: bytes) -> tuple[bytes, ...]:
        assert payload == self.payloads[self.rank]
        return self.payloads

    def agree(self, phase: str, reason: str | None) -> None:
        raise AssertionError("refusals are gathered, so that mode auto can go on")


def test_ranks_hear_each_other() -> None:
    reasons = [["too wide", "odd"], ["odd"], []]
    channel = GivenPayloads(tuple(json.dumps(one).encode() for one in reasons), rank=2)
    assert agreed_refusals(channel, []) == ("too wide (on rank [0])", "odd (on rank [0, 1])")
    same = GivenPayloads((b'["odd"]', b'["odd"]'))
    assert agreed_refusals(same, ["odd"]) == ("odd",)
    assert agreed_refusals(GivenPayloads((b"[]", b"[]")), []) == ()
