"""Faults under the real engine: what a stalled rank leaves for whoever has to explain it, and ranks whose engine dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m3_comm.flight_report import read
from m3_comm.reaper import reap
from m3_comm.transports.segments import DEFAULT_DIRECTORY, segments
from m3_core.faults import Site
from m3_vllm.cli.server import cpu_environment
from m3_vllm.cli.tiny import write
from m3_vllm.tiny_checkpoint import TinyModel

pytestmark = pytest.mark.serving

HERE = Path(__file__).parent
WAIT_SECONDS = 1.0
STALL_SECONDS = 2.0
RUN_SECONDS = 400.0
GRACE_SECONDS = 2.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "tiny"
    write(folder, TinyModel())
    return folder


def run(checkpoint: Path, folder: Path, **request: Any) -> tuple[dict[str, Any], str]:
    """The child's answer and its log."""
    settings = {"mode": "require", "grid": 1, "wait_seconds": WAIT_SECONDS, "flight_directory": str(folder / "flight")}
    (folder / "request.json").write_text(json.dumps({"model": str(checkpoint), "settings": settings, **request}))
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "faulty.py"), str(folder / "request.json"), str(folder / "answer.json")]
    with (folder / "engine.log").open("wb") as log:
        done = subprocess.run(
            command, env=cpu_environment(2) | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT, timeout=RUN_SECONDS, check=False
        )
    text = (folder / "engine.log").read_text(errors="replace")
    assert done.returncode == 0, text[-4000:]
    return json.loads((folder / "answer.json").read_text()), text


def test_a_stalled_rank_is_named_by_the_records_of_both(checkpoint: Path, tmp_path: Path) -> None:
    answer, log = run(checkpoint, tmp_path, fault="stall", seconds=STALL_SECONDS)
    assert answer["tokens"] == 8
    assert "error" in answer
    (folder,) = (tmp_path / "flight").iterdir()
    timeline = read([folder])
    assert sorted(timeline.headers) == [0, 1]
    stall = timeline.first_stall()
    assert stall is not None
    assert (stall.wait.rank, stall.wait.site, stall.peer) == (0, Site.REDUCE, 1)
    # The first sparse layer of the step: the launch stands still before it has sent anything.
    first = min(record.layer for record in timeline.records if record.layer is not None)
    assert stall.wait.layer == first
    # The fault's log line names the files.
    lines = [line for line in log.splitlines() if re.search(r"\bfault\b.*flight=", line)]
    assert any(str(folder / "m3-flight-rank0.bin") in line for line in lines), lines


def test_workers_end_with_their_engine(checkpoint: Path, tmp_path: Path) -> None:
    answer, _ = run(checkpoint, tmp_path, fault="orphan")
    assert [worker["signal"] for worker in answer["workers"]] == [signal.SIGKILL] * 2
    assert answer["ended"] == [True, True]
    assert answer["seconds"] < GRACE_SECONDS
    # Peer memory and flight records have no names by then; the workers' status boards have, until somebody starts up or looks.
    processes = {worker["worker"] for worker in answer["workers"]}
    reap()
    assert [str(segment) for segment in segments(DEFAULT_DIRECTORY) if segment.owner.process in processes] == []
