"""``m3 flight``: what the ranks did before a fault, on one timeline, and where the first wait stalled."""

from __future__ import annotations

import argparse
from pathlib import Path

from m3_comm.flight_report import DEFAULT_LAST, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and how much of them to show."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="flight records of one run, or a folder of them")
    parser.add_argument(
        "--last", type=int, default=DEFAULT_LAST, metavar="N", help="show the last N records (default: %(default)s; 0: none)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the merged timeline and the first stall.

    Raises:
        ConfigurationError: a file is no flight record, or the files are not of one run.
    """
    print(read(arguments.files).render(arguments.last))
    return 0
