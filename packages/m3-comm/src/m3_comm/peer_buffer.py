"""One buffer a rank, each mapped by every rank of the node.

Construction is collective and goes through joint stages: check, allocate, exchange, open, probe, ready. A stage that fails on one rank
fails on all of them, and each error names that rank and its reason. Whatever a rank acquired is released on every failure path.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import attrs
import structlog
import torch

import m3_comm
from m3_comm import probe
from m3_comm.agreement import describe, joint_stage
from m3_comm.transports.base import Allocation, DeviceTransport, Mapping
from m3_comm.views import GuardedBytes
from m3_core.agreement import Agreement, Verdict
from m3_core.errors import CollectiveError, ConfigurationError, ResourceClosed, ResourceError
from m3_core.ports import AgreementChannel

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Stage(Enum):
    """The joint stages of construction, in order; the values are the phases' names."""

    CHECK = "peer-buffer/check"
    ALLOCATE = "peer-buffer/allocate"
    EXCHANGE = "peer-buffer/exchange"
    OPEN = "peer-buffer/open"
    PROBE_WRITE = "peer-buffer/probe-write"
    PROBE_READ = "peer-buffer/probe-read"
    READY = "peer-buffer/ready"


RELEASED_PHASE = "peer-buffer/released"
"""After a failure: no rank has a mapping any more. Only for transports whose memory may not be freed before."""


@attrs.define(eq=False)
class _Resources:
    """What one rank holds; outlives the ``PeerBuffer`` so that a finaliser can release it.

    Attributes:
        process: only the process that acquired the memory may use or release it; a forked child may not.
        allocation: the own memory, released last.
        mappings: the peers' memory by rank.
        closed: set before anything is released.
        lock: only one thread releases.
    """

    transport: DeviceTransport
    process: int
    allocation: Allocation | None = None
    mappings: dict[int, Mapping] = attrs.field(factory=dict)
    closed: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def check_open(self) -> None:
        if self.closed:
            raise ResourceClosed("peer buffer used after close(): build a new one, on all ranks together")
        if os.getpid() != self.process:
            raise ResourceClosed(f"peer buffer of process {self.process} used in its forked child {os.getpid()}: build one there")

    def release(self) -> list[str]:
        """Close the mappings, then free the memory; go on after a failure. Returns what failed; nothing the second time."""
        return self.close_mappings() + self.free()

    def close_mappings(self) -> list[str]:
        """The first half of ``release``; from here on nothing may be used."""
        self.closed = True
        problems = []
        for rank, mapping in self._take_mappings():
            try:
                self.transport.close(mapping)
            except Exception as error:  # the rest must still be released
                problems.append(f"mapping of rank {rank}: {describe(error)}")
        return problems

    def free(self) -> list[str]:
        """The second half of ``release``."""
        with self.lock:
            allocation, self.allocation = self.allocation, None
        if allocation is None or os.getpid() != self.process:
            return []
        try:
            self.transport.free(allocation)
        except Exception as error:
            return [f"own memory: {describe(error)}"]
        return []

    def _take_mappings(self) -> list[tuple[int, Mapping]]:
        with self.lock:
            mappings, self.mappings = sorted(self.mappings.items()), {}
        return mappings if os.getpid() == self.process else []


