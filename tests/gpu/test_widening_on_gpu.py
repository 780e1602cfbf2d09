"""Every code under every scale, widened by the device itself, against the formats' values (which ``test_row_major_formats.py`` holds to their
definitions): products of bf16 pairs with subnormals, infinities and NaN."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m3_kernels.build.cuda import ARCHITECTURE, nvcc
from m3_kernels.build.sources import installed_sources
from m3_kernels.formats import mxfp8, nvfp4
from m3_kernels.hosts.cuda import PLAIN_SCALES

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).parents[2] / "packages" / "m3-kernels" / "tests" / "widen.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("widening") / "widen.so"
    flags = ("-x", "cu", "-std=c++17", "-O3", f"-arch={ARCHITECTURE}", "-DM3_BLOCK_THREADS=128", "-shared", "-Xcompiler", "-fPIC")
    subprocess.run([nvcc(), *flags, f"-I{installed_sources().include}", str(SOURCE), "-o", str(path)], check=True, timeout=120)
    return ctypes.CDLL(str(path))


def check(library: ctypes.CDLL, name: str, codes: Tensor, scales: Tensor, wanted: Tensor) -> None:
    """The same bits, zeros' signs included, and any NaN for a NaN."""
    codes, scales = codes.cuda(), scales.cuda()
    out = torch.full((codes.shape[0], 32), -1, dtype=torch.int16, device="cuda")
    torch.cuda.synchronize()
    assert getattr(library, name)(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, scales, out)), codes.shape[0]) == 0
    found = out.cpu().view(torch.bfloat16)
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


@pytest.mark.parametrize(("entry", "largest"), [("any", 255), ("plain", PLAIN_SCALES["m3_ffn_mxfp8"])])
def test_every_fp8_code_under_every_scale(library: ctypes.CDLL, entry: str, largest: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    if entry == "plain":
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    scales = torch.arange(largest + 1, dtype=torch.uint8).repeat_interleave(8)
    every = codes.repeat(largest + 1, 1).contiguous()
    wanted = mxfp8.dequantize(every.view(torch.float8_e4m3fn), scales[:, None])
    check(library, f"widen_fp8_{entry}", every, scales[:, None].repeat(1, 2).contiguous(), wanted)


def test_every_fp4_code_under_every_e4m3_scale(library: ctypes.CDLL) -> None:
    elements = torch.arange(16).repeat(2)
    codes = (elements[0::2] | elements[1::2] << 4).to(torch.uint8).repeat(256, 1).contiguous()
    scales = torch.stack((torch.arange(256), torch.arange(256).flip(0)), dim=1).to(torch.uint8).contiguous()
    check(library, "widen_fp4_e4m3", codes, scales, nvfp4.dequantize(codes, scales.view(torch.float8_e4m3fn)))
