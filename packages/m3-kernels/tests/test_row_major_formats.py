"""MXFP8 and NVFP4: values against their definitions, quantisation, and the checkpoints' layout against the launch's index formulas, both ways."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.errors import ConfigurationError
from m3_kernels.formats import mxfp4, mxfp8, nvfp4
from m3_kernels.formats.checkpoint import CheckpointExpert, Linear, RowMajorExperts, RowMajorFormat, linear_names

MOE = "language_model.model.layers.7.block_sparse_moe"
HIDDEN, INTERMEDIATE, EXPERTS = 96, 128, 3
BOTH = pytest.mark.parametrize("format", [mxfp8.CHECKPOINT, nvfp4.CHECKPOINT], ids=["mxfp8", "nvfp4"])


def finite_e4m3() -> Tensor:
    """The 254 numbers of E4M3, by the format's definition: subnormals, then 2^(e - 7) (1 + m / 8), 0x7F left out."""
    magnitudes = [m * 2.0**-9 for m in range(8)] + [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
    return torch.tensor([*magnitudes[:-1], *(-magnitude for magnitude in magnitudes[:-1])], dtype=torch.float64)


def test_mxfp8_values() -> None:
    """Every code under every scale is the product rounded to nearest even once: exact but past the ends of bf16."""
    codes = torch.tensor([*range(0x7F), *range(0x80, 0xFF), 0x7F, 0xFF], dtype=torch.uint8)
    # 256 codes are eight groups.
    for scale in range(256):
        found = mxfp8.dequantize(codes.view(torch.float8_e4m3fn), torch.full((8,), scale, dtype=torch.uint8))
        assert found.dtype == torch.bfloat16
        if scale == 255:
            assert torch.isnan(found).all()
            continue
        exact = finite_e4m3() * 2.0 ** (scale - 127)
        finite = exact.abs() < 2.0**128
        assert torch.equal(torch.isinf(found[:254]), ~finite)
        wanted = torch.where(finite, exact, torch.copysign(torch.full_like(exact, math.inf), exact))
        # A subnormal's last place is worth 2^-133: torch.round takes a tie to the even multiple.
        wanted = torch.where(exact.abs() < 2.0**-126, torch.round(exact * 2.0**133) * 2.0**-133, wanted)
        assert torch.equal(found[:254].double(), wanted)
        assert torch.equal(torch.signbit(found[:254]), torch.signbit(finite_e4m3()))
        assert torch.isnan(found[254:]).all()


def test_nvfp4_values() -> None:
    """Every element under every scale is the exact product, the even K in the low nibble; the scales' groups are 16 long."""
    elements = torch.arange(16)
    packed = (elements[0::2] | elements[1::2] << 4).to(torch.uint8)
    values = torch.tensor([*mxfp4.E2M1_VALUES, *(-value for value in mxfp4.E2M1_VALUES)], dtype=torch.float64)
    scales = torch.tensor([*range(0x7F), *range(0x80, 0xFF)], dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = nvfp4.dequantize(packed.repeat(254), scales).view(254, 16)
    assert found.dtype == torch.bfloat16
    exact = finite_e4m3()[:, None] * values
    assert torch.equal(found.double(), exact)
    assert torch.equal(torch.signbit(found), torch.signbit(exact))
    assert float(exact.abs().max()) == 2688.0
    for code in (0x7F, 0xFF):
        scale = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert torch.isnan(nvfp4.dequantize(packed, scale)).all(), "zeros too"


def test_mxfp8_quantisation_is_the_nearest() -> None:
    """The largest value sets the scale; no other code is nearer, ties go to the even code, and past 448 elements saturate."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 64, generator=generator) * torch.exp2(torch.randint(-20, 20, (64, 1), generator=generator).float())
    # 256 gives scale 1: ties between 16 and 18, 18 and 20; 465 is nearer to 448 than to what 480 would be, were it not NaN.
    values[0, :8] = torch.tensor([256.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0, 0.0, 465.0])
    codes, scales = mxfp8.quantize(values)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.uint8
    assert int(scales[0, 0]) == 127
    assert codes[0, :8].float().tolist() == [256.0, 16.0, 20.0, 0.0, 2 * 2.0**-9, -16.0, 0.0, 448.0]
    largest = values.double().view(64, 2, 32).abs().amax(dim=2)
    step = torch.exp2(scales.double() - 127)
    assert ((step * 256 <= largest) & (largest < step * 512)).all()
    grid = step.repeat_interleave(32, dim=1)[..., None] * finite_e4m3()
    nearest = (values.double()[..., None] - grid).abs().min(dim=-1).values
    assert torch.equal((mxfp8.dequantize(codes, scales).double() - values.double()).abs(), nearest)


def test_mxfp8_quantisation_keeps_what_the_format_holds() -> None:
    generator = torch.Generator().manual_seed(2)
    for exponent in (-117, -20, 0, 9, 118):
        values = finite_e4m3()[torch.randint(0, 254, (4, 96), generator=generator)]
        values[:, ::32] = 448.0
        codes, scales = mxfp8.quantize((values * 2.0**exponent).float())
        assert (scales == exponent + 127).all()
        assert torch.equal(codes.double(), values)
    codes, scales = mxfp8.quantize(torch.zeros(2, 32))
    assert scales.tolist() == [[127], [127]]
    assert not codes.float().any()


def test_nvfp4_quantisation_is_the_nearest() -> None:
    """Scales are the nearest E4M3 of a sixth of the group's largest value over the global scale, elements the nearest under their scale."""
    values = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values[1] = 0.0
    values[2, 0, :16] = 0.0
    codes, scales, global_scales = nvfp4.quantize(values)
    assert global_scales.tolist() == [(values[0].abs().max() / 2688).float().item(), 1.0, (values[2].abs().max() / 2688).float().item()]
    wide = global_scales.double()[:, None, None]
    target = values.view(3, 8, 4, 16).abs().amax(dim=3) / 6 / wide
    nearest_scale = (target[..., None] - finite_e4m3()).abs().min(dim=-1).values
    # The quotient is rounded to fp32 before it is rounded to E4M3: a relative 2^-24 of slack.
    assert ((scales.double() - target).abs() <= nearest_scale + target * 2.0**-24).all()
    step = (scales.double() * wide)[..., None] * torch.tensor([*mxfp4.E2M1_VALUES, *(-value for value in mxfp4.E2M1_VALUES)]).double()
    distance = (values[..., None] - step.repeat_interleave(16, dim=2)).abs().min(dim=-1).values
    found = nvfp4.dequantize(codes, scales).double() * wide
    assert torch.equal((found - values).abs(), distance)
    assert not nvfp4.dequantize(codes, scales)[1].any()


def test_quantisation_refuses() -> None:
    with pytest.raises(ConfigurationError, match="K is 40; MXFP8 needs a multiple of 32"):
        mxfp8.quantize(torch.zeros(1, 40))
    with pytest.raises(ConfigurationError, match="not finite; MXFP8"):
        mxfp8.quantize(torch.full((1, 32), math.inf))
    with pytest.raises(ConfigurationError, match=r"shape \[1, 24\]; NVFP4 needs"):
        nvfp4.quantize(torch.zeros(1, 24))
    with pytest.raises(ConfigurationError, match="not finite; NVFP4"):
        nvfp4.quantize(torch.full((1, 16), math.nan))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_weights_are_found(code: int) -> None:
    codes = torch.randint(0, 0x7F, (3, 4, 32), dtype=torch.uint8)
    assert not mxfp8.has_nan(codes.view(torch.float8_e4m3fn))
    codes[2, 3, 31] = code
    assert mxfp8.has_nan(codes.view(torch.float8_e4m3fn))


def random_linear(format: RowMajorFormat, rows: int, k: int, generator: torch.Generator, global_scale: float) -> Linear:
    def codes(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator).view(dtype)

    weight, scale = codes(k // format.values_an_element, format.codes), codes(k // format.group, format.scales)
    return Linear(weight, scale, None if format.global_scale_name is None else torch.tensor(global_scale))


def random_experts(format: RowMajorFormat) -> list[CheckpointExpert]:
    generator = torch.Generator().manual_seed(4)
    return [
        CheckpointExpert(
            random_linear(format, INTERMEDIATE, HIDDEN, generator, 1.5 + number),
            random_linear(format, INTERMEDIATE, HIDDEN, generator, 1.5 + number),
            random_linear(format, HIDDEN, INTERMEDIATE, generator, 0.25 + number),
        )
        for number in range(EXPERTS + 1)
    ]


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_code_and_scale_lies_where_the_formula_says(format: RowMajorFormat, world_size: int) -> None:
    """And back: whole experts from every rank's slice are the checkpoint's, bit for bit."""
    experts = random_experts(format)
    own, pack, group = INTERMEDIATE // world_size, format.values_an_element, format.group
    ranks = [format.pack(experts, rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank, packed in enumerate(ranks):
        assert packed.w13.dtype == packed.w2.dtype == format.codes
        assert packed.s13.dtype == packed.s2.dtype == format.scales
        assert packed.w13.shape == (EXPERTS + 1, 2 * own, HIDDEN // pack)
        assert packed.w2.shape == (EXPERTS + 1, HIDDEN, own // pack)
        assert packed.s13.shape == (EXPERTS + 1, 2 * own, HIDDEN // group)
        assert packed.s2.shape == (EXPERTS + 1, HIDDEN, own // group)
        assert all(tensor.is_contiguous() for tensor in (packed.w13, packed.s13, packed.w2, packed.s2))
        first = rank * own
        for e, expert in enumerate(experts):
            for n in range(2 * own):
                source, row = (expert.w1, first + n) if n < own else (expert.w3, first + n - own)
                for k in range(0, HIDDEN, 7):
                    assert raw(packed.w13)[e, n, k // pack] == raw(source.weight)[row, k // pack]
                    assert raw(packed.s13)[e, n, k // group] == raw(source.scale)[row, k // group]
            for n in range(0, HIDDEN, 5):
                for k in range(own):
                    assert raw(packed.w2)[e, n, k // pack] == raw(expert.w2.weight)[n, (first + k) // pack]
                    assert raw(packed.s2)[e, n, k // group] == raw(expert.w2.scale)[n, (first + k) // group]
        if format.global_scale_name is None:
            assert packed.g13 is None
            assert packed.g2 is None
        else:
            assert packed.g13 is not None
            assert packed.g2 is not None
            assert packed.g13.tolist() == [1.5, 2.5, 3.5, 4.5]
            assert packed.g2.tolist() == [0.25, 1.25, 2.25, 3.25]
    for found, wanted in zip(format.unpack(ranks), experts, strict=True):
        for name in ("w1", "w3", "w2"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert one.weight.dtype == other.weight.dtype
            assert torch.equal(raw(one.weight), raw(other.weight))
            assert torch.equal(raw(one.scale), raw(other.scale))
            assert (one.global_scale is None) == (other.global_scale is None)
            if one.global_scale is not None:
                assert torch.equal(one.global_scale, other.global_scale)


@pytest.mark.parametrize(
    ("format", "world_size", "sizes"),
    [
        (mxfp8.CHECKPOINT, 4, (9_437_184, 294_912, 4_718_592, 147_456)),
        (mxfp8.CHECKPOINT, 8, (4_718_592, 147_456, 2_359_296, 73_728)),
        (nvfp4.CHECKPOINT, 4, (4_718_592, 589_824, 2_359_296, 294_912)),
        (nvfp4.CHECKPOINT, 8, (2_359_296, 294_912, 1_179_648, 147_456)),
    ],
    ids=["mxfp8-4", "mxfp8-8", "nvfp4-4", "nvfp4-8"],
)
def test_published_bytes_an_expert(format: RowMajorFormat, world_size: int, sizes: tuple[int, ...]) -> None:
    """MiniMax-M3 facts: bytes per expert and rank."""

    def linear(rows: int, k: int) -> Linear:
        weight = torch.zeros(rows, k // format.values_an_element, dtype=torch.uint8).view(format.codes)
        scale = torch.zeros(rows, k // format.group, dtype=torch.uint8).view(format.scales)
        return Linear(weight, scale, None if format.global_scale_name is None else torch.tensor(1.0))

    gate = linear(3072, 6144)
    packed = format.pack([CheckpointExpert(gate, gate, linear(6144, 3072))], rank=world_size - 1, world_size=world_size)
    assert tuple(tensor.nbytes for tensor in (packed.w13, packed.s13, packed.w2, packed.s2)) == sizes


@BOTH
def test_experts_are_read_by_the_checkpoints_names(format: RowMajorFormat) -> None:
    experts = random_experts(format)
    tensors = {}
    for number, expert in enumerate(experts):
        for name, linear in zip(linear_names(MOE, number, EXPERTS), (expert.w1, expert.w3, expert.w2), strict=True):
            tensors[f"{name}.weight"] = linear.weight
            tensors[f"{name}.{format.scale_name}"] = linear.scale
            if linear.global_scale is not None:
                tensors[f"{name}.weight_scale_2"] = linear.global_scale
                tensors[f"{name}.input_scale"] = torch.tensor(7.0)
    assert f"{MOE}.experts.2.w3.weight" in tensors
    assert f"{MOE}.shared_experts.down_proj.{format.scale_name}" in tensors
    found = format.read(tensors, MOE, EXPERTS)
    for one, other in zip(found, experts, strict=True):
        for name in ("w1", "w3", "w2"):
            assert getattr(one, name).weight is getattr(other, name).weight
            assert getattr(one, name).scale is getattr(other, name).scale
            assert getattr(one, name).global_scale is getattr(other, name).global_scale
    del tensors[f"{MOE}.experts.1.w2.{format.scale_name}"], tensors[f"{MOE}.shared_experts.up_proj.weight"]
    with pytest.raises(ConfigurationError) as caught:
        format.read(tensors, MOE, EXPERTS)
    assert f"{MOE}.experts.1.w2.{format.scale_name}, {MOE}.shared_experts.up_proj.weight" in str(caught.value)


def changed(format: RowMajorFormat, linear: str, **changes: Tensor | None) -> list[CheckpointExpert]:
    experts = random_experts(format)
    experts[2] = attrs.evolve(experts[2], **{linear: attrs.evolve(getattr(experts[2], linear), **changes)})
    return experts


@BOTH
def test_checkpoints_that_do_not_fit_are_refused_by_name(format: RowMajorFormat) -> None:
    for experts, options, message in (
        ([], {}, "0 experts"),
        (random_experts(format), {"rank": 2, "world_size": 2}, "rank 2 of 2"),
        (random_experts(format), {"world_size": 3}, "size 128 over 3 ranks"),
        (random_experts(format), {"world_size": 16}, f"size 128 over 16 ranks gives no whole groups of {format.group}"),
        (changed(format, "w3", weight=torch.zeros(4, 4)), {}, r"expert 2, w3: weight is torch.float32 \[4, 4\]"),
        (changed(format, "w2", scale=torch.zeros(4, 4)), {}, rf"expert 2, w2: {format.scale_name} is torch.float32 \[4, 4\]"),
    ):
        if format is nvfp4.CHECKPOINT and options.get("world_size") == 16:
            # Eight values a rank.
            message = "size 128 over 16 ranks gives no whole groups of 16"
        with pytest.raises(ConfigurationError, match=message):
            format.pack(experts, **options)


def test_global_scales_that_do_not_fit_are_refused_by_name() -> None:
    format = nvfp4.CHECKPOINT
    with pytest.raises(ConfigurationError, match=r"expert 2: w1 and w3 have the global scales 3\.5, 4\.0; the launch takes one for both"):
        format.pack(changed(format, "w3", global_scale=torch.tensor(4.0)))
    with pytest.raises(ConfigurationError, match="expert 2: weight_scale_2 is missing"):
        format.pack(changed(format, "w2", global_scale=None))
    with pytest.raises(ConfigurationError, match=r"expert 2: weight_scale_2 is torch.float32 \[2\]; one torch.float32 number"):
        format.pack(changed(format, "w2", global_scale=torch.zeros(2)))
    nan = changed(format, "w1", global_scale=torch.tensor(math.nan))
    nan[2] = attrs.evolve(nan[2], w3=attrs.evolve(nan[2].w3, global_scale=torch.tensor([math.nan])))
    packed = format.pack(nan)
    assert isinstance(packed, RowMajorExperts)
    assert packed.g13 is not None
    assert torch.isnan(packed.g13[2]), "the same NaN twice agrees, and is computed as IEEE 754 says"
