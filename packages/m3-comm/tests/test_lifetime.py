from __future__ import annotations

import multiprocessing
import os
import select
import signal
from multiprocessing.connection import Connection

import pytest

from m3_comm.lifetime import die_with_parent, die_with_starter
from m3_core.errors import ResourceError


def _tree(tied: bool) -> tuple[int, int]:
    """A parent that waits for ever, with a child that waits for ever; returns the parent's id and the child's."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        own = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                if tied:
                    die_with_parent(own)
                os.write(writer, str(os.getpid()).encode())
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        while True:
            signal.pause()
    os.close(writer)
    child = int(os.read(reader, 32))
    os.close(reader)
    return parent, child


def _ended(process: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_a_killed_parent_takes_its_rank_with_it() -> None:
    parent, child = _tree(tied=True)
    descriptor = os.pidfd_open(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select.select([descriptor], [], [], 2.0)[0]
    os.close(descriptor)


def test_without_the_tie_the_rank_lives_on() -> None:
    parent, child = _tree(tied=False)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert not _ended(child, 0.2)
    os.kill(child, signal.SIGKILL)


def test_a_parent_that_has_ended_already_is_an_error() -> None:
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ResourceError, match="the parent 999999 of this rank has ended"):
                die_with_parent(999_999)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _worker(pipe: Connection) -> None:
    pipe.send((die_with_starter(), os.getpid()))
    while True:
        signal.pause()


def _engine(method: str, pipe: Connection) -> None:
    process = multiprocessing.get_context(method).Process(target=_worker, args=(pipe,))
    process.start()
    while True:
        signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_multiprocessing_started_goes_with_its_starter(method: str) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    engine = context.Process(target=_engine, args=(method, there))
    engine.start()
    assert here.poll(60), "the worker did not start"
    tied, worker = here.recv()
    assert tied
    descriptor = os.pidfd_open(worker)
    engine.kill()
    engine.join()
    assert select.select([descriptor], [], [], 2.0)[0]
    os.close(descriptor)


def test_a_process_that_nobody_started_so_is_left_alone() -> None:
    assert multiprocessing.parent_process() is None
    assert not die_with_starter()
