"""Bad input: a named error that gives the value, the limit and the remedy, before anything is touched."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import attrs
import pytest
import torch

from m3_core.errors import ConfigurationError, RefusalError, ResourceClosed
from m3_kernels import ops
from m3_kernels.ffn import ExpertFormat, FfnChannel, FfnConstants, FfnLaunch, FfnShape, FfnWeights
from m3_kernels.testing import InProcessPeers, LayerInputs, ThreadRanks, aligned_zeros, random_inputs, random_weights

SHAPE = FfnShape(hidden=128, intermediate=64, experts=4, top_k=2, world_size=1, max_rows=4)


@pytest.fixture
def ranks() -> Iterator[ThreadRanks]:
    with ThreadRanks(SHAPE) as ranks:
        yield ranks


@pytest.fixture
def weights(generator: torch.Generator) -> FfnWeights:
    return random_weights(SHAPE, ExpertFormat.BF16, generator)[0]


@pytest.fixture
def packed(generator: torch.Generator) -> FfnWeights:
    return random_weights(SHAPE, ExpertFormat.MXFP4, generator)[0]


@pytest.fixture
def inputs(generator: torch.Generator) -> LayerInputs:
    return random_inputs(SHAPE, 2, generator)


def test_shapes_are_refused_with_every_reason() -> None:
    with pytest.raises(RefusalError) as caught:
        FfnShape(hidden=127, intermediate=0, experts=0, top_k=9, world_size=3, max_rows=65)
    assert len(caught.value.reasons) == 6
    for value in ("127", "0", "9", "3", "65"):
        assert any(f" is {value}" in reason for reason in caught.value.reasons)


@pytest.mark.parametrize(("hidden", "intermediate", "count"), [(96, 32, 0), (112, 32, 1), (96, 48, 1), (80, 16, 2)])
@pytest.mark.parametrize(("format", "why"), [(ExpertFormat.MXFP8, "a scale covers 32"), (ExpertFormat.NVFP4, "a lane loads 32")])
def test_row_major_formats_need_whole_loads(hidden: int, intermediate: int, count: int, format: ExpertFormat, why: str) -> None:
    reasons = FfnShape(hidden, intermediate, 4, 2, 1, 4).format_reasons(format)
    assert len(reasons) == count
    for reason in reasons:
        assert f"{format.name} weights need a multiple of 32 ({why} values along K); pad it or hold the experts as BF16" in reason


@pytest.mark.parametrize(("format", "experts"), [(ExpertFormat.MXFP8, 511), (ExpertFormat.NVFP4, 511)])
def test_positions_of_codes_fit_a_word(format: ExpertFormat, experts: int) -> None:
    """Codes are counted in loads of 16 bytes: 2^32 of them hold 2^36 MXFP8 or 2^37 NVFP4 codes."""
    limit = 2**36 if format is ExpertFormat.MXFP8 else 2**37
    largest = FfnShape(hidden=limit // 512 // 2 // 4096, intermediate=4096, experts=experts, top_k=2, world_size=1, max_rows=4)
    assert largest.format_reasons(format) == []
    [reason] = attrs.evolve(largest, experts=512).format_reasons(format)
    assert f"513 matrices of 8192 x {largest.hidden} hold" in reason
    assert f"{format.name} weights take at most {limit}" in reason
    assert "use more ranks" in reason


@pytest.mark.parametrize(("hidden", "intermediate", "count"), [(128, 64, 0), (96, 64, 1), (128, 48, 1), (96, 48, 2)])
def test_mxfp4_needs_whole_groups(hidden: int, intermediate: int, count: int) -> None:
    shape = FfnShape(hidden, intermediate, 4, 2, 1, 4)
    assert len(shape.format_reasons(ExpertFormat.MXFP4)) == count
    assert shape.format_reasons(ExpertFormat.BF16) == []


def test_weights_are_refused_with_every_reason(ranks: ThreadRanks, weights: FfnWeights) -> None:
    wrong = attrs.evolve(
        weights,
        post_norm=weights.post_norm.float(),
        router=weights.router[:3],
        router_bias=torch.zeros(8)[::2],
        w13=weights.w13.transpose(1, 2),
        w2=weights.w2.flatten()[1:][: weights.w2.numel() - 128].view(-1, 64),
        s13=torch.zeros(4, dtype=torch.uint8),
    )
    with pytest.raises(RefusalError) as caught:
        FfnLaunch(ranks.channels[0], wrong, FfnConstants(), 5)
    text = "\n".join(caught.value.reasons)
    for part in (
        "post_norm is torch.float32: torch.bfloat16",
        "router has shape [3, 128]: [4, 128]",
        "router_bias is not contiguous",
        "w13 is not contiguous",
        "w2 has shape",
        "w2 starts at an address",
        "s13 is given, but bf16 weights have no scales",
    ):
        assert part in text
    assert "layer 5" in str(caught.value)


def test_packed_weights_are_refused(ranks: ThreadRanks, packed: FfnWeights) -> None:
    wrong = attrs.evolve(packed, w13=packed.w13.view(torch.int8), s13=None, s2=torch.zeros(7, dtype=torch.int32))
    with pytest.raises(RefusalError) as caught:
        FfnLaunch(ranks.channels[0], wrong, FfnConstants(), 0)
    text = "\n".join(caught.value.reasons)
    assert "w13 is torch.int8: torch.uint8" in text
    assert "s13 is None" in text
    assert "s2 is torch.int32" in text
    assert "s2 holds 7 scales: 5120 (640 rows of 8) are needed, or 6144 with the rows padded to 256" in text


@pytest.mark.parametrize("format", [ExpertFormat.MXFP8, ExpertFormat.NVFP4])
def test_row_major_weights_are_refused_with_every_reason(format: ExpertFormat, ranks: ThreadRanks, generator: torch.Generator) -> None:
    [good] = random_weights(SHAPE, format, generator)
    assert good.reasons(SHAPE) == []
    assert good.s13 is not None
    assert good.s2 is not None
    wrong = attrs.evolve(
        good,
        w13=good.w13.view(torch.int8),
        s13=good.s13.view(torch.int8)[:, :-1],
        w2=good.w2[:, :, ::2],
        s2=None,
        g13=torch.ones(5),
        g2=torch.ones(4, dtype=torch.float64),
    )
    element = "torch.float8_e4m3fn" if format is ExpertFormat.MXFP8 else "torch.uint8"
    scale, groups = ("torch.uint8", 4) if format is ExpertFormat.MXFP8 else ("torch.float8_e4m3fn", 8)
    wanted = [
        f"w13 is torch.int8: {element} is needed",
        f"s13 is torch.int8: {scale} is needed",
        f"s13 has shape [5, 127, {groups}]: [5, 128, {groups}] is needed",
        "s13 is not contiguous",
        "w2 is not contiguous",
        f"s2 is None, but {format.value} weights need their scales",
    ]
    if format is ExpertFormat.MXFP8:
        wanted += [f"{name} is given, but mxfp8 weights have no global scales: pass None" for name in ("g13", "g2")]
    else:
        wanted += ["g2 is torch.float64: torch.float32 is needed", "g2 has shape [4]: [5] is needed"]
    with pytest.raises(RefusalError) as caught:
        FfnLaunch(ranks.channels[0], wrong, FfnConstants(), 0)
    for part in wanted:
        assert any(part in reason for reason in caught.value.reasons), part
    assert len(caught.value.reasons) == len(wanted) + 1, "and the shape of w2"


def test_nvfp4_needs_its_global_scales(ranks: ThreadRanks, generator: torch.Generator) -> None:
    [good] = random_weights(SHAPE, ExpertFormat.NVFP4, generator)
    with pytest.raises(RefusalError) as caught:
        FfnLaunch(ranks.channels[0], attrs.evolve(good, g13=None, g2=None), FfnConstants(), 0)
    assert list(caught.value.reasons) == [
        f"{name} is None, but nvfp4 weights need a global scale for each of the 5 experts" for name in ("g13", "g2")
    ]


def test_formats_without_global_scales_refuse_them(ranks: ThreadRanks, weights: FfnWeights, packed: FfnWeights) -> None:
    for given in (weights, packed):
        with pytest.raises(RefusalError, match=f"g2 is given, but {given.format.value} weights have no global scales"):
            FfnLaunch(ranks.channels[0], attrs.evolve(given, g2=torch.ones(5)), FfnConstants(), 0)


@pytest.mark.parametrize("format", [ExpertFormat.MXFP4, ExpertFormat.MXFP8])
def test_what_a_fast_entry_does_not_take(format: ExpertFormat, generator: torch.Generator) -> None:
    """A scale above the limit in any place that is read, or a NaN weight; what pads the scales does not count."""
    [weights] = random_weights(SHAPE, format, generator)
    for scales in (weights.s13, weights.s2):
        assert scales is not None
        scales.clamp_(max=130)
        assert not weights.exceeds(SHAPE, 130)
        kept = scales.clone()
        scales.view(-1)[0] = 131
        assert weights.exceeds(SHAPE, 130)
        assert not weights.exceeds(SHAPE, 131)
        scales.copy_(kept)
    if format is ExpertFormat.MXFP4:
        assert weights.s2 is not None
        # Groups 2 to 7 of row 0 are padding: hidden 128, intermediate 64.
        weights.s2.view(-1)[2] = 255
        assert not weights.exceeds(SHAPE, 130)
        return
    for codes in (weights.w13, weights.w2):
        codes.view(torch.uint8)[4, 3, 63] = 0xFF
        assert weights.exceeds(SHAPE, 255)
        codes.view(torch.uint8)[4, 3, 63] = 0
    assert not weights.exceeds(SHAPE, 130)


def test_scales_with_and_without_padding(ranks: ThreadRanks, packed: FfnWeights, inputs: LayerInputs) -> None:
    """640 rows of scales: padded to 768 as AITER stores them, or cut to the rows that are read."""
    assert packed.s2 is not None
    cut = attrs.evolve(packed, s2=packed.s2.flatten()[: 640 * 8].clone())
    [(first, _)] = ranks.run(ranks.launches([packed]), inputs)
    [(second, _)] = ranks.run(ranks.launches([cut]), inputs)
    assert torch.equal(first, second)


@pytest.mark.parametrize("layer", [-1, 2**15 - 1])
def test_layers_that_no_fault_word_holds(layer: int, ranks: ThreadRanks, weights: FfnWeights) -> None:
    with pytest.raises(ConfigurationError, match=f"layer is {layer}"):
        FfnLaunch(ranks.channels[0], weights, FfnConstants(), layer)


def bad_calls() -> list[tuple[str, dict[str, object], str]]:
    ok = torch.zeros(2, 128, dtype=torch.bfloat16)
    slots = torch.zeros(2, dtype=torch.int64)
    return [
        ("one dimension", {"part": ok[0]}, r"part has shape \[128\]; \[rows, 128\]"),
        ("other hidden", {"part": ok[:, :64]}, r"part has shape \[2, 64\]"),
        ("no rows", {"part": ok[:0], "residual": ok[:0]}, "part has 0 rows; this channel takes 1 to 4"),
        ("many rows", {"part": ok.repeat(3, 1)}, "part has 6 rows; this channel takes 1 to 4: route wider steps"),
        ("part type", {"part": ok.float()}, "part is torch.float32"),
        ("residual type", {"residual": ok.half()}, "residual is torch.float16"),
        ("residual rows", {"residual": ok[:1]}, r"residual is torch.bfloat16 \[1, 128\]"),
        ("part strides", {"part": torch.zeros(128, 2, dtype=torch.bfloat16).T}, "part is .* strides"),
        ("residual device", {"residual": ok.to("meta")}, "residual is .* on meta"),
        ("negated part", {"part": torch._neg_view(ok)}, r"part is a negated view.*part\.resolve_neg\(\)"),
        ("negated residual", {"residual": torch._neg_view(ok)}, r"residual is a negated view"),
        ("slots type", {"slots": slots.int()}, "slots is torch.int32"),
        ("few slots", {"slots": slots[:1]}, r"slots is torch.int64 \[1\].*at least 2"),
        ("slot dimensions", {"slots": slots[None]}, r"slots is torch.int64 \[1, 2\]"),
        ("slot strides", {"slots": torch.zeros(4, dtype=torch.int64)[::2]}, "a contiguous int64"),
    ]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in bad_calls()], ids=[case[0] for case in bad_calls()])
def test_bad_calls(change: dict[str, torch.Tensor], message: str, ranks: ThreadRanks, weights: FfnWeights) -> None:
    [launch] = ranks.launches([weights])
    arguments = {
        "part": torch.zeros(2, 128, dtype=torch.bfloat16),
        "residual": torch.zeros(2, 128, dtype=torch.bfloat16),
        "slots": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(ConfigurationError, match=message):
        launch(**arguments, handshake=True)
    assert ranks.channels[0].epoch() == 0
    assert not ranks.buffers[0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 0}, "grid is 0; the CPU target takes 1 to 64"),
        ({"grid": 65}, "grid is 65"),
        ({"grid": 1, "block_threads": 32}, "block_threads is 32; pass a multiple of 64"),
        ({"grid": 1, "block_threads": 2048}, "block_threads is 2048"),
        ({"grid": 1, "wait_seconds": 0.0}, "wait_seconds is 0.0"),
        ({"grid": 1, "wait_seconds": float("nan")}, "wait_seconds is nan"),
        ({"grid": 1, "offset": 128}, "offset 128"),
        ({"grid": 1, "offset": 256}, "7360 are needed, 7104 of them from byte 256 on"),
    ],
)
def test_bad_channels(options: dict[str, object], message: str) -> None:
    peers = InProcessPeers([aligned_zeros(SHAPE.peer_layout.total_bytes)], 0)
    with pytest.raises(ConfigurationError, match=message):
        FfnChannel(SHAPE, peers, **options)  # type: ignore[arg-type]


NO_ROOM = """
import resource
from m3_core.errors import ResourceError
from m3_kernels.hosts.cpu import CpuHost

