"""From a model with loaded weights to its launches, and from a step's facts to what it runs.

Everything that decides is the same on every rank: the configuration, the agreed outcome of the construction, and a step's facts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import structlog
import torch
from attrs import define, evolve, field
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available

from m3_comm.agreement import LocalAgreement, TorchAgreement, joint_stage
from m3_comm.lifetime import die_with_starter
from m3_comm.reaper import reap
from m3_comm.transports.shm import ShmTransport
from m3_core.errors import CollectiveError, M3Error, RefusalError
from m3_core.plan import GraphMode, StepFacts, StepPlan, plan_step
from m3_core.ports import AgreementChannel
from m3_kernels.ffn import FfnConstants, FfnWeights
from m3_vllm.adapters.cpu.layers import LayerCallable, SparseLayer
from m3_vllm.adapters.cpu.paging import BlockSparseMetadata
from m3_vllm.adapters.cpu.refusals import LaunchRequest, agreed_refusals
from m3_vllm.executor import FfnExecutor
from m3_vllm.executor import SparseLayer as ExecutorLayer
from m3_vllm.settings import Experts, Mode, Settings
from m3_vllm.status import RankStatus, StatusBoard, board_instance

log = structlog.get_logger(__name__)

MAX_ROWS = 16
"""Rows of the widest launch; wider decode steps run the stock layers, as in the published launch."""
GRID = 2
"""Blocks of a launch where the settings leave it open: vLLM gives each worker one core, and two blocks suffice to overlap waits."""


def tensor_parallel_channel() -> AgreementChannel:
    """The host's agreement between the ranks of vLLM's tensor-parallel group."""
    group = get_tp_group()
    return LocalAgreement() if group.world_size == 1 else TorchAgreement(group.cpu_group)


class StepKind(Enum):
    """What a forward pass turned out to be."""

    DUMMY = "dummy"
    """Profiling or warm-up: no metadata, nothing is sampled from it."""
    STOCK = "stock"
    FUSED = "fused"


@define(eq=False)
class Steps:
    """Runs a model's steps: decides each, drives the executor around it, counts, and shows the counts.

    Attributes:
        layers: the model's sparse layers by number.
        executor: the launches; None where only stock layers run.
        max_rows: rows of the widest launch.
        board: where the counts are shown.
        rank: this rank.
        world_size: ranks of the group.
    """

    layers: Mapping[int, SparseLayer]
    executor: FfnExecutor | None
    max_rows: int
    board: StatusBoard
    rank: int
    world_size: int
    _kind: StepKind = field(default=StepKind.DUMMY, init=False)
    _fused_steps: int = field(default=0, init=False)
    _stock_steps: int = field(default=0, init=False)
    _outputs: int = field(default=0, init=False)

    @contextlib.contextmanager
    def step(self, rows: int, *, intermediate_tensors: bool = False) -> Iterator[Mapping[int, LayerCallable]]:
        """Around one forward pass of ``rows`` rows: yields the layers to run in place of the stock ones, by number.

        An exception inside the pass marks this rank failed on every rank before it goes on, so that no launch of a peer waits for it.

        Raises:
            FaultError: a launch of this step, or of an earlier one, failed on any rank.
        """
        metadata = self._metadata()
        if metadata is None:
            self._kind = StepKind.DUMMY
            yield {}
            return
        plan = self._plan(metadata, rows, intermediate_tensors)
        executor, slots = self.executor, self._first.self_attn.slots()
        if executor is None or slots is None or not plan.fused:
            self._kind = StepKind.STOCK
            with self._aborting():
                yield {}
            self._stock_steps += 1
            return
        self._kind = StepKind.FUSED
        executor.begin_step(slots)
        with self._aborting():
            yield {number: layer for number in self.layers if (layer := executor.layer(number)) is not None}
        try:
            executor.after_step()
        finally:
            self._fused_steps += 1
            self.publish()

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._kind = StepKind.DUMMY
            if self.executor is not None:
                self.executor.abort()
            raise

    def output(self) -> None:
        """Once for every step that tokens are sampled from, before its logits; further calls for the same step do nothing.

        vLLM computes logits once a step on every rank, then once more for each request that wants log-probabilities of its prompt,
        and also in its profiling run, which no forward pass with metadata precedes.

        Raises:
            FaultError: the fault word is set.
            CollectiveError: a reset failed.
        """
        if self._kind is StepKind.DUMMY:
            return
        self._kind = StepKind.DUMMY
        self._outputs += 1
        try:
            if self.executor is not None:
                self.executor.output_step()
        finally:
            self.publish()

    def publish(self) -> None:
        """Show the counts as they are now."""
        status = RankStatus(
            rank=self.rank,
            world_size=self.world_size,
            fused_steps=self._fused_steps,
            stock_steps=self._stock_steps,
            outputs=self._outputs,
        )
        self.board.publish(status if self.executor is None else self._with_executor(status, self.executor))

    @property
    def _first(self) -> SparseLayer:
        return next(iter(self.layers.values()))

    def _metadata(self) -> BlockSparseMetadata | None:
        return self._first.self_attn.metadata() if is_forward_context_available() else None

    def _plan(self, metadata: BlockSparseMetadata, rows: int, intermediate_tensors: bool) -> StepPlan:
        slots = self._first.self_attn.slots()
        facts = StepFacts(
            rows=rows,
            num_decodes=metadata.num_decodes,
            num_decode_tokens=metadata.num_decode_tokens,
            num_prefills=metadata.num_prefills,
            num_prefill_tokens=metadata.num_prefill_tokens,
            graph_mode=_graph_mode(get_forward_context().cudagraph_runtime_mode),
            slots=None if slots is None else slots.shape[0],
            block_table_rows=metadata.block_table.shape[0],
            slots_are_int64=slots is not None and slots.dtype == torch.int64,
            intermediate_tensors=intermediate_tensors,
            closed=self.executor is not None and self.executor.closed,
        )
        return plan_step(facts, max_rows=self.max_rows)

    @staticmethod
    def _with_executor(status: RankStatus, executor: FfnExecutor) -> RankStatus:
        counters = executor.counters
        status = evolve(status, launches=counters.launches, resets=counters.resets, epoch=counters.epoch)
        if executor.closed:
            return status
        fault = executor.health()
        if not fault.failed:
            return status
        return evolve(status, fault=1, fault_rank=fault.rank, fault_epoch=fault.epoch, fault_site=fault.site_number)


def _graph_mode(mode: CUDAGraphMode) -> GraphMode:
    return {CUDAGraphMode.FULL: GraphMode.FULL, CUDAGraphMode.PIECEWISE: GraphMode.PIECEWISE}.get(mode, GraphMode.NONE)


def build(layers: Mapping[int, SparseLayer], config: Any, constants: FfnConstants, vllm_config: VllmConfig, settings: Settings) -> Steps:
    """Make ready what a model's steps need, after its weights are loaded; a collective of the tensor-parallel group.

    Args:
        layers: the model's sparse layers by number, weights loaded.
        config: the checkpoint's text configuration.
        constants: constants of the arithmetic.
        vllm_config: vLLM's configuration.
        settings: m3's settings.

    Raises:
        RefusalError: mode "require" and the launches cannot be built, with all reasons of all ranks.
        CollectiveError: weights could not be prepared on some rank; or mode "require" and building the launches failed on some rank.
    """
    channel = tensor_parallel_channel()
    max_rows = min(vllm_config.scheduler_config.max_num_seqs, MAX_ROWS)
    instance = board_instance(vllm_config.instance_id, vllm_config.parallel_config.data_parallel_index)
    boards: list[StatusBoard] = []

    def prepare() -> None:
        # A worker waits for its peers inside launches, so it must not outlive the engine that would restart or end them together. vLLM's
        # own watch begins when a worker has loaded its model, and ends it only between two requests. The engine starts its workers from
        # its main thread, which is what the kernel takes for their parent. A single rank may be the user's own process.
        if channel.world_size > 1:
            die_with_starter()
        if channel.rank == 0:
            reap()
        for layer in layers.values():
            if settings.experts is Experts.MXFP4:
                layer.block_sparse_moe.experts.quantise()
            layer.block_sparse_moe.prepare()
        boards.append(StatusBoard(instance, channel.rank))

    with contextlib.ExitStack() as undo:
        undo.callback(_close_all, boards)
        joint_stage(channel, "adapter.prepare", prepare)
        executor = None if settings.mode is Mode.OFF else _executor(layers, config, constants, channel, max_rows, settings, instance)
        undo.pop_all()
    steps = Steps(layers, executor, max_rows, boards[0], channel.rank, channel.world_size)
    steps.publish()
    # vLLM tells a model nothing at shutdown. Runs at the interpreter's exit too; holds the parts, not the object it waits for.
    weakref.finalize(steps, _release, steps.executor, steps.board)
    # vLLM kills a worker that has not ended 5 s after its last request, and what it shares with its peers then stays in /dev/shm.
    # Most of that time is the interpreter's last search for garbage, through everything that torch and vLLM imported.
    atexit.register(gc.freeze)
    return steps


def _close_all(boards: list[StatusBoard]) -> None:
    for board in boards:
        board.close()


def _release(executor: FfnExecutor | None, board: StatusBoard) -> None:
    if executor is not None:
        executor.close()
    board.close()


def _executor(
    layers: Mapping[int, SparseLayer],
    config: Any,
    constants: FfnConstants,
    channel: AgreementChannel,
    max_rows: int,
    settings: Settings,
    instance: str,
) -> FfnExecutor | None:
    format = next(iter(layers.values())).block_sparse_moe.experts.format
    request = LaunchRequest.collect(config, len(layers), channel.world_size, max_rows, settings, format)
    reasons = agreed_refusals(channel, list(request.reasons))
    if reasons or request.shape is None or request.budget is None:
        _go_without_launches(settings, channel, RefusalError(reasons, "to build the launches"))
        return None
    try:
        return FfnExecutor(
            {number: ExecutorLayer(layer.attention_half, _weights(layer)) for number, layer in layers.items()},
            shape=request.shape,
            constants=constants,
            channel=channel,
            transport=ShmTransport(),
            widths=range(1, max_rows + 1),
            grid=settings.grid or GRID,
            reset_budget=request.budget,
            wait_seconds=settings.wait_seconds,
            flight=settings.flight_directory and settings.flight_directory / instance,
        )
    except CollectiveError as error:
        # The same on every rank: a construction that fails anywhere raises everywhere.
        _go_without_launches(settings, channel, error)
        return None


def _go_without_launches(settings: Settings, channel: AgreementChannel, error: M3Error) -> None:
    if settings.mode is Mode.REQUIRE:
        raise error
    if channel.rank == 0:
        log.warning("launches_off", reasons=getattr(error, "reasons", (str(error),)), instead="stock layers")


def _weights(layer: SparseLayer) -> FfnWeights:
    ffn = layer.block_sparse_moe
    packed = ffn.experts.packed
    return FfnWeights(
        format=ffn.experts.format,
        post_norm=layer.post_attention_layernorm.weight.data,
        router=ffn.gate.weight.data,
        router_bias=ffn.e_score_correction_bias.data,
        w13=ffn.experts.w13.data if packed is None else packed.w13,
        s13=None if packed is None else packed.s13,
        w2=ffn.experts.w2.data if packed is None else packed.w2,
        s2=None if packed is None else packed.s2,
    )
