"""Ranks as threads of one process: peer memory, random layers, and launches on all ranks at once. For tests, drills and benchmarks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from m3_core.faults import Fault, Site
from m3_core.formulas import round_up
from m3_core.ports import FlightRing
from m3_kernels.build.cpu import CpuBuild
from m3_kernels.ffn import CPU, ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights
from m3_kernels.formats import mxfp8, nvfp4
from m3_kernels.formats.mxfp4 import quantize_shuffled
from m3_kernels.hosts.cpu import BLOCK_THREADS

JOIN_SECONDS = 120.0
TEST_HOOKS = ("M3_TEST_HOOKS",)

T = TypeVar("T")


def aligned_zeros(nbytes: int, alignment: int = 256, device: torch.device = CPU) -> Tensor:
    """uint8 zeros that start at a multiple of ``alignment``."""
    storage = torch.zeros(nbytes + alignment, dtype=torch.uint8, device=device)
    start = -storage.data_ptr() % alignment
    return storage[start : start + nbytes]


class InProcessPeers:
    """One rank's view of buffers that all lie in this process (a ``PeerMemory``).

    Args:
        buffers: every rank's uint8 buffer, in rank order.
        rank: the viewing rank.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int) -> None:
        self.buffers = tuple(buffers)
        self.rank = rank
        self.world_size = len(buffers)
        self.nbytes = buffers[0].numel()
        self.addresses = tuple(buffer.data_ptr() for buffer in buffers)
        self.local = self.addresses[rank]

    def close(self) -> None:
        """Nothing: the buffers belong to whoever made them."""


class OwnBufferPeers:
    """A rank of several, alone: every address of its peer table is its own buffer (a ``PeerMemory``).

    With a build that defines ``M3_OWN_BUFFER``, what the rank would write for a peer goes where that peer's words are expected, so that
    every wait of a launch is met and every exchange costs what it costs without the link. To measure one GPU.

    Args:
        buffer: uint8, zeroed, 256-byte aligned.
        world_size: ranks to stand for.
        rank: which of them this one is.
    """

    def __init__(self, buffer: Tensor, world_size: int, rank: int = 0) -> None:
        self.buffer = buffer
        self.rank = rank
        self.world_size = world_size
        self.nbytes = buffer.numel()
        self.local = buffer.data_ptr()
        self.addresses = (self.local,) * world_size

    def close(self) -> None:
        """Nothing: the buffer belongs to whoever made it."""


@attrs.frozen(eq=False)
class LayerInputs:
    """What a launch takes, over all ranks.

    Attributes:
        parts: every rank's bf16 [rows, hidden].
        residual: bf16 [rows, hidden].
        slots: int64 [rows].
    """

    parts: tuple[Tensor, ...]
    residual: Tensor
    slots: Tensor

    def to(self, device: torch.device) -> LayerInputs:
        """The same on ``device``."""
        return LayerInputs(tuple(part.to(device) for part in self.parts), self.residual.to(device), self.slots.to(device))


def random_inputs(shape: FfnShape, rows: int, generator: torch.Generator, padded: Sequence[int] = ()) -> LayerInputs:
    """Normal activations; the rows in ``padded`` have a negative slot."""
    slots = torch.arange(rows) * 7 + 3
    slots[list(padded)] = -1
    parts = tuple(torch.randn(rows, shape.hidden, generator=generator).bfloat16() for _ in range(shape.world_size))
    return LayerInputs(parts, torch.randn(rows, shape.hidden, generator=generator).bfloat16(), slots)


def pack_weights(format: ExpertFormat, post_norm: Tensor, router: Tensor, router_bias: Tensor, w13: Tensor, w2: Tensor) -> FfnWeights:
    """Weights in ``format`` from plain [experts + 1, rows, K] matrices."""
    if format is ExpertFormat.BF16:
        return FfnWeights(format, post_norm, router, router_bias, w13.bfloat16(), None, w2.bfloat16(), None)
    if format is ExpertFormat.NVFP4:
        (codes13, scales13, global13), (codes2, scales2, global2) = nvfp4.quantize(w13), nvfp4.quantize(w2)
        return FfnWeights(format, post_norm, router, router_bias, codes13, scales13, codes2, scales2, global13, global2)
    quantize = mxfp8.quantize if format is ExpertFormat.MXFP8 else quantize_shuffled
    (codes13, scales13), (codes2, scales2) = quantize(w13), quantize(w2)
    return FfnWeights(format, post_norm, router, router_bias, codes13, scales13, codes2, scales2)


