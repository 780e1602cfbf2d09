"""Every code under every scale, widened to bf16 by the kernels' own operations, bit for bit: the CPU target's, and the NVIDIA target's products of
bf16 pairs on a product that rounds as its instruction does. What is wanted is written down in float64, from the formats' definitions."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m3_kernels.build.sources import installed_sources

BUILDS = {"cpu": (), "cpu, waves of 32": ("-DM3_WAVE_WIDTH=32",), "pairs, as on NVIDIA": ("-DM3_PAIRS",)}
# The largest scale of the NVIDIA target's fast entry (hosts/cuda.py).
PLAIN_SCALE = 134


@pytest.fixture(scope="module", params=BUILDS, ids=list(BUILDS))
def widening(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("widening") / "widen.so"
    include = f"-I{installed_sources().include}"
    flags = ("-std=c++20", "-O1", "-pthread", "-ffp-contract=off", "-fPIC", "-shared", include, *BUILDS[request.param])
    subprocess.run(["g++", *flags, str(Path(__file__).parent / "widen.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def widened(library: ctypes.CDLL, name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """int32 [n, 32]: the bits of bf16."""
    out = torch.full((codes.shape[0], 32), -1, dtype=torch.int16)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, scales, out)]
    assert getattr(library, name)(*pointers, codes.shape[0]) == 0
    return out.to(torch.int32) & 0xFFFF


def e4m3(code: int) -> float:
    """OCP FP8: sign, four bits of exponent (bias 7), three of mantissa; no infinities, magnitude 0x7F is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]


def bf16_bits(value: float) -> int | None:
    """The nearest bf16, the even one on a tie; None for any NaN. Subnormals' last place is worth 2^-133; what rounds to 2^128 is infinite."""
    if math.isnan(value):
        return None
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    if magnitude == 0:
        return sign
    _, exponent = math.frexp(magnitude)
    last = max(exponent - 8, -133)
    steps = round(math.ldexp(magnitude, -last))
    if math.ldexp(steps, last) >= 2.0**128:
        return sign | 0x7F80
    return sign | (steps if last == -133 else ((last + 133) << 7) + steps)


def is_nan(bits: Tensor) -> Tensor:
    return ((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)


def check(found: Tensor, wanted: list[int | None]) -> None:
    nan = torch.tensor([value is None for value in wanted])
    assert torch.equal(is_nan(found), nan)
    numbers = torch.tensor([0 if value is None else value for value in wanted], dtype=torch.int32)
    assert torch.equal(torch.where(nan, torch.zeros_like(found), found), numbers)


def test_the_definitions_used_here_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        codes.view(torch.float8_e4m3fn).double().nan_to_num(nan=1e9),
        torch.tensor([e4m3(code) for code in range(256)]).double().nan_to_num(nan=1e9),
    )
    values = [
        *(math.ldexp(1 + i / 512, e) for i in range(512) for e in (-140, -134, -133, -126, 0, 127)),
        2.0**128,
        0.0,
        -0.0,
        -1.5 * 2.0**-133,
    ]
    exact = torch.tensor(values, dtype=torch.float64).float().bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    assert exact.tolist() == [bf16_bits(value) for value in values]


@pytest.mark.parametrize(("entry", "largest"), [("any", 255), ("plain", PLAIN_SCALE)])
def test_every_fp8_code_under_every_scale(widening: ctypes.CDLL, entry: str, largest: int) -> None:
    """The first and the last half of a lane's codes have scales of their own. The fast entry takes neither large scales nor NaN codes."""
    scales = torch.arange(largest + 1)
    codes = torch.arange(256).view(16, 16)
    pairs = torch.stack((codes, codes.flip(0)), dim=1).reshape(16, 32).repeat(len(scales), 1).to(torch.uint8).contiguous()
    both = torch.stack((scales, scales.flip(0)), dim=1).repeat_interleave(16, dim=0).to(torch.uint8).contiguous()
    found = widened(widening, f"widen_fp8_{entry}", pairs, both)

    def value(code: int, scale: int) -> float:
        return math.nan if scale == 255 else e4m3(code) * 2.0 ** (scale - 127)

    table = {(code, scale): bf16_bits(value(code, scale)) for code in range(256) for scale in range(largest + 1)}
    each = zip(pairs.flatten().tolist(), both.repeat_interleave(16, dim=1).flatten().tolist(), strict=True)
    wanted = [table[pair] for pair in each]
    taken = torch.ones(found.numel(), dtype=torch.bool) if entry == "any" else (pairs.flatten() & 0x7F) != 0x7F
    check(found.flatten()[taken], [one for one, take in zip(wanted, taken.tolist(), strict=True) if take])
    assert len(set(pairs.flatten().tolist())) == 256


def test_every_fp4_code_under_every_e4m3_scale(widening: ctypes.CDLL) -> None:
    """Exact products, signs of zeros included; NaN scales make NaN of zeros too."""
    scales = torch.arange(256)
    both = torch.stack((scales, scales.flip(0)), dim=1).to(torch.uint8).contiguous()
    elements = torch.cat((torch.arange(16), torch.arange(16).flip(0)))
    packed = (elements[0::2] | elements[1::2] << 4).to(torch.uint8).repeat(256, 1).contiguous()
    found = widened(widening, "widen_fp4_e4m3", packed, both)
    each = [
        (element, int(scale)) for row in both for half, scale in enumerate(row) for element in elements[16 * half : 16 * half + 16].tolist()
    ]
    products = [e2m1(element) * e4m3(scale) for element, scale in each]
    assert all(math.isnan(product) or float(torch.tensor(product).bfloat16()) == product for product in products), (
        "a product that is no bf16"
    )
    check(found.flatten(), [bf16_bits(product) for product in products])
