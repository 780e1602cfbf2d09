"""Running a compiler: who it is, and what it says when it fails."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from m3_core.errors import BuildError

COMPILE_SECONDS = 600.0
ERROR_LINES = 30


@functools.cache
def compiler_identity(compiler: str, remedy: str) -> str:
    """Version and path of a compiler, as it reports them.

    Args:
        compiler: program name or path.
        remedy: what to tell the user who does not have it.

    Raises:
        BuildError: if it is missing or does not run.
    """
    path = shutil.which(compiler)
    if path is None:
        raise BuildError(f"no compiler {compiler!r} on PATH; {remedy}")
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise BuildError(f"the compiler {path} does not run: {error}; {remedy}") from error


def compile_file(command: Sequence[str], source: Path) -> None:
    """Run a compiler.

    Raises:
        BuildError: with its last lines if it fails, or if it takes longer than ten minutes.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not finish {source.name} within {COMPILE_SECONDS:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-ERROR_LINES:])
        raise BuildError(f"{command[0]} could not compile {source.name} (exit {done.returncode}); its last lines:\n{last}")
