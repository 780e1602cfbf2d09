"""Code objects for NVIDIA GPUs: shipped with the package for the published shapes, or compiled by nvcc into the cache on first use."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from pathlib import Path

import attrs
import structlog

from m3_core.errors import BuildError
from m3_kernels.build.cache import cached
from m3_kernels.build.compiler import compile_file, compiler_identity
from m3_kernels.build.sources import SourceTree, installed_sources

logger = structlog.get_logger(__name__)

ARCHITECTURE = "sm_90"
BLOCK_THREADS = 512
# Contraction would fuse a product and a sum where the arithmetic's contract rounds both.
FLAGS = ("-x", "cu", "-std=c++17", "-O3", "-fmad=false", "-diag-suppress", "836", f"-arch={ARCHITECTURE}", "-cubin")
# One code object serves the row counts up to its bound; the bound sizes registers and shared memory.
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64)
# Builds in which a rank's own buffer stands for its peers', to measure one rank alone.
OWN_BUFFER = "M3_OWN_BUFFER"
REMEDY = "install the CUDA toolkit 12.8 or newer, or name its nvcc in NVCC"


def row_bound(rows: int) -> int:
    """The least row bound that takes ``rows``, 1 to 64."""
    return next(bound for bound in ROW_BOUNDS if bound >= rows)


@attrs.frozen
class CudaBuild:
    """The code object of one shape and row bound; all expert formats are in it.

    Attributes:
        rows: the most rows of a launch, one of ``ROW_BOUNDS``.
        hidden: hidden size.
        intermediate: intermediate size of an expert on a rank.
        experts: routed experts.
        top_k: routed experts a row.
        world_size: ranks.
        defines: further preprocessor definitions.
        sources: the source tree.
    """

    rows: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    world_size: int
    defines: tuple[str, ...] = ()
    sources: SourceTree = attrs.field(factory=installed_sources, repr=False)

    @property
    def all_defines(self) -> tuple[str, ...]:
        """Every definition of this build but its key."""
        return (
            f"M3_BLOCK_THREADS={BLOCK_THREADS}",
            f"M3_ROWS={self.rows}",
            f"M3_HIDDEN={self.hidden}",
            f"M3_INTERMEDIATE={self.intermediate}",
            f"M3_EXPERTS={self.experts}",
            f"M3_TOP_K={self.top_k}",
            f"M3_WORLD={self.world_size}",
            *self.defines,
        )

    def key(self) -> str:
        """Hexadecimal digest of the sources, the flags and the definitions: what the code object must carry."""
        parts = (self.sources.digest(self.sources.entry("ffn.hip")), *FLAGS, *self.all_defines)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def compile(self, compiler: str, path: Path) -> None:
        """Compile to ``path``.

        Raises:
            BuildError: with the compiler's last lines.
        """
        source = self.sources.entry("ffn.hip")
        defines = [f"-D{define}" for define in (*self.all_defines, f'M3_BUILD_KEY="{self.key()}"')]
        compile_file([compiler, *FLAGS, *defines, f"-I{self.sources.include}", str(source), "-o", str(path)], source)

    def code(self, root: Path | None = None) -> bytes:
        """The code object: the shipped one if its key fits, else one from the cache, compiled first if need be.

        Args:
            root: the cache folder; the user's by default.

        Raises:
            BuildError: if there is none and it does not compile.
        """
        key = self.key()
        shipped = shipped_folder() / f"{self.name(key)}.cubin"
        if shipped.is_file():
            return shipped.read_bytes()
        compiler = nvcc()
        identity = hashlib.sha256(compiler_identity(compiler, REMEDY).encode()).hexdigest()[:8]

        def produce(path: Path) -> None:
            logger.info("kernel_compile", target=ARCHITECTURE, compiler=compiler, rows=self.rows, intermediate=self.intermediate, key=key)
            self.compile(compiler, path)

        return cached(f"{self.name(key)}-{identity}.cubin", produce, root=root).read_bytes()

    def name(self, key: str) -> str:
        """File name without ending: what a reader wants to know, then the key."""
        return f"ffn-{ARCHITECTURE}-h{self.hidden}-i{self.intermediate}-e{self.experts}-k{self.top_k}-w{self.world_size}-r{self.rows}-{key}"


def shipped_folder() -> Path:
    """Where the package keeps code objects; they are made when a wheel is built, and not kept under version control."""
    return Path(__file__).resolve().parent.parent / "objects"


@functools.cache
def nvcc() -> str:
    """The compiler: ``$NVCC``, or nvcc on PATH, or that of ``$CUDA_HOME``.

    Raises:
        BuildError: if there is none.
    """
    candidates = (os.environ.get("NVCC"), "nvcc", os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"))
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found is not None:
            return found
    raise BuildError(f"no nvcc on PATH, and no shipped code object for this shape; {REMEDY}")
