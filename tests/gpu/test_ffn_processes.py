"""Two ranks as two processes on one GPU, peer memory through CUDA IPC: the launch, a reset, an injected fault, a rank that is killed.

Without MPS the two processes' launches take turns on the GPU, so every wait spans time slices: few launches, generous bounds. The test
process itself must not use the GPU: the ranks are forked from it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from m3_comm.agreement import TorchAgreement
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.testing import RankRunner
from m3_comm.transports.cuda import CudaTransport
from m3_core.faults import Fault, Site
from m3_kernels.checking import check_launch, read_scratch
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape
from m3_kernels.testing import random_inputs, random_weights, weights_to

pytestmark = pytest.mark.gpu

SHAPE = FfnShape(hidden=512, intermediate=128, experts=16, top_k=4, world_size=2, max_rows=16)
BLOCKS = 16
LAYER = 3


class Rank:
    """One rank in its process."""

    def __init__(self, agreement: TorchAgreement, wait_seconds: float) -> None:
        self.agreement = agreement
        self.device = torch.device("cuda", 0)
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        self.peers = PeerBuffer.create(agreement, CudaTransport(0), SHAPE.peer_layout.total_bytes, fingerprint={"test": "launch"})
        self.channel = FfnChannel(SHAPE, self.peers, grid=BLOCKS, wait_seconds=wait_seconds, device=self.device)
        generator = torch.Generator().manual_seed(11)
        self.weights = {
            format: tuple(weights_to(one, self.device) for one in random_weights(SHAPE, format, generator)) for format in ExpertFormat
        }
        self.launches = {
            format: FfnLaunch(self.channel, weights[agreement.rank], FfnConstants(), LAYER) for format, weights in self.weights.items()
        }

    def run(self, format: ExpertFormat, rows: int, seed: int, *, check: bool = True) -> None:
        inputs = random_inputs(SHAPE, rows, torch.Generator().manual_seed(seed), [1] if rows > 2 else []).to(self.device)
        self.channel.prepare(rows)
        epoch = self.channel.epoch()
        self.agreement.agree(f"launch {seed}", None)
        found = self.launches[format](inputs.parts[self.agreement.rank], inputs.residual, inputs.slots, handshake=True)
        self.channel.synchronize()
        if check:
            assert self.channel.health().describe() == "no fault"
            check_launch(SHAPE, inputs, self.weights[format], found, read_scratch(self.channel, format, rows, epoch))

    def close(self) -> None:
        self.channel.close()
        self.peers.close()


@pytest.fixture
def runner(tmp_path: Path) -> RankRunner:
    return RankRunner(tmp_path)


def launches_and_a_reset(agreement: TorchAgreement) -> int:
    rank = Rank(agreement, 20.0)
    for seed, format in enumerate((*ExpertFormat, ExpertFormat.MXFP4)):
        rank.run(format, (3, 1, 5, 2, 16)[seed], seed)
    rank.channel.synchronize()
    agreement.agree("reset.drain", None)
    rank.channel.zero_scratch_and_epoch()
    agreement.agree("reset.clear", None)
    assert rank.channel.epoch() == 0
    rank.run(ExpertFormat.MXFP4, 4, 7)
    epoch = rank.channel.epoch()
    rank.close()
    return epoch


def test_two_processes_through_a_reset(runner: RankRunner) -> None:
    outcomes = runner(2, launches_and_a_reset)
    assert [(outcome.error, outcome.trace) for outcome in outcomes] == [(None, "")] * 2
    assert [outcome.value for outcome in outcomes] == [1, 1]


def an_injected_fault(agreement: TorchAgreement) -> Fault:
    rank = Rank(agreement, 20.0)
    rank.run(ExpertFormat.BF16, 2, 1)
    rank.channel.inject_fault(1, 0.001)
    rank.run(ExpertFormat.BF16, 2, 2, check=False)
    fault = rank.channel.health()
    agreement.agree("seen", None)
    rank.close()
    return fault


def test_an_injected_fault_reaches_the_other_process(runner: RankRunner) -> None:
    outcomes = runner(2, an_injected_fault)
    assert [outcome.error for outcome in outcomes] == [None] * 2
    assert [outcome.value for outcome in outcomes] == [Fault(True, 1, 1, Site.INJECT, None, LAYER)] * 2


def a_killed_rank(agreement: TorchAgreement) -> Fault:
    rank = Rank(agreement, 3.0)
    rank.run(ExpertFormat.BF16, 2, 1)
    if agreement.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    inputs = random_inputs(SHAPE, 2, torch.Generator().manual_seed(2)).to(rank.device)
    rank.launches[ExpertFormat.BF16](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
    rank.channel.synchronize()
    return rank.channel.health()


def test_a_killed_process_is_named(runner: RankRunner) -> None:
    outcomes = runner(2, a_killed_rank)
    assert outcomes[1].exit_code == -signal.SIGKILL
    fault = outcomes[0].value
    assert (fault.failed, fault.rank, fault.site, fault.peer) == (True, 0, Site.REDUCE, 1)
