"""Settings of m3 in vLLM: the ``"m3"`` entry of ``--additional-config``.

``vllm serve MODEL --additional-config '{"m3": {"mode": "require"}}'`` reaches every process of the engine as
``vllm_config.additional_config``; each of them parses it here, so all ranks hold the same settings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from attrs import Factory, field, fields_dict, frozen

from m3_core.errors import RefusalError

SECTION = "m3"

E = TypeVar("E", bound=Enum)


class Mode(Enum):
    """When the launch replaces the stock FFN half of a sparse layer."""

    AUTO = "auto"
    """Where everything fits; otherwise the stock layers, and one log event with all reasons."""

    REQUIRE = "require"
    """Always possible, or the engine refuses to start, with all reasons."""

    OFF = "off"
    """Never: the stock layers alone, and no peer memory."""


class Experts(Enum):
    """How the CPU adapter holds the routed and shared experts."""

    CHECKPOINT = "checkpoint"
    """As the checkpoint stores them."""

    MXFP4 = "mxfp4"
    """Quantised to MXFP4 when the weights are loaded; the stock layers compute from the same quantised values."""


def _one_of(kind: type[E]) -> Callable[[object], E]:
    def parse(value: object) -> E:
        if isinstance(value, kind):
            return value
        for member in kind:
            if member.value == value:
                return member
        raise ValueError(f"must be one of {', '.join(repr(member.value) for member in kind)}")

    return parse


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError("must be a number of seconds above 0")
    return float(value)


def _count(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def _optional(parse: Callable[[object], int]) -> Callable[[object], int | None]:
    return lambda value: None if value is None else parse(value)


def default_flight_directory() -> Path:
    """``m3/flight`` in the user's folder for program state (XDG base directories: ``$XDG_STATE_HOME``, else ``~/.local/state``)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # A relative path there is invalid and must be ignored, says the specification.
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "m3" / "flight"


def _directory(value: object) -> Path | None:
    if value is None:
        return default_flight_directory()
    if value is False:
        return None
    if not isinstance(value, str) or not os.path.isabs(value):
        raise ValueError("must be an absolute path, or false to record nothing")
    return Path(value)


@frozen(kw_only=True)
class Settings:
    """Parsed settings; the same on every rank.

    Attributes:
        mode: when the launch is used.
        experts: how the CPU adapter holds the experts.
        wait_seconds: bound of every wait inside a launch, in seconds.
        grid: blocks of a launch; the CPU target runs each as a thread. None lets the target choose.
        reset_steps: sampled steps between two epoch resets, where fewer than the budget allows are wanted
            (a test or a demonstration that must see a reset). None takes the budget's own number.
        flight_directory: where each engine makes a folder for its flight records if a step fails. On by default, since a fault that
            nobody recorded cannot be explained: it takes 0.6 MB of shared memory a rank and writes nothing until there is a fault.
            ``false`` in the configuration (None here) records nothing.
    """

    mode: Mode = field(default=Mode.AUTO, metadata={"parse": _one_of(Mode)})
    experts: Experts = field(default=Experts.CHECKPOINT, metadata={"parse": _one_of(Experts)})
    wait_seconds: float = field(default=10.0, metadata={"parse": _seconds})
    grid: int | None = field(default=None, metadata={"parse": _optional(_count(1, 1024))})
    reset_steps: int | None = field(default=None, metadata={"parse": _optional(_count(1, 1_000_000))})
    flight_directory: Path | None = field(default=Factory(default_flight_directory), metadata={"parse": _directory})

    @classmethod
    def parse(cls, section: object) -> Settings:
        """Settings from the value of ``additional_config["m3"]``; None or an empty mapping gives the defaults.

        Raises:
            RefusalError: with every unknown key and every bad value, and what is allowed instead.
        """
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise RefusalError([f"it must be a mapping, got {type(section).__name__} {section!r}"], f'additional_config["{SECTION}"]')
        known = fields_dict(cls)
        values: dict[str, object] = {}
        reasons: list[str] = []
        for key, value in section.items():
            attribute = known.get(key)
            if attribute is None:
                reasons.append(f"unknown key {key!r}; known keys: {', '.join(known)}")
                continue
            try:
                values[key] = attribute.metadata["parse"](value)
            except ValueError as error:
                reasons.append(f"{key}={value!r} {error}")
        if reasons:
            raise RefusalError(reasons, f'additional_config["{SECTION}"]')
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Settings:
        """Settings from vLLM's whole ``additional_config``, which may be absent or hold other plugins' entries.

        Raises:
            RefusalError: as in :meth:`parse`.
        """
        if isinstance(additional_config, Mapping):
            return cls.parse(additional_config.get(SECTION))
        return cls()
