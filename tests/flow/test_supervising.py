"""What is told of the processes of a run, in words for who waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.flow.supervising import Listener
from stoker.launching.breakup import CALLED
from stoker.reporting import telling
from tests.flow.builders import Heard


def told(what: str, **fields: Any) -> str:
    """The line that is shown."""
    heard = Heard()
    Listener([heard]).on_loss(what, fields)
    (event,) = heard
    return telling.told(event)


@pytest.mark.parametrize(
    ("count", "why", "expected"),
    [
        (2, CALLED, "recovered at 0 samples: 2 processes go on, because another one is back"),
        (1, "process 1 is lost", "recovered at 0 samples: one process goes on, because process 1 is lost"),
    ],
)
def test_it_is_said_why_processes_met_again(count: int, why: str, expected: str) -> None:
    """Not in the words that they have among themselves."""
    assert told("met", generation=2, workers=list(range(count)), why=why, seconds=1.0) == expected
