"""The same source for NVIDIA's sm_90 at the published shape: it compiles, with every format's entry."""

from __future__ import annotations

import pytest

from m3_kernels.build.gpu import GpuBuild, GpuTarget
from m3_kernels.ffn import FfnShape
from m3_kernels.hosts.cuda import ENTRIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 16])
def test_it_compiles(rows: int) -> None:
    shape = FfnShape(hidden=6144, intermediate=768, experts=128, top_k=4, world_size=4, max_rows=16)
    code = GpuBuild(GpuTarget.SM_90, shape, rows).code_object().read_bytes()
    assert code[:4] == b"\x7fELF"
    for entry in ENTRIES:
        assert f".text.{entry}\0".encode() in code
