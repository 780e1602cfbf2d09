"""Epochs, tags, waits and faults of the launch: what happens when a rank, a block or a word does not come."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from m3_core.epochs import EPOCH_LIMIT
from m3_core.errors import ResourceBusy, ResourceClosed
from m3_core.faults import Fault, Site
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_kernels.reference.arithmetic import ROUNDED
from m3_kernels.reference.half import half
from m3_kernels.testing import ThreadRanks, hooked_library, on_threads, random_inputs, random_weights

SHAPE = FfnShape(hidden=96, intermediate=32, experts=4, top_k=2, world_size=2, max_rows=8)
WAIT = 0.6
# A rank that gives up needs the bound; what follows on it and on its peers does not wait again.
END_SECONDS = 5.0
LAYER = 7


@pytest.fixture
def weights(generator: torch.Generator) -> tuple[FfnWeights, ...]:
    return random_weights(SHAPE, ExpertFormat.BF16, generator)


@pytest.fixture(scope="module")
def hooks() -> ctypes.CDLL:
    return hooked_library()


@pytest.fixture
def short(hooks: ctypes.CDLL) -> Iterator[ThreadRanks]:
    with ThreadRanks(SHAPE, wait_seconds=WAIT, library=hooks) as ranks:
        yield ranks


def test_consecutive_launches(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """200 launches of changing row counts, with no pause between: parity halves alternate and no launch sees another's words."""
    shape = SHAPE
    steps = [random_inputs(shape, 1 + step % 4, generator, padded=[0] if step % 5 == 0 else []) for step in range(20)]
    wanted = [half(step.parts, step.residual, step.slots, weights, FfnConstants(), shape.top_k, ROUNDED).out for step in steps]
    with ThreadRanks(shape) as ranks:
        launches = ranks.launches(weights)

        def run(rank: int) -> int:
            wrong = 0
            for launch in range(200):
                step = steps[launch % 20]
                out, _ = launches[rank](step.parts[rank], step.residual, step.slots, handshake=launch % 3 == 2)
                wrong += not torch.equal(out.float(), wanted[launch % 20])
            return wrong

        assert on_threads(2, run) == [0, 0]
        assert [channel.epoch() for channel in ranks.channels] == [200, 200]
        assert not any(fault.failed for fault in ranks.faults())


@pytest.mark.parametrize("epoch", [0, 1, 65534, 65535, EPOCH_LIMIT - 2])
def test_any_epoch_below_the_limit(epoch: int, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    inputs = random_inputs(SHAPE, 2, generator)
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), SHAPE.top_k, ROUNDED).out
    with ThreadRanks(SHAPE, poison=True) as ranks:
        ranks.preset_epoch(epoch)
        launches = ranks.launches(weights)
        for launch in range(2):
            for out, _ in ranks.run(launches, inputs):
                assert torch.equal(out.float(), wanted)
            assert [channel.epoch() for channel in ranks.channels] == [epoch + launch + 1] * 2


