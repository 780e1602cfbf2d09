"""How a forward pass drives the executor: what runs, what is counted, what happens to an exception."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from vllm.config import CUDAGraphMode

from m3_comm.agreement import LocalAgreement
from m3_core.errors import RefusalError
from m3_kernels.ffn import ExpertFormat, FfnConstants
from m3_vllm.adapters.cpu import steps
from m3_vllm.adapters.cpu.paging import BlockSparseMetadata
from m3_vllm.settings import Mode, Settings
from m3_vllm.status import RankStatus

pytestmark = pytest.mark.serving

SLOTS = torch.tensor([5, 9])


class Calls:
    """Stands for the executor, and says what was asked of it."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed = False
        self.counters = SimpleNamespace(launches=0, resets=0, epoch=0)
        self.fails_after = False

    def begin_step(self, slots: torch.Tensor) -> None:
        assert slots is SLOTS
        self.made.append("begin")

    def layer(self, number: int) -> str:
        return f"fused {number}"

    def after_step(self) -> None:
        self.made.append("after")
        if self.fails_after:
            raise RuntimeError("fault")

    def output_step(self) -> None:
        self.made.append("output")

    def abort(self) -> None:
        self.made.append("abort")

    def health(self) -> Any:
        return SimpleNamespace(failed=False)


def metadata(decodes: int, prefills: int) -> BlockSparseMetadata:
    return BlockSparseMetadata(
        rows=decodes + 7 * prefills,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=prefills,
        num_prefill_tokens=7 * prefills,
        block_table=torch.zeros(decodes + prefills, 1, dtype=torch.int32),
        request_bounds=(),
        row_request=torch.zeros(0),
    )


class Board:
    def __init__(self) -> None:
        self.shown: list[RankStatus] = []

    def publish(self, status: RankStatus) -> None:
        self.shown.append(status)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A model of two sparse layers whose forward context the test sets."""
    state = SimpleNamespace(metadata=metadata(2, 0), calls=Calls(), board=Board())
    attention = SimpleNamespace(metadata=lambda: state.metadata, slots=lambda: None if state.metadata is None else SLOTS)
    layers = {3: SimpleNamespace(self_attn=attention), 4: SimpleNamespace(self_attn=attention)}
    monkeypatch.setattr(steps, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(steps, "get_forward_context", lambda: SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE))
    state.steps = steps.Steps(layers, state.calls, 2, state.board, 0, 2)  # type: ignore[arg-type]
    return state


def run(world: SimpleNamespace, rows: int = 2) -> dict[int, Any]:
    with world.steps.step(rows) as layers:
        found = dict(layers)
    world.steps.output()
    return found


def test_a_decode_step_is_fused(world: SimpleNamespace) -> None:
    assert run(world) == {3: "fused 3", 4: "fused 4"}
    assert world.calls.made == ["begin", "after", "output"]
    shown = world.board.shown[-1]
    assert (shown.fused_steps, shown.stock_steps, shown.outputs) == (1, 0, 1)


@pytest.mark.parametrize(("found", "rows"), [(metadata(1, 1), 8), (metadata(0, 1), 7), (metadata(3, 0), 3)])
def test_other_steps_run_stock(world: SimpleNamespace, found: BlockSparseMetadata, rows: int) -> None:
    """Mixed, prefill, and wider than the widest launch: no launch, but the step counts toward the next reset."""
    world.metadata = found
    assert run(world, rows) == {}
    assert world.calls.made == ["output"]
    shown = world.board.shown[-1]
    assert (shown.fused_steps, shown.stock_steps, shown.outputs) == (0, 1, 1)


def test_a_profiling_run_counts_nothing(world: SimpleNamespace) -> None:
    world.metadata = None
    assert run(world) == {}
    assert world.calls.made == []
    assert world.board.shown == []


def test_logits_of_prompt_tokens_are_no_second_output(world: SimpleNamespace) -> None:
    run(world)
    world.steps.output()
    assert world.calls.made.count("output") == 1


@pytest.mark.parametrize("found", [metadata(2, 0), metadata(0, 1)])
def test_an_exception_in_the_pass_marks_the_rank(world: SimpleNamespace, found: BlockSparseMetadata) -> None:
    world.metadata = found

    def failing_pass() -> None:
        with world.steps.step(2):
            raise ValueError("attention")

    with pytest.raises(ValueError, match="attention"):
        failing_pass()
    assert world.calls.made[-1] == "abort"
    assert "after" not in world.calls.made
    # No token is sampled from it.
    world.steps.output()
    assert "output" not in world.calls.made


def test_a_fault_is_shown(world: SimpleNamespace) -> None:
    world.calls.fails_after = True
    world.calls.health = lambda: SimpleNamespace(failed=True, rank=1, epoch=7, site_number=8)
    with pytest.raises(RuntimeError, match="fault"):
        run(world)
    shown = world.board.shown[-1]
    assert (shown.fault, shown.fault_rank, shown.fault_epoch, shown.fault_site) == (1, 1, 7, 8)
    assert "output" not in world.calls.made


def test_without_executor(world: SimpleNamespace) -> None:
    world.steps.executor = None
    assert run(world) == {}
    assert (world.board.shown[-1].stock_steps, world.board.shown[-1].outputs) == (1, 1)


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.REQUIRE])
def test_launches_that_cannot_be_built(mode: Mode) -> None:
    """Every reason at once: "require" refuses, "auto" goes on with the stock layers and says so once."""
    experts = SimpleNamespace(format=ExpertFormat.BF16)
    layers: Any = {3: SimpleNamespace(block_sparse_moe=SimpleNamespace(experts=experts))}
    config = SimpleNamespace(hidden_size=256, intermediate_size=256, num_local_experts=16, num_experts_per_tok=9)
    settings = Settings(mode=mode, reset_steps=999_999)
    caught: RefusalError | None = None
    with capture_logs() as logs:
        try:
            assert steps._executor(layers, config, FfnConstants(), LocalAgreement(), 4, settings) is None
        except RefusalError as error:
            caught = error
    reasons = caught.reasons if caught is not None else logs[0]["reasons"]
    assert (caught is not None) == (mode is Mode.REQUIRE) == (logs == [])
    assert len(reasons) == 2
    assert "top_k is 9" in reasons[0]
    assert "reset_steps=999999" in reasons[1]
