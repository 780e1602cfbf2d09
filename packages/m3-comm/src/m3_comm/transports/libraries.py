"""A C interface through ctypes: the copy that the process already has loaded, typed functions, errors by the library's own names.

Two copies of a GPU runtime in one process do not know each other's contexts, so a library is looked up among the mapped ones and never
loaded a second time.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3_core.errors import ResourceError


def loaded_library(stem: str, remedy: str) -> Path:
    """Path of the mapped shared library whose file name begins with ``stem`` followed by ``.so``.

    Raises:
        ResourceError: none is mapped, or several different ones are.
    """
    pattern = re.compile(rf"{re.escape(stem)}(?:-[0-9a-f]+)?\.so(?:\.[0-9.]+)?")
    found: list[str] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and pattern.fullmatch(os.path.basename(fields[5])) and fields[5] not in found:
            found.append(fields[5])
    if not found:
        raise ResourceError(f"no {stem}.so is loaded in this process: {remedy}")
    if len(found) > 1:
        raise ResourceError(
            f"{len(found)} copies of {stem}.so are loaded in this process ({', '.join(found)}): keep one, they do not share contexts"
        )
    return Path(found[0])


class Library:
    """Typed functions of a loaded library; every call that does not return 0 raises."""

    def __init__(self, path: Path, signatures: Mapping[str, Sequence[Any]], name_error: Callable[[ctypes.CDLL, int], str]) -> None:
        """Bind the functions.

        Args:
            path: of the library; it must be loaded already.
            signatures: argument types by function name; all return an int.
            name_error: the library's own name of an error number.

        Raises:
            ResourceError: the library is not loaded, or lacks a function.
        """
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError as error:
            raise ResourceError(f"{path} is not loaded in this process: {error}") from error
        self._path = path
        self._name_error = name_error
        self._functions: dict[str, Any] = {}
        for name, arguments in signatures.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise ResourceError(f"{path} has no function {name}: it is too old or another library") from None
            function.argtypes = list(arguments)
            function.restype = ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Call a function.

        Args:
            name: of the function.
            arguments: its arguments.
            what: what was tried, for the error.

        Raises:
            ResourceError: it did not return 0; the message has the function and the library's name of the error.
        """
        self.require(self.status(name, *arguments), name, what)

    def require(self, status: int, name: str, what: str = "") -> None:
        """Raise ``ResourceError``, as ``call`` does, unless ``status`` is 0."""
        if status != 0:
            text = self._name_error(self._library, status)
            raise ResourceError(f"{what or name} failed: {name} returned {text} ({status})")

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function and return what it returned."""
        return int(self._functions[name](*arguments))
