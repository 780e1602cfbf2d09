"""AMD code objects without AMD hardware: what the compiler made of the source, per target and shape.

Needs clang 22 with lld and llvm (clang++-22, llvm-objdump-22, llvm-readelf-22). The published shapes are TP 1, 2, 4 and 8 of hidden 6144 with
128 experts and top 4.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import attrs
import pytest

from m3_kernels.build.gpu import GpuBuild, GpuTarget
from m3_kernels.ffn import FfnShape

pytestmark = pytest.mark.isa

GFX950, GFX942 = GpuTarget.GFX950, GpuTarget.GFX942
# The instruction that widens each format's weights on gfx950; gfx942 has none that fits.
CONVERSIONS = {
    "m3_ffn_bf16": None,
    "m3_ffn_mxfp4": "v_cvt_scalef32_pk_bf16_fp4",
    "m3_ffn_mxfp8": "v_cvt_scalef32_pk_bf16_fp8",
    "m3_ffn_nvfp4": "v_cvt_scalef32_pk_f32_fp4",
}
CASES = [(target, world, rows) for target in (GFX950, GFX942) for world, rows in ((4, 1), (4, 16), (4, 64), (1, 16), (2, 4), (8, 4))]
# A compute unit has 64 KiB of shared memory on gfx942 (160 on gfx950), and 512 registers a lane and SIMD; a block puts two waves on each SIMD.
SHARED_BYTES = 65_536
REGISTERS = 256


@attrs.frozen
class Kernel:
    """What the code object says of a kernel."""

    registers: int
    private_bytes: int
    shared_bytes: int
    instructions: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.instructions))


@cache
def kernels(target: GpuTarget, world: int, rows: int) -> dict[str, Kernel]:
    shape = FfnShape(hidden=6144, intermediate=3072 // world, experts=128, top_k=4, world_size=world, max_rows=64)
    path = GpuBuild(target, shape, rows).code_object()
    notes = output("llvm-readelf-22", "--notes", path)
    listing = output("llvm-objdump-22", "-d", "--no-show-raw-insn", "--no-leading-addr", f"--mcpu={target.value}", path)
    bodies = dict(re.findall(r"<(\w+)>:\n((?:(?!\n\n)[\s\S])*)", listing))
    found = {}
    for block in notes.split("- .agpr_count:")[1:]:
        fields = dict(re.findall(r"\.(\w+):\s+(\S+)", block))
        found[fields["name"]] = Kernel(
            registers=int(fields["vgpr_count"]),
            private_bytes=int(fields["private_segment_fixed_size"]),
            shared_bytes=int(fields["group_segment_fixed_size"]),
            instructions=bodies[fields["name"]],
        )
    return found


def output(program: str, *arguments: str | Path) -> str:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("target", "world", "rows"), CASES)
def test_resources_allow_a_block_a_compute_unit(target: GpuTarget, world: int, rows: int) -> None:
    found = kernels(target, world, rows)
    assert set(found) == set(CONVERSIONS)
    for kernel in found.values():
        assert kernel.private_bytes == 0, "registers spilled to scratch memory"
        assert kernel.registers <= REGISTERS
        assert kernel.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(("target", "world", "rows"), CASES)
def test_matrix_instructions(target: GpuTarget, world: int, rows: int) -> None:
    for name, kernel in kernels(target, world, rows).items():
        native, other = "v_mfma_f32_16x16x32_bf16", "v_mfma_f32_16x16x16_bf16"
        if target is GFX942:
            native, other = other, native
        assert kernel.count(native) > 0
        assert kernel.count(other) == 0
        assert kernel.count("v_mfma_f32_16x16x4_f32") > 0, "the router is fp32"
        conversions = set(re.findall(r"v_cvt_(?:scalef32_)?(?:pk_|sr_)?\w*fp[48]\w*", kernel.instructions))
        wanted = CONVERSIONS[name]
        # gfx942 converts another FP8 (fnuz): its conversions would be wrong by a factor of two and at the ends.
        assert conversions == ({wanted} if target is GFX950 and wanted is not None else set())


@pytest.mark.parametrize(("target", "world", "rows"), CASES)
def test_weights_stream_past_the_caches_sixteen_bytes_at_a_time(target: GpuTarget, world: int, rows: int) -> None:
    for kernel in kernels(target, world, rows).values():
        assert kernel.count(r"global_load_dwordx4 .* nt") > 0
        assert kernel.count(r"(global|flat)_load_\w+ .* nt") == kernel.count(r"global_load_dwordx4 .* nt"), "a narrower weight load"


@pytest.mark.parametrize(("target", "world", "rows"), CASES)
def test_pairs_move_as_one_word_of_their_scope(target: GpuTarget, world: int, rows: int) -> None:
    for kernel in kernels(target, world, rows).values():
        assert kernel.count(r"(global|flat)_store_dwordx2 .* sc0 sc1") > 0, "system-scope pairs to the peers"
        assert kernel.count(r"(global|flat)_load_dwordx2 .* sc0 sc1") > 0, "system-scope polls"
        assert kernel.count(r"(global|flat)_store_dwordx2 .* sc1") > kernel.count(r"(global|flat)_store_dwordx2 .* sc0 sc1"), (
            "device-scope pairs"
        )
        assert kernel.count(r"buffer_wbl2 sc1") > 0, "release before an announcement"
        assert kernel.count(r"buffer_inv sc1") > 0, "acquire after a poll"
        assert kernel.count(r"s_sleep") > 0
        assert kernel.count(r"s_memrealtime") > 0


@pytest.mark.parametrize("target", [GFX950, GFX942])
def test_stores_are_drained_before_the_barrier_that_precedes_an_announcement(target: GpuTarget) -> None:
    """Four places announce data: norm, shared_up, up and the end of the launch. The compiler's own release does not wait for stores of other
    waves, nor for its write-back, so that the drain before the barrier is what counts: every store of the wave has then reached its scope."""
    drained = r"s_waitcnt vmcnt\(0\)[^\n]*\n(?:\s+(?!s_barrier|\S*store)\S[^\n]*\n){0,6}?\s+s_barrier"
    for kernel in kernels(target, 4, 4).values():
        assert kernel.count(drained) >= 4
