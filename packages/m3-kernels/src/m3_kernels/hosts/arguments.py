"""The launch's arguments as C lays them out; ``include/m3/ffn/arguments.h`` says what each is."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from m3_core.errors import BuildError
from m3_core.layout import ScratchLayout
from m3_core.work import WORLD_SIZES

MOST_RANKS = max(WORLD_SIZES)


class Sizes(ctypes.Structure):
    """``m3::Sizes``."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        (name, ctypes.c_int) for name in ("rows", "hidden", "intermediate", "experts", "top_k", "world", "max_rows")
    ]


class Regions(ctypes.Structure):
    """``m3::ffn::Regions``."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        (name, ctypes.c_int) for name in ("x_ready", "logit", "route", "intermediate_ready", "stream", "x", "mid", "timeline")
    ]

    @classmethod
    def of(cls, layout: ScratchLayout) -> Regions:
        """The regions of a row count's scratch."""
        return cls(*(getattr(layout, f"{name}_offset") for name, _ in cls._fields_))


class Constants(ctypes.Structure):
    """``m3::ffn::Constants``."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        (name, ctypes.c_float) for name in ("rms_norm_eps", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "routed_scaling_factor")
    ]


_POINTERS = (
    "part",
    "residual",
    "slots",
    "post_norm",
    "router",
    "router_bias",
    "w13",
    "s13",
    "w2",
    "s2",
    "g13",
    "g2",
    "scratch",
    "epoch_words",
    "injection",
    "out",
    "residual_out",
    "flight",
)


class Arguments(ctypes.Structure):
    """``m3::ffn::Arguments``."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("wait_ticks", ctypes.c_longlong),
        ("peers", ctypes.c_longlong * MOST_RANKS),
        ("sizes", Sizes),
        ("regions", Regions),
        ("constants", Constants),
        *((name, ctypes.c_int) for name in ("rank", "layer", "handshake", "mode", "timeline", "flight_launches")),
    ]


def layout() -> str:
    """Name, offset and size of every field, in the words of ``m3_arguments_layout()``."""
    return "".join(f"{name}:{getattr(Arguments, name).offset}:{getattr(Arguments, name).size};" for name, _ in Arguments._fields_)


def require_layout(theirs: str) -> None:
    """Compare with what a library says of itself.

    Raises:
        BuildError: if they differ.
    """
    if theirs != layout():
        raise BuildError(
            f"the kernel library takes other arguments than this package passes: {theirs} against {layout()}; reinstall m3-kernels"
        )
