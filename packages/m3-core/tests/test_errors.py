"""Errors cross process borders: a worker's reaches the engine, and the engine's reaches the server."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator

import pytest

from m3_core import errors
from m3_core.agreement import Verdict
from m3_core.errors import CollectiveError, FaultError, M3Error, ProtocolError, RefusalError
from m3_core.faults import Fault, Site

VERDICTS = (Verdict(0, None), Verdict(1, "no room"))
FAULT = Fault(failed=True, rank=1, epoch=7, site=Site.REDUCE, peer=2, layer=31)

SPECIAL: dict[type[M3Error], Callable[[], M3Error]] = {
    RefusalError: lambda: RefusalError(["too wide", "too deep"], "this shape"),
    ProtocolError: lambda: ProtocolError("life", "READY", "END_STEP", ("BEGIN_STEP", "CLOSE")),
    CollectiveError: lambda: CollectiveError("executor.build", 0, VERDICTS),
    FaultError: lambda: FaultError(FAULT),
}
"""Classes whose constructor takes something else than a message."""


def hierarchy(kind: type[M3Error] = M3Error) -> Iterator[type[M3Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from hierarchy(child)


CLASSES = sorted(set(hierarchy()), key=lambda kind: kind.__name__)


def make(kind: type[M3Error]) -> M3Error:
    error = SPECIAL.get(kind, lambda: kind("what is wrong, and what to do"))()
    error.add_note("seen by a test")
    return error


def state(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), error.args, error.__dict__


def test_every_class_of_the_module_is_in_the_hierarchy() -> None:
    named = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert named <= set(CLASSES)
    assert set(SPECIAL) <= set(CLASSES)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_pickling_keeps_type_message_attributes_and_notes(kind: type[M3Error], protocol: int) -> None:
    error = make(kind)
    there = pickle.loads(pickle.dumps(error, protocol))
    assert state(there) == state(error)
    assert there.__notes__ == ["seen by a test"]
    assert isinstance(there, kind.__mro__[1])


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_copying_keeps_them_too(kind: type[M3Error]) -> None:
    error = make(kind)
    assert state(copy.copy(error)) == state(error)
    assert state(copy.deepcopy(error)) == state(error)


def _raise(kind_name: str, queue: multiprocessing.SimpleQueue[BaseException]) -> None:
    try:
        raise make(next(kind for kind in CLASSES if kind.__name__ == kind_name))
    except M3Error as error:
        queue.put(error)


@pytest.mark.parametrize("kind", list(SPECIAL), ids=lambda kind: kind.__name__)
def test_an_error_reaches_another_process(kind: type[M3Error]) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[BaseException] = context.SimpleQueue()
    process = context.Process(target=_raise, args=(kind.__name__, queue))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert state(queue.get()) == state(make(kind))


def test_fields_are_those_of_the_original() -> None:
    collective = pickle.loads(pickle.dumps(make(CollectiveError)))
    assert (collective.phase, collective.rank, collective.verdicts) == ("executor.build", 0, VERDICTS)
    assert pickle.loads(pickle.dumps(make(FaultError))).fault == FAULT
    refusal = pickle.loads(pickle.dumps(make(RefusalError)))
    assert (refusal.reasons, refusal.subject) == (("too wide", "too deep"), "this shape")
    protocol = pickle.loads(pickle.dumps(make(ProtocolError)))
    assert (protocol.machine, protocol.state, protocol.event, protocol.allowed) == ("life", "READY", "END_STEP", ("BEGIN_STEP", "CLOSE"))
