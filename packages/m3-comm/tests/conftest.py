from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from m3_comm.testing import RankRunner


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankRunner]:
    """Ranks as processes; none of them, nor this process, may leave a segment."""
    runner = RankRunner(tmp_path)
    runner.started.add(os.getpid())
    yield runner
    assert runner.segments_left() == []


@pytest.fixture(autouse=True)
def no_segment_of_this_process_left(tmp_path: Path) -> Iterator[None]:
    yield
    runner = RankRunner(tmp_path)
    runner.started.add(os.getpid())
    assert runner.segments_left() == []