class PeerBuffer:
    """This rank's buffer and its view of every peer's; made by ``create``.

    Attributes:
        rank: this rank.
        world_size: ranks that share.
        nbytes: bytes of each buffer, as asked for.
    """

    def __init__(self, resources: _Resources, rank: int, world_size: int, nbytes: int) -> None:
        """Wrap what the stages acquired; ``create`` is the way to make one."""
        assert resources.allocation is not None
        self.rank = rank
        self.world_size = world_size
        self.nbytes = nbytes
        self._resources = resources
        self._local = resources.allocation.address
        self._addresses = _addresses(resources, rank, world_size)
        self._table = torch.tensor(self._addresses, dtype=torch.int64, device=resources.transport.device)
        self._bytes = GuardedBytes.over(resources.transport.view(self._local, nbytes), resources.check_open)
        self._finalizer = weakref.finalize(self, _finalize, resources)

    @classmethod
    def create(
        cls, channel: AgreementChannel, transport: DeviceTransport, nbytes: int, *, fingerprint: MappingType[str, str | int] | None = None
    ) -> PeerBuffer:
        """Build the buffers of all ranks together; every rank of the channel must call it at the same point.

        Args:
            channel: the ranks; a lone rank passes ``LocalAgreement``.
            transport: how they share memory.
            nbytes: size of each buffer; the allocation is rounded up to whole pages.
            fingerprint: whatever must be equal on all ranks, such as the layout's version and shape. Size, number of ranks,
                transport and package version are always compared.

        Returns:
            A buffer of zeroed bytes, known to work between every two ranks.

        Raises:
            CollectiveError: on every rank, if a stage failed on any; all that was acquired has been released.
        """
        rank, world_size = channel.rank, channel.world_size
        resources = _Resources(transport, os.getpid())
        label = ""
        try:
            label, seed = _check(channel, transport, nbytes, fingerprint or {})

            def allocate() -> None:
                resources.allocation = transport.allocate(nbytes, label)

            joint_stage(channel, Stage.ALLOCATE.value, allocate)
            handles = joint_stage(channel, Stage.EXCHANGE.value, lambda: transport.export(_present(resources.allocation)))

            def open_peers() -> None:
                for peer, handle in enumerate(handles):
                    if peer != rank:
                        resources.mappings[peer] = _open(transport, peer, handle, _present(resources.allocation).nbytes)

            joint_stage(channel, Stage.OPEN.value, open_peers)
            allocation = _present(resources.allocation)
            addresses = _addresses(resources, rank, world_size)

            def write() -> None:
                transport.unlink(allocation)
                probe.write(transport, seed, rank, addresses, allocation.nbytes)

            joint_stage(channel, Stage.PROBE_WRITE.value, write)

            def read() -> None:
                problems = probe.read(transport, seed, rank, allocation.address, addresses, allocation.nbytes)
                if problems:
                    raise ResourceError("; ".join(problems))

            joint_stage(channel, Stage.PROBE_READ.value, read)
            buffers: list[PeerBuffer] = []

            def finish() -> None:
                probe.clear(transport, allocation.address, world_size, allocation.nbytes)
                buffers.append(cls(resources, rank, world_size, nbytes))

            joint_stage(channel, Stage.READY.value, finish)
        except BaseException as error:
            problems = resources.close_mappings()
            if transport.frees_after_peers and isinstance(error, CollectiveError):
                # Every rank that is left comes here; one that does not come any more has no use for its mapping either.
                with contextlib.suppress(CollectiveError):
                    channel.gather(RELEASED_PHASE, b"")
            for problem in problems + resources.free():
                log.error("peer_buffer_release_failed", rank=rank, problem=problem)
            if label:
                transport.sweep(label)
            raise
        log.info("peer_buffer_ready", rank=rank, world_size=world_size, nbytes=nbytes, transport=transport.name)
        return buffers[0]

    @property
    def local(self) -> int:
        """Address of this rank's buffer; raises ResourceClosed after ``close``."""
        self._resources.check_open()
        return self._local

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all buffers as this rank sees them, by rank, the own one included; raises ResourceClosed after ``close``."""
        self._resources.check_open()
        return self._addresses

    @property
    def address_table(self) -> torch.Tensor:
        """``addresses`` as an int64 tensor [world_size] on the transport's device; raises ResourceClosed after ``close``."""
        self._resources.check_open()
        return self._table

    @property
    def bytes(self) -> torch.Tensor:
        """The own buffer as a uint8 tensor [nbytes] that does not own it.

        After ``close`` the property and every operation on a view taken earlier raise ResourceClosed; ``GuardedBytes`` says what
        escapes that.
        """
        self._resources.check_open()
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._resources.closed

    def close(self) -> None:
        """Close the mappings, then free the own memory. Does nothing the second time.

        Call it when no kernel of any rank can touch the buffers any more. It is no collective: a peer may still have this rank's
        memory mapped, but must not touch it.

        Raises:
            ResourceError: something could not be released; the rest has been.
        """
        problems = self._resources.release()
        self._finalizer.detach()
        if problems:
            raise ResourceError("peer buffer was not released completely: " + "; ".join(problems))

    def __enter__(self) -> PeerBuffer:
        """Nothing more than the buffer."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


def _finalize(resources: _Resources) -> None:
    problems = resources.release()
    if problems:
        log.error("peer_buffer_release_failed", problems=problems)


def _present(value: T | None) -> T:
    assert value is not None
    return value


def _addresses(resources: _Resources, rank: int, world_size: int) -> tuple[int, ...]:
    local = _present(resources.allocation).address
    return tuple(local if r == rank else resources.mappings[r].address for r in range(world_size))


def _open(transport: DeviceTransport, peer: int, handle: bytes, nbytes: int) -> Mapping:
    try:
        mapping = transport.open(handle)
    except Exception as error:
        raise ResourceError(f"memory of rank {peer}: {describe(error)}") from error
    if mapping.nbytes < nbytes:
        transport.close(mapping)
        raise ResourceError(f"memory of rank {peer}: {mapping.nbytes} bytes are mapped, {nbytes} are needed")
    return mapping


def _check(channel: AgreementChannel, transport: DeviceTransport, nbytes: int, fingerprint: MappingType[str, str | int]) -> tuple[str, int]:
    """Compare all ranks' arguments; return a label and a seed of this construction, both drawn by rank 0."""

    def check() -> bytes:
        if nbytes < probe.WORD_BYTES * channel.world_size:
            raise ConfigurationError(
                f"peer buffer of {nbytes} bytes: at least {probe.WORD_BYTES * channel.world_size} are needed for {channel.world_size} ranks"
            )
        facts: dict[str, str | int] = {
            "m3_comm version": m3_comm.__version__,
            "transport": transport.name,
            "world_size": channel.world_size,
            "nbytes": nbytes,
            **transport.traits,
            **fingerprint,
        }
        return json.dumps([secrets.randbits(64), facts]).encode()

    answers = [json.loads(answer) for answer in joint_stage(channel, Stage.CHECK.value, check)]
    Agreement(Stage.CHECK.value, compare([facts for _, facts in answers])).require(channel.rank)
    seed: int = answers[0][0]
    return f"{seed:016x}", seed


def compare(answers: Sequence[MappingType[str, object]]) -> tuple[Verdict, ...]:
    """A verdict for each rank: ready, or every entry in which it differs from what most ranks have (of equal counts, the lowest rank's)."""
    reasons: list[list[str]] = [[] for _ in answers]
    for key in dict.fromkeys(key for answer in answers for key in answer):
        values = [json.dumps(answer[key]) if key in answer else "absent" for answer in answers]
        usual = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(values) if value == usual]
        for rank, value in enumerate(values):
            if value != usual:
                reasons[rank].append(f"{key} is {value}, on rank(s) {others} it is {usual}")
    return tuple(Verdict(rank, "; ".join(texts) or None) for rank, texts in enumerate(reasons))