@pytest.mark.parametrize("epoch", [EPOCH_LIMIT, EPOCH_LIMIT + 5])
def test_wrap(epoch: int, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """A launch at the limit refuses at once, on every rank, and moves nothing."""
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        ranks.preset_epoch(epoch)
        before = [buffer[64 + 16 :].clone() for buffer in ranks.buffers]
        started = time.monotonic()
        ranks.run(ranks.launches(weights, layer=LAYER), inputs)
        assert time.monotonic() - started < END_SECONDS
        assert [channel.epoch() for channel in ranks.channels] == [epoch] * 2
        for fault in ranks.faults():
            assert (fault.failed, fault.site, fault.epoch, fault.layer) == (True, Site.WRAP, epoch, LAYER)
        assert all(torch.equal(buffer[64 + 16 :], kept) for buffer, kept in zip(ranks.buffers, before, strict=True))


def test_one_rank_at_the_limit_stops_all(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        ranks.channels[1].epoch_words[0] = EPOCH_LIMIT
        started = time.monotonic()
        ranks.run(ranks.launches(weights), inputs)
        assert time.monotonic() - started < END_SECONDS
        assert [(fault.site, fault.rank) for fault in ranks.faults()] == [(Site.WRAP, 1)] * 2


def test_reset_lets_the_epoch_begin_again(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    inputs = random_inputs(SHAPE, 2, generator)
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), SHAPE.top_k, ROUNDED).out
    with ThreadRanks(SHAPE) as ranks:
        launches = ranks.launches(weights)
        ranks.run(launches, inputs)
        for channel in ranks.channels:
            channel.zero_scratch_and_epoch()
        assert [channel.epoch() for channel in ranks.channels] == [0, 0]
        assert not any(buffer.any() for buffer in ranks.buffers)
        for out, _ in ranks.run(launches, inputs):
            assert torch.equal(out.float(), wanted)


def test_a_reset_keeps_the_fault_word() -> None:
    with ThreadRanks(SHAPE) as ranks:
        ranks.channels[0].abort()
        ranks.channels[1].zero_scratch_and_epoch()
        assert ranks.channels[1].health() == Fault.host_abort(0)


def test_mode_skip_touches_nothing(weights: tuple[FfnWeights, ...]) -> None:
    """A warm-up does not wait for peers: it runs on one rank alone."""
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        ranks.launches(weights)[0].warm(3)
        assert not any(buffer.any() for buffer in ranks.buffers)
        assert not ranks.channels[0].scratch(3).any()
        assert ranks.channels[0].epoch() == 0


WITHHELD = [Site.NORM, Site.ROUTER, Site.ROUTE, Site.TABLE, Site.DOWN, Site.EPOCH]


@pytest.mark.parametrize("site", WITHHELD)
def test_a_block_that_does_not_announce(
    site: Site, short: ThreadRanks, weights: tuple[FfnWeights, ...], generator: torch.Generator
) -> None:
    """Rank 1's blocks keep back what one of its own sites waits for: both ranks end with rank 1's fault, or rank 0's wait for it."""
    short.withhold(1, site)
    started = time.monotonic()
    short.run(short.launches(weights, layer=LAYER), random_inputs(SHAPE, 3, generator), handshake=True)
    assert time.monotonic() - started < END_SECONDS
    own = short.faults()[1]
    # Rank 0's wait for rank 1's output and rank 1's own wait run out together; either report may be first on either rank.
    waits = {(1, site, None), (0, Site.FINAL, 1), (0, Site.HANDSHAKE, 1)}
    for fault in short.faults():
        assert fault.failed
        assert fault.layer == LAYER
        assert fault.epoch == 0
        assert (fault.rank, fault.site, fault.peer) in waits
    assert own.failed
    assert short.channels[1].epoch() == 0, "after a fault the epoch stays"


@pytest.mark.parametrize(("site", "world_size"), [(site, 1) for site in WITHHELD])
def test_the_site_alone(site: Site, world_size: int, hooks: ctypes.CDLL, generator: torch.Generator) -> None:
    """With one rank nothing else can run out: the report is exactly the site's."""
    shape = FfnShape(96, 32, 4, 2, world_size, 8)
    with ThreadRanks(shape, wait_seconds=WAIT, library=hooks) as ranks:
        ranks.withhold(0, site)
        ranks.run(ranks.launches(random_weights(shape, ExpertFormat.BF16, generator), layer=LAYER), random_inputs(shape, 3, generator))
        assert ranks.faults() == [Fault(True, 0, 0, site, None, LAYER)]
        assert ranks.channels[0].epoch() == 0


@pytest.mark.parametrize("site", [Site.REDUCE, Site.FINAL, Site.HANDSHAKE])
def test_a_peer_that_does_not_send(site: Site, short: ThreadRanks, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """Rank 1 withholds an exchange's words from both ranks: both name the site and rank 1 as the one they waited for."""
    short.withhold(1, site)
    started = time.monotonic()
    short.run(short.launches(weights, layer=LAYER), random_inputs(SHAPE, 3, generator), handshake=True)
    assert time.monotonic() - started < END_SECONDS
    for fault in short.faults():
        assert (fault.failed, fault.site, fault.peer, fault.layer, fault.epoch) == (True, site, 1, LAYER, 0)
        assert fault.rank in (0, 1)


def test_a_peer_that_never_launches(short: ThreadRanks, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    launches = short.launches(weights, layer=LAYER)
    inputs = random_inputs(SHAPE, 3, generator)
    started = time.monotonic()
    short.run(launches, inputs, ranks=[0])
    assert WAIT <= time.monotonic() - started < END_SECONDS
    assert short.faults() == [Fault(True, 0, 0, Site.REDUCE, 1, LAYER)] * 2
    # The late peer finds the fault and returns at once; so does every later launch, on both ranks, and no word of theirs travels.
    kept = [buffer[80:].clone() for buffer in short.buffers]
    started = time.monotonic()
    short.run(launches, inputs, ranks=[1])
    short.run(launches, inputs)
    assert time.monotonic() - started < WAIT
    assert all(torch.equal(buffer[80:], before) for buffer, before in zip(short.buffers, kept, strict=True))
    assert [channel.epoch() for channel in short.channels] == [0, 0]


def test_a_late_peer_within_the_bound(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    inputs = random_inputs(SHAPE, 2, generator)
    wanted = half(inputs.parts, inputs.residual, inputs.slots, weights, FfnConstants(), SHAPE.top_k, ROUNDED).out
    with ThreadRanks(SHAPE, wait_seconds=30.0) as ranks:
        launches = ranks.launches(weights)
        waiting = threading.Event()

        def run(rank: int) -> torch.Tensor:
            if rank == 1:
                # Rank 0's words in our buffer prove that it is inside its launch.
                while not ranks.buffers[1][256:].any():
                    time.sleep(0)
                waiting.set()
            return launches[rank](inputs.parts[rank], inputs.residual, inputs.slots, handshake=True)[0]

        for out in on_threads(2, run):
            assert torch.equal(out.float(), wanted)
        assert waiting.is_set()


def test_host_abort_ends_a_wait(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """Rank 1's host gives up while rank 0 waits for it: rank 0 returns long before its bound, and says why."""
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        launches = ranks.launches(weights)

        def run(rank: int) -> None:
            if rank == 0:
                launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
                return
            while not ranks.buffers[1][256:].any():
                time.sleep(0)
            ranks.channels[1].abort()

        started = time.monotonic()
        on_threads(2, run)
        assert time.monotonic() - started < END_SECONDS
        assert ranks.faults() == [Fault.host_abort(1)] * 2


def test_abort_keeps_an_earlier_fault() -> None:
    with ThreadRanks(SHAPE) as ranks:
        ranks.channels[0].abort()
        ranks.channels[1].abort()
        assert ranks.faults() == [Fault.host_abort(0)] * 2


def test_abort_after_close_is_silent() -> None:
    ranks = ThreadRanks(SHAPE)
    ranks.close()
    ranks.channels[0].abort()


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_injected_fault(delay: float, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        for channel in ranks.channels:
            channel.inject_fault(1, delay)
        started = time.monotonic()
        ranks.run(ranks.launches(weights, layer=LAYER), random_inputs(SHAPE, 3, generator))
        assert delay <= time.monotonic() - started < END_SECONDS
        assert ranks.faults() == [Fault(True, 1, 0, Site.INJECT, None, LAYER)] * 2


def test_injection_later_than_the_bound(short: ThreadRanks, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """The peer's wait runs out first; the standing rank sees that and ends before its delay does."""
    for channel in short.channels:
        channel.inject_fault(1, 2.0)
    started = time.monotonic()
    short.run(short.launches(weights, layer=LAYER), random_inputs(SHAPE, 3, generator))
    assert time.monotonic() - started < 2.0
    # Rank 1's second block did push: the blocks that have all they need of stage reduce wait for their own rank's other block instead.
    waits = {(Site.REDUCE, 1), (Site.NORM, None), (Site.ROUTER, None)}
    for fault in short.faults():
        assert fault.failed
        assert (fault.site, fault.peer) in waits


def test_injection_elsewhere_changes_nothing(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    with ThreadRanks(SHAPE) as ranks:
        ranks.channels[0].inject_fault(1)
        ranks.run(ranks.launches(weights), random_inputs(SHAPE, 3, generator))
        assert not any(fault.failed for fault in ranks.faults())
        ranks.channels[1].inject_fault(1)
        ranks.channels[1].inject_fault(None)
        ranks.run(ranks.launches(weights), random_inputs(SHAPE, 3, generator))
        assert not any(fault.failed for fault in ranks.faults())


def test_the_handshake_spreads_a_fault_that_one_rank_knows(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """Rank 1 alone has its fault word set: at the step's end rank 0 knows too, as reported by its peer."""
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=WAIT) as ranks:
        ranks.channels[0].epoch_words[0] = 9
        ranks.channels[1].epoch_words[0] = 9
        launches = ranks.launches(weights, layer=LAYER)
        ranks.buffers[1][:16] = torch.frombuffer(bytearray(Fault(True, 1, 4, Site.NORM).encode()), dtype=torch.uint8)
        ranks.run(launches, inputs, handshake=True)
        faults = ranks.faults()
        assert faults[1] == Fault(True, 1, 4, Site.NORM)
        # Rank 0 waits in vain for rank 1's triples, or is told by the handshake; rank 1 runs no stage.
        assert faults[0].failed
        assert (faults[0].site, faults[0].rank) in {(Site.REDUCE, 0), (Site.PEER, 1)}


def test_the_handshake_alone(hooks: ctypes.CDLL, weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    """A fault that reaches rank 1 after its last stage is handed over by the flags: rank 0 sets PEER with rank 1's number."""
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=20.0, library=hooks) as ranks:
        launches = ranks.launches(weights, layer=LAYER)
        ranks.withhold(1, Site.HANDSHAKE)

        def run(rank: int) -> None:
            if rank == 0:
                launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
                return
            launches[1](inputs.parts[1], inputs.residual, inputs.slots, handshake=False)
            ranks.buffers[1][:16] = torch.frombuffer(bytearray(Fault(True, 1, 0, Site.EPOCH).encode()), dtype=torch.uint8)
            ranks.withhold(1, None)
            # Epoch 0 again: the handshake of the launch that rank 0 is still in.
            ranks.channels[1].epoch_words[0] = 0
            launches[1](inputs.parts[1], inputs.residual, inputs.slots, handshake=True)

        on_threads(2, run)
        assert ranks.faults() == [Fault(True, 1, 0, Site.PEER, None, LAYER), Fault(True, 1, 0, Site.EPOCH)]


def test_two_threads_on_one_channel(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    inputs = random_inputs(SHAPE, 2, generator)
    with ThreadRanks(SHAPE, wait_seconds=60.0) as ranks:
        launches = ranks.launches(weights)

        def run(rank: int) -> None:
            if rank == 0:
                launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
                return
            while not ranks.buffers[1][256:].any():
                time.sleep(0)
            with pytest.raises(ResourceBusy, match="rank 0"):
                launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
            launches[1](inputs.parts[1], inputs.residual, inputs.slots, handshake=True)

        on_threads(2, run)
        assert not any(fault.failed for fault in ranks.faults())


def test_close_is_idempotent_and_final(weights: tuple[FfnWeights, ...], generator: torch.Generator) -> None:
    ranks = ThreadRanks(SHAPE)
    launches = ranks.launches(weights)
    ranks.close()
    ranks.close()
    inputs = random_inputs(SHAPE, 2, generator)
    with pytest.raises(ResourceClosed):
        launches[0](inputs.parts[0], inputs.residual, inputs.slots, handshake=True)
    with pytest.raises(ResourceClosed):
        ranks.channels[0].health()
