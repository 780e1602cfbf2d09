"""The build cache: keys, atomic entries, many processes, and refusals."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

from m3_core.errors import BuildError, ConfigurationError
from m3_kernels.build.cache import cache_root, cached
from m3_kernels.build.compiler import compiler_identity
from m3_kernels.build.cpu import CpuBuild, load
from m3_kernels.build.gpu import GpuBuild, GpuTarget
from m3_kernels.build.sources import SourceTree, installed_sources
from m3_kernels.ffn import FfnShape
from m3_kernels.hosts.arguments import layout, require_layout

ENTRY = """\
#include "m3/used.h"
#ifndef M3_BUILD_KEY
#define M3_BUILD_KEY "none"
#endif
extern "C" __attribute__((visibility("default"))) const char* m3_build_key() { return M3_BUILD_KEY; }
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    """A library of three files; `unused.h` is in no include."""
    include = tmp_path / "sources" / "include" / "m3"
    include.mkdir(parents=True)
    (tmp_path / "sources" / "csrc").mkdir()
    (tmp_path / "sources" / "csrc" / "ffn.hip").write_text(ENTRY)
    (include / "used.h").write_text('#include "m3/deeper.h"\n')
    (include / "deeper.h").write_text("#define ANSWER 41\n")
    (include / "unused.h").write_text("#define ANSWER 1\n")
    return SourceTree(tmp_path / "sources")


def test_the_key_covers_every_header_that_is_taken_in(tree: SourceTree) -> None:
    build = CpuBuild("g++", sources=tree)
    first = build.key()
    (tree.include / "m3" / "unused.h").write_text("#define ANSWER 2\n")
    assert build.key() == first
    (tree.include / "m3" / "deeper.h").write_text("#define ANSWER 42\n")
    assert build.key() != first


def test_the_key_covers_flags_definitions_and_compiler(tree: SourceTree, tmp_path: Path) -> None:
    build = CpuBuild("g++", sources=tree)
    other_compiler = tmp_path / "other-g++"
    other_compiler.write_text("#!/bin/sh\necho other $1\n")
    other_compiler.chmod(0o755)
    keys = {
        build.key(),
        attrs.evolve(build, defines=("M3_TEST_HOOKS",)).key(),
        attrs.evolve(build, flags=(*build.flags, "-g")).key(),
        attrs.evolve(build, compiler=str(other_compiler)).key(),
    }
    assert len(keys) == 4


def test_the_closure_of_the_real_entry() -> None:
    sources = installed_sources()
    names = {path.relative_to(sources.root).as_posix() for path in sources.closure(sources.entry("ffn.hip"))}
    assert {"csrc/ffn.hip", "include/m3/protocol.h", "include/m3/ffn/down.h", "include/m3/platform/cpu/fiber.h"} <= names
    on_disk = {path.relative_to(sources.root).as_posix() for path in sources.include.rglob("ffn/*.h")}
    assert on_disk <= names, "a stage header that the entry does not take in"


def test_it_loads_what_it_compiled_and_compiles_once(tree: SourceTree, tmp_path: Path) -> None:
    build = CpuBuild("g++", sources=tree)
    assert build.library(tmp_path).answer() == 41
    [entry] = tmp_path.glob("*.so")
    before = entry.stat().st_mtime_ns
    assert build.library(tmp_path).answer() == 41
    assert entry.stat().st_mtime_ns == before
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".ffn")]


def test_a_stale_entry_refuses_to_load(tree: SourceTree, tmp_path: Path) -> None:
    build = CpuBuild("g++", sources=tree)
    build.library(tmp_path)
    [entry] = tmp_path.glob("*.so")
    other = attrs.evolve(build, defines=("UNUSED",))
    shutil.copy(entry, tmp_path / f"ffn-cpu-{other.key()}.so")
    with pytest.raises(BuildError, match=f"key {build.key()}, wanted {other.key()}.*delete"):
        other.library(tmp_path)


