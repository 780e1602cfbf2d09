"""Compile the kernels for a GPU: one code object a target, shape and row count, into the same kind of cache as the CPU library."""

from __future__ import annotations

import hashlib
import os
import shutil
from enum import Enum
from pathlib import Path

import attrs
import structlog

from m3_core.errors import ConfigurationError
from m3_kernels.build.cache import cached
from m3_kernels.build.compiler import compile_file, compiler_identity
from m3_kernels.build.sources import SourceTree, installed_sources
from m3_kernels.ffn import FfnShape

logger = structlog.get_logger(__name__)

AMD_REMEDY = "install clang 22 with lld (clang++-22), or ROCm (hipcc), or name a HIP compiler in HIPCXX"
NVIDIA_REMEDY = "install the CUDA toolkit (nvcc 12.8 or newer), or name it in NVCC"


class GpuTarget(Enum):
    """A processor that the kernels are compiled for; the value is the compilers' name of it."""

    GFX950 = "gfx950"
    GFX942 = "gfx942"
    SM_90 = "sm_90"

    @property
    def is_amd(self) -> bool:
        """Whether HIP compilers make its code objects."""
        return self is not GpuTarget.SM_90

    @property
    def wave_width(self) -> int:
        """Lanes of a wave."""
        return 64 if self.is_amd else 32


@attrs.frozen
class GpuBuild:
    """One code object.

    Attributes:
        target: the processor.
        shape: sizes, constants of the code object.
        rows: rows of its launches, a constant too.
        block_threads: threads a block: a multiple of the wave width, at most 1024. Eight waves are what the sums are cut for.
        sources: the source tree.

    Raises:
        ConfigurationError: if rows or threads are out of range.
    """

    target: GpuTarget
    shape: FfnShape
    rows: int
    block_threads: int = attrs.field(default=attrs.Factory(lambda self: 8 * self.target.wave_width, takes_self=True))
    sources: SourceTree = attrs.field(factory=installed_sources)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.rows <= self.shape.max_rows:
            raise ConfigurationError(f"rows is {self.rows}; this shape takes 1 to {self.shape.max_rows}")
        if self.block_threads % self.target.wave_width or not self.target.wave_width <= self.block_threads <= 1024:
            raise ConfigurationError(f"block_threads is {self.block_threads}; pass a multiple of {self.target.wave_width}, at most 1024")

    @property
    def defines(self) -> tuple[str, ...]:
        """The preprocessor definitions that make the shape constant."""
        shape = self.shape
        return (
            f"M3_BLOCK_THREADS={self.block_threads}",
            f"M3_ROWS={self.rows}",
            f"M3_HIDDEN={shape.hidden}",
            f"M3_INTERMEDIATE={shape.intermediate}",
            f"M3_EXPERTS={shape.experts}",
            f"M3_TOP_K={shape.top_k}",
            f"M3_WORLD={shape.world_size}",
            f"M3_MAX_ROWS={shape.max_rows}",
        )

    @property
    def compiler(self) -> str:
        """The compiler for the target: from the environment, or the first known one that is installed."""
        if not self.target.is_amd:
            return os.environ.get("NVCC") or "nvcc"
        known = ("clang++-22", "hipcc", "/opt/rocm/bin/hipcc")
        return os.environ.get("HIPCXX") or next((name for name in known if shutil.which(name)), known[0])

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags. Neither ROCm nor its headers are needed for an AMD target."""
        if not self.target.is_amd:
            return ("-x", "cu", "-std=c++20", f"-arch={self.target.value}", "-O3", "-cubin")
        return (
            *("-x", "hip", f"--offload-arch={self.target.value}", "-nogpulib", "-nogpuinc"),
            *("--cuda-device-only", "--no-gpu-bundle-output", "-O3", "-std=c++20"),
        )

    def key(self) -> str:
        """Hexadecimal digest of the sources, the compiler, the flags and the shape.

        Raises:
            BuildError: if the compiler is missing or does not run.
        """
        identity = compiler_identity(self.compiler, AMD_REMEDY if self.target.is_amd else NVIDIA_REMEDY)
        parts = (self.sources.digest(self.sources.entry("ffn.hip")), identity, *self.flags, *self.defines)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def code_object(self, root: Path | None = None) -> Path:
        """The code object's file, compiled into the cache first if it is not there.

        Raises:
            BuildError: if it does not compile.
        """
        key = self.key()
        source = self.sources.entry("ffn.hip")

        def produce(path: Path) -> None:
            logger.info("kernel_compile", target=self.target.value, compiler=self.compiler, rows=self.rows, key=key)
            include = f"-I{self.sources.include}"
            compile_file(
                [self.compiler, *self.flags, *(f"-D{define}" for define in self.defines), include, str(source), "-o", str(path)], source
            )

        return cached(f"ffn-{self.target.value}-{key}.{'co' if self.target.is_amd else 'cubin'}", produce, root=root)
