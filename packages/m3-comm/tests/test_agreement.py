from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m3_comm.agreement import CONFIRM_SECONDS, MESSAGE_TAG, PHASE_BYTES_LIMIT, LocalAgreement, TorchAgreement, joint_stage
from m3_core.errors import CollectiveError, ConfigurationError
from m3_core.ports import AgreementChannel

WORLDS = (2, 4, 8)


# Around the part of a payload that fits into the first frame (364 bytes), unequal between ranks and between calls.
LENGTHS = (0, 1, 363, 364, 365, 366, 4096, 1_000_003)


def _payload(rank: int, call: int) -> bytes:
    return bytes([rank]) * LENGTHS[(call + rank) % len(LENGTHS)]


def _payloads(channel: TorchAgreement) -> list[tuple[bytes, ...]]:
    return [channel.gather(f"call {call}", _payload(channel.rank, call)) for call in range(len(LENGTHS))]


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_gets_every_payload_in_rank_order(ranks: Any, world_size: int) -> None:
    outcomes = ranks(world_size, _payloads)
    assert [o.error for o in outcomes] == [None] * world_size, outcomes[0].trace
    for outcome in outcomes:
        for call, answers in enumerate(outcome.value):
            assert answers == tuple(_payload(r, call) for r in range(world_size))


def _reasons(channel: TorchAgreement, failing: tuple[int, ...]) -> str:
    channel.agree("before", None)
    with pytest.raises(CollectiveError) as caught:
        channel.agree("phase", f"rank {channel.rank} has no coffee" if channel.rank in failing else None)
    assert [v.rank for v in caught.value.verdicts if v.reason is not None] == list(failing)
    channel.agree("after", None)
    return str(caught.value)


@pytest.mark.parametrize("failing", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_a_reason_anywhere_raises_everywhere_and_the_channel_goes_on(ranks: Any, failing: tuple[int, ...]) -> None:
    outcomes = ranks(4, _reasons, failing)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.trace
        for r in range(4):
            assert (f"rank {r}: rank {r} has no coffee" in outcome.value) == (r in failing)
        assert ("this rank failed" in outcome.value) == (rank in failing)


def _stage(channel: TorchAgreement, interrupted: bool) -> str:
    def work() -> bytes:
        if channel.rank == 1:
            raise KeyboardInterrupt if interrupted else ValueError("odd")
        return b"fine"

    expected = KeyboardInterrupt if interrupted and channel.rank == 1 else CollectiveError
    with pytest.raises(expected) as caught:
        joint_stage(channel, "stage", work)
    if expected is KeyboardInterrupt:
        assert isinstance(caught.value.__cause__, CollectiveError)
        return "interrupted"
    assert isinstance(caught.value.__cause__, ValueError) == (channel.rank == 1)
    return str(caught.value)


def test_an_exception_in_a_stage_does_not_skip_the_collective(ranks: Any) -> None:
    outcomes = ranks(2, _stage, False)
    assert all("rank 1: ValueError: odd" in o.value for o in outcomes), outcomes
    outcomes = ranks(2, _stage, True)
    assert outcomes[1].value == "interrupted"
    assert "rank 1: KeyboardInterrupt" in outcomes[0].value


def _different_phases(channel: TorchAgreement) -> None:
    channel.agree("drain" if channel.rank != 1 else "clear", None)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_in_different_phases_name_both(ranks: Any, world_size: int) -> None:
    for rank, outcome in enumerate(ranks(world_size, _different_phases)):
        assert outcome.error is not None
        assert outcome.error.startswith("CollectiveError: ")
        if rank == 1:
            assert "rank 0: is in phase 'drain' while rank 1 is in phase 'clear'" in outcome.error
        else:
            assert f"rank 1: is in phase 'clear' while rank {rank} is in phase 'drain'" in outcome.error


def _killed(channel: TorchAgreement, victim: int) -> float:
    channel.agree("before", None)
    if channel.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError, match=rf"rank {victim}: its connection is closed|rank {victim}: could not be reached"):
        channel.agree("after", None)
    return time.monotonic() - start


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("last", [False, True])
def test_a_killed_rank_is_named_at_once(ranks: Any, world_size: int, last: bool) -> None:
    victim = world_size - 1 if last else 0
    outcomes = ranks(world_size, _killed, victim, timeout=60.0)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is None, outcome.trace
            # The survivors learn it from the closed connection, long before the bound of 60 s.
            assert outcome.value < 30.0


