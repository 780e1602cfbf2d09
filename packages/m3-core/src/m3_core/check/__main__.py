"""``python -m m3_core.check``."""

from m3_core.check.cli import main

raise SystemExit(main())
