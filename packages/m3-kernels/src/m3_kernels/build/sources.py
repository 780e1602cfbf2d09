"""Where the kernel sources lie, and which of them an entry file takes in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from m3_core.errors import BuildError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_PACKAGE = Path(__file__).resolve().parent.parent


@attrs.frozen
class SourceTree:
    """A folder with ``csrc`` and ``include``.

    Attributes:
        root: the folder.
    """

    root: Path

    @property
    def include(self) -> Path:
        """The folder that compilers search for headers."""
        return self.root / "include"

    def entry(self, name: str) -> Path:
        """The entry file ``csrc/<name>``.

        Raises:
            BuildError: if there is none.
        """
        path = self.root / "csrc" / name
        if not path.is_file():
            raise BuildError(f"kernel source {path} does not exist; reinstall m3-kernels")
        return path

    def closure(self, entry: Path) -> tuple[Path, ...]:
        """``entry`` and every header of this tree that it takes in, each once, in order of first use.

        All branches of conditional includes count: a key may then change without need, but never stay the same wrongly.
        """
        found: dict[Path, None] = {}

        def visit(path: Path) -> None:
            if path in found:
                return
            found[path] = None
            for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
                header = self.include / name
                if header.is_file():
                    visit(header)

        visit(entry)
        return tuple(found)

    def digest(self, entry: Path) -> str:
        """SHA-256 of the names and contents of ``closure(entry)``."""
        digest = hashlib.sha256()
        for path in self.closure(entry):
            digest.update(str(path.relative_to(self.root)).encode())
            digest.update(b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def _candidates() -> Iterator[Path]:
    yield _PACKAGE
    yield _PACKAGE.parent.parent


def installed_sources() -> SourceTree:
    """The sources beside the installed package, or those of a checkout.

    Raises:
        BuildError: if neither is there.
    """
    for root in _candidates():
        if (root / "csrc").is_dir() and (root / "include" / "m3").is_dir():
            return SourceTree(root)
    raise BuildError(f"no kernel sources beside {_PACKAGE}; reinstall m3-kernels")
