"""The status board between a worker and the API server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from m3_comm.reaper import reap
from m3_core.errors import ResourceError
from m3_vllm.status import BOARD_BYTES, RankStatus, StatusBoard, instance_label, read_board, read_boards

FULL = RankStatus(
    rank=1,
    world_size=2,
    fused_steps=3,
    stock_steps=4,
    launches=12,
    outputs=7,
    resets=1,
    epoch=9,
    fault=1,
    fault_rank=0,
    fault_epoch=-1,
    fault_site=11,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def test_reader_sees_what_the_writer_published(directory: Path) -> None:
    board = StatusBoard("1764-ab", 1, directory)
    assert read_boards("1764-ab", directory) == ()
    board.publish(FULL)
    assert read_boards("1764-ab", directory) == (FULL,)
    board.publish(attrs.evolve(FULL, launches=13))
    assert read_boards("1764-ab", directory)[0].launches == 13
    board.close()
    board.close()
    assert read_boards("1764-ab", directory) == ()
    assert list(directory.iterdir()) == []


def test_instances_do_not_mix_and_ranks_come_in_order(directory: Path) -> None:
    boards = [StatusBoard("first", 1, directory), StatusBoard("first", 0, directory), StatusBoard("second", 0, directory)]
    for board, rank in zip(boards, (1, 0, 0), strict=True):
        board.publish(attrs.evolve(FULL, rank=rank))
    assert [status.rank for status in read_boards("first", directory)] == [0, 1]
    assert len(read_boards("second", directory)) == 1
    for board in boards:
        board.close()


def test_half_written_board_is_not_shown(directory: Path) -> None:
    board = StatusBoard("x", 0, directory)
    board.publish(FULL)
    (path,) = directory.iterdir()
    content = bytearray(path.read_bytes())
    content[8] = 3
    path.write_bytes(content)
    assert read_board(path) is None
    board.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b"\xff" * BOARD_BYTES])
def test_foreign_content_is_not_shown(directory: Path, content: bytes) -> None:
    path = directory / "file"
    path.write_bytes(content)
    assert read_board(path) is None


def test_publishing_after_close_does_nothing(directory: Path) -> None:
    board = StatusBoard("x", 0, directory)
    board.close()
    board.publish(FULL)
    assert list(directory.iterdir()) == []


def test_board_that_cannot_be_made_says_where(directory: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be made"):
        StatusBoard("x", 0, directory / "missing")


def test_instance_label_keeps_what_a_label_holds() -> None:
    assert instance_label("17-6_4.z") == "1764z"
    assert instance_label("-") == "0"


HOLD_A_BOARD = """
import sys
from pathlib import Path

from m3_vllm.status import RankStatus, StatusBoard

board = StatusBoard("dead", 0, Path(sys.argv[1]))
board.publish(RankStatus(0, 1, launches=12))
print("published", flush=True)
sys.stdin.read()
"""


def test_board_of_a_killed_worker_is_neither_shown_nor_kept(directory: Path) -> None:
    command = [sys.executable, "-c", HOLD_A_BOARD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"published\n"
        assert read_boards("dead", directory) == (RankStatus(0, 1, launches=12),)
        assert reap(directory) == ()
        worker.kill()
        worker.wait(30)
    assert read_boards("dead", directory) == ()
    assert len(reap(directory)) == 1
    assert list(directory.iterdir()) == []
