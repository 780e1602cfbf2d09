from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m3_comm.agreement import TorchAgreement
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.processes import ProcessIdentity, start_ticks
from m3_comm.reaper import reap
from m3_comm.transports.base import Handle
from m3_comm.transports.segments import DEFAULT_DIRECTORY, SegmentName, abandoned, segments
from m3_comm.transports.shm import ShmTransport
from m3_core.errors import CollectiveError, ConfigurationError, ResourceError

PAGE = 4096


@pytest.mark.parametrize(("asked", "given"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5_243_136, 5_246_976)])
def test_sizes_are_whole_pages_zeroed_and_aligned(asked: int, given: int) -> None:
    transport = ShmTransport()
    allocation = transport.allocate(asked)
    assert allocation.nbytes == given
    assert allocation.address % PAGE == 0
    assert int(transport.view(allocation.address, given).count_nonzero()) == 0
    transport.write_word(allocation.address + given - 8, 0x0123456789ABCDEF)
    assert transport.view(allocation.address + given - 8, 8).tolist() == [0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01]
    transport.free(allocation)
    transport.free(allocation)


@pytest.mark.parametrize("nbytes", [0, -4096])
def test_nothing_cannot_be_allocated(nbytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"buffer of {nbytes} bytes: ask for at least 1"):
        ShmTransport().allocate(nbytes)


def test_a_segment_has_a_name_only_between_export_and_unlink() -> None:
    transport = ShmTransport()
    allocation = transport.allocate(PAGE, "label")
    assert _own() == []
    handle = transport.export(allocation)
    assert transport.export(allocation) == handle
    (segment,) = _own()
    assert segment.label == "label"
    assert segment.owner == ProcessIdentity.current()
    first, second = transport.open(handle), transport.open(handle)
    transport.unlink(allocation)
    transport.unlink(allocation)
    assert _own() == []
    with pytest.raises(ResourceError, match="No such file"):
        transport.open(handle)
    transport.write_word(allocation.address, 42)
    assert (transport.read_word(first.address), transport.read_word(second.address)) == (42, 42)
    transport.close(first)
    transport.close(first)
    transport.free(allocation)
    # The mapping holds the memory after its owner freed it.
    assert transport.read_word(second.address) == 42
    transport.close(second)


def _own() -> list[SegmentName]:
    return [s for s in segments(DEFAULT_DIRECTORY) if s.owner.process == os.getpid()]


