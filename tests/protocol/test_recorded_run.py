"""A recorded run of the CPU target, four ranks as processes, is a run of the protocol; and the check notices if it is not."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.shm import ShmTransport
from m3_core.check.cli import main
from m3_core.check.traces import Event, Record, Stage, check, read, write
from m3_core.reset import RESET, ResetAction, ResetEvent
from m3_core.tables import Machine
from m3_kernels.build.cpu import default_library
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape
from m3_kernels.testing import LayerInputs, random_inputs, random_weights

RANKS = 4
SHAPE = FfnShape(hidden=192, intermediate=64, experts=8, top_k=4, world_size=RANKS, max_rows=4)
LAYERS = 2
STEPS = 5
JOIN_SECONDS = 120.0
# Stamps of a block's timeline: at the beginning of the stages, in order, and at the end.
STAMPS = {
    (Stage.PUSH, Event.BEGIN): 0,
    (Stage.REDUCE, Event.END): 2,
    (Stage.DOWN, Event.BEGIN): 8,
    (Stage.FINAL, Event.END): 10,
}
FLAG_STAMP = 11


class Recorder:
    """One rank of the run, which writes down what it does."""

    def __init__(self, channel: FfnChannel, agreement: TorchAgreement, launches: list[FfnLaunch]) -> None:
        self.channel = channel
        self.agreement = agreement
        self.launches = launches
        self.records: list[Record] = []

    def host(self, stage: Stage, event: Event) -> None:
        self.records.append(Record(self.channel.rank, stage, event, time=time.monotonic_ns()))

    def launch_event(self, stage: Stage, event: Event, epoch: int, at: int, block: int | None = None) -> None:
        self.records.append(Record(self.channel.rank, stage, event, epoch, block=block, time=at))

    def step(self, inputs: LayerInputs) -> None:
        self.host(Stage.STEP, Event.BEGIN)
        for number, launch in enumerate(self.launches):
            self.launch(launch, inputs, last=number == LAYERS - 1)
        self.host(Stage.STEP, Event.DROP if self.channel.health().failed else Event.END)

    def launch(self, launch: FfnLaunch, inputs: LayerInputs, *, last: bool) -> None:
        channel = self.channel
        rows = inputs.residual.shape[0]
        known = channel.health().failed
        epoch = channel.epoch()
        self.launch_event(Stage.LAUNCH, Event.BEGIN, epoch, time.monotonic_ns())
        launch(inputs.parts[channel.rank], inputs.residual, inputs.slots, handshake=last)
        fault = channel.health()
        if fault.failed:
            if not known and fault.rank == channel.rank:
                self.launch_event(Stage.LAUNCH, Event.FAULT, epoch, time.monotonic_ns())
            if last:
                assert known, "a run whose ranks learn in the last launch needs the flight recorder"
                self.launch_event(Stage.HANDSHAKE, Event.FAILED_FLAG, epoch, time.monotonic_ns())
            self.launch_event(Stage.LAUNCH, Event.LEAVE, epoch, time.monotonic_ns())
            return
        stamps = channel.timeline_stamps(rows)
        for (stage, event), stamp in STAMPS.items():
            for block in range(channel.grid):
                self.launch_event(stage, event, epoch, int(stamps[block, stamp]), block)
        if last:
            self.launch_event(Stage.HANDSHAKE, Event.CLEAR_FLAG, epoch, int(stamps[0, FLAG_STAMP]), 0)
            self.launch_event(Stage.HANDSHAKE, Event.END, epoch, time.monotonic_ns(), 0)
        self.launch_event(Stage.LAUNCH, Event.END, epoch, time.monotonic_ns())

    def reset(self) -> None:
        machine = Machine(RESET)
        machine.handle(ResetEvent.START)
        self.host(Stage.RESET, Event.BEGIN)
        self.channel.synchronize()
        machine.handle(ResetEvent.DONE)
        self.host(Stage.RESET, Event.DRAINED)
        self.agreement.agree("reset.drain", None)
        assert ResetAction.CLEAR in machine.handle(ResetEvent.AGREED)
        self.host(Stage.RESET, Event.AGREED)
        self.channel.zero_scratch_and_epoch()
        machine.handle(ResetEvent.DONE)
        self.host(Stage.RESET, Event.CLEARED)
        self.agreement.agree("reset.clear", None)
        assert ResetAction.RESUME in machine.handle(ResetEvent.AGREED)
        self.host(Stage.RESET, Event.RESUMED)


def calm(recorder: Recorder, inputs: list[LayerInputs]) -> None:
    for step in range(STEPS):
        recorder.step(inputs[step % len(inputs)])
    recorder.reset()
    for step in range(STEPS):
        recorder.step(inputs[step % len(inputs)])
    assert recorder.channel.epoch() == STEPS * LAYERS


def failing(recorder: Recorder, inputs: list[LayerInputs]) -> None:
    recorder.step(inputs[0])
    # Without this a slow rank could meet the fault while it still waits for the flags of the step before.
    recorder.agreement.agree("calm", None)
    recorder.channel.inject_fault(2)
    recorder.step(inputs[0])


def run_rank(body: Callable[[Recorder, list[LayerInputs]], None], rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    agreement = TorchAgreement(dist.group.WORLD, 60.0)
    buffer = PeerBuffer.create(agreement, ShmTransport(), SHAPE.peer_layout.total_bytes)
    try:
        channel = FfnChannel(SHAPE, buffer, grid=2, wait_seconds=30.0, timeline=True)
        generator = torch.Generator().manual_seed(3)
        weights = [random_weights(SHAPE, ExpertFormat.BF16, generator) for _ in range(LAYERS)]
        inputs = [random_inputs(SHAPE, rows, generator, padded=[0] if rows == 1 else []) for rows in (3, 1)]
        launches = [FfnLaunch(channel, layer[rank], FfnConstants(), number) for number, layer in enumerate(weights)]
        recorder = Recorder(channel, agreement, launches)
        agreement.agree("ready", None)
        body(recorder, inputs)
        agreement.agree("done", None)
        write(folder / f"{rank}.jsonl", recorder.records)
        channel.close()
    finally:
        buffer.close()
    dist.destroy_process_group()


def record(body: Callable[[Recorder, list[LayerInputs]], None], folder: Path) -> list[Record]:
    # Compiled here, once, before the ranks look for it.
    default_library()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(body, rank, folder)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_SECONDS)
    assert [process.exitcode for process in processes] == [0] * RANKS
    return [event for rank in range(RANKS) for event in read(folder / f"{rank}.jsonl")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return record(calm, tmp_path_factory.mktemp("calm"))


def test_a_run_with_a_reset_is_a_run_of_the_protocol(run: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launches = 2 * STEPS * LAYERS
    assert sum((event.stage, event.event) == (Stage.LAUNCH, Event.END) for event in run) == RANKS * launches
    write(tmp_path / "run.jsonl", run)
    assert main(["--trace", str(tmp_path / "run.jsonl")]) == 0
    assert "the protocol allows it" in capsys.readouterr().out


def test_exchanges_ended_after_their_words_were_sent(run: list[Record]) -> None:
    """The same run with one rank's clock put forward is impossible: peers would have read what was not yet sent."""
    late = [attrs.evolve(event, time=event.time + 10**9) if event.rank == 1 and event.time is not None else event for event in run]
    assert any("read attention words of epoch 0" in problem and "before rank 1" in problem for problem in check(late))


def test_a_run_without_one_rank_s_clear_is_not(run: list[Record]) -> None:
    wrong = [event for event in run if (event.rank, event.event) != (3, Event.CLEARED)]
    assert any("rank 3 never was cleared" in problem for problem in check(wrong))


def test_a_run_that_ends_in_a_fault(tmp_path: Path) -> None:
    events = record(failing, tmp_path)
    assert check(events) == ()
    assert sum(event.event is Event.DROP for event in events) == RANKS
    lie = [attrs.evolve(event, event=Event.END) if event.event is Event.DROP and event.rank == 0 else event for event in events]
    assert any("rank 0 returned tokens of step 1, but rank 2 failed no later than step 1" in problem for problem in check(lie))
