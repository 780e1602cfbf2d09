"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """``torch.empty`` gives NaN and -1 instead of whatever was there, so that an output nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260801)
