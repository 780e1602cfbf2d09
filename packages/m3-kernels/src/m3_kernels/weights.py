"""One layer's weights on a rank, and every reason why they do not fit a launch."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from m3_core.formulas import round_up
from m3_kernels.formats import mxfp4, mxfp8, nvfp4
from m3_kernels.formats.shuffle import unshuffle_scales
from m3_kernels.shape import ExpertFormat, FfnShape

WEIGHT_ALIGNMENT = 16
CPU = torch.device("cpu")

_ELEMENTS = {
    ExpertFormat.BF16: torch.bfloat16,
    ExpertFormat.MXFP4: torch.uint8,
    ExpertFormat.MXFP8: torch.float8_e4m3fn,
    ExpertFormat.NVFP4: torch.uint8,
}
# Two codes of four bits a byte.
_PACKED = (ExpertFormat.MXFP4, ExpertFormat.NVFP4)


@attrs.frozen(eq=False)
class FfnWeights:
    """One layer's weights on this rank, as they lie; nothing is copied.

    Expert ``experts`` (the last) is the shared expert. MXFP4 is AITER's layout after loading: codes in the (16, 16) shuffle, scales in the
    E8M0 shuffle (MiniMax-M3 facts: weight layouts); MXFP8 and NVFP4 are row major (``formats.mxfp8``, ``formats.nvfp4``). Every code of every
    format is computed: E8M0 code 0 is 2^-127 and 255 NaN, as OCP MX defines them, E4M3 codes 0x7F and 0xFF are NaN, and a global scale
    multiplies as IEEE 754 says, NaN and infinity too.

    Attributes:
        format: how the experts are held.
        post_norm: bf16 [hidden], the Gemma norm's weight w of ``1 + w``.
        router: fp32 [experts, hidden].
        router_bias: fp32 [experts], steers selection only.
        w13: gate rows, then up rows. BF16: bf16 [experts + 1, 2 * intermediate, hidden]; MXFP4: uint8 [experts + 1, 2 * intermediate, hidden / 2];
            MXFP8: float8_e4m3fn [experts + 1, 2 * intermediate, hidden]; NVFP4: uint8 [experts + 1, 2 * intermediate, hidden / 2].
        s13: MXFP4: uint8 scales, a row for each row of ``w13`` (rows padded to 256, or not) by hidden / 32 (padded to 8); MXFP8: uint8
            [experts + 1, 2 * intermediate, hidden / 32]; NVFP4: float8_e4m3fn [experts + 1, 2 * intermediate, hidden / 16]; else None.
        w2: as ``w13``, with hidden rows of intermediate values.
        s2: as ``s13``, for ``w2``.
        g13: NVFP4: fp32 [experts + 1], the global scale of each expert's ``w13``; else None.
        g2: as ``g13``, for ``w2``.
    """

    format: ExpertFormat
    post_norm: Tensor
    router: Tensor
    router_bias: Tensor
    w13: Tensor
    s13: Tensor | None
    w2: Tensor
    s2: Tensor | None
    g13: Tensor | None = None
    g2: Tensor | None = None

    def reasons(self, shape: FfnShape, device: torch.device = CPU) -> list[str]:
        """Why these weights do not fit ``shape`` on ``device``; empty if they do."""
        experts, hidden, intermediate = shape.experts + 1, shape.hidden, shape.intermediate
        element = _ELEMENTS[self.format]
        divisor = 2 if self.format in _PACKED else 1
        wanted: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
            "post_norm": (self.post_norm, torch.bfloat16, (hidden,)),
            "router": (self.router, torch.float32, (shape.experts, hidden)),
            "router_bias": (self.router_bias, torch.float32, (shape.experts,)),
            "w13": (self.w13, element, (experts, 2 * intermediate, hidden // divisor)),
            "w2": (self.w2, element, (experts, hidden, intermediate // divisor)),
        }
        found = shape.format_reasons(self.format)
        for name, (tensor, dtype, size) in wanted.items():
            found += _tensor_reasons(name, tensor, dtype, size, device)
        for name, scales, rows, k in (("s13", self.s13, 2 * intermediate, hidden), ("s2", self.s2, hidden, intermediate)):
            found += self._scale_reasons(name, scales, experts, rows, k, device)
        for name, scales in (("g13", self.g13), ("g2", self.g2)):
            if self.format is not ExpertFormat.NVFP4:
                if scales is not None:
                    found.append(f"{name} is given, but {self.format.value} weights have no global scales: pass None")
            elif scales is None:
                found.append(f"{name} is None, but nvfp4 weights need a global scale for each of the {experts} experts")
            else:
                found += _tensor_reasons(name, scales, torch.float32, (experts,), device)
        return found

    def _scale_reasons(self, name: str, scales: Tensor | None, experts: int, rows: int, k: int, device: torch.device) -> list[str]:
        if self.format is ExpertFormat.BF16:
            return [] if scales is None else [f"{name} is given, but bf16 weights have no scales: pass None"]
        if scales is None:
            return [f"{name} is None, but {self.format.value} weights need their scales"]
        if self.format is ExpertFormat.MXFP4:
            return _shuffled_scale_reasons(name, scales, experts * rows, k, device)
        if self.format is ExpertFormat.MXFP8:
            return _tensor_reasons(name, scales, torch.uint8, (experts, rows, k // mxfp8.GROUP), device)
        return _tensor_reasons(name, scales, torch.float8_e4m3fn, (experts, rows, k // nvfp4.GROUP), device)

    def exceeds(self, shape: FfnShape, plain_scale: int) -> bool:
        """Whether weights that fit ``shape`` have an E8M0 scale above code ``plain_scale``, padding aside, or (MXFP8) a weight that is NaN."""
        experts, hidden, intermediate = shape.experts + 1, shape.hidden, shape.intermediate
        for scales, rows, k in ((self.s13, experts * 2 * intermediate, hidden), (self.s2, experts * hidden, intermediate)):
            if scales is not None and scales.dtype == torch.uint8:
                groups = k // mxfp4.GROUP
                own = scales
                if self.format is ExpertFormat.MXFP4:
                    own = unshuffle_scales(scales.reshape(-1, round_up(groups, 8)), rows, groups)
                if int(own.max()) > plain_scale:
                    return True
        return self.format is ExpertFormat.MXFP8 and (mxfp8.has_nan(self.w13) or mxfp8.has_nan(self.w2))


def _device_reasons(name: str, tensor: Tensor, device: torch.device) -> list[str]:
    if tensor.device == device:
        return []
    return [f"{name} lies on {tensor.device}: the launch reads memory of {'the CPU' if device == CPU else device}"]


def _tensor_reasons(name: str, tensor: Tensor, dtype: torch.dtype, size: tuple[int, ...], device: torch.device) -> list[str]:
    found = _device_reasons(name, tensor, device)
    if tensor.dtype != dtype:
        found.append(f"{name} is {tensor.dtype}: {dtype} is needed")
    if tuple(tensor.shape) != size:
        found.append(f"{name} has shape {list(tensor.shape)}: {list(size)} is needed")
    if not tensor.is_contiguous():
        found.append(f"{name} is not contiguous (strides {tensor.stride()}): pass a contiguous tensor")
    if tensor.data_ptr() % WEIGHT_ALIGNMENT:
        found.append(f"{name} starts at an address that is no multiple of {WEIGHT_ALIGNMENT}: pass a tensor at the start of its storage")
    if tensor.is_neg():
        found.append(f"{name} is a negated view, whose memory holds the values' opposites: pass {name}.resolve_neg()")
    return found


def _shuffled_scale_reasons(name: str, scales: Tensor, rows: int, k: int, device: torch.device) -> list[str]:
    groups = round_up(k // mxfp4.GROUP, 8)
    sizes = (rows * groups, round_up(rows, 256) * groups)
    found = [] if scales.dtype == torch.uint8 else [f"{name} is {scales.dtype}: torch.uint8 (E8M0 codes) is needed"]
    found += _device_reasons(name, scales, device)
    if not scales.is_contiguous():
        found.append(f"{name} is not contiguous (strides {scales.stride()}): pass a contiguous tensor")
    if scales.numel() not in sizes:
        found.append(
            f"{name} holds {scales.numel()} scales: {sizes[0]} ({rows} rows of {groups}) are needed, or {sizes[1]} with the rows padded to 256"
        )
    return found
