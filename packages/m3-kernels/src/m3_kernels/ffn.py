"""The FFN half of a sparse MiniMax-M3 layer as one launch a rank: sizes, weights, the channel's device state, the launch.

From the unreduced attention output projection to the reduced mixture-of-experts output and the new residual, both tensor-parallel
reductions inside. docs/kernels.md describes the stages; ``m3_kernels.reference`` repeats their arithmetic.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from m3_core.errors import ConfigurationError, RefusalError, ResourceBusy, ResourceClosed, ResourceError
from m3_core.faults import MAX_WAIT_SECONDS, Fault
from m3_core.layout import ERROR_WORDS_BYTES, EpochWords
from m3_core.ports import FlightRing, PeerMemory
from m3_kernels.build.cuda import ROW_BOUNDS, CudaBuild
from m3_kernels.hosts.arguments import Arguments, Constants, Regions, Sizes
from m3_kernels.hosts.base import ANY_SCALE, Host
from m3_kernels.hosts.cpu import BLOCK_THREADS, CpuHost
from m3_kernels.hosts.cuda import CudaHost
from m3_kernels.shape import ExpertFormat, FfnShape
from m3_kernels.weights import CPU, FfnWeights

__all__ = ["CPU", "ExpertFormat", "FfnChannel", "FfnConstants", "FfnLaunch", "FfnShape", "FfnWeights"]

PEER_ALIGNMENT = 256
FLIGHT_ALIGNMENT = 8
_SKIP, _RUN = 0, 1


@attrs.frozen
class FfnConstants:
    """Constants of the arithmetic; the defaults are MiniMax-M3's (its config omits ``swiglu_beta``, which is 1).

    Raises:
        RefusalError: with every constant that is no finite number, or negative where the arithmetic needs 0 or more.
    """

    rms_norm_eps: float = 1e-6
    swiglu_alpha: float = 1.702
    swiglu_beta: float = 1.0
    swiglu_limit: float = 7.0
    routed_scaling_factor: float = 2.0

    def __attrs_post_init__(self) -> None:
        reasons = []
        for name, value in attrs.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                reasons.append(f"{name} is {value!r}: a finite number is needed")
            elif value < 0 and name in ("rms_norm_eps", "swiglu_limit"):
                reasons.append(f"{name} is {value!r}: 0 or more is needed")
        if reasons:
            raise RefusalError(reasons, "these constants")


class FfnChannel:
    """What the launches of one peer buffer share on this rank: resident blocks, epoch words, a scratch for each row count, the fault word.

    One launch at a time; every rank must run the same launches in the same order.

    Args:
        shape: sizes of all launches.
        peers: the ranks' peer buffers; outlives the channel and is not closed by it.
        grid: blocks of a launch; any number from 1 on computes the same bits. None: one a multiprocessor, on a GPU.
        wait_seconds: bound of every wait inside a launch.
        block_threads: threads a block on the CPU, a multiple of 64.
        offset: where this channel begins in every peer buffer, a multiple of 256 bytes.
        timeline: whether launches stamp a clock at every stage; see ``timeline_stamps``.
        flight: where launches write their flight records; outlives the channel and is not closed by it. Nothing is recorded without.
        library: compiled CPU kernels to use instead of the default ones.
        device: where the weights, the inputs and the peer buffer lie: the CPU, or a CUDA device.
        defines: preprocessor definitions of another build of the GPU kernels than the usual one.

    Raises:
        ConfigurationError: if the peer memory does not fit the shape, or a number is out of range.
        ResourceError: if the blocks cannot be started.
        BuildError: if the kernels do not compile or load.
    """

    def __init__(
        self,
        shape: FfnShape,
        peers: PeerMemory,
        *,
        grid: int | None,
        wait_seconds: float = 10.0,
        block_threads: int = BLOCK_THREADS,
        offset: int = 0,
        timeline: bool = False,
        flight: FlightRing | None = None,
        library: ctypes.CDLL | None = None,
        device: torch.device | str = CPU,
        defines: tuple[str, ...] = (),
    ) -> None:
        need = shape.peer_layout.total_bytes
        if peers.world_size != shape.world_size or len(peers.addresses) != shape.world_size or not 0 <= peers.rank < shape.world_size:
            raise ConfigurationError(
                f"the peer memory is rank {peers.rank} of {peers.world_size} with {len(peers.addresses)} addresses, the shape has world size {shape.world_size}"
            )
        if offset < 0 or offset % PEER_ALIGNMENT or any(address % PEER_ALIGNMENT for address in peers.addresses):
            raise ConfigurationError(f"offset {offset} or a peer address is no multiple of {PEER_ALIGNMENT}; align them")
        if peers.nbytes < offset + need:
            raise ConfigurationError(
                f"the peer buffer has {peers.nbytes} bytes; {offset + need} are needed, {need} of them from byte {offset} on; build a larger one"
            )
        if not 0 < wait_seconds <= MAX_WAIT_SECONDS:
            raise ConfigurationError(f"wait_seconds is {wait_seconds}; every wait needs a bound above 0, at most {MAX_WAIT_SECONDS:g}")
        if flight is not None and (flight.launches < 1 or flight.address % FLIGHT_ALIGNMENT):
            raise ConfigurationError(
                f"the flight ring at {flight.address:#x} keeps {flight.launches} launches; "
                f"it must keep at least 1 and start at a multiple of {FLIGHT_ALIGNMENT} bytes"
            )
        self.shape = shape
        self.rank = peers.rank
        self.peers = peers
        self.wait_seconds = wait_seconds
        self.timeline = timeline
        self._flight = flight
        self._host = _host(shape, torch.device(device), grid, block_threads, library, defines)
        self.grid = self._host.grid
        self._wait_ticks = max(1, int(wait_seconds * self._host.ticks_per_second))
        self._peer_addresses = tuple(address + offset for address in peers.addresses)
        self._own = self._peer_addresses[peers.rank]
        self._epoch_words = torch.zeros(EpochWords(self.grid).words, dtype=torch.int32, device=self.device)
        self._injection = torch.zeros(4, dtype=torch.int32, device=self.device)
        self._scratch: dict[int, Tensor] = {}
        self._prepared: set[int] = set()
        self._busy = threading.Lock()
        self._closed = False

    @property
    def device(self) -> torch.device:
        """Where the weights, inputs and outputs of this channel's launches lie."""
        return self._host.device

    @property
    def plain_scales(self) -> Mapping[str, int]:
        """By entry, the largest E8M0 code that it takes; weights with larger ones, or with NaN codes, have an entry of their own. An entry that
        is missing takes all."""
        return self._host.plain_scales

    @property
    def epoch_words(self) -> Tensor:
        """int32 device tensor: the epoch, the claim word, the blocks' marks. A view of the live words."""
        return self._epoch_words

    @property
    def injection_words(self) -> Tensor:
        """int32 device tensor: rank + 1 and delay in clock ticks of an injected fault, and two words that only test builds read."""
        return self._injection

    def epoch(self) -> int:
        """Launches since the last reset."""
        return int(self._epoch_words[0])

    def health(self) -> Fault:
        """The fault word of this rank as it stands, whether launches run or not; while a graph is captured, the mirrored one."""
        self._require_open()
        self._require_peers()
        return Fault.decode(self._host.read_fault(self._own))

    def mirror_fault(self) -> None:
        """Copy the fault word to host memory in the order of the launches; may be captured into a graph behind them."""
        self._require_open()
        self._host.mirror_fault(self._own)

    def mirrored_fault(self) -> Fault:
        """The last copy that has arrived: free to read, and complete once the host has waited for anything that follows the copy."""
        return Fault.decode(self._host.mirrored_fault())

    def abort(self) -> None:
        """Mark this rank failed on every rank that has no fault yet, so that peers' waits end; never raises."""
        if self._closed:
            return
        with contextlib.suppress(ResourceError):
            self._require_peers()
            self._host.abort(self._peer_addresses, self.rank)

    def synchronize(self) -> None:
        """Wait until every launch of this channel has ended: on the CPU they have when they return."""
        with self.exclusively():
            self._host.synchronize()

    def prepare(self, rows: int) -> None:
        """Allocate the scratch of a row count and load its kernels, so that no later launch of it does.

        Raises:
            ConfigurationError: if ``rows`` is out of range, or a graph is being captured.
            BuildError: if the kernels do not compile or load.
            ResourceError: if the blocks of a launch cannot all be resident.
        """
        if rows in self._prepared:
            return
        self.scratch(rows)
        self._host.prepare(rows)
        self._host.synchronize()
        self._prepared.add(rows)

    def scratch(self, rows: int) -> Tensor:
        """uint8 scratch of a row count, zeroed when it was made and by a reset."""
        if not 1 <= rows <= self.shape.max_rows:
            raise ConfigurationError(
                f"rows is {rows}; this channel takes 1 to {self.shape.max_rows}: route wider steps to the stock layers"
            )
        if rows not in self._scratch:
            if self._host.capturing:
                raise ConfigurationError(f"rows {rows} were not prepared before the capture; call prepare({rows}) outside it")
            layout = self.shape.scratch(rows, timeline_blocks=self.grid if self.timeline else 0)
            self._scratch[rows] = _aligned_zeros(layout.total_bytes, self.device)
        return self._scratch[rows]

    def zero_scratch_and_epoch(self) -> None:
        """Clear what a reset clears on this rank: the mailboxes past the error words, all scratch, the epoch words.

        Only between launches of all ranks: a reset agrees before and after.
        """
        with self.exclusively():
            self._require_peers()
            self._host.zero(self._own + ERROR_WORDS_BYTES, self.shape.peer_layout.total_bytes - ERROR_WORDS_BYTES)
            for scratch in self._scratch.values():
                scratch.zero_()
            self._epoch_words.zero_()
            self._host.synchronize()

    def inject_fault(self, rank: int | None, delay_seconds: float = 0.0) -> None:
        """Let ``rank``'s next launches stand still for a while and then fail at site INJECT; None ends it. For tests and drills.

        Raises:
            ConfigurationError: if the rank does not exist, or the delay is negative or more than 2^31 - 1 clock ticks.
        """
        ticks = delay_seconds * self._host.ticks_per_second
        if rank is not None and not 0 <= rank < self.shape.world_size:
            raise ConfigurationError(f"rank is {rank}; pass 0 to {self.shape.world_size - 1}, or None")
        if not 0 <= ticks < 2**31:
            raise ConfigurationError(f"delay_seconds is {delay_seconds}; pass 0 to {(2**31 - 1) / self._host.ticks_per_second:.2f}")
        self._injection[:2] = torch.tensor([0 if rank is None else rank + 1, int(ticks)], dtype=torch.int32)

    def timeline_stamps(self, rows: int) -> Tensor:
        """int64 [grid, 12] clock ticks at the beginning of the stages and at the end, of the last launch of ``rows`` rows.

        Raises:
            ConfigurationError: if the channel keeps no timeline.
        """
        if not self.timeline:
            raise ConfigurationError("this channel keeps no timeline; build it with timeline=True")
        layout = self.shape.scratch(rows, timeline_blocks=self.grid)
        region = next(region for region in layout.regions if region.name == "timeline")
        return self.scratch(rows)[region.offset : region.offset + region.nbytes].view(torch.int64).view(self.grid, -1).clone()

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the channel.

        Raises:
            ResourceBusy: if another thread is in a launch of it.
            ResourceClosed: after ``close()``.
        """
        if not self._busy.acquire(blocking=False):
            raise ResourceBusy(f"rank {self.rank}: another launch uses this channel; give each stream or thread a channel of its own")
        try:
            self._require_open()
            yield
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the resident blocks; idempotent. The peer memory stays with its owner.

        Raises:
            ResourceBusy: if a launch is running.
        """
        if self._closed:
            return
        with self.exclusively():
            self._closed = True
            self._host.close()
            self._scratch.clear()

    def run(self, entry: str, arguments: Arguments) -> None:
        """Run one launch; ``FfnLaunch`` fills the arguments. The caller holds the channel."""
        self._require_peers()
        self._host.launch(entry, arguments)

    def fill(self, arguments: Arguments, rows: int) -> None:
        """Write what the channel contributes to a launch's arguments."""
        shape = self.shape
        arguments.scratch = self.scratch(rows).data_ptr()
        arguments.epoch_words = self._epoch_words.data_ptr()
        arguments.peers[: shape.world_size] = self._peer_addresses
        arguments.injection = self._injection.data_ptr()
        arguments.wait_ticks = self._wait_ticks
        arguments.sizes = Sizes(rows, shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.world_size, shape.max_rows)
        arguments.regions = Regions.of(shape.scratch(rows))
        arguments.rank = self.rank
        arguments.timeline = int(self.timeline)
        if self._flight is not None:
            arguments.flight = self._flight.address
            arguments.flight_launches = self._flight.launches

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed(f"rank {self.rank}: this channel is closed; build a new one")

    def _require_peers(self) -> None:
        # Peer memory that its owner has closed says so when it is asked; a launch that did not ask would end the process.
        len(self.peers.addresses)