class DiesBetweenSends(TorchAgreement):
    """Is killed once rank 0 has its frame, and before any other rank has."""

    def _trade(self, incoming: Any, outgoing: Any, deadline: float) -> Any:
        frame = torch.frombuffer(bytearray(outgoing[0]), dtype=torch.uint8)
        answer = torch.empty(incoming[0], dtype=torch.uint8)
        receive = dist.irecv(answer, group=self._group, group_src=0, tag=MESSAGE_TAG)
        send = dist.isend(frame, group=self._group, group_dst=0, tag=MESSAGE_TAG)
        assert receive is not None
        assert send is not None
        send.wait()
        receive.wait()
        os.kill(os.getpid(), signal.SIGKILL)


class Unconfirmed(TorchAgreement):
    """Without the second round."""

    def _confirm(self, *args: Any) -> None:
        pass


def _partial(channel: TorchAgreement, kind: type[TorchAgreement]) -> list[int]:
    channel.agree("before", None)
    agreement = (DiesBetweenSends if channel.rank == 2 else kind)(channel._group, 30.0)
    try:
        agreement.agree("phase", None)
    except CollectiveError as error:
        return [v.rank for v in error.verdicts if v.reason is not None]
    return []


def test_a_rank_that_dies_between_two_sends_fails_the_phase_on_all_others(ranks: Any) -> None:
    outcomes = ranks(4, _partial, TorchAgreement)
    assert [o.exit_code for o in outcomes] == [0, 0, -signal.SIGKILL, 0]
    assert [outcomes[r].value for r in (0, 1, 3)] == [[2], [2], [2]]
    # The same with the second round taken away: rank 0 goes on alone.
    outcomes = ranks(4, _partial, Unconfirmed)
    assert [outcomes[r].value for r in (0, 1, 3)] == [[], [2], [2]]


def _stopped(channel: TorchAgreement, missing: tuple[int, ...]) -> tuple[float, list[int]] | None:
    channel.agree("before", None)
    if channel.rank in missing:
        # Stays away from the phase until the peers have given up and closed the connection.
        time.sleep(1.0 + 2 * CONFIRM_SECONDS)
        with pytest.raises(CollectiveError) as late:
            channel.agree("phase", None)
        assert "its connection is closed" in str(late.value)
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        channel.agree("phase", None)
    named = [v.rank for v in caught.value.verdicts if v.reason is not None and "did not come within 1 s" in v.reason]
    return time.monotonic() - start, named


@pytest.mark.parametrize(("world_size", "missing"), [(2, (1,)), (4, (0,)), (4, (1, 3)), (8, (2, 5, 6))])
def test_ranks_that_do_not_come_are_named_within_the_bound(ranks: Any, world_size: int, missing: tuple[int, ...]) -> None:
    for rank, outcome in enumerate(ranks(world_size, _stopped, missing, timeout=1.0)):
        assert outcome.error is None, outcome.trace
        if rank not in missing:
            seconds, named = outcome.value
            assert named == list(missing)
            assert 1.0 <= seconds < 1.0 + CONFIRM_SECONDS


def test_local_agreement_is_a_channel_of_one() -> None:
    channel = LocalAgreement()
    assert isinstance(channel, AgreementChannel)
    assert channel.gather("phase", b"payload") == (b"payload",)
    channel.agree("phase", None)
    with pytest.raises(CollectiveError, match="rank 0: no memory"):
        channel.agree("phase", "no memory")


@pytest.mark.parametrize("phase", ["", "p" * (PHASE_BYTES_LIMIT + 1), "a\0b"])
def test_phase_names_are_checked(phase: str) -> None:
    with pytest.raises(ConfigurationError):
        LocalAgreement().agree(phase, None)


def _odd_timeout(channel: TorchAgreement) -> None:
    with pytest.raises(ConfigurationError, match="above 0 s"):
        TorchAgreement(channel._group, 0.0)


def test_a_wait_without_bound_is_refused(ranks: Any) -> None:
    assert [o.error for o in ranks(2, _odd_timeout)] == [None, None]
