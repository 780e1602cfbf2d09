"""``m3 check``: the model checker, and the check of recorded runs; all of it is ``m3_core.check``."""

from __future__ import annotations

from m3_core.check.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
