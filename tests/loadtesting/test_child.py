from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from stoker.devices.cpu import cpu_s_of
from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.server_process import served_in_child


def announcing(options: str, announce: Callable[[tuple[str, int]], None]) -> None:
    """Say what came in and from where, then wait to be ended."""
    announce((options, os.getpid()))
    time.sleep(60)


def refusing(options: str, announce: Callable[[str], None]) -> None:
    """Fail before being up."""
    raise BadJob(f"no {options}", remedy="another")


def ending(options: str, announce: Callable[[str], None]) -> None:
    """End without a word."""


def test_a_service_runs_in_a_process_of_its_own_and_ends_with_the_block() -> None:
    """It got its options, its number is reported, and afterwards it is gone."""
    with served_in_child(announcing, "this") as (said, pid):
        assert said == ("this", pid)
        assert pid != os.getpid()
        assert cpu_s_of([pid]) > 0
    assert cpu_s_of([pid]) == 0


def test_what_a_service_raises_is_raised_here() -> None:
    """With its message and its remedy."""
    with pytest.raises(ServiceError, match="no model\nanother"), served_in_child(refusing, "model"):
        pass


def test_a_service_that_just_ends_is_told() -> None:
    """Instead of waiting for it for ever."""
    with pytest.raises(ServiceError, match="ended before it was up"), served_in_child(ending, ""):
        pass