def _host(
    shape: FfnShape, device: torch.device, grid: int | None, block_threads: int, library: ctypes.CDLL | None, defines: tuple[str, ...]
) -> Host:
    if device.type == "cpu":
        if grid is None:
            raise ConfigurationError("grid is None; on the CPU say how many blocks a launch has, each an OS thread")
        return CpuHost(grid, block_threads, library)
    if device.type == "cuda":
        build = CudaBuild(ROW_BOUNDS[0], shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.world_size, defines)
        return CudaHost(build, device, grid)
    raise ConfigurationError(f"device is {device}; launches run on the CPU and on CUDA devices")


def _aligned_zeros(nbytes: int, device: torch.device, alignment: int = 256) -> Tensor:
    storage = torch.zeros(nbytes + alignment, dtype=torch.uint8, device=device)
    start = -storage.data_ptr() % alignment
    return storage[start : start + nbytes]


class FfnLaunch:
    """The FFN half of one sparse layer.

    Args:
        channel: the device state; every layer of a model may share one.
        weights: the layer's weights, kept alive and never written.
        constants: constants of the arithmetic.
        layer: the layer's index, named in fault words: 0 to 32766.

    Raises:
        RefusalError: with every reason why the weights do not fit the channel's shape.
        ConfigurationError: if the layer's index does not fit a fault word.
    """

    def __init__(self, channel: FfnChannel, weights: FfnWeights, constants: FfnConstants, layer: int) -> None:
        reasons = weights.reasons(channel.shape, channel.device)
        if reasons:
            raise RefusalError(reasons, f"the weights of layer {layer}")
        if not 0 <= layer < 2**15 - 1:
            raise ConfigurationError(f"layer is {layer}; a fault word holds 0 to {2**15 - 2}")
        self.channel = channel
        self.weights = weights
        self.constants = constants
        self.layer = layer
        self._entry = f"m3_ffn_{weights.format.value}"
        limit = channel.plain_scales.get(self._entry)
        if limit is not None and weights.exceeds(channel.shape, limit):
            self._entry += ANY_SCALE
        self._arguments: dict[int, Arguments] = {}

    def __call__(self, part: Tensor, residual: Tensor, slots: Tensor, *, handshake: bool) -> tuple[Tensor, Tensor]:
        """Run the half; every rank calls it at the same point. On the CPU it returns when this rank's part is done; on a GPU the launch
        joins the current stream, and may be captured into a graph if ``channel.prepare`` was called for its rows.

        A fault does not raise: the outputs are then garbage, and ``channel.health()`` says what happened.

        Args:
            part: bf16 [rows, hidden], contiguous: this rank's unreduced attention output projection.
            residual: bf16 [rows, hidden], contiguous, equal on every rank.
            slots: int64, at least ``rows`` values, contiguous, equal on every rank; a negative one marks a padded row.
            handshake: whether to end in the step's fault exchange; true on the step's last sparse layer.

        Returns:
            The reduced output, 0 in padded rows, and the new residual, unspecified in padded rows: fresh bf16 [rows, hidden] tensors.

        Raises:
            ConfigurationError: if an argument does not fit; nothing has been touched then.
            ResourceBusy: if another thread is in a launch of this channel.
            ResourceClosed: if the channel is closed.
        """
        rows = self._check(part, residual, slots)
        out, residual_out = torch.empty_like(part), torch.empty_like(residual)
        with self.channel.exclusively():
            arguments = self._arguments_of(rows)
            arguments.part = part.data_ptr()
            arguments.residual = residual.data_ptr()
            arguments.slots = slots.data_ptr()
            arguments.out = out.data_ptr()
            arguments.residual_out = residual_out.data_ptr()
            arguments.handshake = int(handshake)
            arguments.mode = _RUN
            self.channel.run(self._entry, arguments)
        return out, residual_out

    def warm(self, rows: int) -> None:
        """Do once what a first launch of ``rows`` rows would do: allocate its scratch and start the kernel, which returns at once.

        No rank waits for another. Raises as a launch does.
        """
        with self.channel.exclusively():
            arguments = self._arguments_of(rows)
            arguments.mode = _SKIP
            self.channel.run(self._entry, arguments)

    def _arguments_of(self, rows: int) -> Arguments:
        if rows not in self._arguments:
            weights, constants = self.weights, self.constants
            arguments = Arguments()
            self.channel.prepare(rows)
            self.channel.fill(arguments, rows)
            arguments.post_norm = weights.post_norm.data_ptr()
            arguments.router = weights.router.data_ptr()
            arguments.router_bias = weights.router_bias.data_ptr()
            arguments.w13 = weights.w13.data_ptr()
            arguments.w2 = weights.w2.data_ptr()
            arguments.s13 = weights.s13.data_ptr() if weights.s13 is not None else None
            arguments.s2 = weights.s2.data_ptr() if weights.s2 is not None else None
            arguments.g13 = weights.g13.data_ptr() if weights.g13 is not None else None
            arguments.g2 = weights.g2.data_ptr() if weights.g2 is not None else None
            arguments.constants = Constants(*attrs.astuple(constants))
            arguments.layer = self.layer
            self._arguments[rows] = arguments
        return self._arguments[rows]

    def _check(self, part: Tensor, residual: Tensor, slots: Tensor) -> int:
        hidden, device = self.channel.shape.hidden, self.channel.device
        if part.dim() != 2 or part.shape[1] != hidden:
            raise ConfigurationError(f"part has shape {list(part.shape)}; [rows, {hidden}] is needed")
        rows = part.shape[0]
        if not 1 <= rows <= self.channel.shape.max_rows:
            raise ConfigurationError(
                f"part has {rows} rows; this channel takes 1 to {self.channel.shape.max_rows}: route wider steps to the stock layers"
            )
        for name, tensor in (("part", part), ("residual", residual)):
            if (
                tuple(tensor.shape) != (rows, hidden)
                or tensor.dtype != torch.bfloat16
                or not tensor.is_contiguous()
                or tensor.device != device
            ):
                raise ConfigurationError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
                    f"a contiguous bfloat16 tensor [{rows}, {hidden}] on {'the CPU' if device == CPU else device} is needed"
                )
            if tensor.is_neg():
                raise ConfigurationError(f"{name} is a negated view, whose memory holds the values' opposites: pass {name}.resolve_neg()")
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape[0] < rows or not slots.is_contiguous() or slots.device != device:
            raise ConfigurationError(
                f"slots is {slots.dtype} {list(slots.shape)} on {slots.device}; a contiguous int64 tensor of at least {rows} values "
                f"on {'the CPU' if device == CPU else device} is needed"
            )
        return rows
