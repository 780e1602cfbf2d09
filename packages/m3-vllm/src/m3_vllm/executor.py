"""The executor: builds the launches of all sparse layers on one rank and drives them step by step. It imports no vLLM.

Every collective phase runs as *local work, then agreement*: whatever the local work raises becomes this rank's reason, the agreement is
entered all the same, and all ranks go on or all raise. An exception on one rank therefore never leaves a peer in a collective.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn, TypeAlias

import attrs
import structlog
import torch

from m3_comm.flight import FlightRecorder
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.base import DeviceTransport, HostMappingTransport
from m3_core.epochs import EpochBudget
from m3_core.errors import CollectiveError, ConfigurationError, FaultError, M3Error, ProtocolError, ResourceClosed
from m3_core.faults import Fault, Site
from m3_core.flight import FlightEvent, FlightReset
from m3_core.layout import ERROR_WORDS_BYTES
from m3_core.lifecycle import LIFE, Life, LifeAction, LifeEvent
from m3_core.ports import AgreementChannel
from m3_core.reset import RESET, Reset, ResetAction, ResetEvent
from m3_core.tables import Machine
from m3_kernels.ffn import FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights

log = structlog.get_logger(__name__)

AttentionHalf: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
LayerCallable: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

COVERAGE_INTERVAL = 1024


@attrs.frozen
class SparseLayer:
    """What the executor needs of one sparse layer.

    Attributes:
        attention: ``(positions [S] int64, hidden_states [S, H] bf16, residual [S, H] bf16) -> (part [S, H] bf16, residual [S, H] bf16)``:
            input norm, attention and the output projection *without* its reduction, run by the serving framework.
        weights: the FFN half's weights on this rank.
    """

    attention: AttentionHalf
    weights: FfnWeights


@attrs.frozen
class ExecutorCounters:
    """What happened so far on this rank, counted on the host (a graph replay is one output, whatever it launched)."""

    launches_per_layer: Mapping[int, int]
    steps: int
    outputs: int
    resets: int
    epoch: int

    @property
    def launches(self) -> int:
        """Launches of all layers that the host made."""
        return sum(self.launches_per_layer.values())


class FfnExecutor:
    """The fused FFN halves of one rank. Built collectively: every rank constructs it at the same point.

    Args:
        layers: sparse layers by layer id; the highest id is the last of a step, whose launch ends in the fault handshake.
        shape: sizes on this rank; ``shape.max_rows`` bounds ``widths``.
        constants: numbers of the model's arithmetic.
        channel: agreement between the ranks, on the host.
        transport: how peer memory is allocated and mapped.
        widths: row counts that will be launched; each is warmed.
        reset_budget: at which sampled step a reset falls; the default follows from the layers.
        grid: resident blocks of a launch.
        wait_seconds: bound of every wait inside a launch.
        flight: folder for the flight records, which are written there on a fault; None records nothing.

    Raises:
        CollectiveError: on every rank, if any phase failed on any; it says whether this or which other rank failed and why.
    """

    uses_caches = False

    def __init__(
        self,
        layers: Mapping[int, SparseLayer],
        *,
        shape: FfnShape,
        constants: FfnConstants,
        channel: AgreementChannel,
        transport: DeviceTransport,
        widths: Sequence[int],
        grid: int,
        reset_budget: EpochBudget | None = None,
        wait_seconds: float = 10.0,
        flight: Path | None = None,
    ) -> None:
        self._agreement = channel
        self._flight_folder = flight
        self._flight: FlightRecorder | None = None
        self._flight_files: list[str] = []
        self._layers = dict(sorted(layers.items()))
        self._life = Machine(LIFE)
        self._launches_per_layer: Counter[int] = Counter()
        self._launches: dict[int, FfnLaunch] = {}
        self._steps = 0
        self._outputs = 0
        self._resets = 0
        self._steps_since_reset = 0
        self._launches_in_step = 0
        self._uncounted_since_reset = 0
        self._slots: torch.Tensor | None = None
        self._open = contextlib.ExitStack()
        self.widths = tuple(sorted(set(widths)))
        self._log = log.bind(rank=channel.rank, world_size=channel.world_size)
        try:
            self._construct(shape, constants, transport, grid, reset_budget, wait_seconds)
        except BaseException:
            self._life.handle(LifeEvent.BUILD_REFUSED)
            self._open.close()
            raise
        self._life.handle(LifeEvent.BUILD_AGREED)
        self._log.info(
            "executor_ready",
            layers=len(self._layers),
            widths=self.widths,
            grid=grid,
            reset_step=self._budget.reset_step,
        )

    # --- construction ----------------------------------------------------------------------------------------------------------------

    def _construct(
        self,
        shape: FfnShape,
        constants: FfnConstants,
        transport: DeviceTransport,
        grid: int,
        reset_budget: EpochBudget | None,
        wait_seconds: float,
    ) -> None:
        with self._phase("executor.check"):
            self._check(shape, reset_budget)
            self._budget = reset_budget or EpochBudget(len(self._layers))
            fingerprint = self._fingerprint(shape)
        self._peers = PeerBuffer.create(
            self._agreement,
            transport,
            shape.peer_layout.total_bytes,
            fingerprint=fingerprint,
        )
        self._open.callback(self._peers.close)
        if self._flight_folder is not None:
            device = transport if isinstance(transport, HostMappingTransport) else None
            self._flight = FlightRecorder.create(self._agreement, device=device)
            self._open.callback(self._flight.close)
        with self._phase("executor.build"):
            self._channel = FfnChannel(shape, self._peers, grid=grid, wait_seconds=wait_seconds, flight=self._flight)
            self._open.callback(self._channel.close)
            self._launches = {number: FfnLaunch(self._channel, layer.weights, constants, number) for number, layer in self._layers.items()}
        with self._phase("executor.warm"):
            for width in self.widths:
                self._channel.prepare(width)
                for launch in self._launches.values():
                    launch.warm(width)
            self._channel.synchronize()

    def _fingerprint(self, shape: FfnShape) -> dict[str, str | int]:
        """What must be equal on all ranks; the peer buffer's construction compares it first and names what differs."""
        formats = sorted({layer.weights.format.value for layer in self._layers.values()})
        return {
            "version": _package_version(),
            **attrs.asdict(shape),
            "flight records": "no" if self._flight_folder is None else "yes",
            "layers": ",".join(map(str, self._layers)),
            "formats": ",".join(formats),
            "reset_step": self._budget.reset_step,
        }

    def _check(self, shape: FfnShape, reset_budget: EpochBudget | None) -> None:
        if not self._layers:
            raise ConfigurationError("no sparse layer was passed; the executor needs at least one")
        if shape.world_size != self._agreement.world_size:
            raise ConfigurationError(
                f"the shape is for {shape.world_size} ranks but the agreement channel has {self._agreement.world_size}; pass one group's sizes"
            )
        outside = [width for width in self.widths if not 1 <= width <= shape.max_rows]
        if outside or not self.widths:
            raise ConfigurationError(
                f"row widths {outside or self.widths} are outside 1..{shape.max_rows}; pass widths that the peer buffer holds"
            )
        if reset_budget is not None and reset_budget.layers < len(self._layers):
            raise ConfigurationError(
                f"the reset budget counts {reset_budget.layers} launches a step, but a step has {len(self._layers)}; pass a budget for all layers"
            )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Run the body, then agree; whatever the body raised is this rank's reason and is chained to the collective error."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            self._agreement.agree(name, reason)
        except CollectiveError as error:
            raise error from failure
        if failure is not None:
            raise failure

    # --- steps -----------------------------------------------------------------------------------------------------------------------

    def bind(self) -> NoReturn:
        """Refuse: the FFN launch reads no KV cache.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("FfnExecutor", self._life.state.name, "BIND")

    def begin_step(self, slots: torch.Tensor) -> None:
        """Remember the step's slot mapping.

        Args:
            slots: int64, one per row, negative = padding. Kept as it is, not copied: under a full graph it is a view of a persistent
                buffer, which every launch reads on the device.

        Raises:
            FaultError: if the fault word is set.
            ConfigurationError: if ``slots`` is not a contiguous one-dimensional int64 tensor.
        """
        if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
            raise ConfigurationError(f"slots is {slots.dtype} {tuple(slots.shape)}; a contiguous one-dimensional int64 tensor is needed")
        self._raise_fault()
        self._life.handle(LifeEvent.BEGIN_STEP)
        self._record(FlightEvent.STEP_BEGIN, self._steps)
        self._slots = slots
        self._launches_in_step = 0

    def layer(self, layer_id: int) -> LayerCallable | None:
        """The fused form of a sparse layer: ``(positions, hidden_states, residual) -> (hidden_states, residual)``, or None if it has none."""
        if layer_id not in self._launches:
            return None
        attention = self._layers[layer_id].attention

        def fused(positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            part, stream = attention(positions, hidden_states, residual)
            return self.launch(layer_id, part, stream)

        return fused

    def launch(self, layer_id: int, part: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the FFN half of one layer in one launch.

        Args:
            layer_id: a sparse layer's id.
            part: bf16 [S, H], this rank's unreduced output projection.
            residual: bf16 [S, H], the residual stream before the attention output is added.

        Returns:
            ``(out, residual)``, both bf16 [S, H] and fresh: the reduced FFN output, and the new residual stream.

        Raises:
            ProtocolError: outside a step.
            ConfigurationError: if a tensor does not fit; all ranks are marked failed, since the peers launch.
        """
        if self._slots is None:
            raise ProtocolError("FfnExecutor", self._life.state.name, "LAUNCH", ("begin_step first",))
        last = layer_id == next(reversed(self._launches))
        try:
            result = self._launches[layer_id](part, residual, self._slots, handshake=last)
        except BaseException:
            self.abort()
            raise
        self._launches_per_layer[layer_id] += 1
        self._launches_in_step += 1
        return result

    def after_step(self) -> None:
        """Count the step and look at the fault word, before any logits are made from it.

        Raises:
            FaultError: if a launch of this step failed anywhere. No token of the step may leave the worker.
        """
        self._slots = None
        self._steps += 1
        self._raise_fault()
        self._life.handle(LifeEvent.END_STEP)
        self._record(FlightEvent.STEP_END, self._steps - 1)

    def output_step(self, *, sampled: bool = True) -> None:
        """Once per sampled step on every rank, eager or replayed, fused or stock: reset the epoch when tags could run out.

        Args:
            sampled: False for a dummy run, whose launches are uncounted: they use the budget's room.

        Raises:
            FaultError: if the fault word is set.
            CollectiveError: if a reset failed on any rank.
        """
        self._raise_fault()
        if not sampled:
            self._uncounted_since_reset += self._launches_in_step
            self._launches_in_step = 0
            return
        self._launches_in_step = 0
        self._outputs += 1
        self._steps_since_reset += 1
        if self._budget.reset_due(self._steps_since_reset, self._uncounted_since_reset):
            self.reset_epoch()
        if self._outputs % COVERAGE_INTERVAL == 0:
            self._log.info(
                "launch_coverage",
                outputs=self._outputs,
                steps=self._steps,
                launches=sum(self._launches_per_layer.values()),
                resets=self._resets,
            )

    def reset_epoch(self) -> None:
        """Set the epoch and every tagged word to zero, between steps, all ranks together: drain, agree, clear, agree.

        The sticky error words survive. A phase that failed on one rank fails on all, and the failing rank marks every rank's error word.

        Driven by ``m3_core.reset.RESET``, the table that the model checker explores.

        Raises:
            CollectiveError: if a phase failed anywhere; says where and why.
            ProtocolError: inside a step, or after a fault.
        """
        self._life.handle(LifeEvent.RESET_DUE)
        self._record(FlightEvent.RESET, FlightReset.BEGIN)
        reset = Machine(RESET)
        actions = deque(reset.handle(ResetEvent.START))
        reason: str | None = None
        failure: CollectiveError | None = None
        while actions:
            match actions.popleft():
                case ResetAction.SYNCHRONIZE:
                    reason = self._attempt(self._drain)
                    self._record(FlightEvent.RESET, FlightReset.DRAINED if reason is None else FlightReset.BROKE)
                    actions.extend(reset.handle(ResetEvent.DONE if reason is None else ResetEvent.BROKE))
                case ResetAction.CLEAR:
                    reason = self._attempt(self._clear)
                    self._record(FlightEvent.RESET, FlightReset.CLEARED if reason is None else FlightReset.BROKE)
                    actions.extend(reset.handle(ResetEvent.DONE if reason is None else ResetEvent.BROKE))
                case ResetAction.AGREE_READY | ResetAction.AGREE_FAILED:
                    drained = reset.state is Reset.AGREEING_DRAIN
                    try:
                        self._agreement.agree("reset.drain" if drained else "reset.clear", reason)
                    except CollectiveError as error:
                        failure = error
                        self._record(FlightEvent.RESET, FlightReset.REFUSED)
                        actions.extend(reset.handle(ResetEvent.REFUSED))
                    else:
                        self._record(FlightEvent.RESET, FlightReset.AGREED if drained else FlightReset.RESUMED)
                        actions.extend(reset.handle(ResetEvent.AGREED))
                        self._life.handle(LifeEvent.DRAIN_AGREED if drained else LifeEvent.CLEAR_AGREED)
                case ResetAction.MARK_ALL_RANKS:
                    self._mark_all_ranks()
                case ResetAction.RAISE:
                    self._life.handle(LifeEvent.RESET_FAILED)
                    assert failure is not None
                    files = self._dump_flight([verdict.rank for verdict in failure.verdicts if not verdict.ready])
                    self._log.error("reset_failed", reason=str(failure), flight=files)
                    raise failure
                case ResetAction.RESUME:
                    pass
        self._resets += 1
        self._steps_since_reset = 0
        self._uncounted_since_reset = 0
        self._log.info("epoch_reset", resets=self._resets, outputs=self._outputs)

    def _drain(self) -> None:
        self._channel.synchronize()
        fault = self._channel.health()
        if fault.failed:
            raise FaultError(fault)

    def _clear(self) -> None:
        self._channel.zero_scratch_and_epoch()
        self._channel.synchronize()

    @staticmethod
    def _attempt(work: Callable[[], None]) -> str | None:
        """Run one rank's own part of a collective phase; its exception becomes the reason that its peers read."""
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    # --- faults and the end ----------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Mark this rank failed on every rank, so that the peers' waits end; never raises. Does nothing after ``close``."""
        if self._life.finished or self._life.state is Life.CONSTRUCTING:
            return
        first = self._life.state is not Life.FAULTED
        self._life.handle(LifeEvent.ABORT)
        self._slots = None
        self._record(FlightEvent.ABORT)
        self._mark_all_ranks()
        if first:
            self._log.error("aborted", flight=self._dump_flight())

    def _mark_all_ranks(self) -> None:
        try:
            self._channel.abort()
        except Exception as error:
            self._log.error("abort_failed", error=str(error))

    def health(self) -> Fault:
        """The fault word as it stands on this rank.

        Raises:
            ResourceClosed: after ``close``.
        """
        if self.closed:
            raise ResourceClosed("the executor is closed; its fault word is gone with its peer buffer")
        return self._channel.health()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._life.state is Life.CLOSED

    @property
    def fault_word(self) -> torch.Tensor:
        """int32 [4], the device view that each launch checks and sets: set, rank, epoch, site."""
        return self._peers.bytes[:ERROR_WORDS_BYTES].view(torch.int32)

    @property
    def counters(self) -> ExecutorCounters:
        """A snapshot of the counts."""
        return ExecutorCounters(
            launches_per_layer=dict(self._launches_per_layer),
            steps=self._steps,
            outputs=self._outputs,
            resets=self._resets,
            epoch=0 if self.closed else self._channel.epoch(),
        )

    def close(self) -> None:
        """Release mappings, then memory; idempotent. Inside a step it first marks this rank failed on every rank."""
        if self.closed:
            return
        actions = self._life.handle(LifeEvent.CLOSE)
        self._record(FlightEvent.CLOSE)
        if LifeAction.MARK_ALL_RANKS in actions:
            self._mark_all_ranks()
        self._launches.clear()
        self._slots = None
        self._open.close()

    def _raise_fault(self) -> None:
        fault = self.health()
        if not fault.failed:
            return
        first = self._life.state is not Life.FAULTED
        self._life.handle(LifeEvent.FAULT_SEEN)
        self._slots = None
        if first:
            self._record(FlightEvent.FAULT_SEEN, site=fault.site or Site.HOST, epoch=fault.epoch, layer=fault.layer, peer=fault.rank)
            self._flight_files = self._dump_flight([fault.rank] if fault.peer is None else [fault.rank, fault.peer])
            site = fault.site.name if fault.site else fault.site_number
            self._log.error(
                "fault",
                failed_rank=fault.rank,
                epoch=fault.epoch,
                site=site,
                layer=fault.layer,
                peer=fault.peer,
                flight=self._flight_files,
            )
        error = FaultError(fault)
        if self._flight_files:
            error.add_note(f"flight records for `m3 flight`: {' '.join(self._flight_files)}")
        raise error

    # --- flight records --------------------------------------------------------------------------------------------------------------

    def dump_flight(self, folder: Path) -> tuple[Path, ...]:
        """Write this rank's flight record to ``folder`` now, and those of ranks whose processes are gone.

        From any thread. Launches overwrite what earlier ones recorded: those that are more than the ring keeps back, and those of the
        same epoch before a reset. Who wants a whole run writes before both.

        Returns:
            The files, the own one first; none if nothing is recorded.

        Raises:
            ResourceError: a file could not be written.
            ResourceClosed: after ``close``.
        """
        return () if self._flight is None else self._flight.dump(folder)

    def _record(
        self,
        event: FlightEvent,
        detail: int = 0,
        *,
        epoch: int = -1,
        site: Site = Site.HOST,
        layer: int | None = None,
        peer: int | None = None,
    ) -> None:
        if self._flight is not None:
            self._flight.record(event, epoch=epoch, site=site, layer=layer, peer=peer, detail=detail)

    def _dump_flight(self, suspects: Sequence[int] = ()) -> list[str]:
        """Write the records where a fault leaves them; the names go into the log beside the fault. Never raises."""
        if self._flight is None or self._flight_folder is None:
            return []
        try:
            return [str(path) for path in self._flight.dump(self._flight_folder, suspects)]
        except M3Error as error:
            self._log.error("flight_dump_failed", reason=str(error))
            return []


def _package_version() -> str:
    try:
        return version("m3-kernels")
    except PackageNotFoundError as error:
        raise M3Error("m3-kernels is not installed as a package; its version cannot be compared between ranks") from error