def random_weights(shape: FfnShape, format: ExpertFormat, generator: torch.Generator) -> tuple[FfnWeights, ...]:
    """Every rank's weights of one layer: the same norm and router everywhere, experts of their own. Outputs stay near unit size."""
    post_norm = (torch.randn(shape.hidden, generator=generator) * 0.1).bfloat16()
    router = torch.randn(shape.experts, shape.hidden, generator=generator) * shape.hidden**-0.5
    bias = torch.randn(shape.experts, generator=generator) * 0.1
    found = []
    for _ in range(shape.world_size):
        w13 = torch.randn(shape.experts + 1, 2 * shape.intermediate, shape.hidden, generator=generator) * 2 * shape.hidden**-0.5
        w2 = torch.randn(shape.experts + 1, shape.hidden, shape.intermediate, generator=generator) * shape.intermediate**-0.5
        found.append(pack_weights(format, post_norm, router, bias, w13, w2))
    return tuple(found)


def weights_to(weights: FfnWeights, device: torch.device) -> FfnWeights:
    """The same weights on ``device``."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return FfnWeights(
        weights.format,
        weights.post_norm.to(device),
        weights.router.to(device),
        weights.router_bias.to(device),
        weights.w13.to(device),
        moved(weights.s13),
        weights.w2.to(device),
        moved(weights.s2),
        moved(weights.g13),
        moved(weights.g2),
    )


def random_packed_weights(shape: FfnShape, format: ExpertFormat, device: torch.device, seed: int) -> FfnWeights:
    """One rank's weights of one layer, made on ``device`` in the format itself: fast at the published sizes. Outputs stay near unit size."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden, intermediate, experts = shape.hidden, shape.intermediate, shape.experts + 1

    def normal(*size: int, scale: float, dtype: torch.dtype) -> Tensor:
        return (torch.randn(size, generator=generator, device=device) * scale).to(dtype)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator, device=device)

    def codes(rows: int, k: int) -> Tensor:
        return integers(0, 256, experts, rows, k // 2)

    # The root mean square of E2M1's codes is about 3; the scales' exponents spread over a factor of 16 around the wanted size.
    def scales(rows: int, k: int) -> Tensor:
        middle = 127 + round(math.log2(k**-0.5 / 3))
        return integers(middle - 2, middle + 3, round_up(experts * rows, 256) * round_up(k // 32, 8))

    common = (
        normal(hidden, scale=0.1, dtype=torch.bfloat16),
        normal(shape.experts, hidden, scale=hidden**-0.5, dtype=torch.float32),
        normal(shape.experts, scale=0.1, dtype=torch.float32),
    )
    if format is ExpertFormat.MXFP4:
        return FfnWeights(
            format,
            *common,
            codes(2 * intermediate, hidden),
            scales(2 * intermediate, hidden),
            codes(hidden, intermediate),
            scales(hidden, intermediate),
        )
    if format is ExpertFormat.MXFP8:
        # Magnitudes of code 0x00 to 0x7E are numbers, to 448; their root mean square is about 100.
        def fp8(rows: int, k: int) -> Tensor:
            signs = integers(0, 2, experts, rows, k) << 7
            return (integers(0, 0x7F, experts, rows, k) | signs).view(torch.float8_e4m3fn)

        def exponents(rows: int, k: int) -> Tensor:
            middle = 127 + round(math.log2(k**-0.5 / 100))
            return integers(middle - 2, middle + 3, experts, rows, k // mxfp8.GROUP)

        first, second = (2 * intermediate, hidden), (hidden, intermediate)
        return FfnWeights(format, *common, fp8(*first), exponents(*first), fp8(*second), exponents(*second))
    if format is ExpertFormat.NVFP4:
        # Scales of code 0x20 to 0x5F are 2^-3 to 30; with E2M1's codes the products' root mean square is about 28.
        def small(rows: int, k: int) -> Tensor:
            return integers(0x20, 0x60, experts, rows, k // nvfp4.GROUP).view(torch.float8_e4m3fn)

        def one_each(k: int) -> Tensor:
            return normal(experts, scale=0.1, dtype=torch.float32).add_(1).mul_(k**-0.5 / 28)

        first, second = (2 * intermediate, hidden), (hidden, intermediate)
        experts_of_rank = (codes(*first), small(*first), codes(*second), small(*second))
        return FfnWeights(format, *common, *experts_of_rank, one_each(hidden), one_each(intermediate))
    w13 = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16, device=device)
    for expert in range(experts):
        w13[expert] = normal(2 * intermediate, hidden, scale=hidden**-0.5, dtype=torch.bfloat16)
        w2[expert] = normal(hidden, intermediate, scale=intermediate**-0.5, dtype=torch.bfloat16)
    return FfnWeights(format, *common, w13, None, w2, None)


def hooked_library() -> ctypes.CDLL:
    """The kernels built with test hooks, in the same cache as the others."""
    return CpuBuild("g++", defines=TEST_HOOKS).library()


def on_threads(count: int, function: Callable[[int], T]) -> list[T]:
    """``function(rank)`` on one thread a rank; the results in rank order. The first exception of a rank is raised after all have ended.

    Raises:
        TimeoutError: if a thread has not ended in time; it is left behind.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(JOIN_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"rank {rank} has not ended after {JOIN_SECONDS:.0f} s")
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(count)]


class ThreadRanks:
    """All ranks of a shape in this process, each with a channel of its own.

    Args:
        shape: sizes.
        grid: blocks of a launch.
        wait_seconds: bound of every wait.
        block_threads: threads a block.
        library: compiled kernels to use instead of the default ones.
        poison: fill mailboxes and scratch with 0xFF instead of 0: no tag matches, and every number is NaN.
        flight: every rank's flight ring; nothing is recorded without.
        device: where everything lies; the ranks share a CUDA device, so that all their blocks together must be resident.
    """

    def __init__(
        self,
        shape: FfnShape,
        *,
        grid: int = 2,
        wait_seconds: float = 20.0,
        block_threads: int = BLOCK_THREADS,
        library: ctypes.CDLL | None = None,
        poison: bool = False,
        flight: Sequence[FlightRing] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.shape = shape
        self.device = device
        self.poison = poison
        layout = shape.peer_layout
        self.buffers = tuple(aligned_zeros(layout.total_bytes, device=device) for _ in range(shape.world_size))
        if poison:
            for buffer in self.buffers:
                buffer[16:] = 0xFF
        self.channels = tuple(
            FfnChannel(
                shape,
                InProcessPeers(self.buffers, rank),
                grid=grid,
                wait_seconds=wait_seconds,
                block_threads=block_threads,
                library=library,
                flight=None if flight is None else flight[rank],
                device=device,
            )
            for rank in range(shape.world_size)
        )

    def launches(self, weights: Sequence[FfnWeights], constants: FfnConstants | None = None, layer: int = 3) -> tuple[FfnLaunch, ...]:
        """One launch a rank."""
        return tuple(
            FfnLaunch(channel, rank, constants or FfnConstants(), layer) for channel, rank in zip(self.channels, weights, strict=True)
        )

    def run(
        self, launches: Sequence[FfnLaunch], inputs: LayerInputs, *, handshake: bool = True, ranks: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """One launch on each of ``ranks`` (all by default) at once; (output, residual) in the order of ``ranks``."""
        chosen = range(self.shape.world_size) if ranks is None else ranks
        rows = inputs.residual.shape[0]
        if self.poison:
            for rank in chosen:
                self.channels[rank].scratch(rows).fill_(0xFF)
        for rank in chosen:
            self.channels[rank].prepare(rows)

        def launch(i: int) -> tuple[Tensor, Tensor]:
            rank = chosen[i]
            with self._own_stream():
                return launches[rank](inputs.parts[rank], inputs.residual, inputs.slots, handshake=handshake)

        return on_threads(len(chosen), launch)

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU a stream for each rank, so that no rank's launch waits for another's; left when its launches have ended."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield
        stream.synchronize()

    def faults(self) -> list[Fault]:
        """Every rank's fault word."""
        return [channel.health() for channel in self.channels]

    def preset_epoch(self, epoch: int) -> None:
        """Let every rank's next launch be launch ``epoch``."""
        for channel in self.channels:
            channel.epoch_words.zero_()
            channel.epoch_words[0] = epoch

    def withhold(self, rank: int, site: Site | None) -> None:
        """Let ``rank`` announce nothing of what ``site`` waits for; None ends it. Needs the kernels of ``hooked_library``."""
        for channel in self.channels:
            words = channel.injection_words
            words[2] = 0 if site is None else rank + 1
            words[3] = 0 if site is None else site.value

    def close(self) -> None:
        """Close every channel."""
        for channel in self.channels:
            channel.close()

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
