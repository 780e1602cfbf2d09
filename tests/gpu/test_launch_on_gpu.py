"""The FFN launch on one NVIDIA GPU: every format at small and published sizes, graphs, bits, faults, refusals.

The published sizes run one rank of several alone: its own buffer stands for its peers' (``OwnBufferPeers``). Several ranks run as threads
whose launches are resident together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import Tensor

from m3_core.epochs import EPOCH_LIMIT
from m3_core.errors import ConfigurationError, RefusalError, ResourceError
from m3_core.faults import Fault, Site
from m3_kernels import ops
from m3_kernels.build.cuda import OWN_BUFFER
from m3_kernels.checking import CONSTANTS, check_launch, read_scratch
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights
from m3_kernels.hosts.base import ANY_SCALE
from m3_kernels.hosts.cuda import CudaHost
from m3_kernels.reference.arithmetic import ROUNDED_SUMS_EXACT
from m3_kernels.reference.half import half
from m3_kernels.testing import (
    LayerInputs,
    OwnBufferPeers,
    ThreadRanks,
    aligned_zeros,
    random_inputs,
    random_packed_weights,
    random_weights,
    weights_to,
)

pytestmark = pytest.mark.gpu

BF16, MXFP4, MXFP8, NVFP4 = ExpertFormat
SMALL = FfnShape(hidden=512, intermediate=128, experts=16, top_k=4, world_size=2, max_rows=16)
ODD = FfnShape(hidden=320, intermediate=64, experts=18, top_k=3, world_size=1, max_rows=8)
ODDER = FfnShape(hidden=206, intermediate=72, experts=8, top_k=4, world_size=1, max_rows=8)
BLOCKS = 16
WAIT = 2.0


def published(world_size: int, max_rows: int = 64) -> FfnShape:
    return FfnShape(6144, 3072 // world_size, 128, 4, world_size, max_rows)


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail("no GPU: run this folder on a machine with an NVIDIA GPU of compute capability 9.0")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """``torch.empty`` gives NaN and -1 instead of whatever was there, so that an output nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260801)


def bits(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0].view(torch.int16).cpu(), tensors[1].view(torch.int16).cpu()


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(found), bits(wanted), strict=True))


# --- several ranks, small sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", list(ExpertFormat))
@pytest.mark.parametrize(
    ("shape", "rows", "padded"),
    [(SMALL, 5, [2]), (SMALL, 16, []), (SMALL, 1, []), (attrs.evolve(SMALL, world_size=4), 6, [0, 5]), (ODD, 7, [3])],
)
def test_small_sizes(
    format: ExpertFormat, shape: FfnShape, rows: int, padded: list[int], device: torch.device, generator: torch.Generator
) -> None:
    weights = tuple(weights_to(rank, device) for rank in random_weights(shape, format, generator))
    inputs = random_inputs(shape, rows, generator, padded).to(device)
    with ThreadRanks(shape, grid=BLOCKS, wait_seconds=WAIT, poison=True, device=device) as ranks:
        results = ranks.run(ranks.launches(weights), inputs)
        assert [fault.describe() for fault in ranks.faults()] == ["no fault"] * shape.world_size
        assert [channel.epoch() for channel in ranks.channels] == [1] * shape.world_size
        for channel, result in zip(ranks.channels, results, strict=True):
            check_launch(shape, inputs, weights, result, read_scratch(channel, format, rows, 0))
    valid = inputs.slots[:rows] >= 0
    for out, residual in results[1:]:
        assert same((out, residual[valid]), (results[0][0], results[0][1][valid])), "every rank has the same bits"


def test_sizes_that_fill_no_tile(device: torch.device, generator: torch.Generator) -> None:
    weights = tuple(weights_to(rank, device) for rank in random_weights(ODDER, BF16, generator))
    inputs = random_inputs(ODDER, 5, generator, [1]).to(device)
    with ThreadRanks(ODDER, grid=3, wait_seconds=WAIT, poison=True, device=device) as ranks:
        [result] = ranks.run(ranks.launches(weights), inputs)
        check_launch(ODDER, inputs, weights, result, read_scratch(ranks.channels[0], BF16, 5, 0))


