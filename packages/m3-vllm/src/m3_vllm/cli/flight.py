"""``m3 flight``: what the ranks did before a fault, on one timeline, and where the first wait stalled; or a run for ``m3 check --trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

from m3_comm.flight_report import DEFAULT_LAST, read
from m3_comm.flight_trace import recording
from m3_core.check.traces import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, how much of them to show, and where to write the run as a recording."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="flight records of one run, or a folder of them")
    parser.add_argument(
        "--last", type=int, default=DEFAULT_LAST, metavar="N", help="show the last N records (default: %(default)s; 0: none)"
    )
    parser.add_argument("--trace", type=Path, metavar="OUT", help="write the run for `m3 check --trace`, which needs all of its records")


def run(arguments: argparse.Namespace) -> int:
    """Print the merged timeline and the first stall.

    Raises:
        ConfigurationError: a file is no flight record, or the files are not of one run; for a recording, they are not the whole run.
    """
    timeline = read(arguments.files)
    if arguments.trace is None:
        print(timeline.render(arguments.last))
        return 0
    events = recording(timeline)
    write(arguments.trace, events)
    print(f"{arguments.trace}: {len(events)} events of {timeline.world_size} ranks")
    return 0
