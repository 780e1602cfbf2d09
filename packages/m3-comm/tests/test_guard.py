from __future__ import annotations

import threading

import pytest

from m3_comm.guard import ChannelGuard
from m3_core.errors import ResourceBusy, ResourceClosed


def test_a_second_thread_is_refused_while_one_is_inside() -> None:
    guard, other = ChannelGuard("channel 0"), ChannelGuard("channel 1")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with guard.use():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=hold, name="first")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ResourceBusy, match=r"channel 0 is in use by thread 'first'; thread 'MainThread' must wait"), guard.use():
        pass
    with pytest.raises(ResourceBusy, match="closed by thread 'MainThread' while thread 'first' uses it"):
        guard.close()
    # Another channel is not concerned.
    with other.use():
        pass
    leave.set()
    thread.join()
    with guard.use():
        pass


def test_entering_twice_is_refused_and_an_error_inside_leaves_the_channel_free() -> None:
    guard = ChannelGuard("channel")
    with guard.use(), pytest.raises(ResourceBusy), guard.use():
        pass
    with pytest.raises(ZeroDivisionError), guard.use():
        raise ZeroDivisionError
    with guard.use():
        pass


def test_a_second_stream_is_refused_until_the_first_is_done() -> None:
    guard = ChannelGuard("channel")
    done = False
    with guard.use("a", lambda: done):
        pass
    with guard.use("a", lambda: done):
        pass
    with pytest.raises(ResourceBusy, match=r"work in flight on stream 'a'; synchronise that stream before stream 'b'"), guard.use("b"):
        pass
    # Work without a stream does not wait for one either.
    with pytest.raises(ResourceBusy), guard.use():
        pass
    done = True
    with guard.use("b"):
        pass
    # Nobody can tell when "b" is done, but its owner.
    with pytest.raises(ResourceBusy, match="stream 'b'"), guard.use("a"):
        pass
    guard.drained()
    with guard.use("a"):
        pass


def test_work_that_is_done_on_return_binds_no_stream() -> None:
    guard = ChannelGuard("channel")
    with guard.use():
        pass
    with guard.use("a"):
        pass


def test_a_closed_channel_refuses() -> None:
    guard = ChannelGuard("channel 3")
    guard.close()
    guard.close()
    with pytest.raises(ResourceClosed, match=r"channel 3 used after close"), guard.use():
        pass
