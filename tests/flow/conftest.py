"""Every test of a flow has a folder of its own to run in, with its own runs and cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_folder(place: Path) -> None:
    """No test of a flow leaves anything elsewhere."""
