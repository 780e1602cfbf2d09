"""The ``m3`` command: one module a sub-command, each with ``add_arguments(parser)`` and ``run(arguments) -> exit code``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from m3_core.errors import M3Error

COMMANDS: dict[str, str] = {
    "check": "explore the protocol's small worlds, or check a recorded run",
    "demo": "serve a tiny MiniMax-M3 with the real vLLM, fused against stock",
    "doctor": "import and try every layer of m3 on this machine",
    "flight": "merge the ranks' flight records and name the first stall",
    "tiny": "write a tiny random MiniMax-M3 checkpoint",
}
"""Sub-command (also the name of its module here) and its one-line help."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="m3", description="MiniMax-M3 at decode with one launch per sparse layer")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        import_module(f"{__name__}.{name}").add_arguments(commands.add_parser(name, help=summary, description=summary))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        Its exit code; 1 with the message on stderr where it raised one of m3's own errors.
    """
    arguments = _parser().parse_args(argv)
    command = import_module(f"{__name__}.{arguments.command}")
    try:
        return int(command.run(arguments))
    except M3Error as error:
        print(f"m3 {arguments.command}: {error}", file=sys.stderr)
        return 1
