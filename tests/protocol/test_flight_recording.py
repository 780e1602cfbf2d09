"""Real runs of the CPU target, checked against the protocol by their flight records: clean ones with resets, and ones that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_comm.agreement import TorchAgreement
from m3_comm.flight_report import read
from m3_comm.flight_trace import recording
from m3_comm.testing import RankRunner
from m3_comm.transports.shm import ShmTransport
from m3_core.check.traces import check
from m3_core.epochs import EPOCH_LIMIT, EpochBudget
from m3_core.errors import ConfigurationError, FaultError
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_vllm.cli import main
from m3_vllm.executor import FfnExecutor, SparseLayer

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, ROWS = 96, 32, 4, 2, 2
LAYERS = (3, 4, 5)
RESET_STEPS = 2
STEPS = 5
RESETS = 2
WORLD = 4

Event = dict[str, Any]


def executor_of(channel: TorchAgreement, folder: Path, wait_seconds: float, grid: int) -> FfnExecutor:
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (0.1 * torch.randn(size, generator=generator)).to(dtype)

    weights = FfnWeights(
        ExpertFormat.BF16,
        post_norm=normal(HIDDEN),
        router=normal(EXPERTS, HIDDEN, dtype=torch.float32),
        router_bias=normal(EXPERTS, dtype=torch.float32),
        w13=normal(EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN),
        s13=None,
        w2=normal(EXPERTS + 1, HIDDEN, INTERMEDIATE),
        s2=None,
    )
    return FfnExecutor(
        {number: SparseLayer(lambda positions, hidden, residual: (hidden, residual), weights) for number in LAYERS},
        shape=FfnShape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, channel.world_size, ROWS),
        constants=FfnConstants(),
        channel=channel,
        transport=ShmTransport(),
        widths=(ROWS,),
        grid=grid,
        reset_budget=EpochBudget(len(LAYERS), uncounted=EPOCH_LIMIT - RESET_STEPS * len(LAYERS)),
        wait_seconds=wait_seconds,
        flight=folder,
    )


def run_layers(executor: FfnExecutor) -> None:
    executor.begin_step(torch.arange(ROWS))
    hidden = residual = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16)
    for number in LAYERS:
        hidden, residual = executor.launch(number, hidden, residual)
    executor.after_step()


def _clean(channel: TorchAgreement, folder: Path, grid: int) -> int:
    executor = executor_of(channel, folder, wait_seconds=20.0, grid=grid)
    for step in range(STEPS):
        run_layers(executor)
        # Before the reset that may follow: the launches after it take the places of these.
        executor.dump_flight(folder / str(step))
        executor.output_step()
    resets = executor.counters.resets
    executor.dump_flight(folder / "end")
    channel.agree("test.end", None)
    executor.close()
    return resets


@pytest.fixture
def ranks(tmp_path: Path) -> RankRunner:
    return RankRunner(tmp_path)


def events_of(ranks: RankRunner, folder: Path, grid: int = 2) -> list[Event]:
    """The recording of a clean run with resets, as ``m3 flight --trace`` writes it."""
    outcomes = ranks(WORLD, _clean, folder, grid)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD, outcomes[0].trace
    assert [outcome.value for outcome in outcomes] == [RESETS] * WORLD
    folders = [str(folder / name) for name in (*map(str, range(STEPS)), "end")]
    assert main(["flight", *folders, "--trace", str(folder / "trace.jsonl")]) == 0
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    folder = tmp_path_factory.mktemp("clean")
    return folder, events_of(RankRunner(folder), folder)


def test_a_run_with_resets_is_what_the_protocol_allows(clean: tuple[Path, list[Event]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, events = clean
    launches = [event for event in events if (event["stage"], event["event"]) == ("launch", "begin")]
    assert len(launches) == WORLD * STEPS * len(LAYERS)
    assert [event["epoch"] for event in launches if event["rank"] == 0] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert sum((event["stage"], event["event"]) == ("reset", "resumed") for event in events) == WORLD * RESETS
    assert all("time" in event for event in events)
    assert main(["check", "--trace", str(folder / "trace.jsonl")]) == 0
    assert f"{len(events)} events of {WORLD} ranks, the protocol allows it" in capsys.readouterr().out


def test_one_block_records_the_same_events(ranks: RankRunner, clean: tuple[Path, list[Event]], tmp_path: Path) -> None:
    def plain(events: list[Event]) -> list[Event]:
        return [{key: value for key, value in event.items() if key != "time"} for event in events]

    assert plain(events_of(ranks, tmp_path / "one", grid=1)) == plain(clean[1])


def first(events: list[Event], rank: int, stage: str, event: str, skip: int = 0) -> int:
    """Place of an event of a rank."""
    found = [i for i, e in enumerate(events) if (e["rank"], e["stage"], e["event"]) == (rank, stage, event)]
    return found[skip]


def _without_a_push(events: list[Event]) -> None:
    del events[first(events, 2, "push", "begin", 4)]


def _down_after_the_peers_have_it(events: list[Event]) -> None:
    down = first(events, 1, "down", "begin")
    end = first(events, 0, "final", "end")
    events[down]["time"] = events[end]["time"] + 1


def _reset_without_a_clear(events: list[Event]) -> None:
    del events[first(events, 3, "reset", "cleared")]


def _resumed_before_all_have_cleared(events: list[Event]) -> None:
    events[first(events, 0, "reset", "resumed")]["time"] = events[first(events, 3, "reset", "cleared")]["time"] - 1


def _epoch_skipped(events: list[Event]) -> None:
    for event in events:
        if event["rank"] == 1 and event.get("epoch") == 5:
            event["epoch"] = 6


def _no_reset_on_one_rank(events: list[Event]) -> None:
    events[:] = [event for event in events if not (event["rank"] == 2 and event["stage"] == "reset")]


def _tokens_before_the_handshake(events: list[Event]) -> None:
    del events[first(events, 0, "handshake", "clear flag", 1)]


def _a_launch_less(events: list[Event]) -> None:
    start = first(events, 1, "launch", "begin", len(LAYERS) * STEPS - 1)
    end = first(events, 1, "launch", "end", len(LAYERS) * STEPS - 1)
    del events[start : end + 1]


def _a_fault_whose_step_was_returned(events: list[Event]) -> None:
    place = first(events, 3, "down", "begin", 7)
    events.insert(place, {**events[place], "stage": "reduce", "event": "fault", "peer": 0})


TAMPERED: tuple[tuple[Callable[[list[Event]], None], str], ...] = (
    (_without_a_push, "rank 2 never did push begin there"),
    (_down_after_the_peers_have_it, "before rank 1 did down begin"),
    (_reset_without_a_clear, "out of turn"),
    (_resumed_before_all_have_cleared, "before rank 3 was cleared"),
    (_epoch_skipped, "begins a launch of channel 0 at epoch 6; its last one leaves 5"),
    (_no_reset_on_one_rank, "rank 2"),
    (_tokens_before_the_handshake, "rank 0 never did handshake clear flag there"),
    (_a_launch_less, "rank 1"),
    (_a_fault_whose_step_was_returned, "but rank 3 failed"),
)


@pytest.mark.parametrize(("tamper", "problem"), TAMPERED, ids=[tamper.__name__.strip("_") for tamper, _ in TAMPERED])
def test_a_tampered_recording_is_rejected(
    clean: tuple[Path, list[Event]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tamper: Callable[[list[Event]], None],
    problem: str,
) -> None:
    events = [dict(event) for event in clean[1]]
    tamper(events)
    file = tmp_path / "tampered.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["check", "--trace", str(file)]) == 1
    assert problem in capsys.readouterr().out


def test_records_that_are_not_the_whole_run_make_no_recording(clean: tuple[Path, list[Event]], tmp_path: Path) -> None:
    folder, _ = clean
    # Two resets: of the first period the launches' places were taken again, of the second all but the last step's.
    with pytest.raises(ConfigurationError, match="rank 0 has no record of any launch of step 0"):
        recording(read([folder / "end"]))
    with pytest.raises(ConfigurationError, match="rank 0 has no record of any launch of step 2"):
        recording(read([folder / "1", folder / "end"]))
    with pytest.raises(ConfigurationError, match=r"no flight record of rank\(s\) \[1, 2, 3\]"):
        recording(read([folder / "end" / "m3-flight-rank0.bin"]))


def _failing(channel: TorchAgreement, folder: Path, how: str) -> str:
    executor = executor_of(channel, folder, wait_seconds=1.0, grid=1)
    run_layers(executor)
    executor.output_step()
    channel.agree("test.step", None)
    culprit = channel.rank == WORLD - 1
    if how == "inject":
        executor._channel.inject_fault(WORLD - 1)
    if how == "abort" and culprit:
        executor.begin_step(torch.arange(ROWS))
        executor.abort()
    else:
        with pytest.raises(FaultError):
            run_layers(executor)
    executor.dump_flight(folder)
    channel.agree("test.end", None)
    executor.close()
    return "ended"


@pytest.mark.parametrize("how", ["inject", "abort"])
def test_a_run_that_fails_is_what_the_protocol_allows(ranks: RankRunner, tmp_path: Path, how: str) -> None:
    folder = tmp_path / how
    outcomes = ranks(WORLD, _failing, folder, how)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD, outcomes[0].trace
    events = recording(read([folder]))
    assert check(events) == ()
    values = {(event.stage.value, event.event.value) for event in events}
    assert ("host", "abort") in values if how == "abort" else ("launch", "fault") in values
    assert ("step", "drop") in values
