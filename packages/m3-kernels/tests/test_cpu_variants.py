"""The same bits from every build of the CPU target: other lane maps, other fibers, no wide vectors."""

from __future__ import annotations

import pytest
import torch

from m3_kernels.build.cpu import FLAGS, CpuBuild
from m3_kernels.ffn import ExpertFormat, FfnShape
from m3_kernels.testing import ThreadRanks, random_inputs, random_weights

BUILDS = {
    "waves of 32 with NVIDIA's lane map": CpuBuild("g++", defines=("M3_WAVE_WIDTH=32",)),
    "whole rows a block, as on NVIDIA": CpuBuild("g++", defines=("M3_WAVE_WIDTH=32", "M3_WHOLE_ROWS")),
    "portable fibers": CpuBuild("g++", defines=("M3_PORTABLE_FIBERS",)),
    "no optimisation, no wide vectors": CpuBuild("g++", flags=tuple("-O0" if flag == "-O3" else flag for flag in FLAGS)),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
@pytest.mark.parametrize("format", list(ExpertFormat))
def test_same_bits(build: CpuBuild, format: ExpertFormat, generator: torch.Generator) -> None:
    shape = FfnShape(hidden=320, intermediate=64, experts=18, top_k=4, world_size=2, max_rows=64)
    weights = random_weights(shape, format, generator)
    for rows in (1, 9, 20):
        inputs = random_inputs(shape, rows, generator, padded=[0] if rows > 1 else [])
        results = []
        for library in (None, build.library()):
            with ThreadRanks(shape, library=library, poison=True) as ranks:
                results.append(ranks.run(ranks.launches(weights), inputs))
        for (out, _), (other, _) in zip(*results, strict=True):
            assert torch.equal(out.view(torch.int16), other.view(torch.int16))