def test_many_launches_of_several_ranks(device: torch.device, generator: torch.Generator) -> None:
    """Both halves of the peer buffers, again and again, with a reset between; the same inputs give the same bits."""
    weights = tuple(weights_to(rank, device) for rank in random_weights(SMALL, MXFP4, generator))
    inputs = random_inputs(SMALL, 8, generator).to(device)
    with ThreadRanks(SMALL, grid=BLOCKS, wait_seconds=WAIT, device=device) as ranks:
        launches = ranks.launches(weights)
        wanted = ranks.run(launches, inputs)
        for turn in range(30):
            if turn == 15:
                for channel in ranks.channels:
                    channel.zero_scratch_and_epoch()
                assert [channel.epoch() for channel in ranks.channels] == [0, 0]
            for found, first in zip(ranks.run(launches, inputs), wanted, strict=True):
                assert same(found, first)
        assert [channel.epoch() for channel in ranks.channels] == [15, 15]
        assert [fault.describe() for fault in ranks.faults()] == ["no fault"] * 2


def test_tags_wrap_and_the_limit_refuses(device: torch.device, generator: torch.Generator) -> None:
    weights = tuple(weights_to(rank, device) for rank in random_weights(SMALL, BF16, generator))
    inputs = random_inputs(SMALL, 2, generator).to(device)
    with ThreadRanks(SMALL, grid=BLOCKS, wait_seconds=WAIT, device=device) as ranks:
        launches = ranks.launches(weights)
        wanted = ranks.run(launches, inputs)
        ranks.preset_epoch(EPOCH_LIMIT - 1)
        for found, first in zip(ranks.run(launches, inputs), wanted, strict=True):
            assert same(found, first)
        ranks.run(launches, inputs)
        assert [fault.site for fault in ranks.faults()] == [Site.WRAP] * 2


def test_a_rank_that_does_not_come_is_named(device: torch.device, generator: torch.Generator) -> None:
    weights = tuple(weights_to(rank, device) for rank in random_weights(SMALL, BF16, generator))
    inputs = random_inputs(SMALL, 2, generator).to(device)
    with ThreadRanks(SMALL, grid=BLOCKS, wait_seconds=0.2, device=device) as ranks:
        launches = ranks.launches(weights)
        ranks.run(launches, inputs, ranks=[0])
        assert ranks.faults() == [Fault(True, 0, 0, Site.REDUCE, 1, 3)] * 2
        ranks.run(launches, inputs)
        assert [channel.epoch() for channel in ranks.channels] == [0, 0], "a failed rank's launches do nothing"


def test_an_injected_fault_reaches_both_ranks(device: torch.device, generator: torch.Generator) -> None:
    weights = tuple(weights_to(rank, device) for rank in random_weights(SMALL, BF16, generator))
    inputs = random_inputs(SMALL, 2, generator).to(device)
    with ThreadRanks(SMALL, grid=BLOCKS, wait_seconds=WAIT, device=device) as ranks:
        launches = ranks.launches(weights)
        for channel in ranks.channels:
            channel.inject_fault(1, 0.01)
        ranks.run(launches, inputs)
        assert ranks.faults() == [Fault(True, 1, 0, Site.INJECT, None, 3)] * 2


def test_abort_ends_a_running_wait(device: torch.device, generator: torch.Generator) -> None:
    """The host marks its rank failed while the launch spins: the launch ends long before its bound, and the mark is seen."""
    weights = tuple(weights_to(rank, device) for rank in random_weights(SMALL, BF16, generator))
    inputs = random_inputs(SMALL, 2, generator).to(device)
    with ThreadRanks(SMALL, grid=BLOCKS, wait_seconds=30.0, device=device) as ranks:
        launches = ranks.launches(weights)
        ranks.channels[0].prepare(2)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=False)
        end.record()
        assert not ranks.channels[0].health().failed
        ranks.channels[1].abort()
        end.synchronize()
        assert begin.elapsed_time(end) < 15_000
        assert ranks.faults() == [Fault(True, 1, -1, Site.HOST)] * 2
        ranks.channels[0].mirror_fault()
        ranks.channels[0].synchronize()
        assert ranks.channels[0].mirrored_fault() == ranks.channels[0].health()


