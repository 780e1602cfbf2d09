"""The command line of the checker: worlds, mutants, recordings, random runs."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from m3_core.check.explorer import Result, explore
from m3_core.check.mutants import MUTANTS, Mutant
from m3_core.check.properties import timeline
from m3_core.check.scopes import SCOPES, Checked
from m3_core.check.simulator import Failure, Outcome, Setup, SimulationError, simulate
from m3_core.check.traces import check, read
from m3_core.errors import ConfigurationError

T = TypeVar("T")
R = TypeVar("R")


def _each(function: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    if jobs == 1 or len(items) == 1:
        yield from map(function, items)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(function, items)


def _named(items: Iterable[T], names: Sequence[str], name_of: Callable[[T], str]) -> list[T]:
    by_name = {name_of(item): item for item in items}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigurationError(f"unknown {', '.join(unknown)}; known: {', '.join(by_name)}")
    return [by_name[name] for name in names]


# Tables cannot be sent to another process; names can.


def check_scope(name: str) -> Result:
    """Explore the world of ``SCOPES`` that is called ``name``."""
    checked = _named(SCOPES, [name], lambda checked: checked.name)[0]
    return explore(checked.rules, checked.scope)


def check_mutant(name: str) -> Result:
    """Explore the wrong protocol of ``MUTANTS`` that is called ``name``."""
    mutant = _named(MUTANTS, [name], lambda mutant: mutant.name)[0]
    return explore(mutant.rules, mutant.scope)


def _row(name: str, result: Result, verdict: str) -> str:
    return f"{name:32} {result.states:>10,} {result.transitions:>12,} {result.depth:>6} {result.seconds:>8.1f}  {verdict}"


HEAD = f"{'world':32} {'states':>10} {'transitions':>12} {'depth':>6} {'seconds':>8}  verdict"


def _run_scopes(scopes: Sequence[Checked], jobs: int) -> int:
    broken = 0
    print(HEAD, flush=True)
    for checked, result in zip(scopes, _each(check_scope, [checked.name for checked in scopes], jobs), strict=True):
        verdict = "every property holds" if result.broken is None else f"BROKEN {result.broken.name}: {result.broken.value}"
        print(_row(checked.name, result, verdict), flush=True)
        if result.broken is not None:
            broken += 1
            print(timeline(result.trace, checked.scope.ranks))
    return 1 if broken else 0


def _run_mutants(mutants: Sequence[Mutant], jobs: int, *, traces: bool) -> int:
    missed = 0
    print(HEAD.replace("world ", "mutant"), flush=True)
    for mutant, result in zip(mutants, _each(check_mutant, [mutant.name for mutant in mutants], jobs), strict=True):
        caught = result.broken is mutant.breaks
        missed += not caught
        verdict = f"caught by {mutant.breaks.name}: {mutant.change}" if caught else f"MISSED: {mutant.change}"
        print(_row(mutant.name, result, verdict), flush=True)
        if traces:
            print(timeline(result.trace, mutant.scope.ranks))
    print(f"{len(mutants) - missed} of {len(mutants)} caught")
    return 1 if missed else 0


def _run_trace(path: Path) -> int:
    try:
        records = read(path)
    except OSError as error:
        raise ConfigurationError(f"the recording {path} cannot be read: {error.strerror}; pass a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the recording {path} is no text: {error}; pass a file of JSON lines") from error
    problems = check(records)
    ranks = len({record.rank for record in records})
    print(f"{path}: {len(records)} events of {ranks} ranks, " + (f"{len(problems)} problems" if problems else "the protocol allows it"))
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def simulated(seed: int, **fixed: object) -> Setup:
    """A run whose size and failure follow from the seed; ``fixed`` overrides fields of ``Setup``."""
    chance = random.Random(seed)
    values: dict[str, object] = {
        "ranks": chance.choice((1, 2, 2, 4)),
        "blocks": chance.choice((1, 2, 3)),
        "layers": chance.choice((1, 2, 3)),
        "steps": chance.choice((40, 80, 120)),
        "channels": chance.choice((1, 1, 2)),
        "max_rows": chance.choice((1, 2)),
        "hidden": chance.choice((6, 8)),
        "failure": chance.choice((None, *Failure)),
    }
    return Setup(seed=seed, **{**values, **fixed})  # type: ignore[arg-type]


def _simulate(setup: Setup) -> Outcome | str:
    try:
        return simulate(setup)
    except SimulationError as error:
        return str(error)


def _run_simulations(first: int, count: int | None, seconds: float | None, jobs: int) -> int:
    end = None if seconds is None else time.monotonic() + seconds
    failed = done = 0
    batch = max(jobs, 8)
    # At least one batch, so that a short time never passes without a run.
    while done == 0 or ((count is None or done < count) and (end is None or time.monotonic() < end)):
        size = batch if count is None else min(batch, count - done)
        seeds = range(first + done, first + done + size)
        for seed, outcome in zip(seeds, _each(_simulate, [simulated(seed) for seed in seeds], jobs), strict=True):
            done += 1
            if isinstance(outcome, str):
                failed += 1
                print(f"seed {seed}: {outcome}")
            else:
                print(f"seed {seed}: tokens {outcome.tokens} resets {outcome.resets} faulted {outcome.faulted} stopped {outcome.stopped}")
    print(f"{done - failed} of {done} runs keep every property")
    return 1 if failed else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--scope", action="append", default=[], metavar="NAME", help="explore this world only (may be repeated)")
    parser.add_argument("--large", action="store_true", help="explore the worlds that take minutes, too")
    parser.add_argument("--mutants", action="store_true", help="explore the wrong protocols; every one has to be caught")
    parser.add_argument("--mutant", action="append", default=[], metavar="NAME", help="explore this wrong protocol and print its trace")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="check a recorded run (JSON lines, see m3_core.check.traces)")
    parser.add_argument("--simulate", type=int, metavar="COUNT", help="run COUNT random simulations")
    parser.add_argument("--seconds", type=float, metavar="SECONDS", help="run random simulations until the time is over")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="the first seed of the simulations (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--list", action="store_true", help="list worlds and mutants")


def run(options: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit status: 0 if everything holds, 1 if not.

    Raises:
        ConfigurationError: for a name that does not exist, or a recording that cannot be read.
    """
    if options.jobs < 1:
        raise ConfigurationError(f"--jobs is {options.jobs}; pass at least 1")
    if options.simulate is not None and options.simulate < 1:
        raise ConfigurationError(f"--simulate is {options.simulate}; pass at least 1")
    if options.seconds is not None and not options.seconds > 0:
        raise ConfigurationError(f"--seconds is {options.seconds}; pass a number above 0")
    if options.list:
        for checked in SCOPES:
            print(f"{checked.name:32} {checked.about}{' (large)' if checked.large else ''}")
        for mutant in MUTANTS:
            print(f"{mutant.name:32} {mutant.change}")
        return 0
    if options.trace is not None:
        return _run_trace(options.trace)
    if options.simulate is not None or options.seconds is not None:
        return _run_simulations(options.seed, options.simulate, options.seconds, options.jobs)
    if options.mutant:
        return _run_mutants(_named(MUTANTS, options.mutant, lambda mutant: mutant.name), options.jobs, traces=True)
    if options.mutants:
        return _run_mutants(MUTANTS, options.jobs, traces=False)
    scopes = _named(SCOPES, options.scope, lambda checked: checked.name) if options.scope else SCOPES
    return _run_scopes([checked for checked in scopes if options.scope or options.large or not checked.large], options.jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checker; returns the exit status: 0 if everything holds, 1 if not, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m m3_core.check", description="Check the m3 protocol.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except ConfigurationError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