CpuHost(1, 64).close()
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
limit = pages * resource.getpagesize() + {room}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    CpuHost({grid}, {threads})
except ResourceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("grid", "threads", "room", "reason"),
    [(4, 1024, 64 << 20, errno.ENOMEM), (8, 64, 128 << 20, errno.EAGAIN)],
    ids=["stacks", "threads"],
)
def test_blocks_that_do_not_fit_into_memory(grid: int, threads: int, room: int, reason: int) -> None:
    """No room for the fibers' stacks (96 MiB in the second case), or for the OS threads' (8 MiB each): an error, and the process lives."""
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM.format(grid=grid, threads=threads, room=room)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"cannot start {grid} blocks of {threads} threads: {os.strerror(reason)}; pass a smaller grid\n"


def test_peers_of_another_world() -> None:
    buffers = [aligned_zeros(SHAPE.peer_layout.total_bytes) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="rank 1 of 2 with 2 addresses, the shape has world size 1"):
        FfnChannel(SHAPE, InProcessPeers(buffers, 1), grid=1)


def test_channels_side_by_side(weights: FfnWeights, inputs: LayerInputs) -> None:
    """Two channels in one allocation, each with its own epoch and fault word."""
    size = SHAPE.peer_layout.total_bytes
    offset = (size + 255) // 256 * 256
    peers = InProcessPeers([aligned_zeros(offset + size)], 0)
    first, second = FfnChannel(SHAPE, peers, grid=1), FfnChannel(SHAPE, peers, grid=2, offset=offset)
    launches = [FfnLaunch(channel, weights, FfnConstants(), 0) for channel in (first, second)]
    for _ in range(2):
        out = launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)[0]
    assert torch.equal(out, launches[1](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)[0])
    first.abort()
    assert (first.epoch(), second.epoch()) == (2, 1)
    assert first.health().failed
    assert not second.health().failed
    first.close()
    second.close()


