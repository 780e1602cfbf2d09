"""Compile the kernels for the CPU target and load them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import attrs
import structlog

from m3_core.errors import BuildError
from m3_kernels.build.cache import cached
from m3_kernels.build.compiler import compile_file, compiler_identity
from m3_kernels.build.sources import SourceTree, installed_sources

logger = structlog.get_logger(__name__)

# Contraction would fuse a product and a sum where the arithmetic's contract rounds both.
FLAGS = ("-x", "c++", "-std=c++20", "-O3", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden")
REMEDY = "install g++ 12 or newer, or name another C++20 compiler in CXX"


@attrs.frozen
class CpuBuild:
    """One way to compile the CPU library.

    Attributes:
        compiler: program name or path.
        defines: preprocessor definitions, ``NAME`` or ``NAME=VALUE``.
        flags: compiler flags.
        sources: the source tree.
    """

    compiler: str
    defines: tuple[str, ...] = ()
    flags: tuple[str, ...] = FLAGS
    sources: SourceTree = attrs.field(factory=installed_sources)

    def key(self) -> str:
        """Hexadecimal digest of the sources, the compiler's identity, the flags and the definitions.

        Raises:
            BuildError: if the compiler does not run.
        """
        parts = (
            self.sources.digest(self.sources.entry("ffn.hip")),
            compiler_identity(self.compiler, REMEDY),
            *self.flags,
            *self.defines,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def compile(self, path: Path, key: str) -> None:
        """Compile to ``path``, with ``key`` inside.

        Raises:
            BuildError: with the compiler's last lines.
        """
        source = self.sources.entry("ffn.hip")
        command = [
            self.compiler,
            *self.flags,
            *(f"-D{define}" for define in self.defines),
            f'-DM3_BUILD_KEY="{key}"',
            f"-I{self.sources.include}",
            str(source),
            "-o",
            str(path),
        ]
        compile_file(command, source)

    def library(self, root: Path | None = None) -> ctypes.CDLL:
        """The loaded library, compiled into the cache first if it is not there.

        Calls release the interpreter's lock.

        Raises:
            BuildError: if it does not compile, does not load, or was compiled for another key.
        """
        key = self.key()

        def produce(path: Path) -> None:
            logger.info("kernel_compile", target="cpu", compiler=self.compiler, key=key)
            self.compile(path, key)

        return load(cached(f"ffn-cpu-{key}.so", produce, root=root), key)


def load(path: Path, key: str) -> ctypes.CDLL:
    """Load a compiled library and compare the key inside it with ``key``.

    Raises:
        BuildError: if it does not load or carries another key.
    """
    remedy = f"delete {path} and start again"
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        library.m3_build_key.restype = ctypes.c_char_p
        found = library.m3_build_key().decode()
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} is no m3 kernel library: {error}; {remedy}") from error
    if found != key:
        raise BuildError(f"{path} was compiled from other sources (key {found}, wanted {key}); {remedy}")
    return library


@functools.cache
def default_library() -> ctypes.CDLL:
    """The library that this process uses: compiled by ``$CXX``, or ``g++``.

    Raises:
        BuildError: if it does not compile or load.
    """
    return CpuBuild(os.environ.get("CXX") or "g++").library()
