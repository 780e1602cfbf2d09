"""Compile the code objects of the published shapes into the package: ``python -m m3_kernels.build.objects``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from m3_core.work import WORLD_SIZES
from m3_kernels.build.cuda import OWN_BUFFER, ROW_BOUNDS, CudaBuild, nvcc, shipped_folder

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 6144, 3072, 128, 4


def published(world_sizes: Sequence[int], rows: Sequence[int], defines: tuple[str, ...] = ()) -> list[CudaBuild]:
    """MiniMax-M3's builds at the given tensor-parallel sizes and row bounds."""
    return [CudaBuild(bound, HIDDEN, INTERMEDIATE // world, EXPERTS, TOP_K, world, defines) for world in world_sizes for bound in rows]


def write(builds: Sequence[CudaBuild], jobs: int) -> int:
    """Compile what the folder of shipped objects lacks and remove what no build wants there; returns how many were compiled."""
    folder = shipped_folder()
    folder.mkdir(exist_ok=True)
    wanted = {folder / f"{build.name(build.key())}.cubin": build for build in builds}
    for path in folder.glob("*.cubin"):
        if path not in wanted:
            path.unlink()
    missing = [(path, build) for path, build in wanted.items() if not path.is_file()]
    compiler = nvcc()

    def make(path_and_build: tuple[os.PathLike[str], CudaBuild]) -> None:
        path, build = path_and_build
        temporary = folder / f".{os.path.basename(path)}"
        build.compile(compiler, temporary)
        os.replace(temporary, path)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, missing))
    return len(missing)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m m3_kernels.build.objects", description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", choices=WORLD_SIZES, default=list(WORLD_SIZES), help="tensor-parallel sizes")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROW_BOUNDS, default=list(ROW_BOUNDS), help="row bounds")
    parser.add_argument("--own-buffer", action="store_true", help="also the builds that measure one rank alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args()
    builds = published(options.tp, options.rows)
    if options.own_buffer:
        builds += published(options.tp, options.rows, (OWN_BUFFER,))
    print(f"{write(builds, options.jobs)} of {len(builds)} code objects compiled into {shipped_folder()}")


if __name__ == "__main__":
    main()
