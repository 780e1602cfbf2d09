"""MXFP8: E4M3 elements, one E8M0 scale for 32 of them along K (OCP Microscaling Formats 1.0; MiniMax-M3 facts: element formats).

E4M3 is the kind without infinities ("fn"): largest magnitude 448, codes 0x7F and 0xFF NaN. A weight is ``e4m3 * 2^(scale - 127)``, rounded to bf16
once. The product has four significant bits, so only two roundings show: 2^128 and more becomes infinity, and a product below 2^-126 that has more
bits than a bf16 subnormal rounds to nearest even. The launch reads codes and scales row major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_kernels.formats.checkpoint import RowMajorFormat
from m3_kernels.formats.mxfp4 import E8M0_BIAS, E8M0_NAN, e8m0_to_float

GROUP = 32
E4M3_LARGEST = 448.0
_LARGEST_EXPONENT = 8

# The scales' name in checkpoints says reciprocal; they are multipliers (MiniMax-M3 facts: scale companions).
CHECKPOINT = RowMajorFormat(
    name="MXFP8",
    codes=torch.float8_e4m3fn,
    values_an_element=1,
    scales=torch.uint8,
    group=GROUP,
    scale_name="weight_scale_inv",
    global_scale_name=None,
)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights as the launch widens them.

    Args:
        codes: float8_e4m3fn [..., K].
        scales: uint8 [..., K / 32].

    Returns:
        bf16 [..., K]: the product, which fp32 holds exactly or as infinity, rounded to nearest even.
    """
    groups = codes.to(torch.float32).view(*codes.shape[:-1], -1, GROUP) * e8m0_to_float(scales)[..., None]
    return groups.flatten(-2).to(torch.bfloat16)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP8 of finite values: the scale is 2^(floor(log2(largest magnitude)) - 8), elements round to nearest even and saturate at 448.

    Args:
        values: bf16 or fp32 [..., K], K a multiple of 32.

    Returns:
        Codes float8_e4m3fn [..., K] and scales uint8 [..., K / 32]; a group of zeros has scale code 127.

    Raises:
        ConfigurationError: if K does not fit, or a value is not finite.
    """
    if values.shape[-1] % GROUP:
        raise ConfigurationError(f"K is {values.shape[-1]}; MXFP8 needs a multiple of {GROUP}")
    if not bool(torch.isfinite(values).all()):
        raise ConfigurationError("a value is not finite; MXFP8 elements are quantised from finite numbers only")
    groups = values.to(torch.float64).reshape(*values.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(dim=-1)
    _, exponent = torch.frexp(largest)
    code = (exponent.to(torch.int64) - 1 - _LARGEST_EXPONENT + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    code = torch.where(largest == 0, torch.full_like(code, E8M0_BIAS), code)
    # fp32 holds what a power of two leaves of an fp32 value, down to numbers that round to 0 anyway.
    scaled = (groups / torch.ldexp(torch.ones_like(largest), code - E8M0_BIAS)[..., None]).to(torch.float32)
    # Without the clamp, torch before it saturated by itself makes NaN of what rounds past 448.
    return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).flatten(-2), code.to(torch.uint8)


def has_nan(codes: Tensor) -> bool:
    """Whether a float8_e4m3fn [experts, rows, K] holds a NaN code; an expert at a time, so that the scan needs little memory."""
    found = torch.zeros((), dtype=torch.bool, device=codes.device)
    for expert in codes.view(torch.uint8):
        found |= ((expert & 0x7F) == 0x7F).any()
    return bool(found)