@pytest.mark.parametrize("value", [None, 4.0, "4", True])
@pytest.mark.parametrize("name", ["hidden", "intermediate", "experts", "top_k", "world_size", "max_rows"])
def test_sizes_that_are_no_whole_number(name: str, value: object) -> None:
    with pytest.raises(RefusalError, match=f"is {value!r}: a whole number is needed"):
        attrs.evolve(SHAPE, **{name: value})


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e12, 1e300])
def test_bounds_of_waits(seconds: float) -> None:
    """Not only a bound, but one whose clock ticks fit 64 bits."""
    peers = InProcessPeers([aligned_zeros(SHAPE.peer_layout.total_bytes)], 0)
    with pytest.raises(ConfigurationError, match=r"wait_seconds is .* above 0, at most 86400"):
        FfnChannel(SHAPE, peers, grid=1, wait_seconds=seconds)


class ClosablePeers:
    """Peer memory that, as a real one, refuses once it is closed."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.rank, self.world_size, self.nbytes = 0, 1, buffer.numel()
        self.local = buffer.data_ptr()
        self.closed = False

    @property
    def addresses(self) -> tuple[int, ...]:
        if self.closed:
            raise ResourceClosed("peer buffer used after close()")
        return (self.local,)

    def close(self) -> None:
        self.closed = True


def test_closed_peer_memory_is_not_touched(weights: FfnWeights, inputs: LayerInputs) -> None:
    buffer = aligned_zeros(SHAPE.peer_layout.total_bytes)
    peers = ClosablePeers(buffer)
    channel = FfnChannel(SHAPE, peers, grid=1)
    launch = FfnLaunch(channel, weights, FfnConstants(), 0)
    peers.close()
    before = buffer.clone()
    for use in (
        lambda: launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=True),
        channel.health,
        channel.zero_scratch_and_epoch,
    ):
        with pytest.raises(ResourceClosed, match="peer buffer used after close"):
            use()
    channel.abort()
    assert torch.equal(buffer, before)
    channel.close()


def test_scratch_rows(ranks: ThreadRanks) -> None:
    channel = ranks.channels[0]
    channel.prepare(4)
    for rows in (0, 5):
        with pytest.raises(ConfigurationError, match=f"rows is {rows}; this channel takes 1 to 4"):
            channel.prepare(rows)


def test_injections_out_of_range(ranks: ThreadRanks) -> None:
    channel = ranks.channels[0]
    with pytest.raises(ConfigurationError, match="rank is 1"):
        channel.inject_fault(1)
    for delay in (-1.0, 3.0, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match=f"delay_seconds is {delay}"):
            channel.inject_fault(0, delay)


def test_timeline(weights: FfnWeights, inputs: LayerInputs, ranks: ThreadRanks) -> None:
    with pytest.raises(ConfigurationError, match="timeline=True"):
        ranks.channels[0].timeline_stamps(2)
    peers = InProcessPeers([aligned_zeros(SHAPE.peer_layout.total_bytes)], 0)
    channel = FfnChannel(SHAPE, peers, grid=3, timeline=True)
    FfnLaunch(channel, weights, FfnConstants(), 0)(inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
    stamps = channel.timeline_stamps(2)
    assert stamps.shape == (3, 12)
    assert (stamps[:, 1:] >= stamps[:, :-1]).all()
    assert (stamps[:, 0] > 0).all()
    channel.close()


def test_a_forked_child_is_refused(weights: FfnWeights, inputs: LayerInputs, ranks: ThreadRanks) -> None:
    """A child has the memory but none of the blocks: its launch raises instead of waiting for them."""
    [launch] = ranks.launches([weights])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
        except ResourceClosed:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_operator(weights: FfnWeights, inputs: LayerInputs, ranks: ThreadRanks) -> None:
    [launch] = ranks.launches([weights])
    channel = ranks.channels[0]
    number = ops.register(launch)
    arguments = (number, channel.epoch_words, inputs.parts[0], inputs.residual, inputs.slots)
    out, residual = ops.ffn(*arguments, handshake=True)
    again, residual_again = launch(inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
    assert torch.equal(out, again)
    assert torch.equal(residual, residual_again)
    assert channel.epoch() == 2
    del launch
    with pytest.raises(ResourceClosed, match=f"launch {number}"):
        ops.ffn(*arguments, handshake=True)


def test_operator_is_opaque(weights: FfnWeights, inputs: LayerInputs, ranks: ThreadRanks) -> None:
    """The operator's schema and fake version hold, and a traced graph keeps two equal calls as two launches."""
    [launch] = ranks.launches([weights])
    channel = ranks.channels[0]
    number = ops.register(launch)
    torch.library.opcheck(
        torch.ops.m3.ffn.default,
        (inputs.parts[0], inputs.residual, inputs.slots, channel.epoch_words, number, True),
        test_utils=("test_schema", "test_faketensor"),
    )

    def twice(part: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        first, _ = torch.ops.m3.ffn(part, residual, slots, words, number, False)
        second, _ = torch.ops.m3.ffn(part, residual, slots, words, number, True)
        return first + second

    before = channel.epoch()
    graph = torch.fx.experimental.proxy_tensor.make_fx(twice, tracing_mode="fake")(
        inputs.parts[0], inputs.residual, inputs.slots, channel.epoch_words
    )
    assert channel.epoch() == before, "tracing runs no launch"
    graph(inputs.parts[0], inputs.residual, inputs.slots, channel.epoch_words)
    assert channel.epoch() == before + 2


def test_weights_that_are_negated_views_are_refused(ranks: ThreadRanks, weights: FfnWeights) -> None:
    negated = attrs.evolve(weights, post_norm=torch._neg_view(weights.post_norm))
    with pytest.raises(RefusalError, match="post_norm is a negated view"):
        ranks.launches([negated])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan: a finite number"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06: 0 or more"),
        ("swiglu_limit", -7.0, "swiglu_limit is -7.0: 0 or more"),
        ("swiglu_alpha", "1.7", "swiglu_alpha is '1.7': a finite number"),
        ("routed_scaling_factor", True, "routed_scaling_factor is True"),
    ],
)
def test_constants_that_are_no_numbers(name: str, value: object, message: str) -> None:
    with pytest.raises(RefusalError, match=message):
        FfnConstants(**{name: value})  # type: ignore[arg-type]
