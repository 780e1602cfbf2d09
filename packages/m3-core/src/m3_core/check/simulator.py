"""Long random runs of many ranks, on real words in real layouts, replayable from one seed.

Every rank is written out here as documentation would have it: it computes offsets with ``PeerLayout``, packs words with
``m3_core.words``, tags them with ``TagArithmetic``, and moves the tables of ``m3_core`` through its life. Only memory is simulated: each
store takes a random time to become visible, and stores to different addresses arrive in any order. Payloads differ for every rank,
epoch, row and column, and are compared exactly.
"""

from __future__ import annotations

import hashlib
from enum import Enum, unique

import attrs

from m3_core.check.ranks import Rank
from m3_core.check.scheduler import Scheduler
from m3_core.check.traces import Record, check
from m3_core.epochs import TagArithmetic
from m3_core.errors import ConfigurationError
from m3_core.layout import ChannelLayout, PeerLayout
from m3_core.lifecycle import Life


@unique
class Failure(Enum):
    """What may go wrong in a run, at a random time."""

    STOP = "a rank stops for ever"
    STALL = "a rank stalls, longer or shorter than waits are bounded"
    ABORT = "a host aborts"
    LATE_STORE = "a store takes longer than waits are bounded"
    BREAK = "a rank's own part of a reset fails"


SIMULATED_TAGS = TagArithmetic(pair_bits=32, triple_bits=6, parities=2, limit_slack=16, reset_slack=48)
"""Period 128, limit 112, reset after 80 launches: thousands of steps pass many resets."""


