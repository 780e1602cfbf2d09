"""The ranks that the tests run: none outlives its run, and one that hangs says where."""

from __future__ import annotations

import os
import signal
import threading

from m3_comm.agreement import TorchAgreement
from m3_comm.testing import RankRunner

BOUND = 4.0


def _hang_here(channel: TorchAgreement, culprit: int) -> int:
    if channel.rank == culprit:
        threading.Event().wait()
    return channel.rank


def test_a_rank_that_hangs_is_named_with_what_it_was_doing(ranks: RankRunner) -> None:
    outcomes = ranks(3, _hang_here, 1, bound=BOUND)
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    assert [outcome.error for outcome in outcomes][::2] == [None, None]
    error = outcomes[1].error
    assert error is not None
    assert error.startswith(f"rank 1 did not end within {BOUND:g} s and was killed; it was at:")
    assert "in _hang_here" in error
    # The signal that asks for the stack ends it, unless that takes too long.
    assert outcomes[1].exit_code in (-signal.SIGUSR1, -signal.SIGKILL)


def _stop_here(channel: TorchAgreement) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_does_not_hold_up_the_run(ranks: RankRunner) -> None:
    (outcome,) = ranks(1, _stop_here, bound=BOUND)
    assert outcome.error is not None
    assert "it does not handle signals" in outcome.error


def _killed(channel: TorchAgreement) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_has_no_error_but_a_signal(ranks: RankRunner) -> None:
    (outcome,) = ranks(1, _killed)
    assert (outcome.value, outcome.error, outcome.exit_code) == (None, None, -signal.SIGKILL)
