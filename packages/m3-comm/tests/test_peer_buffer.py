from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_comm.agreement import LocalAgreement, TorchAgreement
from m3_comm.peer_buffer import PeerBuffer, Stage, compare
from m3_comm.transports.base import Allocation, Mapping
from m3_comm.transports.shm import ShmTransport
from m3_core.errors import CollectiveError, ConfigurationError, ResourceClosed, ResourceError
from m3_core.ports import MemoryTransport, PeerMemory

WORLDS = (2, 4, 8)
NBYTES = 3 * 4096 + 100


def _mapped() -> int:
    """Mappings of shared memory in this process, unlinked segments included."""
    return sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _descriptors() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{d}").startswith("/dev/shm") for d in os.listdir("/proc/self/fd"))


def _exchange(channel: TorchAgreement) -> None:
    rank, world_size = channel.rank, channel.world_size
    buffer = PeerBuffer.create(channel, ShmTransport(), NBYTES, fingerprint={"layout": 3})
    assert isinstance(buffer, PeerMemory)
    assert (buffer.rank, buffer.world_size, buffer.nbytes) == (rank, world_size, NBYTES)
    assert buffer.addresses[rank] == buffer.local
    assert len(set(buffer.addresses)) == world_size
    assert all(address % 4096 == 0 for address in buffer.addresses)
    assert buffer.address_table.dtype == torch.int64
    assert buffer.address_table.tolist() == list(buffer.addresses)
    assert buffer.bytes.shape == (NBYTES,)
    assert int(buffer.bytes.count_nonzero()) == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("m3.") and f"-{os.getpid()}-" in name]
    channel.agree("checked", None)
    for peer, address in enumerate(buffer.addresses):
        for call in range(3):
            ctypes.c_uint64.from_address(address + 8 * (world_size * call + rank)).value = 1000 * rank + 10 * peer + call + 1
    channel.agree("written", None)
    words = buffer.bytes[: 8 * 3 * world_size].view(torch.int64).tolist()
    assert words == [1000 * source + 10 * rank + call + 1 for call in range(3) for source in range(world_size)]
    channel.agree("read", None)
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert (_mapped(), _descriptors()) == (0, 0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_reaches_every_buffer(ranks: Any, world_size: int) -> None:
    for outcome in ranks(world_size, _exchange):
        assert outcome.error is None, outcome.trace


class Sabotage(ShmTransport):
    """Fails, dies or lies at one operation of the construction."""

    def __init__(self, operation: str, action: str) -> None:
        super().__init__()
        self.operation = operation
        self.action = action
        self.held: list[torch.Tensor] = []

    def _do(self, operation: str) -> bool:
        if operation != self.operation:
            return False
        if self.action != "lie":
            self.operation = ""  # once: the release after it must work
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "raise":
            raise ResourceError(f"sabotaged {operation}")
        if self.action == "crash":
            raise ZeroDivisionError(f"sabotaged {operation}")
        return True

    def allocate(self, nbytes: int, label: str = "") -> Allocation:
        self._do("before allocate")
        allocation = super().allocate(nbytes, label)
        self._do("allocate")
        return allocation

    def export(self, allocation: Allocation) -> bytes:
        handle = super().export(allocation)
        self._do("export")
        return handle

    def open(self, handle: bytes) -> Mapping:
        if self._do("open"):
            # A driver that reports success and maps something else.
            private = torch.zeros(4 * 4096, dtype=torch.uint8)
            self.held.append(private)
            return Mapping(private.data_ptr(), 4 * 4096, -1)
        return super().open(handle)

    def unlink(self, allocation: Allocation) -> None:
        self._do("unlink")
        super().unlink(allocation)

    def write_word(self, address: int, value: int) -> None:
        if self._do("write_word") or (value == 0 and self._do("clear")):
            return
        super().write_word(address, value)

    def read_word(self, address: int) -> int:
        return super().read_word(address) ^ self._do("read_word")

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        self._do("view")
        return super().view(address, nbytes)


STAGE_OF = {
    "before allocate": Stage.ALLOCATE,
    "allocate": Stage.ALLOCATE,
    "export": Stage.EXCHANGE,
    "open": Stage.OPEN,
    "unlink": Stage.PROBE_WRITE,
    "write_word": Stage.PROBE_WRITE,
    "read_word": Stage.PROBE_READ,
    "clear": Stage.READY,
    "view": Stage.READY,
}
# An allocation that the transport itself loses is not the buffer's to release.
RELEASABLE = tuple(operation for operation in STAGE_OF if operation != "allocate")


def _victims(world_size: int) -> tuple[int, ...]:
    """Every rank, or the first, one in the middle and the last of eight, to keep the test short."""
    return tuple(range(world_size)) if world_size < 8 else (0, 3, 7)


def _all_failures(channel: TorchAgreement) -> int:
    """Each operation fails once on each rank, in the same processes: the channel must survive, and nothing may be left."""
    runs = 0
    for operation in RELEASABLE:
        for victim in _victims(channel.world_size):
            for action in ("raise", "crash"):
                transport = Sabotage(operation if channel.rank == victim else "", action)
                with pytest.raises(CollectiveError) as caught:
                    PeerBuffer.create(channel, transport, NBYTES)
                text = f"sabotaged {operation}"
                reason = text if action == "raise" else f"ZeroDivisionError: {text}"
                if operation == "open":
                    reason = f"memory of rank {int(victim == 0)}: {reason}"
                assert {v.rank: v.reason for v in caught.value.verdicts if v.reason is not None} == {victim: reason}
                assert caught.value.phase == STAGE_OF[operation].value
                assert ("this rank failed" in str(caught.value)) == (channel.rank == victim)
                assert (_mapped(), _descriptors()) == (0, 0)
                runs += 1
    return runs


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_failure_in_any_stage_on_any_rank_raises_everywhere_with_its_reason(ranks: Any, world_size: int) -> None:
    for outcome in ranks(world_size, _all_failures):
        assert outcome.error is None, outcome.trace
        assert outcome.value == 2 * len(_victims(world_size)) * len(RELEASABLE)


def _lies(channel: TorchAgreement, operation: str) -> str:
    """Rank 1's mappings, stores or loads are wrong although every call reports success."""
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, Sabotage(operation if channel.rank == 1 else "", "lie"), NBYTES)
    assert caught.value.phase == Stage.PROBE_READ.value
    assert (_mapped(), _descriptors()) == (0, 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "named", "unnamed"),
    [
        (
            "open",
            ["pair 1 -> 0: rank 1 wrote", "pair 1 -> 2: rank 1 wrote"],
            ["pair 0 -> 1", "pair 0 -> 2", "pair 2 -> 0", "pair 2 -> 1", "pair 1 -> 1"],
        ),
        ("write_word", ["pair 1 -> 0", "pair 1 -> 1", "pair 1 -> 2"], ["pair 0 -> 1", "pair 0 -> 2", "pair 2 -> 0", "pair 2 -> 1"]),
        ("read_word", ["pair 0 -> 1", "pair 1 -> 0", "pair 1 -> 1", "pair 1 -> 2", "pair 2 -> 1"], ["pair 0 -> 2", "pair 2 -> 0"]),
    ],
)
def test_the_probe_names_the_pairs_that_do_not_work(ranks: Any, operation: str, named: list[str], unnamed: list[str]) -> None:
    texts = [o.value for o in ranks(3, _lies, operation)]
    for text in texts:
        assert all(pair in text for pair in named), text
        assert not any(pair in text for pair in unnamed), text