@attrs.frozen
class Setup:
    """A run.

    Attributes:
        seed: everything random follows from it.
        ranks: 1, 2, 4 or 8.
        blocks: blocks of a launch.
        layers: launches a step.
        steps: steps to run, if nothing fails.
        channels: independent channels; each runs every launch of a step.
        max_rows: the widest step.
        hidden: hidden size; small, it only multiplies words.
        tags: epoch arithmetic.
        failure: what goes wrong, once; None for a run that must not fail.
        wait_seconds: the bound of every wait, in virtual seconds.
    """

    seed: int
    ranks: int = 4
    blocks: int = 2
    layers: int = 3
    steps: int = 1000
    channels: int = 1
    max_rows: int = 2
    hidden: int = 6
    tags: TagArithmetic = SIMULATED_TAGS
    failure: Failure | None = None
    wait_seconds: float = 10.0

    def __attrs_post_init__(self) -> None:
        for name in ("blocks", "layers", "steps"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; a run has at least one")
        if self.layers > self.tags.reset_launches:
            raise ConfigurationError(
                f"layers is {self.layers}; a step must fit between resets, {self.tags.reset_launches} launches with these tags"
            )


class SimulationError(AssertionError):
    """A run that broke a property; the message names the seed that replays it."""


@attrs.frozen
class Outcome:
    """What a run did.

    Attributes:
        tokens: steps whose tokens each rank returned.
        resets: resets that each rank resumed from.
        faulted: ranks that ended in a fault.
        stopped: ranks that stopped for ever.
        records: every event, in the order of virtual time.
        digest: SHA-256 of the events; equal for equal setups.
        faults: for each faulted rank, the sentence for the user.
    """

    tokens: tuple[int, ...]
    resets: tuple[int, ...]
    faulted: tuple[int, ...]
    stopped: tuple[int, ...]
    records: tuple[Record, ...]
    digest: str
    faults: tuple[str, ...] = ()


class World:
    """What the ranks of a run share: memory, time, and the verdicts of resets."""

    def __init__(self, setup: Setup) -> None:
        """Zeroed memory; nothing runs yet."""
        self.setup = setup
        self.layout = PeerLayout(setup.ranks, setup.max_rows, setup.hidden)
        self.channels = ChannelLayout(setup.channels, self.layout)
        self.scheduler = Scheduler(setup.seed)
        self.memory = [bytearray(self.channels.total_bytes) for _ in range(setup.ranks)]
        self._inboxes: dict[tuple[int, int, str], dict[int, str | None]] = {}
        self.records: list[Record] = []
        self._arrivals: dict[tuple[int, int, int], float] = {}
        self.late_store_at: float | None = None
        self.ranks = [Rank(self, rank) for rank in range(setup.ranks)]

    def record(self, record: Record) -> None:
        """Append an event at the present time."""
        self.records.append(attrs.evolve(record, time=self.scheduler.now))

    def rows(self, step: int) -> int:
        """Rows of a step: a fact that all ranks share."""
        return 1 + (step * 2654435761 % 2**32) * self.setup.max_rows // 2**32

    def store(self, source: int, owner: int, offset: int, word: int) -> None:
        """A 64-bit store by ``source`` into the memory of ``owner``; it becomes visible later, and once more seldom much later."""
        scheduler = self.scheduler
        delay = scheduler.random.expovariate(1e6)
        if self.late_store_at is not None and scheduler.now >= self.late_store_at and source != owner:
            self.late_store_at = None
            delay = 3 * self.setup.wait_seconds
        # Stores of one source to one address keep their order.
        due = max(scheduler.now + delay, self._arrivals.get((source, owner, offset), 0.0))
        self._arrivals[source, owner, offset] = due

        def arrive() -> None:
            self.memory[owner][offset : offset + 8] = word.to_bytes(8, "little")
            scheduler.changed(owner)

        scheduler.at(due - scheduler.now, arrive)

    def store_ordered(self, source: int, owner: int, first: tuple[int, int], second: tuple[int, int]) -> None:
        """Two stores, of which the second becomes visible after the first."""
        self.store(source, owner, *first)
        key = (source, owner, second[0])
        self._arrivals[key] = max(self._arrivals.get(key, 0.0), self._arrivals[source, owner, first[0]])
        self.store(source, owner, *second)

    def inbox(self, rank: int, reset: int, phase: str) -> dict[int, str | None]:
        """The verdicts of a phase that have reached ``rank``, by sender."""
        return self._inboxes.setdefault((rank, reset, phase), {})

    def send(self, source: int, rank: int, reset: int, phase: str, reason: str | None) -> None:
        """Send a verdict; it arrives later."""

        def arrive() -> None:
            self.inbox(rank, reset, phase)[source] = reason
            self.scheduler.changed(rank)

        self.scheduler.at(self.scheduler.random.expovariate(1e4), arrive)

    def load(self, owner: int, offset: int) -> int:
        """A 64-bit load by the owner."""
        return int.from_bytes(self.memory[owner][offset : offset + 8], "little")


def simulate(setup: Setup) -> Outcome:
    """Run ``setup`` to its end.

    Raises:
        SimulationError: if a rank reads a wrong value, waits for ever, fails without a failure, returns a token it must not return, or the
            recorded events break the protocol.
    """
    world = World(setup)
    for rank in world.ranks:
        world.scheduler.start(rank.rank, rank.host())
    stopped: list[int] = []
    if setup.failure is not None:
        _plan_failure(world, setup.failure, stopped)
    try:
        world.scheduler.run()
    except Exception as error:
        raise SimulationError(f"seed {setup.seed} of {setup}: {type(error).__name__}: {error}") from error
    problems = _problems(world, stopped)
    if problems:
        raise SimulationError(f"seed {setup.seed} of {setup}: " + "; ".join(problems[:5]))
    lines = "\n".join(record.to_json() for record in world.records)
    return Outcome(
        tuple(rank.returned for rank in world.ranks),
        tuple(rank.resumed for rank in world.ranks),
        tuple(rank.rank for rank in world.ranks if rank.life.state is Life.FAULTED),
        tuple(stopped),
        tuple(world.records),
        hashlib.sha256(lines.encode()).hexdigest(),
        tuple(
            rank.fault(channel).describe()
            for rank in world.ranks
            for channel in range(setup.channels)
            if rank.life.state is Life.FAULTED and rank.fault(channel).failed
        ),
    )


def _plan_failure(world: World, failure: Failure, stopped: list[int]) -> None:
    """Let ``failure`` happen at a random time, to a random rank."""
    setup, scheduler = world.setup, world.scheduler
    chance = scheduler.random
    victim = world.ranks[chance.randrange(setup.ranks)]
    # A launch takes some ten to thirty virtual microseconds.
    when = chance.random() * setup.steps * setup.layers * 2e-5

    def happen() -> None:
        if failure is Failure.STOP:
            stopped.append(victim.rank)
            scheduler.stop(victim.rank)
        elif failure is Failure.STALL:
            scheduler.stall(victim.rank, setup.wait_seconds * chance.choice((0.1, 3.0)))
        elif failure is Failure.ABORT:
            victim.abort()
        elif failure is Failure.BREAK:
            victim.breaks_next_reset = True
        else:
            world.late_store_at = scheduler.now

    scheduler.at(when, happen)


def _problems(world: World, stopped: list[int]) -> list[str]:
    setup = world.setup
    problems = [f"rank {rank} waits for ever" for rank in world.scheduler.waiting()]
    live = [rank for rank in world.ranks if rank.rank not in stopped]
    if setup.failure is None:
        problems += [f"rank {rank.rank} returned {rank.returned} of {setup.steps} tokens" for rank in live if rank.returned != setup.steps]
    failed = any(rank.life.state is Life.FAULTED for rank in world.ranks) or stopped
    for rank in live:
        if rank.life.state not in (Life.READY, Life.FAULTED):
            problems.append(f"rank {rank.rank} ends {rank.life.state.name}")
        if failed and rank.life.state is not Life.FAULTED and rank.returned != setup.steps:
            problems.append(f"rank {rank.rank} ends {rank.life.state.name} after {rank.returned} steps, though another rank failed")
    return problems + list(check(world.records))
