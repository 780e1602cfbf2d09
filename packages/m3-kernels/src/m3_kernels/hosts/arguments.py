"""The launch's arguments as C lays them out; ``include/m3/ffn/arguments.h`` says what each is."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from m3_core.errors import BuildError


class Sizes(ctypes.Structure):
    """``m3::Sizes``."""

    _fields_: ClassVar[list[tuple[str, type]]] = [
        (name, ctypes.c_int) for name in ("rows", "hidden", "intermediate", "experts", "top_k", "world", "max_rows")
    ]


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
    "scratch",
    "epoch_words",
    "peers",
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
        ("sizes", Sizes),
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
