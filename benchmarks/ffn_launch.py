"""Time of the FFN launch on one NVIDIA GPU: one tensor-parallel rank's shapes, in a graph over distinct layers, every exchange stage active
against the rank's own buffer; beside it what the chip can stream at best, and what vLLM's own kernels take, in the same call.

    python benchmarks/ffn_launch.py [--json FILE] [--peer-library PATH/_moe_C_stable_libtorch.abi3.so] [--timeline]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import peer_marlin
import torch

from m3_kernels.build.cuda import ARCHITECTURE, OWN_BUFFER, nvcc
from m3_kernels.checking import check_launch, read_scratch
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights
from m3_kernels.hosts.cuda_driver import CudaDriver, Handle
from m3_kernels.testing import LayerInputs, OwnBufferPeers, aligned_zeros, random_packed_weights

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 6144, 3072, 128, 4
LAYERS = 24
REPLAYS = 15
WARM_UP = 3
STAGES = ("push", "reduce", "norm", "router", "route", "shared_up", "table", "up", "down", "final", "finish")


def graph_us(runs: Sequence[Callable[[], object]]) -> float:
    """Median time of one of ``runs`` in a graph of them all, microseconds."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in runs]
    times = []
    for replay in range(WARM_UP + REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM_UP:
            times.append(begin.elapsed_time(end) * 1e3 / len(runs))
    del kept
    return statistics.median(times)


@attrs.define(eq=False)
class Stream:
    """Reads bytes at the chip's limit."""

    driver: CudaDriver
    function: Handle
    pool: torch.Tensor
    sink: torch.Tensor
    multiprocessors: int

    @classmethod
    def make(cls, device: torch.device, pool_bytes: int) -> Stream:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "stream.cubin"
            source = Path(__file__).with_name("stream_limit.cu")
            subprocess.run([nvcc(), "-std=c++17", "-O3", f"-arch={ARCHITECTURE}", "-cubin", str(source), "-o", str(cubin)], check=True)
            code = cubin.read_bytes()
        # The tensor comes first: with it torch makes the context in which the code is loaded.
        pool = torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8, device=device)
        driver, module, function = CudaDriver(), Handle(), Handle()
        driver.call("cuModuleLoadData", ctypes.byref(module), code)
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"stream")
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(driver, function, pool, torch.zeros(16, dtype=torch.uint8, device=device), count)

    def us(self, nbytes: int) -> float:
        """The best time over the usual numbers of blocks."""
        nbytes -= nbytes % 4096
        starts = [(layer * (nbytes + 4096)) % (self.pool.numel() - nbytes) // 256 * 256 for layer in range(LAYERS)]
        return min(graph_us([self._run(start, nbytes, blocks) for start in starts]) for blocks in (1, 2, 4))

    def _run(self, start: int, nbytes: int, blocks: int) -> Callable[[], None]:
        values = (ctypes.c_uint64(self.pool.data_ptr() + start), ctypes.c_uint64(nbytes // 16), ctypes.c_uint64(self.sink.data_ptr()))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))

        def run() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            grid = blocks * self.multiprocessors
            self.driver.call("cuLaunchKernel", self.function, grid, 1, 1, 512, 1, 1, 0, stream, ctypes.addressof(pointers), None)
            assert values

        return run


@attrs.frozen(eq=False)
class Rank:
    """One rank's layers of one format on one channel."""

    shape: FfnShape
    channel: FfnChannel
    weights: tuple[FfnWeights, ...]
    launches: tuple[FfnLaunch, ...]

    @classmethod
    def make(
        cls,
        format: ExpertFormat,
        tp: int,
        device: torch.device,
        layers: int,
        *,
        timeline: bool = False,
        weights: tuple[FfnWeights, ...] | None = None,
    ) -> Rank:
        shape = FfnShape(HIDDEN, INTERMEDIATE // tp, EXPERTS, TOP_K, tp, 64)
        peers = OwnBufferPeers(aligned_zeros(shape.peer_layout.total_bytes, device=device), tp)
        channel = FfnChannel(
            shape, peers, grid=None, wait_seconds=2.0, device=device, defines=(OWN_BUFFER,) if tp > 1 else (), timeline=timeline
        )
        if weights is None:
            weights = tuple(random_packed_weights(shape, format, device, layer) for layer in range(layers))
        return cls(shape, channel, weights, tuple(FfnLaunch(channel, layer, FfnConstants(), 3 + i) for i, layer in enumerate(weights)))

    def inputs(self, rows: int, seed: int) -> LayerInputs:
        device = self.channel.device
        generator = torch.Generator(device).manual_seed(seed)
        part, residual = (torch.randn(rows, HIDDEN, generator=generator, device=device).bfloat16() for _ in range(2))
        return LayerInputs((part,), residual, torch.arange(rows, device=device))

    def expert_bytes(self) -> int:
        one = self.weights[0]
        scales = sum(0 if scale is None else scale.numel() for scale in (one.s13, one.s2))
        return (one.w13.nbytes + one.w2.nbytes + scales) // (EXPERTS + 1)

    def measure(self, rows: int, *, check: bool) -> dict[str, Any]:
        """Time a layer, and how many bytes it reads with the picks of this run; the first and the last layer are checked."""
        inputs = [self.inputs(rows, 1000 * layer + rows) for layer in range(len(self.launches))]
        self.channel.prepare(rows)
        distinct = []
        for i, (launch, given) in enumerate(zip(self.launches, inputs, strict=True)):
            epoch = self.channel.epoch()
            found = launch(given.parts[0], given.residual, given.slots, handshake=False)
            scratch = read_scratch(self.channel, launch.weights.format, rows, epoch)
            if check and i in (0, len(self.launches) - 1):
                check_launch(self.shape, given, (launch.weights,), found, scratch, alone=True)
            distinct.append(scratch.routes.experts.unique().numel() + 1)
        us = graph_us(
            [
                self._run(launch, given, last=i == len(self.launches) - 1)
                for i, (launch, given) in enumerate(zip(self.launches, inputs, strict=True))
            ]
        )
        fault = self.channel.health()
        if fault.failed:
            sys.exit(f"a launch failed: {fault.describe()}")
        experts = statistics.mean(distinct)
        return {"us": us, "distinct_experts": experts, "bytes": round(experts * self.expert_bytes()) + 4 * EXPERTS * HIDDEN}

    @staticmethod
    def _run(launch: FfnLaunch, given: LayerInputs, *, last: bool) -> Callable[[], object]:
        return lambda: launch(given.parts[0], given.residual, given.slots, handshake=last)

    def host_us(self, rows: int) -> float:
        """Host time of an eager launch call, the queue never full."""
        given = self.inputs(rows, 1)
        launch = self.launches[0]
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                launch(given.parts[0], given.residual, given.slots, handshake=False)
            times.append((time.perf_counter() - begin) / 20 * 1e6)
        return statistics.median(times)

    def stage_table(self, rows: int) -> list[tuple[str, float, float, float]]:
        """Of each stage, in thousands of cycles: median and longest stay of a block in it, and when the last block left it."""
        given = [self.inputs(rows, 1000 * layer + rows) for layer in range(len(self.launches))]
        stays, ends = [], []
        for launch, one in zip(self.launches, given, strict=True):
            launch(one.parts[0], one.residual, one.slots, handshake=False)
            stamps = self.channel.timeline_stamps(rows).double().cpu() / 1e3
            # A multiprocessor's clock has an origin of its own: the first stamp is as good as common.
            stays.append(stamps.diff(dim=1))
            ends.append((stamps[:, 1:] - stamps[:, :1]).amax(dim=0))
        stay = torch.stack(stays)
        median, longest = stay.median(dim=1).values.median(dim=0).values, stay.amax(dim=1).median(dim=0).values
        end = torch.stack(ends).median(dim=0).values
        return [(name, float(median[i]), float(longest[i]), float(end[i])) for i, name in enumerate(STAGES)]


def peer_us(library: Path, tp: int, rows: int, device: torch.device, layers: list[peer_marlin.PeerLayer]) -> float:
    """The peer's time a layer for picks as random as ours."""
    if not layers:
        torch.ops.load_library(str(library))
        layers += [peer_marlin.random_layer(HIDDEN, INTERMEDIATE // tp, EXPERTS, device) for _ in range(LAYERS)]
    runs = []
    for layer in layers:
        routed = torch.rand(rows, EXPERTS, device=device).topk(TOP_K).indices
        picks = torch.cat([routed, torch.full((rows, 1), EXPERTS, device=device)], dim=1).int()
        runs.append(peer_marlin.chain(layer, picks))
    return graph_us(runs)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--mxfp4", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64], help="row counts")
    parser.add_argument("--bf16", type=int, nargs="*", default=[1, 16], help="row counts")
    parser.add_argument("--mxfp8", type=int, nargs="*", default=[], help="row counts")
    parser.add_argument("--nvfp4", type=int, nargs="*", default=[], help="row counts")
    parser.add_argument("--peer-library", type=Path)
    parser.add_argument("--timeline", action="store_true", help="also stamp the stages")
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare with the references: for experiments that compute something else"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    stream = Stream.make(device, 8 << 30)
    peers: list[peer_marlin.PeerLayer] = []
    results = []
    print("format rows  distinct      MB |       us   TB/s | limit us  ratio |  peer us  ratio", flush=True)
    for format in (ExpertFormat.MXFP4, ExpertFormat.BF16, ExpertFormat.MXFP8, ExpertFormat.NVFP4):
        rows_list: list[int] = getattr(options, format.value)
        if not rows_list:
            continue
        rank = Rank.make(format, options.tp, device, LAYERS)
        for rows in rows_list:
            found = {"format": format.value, "tp": options.tp, "rows": rows, **rank.measure(rows, check=not options.no_check)}
            found["limit_us"] = stream.us(found["bytes"])
            compared = options.peer_library is not None and format is ExpertFormat.MXFP4
            found["peer_us"] = peer_us(options.peer_library, options.tp, rows, device, peers) if compared else None
            results.append(found)
            us, limit, peer = found["us"], found["limit_us"], found["peer_us"] or float("nan")
            print(
                f"{format.value:6s} {rows:4d} {found['distinct_experts']:9.1f} {found['bytes'] / 1e6:7.1f} | {us:8.1f} {found['bytes'] / us / 1e6:6.2f} | "
                f"{limit:8.1f} {us / limit:6.2f} | {peer:8.1f} {peer / us:6.2f}",
                flush=True,
            )
        if rows_list:
            print(f"{format.value} host us of an eager launch call: {rank.host_us(rows_list[0]):.1f}", flush=True)
        if options.timeline:
            stamped = Rank.make(format, options.tp, device, LAYERS, timeline=True, weights=rank.weights)
            for rows in rows_list:
                stamped.channel.prepare(rows)
                print(f"{format.value} {rows} rows, thousands of cycles: stage, median stay, longest stay, last block out")
                for name, median, longest, end in stamped.stage_table(rows):
                    print(f"  {name:10s} {median:8.2f} {longest:8.2f} {end:8.2f}", flush=True)
            stamped.channel.close()
        rank.channel.close()
        del rank
        torch.cuda.empty_cache()
    if options.json is not None:
        report = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