def _killed(channel: TorchAgreement, operation: str, victim: int) -> tuple[float, str]:
    channel.agree("before", None)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, Sabotage(operation if channel.rank == victim else "", "kill"), NBYTES)
    assert (_mapped(), _descriptors()) == (0, 0)
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("operation", STAGE_OF)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_a_rank_killed_in_any_stage_is_named_and_leaves_nothing(ranks: Any, operation: str, world_size: int, victim: int) -> None:
    timeout = 60.0
    outcomes = ranks(world_size, _killed, operation, victim, timeout=timeout)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is None, outcome.trace
            seconds, text = outcome.value
            assert f"rank {victim}: " in text
            assert STAGE_OF[operation].value in text
            assert seconds < timeout / 2


def _unequal(channel: TorchAgreement) -> str:
    odd = channel.rank == 2
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, ShmTransport(), NBYTES + 4096 * odd, fingerprint={"layout": 3 + odd, "tp": 4})
    assert caught.value.phase == Stage.CHECK.value
    assert (_mapped(), _descriptors()) == (0, 0)
    return str(caught.value)


def test_unequal_arguments_are_found_first_and_named(ranks: Any) -> None:
    for outcome in ranks(4, _unequal):
        assert outcome.error is None, outcome.trace
        assert f"rank 2: nbytes is {NBYTES + 4096}, on rank(s) [0, 1, 3] it is {NBYTES}; " in outcome.value
        assert "; layout is 4, on rank(s) [0, 1, 3] it is 3" in outcome.value


