"""NVFP4: E2M1 elements, one E4M3 scale for 16 of them along K, one fp32 global scale a matrix (MiniMax-M3 facts: element formats).

A weight is ``e2m1 * e4m3 * global``. The launch widens ``e2m1 * e4m3`` to bf16, exactly: two significant bits times four, between 2^-10 and 2688. The
global scale multiplies the fp32 sums over K instead, once each: gate and up before the activation, the second projection's before the
combination; each product rounds to fp32 once. A scale of code 0x7F or 0xFF makes its 16 weights NaN, a negative one turns their signs; a global scale
that is NaN, infinite or zero multiplies as IEEE 754 says. The launch reads codes (two a byte, the even K in the low nibble) and scales row major. A
checkpoint's ``input_scale`` is for quantised activations, which the launch does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_kernels.formats.checkpoint import RowMajorFormat
from m3_kernels.formats.mxfp4 import E2M1_VALUES, pack_pairs, round_to_e2m1, unpack
from m3_kernels.formats.mxfp8 import E4M3_LARGEST

GROUP = 16

CHECKPOINT = RowMajorFormat(
    name="NVFP4",
    codes=torch.uint8,
    values_an_element=2,
    scales=torch.float8_e4m3fn,
    group=GROUP,
    scale_name="weight_scale",
    global_scale_name="weight_scale_2",
)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights as the launch widens them, without their global scale.

    Args:
        codes: uint8 [..., K / 2].
        scales: float8_e4m3fn [..., K / 16].

    Returns:
        bf16 [..., K], exactly ``e2m1 * e4m3``.
    """
    values = unpack(codes)
    groups = values.view(*values.shape[:-1], -1, GROUP) * scales.to(torch.float32)[..., None]
    return groups.flatten(-2).to(torch.bfloat16)


def quantize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 of finite values: the global scale is the matrix's largest magnitude over 448 * 6, a group's scale its largest magnitude over 6 and the
    global scale, rounded to E4M3, and elements round to nearest even and saturate.

    Args:
        values: floating point [..., rows, K], K a multiple of 16.

    Returns:
        Codes uint8 [..., rows, K / 2], scales float8_e4m3fn [..., rows, K / 16], global scales fp32 [...]; a matrix of zeros has global scale 1.

    Raises:
        ConfigurationError: if K does not fit, or a value is not finite.
    """
    if values.dim() < 2 or values.shape[-1] % GROUP:
        raise ConfigurationError(f"values have shape {list(values.shape)}; NVFP4 needs [..., rows, K] with K a multiple of {GROUP}")
    if not bool(torch.isfinite(values).all()):
        raise ConfigurationError("a value is not finite; NVFP4 elements hold finite numbers only")
    groups = values.to(torch.float64).reshape(*values.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(dim=-1)
    matrix_largest = largest.amax(dim=(-2, -1))
    global_scale = (matrix_largest / (E4M3_LARGEST * E2M1_VALUES[-1])).to(torch.float32)
    global_scale = torch.where(global_scale == 0, torch.ones_like(global_scale), global_scale)
    wide = global_scale.double()[..., None, None]
    scale = (largest / E2M1_VALUES[-1] / wide).to(torch.float32).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn)
    step = (scale.double() * wide)[..., None]
    # A group whose scale rounds to 0 holds zeros.
    scaled = torch.where(step == 0, torch.zeros_like(groups), groups / torch.where(step == 0, torch.ones_like(step), step))
    return pack_pairs(round_to_e2m1(scaled).flatten(-2)), scale, global_scale
