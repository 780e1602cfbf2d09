"""The launch under sanitizers, ranks being threads. ThreadSanitizer: clean as it is, and reported when any one edge of its order is taken
out. AddressSanitizer and UndefinedBehaviorSanitizer: clean at sizes that fill no tile, and reported when a clamp is taken out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

from m3_kernels.build.sources import installed_sources

pytestmark = pytest.mark.tsan

HARNESS = Path(__file__).parent / "race" / "two_ranks.cpp"
RACE_EXIT = 66


THREADS = ("-fsanitize=thread",)
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compile_and_run(
    root: Path, binary: Path, ranks: int, grid: int, sanitizer: tuple[str, ...] = THREADS
) -> subprocess.CompletedProcess[str]:
    command = [
        "g++",
        "-x",
        "c++",
        "-std=c++20",
        "-O1",
        "-g",
        *sanitizer,
        "-pthread",
        "-ffp-contract=off",
        f"-DM3_TEST_RANKS={ranks}",
        f"-DM3_TEST_GRID={grid}",
    ]
    subprocess.run([*command, f"-I{root / 'include'}", f"-I{root / 'csrc'}", str(root / "two_ranks.cpp"), "-o", str(binary)], check=True)
    return subprocess.run(
        [str(binary)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"TSAN_OPTIONS": f"exitcode={RACE_EXIT} halt_on_error=1 report_thread_leaks=0"},
    )


def copy_sources(root: Path) -> None:
    sources = installed_sources().root
    shutil.copytree(sources / "include", root / "include")
    shutil.copytree(sources / "csrc", root / "csrc")
    shutil.copy(HARNESS, root)


@pytest.mark.parametrize(("ranks", "grid"), [(2, 2), (2, 16), (4, 2)])
def test_no_race(ranks: int, grid: int, tmp_path: Path) -> None:
    copy_sources(tmp_path)
    done = compile_and_run(tmp_path, tmp_path / "race", ranks, grid)
    assert "WARNING: ThreadSanitizer" not in done.stderr
    assert (done.returncode, done.stdout) == (0, f"6 launches on {ranks} ranks, BF16 and MXFP4: 0 wrong\n")


@attrs.frozen
class Mutant:
    """One edge taken out: in ``file``, ``old`` (which occurs once) becomes ``new``; ``grid`` blocks let the edge matter."""

    name: str
    file: str
    old: str
    new: str
    grid: int = 2


MUTANTS = (
    Mutant(
        "announcements do not release",
        "platform/cpu.h",
        "constexpr std::memory_order kAnnounce = std::memory_order_release;",
        "constexpr std::memory_order kAnnounce = std::memory_order_relaxed;",
    ),
    Mutant(
        "polls do not acquire",
        "platform/cpu.h",
        "(*const_cast<Bits64*>(word)).load(std::memory_order_acquire)",
        "(*const_cast<Bits64*>(word)).load(std::memory_order_relaxed)",
    ),
    Mutant(
        "no barrier before X is announced",
        "ffn/context.h",
        "platform::drain_stores();\n  platform::block_barrier();\n  if (platform::thread_index() == 0 && context.may_announce(waiting))",
        "platform::drain_stores();\n  if (platform::thread_index() == 0 && context.may_announce(waiting))",
    ),
    Mutant(
        "no barrier before a gate/up tile is announced",
        "ffn/gate_up.h",
        "    platform::drain_stores();\n    platform::block_barrier();\n",
        "    platform::drain_stores();\n",
    ),
    Mutant(
        "a lane announces a sum of squares before its neighbours have stored",
        "ffn/reduce.h",
        "      M3_UNROLL for (int distance = kTriples / 2; distance > 0; distance /= 2) squares += platform::shuffle_xor(squares, distance);\n"
        "      platform::drain_stores();\n      platform::wave_barrier();\n",
        "      platform::drain_stores();\n",
    ),
    Mutant(
        "no barrier between sums and their use",
        "ffn/gate_up.h",
        "    platform::block_barrier();\n    store_intermediate(",
        "    store_intermediate(",
    ),
    # Sixteen blocks: some have tasks of stage up and none of the stages that looked at X before.
    Mutant("stage up trusts the table alone for X", "ffn/gate_up.h", "if (!x_came) wait_for_x(context, Site::UP);", "", grid=16),
    Mutant("down does not look at the slot's tiles", "ffn/down.h", "  wait_for_slot(context, slot);\n", "  context.note(true);\n"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_missing_edge_is_reported(mutant: Mutant, tmp_path: Path) -> None:
    copy_sources(tmp_path)
    path = tmp_path / "include" / "m3" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1
    path.write_text(text.replace(mutant.old, mutant.new))
    done = compile_and_run(tmp_path, tmp_path / "race", 2, mutant.grid)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert done.returncode == RACE_EXIT


def test_no_bad_access(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    done = compile_and_run(tmp_path, tmp_path / "address", 2, 2, ADDRESSES)
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "6 launches on 2 ranks, BF16 and MXFP4: 0 wrong\n")


def test_a_missing_clamp_is_reported(tmp_path: Path) -> None:
    """Six experts in a tile of sixteen: without the clamp a lane reads past the router's weights."""
    copy_sources(tmp_path)
    path = tmp_path / "include" / "m3" / "ffn" / "router.h"
    text = path.read_text()
    clamp = "expert < experts ? expert : experts - 1"
    assert text.count(clamp) == 1
    path.write_text(text.replace(clamp, "expert"))
    done = compile_and_run(tmp_path, tmp_path / "address", 2, 2, ADDRESSES)
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert done.returncode != 0