def test_comparison_names_absent_entries_and_takes_the_lowest_rank_of_equal_counts() -> None:
    assert [v.reason for v in compare([{"a": 1}, {"a": 1}])] == [None, None]
    assert [v.reason for v in compare([{"a": 1}, {"a": 2}])] == [None, "a is 2, on rank(s) [0] it is 1"]
    assert [v.reason for v in compare([{"a": 1, "b": "x"}, {"a": 1}, {"a": 1}])] == ['b is "x", on rank(s) [1, 2] it is absent', None, None]
    # A number and its text are not the same.
    assert [v.reason for v in compare([{"a": 1}, {"a": "1"}])] == [None, 'a is "1", on rank(s) [0] it is 1']


@pytest.mark.parametrize("nbytes", [-1, 0, 7])
def test_a_buffer_too_small_is_refused(nbytes: int) -> None:
    with pytest.raises(CollectiveError, match=f"peer buffer of {nbytes} bytes: at least 8 are needed for 1 ranks"):
        PeerBuffer.create(LocalAgreement(), ShmTransport(), nbytes)


def _alone() -> PeerBuffer:
    return PeerBuffer.create(LocalAgreement(), ShmTransport(), NBYTES)


def test_a_lone_rank_has_its_own_address() -> None:
    with _alone() as buffer:
        assert buffer.addresses == (buffer.local,)
        ctypes.c_uint32.from_address(buffer.local + 12).value = 0x01020304
        assert buffer.bytes[12:16].tolist() == [4, 3, 2, 1]
        buffer.bytes[16:].fill_(255)
        assert ctypes.c_uint8.from_address(buffer.local + NBYTES - 1).value == 255
        assert ctypes.c_uint8.from_address(buffer.local + NBYTES).value == 0
    assert (_mapped(), _descriptors()) == (0, 0)


def test_everything_refuses_use_after_close() -> None:
    buffer = _alone()
    whole, part, words = buffer.bytes, buffer.bytes[16:], buffer.bytes[: NBYTES // 8 * 8].view(torch.int64)[3]
    copy = buffer.bytes.clone()
    buffer.close()
    for use in (
        lambda: buffer.local,
        lambda: buffer.addresses,
        lambda: buffer.address_table,
        lambda: buffer.bytes,
        lambda: whole.zero_(),
        lambda: part[0],
        lambda: part.data_ptr(),
        lambda: words.item(),
        lambda: words + 1,
        lambda: torch.zeros(NBYTES, dtype=torch.uint8).copy_(whole),
        lambda: whole.numpy(),
        lambda: str(whole),
    ):
        with pytest.raises(ResourceClosed, match="after close"):
            use()
    assert type(copy) is torch.Tensor
    assert copy.shape == (NBYTES,)


def test_a_dropped_owner_releases_its_memory() -> None:
    buffer = _alone()
    view = buffer.bytes
    del buffer
    gc.collect()
    assert (_mapped(), _descriptors()) == (0, 0)
    with pytest.raises(ResourceClosed):
        view.zero_()


def test_a_forked_child_may_not_use_or_release_the_parents_memory() -> None:
    buffer = _alone()
    buffer.bytes.fill_(7)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ResourceClosed, match="forked child"):
                _ = buffer.local
            with pytest.raises(ResourceClosed, match="forked child"):
                buffer.bytes.sum()
            buffer.close()
            # The mapping is not inherited, so the child keeps no memory alive.
            os._exit(0 if _mapped() == 0 else 2)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(buffer.bytes.sum()) == 7 * NBYTES
    buffer.close()


class Stuck(ShmTransport):
    """Cannot unmap a peer's memory."""

    def close(self, mapping: Mapping) -> None:
        super().close(mapping)
        raise ResourceError("stuck")


def _stuck(channel: TorchAgreement) -> None:
    buffer = PeerBuffer.create(channel, Stuck(), NBYTES)
    with pytest.raises(ResourceError, match=f"not released completely: mapping of rank {1 - channel.rank}: stuck"):
        buffer.close()
    assert (_mapped(), _descriptors()) == (0, 0)
    buffer.close()


def test_a_release_that_fails_goes_on_and_says_so(ranks: Any) -> None:
    assert [o.error for o in ranks(2, _stuck)] == [None, None]


def test_the_transport_is_a_port() -> None:
    assert isinstance(ShmTransport(), MemoryTransport)


def test_the_label_of_a_segment_is_checked() -> None:
    transport = ShmTransport()
    allocation = transport.allocate(1, "a/b")
    with pytest.raises(ConfigurationError, match="segment label 'a/b'"):
        transport.export(allocation)
    transport.free(allocation)
