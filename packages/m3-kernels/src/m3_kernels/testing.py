"""Ranks as threads of one process: peer memory, random layers, and launches on all ranks at once. For tests, drills and benchmarks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from m3_core.faults import Fault, Site
from m3_core.ports import FlightRing
from m3_kernels.build.cpu import CpuBuild
from m3_kernels.ffn import BLOCK_THREADS, ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights
from m3_kernels.formats.mxfp4 import quantize_shuffled

JOIN_SECONDS = 120.0
TEST_HOOKS = ("M3_TEST_HOOKS",)

T = TypeVar("T")


def aligned_zeros(nbytes: int, alignment: int = 256) -> Tensor:
    """uint8 zeros that start at a multiple of ``alignment``."""
    storage = torch.zeros(nbytes + alignment, dtype=torch.uint8)
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
    codes13, scales13 = quantize_shuffled(w13)
    codes2, scales2 = quantize_shuffled(w2)
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
    ) -> None:
        self.shape = shape
        self.poison = poison
        layout = shape.peer_layout
        self.buffers = tuple(aligned_zeros(layout.total_bytes) for _ in range(shape.world_size))
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
        return on_threads(
            len(chosen),
            lambda i: launches[chosen[i]](inputs.parts[chosen[i]], inputs.residual, inputs.slots, handshake=handshake),
        )

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
