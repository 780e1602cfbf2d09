"""The executor over real ranks: processes, gloo agreement, shared memory, the kernels of the CPU target."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import torch
import torch.distributed as dist

from m3_comm.agreement import LocalAgreement, TorchAgreement
from m3_comm.flight_report import read
from m3_comm.transports.segments import segments
from m3_comm.transports.shm import DEFAULT_DIRECTORY, ShmTransport
from m3_core.epochs import EPOCH_LIMIT, EpochBudget
from m3_core.errors import CollectiveError, ConfigurationError, FaultError, ProtocolError, ResourceClosed
from m3_core.faults import Site
from m3_core.flight import FlightEvent, FlightReset
from m3_core.ports import AgreementChannel
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_vllm.cli import main
from m3_vllm.executor import FfnExecutor, SparseLayer

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 96, 32, 4, 2
LAYERS = (3, 4, 5)
WAIT_SECONDS = 20.0
PROCESS_SECONDS = 120.0


def make_weights(seed: int) -> FfnWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (0.1 * torch.randn(size, generator=generator)).to(dtype)

    return FfnWeights(
        ExpertFormat.BF16,
        post_norm=normal(HIDDEN),
        router=normal(EXPERTS, HIDDEN, dtype=torch.float32),
        router_bias=normal(EXPERTS, dtype=torch.float32),
        w13=normal(EXPERTS + 1, 2 * INTERMEDIATE, HIDDEN),
        s13=None,
        w2=normal(EXPERTS + 1, HIDDEN, INTERMEDIATE),
        s2=None,
    )


def attention(positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, residual


def build(channel: AgreementChannel, **changes: Any) -> FfnExecutor:
    arguments: dict[str, Any] = {
        "layers": {number: SparseLayer(attention, make_weights(100 * number + channel.rank)) for number in LAYERS},
        "shape": FfnShape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, channel.world_size, 4),
        "constants": FfnConstants(),
        "channel": channel,
        "transport": ShmTransport(),
        "widths": (1, 2, 3, 4),
        "grid": 2,
        "wait_seconds": WAIT_SECONDS,
        **changes,
    }
    return FfnExecutor(arguments.pop("layers"), **arguments)


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16)
    residual = torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16)
    return torch.arange(rows), hidden, residual


def run_step(executor: FfnExecutor, rows: int = 2, seed: int = 0) -> torch.Tensor:
    positions, hidden, residual = inputs(rows, seed)
    executor.begin_step(torch.arange(rows))
    for number in LAYERS:
        layer = executor.layer(number)
        assert layer is not None
        hidden, residual = layer(positions, hidden, residual)
    executor.after_step()
    executor.output_step()
    return hidden


@attrs.frozen
class Ended:
    value: Any
    error: str
    exit_code: int | None


def _main(function: Callable[..., Any], rank: int, world_size: int, store: str, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        assert dist.group.WORLD is not None
        pipe.send((function(TorchAgreement(dist.group.WORLD, 30.0), *args), ""))
    except BaseException as error:
        pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_ranks(folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> list[Ended]:
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(function, rank, world_size, str(folder / "store"), there, args))
        process.start()
        there.close()
        started.append((process, here))
    ended = []
    try:
        for process, pipe in started:
            value, error = None, "no answer"
            if wait([pipe], PROCESS_SECONDS):
                with contextlib.suppress(EOFError):
                    value, error = pipe.recv()
            process.join(PROCESS_SECONDS)
            ended.append(Ended(value, error, process.exitcode))
    finally:
        for process, _ in started:
            if process.is_alive():
                process.kill()
                process.join()
    owned = {process.pid for process, _ in started}
    assert [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in owned] == []
    return ended


# --- one rank --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def executor() -> Any:
    built = build(LocalAgreement())
    yield built
    built.close()


def test_step_counts_launches_steps_outputs_and_epoch(executor: FfnExecutor) -> None:
    run_step(executor)
    run_step(executor, rows=4)
    counters = executor.counters
    assert counters.launches_per_layer == {3: 2, 4: 2, 5: 2}
    assert (counters.launches, counters.steps, counters.outputs, counters.resets, counters.epoch) == (6, 2, 2, 0, 6)
    assert not executor.health().failed
    assert executor.fault_word.tolist() == [0, 0, 0, 0]


def test_layer_that_is_not_sparse_has_no_callable(executor: FfnExecutor) -> None:
    assert executor.layer(0) is None


def test_binding_a_cache_is_an_error(executor: FfnExecutor) -> None:
    assert FfnExecutor.uses_caches is False
    with pytest.raises(ProtocolError, match="BIND"):
        executor.bind()


def test_launch_outside_a_step_is_refused_and_changes_nothing(executor: FfnExecutor) -> None:
    positions, hidden, residual = inputs(1)
    layer = executor.layer(3)
    assert layer is not None
    with pytest.raises(ProtocolError, match="begin_step"):
        layer(positions, hidden, residual)
    assert executor.counters.launches == 0
    run_step(executor)


def test_slots_of_another_type_are_refused_before_the_step_begins(executor: FfnExecutor) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.int32"):
        executor.begin_step(torch.zeros(2, dtype=torch.int32))
    run_step(executor)


def test_step_inside_a_step_is_illegal(executor: FfnExecutor) -> None:
    executor.begin_step(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ProtocolError, match="BEGIN_STEP"):
        executor.begin_step(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ProtocolError, match="RESET_DUE"):
        executor.reset_epoch()


def test_bad_tensor_in_a_step_marks_the_rank_failed(executor: FfnExecutor) -> None:
    executor.begin_step(torch.arange(2))
    with pytest.raises(ConfigurationError, match="part"):
        executor.launch(3, torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    fault = executor.health()
    assert (fault.failed, fault.rank, fault.epoch, fault.site) == (True, 0, -1, Site.HOST)
    with pytest.raises(FaultError, match="rank 0"):
        executor.begin_step(torch.arange(2))


def test_reset_falls_at_the_budgets_step_and_bits_stay() -> None:
    budget = EpochBudget(len(LAYERS), uncounted=EPOCH_LIMIT - 2 * len(LAYERS))
    assert budget.reset_step == 2
    executor = build(LocalAgreement(), reset_budget=budget)
    outputs, epochs = [], []
    for _ in range(5):
        outputs.append(run_step(executor, rows=3))
        epochs.append(executor.counters.epoch)
    assert epochs == [3, 0, 3, 0, 3]
    assert executor.counters.resets == 2
    assert all(torch.equal(outputs[0], other) for other in outputs)
    executor.close()


def test_dummy_run_counts_no_output() -> None:
    executor = build(LocalAgreement())
    positions, hidden, residual = inputs(1)
    executor.begin_step(torch.arange(1))
    layer = executor.layer(3)
    assert layer is not None
    layer(positions, hidden, residual)
    executor.after_step()
    executor.output_step(sampled=False)
    assert (executor.counters.outputs, executor.counters.steps, executor.counters.epoch) == (0, 1, 1)
    executor.close()


def test_close_is_idempotent_and_final(executor: FfnExecutor) -> None:
    executor.close()
    executor.close()
    executor.abort()
    assert executor.closed
    assert executor.counters.epoch == 0
    with pytest.raises(ResourceClosed):
        executor.health()
    with pytest.raises(ResourceClosed):
        executor.begin_step(torch.arange(1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": {}}, "no sparse layer"),
        ({"widths": (0, 1)}, r"widths \[0\]"),
        ({"widths": (5,)}, r"widths \[5\]"),
        ({"widths": ()}, "widths"),
        ({"reset_budget": EpochBudget(2)}, "counts 2 launches"),
        ({"grid": 0}, "grid is 0"),
        ({"wait_seconds": 0.0}, "wait_seconds"),
        ({"shape": FfnShape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, 2, 4)}, "2 ranks"),
        ({"shape": FfnShape(HIDDEN, 2 * INTERMEDIATE, EXPERTS, TOP_K, 1, 4)}, "w13"),
    ],
)
def test_what_cannot_work_fails_construction_with_its_reason(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        build(LocalAgreement(), **changes)
    assert [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process == os.getpid()] == []


# --- several ranks ---------------------------------------------------------------------------------------------------------------------


def _steps(channel: TorchAgreement, steps: int, reset_step: int) -> tuple[list[list[float]], int, int]:
    executor = build(channel, reset_budget=EpochBudget(len(LAYERS), uncounted=EPOCH_LIMIT - reset_step * len(LAYERS)))
    outputs = [run_step(executor, rows=1 + step % 4, seed=step).float().flatten().tolist() for step in range(steps)]
    counters = executor.counters
    channel.agree("test.end", None)
    executor.close()
    return outputs, counters.resets, counters.epoch


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_hold_the_same_bits_through_resets(tmp_path: Path, world_size: int) -> None:
    ended = run_ranks(tmp_path, world_size, _steps, 9, 4)
    assert [end.error for end in ended] == [""] * world_size
    first = ended[0].value
    assert first[1:] == (2, 3)
    assert all(end.value == first for end in ended[1:])


def _build_with_a_broken_rank(channel: TorchAgreement, broken: int, change: dict[str, Any]) -> None:
    build(channel, **(change if channel.rank == broken else {}))


@pytest.mark.parametrize("change", [{"widths": (9,)}, {"grid": 0}, {"wait_seconds": -1.0}], ids=["check", "grid", "bound"])
def test_a_rank_that_cannot_build_fails_all_and_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    ended = run_ranks(tmp_path, 2, _build_with_a_broken_rank, 1, change)
    for end in ended:
        assert end.error.startswith("CollectiveError")
        assert "rank 1:" in end.error
    assert "this rank was ready, another failed" in ended[0].error
    assert "this rank failed" in ended[1].error


def test_ranks_of_unequal_shape_name_the_field(tmp_path: Path) -> None:
    shape = FfnShape(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, 2, 3)
    ended = run_ranks(tmp_path, 2, _build_with_a_broken_rank, 1, {"shape": shape, "widths": (1,)})
    assert all("max_rows" in end.error or "nbytes" in end.error for end in ended)


def _abort_in_a_step(channel: TorchAgreement) -> tuple[str, int]:
    executor = build(channel)
    run_step(executor)
    channel.agree("test.step", None)
    if channel.rank == 1:
        executor.begin_step(torch.arange(2))
        executor.abort()
        fault = executor.health()
        channel.agree("test.end", None)
        return "aborted", fault.rank
    try:
        run_step(executor)
        run_step(executor)
    except FaultError as error:
        channel.agree("test.end", None)
        return "fault", error.fault.rank
    channel.agree("test.end", None)
    return "no fault", -1


def test_abort_of_one_rank_ends_the_others_step(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, _abort_in_a_step)
    assert [end.error for end in ended] == ["", ""]
    assert ended[0].value == ("fault", 1)
    assert ended[1].value == ("aborted", 1)


def _fail_in_reset(channel: TorchAgreement, phase: str) -> tuple[str, bool]:
    executor = build(channel)
    run_step(executor)
    channel.agree("test.step", None)
    if channel.rank == 1:

        def broken() -> None:
            raise ConfigurationError("injected by the test")

        setattr(executor, phase, broken)
    try:
        executor.reset_epoch()
    except CollectiveError as error:
        channel.agree("test.end", None)
        return str(error), executor.health().failed
    return "no error", False


@pytest.mark.parametrize(("method", "phase"), [("_drain", "reset.drain"), ("_clear", "reset.clear")])
def test_reset_that_fails_on_one_rank_fails_on_all_and_marks_them(tmp_path: Path, method: str, phase: str) -> None:
    ended = run_ranks(tmp_path, 2, _fail_in_reset, method)
    for end in ended:
        assert end.error == ""
        text, marked = end.value
        assert phase in text
        assert "rank 1: ConfigurationError: injected by the test" in text
        assert marked


# --- flight records -----------------------------------------------------------------------------------------------------------------------

FLIGHT_WAIT_SECONDS = 1.0
STALL_SECONDS = 2.0
STALLED_LAYER = LAYERS[1]


def _stall_in_a_layer(channel: TorchAgreement, folder: Path, stalled: int) -> tuple[str, list[str], list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as events:
        # One block: the others of the stalled rank would wait for it as its peers do.
        executor = build(channel, flight=folder, wait_seconds=FLIGHT_WAIT_SECONDS, grid=1)
        run_step(executor)
        channel.agree("test.step", None)
        positions, hidden, residual = inputs(2)
        executor.begin_step(torch.arange(2))
        for number in LAYERS:
            layer = executor.layer(number)
            assert layer is not None
            # From here on the stalled rank's launches stand still for longer than its peers wait.
            if number == STALLED_LAYER and channel.rank == stalled:
                executor._channel.inject_fault(stalled, STALL_SECONDS)
            hidden, residual = layer(positions, hidden, residual)
        with pytest.raises(FaultError) as caught:
            executor.after_step()
        channel.agree("test.end", None)
        executor.close()
    return str(caught.value), caught.value.__notes__, events


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_records_of_all_ranks_name_the_first_stall(tmp_path: Path, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    stalled, folder = world_size - 1, tmp_path / "flight"
    ended = run_ranks(tmp_path, world_size, _stall_in_a_layer, folder, stalled)
    assert [end.error for end in ended] == [""] * world_size
    for rank, end in enumerate(ended):
        message, (note,), events = end.value
        assert f"layer {STALLED_LAYER}, stage REDUCE" in message
        assert f"from rank {stalled}" in message
        (fault,) = [event for event in events if event["event"] == "fault"]
        (dumped,) = [event for event in events if event["event"] == "flight_dumped"]
        assert fault["flight"] == dumped["files"]
        assert fault["flight"][0] == str(folder / f"m3-flight-rank{rank}.bin")
        assert note == f"flight records for `m3 flight`: {' '.join(fault['flight'])}"
    timeline = read([folder])
    assert sorted(timeline.headers) == list(range(world_size))
    assert timeline.missing == ()
    stall = timeline.first_stall()
    assert stall is not None
    assert stall.wait.rank != stalled
    assert (stall.wait.site, stall.wait.layer, stall.wait.epoch, stall.peer) == (Site.REDUCE, STALLED_LAYER, len(LAYERS) + 1, stalled)
    if stall.gave_up is not None:
        waited = (stall.gave_up.nanoseconds - stall.wait.nanoseconds) / 1e9
        assert waited >= FLIGHT_WAIT_SECONDS
    steps = [(record.rank, record.event, record.detail) for record in timeline.records if record.event is FlightEvent.STEP_BEGIN]
    assert sorted(steps) == [(rank, FlightEvent.STEP_BEGIN, step) for rank in range(world_size) for step in range(2)]
    returned = [(record.rank, record.detail) for record in timeline.records if record.event is FlightEvent.STEP_END]
    assert sorted(returned) == [(rank, 0) for rank in range(world_size)]
    # What the command prints.
    assert main(["flight", str(folder), "--last", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"first stall: rank {stall.wait.rank} at REDUCE")
    assert f"of rank {stalled}, epoch {len(LAYERS) + 1}, layer {STALLED_LAYER}" in lines[-1]
    assert sum(" s  rank " in line for line in lines) == 5


def _refuse_a_tensor(channel: AgreementChannel, folder: Path) -> list[dict[str, Any]]:
    with structlog.testing.capture_logs() as events:
        executor = build(channel, flight=folder)
        run_step(executor)
        executor.begin_step(torch.arange(2))
        with pytest.raises(ConfigurationError):
            executor.launch(LAYERS[0], torch.zeros(1), torch.zeros(1))
        executor.close()
    return [event for event in events if event["event"] == "aborted"]


def test_an_abort_writes_the_record_too(tmp_path: Path) -> None:
    (aborted,) = _refuse_a_tensor(LocalAgreement(), tmp_path)
    assert aborted["flight"] == [str(tmp_path / "m3-flight-rank0.bin")]
    timeline = read([tmp_path])
    failure = timeline.first_failure()
    assert failure is not None
    assert (failure.event, failure.rank) == (FlightEvent.ABORT, 0)
    assert timeline.first_stall() is None


def test_a_record_that_cannot_be_written_is_logged_and_hides_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with structlog.testing.capture_logs() as events:
        executor = build(LocalAgreement(), flight=tmp_path / "file" / "folder")
        executor.begin_step(torch.arange(2))
        executor.abort()
        with pytest.raises(FaultError):
            executor.begin_step(torch.arange(2))
        executor.close()
    assert "cannot be written" in next(event["reason"] for event in events if event["event"] == "flight_dump_failed")


def test_a_reset_is_recorded_in_its_order(tmp_path: Path) -> None:
    executor = build(LocalAgreement(), flight=tmp_path)
    run_step(executor)
    executor.reset_epoch()
    files = executor.dump_flight(tmp_path)
    executor.close()
    moments = [FlightReset(r.detail) for r in read(files).records if r.event is FlightEvent.RESET]
    assert moments == [FlightReset.BEGIN, FlightReset.DRAINED, FlightReset.AGREED, FlightReset.CLEARED, FlightReset.RESUMED]


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    executor = build(LocalAgreement())
    run_step(executor)
    assert executor.dump_flight(tmp_path) == ()
    executor.close()
    assert list(tmp_path.iterdir()) == []


def _records_alone(channel: TorchAgreement, folder: Path) -> None:
    build(channel, flight=folder if channel.rank == 0 else None)


def test_ranks_record_all_or_none(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, _records_alone, tmp_path)
    assert all("flight records is" in end.error for end in ended)


def test_the_command_refuses_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no record")
    assert main(["flight", str(tmp_path / "text")]) == 1
    assert "text: no flight record of m3" in capsys.readouterr().err
