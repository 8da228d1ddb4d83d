"""Nothing that the tests started outlasts them."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, util
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def ended_forkserver() -> Iterator[None]:
    """The process that ranks are forked from ends first: its coverage is written before that of others is combined."""
    yield
    server: Any = forkserver._forkserver
    server._stop()
    finalizers: Any = util
    finalizers._run_finalizers()  # at exit its folder would be gone: coverage imports multiprocessing before all else