def test_a_broken_entry_refuses_to_load(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF no")
    with pytest.raises(BuildError, match=r"broken\.so is no m3 kernel library.*delete"):
        load(broken, "key")


def test_a_library_without_a_key_refuses_to_load(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int answer() { return 1; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    with pytest.raises(BuildError, match="is no m3 kernel library"):
        load(tmp_path / "other.so", "key")


def test_a_compile_error_shows_the_last_lines_and_leaves_nothing(tree: SourceTree, tmp_path: Path) -> None:
    (tree.root / "csrc" / "ffn.hip").write_text("int broken( {\n")
    with pytest.raises(BuildError, match=r"could not compile ffn\.hip \(exit 1\)(.|\n)*broken"):
        CpuBuild("g++", sources=tree).library(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(BuildError, match="no compiler 'no-such-compiler' on PATH; get one"):
        compiler_identity("no-such-compiler", "get one")


def test_a_compiler_that_does_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "bad-compiler"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(BuildError, match=r"bad-compiler does not run.*; get one"):
        compiler_identity(str(program), "get one")


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"ffn\.hip does not exist"):
        CpuBuild("g++", sources=SourceTree(tmp_path)).key()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME"):
        cached("entry", lambda path: None, root=blocker / "below")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "m3" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "m3" / "kernels"


def test_a_lock_that_nobody_gives_up_only_costs_work(tmp_path: Path) -> None:
    """Another process holds the lock for good: after the bound this one makes the entry itself."""
    ready, done = multiprocessing.Event(), multiprocessing.Event()
    holder = multiprocessing.Process(target=_hold_lock, args=(tmp_path / ".entry.lock", ready, done))
    holder.start()
    try:
        assert ready.wait(20)
        entry = cached("entry", lambda path: path.write_text("made") and None, root=tmp_path, lock_seconds=0.2)
        assert entry.read_text() == "made"
    finally:
        done.set()
        holder.join(20)


def _hold_lock(path: Path, ready: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ready.set()
        done.wait(60)


def _make_entry(root: Path, log: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    def produce(path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        path.write_text("x" * 1_000_000)

    barrier.wait(30)
    assert len(cached("entry", produce, root=root).read_text()) == 1_000_000


def test_many_processes_make_an_entry_once(tmp_path: Path) -> None:
    count = 6
    barrier = multiprocessing.Barrier(count)
    processes = [multiprocessing.Process(target=_make_entry, args=(tmp_path / "cache", tmp_path / "log", barrier)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_arguments_layout_is_compared(tmp_path: Path) -> None:
    require_layout(layout())
    with pytest.raises(BuildError, match="reinstall m3-kernels"):
        require_layout(layout().replace("part:0:8;", "part:8:8;"))


def test_calls_release_the_interpreter_lock() -> None:
    assert type(CpuBuild("g++").library()) is ctypes.CDLL


SHAPE = FfnShape(hidden=6144, intermediate=768, experts=128, top_k=4, world_size=4, max_rows=16)


def test_a_code_object_is_keyed_by_shape_and_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "hip"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] && echo one || echo "$@" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("HIPCXX", str(compiler))
    monkeypatch.setenv("NVCC", str(compiler))
    builds = [
        GpuBuild(GpuTarget.GFX950, SHAPE, 1),
        GpuBuild(GpuTarget.GFX950, SHAPE, 2),
        GpuBuild(GpuTarget.GFX942, SHAPE, 1),
        GpuBuild(GpuTarget.SM_90, SHAPE, 1),
        GpuBuild(GpuTarget.GFX950, attrs.evolve(SHAPE, intermediate=384), 1),
        GpuBuild(GpuTarget.GFX950, SHAPE, 1, block_threads=256),
    ]
    files = [build.code_object(tmp_path / "cache") for build in builds]
    assert len(set(files)) == len(builds)
    assert "-DM3_ROWS=2" in files[1].read_text()
    assert "-arch=sm_90" in files[3].read_text()
    assert builds[0].code_object(tmp_path / "cache") == files[0]


@pytest.mark.parametrize(("rows", "threads"), [(0, 512), (17, 512), (1, 100), (1, 2048)])
def test_code_objects_that_cannot_be(rows: int, threads: int) -> None:
    with pytest.raises(ConfigurationError, match=r"rows is|block_threads is"):
        GpuBuild(GpuTarget.GFX950, SHAPE, rows, block_threads=threads)
