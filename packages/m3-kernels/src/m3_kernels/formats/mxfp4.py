"""MXFP4: E2M1 elements, one E8M0 scale for 32 of them along K (OCP Microscaling Formats 1.0; MiniMax-M3 facts: element formats)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_kernels.formats.shuffle import shuffle_scales, shuffle_weights, unshuffle_scales, unshuffle_weights

GROUP = 32
E8M0_BIAS = 127
E8M0_NAN = 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_EXPONENT = 2
# Halfway between neighbouring magnitudes; on a tie the even code wins.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_to_float(codes: Tensor) -> Tensor:
    """fp32 scales: 2^(code - 127) exactly, code 0 the subnormal 2^-127, code 255 NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(codes == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def unpack(codes: Tensor) -> Tensor:
    """fp32 element values, two a byte, the even K index in the low nibble: [..., bytes] to [..., 2 * bytes]."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).to(torch.int64)
    return table[both].flatten(-2)


def round_to_e2m1(values: Tensor) -> Tensor:
    """int64 E2M1 codes of floating-point ``values``: the nearest, the even code on a tie, 6 beyond."""
    magnitude = values.abs()
    element = torch.zeros_like(magnitude, dtype=torch.int64)
    for index, border in enumerate(_BORDERS):
        # At a border the even code wins: code index + 1 is even where index is odd.
        element += (magnitude >= border) if index % 2 else (magnitude > border)
    return element | torch.signbit(values).to(torch.int64) << 3


def pack_pairs(elements: Tensor) -> Tensor:
    """Two codes a byte, the even index in the low nibble: int64 [..., K] to uint8 [..., K / 2]."""
    pairs = elements.view(*elements.shape[:-1], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Values of row-major codes, exactly, as bf16; products of 2^128 and more become infinity.

    Args:
        codes: uint8 [..., K / 2].
        scales: uint8 [..., K / 32].
    """
    values = unpack(codes)
    groups = values.view(*values.shape[:-1], -1, GROUP) * e8m0_to_float(scales)[..., None]
    return groups.flatten(-2).to(torch.bfloat16)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 of finite values: the scale is 2^(floor(log2(largest magnitude)) - 2), elements round to nearest even and saturate.

    Args:
        values: floating point [..., K], K a multiple of 32.

    Returns:
        Codes uint8 [..., K / 2] and scales uint8 [..., K / 32]; a group of zeros has scale code 127.

    Raises:
        ConfigurationError: if K does not fit, or a value is not finite.
    """
    if values.shape[-1] % GROUP:
        raise ConfigurationError(f"K is {values.shape[-1]}; MXFP4 needs a multiple of {GROUP}")
    if not bool(torch.isfinite(values).all()):
        raise ConfigurationError("a value is not finite; MXFP4 elements hold finite numbers only")
    groups = values.to(torch.float64).reshape(*values.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(dim=-1)
    _, exponent = torch.frexp(largest)
    code = (exponent.to(torch.int64) - 1 - _LARGEST_EXPONENT + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    code = torch.where(largest == 0, torch.full_like(code, E8M0_BIAS), code)
    scaled = groups / torch.ldexp(torch.ones_like(largest), code - E8M0_BIAS)[..., None]
    return pack_pairs(round_to_e2m1(scaled).flatten(-2)), code.to(torch.uint8)


def quantize_shuffled(values: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize`` of [experts, rows, K], in the layouts that the kernels read.

    Returns:
        Codes uint8 [experts, rows, K / 2] in the (16, 16) shuffle; scales uint8 [rows over all experts padded to 256, K / 32 padded to 8].

    Raises:
        ConfigurationError: if K is no multiple of 64, rows none of 16, or a value is not finite.
    """
    if values.dim() != 3:
        raise ConfigurationError(f"values have shape {list(values.shape)}; [experts, rows, K] is needed")
    codes, scales = quantize(values)
    return shuffle_weights(codes), shuffle_scales(scales.flatten(0, 1))


def dequantize_shuffled(codes: Tensor, scales: Tensor) -> Tensor:
    """bf16 [experts, rows, K] of codes and scales in the layouts that the kernels read."""
    experts, rows, row_bytes = codes.shape
    groups = row_bytes * 2 // GROUP
    logical = unshuffle_scales(scales, experts * rows, groups).view(experts, rows, groups)
    return dequantize(unshuffle_weights(codes), logical)


def has_special_scales(scales: Tensor) -> tuple[int, int]:
    """How many scale codes are 0 (2^-127) and 255 (NaN)."""
    return int((scales == 0).sum()), int((scales == E8M0_NAN).sum())


assert math.log2(E2M1_VALUES[-1] / 1.5) == _LARGEST_EXPONENT