# --- one rank at the published sizes ---------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Alone:
    """One rank whose own buffer stands for its peers'."""

    shape: FfnShape
    weights: FfnWeights
    channel: FfnChannel
    launch: FfnLaunch

    @classmethod
    def of(cls, shape: FfnShape, weights: FfnWeights, device: torch.device, *, grid: int | None = None) -> Alone:
        peers = OwnBufferPeers(aligned_zeros(shape.peer_layout.total_bytes, device=device), shape.world_size)
        defines = (OWN_BUFFER,) if shape.world_size > 1 else ()
        channel = FfnChannel(shape, peers, grid=grid, wait_seconds=WAIT, device=device, defines=defines)
        return cls(shape, weights, channel, FfnLaunch(channel, weights, FfnConstants(), 7))

    def inputs(self, rows: int, seed: int, padded: tuple[int, ...] = ()) -> LayerInputs:
        one = attrs.evolve(self.shape, world_size=1)
        return random_inputs(one, rows, torch.Generator().manual_seed(seed), padded).to(self.channel.device)

    def run(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        found = self.launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
        self.channel.synchronize()
        assert self.channel.health().describe() == "no fault"
        return found

    def check(self, inputs: LayerInputs) -> float:
        rows = inputs.residual.shape[0]
        epoch = self.channel.epoch()
        found = self.run(inputs)
        scratch = read_scratch(self.channel, self.weights.format, rows, epoch)
        return check_launch(self.shape, inputs, (self.weights,), found, scratch, alone=True)


@pytest.fixture(scope="module", params=[MXFP4, BF16, MXFP8, NVFP4])
def tp4(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Alone]:
    shape = published(4)
    alone = Alone.of(shape, random_packed_weights(shape, request.param, device, 4), device)
    yield alone
    alone.channel.close()


@pytest.mark.parametrize("rows", [*range(1, 17), 24, 32, 64])
def test_published_tp4(tp4: Alone, rows: int) -> None:
    error = tp4.check(tp4.inputs(rows, 100 + rows))
    print(f"{tp4.weights.format.value} rows {rows}: relative error {error:.2e}")


@pytest.mark.parametrize("padded", [(0,), (15,), (1, 4, 9), tuple(range(16)), tuple(range(1, 16))])
def test_padded_rows(tp4: Alone, padded: tuple[int, ...]) -> None:
    tp4.check(tp4.inputs(16, 7, padded))


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("format", [MXFP4, BF16, MXFP8, NVFP4])
def test_published_tensor_parallel_sizes(format: ExpertFormat, world_size: int, device: torch.device) -> None:
    shape = published(world_size)
    alone = Alone.of(shape, random_packed_weights(shape, format, device, world_size), device)
    for rows in (1, 16):
        alone.check(alone.inputs(rows, rows))
    alone.channel.close()


@pytest.mark.parametrize("rows", [16, 64])
def test_all_rows_take_the_same_experts(tp4: Alone, rows: int, device: torch.device) -> None:
    bias = torch.zeros(128, device=device)
    bias[[5, 17, 80, 127]] = 10.0
    forced = Alone.of(tp4.shape, attrs.evolve(tp4.weights, router_bias=bias), device)
    forced.check(forced.inputs(rows, 3))
    routes = read_scratch(forced.channel, forced.weights.format, rows, 0).routes
    assert {frozenset(picks) for picks in routes.experts.tolist()} == {frozenset((5, 17, 80, 127))}
    forced.channel.close()


def test_a_nan_row_stays_alone(tp4: Alone) -> None:
    inputs = tp4.inputs(8, 5)
    clean = tp4.run(inputs)
    inputs.parts[0][3] = math.nan
    inputs.parts[0][6, 77] = math.inf
    out, residual = tp4.run(inputs)
    others = [0, 1, 2, 4, 5, 7]
    assert torch.isnan(out[3]).all()
    assert same((out[others], residual[others]), (clean[0][others], clean[1][others]))
    routes = read_scratch(tp4.channel, tp4.weights.format, 8, tp4.channel.epoch() - 1).routes
    assert routes.experts[3].tolist() == [0, 1, 2, 3]
    assert routes.weights[3].tolist() == [0.0] * 4


def test_bits_do_not_depend_on_the_run_the_grid_or_the_graph(tp4: Alone, device: torch.device) -> None:
    inputs = tp4.inputs(11, 6, (4,))
    valid = inputs.slots >= 0

    def taken(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return found[0], found[1][valid]

    wanted = taken(tp4.run(inputs))
    for _ in range(5):
        assert same(taken(tp4.run(inputs)), wanted)
    for grid in (7, 66, 131):
        other = Alone.of(tp4.shape, tp4.weights, device, grid=grid)
        assert same(taken(other.run(inputs)), wanted)
        other.channel.close()


def test_graphs_replay_for_any_mix_of_rows(tp4: Alone) -> None:
    """Captured with every row padded, as vLLM captures; replayed with other rows, inputs and paddings."""
    rows = 16
    all_padded = tp4.inputs(rows, 8, tuple(range(rows)))
    part, residual, slots = all_padded.parts[0].clone(), all_padded.residual.clone(), all_padded.slots.clone()
    tp4.channel.prepare(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, new_residual = tp4.launch(part, residual, slots, handshake=False)
        last, last_residual = tp4.launch(out, new_residual, slots, handshake=True)
        tp4.channel.mirror_fault()
    for padded in ((), (0, 3), tuple(range(9, 16))):
        inputs = tp4.inputs(rows, 9 + len(padded), padded)
        valid = inputs.slots >= 0
        first = tp4.run(inputs)
        second = tp4.run(LayerInputs((first[0],), first[1], inputs.slots))
        part.copy_(inputs.parts[0])
        residual.copy_(inputs.residual)
        slots.copy_(inputs.slots)
        graph.replay()
        torch.cuda.synchronize()
        assert not tp4.channel.mirrored_fault().failed
        assert same((out, new_residual[valid]), (first[0], first[1][valid]))
        assert same((last, last_residual[valid]), (second[0], second[1][valid]))


def test_the_operator_is_opaque(tp4: Alone) -> None:
    inputs = tp4.inputs(4, 2)
    wanted = tp4.run(inputs)
    number = ops.register(tp4.launch)
    found = ops.ffn(number, tp4.channel.epoch_words, inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
    assert same(found, wanted)


@pytest.mark.parametrize("code", [0, 129, 200, 254, 255])
def test_special_scales(code: int, device: torch.device) -> None:
    """Scales beyond what one bf16 factor holds: 0 is 2^-127, 254 reaches infinity (and NaN beside zeros), 255 is NaN, as the dequantised reference has them."""
    shape = attrs.evolve(SMALL, world_size=1)
    weights = random_packed_weights(shape, MXFP4, device, 3)
    assert weights.s13 is not None
    assert weights.s2 is not None
    (weights.s13 if code in (0, 129) else weights.s2).view(-1)[::5] = code
    alone = Alone.of(shape, weights, device, grid=BLOCKS)
    inputs = alone.inputs(3, 1)
    found = alone.run(inputs)
    if code in (0, 129):
        check_launch(shape, inputs, (weights,), found, read_scratch(alone.channel, MXFP4, 3, 0))
    else:
        routes = read_scratch(alone.channel, MXFP4, 3, 0).routes
        wanted = half(inputs.parts, inputs.residual, inputs.slots, [weights], CONSTANTS, 4, ROUNDED_SUMS_EXACT, routes).out
        assert torch.equal(torch.isnan(found[0]), torch.isnan(wanted.bfloat16()))
        assert bool(torch.isnan(found[0]).any()) == (code >= 254)
    alone.channel.close()


@pytest.mark.parametrize(
    ("format", "name", "code", "nan"),
    [
        (MXFP8, "s13", 0, False),
        (MXFP8, "s13", 134, False),  # the largest of the fast entry
        (MXFP8, "s13", 135, False),
        (MXFP8, "s2", 200, False),
        (MXFP8, "s2", 254, True),
        (MXFP8, "s2", 255, True),
        (MXFP8, "w13", 0x7F, True),
        (MXFP8, "w2", 0xFF, True),
        (MXFP8, "w2", 0x81, False),
        (NVFP4, "s13", 0x80, False),
        (NVFP4, "s13", 0x01, False),
        (NVFP4, "s13", 0x7E, False),
        (NVFP4, "s2", 0xFE, False),
        (NVFP4, "s2", 0x7F, True),
        (NVFP4, "s13", 0xFF, True),
    ],
)
def test_special_codes(format: ExpertFormat, name: str, code: int, nan: bool, device: torch.device) -> None:
    """Codes at the ends of E8M0 and E4M3 in every fifth place, as the dequantised reference has them."""
    shape = attrs.evolve(SMALL, world_size=1)
    weights = random_packed_weights(shape, format, device, 3)
    getattr(weights, name).view(torch.uint8).view(-1)[::5] = code
    alone = Alone.of(shape, weights, device, grid=BLOCKS)
    inputs = alone.inputs(3, 1)
    found = alone.run(inputs)
    scratch = read_scratch(alone.channel, format, 3, 0)
    if nan:
        wanted = half(inputs.parts, inputs.residual, inputs.slots, [weights], CONSTANTS, 4, ROUNDED_SUMS_EXACT, scratch.routes).out
        assert torch.equal(torch.isnan(found[0]), torch.isnan(wanted.bfloat16()))
        assert torch.isnan(found[0]).any()
    else:
        check_launch(shape, inputs, (weights,), found, scratch)
    alone.channel.close()


@pytest.mark.parametrize("name", ["g13", "g2"])
@pytest.mark.parametrize("value", [0.0, -0.5, 3e-4, math.nan])
def test_global_scales(name: str, value: float, device: torch.device) -> None:
    """Of the shared expert, which every row meets."""
    shape = attrs.evolve(SMALL, world_size=1)
    weights = random_packed_weights(shape, NVFP4, device, 3)
    getattr(weights, name)[-1] = value
    alone = Alone.of(shape, weights, device, grid=BLOCKS)
    inputs = alone.inputs(3, 1)
    found = alone.run(inputs)
    if math.isnan(value):
        assert torch.isnan(found[0]).all()
    else:
        check_launch(shape, inputs, (weights,), found, read_scratch(alone.channel, NVFP4, 3, 0))
    alone.channel.close()


@pytest.mark.parametrize("rows", [1, 16])
def test_published_kernels_spill_no_registers(rows: int, device: torch.device) -> None:
    """The two formats that are read row major; a thread's local memory would cost bandwidth at every step."""
    shape = published(4)
    alone = Alone.of(shape, random_packed_weights(shape, NVFP4, device, 4), device)
    host = alone.channel._host
    assert isinstance(host, CudaHost)
    host.prepare(rows)
    entries = ("m3_ffn_mxfp8", "m3_ffn_mxfp8" + ANY_SCALE, "m3_ffn_nvfp4")
    assert {entry: host.kernel(rows, entry).spill_bytes for entry in entries} == dict.fromkeys(entries, 0)
    alone.channel.close()


# --- refusals ------------------------------------------------------------------------------------------------------------------------


def test_a_grid_that_cannot_be_resident_is_refused_with_the_numbers(device: torch.device) -> None:
    shape = attrs.evolve(SMALL, world_size=1)
    peers = OwnBufferPeers(aligned_zeros(shape.peer_layout.total_bytes, device=device), 1)
    channel = FfnChannel(shape, peers, grid=100_000, device=device)
    with pytest.raises(
        ResourceError,
        match=r"a grid of 100000 blocks cannot be resident .*\(512 threads, \d+ bytes of shared memory\) on each of \d+ multiprocessors",
    ):
        channel.prepare(1)
    channel.close()


def test_capture_without_preparation_is_refused(tp4: Alone, device: torch.device) -> None:
    fresh = Alone.of(tp4.shape, tp4.weights, device)
    inputs = fresh.inputs(2, 1)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ConfigurationError, match=r"call prepare\(2\) outside"), torch.cuda.graph(graph):
        fresh.launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=False)
    fresh.channel.close()


def test_weights_elsewhere_are_refused(device: torch.device, generator: torch.Generator) -> None:
    shape = attrs.evolve(SMALL, world_size=1)
    [weights] = random_weights(shape, BF16, generator)
    peers = OwnBufferPeers(aligned_zeros(shape.peer_layout.total_bytes, device=device), 1)
    channel = FfnChannel(shape, peers, grid=BLOCKS, device=device)
    with pytest.raises(RefusalError, match="w13 lies on cpu"):
        FfnLaunch(channel, weights, FfnConstants(), 3)
    launch = FfnLaunch(channel, weights_to(weights, device), FfnConstants(), 3)
    inputs = random_inputs(shape, 2, generator)
    with pytest.raises(ConfigurationError, match=r"part is .* on cpu"):
        launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=False)
    channel.close()