def test_a_handle_of_another_segment_is_refused() -> None:
    transport = ShmTransport()
    allocation = transport.allocate(PAGE)
    handle = Handle.decode(transport.export(allocation), "shm")
    inode, _, name = handle.base.decode().partition(":")
    for bad, message in [
        (Handle("shm", f"{int(inode) + 1}:{name}".encode(), 0, PAGE), "is not the one its owner exported"),
        (Handle("shm", handle.base, 0, 2 * PAGE), "is not the one its owner exported"),
        (Handle("shm", f"{inode}:../etc/passwd".encode(), 0, PAGE), "is none that m3 gives"),
    ]:
        with pytest.raises(ResourceError, match=message):
            transport.open(bad.encode())
    for data, message in [
        (Handle("cuda", handle.base, 0, PAGE).encode(), "transport 'cuda' opened by transport 'shm'"),
        (b"nonsense", "no memory handle"),
        (handle.encode()[:-1], "cut short"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            transport.open(data)
    transport.free(allocation)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB, or where mounting is not allowed the bound comes from ``RLIMIT_FSIZE`` in the test below."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _full(channel: TorchAgreement, folder: Path, nbytes: int) -> str:
    # Rank 1 alone runs out.
    transport = ShmTransport(folder) if channel.rank == 1 else ShmTransport()
    with pytest.raises(CollectiveError) as caught:
        PeerBuffer.create(channel, transport, nbytes)
    assert caught.value.phase == "peer-buffer/allocate"
    return str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; test_a_reservation_that_fails_is_named covers the path without")
def test_a_full_tmpfs_fails_at_construction_with_needed_and_available_bytes(ranks: Any, small_tmpfs: Path) -> None:
    outcomes = ranks(2, _full, small_tmpfs, 81_920)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert f"rank 1: shared memory in {small_tmpfs} is full: 81920 bytes needed, 65536 of 65536 available" in outcome.value
        assert "--shm-size" in outcome.value
        assert "--ipc=host" in outcome.value
    assert os.listdir(small_tmpfs) == []
    # What fits still fits: a reservation that failed took nothing.
    transport = ShmTransport(small_tmpfs)
    allocation = transport.allocate(65_536)
    with pytest.raises(ResourceError, match="4096 bytes needed, 0 of 65536 available"):
        transport.allocate(1)
    transport.free(allocation)


def test_a_full_file_system_is_named_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ResourceError, match=r"shared memory in /dev/shm is full: 8192 bytes needed, \d+ of \d+ available"):
        ShmTransport().allocate(PAGE + 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_reservation_that_fails_is_named() -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
            ShmTransport().allocate(PAGE)
            with pytest.raises(ResourceError, match="shared memory of 8192 bytes in /dev/shm: File too large"):
                ShmTransport().allocate(2 * PAGE)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_directory_that_is_no_tmpfs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"no shared memory in .*: No such file or directory; it must be a writable tmpfs"):
        ShmTransport(tmp_path / "absent").allocate(1)


def _hold(label: str, exits: bool) -> tuple[int, int, str]:
    """A forked process that exports a segment and ends, or waits; returns its id, a pipe that ends the wait, and the segment's name."""
    reader, writer = os.pipe()
    go, stay = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.close(stay)
        transport = ShmTransport()
        allocation = transport.allocate(PAGE, label)
        transport.export(allocation)
        os.write(writer, transport._owned[allocation].name.encode())
        os.close(writer)
        if not exits:
            os.read(go, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.close(go)
    name = os.read(reader, 255).decode()
    os.close(reader)
    return child, stay, name


def test_start_up_reaps_the_segments_of_dead_owners_only() -> None:
    # In this order: a transport that starts reaps too.
    living, stay, living_name = _hold("living", exits=False)
    dead, pipe, dead_name = _hold("dead", exits=True)
    os.waitpid(dead, 0)
    os.close(pipe)
    assert dead_name in reap()
    names = os.listdir(DEFAULT_DIRECTORY)
    assert dead_name not in names
    assert living_name in names
    os.close(stay)
    # The owner is a zombie now until it is waited for, which counts as dead.
    os.waitid(os.P_PID, living, os.WEXITED | os.WNOWAIT)
    assert living_name in reap()
    os.waitpid(living, 0)


def test_a_reused_process_id_is_another_process(tmp_path: Path) -> None:
    own = ProcessIdentity.current()
    assert start_ticks(os.getpid()) == own.start_ticks
    assert own.alive()
    earlier = SegmentName(ProcessIdentity(own.boot, own.namespace, own.process, own.start_ticks - 1), "", 0)
    (tmp_path / str(earlier)).touch()
    (tmp_path / str(SegmentName(own, "", 0))).touch()
    (tmp_path / "m3.notes").touch()
    assert reap(tmp_path) == (str(earlier),)
    assert sorted(os.listdir(tmp_path)) == sorted([str(SegmentName(own, "", 0)), "m3.notes"])


def test_an_owner_of_another_id_namespace_is_judged_by_its_lock(tmp_path: Path) -> None:
    own = ProcessIdentity.current()
    for boot, namespace in [(own.boot, own.namespace + 1), ("0" * 8, own.namespace)]:
        # This process's id and start time, counted elsewhere: they say nothing here.
        segment = SegmentName(ProcessIdentity(boot, namespace, own.process, own.start_ticks), "", 0)
        descriptor = os.open(tmp_path / str(segment), os.O_CREAT | os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert not abandoned(tmp_path, segment)
        assert reap(tmp_path) == ()
        os.close(descriptor)
        assert reap(tmp_path) == (str(segment),)
    assert not abandoned(tmp_path, segment)


def test_a_transport_that_starts_reaps(tmp_path: Path) -> None:
    own = ProcessIdentity.current()
    left = tmp_path / str(SegmentName(ProcessIdentity(own.boot, own.namespace, own.process, own.start_ticks - 1), "", 0))
    left.touch()
    ShmTransport(tmp_path)
    assert not left.exists()


def test_reaping_where_there_is_no_shared_memory_does_nothing(tmp_path: Path) -> None:
    assert reap(tmp_path / "absent") == ()


@pytest.mark.parametrize("world_size", [2, 4])
def test_fresh_interpreters_share_and_release_at_exit(tmp_path: Path, world_size: int) -> None:
    script = Path(__file__).with_name("fresh_rank.py")
    command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert not [segment for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process == process.pid]
        assert json.loads(out.splitlines()[-1])["words"] == [100 * source + rank + 1 for source in range(world_size)]


IMPORTS = """
import os, threading
import torch, torch.distributed  # what torch itself loads is not ours

def libraries():
    return {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line or "/dev/" in line}

before = libraries()
import m3_comm.agreement, m3_comm.peer_buffer, m3_comm.reaper, m3_comm.transports.shm
opened = [os.path.realpath(f"/proc/self/fd/{d}") for d in os.listdir("/proc/self/fd")]
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert threading.active_count() == 1
assert not [n for n in libraries() - before if any(part in n for part in ("/dev/", "cuda", "hip", "hsa"))]
assert not [n for n in opened if n.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/shm"))]
"""


def test_importing_touches_no_device_and_starts_nothing() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=120)
