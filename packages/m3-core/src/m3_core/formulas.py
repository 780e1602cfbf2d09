"""Registry of the arithmetic that the kernels share with Python.

A function marked ``@formula`` is one return expression over integers. Python evaluates it as it stands; ``m3_core.header`` translates
the same expression to C++. No formula of the protocol is therefore written twice.

The annotations choose the C++ type: ``int`` is 32 bits signed, ``Bytes`` 64 bits signed, ``Word32`` and ``Word64`` are unsigned.
Calling one of them (``Word64(tag)``) is the identity in Python and a conversion in C++. Dividends and divisors are never negative, so
that ``//`` and ``%`` mean the same in both languages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar

Bytes: TypeAlias = int
Word32: TypeAlias = int
Word64: TypeAlias = int

P = ParamSpec("P")
Number = TypeVar("Number", bound=int)

_registered: list[Callable[..., int]] = []


def formula(function: Callable[P, Number]) -> Callable[P, Number]:
    """Register ``function`` for the generated header, in order of definition; return it unchanged."""
    _registered.append(function)
    return function


def registered() -> tuple[Callable[..., int], ...]:
    """Every formula whose module has been imported, each module's in order of definition."""
    return tuple(_registered)


@formula
def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up."""
    return (value + divisor - 1) // divisor


@formula
def round_up(value: Bytes, multiple: Bytes) -> Bytes:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return (value + multiple - 1) // multiple * multiple
