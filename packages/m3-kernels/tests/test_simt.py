"""The CPU runtime by itself: places, barriers, shuffles, polls, and what happens to a kernel that breaks its rules."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from m3_kernels.build.cpu import FLAGS
from m3_kernels.build.sources import installed_sources

SOURCE = Path(__file__).parent / "simt" / "runtime.cpp"
VARIANTS = {"wave 64": (), "wave 32": ("-DM3_WAVE_WIDTH=32",), "portable fibers": ("-DM3_PORTABLE_FIBERS",)}
CASES = ["places", "barrier", "shuffle", "early_end", "poll", "subnormals"]


@pytest.fixture(scope="module", params=VARIANTS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = tmp_path_factory.mktemp("simt") / "runtime"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    include = installed_sources().include
    subprocess.run(["g++", *flags, *VARIANTS[request.param], f"-I{include}", str(SOURCE), "-o", str(binary)], check=True)
    return binary


def run(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), case], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", CASES)
def test_promises(program: Path, case: str) -> None:
    done = run(program, case)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n")


def test_a_barrier_that_cannot_open_is_named(program: Path) -> None:
    done = run(program, "diverging_barrier")
    assert done.returncode == -signal.SIGABRT
    assert "cannot go on" in done.stderr
    assert "10 at the block barrier" in done.stderr


def test_a_stack_overflow_faults_instead_of_reaching_a_neighbour(program: Path) -> None:
    assert run(program, "overflow").returncode == -signal.SIGSEGV
